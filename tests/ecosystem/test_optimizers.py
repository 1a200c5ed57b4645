# SPDX-License-Identifier: Apache-2.0
"""Optimizers of other packages: on two ranks, one rank's numbers, resumed bit for bit, or rejected in one sentence."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from tests.support.ranks import run_ranks
from tests.support.toy import Memory, make_trainer, weights

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2-sharded": {"use_distributed_optimizer": True},
}
# Each matrix of a stage or of a tensor-parallel part has at least 4096 elements, from which on states are in 8 bits.
TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
VOCABULARY, TOKENS, ROWS = 256, 16, 16
Parameters = Iterable[nn.Parameter]


def fused_adamw(parameters: Parameters) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, fused=True)


def adafactor(parameters: Parameters) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def adafactor_of_transformers(parameters: Parameters) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


def lion(parameters: Parameters) -> Optimizer:
    from lion_pytorch import Lion

    return Lion(parameters, lr=3e-4)


def schedule_free(parameters: Parameters) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=2)


def adamw_8bit(parameters: Parameters) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=3e-3)


def lamb_8bit(parameters: Parameters) -> Optimizer:
    from bitsandbytes.optim import LAMB8bit

    return LAMB8bit(parameters, lr=3e-3)


def low_bit_adamw(parameters: Parameters) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=3e-3)


def prodigy(parameters: Parameters) -> Optimizer:
    from prodigyopt import Prodigy

    return Prodigy(parameters)


class ScheduleFreeModes(pl.Callback):
    """Exchanges the weights around validation, as the package demands; on every other optimizer it does nothing."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(trainer, "train")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(trainer, "eval")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch(trainer, "train")

    def _switch(self, trainer: pl.Trainer, mode: str) -> None:
        for optimizer in trainer.optimizers:
            getattr(optimizer, mode, lambda: None)()


Make = Callable[[Parameters], Optimizer]


class GPT(MCoreGPT):
    """Steps with the optimizer of a test."""

    make: Make  # not a hyper-parameter, which a checkpoint would hold

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def gpt(make: Make) -> GPT:
    module = GPT(vocab_size=VOCABULARY, seq_length=TOKENS, transformer=TRANSFORMER)
    module.make = make
    return module


def texts() -> DataLoader[dict[str, Tensor]]:
    rows = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(3))
    return DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=2)  # type: ignore[arg-type]


def fit(make: Make, layout: str, epochs: int, folder: Path, resumes: bool = False, saves: bool = False) -> Any:
    """Train, four samples a step; return training and validation losses, and this rank's weights."""
    module, memory = gpt(make), Memory()
    accumulated = 1 if layout.startswith("dp2") else 2
    given = {"callbacks": [ScheduleFreeModes()], "logger": memory, "accumulate_grad_batches": accumulated}
    trainer = make_trainer(LAYOUTS.get(layout, {}), max_epochs=epochs, **given)
    if not resumes:
        trainer.validate(module, texts(), ckpt_path=folder / "start.ckpt", verbose=False)
    trainer.fit(module, texts(), texts(), ckpt_path=folder / f"{layout}.ckpt" if resumes else None)
    if saves:
        trainer.save_checkpoint(folder / f"{layout}.ckpt")
    return memory.values("train_loss"), memory.values("val_loss"), weights(module)


def write_start(path: Path) -> None:
    """Save the weights from which all runs start."""
    pl.seed_everything(1)
    trainer = make_trainer({}, max_epochs=0)
    trainer.fit(gpt(fused_adamw), texts())
    trainer.save_checkpoint(path, weights_only=True)


def train_and_resume(make: Make, layouts: list[str], folder: Path) -> dict[str, Any]:
    """Train for two epochs on each layout, at once and with a stop in between; the text of the error if it fails."""
    found: dict[str, Any] = {}
    for layout in layouts:
        try:
            at_once = fit(make, layout, 2, folder)
            fit(make, layout, 1, folder, saves=True)
            found[layout] = at_once, fit(make, layout, 2, folder, resumes=True)
        except TypeError as error:
            found[layout] = str(error)
    return found


# What each optimizer is run on, and what is said where it is rejected
RUNS: dict[Make, tuple[str, list[str], dict[str, str], str]] = {
    fused_adamw: ("torch", [*LAYOUTS], {}, "fused AdamW"),
    adafactor: ("torch", ["dp2", "pp2"], {"tp2": "Adafactor looks at whole matrices"}, "Adafactor"),
    adafactor_of_transformers: (
        "transformers",
        ["dp2", "pp2"],
        {"tp2": "Adafactor looks at whole matrices"},
        "Adafactor",
    ),
    lion: ("lion-pytorch", ["dp2", "tp2", "pp2"], {"dp2-sharded": "needs torch's Adam or AdamW"}, "Lion"),
    schedule_free: ("schedulefree", ["dp2", "tp2", "pp2"], {}, "AdamWScheduleFree, switched around validation"),
    adamw_8bit: ("bitsandbytes", ["dp2", "pp2"], {"tp2": "AdamW8bit keeps 'qmap1'"}, "AdamW8bit"),
    lamb_8bit: ("bitsandbytes", ["dp2", "pp2"], {"tp2": "LAMB8bit looks at whole matrices"}, "LAMB8bit"),
    low_bit_adamw: ("torchao", [], dict.fromkeys(["dp2", "tp2", "pp2"], "AdamW8bit keeps 'exp_avg'"), "AdamW8bit"),
    prodigy: (
        "prodigyopt",
        ["dp2"],
        dict.fromkeys(["tp2", "pp2"], "Prodigy looks at all parameters at once"),
        "Prodigy",
    ),
}


def _row(what: str, layouts: list[str], rejected: Iterable[str]) -> str:
    runs = f"same losses as one rank, and bit-equal resumes, on {', '.join(layouts)}" if layouts else ""
    return f"{what}: " + "; ".join(filter(None, [runs, f"rejected on {', '.join(rejected)}" if rejected else ""]))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=pytest.mark.works_with(package, _row(what, layouts, rejected)))
        for make, (package, layouts, rejected, what) in RUNS.items()
    ],
    ids=[make.__name__ for make in RUNS],
)
def test_an_optimizer_trains_as_on_one_rank_or_is_rejected(make: Make, tmp_path: Path) -> None:
    _, layouts, rejected, _ = RUNS[make]
    run_ranks(1, write_start, tmp_path / "start.ckpt")
    [alone] = run_ranks(1, train_and_resume, make, ["one"] if layouts else [], tmp_path, timeout=120)
    for rank in run_ranks(2, train_and_resume, make, [*layouts, *rejected], tmp_path, timeout=240):
        for layout in layouts:
            (losses, validated, at_once), (resumed, _, continued) = rank[layout]
            expected_losses, expected_validated, _ = alone["one"][0]
            assert (len(losses), len(validated)) == (8, 3)
            assert losses == pytest.approx(expected_losses, rel=1e-4)
            assert validated == pytest.approx(expected_validated, rel=1e-4)
            assert resumed == losses[4:]
            assert all(torch.equal(value, continued[name]) for name, value in at_once.items())
        for layout, sentence in rejected.items():
            assert sentence in rank[layout], rank[layout]
