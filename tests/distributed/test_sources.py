# SPDX-License-Identifier: Apache-2.0
"""Losses of each source of the data: those of its tokens, on every layout; dense, packed and streamed rows."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_mcore import MCoreFinetuningData, MCoreGPT, MCorePretrainingData, MCoreVisionGPT
from tests.distributed.test_pretraining_data import make_dataset
from tests.distributed.test_vision import talking
from tests.support.chats import characters, write
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import make_trainer
from tests.unit.data.test_vision_data import data as vision_data

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
}
LOUD = ord("Y") - ord("!")  # its token: the tokenizer numbers the letters from ! on
Seen = tuple[float, str]  # a token's loss, and the source that its text betrays


class Witness(MCoreGPT):
    """Writes down the loss of every token that counts, with what the token itself says of its source."""

    seen: list[Seen]

    def normalized_loss(self, losses: torch.Tensor, inputs: Any, *args: Any) -> Any:
        counts = inputs.loss_mask.reshape(-1) > 0
        columns = (losses, inputs.tokens, inputs.labels)
        for loss, token, label in zip(*(column.reshape(-1)[counts].tolist() for column in columns), strict=True):
            self.seen.append((loss, self.betrayed(token, label)))
        return super().normalized_loss(losses, inputs, *args)

    @staticmethod
    def betrayed(token: int, label: int) -> str:
        """Return the source that a token and the next one are of."""
        raise NotImplementedError


class OfDatasets(Witness):
    """Rows of two datasets, whose tokens differ except for the end of a document."""

    @staticmethod
    def betrayed(token: int, label: int) -> str:
        return "b" if max(token, label) > 100 else "a"


class OfFiles(Witness):
    """Answers of two files: one of x, one of Y, each with the same token at its end."""

    @staticmethod
    def betrayed(token: int, label: int) -> str:
        return "loud" if LOUD in (token, label) else "quiet"


class OfSeenFiles(OfFiles, MCoreVisionGPT):
    """The same answers, to questions about images."""


class Compare(pl.Callback):
    """Compares what is logged in each step, and at the end of validation, with the tokens that all ranks saw."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.found: list[tuple[str, dict[str, float], dict[str, float]]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self._compare("train_loss", trainer, pl_module)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.seen = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._compare("val_loss", trainer, pl_module)

    def _compare(self, name: str, trainer: pl.Trainer, module: Any) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, module.seen)
        module.seen = []
        logged, expected = {}, {}
        for source in self.names:
            losses = [loss for seen in every for loss, betrayed in seen if betrayed == source]
            expected[source] = sum(losses) / len(losses) if losses else math.nan
            logged[source] = float(trainer.callback_metrics[f"{name}/{source}"])
        self.found.append((name, logged, expected))


def small(module: type[Witness]) -> Witness:
    pl.seed_everything(3, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    return module(vocab_size=260, seq_length=64, transformer=sizes)


def fit(model: Witness, data: Any, strategy: Any, names: list[str], accumulate: int) -> list[Any]:
    """Train and validate on this rank; return what :class:`Compare` found."""
    compare = Compare(names)
    model.seen = []
    more = {"max_steps": 4, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    trainer = make_trainer(strategy, callbacks=[compare], log_every_n_steps=1, val_check_interval=1.0, **more)
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)
    return compare.found


def finetune(folder: str) -> dict[str, list[Any]]:
    files = [f"{folder}/quiet.jsonl", f"{folder}/loud.jsonl"]
    readings: dict[str, dict[str, Any]] = {
        "packed": {"validation_share": 0.3},
        "padded": {"validation_share": 0.3, "packing": False},
        "streamed": {"validation_files": files[::-1], "streaming": True, "shuffle_buffer": 4},
    }
    return {
        f"{name}-{reading}": fit(
            small(OfFiles),
            MCoreFinetuningData(
                files,
                characters(),
                seq_length=64,
                batch_size=1,
                num_workers=0,
                cache_dir=f"{folder}/cache",
                log_sources=True,
                **options,
            ),
            strategy,
            ["quiet", "loud"],
            accumulate=2,
        )
        for name, strategy in LAYOUTS.items()
        for reading, options in readings.items()
    }


def finetune_on_images(folder: str, model: str) -> dict[str, list[Any]]:
    found = {}
    for name, strategy in LAYOUTS.items():
        data = vision_data(Path(folder), [], seq_length=96, log_sources=True, packing=name != "tp")
        data.train_files = data.validation_files = [f"{folder}/quiet.jsonl", f"{folder}/loud.jsonl"]
        found[name] = fit(OfSeenFiles.from_pretrained(model), data, strategy, ["quiet", "loud"], accumulate=2)
    return found


def check(found: dict[str, list[Any]], layouts: int) -> None:
    assert len(found) == layouts
    values = [value for steps in found.values() for _, _, expected in steps for value in expected.values()]
    assert any(math.isnan(value) for value in values)  # a step without one of the sources
    assert len({round(value, 3) for value in values}) > 4
    for name, steps in found.items():
        assert {kind for kind, _, _ in steps} == {"train_loss", "val_loss"}, name
        for kind, logged, expected in steps:
            assert logged == pytest.approx(expected, rel=1e-5, nan_ok=True), (name, kind)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None,
    reason="this megatron-core was compiled for another Python",
)
@on_ranks(2, timeout=180)
def test_each_datasets_loss_is_that_of_its_tokens(tmp_path: Path) -> None:
    paths = [make_dataset(tmp_path / f"{name}-{dist.get_rank()}", first) for name, first in (("a", 1), ("b", 101))]
    dist.broadcast_object_list(paths, src=0)
    found = {}
    for name, strategy in LAYOUTS.items():
        data = MCorePretrainingData(
            dict(zip(paths, (9.0, 1.0), strict=True)),
            seq_length=8,
            batch_size=1 if name == "dp" else 2,
            num_workers=0,
            split="50,50,0",
            log_sources=True,
        )
        assert data.source_names == [Path(path).name for path in paths]
        data.source_names = ["a", "b"]
        found[name] = fit(small(OfDatasets), data, strategy, ["a", "b"], accumulate=2)
    check(found, layouts=4)


@pytest.mark.slow
def test_each_files_loss_is_that_of_its_answers(tmp_path: Path) -> None:
    for name, letter, rows in (("quiet", "x", 30), ("loud", "Y", 10)):
        lines = [{"prompt": "a" * (3 + row % 5), "response": letter * (1 + row % 7)} for row in range(rows)]
        write(tmp_path / f"{name}.jsonl", lines)
    for found in run_ranks(2, finetune, str(tmp_path), timeout=240):
        check(found, layouts=12)


@pytest.mark.slow
def test_each_files_loss_is_that_of_its_answers_about_images(tmp_path: Path) -> None:
    for name, letter, rows in (("quiet", "x", 24), ("loud", "Y", 8)):
        turns = [("user", "a" * 3 + "<image>"), ("assistant", letter * 5)]
        messages = [{"role": role, "content": text} for role, text in turns]
        write(tmp_path / f"{name}.jsonl", [{"messages": messages, "images": ["a.png"]}] * rows)
    for found in run_ranks(2, finetune_on_images, str(tmp_path), talking("qwen2_vl", tmp_path), timeout=240):
        check(found, layouts=4)
