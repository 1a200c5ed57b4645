# SPDX-License-Identifier: Apache-2.0
"""Families of models, each a table in its own file; ``hf/family.py`` explains the entries."""
