# SPDX-License-Identifier: Apache-2.0
"""Evaluation needs the memory of a chunk of its logits, and measures what it would measure from all at once."""

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


class FromLogits(MCoreGPT):
    """A model whose evaluation reads the logits, as a user's may."""

    def _judged(self, batch: Any) -> Any:
        logits, inputs = self.token_logits(batch)
        return self.losses_of_logits(logits, inputs), logits, inputs


def validated(
    precision: str, size: int, chunk: int | None, model: type[MCoreGPT] = MCoreGPT, at_once: int = 2**24
) -> tuple[dict[str, float], float]:
    """Return the metrics of a batch, and its memory in bytes for each logit of this rank."""
    strategy_module._LOGITS_AT_ONCE = at_once
    peak = Peak()
    trainer = make_trainer(
        MCoreStrategy(tensor_model_parallel_size=size, sequence_parallel=size > 1, loss_chunk_size=chunk),
        plugins=[MCorePrecision(precision)],  # type: ignore[arg-type]
        callbacks=[peak],
        limit_val_batches=1,
    )
    loader: Any = DataLoader(Rows(ROWS, LENGTH, VOCABULARY, False, False), batch_size=ROWS)
    [found] = trainer.validate(model(VOCABULARY, LENGTH, SIZES), loader, verbose=False)
    return dict(found), peak.live.peak / (ROWS * LENGTH * VOCABULARY / size)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_chunk_of_logits_is_enough_for_the_metrics_of_all(precision: str, size: int) -> None:
    whole = run_ranks(size, validated, precision, size, None, FromLogits)
    chunks = run_ranks(size, validated, precision, size, 64)
    for (wanted, before), (found, after) in zip(whole, chunks, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)
        assert found["val_accuracy"] == wanted["val_accuracy"]
        assert after < before / 3.5, (before, after)  # 64 of 256 tokens, and what is not logits


def test_losses_of_all_logits_copy_some_of_them_at_a_time() -> None:
    [(wanted, before)] = run_ranks(1, validated, "bf16-mixed", 1, None, FromLogits, 2**40)
    [(found, after)] = run_ranks(1, validated, "bf16-mixed", 1, None, FromLogits, 2**20)
    assert found == wanted
    assert after < 6.2, (before, after)  # 2 bytes in bf16, from which 4 in fp32 are made
    assert before > 7.9, (before, after)  # all at once are copied, 4 more
