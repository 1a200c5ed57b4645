# SPDX-License-Identifier: Apache-2.0
"""What Lightning's collectives span: values the data-parallel ranks, decisions and objects the world.

The oracle of the contrastive loss is one process with the samples of all model copies.
"""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_mcore.parallel import consensus
from lightning_mcore.parallel.groups import process_group
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import PP2, TP2, Batch, PlainNet, StagedNet, loader, make_trainer, weights

pytestmark = pytest.mark.distributed


def contrast(rows: Tensor, targets: Tensor) -> Tensor:
    """Return a loss in which each row meets every other row; ``rows`` and ``targets`` [n, s]."""
    return functional.cross_entropy(rows @ targets.T, torch.arange(len(rows)))


class Contrastive(StagedNet):
    """Compares each sample with those of all model copies."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        rows = self.predictions(batch).squeeze(-1)
        mine = {"rows": rows, "targets": batch["y"].squeeze(-1)}
        gathered = self.all_gather(mine, sync_grads=True)
        self.shapes: list[list[int]] = [list(value.shape) for value in gathered.values()]
        return contrast(gathered["rows"].flatten(0, 1), gathered["targets"].flatten(0, 1))


class ContrastivePlain(PlainNet):
    """The same of a plain module."""

    training_step = Contrastive.training_step


def train(module: Any, strategy: Any, batch_size: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Take two steps over eight samples; return the weights, and the shapes that were gathered."""
    net = module()
    make_trainer(strategy).fit(net, loader(8, batch_size))
    return weights(net), getattr(net, "shapes", [])


@pytest.mark.parametrize(
    ("module", "strategy", "copies"),
    [(Contrastive, TP2, 2), (Contrastive, PP2, 2), (ContrastivePlain, {}, 4)],
    ids=["tp2", "pp2", "plain"],
)
def test_all_gather_spans_the_model_copies_and_sends_gradients_back(
    module: Any, strategy: dict[str, Any], copies: int
) -> None:
    [(expected, _)] = run_ranks(1, train, module, {}, 4)
    ranks = run_ranks(4, train, module, strategy, 4 // copies)
    shapes = [[copies, 4 // copies, 4]] * 2
    assert [shape for _, shape in ranks if shape] == [shapes] * (2 if strategy is PP2 else 4)  # one stage has the loss
    for found, _ in ranks:
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_values_span_the_model_copies_and_decisions_the_world() -> None:
    trainer = make_trainer(TP2, max_steps=1)
    trainer.fit(StagedNet(), loader(4, 2))
    strategy, rank = trainer.strategy, dist.get_rank()
    number = torch.tensor(float(rank))
    seen = {
        "gather": strategy.all_gather(number).tolist(),
        "sum": float(strategy.reduce(number.clone(), reduce_op="sum")),
        "sum of tensor-parallel ranks": float(strategy.reduce(number.clone(), process_group("tp"), reduce_op="sum")),
        "broadcast": strategy.broadcast(rank),
        "any": strategy.reduce_boolean_decision(rank == 3, all=False),
        "all": strategy.reduce_boolean_decision(rank != 3),
    }
    copies, shards = ([0, 2], [1, 3])[rank % 2], ([0, 1], [2, 3])[rank // 2]
    assert seen["gather"] == copies
    assert seen["sum"] == sum(copies)
    assert seen["sum of tensor-parallel ranks"] == sum(shards)
    assert (seen["broadcast"], seen["any"], seen["all"]) == (0, True, False)


def test_the_control_group_has_the_timeout_of_the_default_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = datetime.timedelta(seconds=77)
    meeting = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1, timeout=timeout)
    try:
        monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")  # beside gloo it is the default group itself
        group: Any = consensus.control_group()
        assert group is not dist.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout == timeout
    finally:
        dist.destroy_process_group()


class OfAnotherPackageError(Exception):
    """A class that callers catch by name."""


def failures(alike: bool) -> list[str]:
    """Fail on both ranks, alike or in two ways; return the classes that this rank saw."""

    def fail() -> None:
        raise OfAnotherPackageError("the same on both" if alike else f"rank {dist.get_rank()}")

    try:
        consensus.run_on_all_ranks(fail)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def test_a_failure_of_all_ranks_keeps_its_class_on_each() -> None:
    own = ["OfAnotherPackageError", "the same on both"]
    assert run_ranks(2, failures, True) == [own, own]
    first = ["OfAnotherPackageError", "rank 0"]
    assert run_ranks(2, failures, False) == [first, ["RuntimeError", "OfAnotherPackageError: rank 0"]]
