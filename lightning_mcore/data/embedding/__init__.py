# SPDX-License-Identifier: Apache-2.0
"""Queries with texts to compare, and batches of them."""
