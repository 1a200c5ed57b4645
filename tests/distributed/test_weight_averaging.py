# SPDX-License-Identifier: Apache-2.0
"""Averages of weights on split models and sharded optimizers: those of Lightning on one rank, resumed bit for bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.callbacks import EMAWeightAveraging, WeightAveraging
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.toy import OVERLAPPED, Memory, PlainNet, loader, make_trainer, weights

pytestmark = pytest.mark.distributed

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 2, "moe_ffn_hidden_size": 16, "moe_router_enable_expert_bias": True}
EXPERTS |= {"moe_router_score_function": "sigmoid", "moe_token_dispatcher_type": "alltoall"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2-sharded": OVERLAPPED,
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "bf16-sharded": OVERLAPPED,
}
DECAY = 0.5


class Watched(pl.Callback):
    """Averages by hand what the model holds after each step, and saves after one of them."""

    def __init__(self, path: str | None, step: int = 3) -> None:
        self.path, self.step = path, step
        self.averages: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if hasattr(trainer.strategy, "complete_parameters"):
            trainer.strategy.complete_parameters()
        values = [parameter.detach().float().clone() for parameter in pl_module.parameters()]
        self.averages = [
            DECAY * average + (1 - DECAY) * value
            for average, value in zip(self.averages or values, values, strict=True)
        ]
        if trainer.global_step == self.step and self.path is not None:
            trainer.save_checkpoint(self.path)


class Started(MCoreGPT):
    """Starts from the weights of a checkpoint."""

    path = ""

    def configure_model(self) -> None:
        super().configure_model()
        if self.path:
            self.load_weights(self.path)
            self.path = ""  # a validation after the run configures the model once more


def gpt(folder: str, layout: str) -> Started:
    """Return a model that starts from the same weights on every layout."""
    recipe = Recipe(learning_rate=1e-2, warmup_steps=0, eps=1e-3)
    module = Started(
        vocab_size=64, seq_length=8, transformer=SHAPE | (EXPERTS if "ep2" in layout else {}), recipe=recipe
    )
    module.path = f"{folder}/start-{'ep2' if 'ep2' in layout else 'one'}.ckpt"
    return module


def save_starts(folder: str) -> None:
    """Save the weights from which each model starts."""
    for kind in ("one", "ep2"):
        module = gpt(folder, kind)
        path, module.path = module.path, ""
        trainer = make_trainer({}, max_epochs=1)
        trainer.validate(module, data_of("one")[1], verbose=False)
        trainer.save_checkpoint(path)


def data_of(layout: str) -> tuple[Any, Any]:
    """Return loaders of training, four rows in each step on every layout, and of validation."""
    tokens = torch.randint(0, 64, (16, 9), generator=torch.Generator().manual_seed(7))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    if layout.startswith(("tp2", "pp2", "one")):
        return DataLoader(rows, batch_size=4), DataLoader(rows[:4], batch_size=4)
    sampler: Any = DistributedSampler(rows, num_replicas=2, rank=torch.distributed.get_rank(), shuffle=False)
    return DataLoader(rows, batch_size=2, sampler=sampler), DataLoader(rows[:4], batch_size=4)


def fit(layout: str, folder: str, ckpt_path: str | None = None) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Train for two epochs; return the losses of validation, the weights at the end and the average by hand.

    On one rank there is no callback that averages, and the only loss is that of the average by hand.
    """
    module, alone = gpt(folder, layout), layout.startswith("one")
    watched = Watched(None if alone or ckpt_path is not None else f"{folder}/{layout}.ckpt")
    memory, averages = Memory(), [] if alone else [EMAWeightAveraging(decay=DECAY)]
    trainer = make_trainer(
        LAYOUTS.get(layout, "auto"),
        callbacks=[*averages, watched],
        use_distributed_sampler=False,
        max_epochs=2,
        logger=memory,
        precision="bf16-true" if layout.startswith("bf16") else "32-true",
    )
    training, validation = data_of(layout)
    trainer.fit(module, training, validation, ckpt_path=ckpt_path)
    losses = memory.values("val_loss")
    if alone:
        for parameter, average in zip(module.parameters(), watched.averages, strict=True):
            parameter.data.copy_(average)
        losses = [trainer.validate(module, validation, verbose=False)[0]["val_loss"]]
    elif ckpt_path is None:
        trainer.save_checkpoint(f"{folder}/{layout}-end.ckpt")
    return losses, [parameter.detach().clone() for parameter in module.parameters()], watched.averages


