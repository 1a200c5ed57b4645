# SPDX-License-Identifier: Apache-2.0
"""Evaluation needs the memory of a chunk of its logits, and measures what it would measure from all at once."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCorePrecision, MCorePreference, MCoreStrategy, Preference
from lightning_mcore.strategy import module as strategy_module
from tests.support.live_memory import LiveBytes, Measure, Rows
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
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
@pytest.mark.parametrize("size", thorough_but([1, 2], 2))
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


class Whole(MCoreGPT):
    """Predicts and generates from all logits of a row, as a model of other chunks than ours does."""

    _is_of_gpt_chunks = False  # type: ignore[assignment]


def forward_peak(kind: type[MCoreGPT], step: str, sizes: dict[str, int]) -> tuple[Any, float]:
    """Return the result of a forward step, and its memory in bytes for each logit of this rank."""
    pl.seed_everything(1)
    found: list[Any] = []

    class Run(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            rows = Rows(ROWS, LENGTH, VOCABULARY, False, False)
            batch = {"tokens": rows.text[:, :-1], "last": torch.tensor([LENGTH - 1, LENGTH // 3])}
            with LiveBytes() as live:
                result = pl_module.run_forward(step, pl_module.shard_context(batch))
            found.extend((result, live.peak))

    trainer = make_trainer(MCoreStrategy(**sizes, loss_chunk_size=32), callbacks=[Run()], limit_val_batches=1)
    loader: Any = DataLoader(Rows(ROWS, LENGTH, VOCABULARY, False, False), batch_size=ROWS)
    trainer.validate(kind(VOCABULARY, LENGTH, SIZES | {"num_layers": 2}), loader, verbose=False)
    return found[0], found[1] / (ROWS * LENGTH * VOCABULARY / sizes.get("tensor_model_parallel_size", 1))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "tp2-sp", "cp2", "pp2"))
@pytest.mark.parametrize(("step", "share"), [("predict_step", 0.6), ("next_logits", 0.15)])
def test_a_forward_step_makes_only_the_logits_that_it_needs(step: str, share: float, name: str) -> None:
    world = 1 if name == "one" else 2
    whole = run_ranks(world, forward_peak, Whole, step, LAYOUTS[name])
    needed = run_ranks(world, forward_peak, MCoreGPT, step, LAYOUTS[name])
    for (wanted, _), (found, _) in zip(whole, needed, strict=True):
        assert torch.allclose(found.float(), wanted.float(), atol=1e-5)
    # The last stage has the logits
    assert max(peak for _, peak in needed) < share * max(peak for _, peak in whole)


class Preferences(MCorePreference):
    """Measures the log-probabilities of answers, as the reference's are computed."""

    def on_train_end(self) -> None:
        super().on_train_end()
        batch = next(iter(self.trainer.train_dataloader))
        with LiveBytes() as live:
            self.logps = self.run_forward("answer_logps", batch)
        self.peak = live.peak


def trained_on_preferences(size: int | None, sizes: dict[str, Any]) -> tuple[float, Any, int, int]:
    """Return the loss and the reference's log-probabilities, and the peaks of memory of both, in bytes."""
    pl.seed_everything(1)
    measure = Measure()
    loader: Any = DataLoader(Rows(ROWS, LENGTH, VOCABULARY, False, True), batch_size=ROWS)
    module = Preferences(VOCABULARY, LENGTH, SIZES, Preference("orpo"))
    trainer = make_trainer(MCoreStrategy(**sizes, loss_chunk_size=size), callbacks=[measure], max_steps=1)
    trainer.fit(module, loader)
    return float(trainer.callback_metrics["train_loss"]), module.logps, measure.found["activations"], module.peak


@pytest.mark.parametrize("name", thorough_but(["one", "tp2-sp"], "tp2-sp"))
def test_log_probabilities_of_preferences_come_in_chunks(name: str) -> None:
    world = 1 if name == "one" else 2
    whole = run_ranks(world, trained_on_preferences, None, LAYOUTS[name])
    chunks = run_ranks(world, trained_on_preferences, 32, LAYOUTS[name])  # of 256 tokens
    for (wanted, wanted_logps, before, before_logps), (loss, logps, after, after_logps) in zip(
        whole, chunks, strict=True
    ):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert torch.allclose(logps, wanted_logps, rtol=1e-5)
        assert after < 0.5 * before, (before, after)
        assert after_logps < 0.5 * before_logps, (before_logps, after_logps)
