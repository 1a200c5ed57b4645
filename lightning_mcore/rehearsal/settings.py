# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a run that is described by a file, with rows of made-up tokens."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_mcore.arguments.build import make_precision, make_strategy
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.planning.rules import check_run
from lightning_mcore.rehearsal.rank import STEPS, Build

_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")


class MadeUpRows(Dataset[dict[str, Tensor]]):
    """Rows of zeros in the form of the run's data: sequences packed four to a row, or answers to score."""

    def __init__(self, rows: int, length: int, packed: bool, preference: bool) -> None:
        positions = torch.arange(length)
        self.rows = rows
        self.row = {"tokens": positions * 0, "labels": positions * 0, "lengths": torch.tensor(length)}
        if packed:
            self.row |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), torch.arange(5) * length // 4)
        if preference:
            last = (positions < length - 1).float()  # an answer's last token has no label
            self.row |= {"loss_mask": last, "sample_ids": torch.tensor(0), "desirable": torch.tensor(True)}

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row


def build_of(
    settings: RunSettings, devices: int, devices_per_node: int, backend: str | None = None
) -> tuple[Build, ParallelLayout]:
    """Return what builds the run of a file, for ``rehearse``, and its layout.

    Raises ValueError for settings with which the run would be refused, and for a model that sees images.
    """
    run = check_run(settings, devices)
    if run.errors:
        raise ValueError(run.errors[0])
    assert run.batch is not None
    if "vision" in run.model:
        raise ValueError(
            "a model that sees images is rehearsed only with its own data; call lightning_mcore.rehearsal.rehearse"
        )
    if run.device_type == "cpu":
        raise ValueError("accelerator='cpu' has no GPU to rehearse; set trainer.accelerator to 'gpu'")
    accumulated = settings.trainer.get("accumulate_grad_batches") or 1
    rows = run.batch.rows // (run.batch.data_parallel_size * accumulated)
    sizes = (devices, devices_per_node), (rows, run.batch.seq_length, accumulated)
    assert run.rules.layout is not None
    return partial(_build, settings, run.model, *sizes), run.rules.layout


def _build(
    settings: RunSettings, model: Mapping[str, Any], devices: tuple[int, int], batch: tuple[int, int, int]
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    rows, length, accumulated = batch
    is_preference = "preference" in model
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=devices[1],
        num_nodes=devices[0] // devices[1],
        strategy=make_strategy(settings.strategy),
        plugins=[make_precision(settings.precision)],
        use_distributed_sampler=False,
        **{name: settings.trainer[name] for name in _OF_TRAINER if name in settings.trainer},
    )
    data = MadeUpRows(rows * accumulated * STEPS, length, bool(settings.data.get("packing")), is_preference)
    loader = DataLoader(data, batch_size=rows)
    arguments = {**model, "recipe": model.get("recipe") or {}}
    return trainer, (MCorePreference if is_preference else MCoreGPT)(**arguments), (loader, loader)