def fit_each(folder: str) -> dict[str, Any]:
    """Train on every layout, and once more from the checkpoint in the middle."""
    return {name: (fit(name, folder), fit(name, folder, ckpt_path=f"{folder}/{name}.ckpt")) for name in LAYOUTS}


def on_one_rank(folder: str) -> dict[str, Any]:
    """Return what training on one rank leaves, and what the checkpoints of all layouts hold."""
    found: dict[str, Any] = {name: fit(name, folder) for name in ("one", "one-ep2")}
    for name in LAYOUTS:
        module = MCoreGPT.load_from_checkpoint(f"{folder}/{name}-end.ckpt")
        found[name] = [parameter.detach() for parameter in module.parameters()]
    return found


def test_averages_are_those_of_one_rank_and_resume_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(1, save_starts, str(tmp_path), timeout=60)
    ranks = run_ranks(2, fit_each, str(tmp_path), timeout=180)
    [alone] = run_ranks(1, on_one_rank, str(tmp_path), timeout=120)
    for name in LAYOUTS:
        for rank in ranks:
            (losses, weights, by_hand), (later, resumed, _) = rank[name]
            assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(weights, by_hand, strict=True)), name
            assert later == losses[-len(later) :], name
            assert all(torch.equal(one, other) for one, other in zip(weights, resumed, strict=True)), name
        if not name.startswith("bf16"):
            [loss], held, _ = alone["one-ep2" if name == "ep2" else "one"]
            assert losses[-1] == pytest.approx(loss, rel=1e-5), name
            for one, other in zip(held, alone[name], strict=True):
                assert (one - other).abs().max().item() <= 2e-6, name


class EachEpoch(WeightAveraging):
    """Averages the weights at the ends of epochs."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


class EachEpochOfLightning(of_lightning.WeightAveraging):
    """The same, of Lightning."""

    should_update = EachEpoch.should_update


PLAIN: dict[str, tuple[Any, Any]] = {
    "ddp": ("ddp", lambda: of_lightning.EMAWeightAveraging(decay=DECAY)),
    "ddp-epochs": ("ddp", EachEpochOfLightning),
    "other strategy": ("ddp", lambda: EMAWeightAveraging(decay=DECAY)),
    "file": ({}, lambda: EMAWeightAveraging(decay=DECAY)),
    "file-epochs": ({}, EachEpoch),
    "shards": (OVERLAPPED, lambda: EMAWeightAveraging(decay=DECAY)),
}


@on_ranks(2, timeout=120)
def test_averages_of_a_plain_module_are_those_of_lightning_and_are_evaluated(tmp_path: Path) -> None:
    runs = {}
    for name, (strategy, make) in PLAIN.items():
        results: list[Any] = []
        path = f"{tmp_path}/{name}.ckpt"
        for ckpt_path in (None, path):
            net, memory = PlainNet(), Memory()
            # Where the first epoch ends, or in the middle of the next, so that an average is there.
            watched = Watched(path if ckpt_path is None else None, step=6 if "epochs" in name else 4)
            trainer = make_trainer(strategy, callbacks=[make(), watched], max_epochs=3, logger=memory)
            trainer.fit(net, loader(16, 2), loader(6, 2), ckpt_path=ckpt_path)
            results += [memory.values("val_loss"), weights(net)]
        trainer = make_trainer(strategy, callbacks=[make()])
        [evaluated] = trainer.validate(PlainNet(), loader(6, 2), ckpt_path=path, verbose=False)
        runs[name] = (*results, evaluated["val_loss"])
    for name in ("other strategy", "file", "file-epochs", "shards"):
        theirs, expected, *_ = runs["ddp-epochs" if "epochs" in name else "ddp"]
        losses, found, later, resumed, evaluated = runs[name]
        assert losses == pytest.approx(theirs, rel=1e-6), name
        assert all((value - found[key]).abs().max() <= 1e-7 for key, value in expected.items()), name
        assert later == losses[-len(later) :], name
        assert all(torch.equal(value, resumed[key]) for key, value in found.items()), name
        seen = 1 if "epochs" in name else 0  # an epoch's average is there for the validation of the next
        assert evaluated == pytest.approx(losses[seen], rel=1e-6), name


@on_ranks(1)
def test_a_file_of_lightnings_callback_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/theirs.ckpt"
    trainer = make_trainer("auto", callbacks=[of_lightning.EMAWeightAveraging(), Watched(path)], max_steps=4)
    trainer.fit(PlainNet(), loader(16, 2))
    with refuses(ValueError, "Lightning's own callback"):
        make_trainer({}, callbacks=[EMAWeightAveraging()]).fit(PlainNet(), loader(16, 2), ckpt_path=path)
