# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is saved of a model and its optimizer, in which files, and how they are read."""
