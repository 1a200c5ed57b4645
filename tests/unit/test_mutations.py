# SPDX-License-Identifier: Apache-2.0
"""A damaged file is refused in a sentence or changes nothing; it runs no code, hangs nothing and changes no number."""

import pytest

from tests.mutations import trials
from tests.support.mutation_samples import SAMPLES
from tests.support.thorough import thorough_but

pytestmark = pytest.mark.slow

TRIALS = 2  # python -m tests.mutations takes 500 of each
NAMED = {sample.name: sample for sample in SAMPLES}
STAY = (  # one file of each reader
    "checkpoint checkpoint.json",
    "checkpoint lightning.pt",
    "checkpoint .metadata",
    "checkpoint __0_0.distcp",
    "one-file checkpoint",
    "HF config.json",
    "HF model.safetensors",
    "corpus jsonl",
    "indexed .bin",
    "indexed .idx",
    "chats jsonl",
    "chats tokenizer.json",
    "LLaMA-Factory run.yaml",
    "CLI run.yaml",
)


@pytest.mark.parametrize("name", thorough_but(NAMED, *STAY))
def test_a_damaged_file_changes_no_number_in_silence(name: str) -> None:
    sample = NAMED[name]
    tally = trials(sample, TRIALS)
    assert sum(tally.outcomes.values()) >= TRIALS - 1
    assert tally.faults == []
