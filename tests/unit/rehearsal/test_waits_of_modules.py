# SPDX-License-Identifier: Apache-2.0
"""Models that see and models with masks wait on fake GPUs as often as a GPT: a mixture of devices would be an error."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_mcore import MCoreStrategy, MCoreVisionGPT
from lightning_mcore.rehearsal.processes import Failure, Played
from tests.parity.hf_modules import FineTuning, Texts, collate
from tests.support.hf_models import tiny_folder
from tests.support.rehearsed import gpu_trainer, job, play, selected
from tests.support.thorough import thorough_but
from tests.support.vision_models import vision_batch, vision_folder

LENGTH = 48
OF_A_STEP = {"megatron/core/optimizer/clip_grads.py": 1, "lightning_mcore/strategy/logs/pipeline.py": 1}


def seeing(family: str, folder: str) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Rows with no, one and several images, and a video."""
    images: list[Any] = [[(1, 4, 4)], [], [(1, 2, 2), (1, 6, 4), (1, 2, 4)], [(1, 2, 2)]]
    videos: list[Any] = [[], [], [], [(3, 4, 2)]]
    batches: Any = [vision_batch(family, LENGTH, images, videos, seed) for seed in range(8)]
    loader: Any = DataLoader(batches, batch_size=None)
    trainer = gpu_trainer(1, MCoreStrategy(micro_batch_size=1), precision="bf16-mixed", gradient_clip_val=1.0)
    return trainer, MCoreVisionGPT.from_pretrained(folder, LENGTH), (loader, loader)


def encoded(rows: Any) -> BatchEncoding:
    """Return what the collators of transformers return, whose own ``to`` waits for each tensor."""
    return BatchEncoding(collate(rows))


def with_masks(folder: str, collate: Any = collate) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    loader = DataLoader(Texts(), batch_size=4, collate_fn=collate)
    trainer = gpu_trainer(1, MCoreStrategy(micro_batch_size=1), precision="bf16-mixed", accumulate_grad_batches=2)
    return trainer, FineTuning(folder, ours=True), (loader,)


RUNS = ("qwen2_5_vl", "qwen3_vl", "masks", "encodings")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Played | Failure]:
    runs: dict[str, Any] = {family: partial(seeing, family, str(vision_folder(family))) for family in RUNS[:2]}
    runs["masks"] = partial(with_masks, str(tiny_folder("qwen3")))
    runs["encodings"] = partial(with_masks, str(tiny_folder("qwen3")), encoded)
    return play({name: job(runs[name]) for name in selected(request)})


@pytest.mark.parametrize("name", thorough_but(RUNS, "qwen3_vl", "encodings"))
def test_a_step_reads_its_gradient_norm_and_its_logs(found: dict[str, Played | Failure], name: str) -> None:
    played = found[name]
    assert isinstance(played, Played), played.trace
    [report] = played.ranks
    waits: dict[str, int] = {}
    for wait in report.waits:
        file = wait.where.split(":")[0]
        waits[file] = waits.get(file, 0) + wait.times
    assert waits == OF_A_STEP, report.waits
