# SPDX-License-Identifier: Apache-2.0
"""Families of models, each a table in a file of its own; ``hf/family.py`` says what is in it."""
