# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers, and batches of them."""
