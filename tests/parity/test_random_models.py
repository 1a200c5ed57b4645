# SPDX-License-Identifier: Apache-2.0
"""A few random models of every family have transformers' logits; ``python -m tests.random_models`` draws hundreds."""

import pytest

from tests.random_models import TOLERANCE, differences
from tests.support.hf_models import CONFIGS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


def compare(draws: list[tuple[str, int]]) -> list[tuple[str, int, float]]:
    return list(differences(draws))


def test_random_models_have_the_logits_of_transformers() -> None:
    draws = [(family, seed) for family in CONFIGS for seed in (100, 101, 102)]
    [found] = run_ranks(1, compare, draws, timeout=300)
    assert [entry for entry in found if not entry[2] < TOLERANCE] == []
