# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed datasets as a data module."""
