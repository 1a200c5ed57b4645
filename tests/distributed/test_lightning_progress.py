# SPDX-License-Identifier: Apache-2.0
"""The progress bar in a run: what it shows of a step, on a terminal and in a log file, and on rank 0 alone.

Time is counted here, a second for each look at the clock, so that the speed is known.
"""

import io
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore import MCorePrecision
from lightning_mcore.strategy import progress
from lightning_mcore.strategy.progress import MCoreProgressBar
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import PP2, Batch, PlainNet, StagedNet, loader, make_trainer

pytestmark = pytest.mark.distributed


def seconds() -> Callable[[], float]:
    """Return a clock that goes on by one second at each look."""
    state = SimpleNamespace(time=0.0)

    def now() -> float:
        state.time += 1.0
        return state.time

    return now


def known_loss(module: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Return a loss that tells which samples it is about."""
    loss = module.predictions(batch).float().sum() * 0 + batch["index"].float().mean()
    module.log("shown", loss.detach() * 2000, prog_bar=True)
    return loss


class Staged(StagedNet):
    training_step = known_loss


class Plain(PlainNet):
    training_step = known_loss


def show(module: Any, strategy: Any, terminal: bool, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Fit with a progress bar; return what it wrote and the figures it held."""
    out = io.StringIO()
    console = {"file": out, "force_terminal": terminal, "width": 200, "force_interactive": terminal}
    bar = MCoreProgressBar(console_kwargs=console, seconds_between_lines=0.0, now=seconds())
    trainer = make_trainer(
        strategy, callbacks=[bar], enable_progress_bar=True, use_distributed_sampler=False, **arguments
    )
    trainer.fit(module, loader(10, 2), loader(2, 2))
    trainer.validate(module, loader(2, 2), verbose=False)
    return out.getvalue(), dict(bar._shown)


def show_in_every_way() -> dict[str, Any]:
    """Return what each kind of run shows on this rank."""
    return {
        "terminal": show(Staged(), PP2, True, accumulate_grad_batches=4),
        "file": show(Staged(), PP2, False, accumulate_grad_batches=4),
        "plain": show(Plain(), {}, False, accumulate_grad_batches=4),
        "half": show(Staged(), {**PP2, "precision_plugin": MCorePrecision("16-mixed")}, False),
    }


def test_the_figures_are_those_of_the_step_and_rank_0_alone_writes_them() -> None:
    first, second = run_ranks(2, show_in_every_way, timeout=120)
    for way in ("terminal", "file", "plain"):
        assert second[way][0] == "", way
    text, shown = first["terminal"]
    assert shown["loss"] == "8.5"  # the last window is one batch, samples 8 and 9
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "epoch 0, step 2, batch" in bar
    assert re.search(r"loss: 8.5 grad_norm: 0 speed: \S+ samples/s memory: \S+ GiB shown: 17.0k", bar)
    lines = first["file"][0].splitlines()
    assert len(lines) == 2, lines  # nothing is shown before the first step is done
    assert re.fullmatch(
        r"epoch 0 \| step 1 \| batch 4/5 \| loss: 3.5 \| grad_norm: 0 \| speed: \S+ samples/s \| memory: \S+ GiB"
        r" \| shown: 7.00k",
        lines[0],
    )
    assert re.match(r"epoch 0 \| step 2 \| batch 5/5 \| loss: 8.5 ", lines[1])
    plain = first["plain"][0].splitlines()
    losses = [re.search(r"loss: (\S+)", line).group(1) for line in plain]  # type: ignore[union-attr]
    assert losses[0] == "3.5"
    assert losses[-1] == "8.5"
    assert "| skipped: " in first["half"][0]


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_has_a_bar_only_with_ipywidgets(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name if installed else None)
    bar = MCoreProgressBar(console_kwargs={"force_jupyter": True})
    bar.setup(SimpleNamespace(is_global_zero=True), None, "fit")  # type: ignore[arg-type]
    assert bar.is_enabled == installed


@on_ranks(1, timeout=120)
def test_a_line_counts_the_batches_until_the_end_of_the_epoch_or_of_the_run() -> None:
    """An epoch of five batches is two steps of four and one; the third step ends the run after four batches."""
    out = io.StringIO()
    bar = MCoreProgressBar(console_kwargs={"file": out, "width": 200}, seconds_between_lines=0.0, now=seconds())
    options = {"accumulate_grad_batches": 4, "max_steps": 3, "max_epochs": -1, "use_distributed_sampler": False}
    make_trainer({}, callbacks=[bar], enable_progress_bar=True, **options).fit(Plain(), loader(10, 2))
    places = [line.partition(" | loss")[0] for line in out.getvalue().splitlines()]
    assert places[0] == "epoch 0 | step 1/3 | batch 4/5"
    assert places[1] == "epoch 0 | step 2/3 | batch 5/5"
    assert places[-1] == "epoch 1 | step 3/3 | batch 4/4"


def rates(with_tokens: bool) -> str:
    """Return the speed of a step of two batches, under two model copies."""
    bar = MCoreProgressBar(now=seconds())
    trainer: Any = SimpleNamespace(
        global_step=0,
        is_global_zero=True,
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2}, root_device=torch.device("cpu")),
        optimizers=[],
        precision="32-true",
        num_training_batches=2,
        accumulate_grad_batches=2,
        progress_bar_metrics={},
        loggers=[],
    )
    bar._lines = io.StringIO()  # as where there is no terminal
    bar._last_line = float("inf")
    batch = {"tokens" if with_tokens else "x": torch.zeros(4, 1000)}
    bar._clock.start()  # at 1 s
    bar.on_train_batch_end(trainer, None, None, batch, 0)  # type: ignore[arg-type]
    trainer.num_training_batches, trainer.global_step = 9, 1
    bar.on_train_batch_end(trainer, None, None, batch, 1)  # type: ignore[arg-type]
    return bar._shown["speed"]


def test_tokens_are_counted_over_all_model_copies_where_a_batch_has_them() -> None:
    # two batches of 4 rows on two copies; the clock is looked at twice after it started, once to see about a line
    assert rates(with_tokens=True) == "8.00k tok/s"
    assert rates(with_tokens=False) == "8 samples/s"
