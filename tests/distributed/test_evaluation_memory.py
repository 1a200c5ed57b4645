# SPDX-License-Identifier: Apache-2.0
"""Evaluation needs little more memory than its logits, and measures what it would measure from all of them at once."""

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCorePrecision, MCoreStrategy
from lightning_mcore.strategy import module as strategy_module
from tests.support.live_memory import LiveBytes, Rows
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

LENGTH, VOCABULARY, ROWS = 128, 50_000, 2
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


class Peak(pl.Callback):
    """Measures the memory that a validation batch adds."""

    def on_validation_batch_start(self, *_: Any) -> None:
        self.live = LiveBytes()
        self.live.__enter__()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.live.__exit__(None, None, None)


def validated(precision: str, size: int, at_once: int) -> tuple[dict[str, float], float]:
    """Return the metrics of a batch, and its memory in bytes for each logit of this rank."""
    strategy_module._LOGITS_AT_ONCE = at_once
    peak = Peak()
    trainer = make_trainer(
        MCoreStrategy(tensor_model_parallel_size=size),
        plugins=[MCorePrecision(precision)],  # type: ignore[arg-type]
        callbacks=[peak],
        limit_val_batches=1,
    )
    loader: Any = DataLoader(Rows(ROWS, LENGTH, VOCABULARY, False, False), batch_size=ROWS)
    [found] = trainer.validate(MCoreGPT(VOCABULARY, LENGTH, SIZES), loader, verbose=False)
    return dict(found), peak.live.peak / (ROWS * LENGTH * VOCABULARY / size)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("size", [1, 2])
def test_metrics_are_those_of_all_logits_at_once_in_less_memory(precision: str, size: int) -> None:
    whole = run_ranks(size, validated, precision, size, 2**40)
    parts = run_ranks(size, validated, precision, size, 2**20)
    for (wanted, before), (found, after) in zip(whole, parts, strict=True):
        assert found == wanted
        if precision == "bf16-mixed":  # 2 bytes in bf16, from which 4 in fp32 are made; all at once are copied, 4 more
            assert after < 6.2, (before, after)
            assert before > 7.9, (before, after)
