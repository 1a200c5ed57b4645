# SPDX-License-Identifier: Apache-2.0
"""Stages receive activations of any shape, also where it depends on the values of a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.ranks import run_ranks
from tests.support.toy import FEATURES, PP2, StagedNet, Watch, make_trainer

pytestmark = pytest.mark.distributed


class Cut(StagedNet):
    """Sends only as many positions as the first row says, so that batches of one shape send different shapes."""

    def predictions(self, batch: Any) -> Tensor:
        assert self.model is not None
        return self.model(batch["x"][:, : int(batch["length"][0])])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.predictions(batch) - batch["x"][:, : int(batch["length"][0]), :1]).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.predictions(batch).square().mean(), sync_dist=True)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [(2, 6), (2, 6), (2, 6), (2, 6), (3, 6), (3, 6), (2, 9), (1, 9)]
    lengths = [6, 3, 6, 1, 2, 5, 9, 4]
    return [
        {"x": torch.randn(*shape, FEATURES, generator=generator), "length": torch.tensor([length] * shape[0])}
        for shape, length in zip(rows, lengths, strict=True)
    ]


def losses(layout: dict[str, Any]) -> tuple[list[float], float]:
    watch = Watch()
    trainer = make_trainer(
        layout,
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[watch],
        use_distributed_sampler=False,
        limit_val_batches=1.0,
    )
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Cut(), loader, loader)
    return watch.seen.logged, float(trainer.callback_metrics["val_loss"])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PP2),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "vp2": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shapes_may_change_with_every_microbatch(name: str) -> None:
    size, layout = LAYOUTS[name]
    [(alone, validated)] = run_ranks(1, losses, {})
    assert len(alone) == 8
    for found, value in run_ranks(size, losses, layout):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, validated, rtol=1e-5, atol=1e-6)
