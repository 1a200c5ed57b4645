# SPDX-License-Identifier: Apache-2.0
"""``generate`` ends and filters its texts as transformers does with the same settings, on every layout."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import StoppingCriteria

from lightning_mcore import MCoreGPT, data_shard, hf_model
from tests.support.hf_models import VOCAB_SIZE, auto_model, tiny_folder
from tests.support.ranks import run_ranks
from tests.support.toy import CP2, PP2, SHARDED, TP2, make_trainer, texts

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


# ---- transformers' generate, on ranks that would stop at different tokens

ROWS = [[[0, 0, 5, 6], [7, 8, 9, 10]], [[0, 11, 12, 13], [14, 15, 16, 17]]]  # of each model copy; 0 is padding
LENGTH = 10


class AtRank(StoppingCriteria):
    """Ends texts after a number of tokens that differs between ranks."""

    def __init__(self, rank: int) -> None:
        self.most = 6 + 2 * rank

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return input_ids.size(1) >= self.most


class Continues(pl.LightningModule):
    """Continues the rows of its model copy with each of some settings."""

    def __init__(self, folder: str, settings: list[dict[str, Any]]) -> None:
        super().__init__()
        self.folder, self.settings = folder, settings

    def configure_model(self) -> None:
        self.model = hf_model(self, self.folder)

    def predict_dataloader(self) -> Any:
        rows = torch.tensor(ROWS[data_shard(self.trainer).rank])
        return DataLoader([{"input_ids": rows, "attention_mask": (rows > 0).long()}], batch_size=None)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> list[list[list[int]]]:
        settings = self.settings or [
            {"max_time": 1e6 * self.global_rank, "max_new_tokens": LENGTH},  # as if the clocks differed
            {"stopping_criteria": [AtRank(self.global_rank)], "max_new_tokens": LENGTH},
        ]
        return [
            self.model.generate(**batch, **{"pad_token_id": 0, "eos_token_id": None, **setting}).tolist()
            for setting in settings
        ]


def continue_rows(folder: str, strategy: dict[str, Any], settings: list[dict[str, Any]]) -> Any:
    trainer = make_trainer(strategy, use_distributed_sampler=False)
    return trainer.predict(Continues(folder, settings))[0]  # type: ignore[index]


def test_texts_of_copies_that_share_experts_may_end_at_different_lengths() -> None:
    folder = str(tiny_folder("mixtral"))
    model = auto_model().from_pretrained(folder, dtype=torch.float32)

    def wanted(rows: list[list[int]], **settings: Any) -> list[list[int]]:
        mask = (torch.tensor(rows) > 0).long()
        said = model.generate(
            torch.tensor(rows), attention_mask=mask, max_new_tokens=LENGTH, pad_token_id=0, **settings
        )
        return said.tolist()  # type: ignore[no-any-return]

    ends = [row[6] for row in wanted(ROWS[0], eos_token_id=None)]
    settings = [{"eos_token_id": ends}, {"eos_token_id": ends, "num_beams": 3}]
    copies = [[wanted(rows, **setting) for setting in settings] for rows in ROWS]
    assert len(copies[0][0][0]) < len(copies[1][0][0])
    given = [{**setting, "max_new_tokens": LENGTH} for setting in settings]
    assert run_ranks(2, continue_rows, folder, {"expert_model_parallel_size": 2}, given) == copies


@pytest.mark.parametrize("layout", [TP2, PP2, CP2], ids=["tp2", "pp2", "cp2"])
def test_the_first_rank_of_a_model_copy_decides_when_time_is_up(layout: dict[str, Any]) -> None:
    first, second = run_ranks(2, continue_rows, str(tiny_folder("llama")), layout, [])
    assert first == second
    assert [len(rows[0]) for rows in first] == [5, 6]
