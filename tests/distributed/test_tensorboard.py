# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard shows of a pipeline: rank 0 writes, though losses are made on the last stage."""

from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.ranks import run_ranks
from tests.support.toy import StagedNet, loader, run_fit

pytestmark = pytest.mark.distributed


def fit(folder: str) -> list[float]:
    """Train two pipeline stages; return the losses that this rank saw."""
    logger = TensorBoardLogger(folder, name="", version="run")
    return run_fit(StagedNet(), {"pipeline_model_parallel_size": 2}, loader(8, 2), logger=logger).logged


def test_tensorboard_has_the_loss_of_every_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, fit, str(tmp_path))
    assert first == second
    assert len(first) == 4
    files = list(tmp_path.rglob("events.out.tfevents.*"))
    assert len(files) == 1  # of rank 0
    events = EventAccumulator(str(files[0])).Reload().Scalars("train_loss")
    assert [event.step for event in events] == [0, 1, 2, 3]
    assert [event.value for event in events] == pytest.approx(first, rel=1e-6)  # written in fp32
