# SPDX-License-Identifier: Apache-2.0
"""Ranks: process groups, agreement, random state, the CPU runtime, chunks of a model and how they are cut."""
