# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what of a model and its optimizer is saved, in which files, and how they are read."""
