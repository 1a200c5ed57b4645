# SPDX-License-Identifier: Apache-2.0
"""Logging on every rank: steps, auxiliary losses, evaluation."""
