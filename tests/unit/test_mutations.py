# SPDX-License-Identifier: Apache-2.0
"""A damaged file is refused in a sentence or changes nothing; it runs no code, hangs nothing and changes no number."""

import pytest

from tests.mutation_samples import SAMPLES
from tests.mutations import Sample, trials

pytestmark = pytest.mark.slow

TRIALS = 2  # python -m tests.mutations takes 500 of each


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_damaged_file_changes_no_number_in_silence(sample: Sample) -> None:
    tally = trials(sample, TRIALS)
    assert sum(tally.outcomes.values()) >= TRIALS - 1
    assert tally.faults == []
