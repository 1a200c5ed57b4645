# SPDX-License-Identifier: Apache-2.0
"""Lightning's ThroughputMonitor, set up as the guide says, logs the speed that ``MCoreGPT`` logs, at each step.

Both read a clock that moves only at the end of a batch, by another amount each time, so that their rates are equal.
"""

import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import throughput_monitor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy
from lightning_mcore.models import speed
from lightning_mcore.strategy.progress import StepClock
from tests.support.pages import blocks
from tests.support.ranks import run_ranks
from tests.support.toy import Memory, make_trainer

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "watch.md"
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
ROWS, LENGTH, ACCUMULATED, STEPS = 4, 8, 2, 5
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


class Clock(pl.Callback):
    """Moves at each batch: by 0.5 s more than at the last one in training, by 100 s in validation."""

    def __init__(self) -> None:
        self.seconds = self.last = 0.0

    def now(self) -> float:
        return self.seconds

    def on_train_batch_end(self, *_: Any) -> None:
        self.last += 0.5
        self.seconds += self.last

    def on_validation_batch_start(self, *_: Any) -> None:
        self.seconds += 100


def fit(sizes: dict[str, int]) -> list[dict[str, float]]:
    """Train with both and with validation in between; return what was logged."""
    page: dict[str, Any] = {}
    [text] = [block.text for block in blocks(GUIDE, "python") if "ThroughputMonitor" in block.text]
    exec(text, page)
    clock, memory, strategy = Clock(), Memory(), MCoreStrategy(**sizes)
    monitor = page["throughput"](strategy, window_size=ACCUMULATED + 1)  # from the end of a step to that of the next
    row = {"tokens": torch.arange(LENGTH), "labels": torch.arange(1, LENGTH + 1)}
    data: Any = DataLoader([row] * 256, batch_size=ROWS)  # type: ignore[arg-type]
    trainer = make_trainer(
        strategy,
        callbacks=[clock, monitor],
        accumulate_grad_batches=ACCUMULATED,
        max_steps=STEPS,
        logger=memory,
        val_check_interval=2 * ACCUMULATED,
        limit_val_batches=1,
    )
    with (
        mock.patch.object(throughput_monitor, "time", types.SimpleNamespace(perf_counter=clock.now)),
        mock.patch.object(speed, "StepClock", functools.partial(StepClock, clock.now)),
    ):
        trainer.fit(page["Measured"](vocab_size=64, seq_length=LENGTH, transformer=TINY), data, data)
    return memory.rows


def in_order(rows: list[dict[str, float]], name: str) -> Iterator[float]:
    """Yield the values of a name from the second step on; before, the monitor's window is not full."""
    values = [row[name] for row in rows if name in row]
    yield from values[1 - STEPS :]


@pytest.mark.works_with("lightning", "ThroughputMonitor: MCoreGPT's tokens and FLOPs per second, on dp2, tp2 and pp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_log_the_same_speed(layout: str) -> None:
    rows = run_ranks(2, fit, LAYOUTS[layout])[0]
    copies = 2 if layout == "dp2" else 1
    tokens = list(in_order(rows, "tokens_per_second"))
    assert len(set(tokens)) == STEPS - 1
    assert tokens == pytest.approx([copies * ROWS * LENGTH * ACCUMULATED / step for step in (3.5, 5.5, 7.5, 9.5)])
    assert list(in_order(rows, "train/items_per_sec")) == pytest.approx(tokens, rel=1e-6)
    flops = [1e12 * value for value in in_order(rows, "model_tflops")]
    assert list(in_order(rows, "train/device/flops_per_sec")) == pytest.approx(flops, rel=1e-6)
    samples = [value / LENGTH for value in tokens]
    assert list(in_order(rows, "train/samples_per_sec")) == pytest.approx(samples, rel=1e-6)
    assert list(in_order(rows, "train/batches")) == [ACCUMULATED * step for step in range(2, STEPS + 1)]
    batches = [value / ROWS / copies * 2 for value in samples]  # each rank's own, although ranks of a copy share theirs
    assert list(in_order(rows, "train/batches_per_sec")) == pytest.approx(batches, rel=1e-6)
