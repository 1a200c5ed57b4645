# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in and out, at any layout.

``MCoreGPT.from_pretrained(path)`` starts from one; a family of your own is a :class:`Family` made of these rules.
"""

from lightning_mcore.hf.config_rules import ConfigRule, Constants, Derived, Only, Same, Unused
from lightning_mcore.hf.family import Family
from lightning_mcore.hf.known_families import family_names, find_family
from lightning_mcore.hf.pretrained import load_pretrained, pretrained_settings
from lightning_mcore.hf.weight_rules import (
    Block,
    Experts,
    QueryKeyValue,
    Rename,
    Rows,
    Transpose,
    Vocabulary,
    WeightRule,
)

__all__ = [
    "Block",
    "ConfigRule",
    "Constants",
    "Derived",
    "Experts",
    "Family",
    "Only",
    "QueryKeyValue",
    "Rename",
    "Rows",
    "Same",
    "Transpose",
    "Unused",
    "Vocabulary",
    "WeightRule",
    "family_names",
    "find_family",
    "load_pretrained",
    "pretrained_settings",
]
