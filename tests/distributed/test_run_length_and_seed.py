# SPDX-License-Identifier: Apache-2.0
"""How long a run is and what it starts from: steps as schedules count them, and the user's seed."""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_mcore import MCoreGPT
from lightning_mcore.parallel.groups import generator_of
from tests.support.ranks import run_ranks
from tests.support.toy import PP2, PlainNet, StagedNet, loader, make_trainer, weights

pytestmark = pytest.mark.distributed

RUNS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 2},
    "epochs-and-no-steps": {"max_epochs": 2, "max_steps": -1},
    "steps": {"max_steps": 5},
    "half-an-epoch": {"max_epochs": 1, "limit_train_batches": 0.5},
}


class Counts:
    """Mixed into a module: its schedule ends with the run, as Lightning says how long that is."""

    def configure_optimizers(self: Any) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = CosineAnnealingLR(optimizer, T_max=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self: Any, optimizer: Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class PlainCounts(Counts, PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []


class StagedCounts(Counts, StagedNet):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []


def lengths(staged: bool) -> dict[str, tuple[int, int, list[float]]]:
    """Return for each run the batches of an epoch, the steps that were foreseen, and the rates of those made."""
    found = {}
    for name, arguments in RUNS.items():
        module = StagedCounts() if staged else PlainCounts()
        trainer = make_trainer(PP2 if staged else "ddp", accumulate_grad_batches=3, **arguments)
        trainer.fit(module, loader(28, 2))
        found[name] = (int(trainer.num_training_batches), module.total, module.rates)
    return found


def test_a_run_is_as_long_for_schedules_as_under_ddp() -> None:
    (expected,) = run_ranks(1, lengths, False)
    assert [expected[name][:2] for name in RUNS] == [(14, 10), (14, 10), (14, 5), (7, 3)]
    assert all(len(rates) == total for _, total, rates in expected.values())
    for found in run_ranks(2, lengths, True, timeout=90):
        assert found == expected


def initial_weights(seed: int) -> dict[str, Tensor]:
    """Return this rank's weights of a fresh GPT, cut by tensors."""
    pl.seed_everything(seed, verbose=False)
    model = MCoreGPT(32, 8, {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2})
    trainer = make_trainer({"tensor_model_parallel_size": 2, "sequence_parallel": True}, max_steps=1)
    samples = [{"tokens": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}] * 2
    kept: dict[str, Tensor] = {}
    model.on_fit_start = lambda: kept.update(weights(model))
    trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=2))  # type: ignore[arg-type]
    return kept


def seeds() -> list[dict[str, Tensor]]:
    return [initial_weights(seed) for seed in (1, 1, 2)]


def test_the_seed_of_the_user_is_that_of_every_weight() -> None:
    ranks = run_ranks(2, seeds, timeout=90)
    drawn = [name for name, value in ranks[0][0].items() if value.dim() > 1]
    assert len(drawn) >= 6
    for first, again, other in ranks:
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not any(torch.equal(first[name], other[name]) for name in drawn)
    split = [name for name in drawn if "position" not in name]
    assert not any(torch.equal(ranks[0][0][name], ranks[1][0][name]) for name in split)  # not the same part twice


def seed_that_only_some_ranks_set(seeded_ranks: tuple[int, ...]) -> int:
    """Return the seed of a run in which rank ``r`` called ``seed_everything(7 + r)``, if it is among those ranks."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    rank = dist.get_rank()
    if rank in seeded_ranks:
        pl.seed_everything(7 + rank, verbose=False)
    make_trainer(PP2, max_steps=1, use_distributed_sampler=False).fit(StagedNet(), loader(4, 2))
    return generator_of("a weight").initial_seed()


@pytest.mark.parametrize("seeded_ranks", [(0,), (1,), (0, 1)])
def test_all_ranks_use_the_seed_of_rank_0(seeded_ranks: tuple[int, ...]) -> None:
    first, second = run_ranks(2, seed_that_only_some_ranks_set, seeded_ranks, timeout=20)
    assert first == second
