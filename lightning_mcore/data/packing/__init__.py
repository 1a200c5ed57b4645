# SPDX-License-Identifier: Apache-2.0
"""Packing: which samples share a row, and rows as tensors."""
