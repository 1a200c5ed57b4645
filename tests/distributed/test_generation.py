# SPDX-License-Identifier: Apache-2.0
"""``generate`` ends and filters its texts as transformers does with the same settings, on every layout."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mcore import MCoreGPT
from tests.support.hf_models import VOCAB_SIZE, auto_model, tiny_folder
from tests.support.ranks import run_ranks
from tests.support.toy import PP2, SHARDED, TP2, make_trainer, texts

pytestmark = pytest.mark.distributed

PROMPT = [5, 6, 7]
LAYOUTS = {"tp2": TP2, "pp2": PP2, "dp2": SHARDED}


class Speaks(pl.Callback):
    """Continues a prompt with each of some settings."""

    def __init__(self, settings: list[dict[str, Any]]) -> None:
        self.settings = settings
        self.tokens: list[list[int]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.tokens = [pl_module.generate(PROMPT, 5, **setting) for setting in self.settings]


def speak(folder: str, settings: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    """Return what the model says on each layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        speaks = Speaks(settings)
        module = MCoreGPT.from_pretrained(folder, seq_length=8)
        make_trainer(layout, callbacks=[speaks]).validate(module, texts(2, 8, VOCAB_SIZE), verbose=False)
        found[name] = speaks.tokens
    return found


def test_a_text_ends_with_the_tokens_that_end_it_in_transformers() -> None:
    folder = str(tiny_folder("llama"))
    model = auto_model().from_pretrained(folder, dtype=torch.float32)

    def wanted(length: int, **settings: Any) -> list[int]:
        given = torch.tensor([PROMPT])
        said = model.generate(given, max_new_tokens=length, do_sample=False, pad_token_id=0, **settings)
        return said[0].tolist()

    free = wanted(5, eos_token_id=None)  # the last tokens are equal
    ends: list[Any] = [free[4], [free[4], free[3]], min({*range(VOCAB_SIZE)} - {*free})]
    settings: list[dict[str, Any]] = [{"temperature": 0, "eos_token_id": end} for end in ends]
    sampled = {"temperature": 0.8, "top_k": 20, "top_p": 0.6, "seed": 3}
    settings += [sampled, {**sampled, "top_p": 1.0}, {"top_p": 0.0}, {"temperature": 0}]
    ranks = run_ranks(2, speak, folder, settings)
    for name in LAYOUTS:
        for found in ranks:
            *ended, drawn, of_all, most_probable, greedy = found[name]
            assert ended == [wanted(5, eos_token_id=end) for end in ends], name
            assert [len(text) for text in ended] == [5, 4, 8]
            assert most_probable == greedy
            assert drawn != of_all
            assert (drawn, of_all) == tuple(ranks[0]["tp2"][3:5])
