# SPDX-License-Identifier: Apache-2.0
"""Evaluation sets that the ranks do not divide: every sample counts once, and nothing hangs."""

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.toy import Batch, PlainNet, StagedNet, fill, loader, make_trainer

SIZES = (1, 2, 3, 5, 8)
BATCH_SIZES = (1, 2, 4)
PIPELINE = {"pipeline_model_parallel_size": 2}


def evaluate(staged: bool, strategy: Any) -> dict[str, tuple[float, float, int]]:
    """Rank function: for each size and batch size the logged loss, the metric object's value and how many it saw."""
    found = {}
    for size in SIZES:
        for batch_size in BATCH_SIZES:
            module = StagedNet() if staged else PlainNet()
            trainer = make_trainer(strategy)
            trainer.validate(module, loader(size, batch_size), verbose=False)
            values = trainer.callback_metrics
            indices = module.indices.compute().flatten()
            found[f"{size}/{batch_size}"] = (float(values["val_loss"]), float(values["val_metric"]), len(indices))
            assert sorted(indices.tolist()) == list(range(size)), f"{size} samples in batches of {batch_size}"
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("staged", "world_size", "strategy"),
    [(False, 2, {}), (True, 2, {}), (True, 2, PIPELINE), (True, 4, PIPELINE)],
    ids=["plain-dp2", "staged-dp2", "pp2", "dp2-pp2"],
)
def test_uneven_sets_give_the_metric_of_one_process(staged: bool, world_size: int, strategy: dict[str, Any]) -> None:
    [expected] = run_ranks(1, evaluate, staged, {}, timeout=120)
    for result in run_ranks(world_size, evaluate, staged, strategy, timeout=240):
        for case, (loss, metric, count) in expected.items():
            assert result[case] == (pytest.approx(loss, rel=1e-6), pytest.approx(metric, rel=1e-6), count), case


class Mean(PlainNet):
    """Counts validation steps in a torchmetrics object, as some users do."""

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("rows", float(len(batch["x"])), reduce_fx="sum", sync_dist=True)


def fit_with_two_sets(strategy: Any) -> dict[str, float]:
    """Rank function: fit with a sanity check and two validation sets of uneven size."""
    module = Mean()
    trainer = make_trainer(strategy, num_sanity_val_steps=2, val_check_interval=2)
    trainer.fit(module, loader(8, 2), [loader(5, 2), loader(3, 2)])
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("rows")}


@pytest.mark.distributed
def test_several_sets_and_the_sanity_check_count_each_sample_once() -> None:
    for counts in run_ranks(2, fit_with_two_sets, {}):
        assert counts == {"rows/dataloader_idx_0": 5.0, "rows/dataloader_idx_1": 3.0}


def predict(strategy: Any) -> list[int]:
    """Rank function: the samples whose predictions this rank got, checked against the model itself."""
    module = PlainNet()
    fill(module.net, seed=3)
    outputs = make_trainer(strategy).predict(module, loader(7, 2))
    assert outputs is not None
    for output in outputs:
        inputs = torch.stack([loader(7, 1).dataset[i]["x"] for i in output["index"].tolist()])
        assert torch.equal(output["y"], module.net(inputs))
    return [index for output in outputs for index in output["index"].tolist()]


@pytest.mark.distributed
def test_predict_returns_each_sample_once_over_the_data_parallel_ranks() -> None:
    first, second = run_ranks(2, predict, {})
    assert sorted(first + second) == list(range(7))
