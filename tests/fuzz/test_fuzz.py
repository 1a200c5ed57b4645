# SPDX-License-Identifier: Apache-2.0
"""The short walk over random settings; ``make fuzz`` is the long one."""

import pytest

from tests.fuzz.draw import draw
from tests.fuzz.walk import train_all, validate, wrong_refusal

VALIDATED = 400
TRAINED = 12
INTERRUPTED = (10011, 10045, 10118)
"""Two ranks each: fp32 and bf16, experts, a pipeline, Adagrad, another layout that goes on."""


def test_a_draw_depends_on_its_number_alone() -> None:
    assert draw(7) == draw(7) != draw(8)


def test_what_is_refused_is_refused_by_us_in_a_sentence() -> None:
    verdicts = list(validate(range(VALIDATED)))
    assert [str(defect) for pair in verdicts if (defect := wrong_refusal(*pair))] == []
    accepted = sum(verdict.accepted for _, verdict in verdicts)
    assert VALIDATED / 4 < accepted < 3 * VALIDATED / 4  # a walk past refusals alone, or past none, shows nothing


@pytest.mark.distributed
def test_what_trains_resumes_and_validates_alike() -> None:
    defects, checks = train_all([draw(seed) for seed in INTERRUPTED])
    assert [str(defect) for defect in defects] == []
    assert checks["resumed on the same layout"] == len(INTERRUPTED)  # and none of them was refused
    assert checks["resumed on another layout with the same losses"] >= 2
    assert checks["validated on one rank too"] >= 2


@pytest.mark.thorough
@pytest.mark.distributed
def test_what_validation_accepts_trains() -> None:
    # The first of a seed range of its own: the numbers that a longer walk begins with are trained there.
    accepted = [settings for settings, verdict in validate(range(10_000, 10_100)) if verdict.accepted][:TRAINED]
    assert len(accepted) == TRAINED
    assert [str(defect) for defect in train_all(accepted)[0]] == []
