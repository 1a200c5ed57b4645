# SPDX-License-Identifier: Apache-2.0
"""A progress bar with the figures to watch while a language model trains.

:class:`MCoreProgressBar` is Lightning's rich progress bar with the loss of the optimizer step, the gradient norm, the
speed in tokens per second over all ranks, this rank's peak memory, and under fp16 the number of skipped steps::

    epoch 0, step 30/100, batch ━━━━━ 120/400 0:00:42 • 0:01:37 2.86it/s loss: 2.314 grad_norm: 0.871 12.3k tok/s

If the output is not a terminal (a log file, a batch job), it writes a plain line from time to time instead::

    epoch 0 | step 30/100 | batch 120/400 | loss: 2.314 | grad_norm: 0.871 | speed: 12.3k tok/s | memory: 1.21 GiB

Only rank 0 writes. ``lightning-mcore fit`` uses it unless the file has another progress bar. In Python, use it as
``Trainer(callbacks=[MCoreProgressBar()])``; it works under every strategy.
"""

import importlib.util
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_mcore.config.text import human

_TOKENS = ("tokens", "input_ids")
_OWN = ("tokens_per_second", "grad_norm", "skipped_steps", "loss_scale", "v_num")  # shown already, or not worth it


class MCoreProgressBar(RichProgressBar):
    """Show step, loss, gradient norm, tokens per second, peak memory and skipped steps while training.

    Args:
        refresh_rate: How often the bar is drawn per second; 0 disables it.
        leave: Keep the bar of an epoch on the screen when the next epoch starts.
        theme: Colours of Lightning's rich progress bar; None for its own.
        console_kwargs: Arguments of rich's ``Console``, such as ``{"stderr": True}``; None for none.
        seconds_between_lines: If the output is not a terminal, the shortest time between two lines, in seconds.
        now: Returns a time in seconds.

    Raises:
        ModuleNotFoundError: ``rich`` is not installed.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import MCoreProgressBar
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[MCoreProgressBar(refresh_rate=2)])
    """

    def __init__(
        self,
        refresh_rate: int = 10,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        seconds_between_lines: float = 10.0,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(refresh_rate, leave, theme or RichProgressBarTheme(), console_kwargs)
        self._seconds_between_lines = seconds_between_lines
        self._now = now
        self._lines: Any = None
        self._last_line = -float("inf")
        self._clock = StepClock(now)
        self._losses: list[torch.Tensor] = []
        self._step = 0
        self._total: int | float | None = None  # batches of this epoch
        self._unit = "tok"
        self._shown: dict[str, str] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether a bar is drawn; False if lines are written instead."""
        return super().is_enabled and self._lines is None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find out whether the output can show a bar."""
        super().setup(trainer, pl_module, stage)
        from rich.console import Console

        console = Console(**{"soft_wrap": True, "highlight": False, **self._console_kwargs})
        # In a notebook, Rich draws only with ipywidgets.
        draws = console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)
        self._lines = None if draws else console

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the figures of the bar as text: our own, then those logged with ``prog_bar=True``."""
        logged = super().get_metrics(trainer, pl_module)
        shown: dict[str, int | str | float | dict[str, float]] = dict(self._shown)
        if any(name.startswith("train_loss") for name in logged):
            shown.pop("loss", None)
        for name, value in logged.items():
            if name not in _OWN:
                shown[name] = human(value) if isinstance(value, int | float) else value
        return shown

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring."""
        super().on_train_start(trainer, pl_module)
        self._clock, self._losses, self._shown = StepClock(self._now), [], {}
        self._step, self._last_line = trainer.global_step, -float("inf")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        self._total = None
        super().on_train_epoch_start(trainer, pl_module)

    def _get_train_description(self, current_epoch: int) -> str:
        """Return the text before the bar; Lightning's counts epochs from ``0/max_epochs - 1``, which may be -2."""
        return self._place(", ", "batch")

    def _place(self, separator: str, batch: str) -> str:
        """Return where the run is: ``epoch 0, step 30/100, batch``."""
        trainer = self.trainer
        parts = [f"epoch {trainer.current_epoch}", f"step {trainer.global_step}", batch]
        if trainer.max_epochs is not None and trainer.max_epochs > 1:
            parts[0] += f" of {trainer.max_epochs}"
        if trainer.max_steps > 0:
            parts[1] += f"/{trainer.max_steps}"
        return separator.join(parts)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Continue measuring after validation; before the first batch, find out how many there are."""
        if self._total is None:
            self._total = _batches_until_the_end(trainer, batch_idx)
            if self.progress is not None and self.train_progress_bar_id is not None:
                self.progress.update(self.train_progress_bar_id, total=self._total)
        self._clock.start()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do not measure validation."""
        self._clock.pause()
        super().on_validation_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; after an optimizer step, update the figures."""
        if self.is_silent:
            return
        self._unit, amount = _amount(batch)
        self._clock.add(amount)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            runs_at_once = not getattr(trainer.strategy, "inline", True)
            self._losses = [] if runs_at_once else self._losses  # a pipeline's last batch has the loss of all
            self._losses.append(loss.detach().float())
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._measure(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, description=self._place(", ", "batch"))
        is_last = batch_idx + 1 == self._total
        if is_last or self._now() - self._last_line >= self._seconds_between_lines:
            self._write_line(trainer, pl_module, batch_idx)

    @property
    def is_silent(self) -> bool:
        """Whether this rank shows nothing."""
        return not super().is_enabled

    def _measure(self, trainer: pl.Trainer) -> None:
        # 2 x 8,192 tokens in 0.5 s are 32,768 tok/s here, and 131,072 tok/s on 4 model copies.
        rate = self._clock.step() * model_copies(trainer.strategy)
        self._shown = {}
        if self._losses:  # Lightning has divided these by the number of batches of a step
            mean = float(torch.stack(self._losses).mean()) * trainer.accumulate_grad_batches
            self._shown["loss"] = human(mean)
            self._losses = []
        optimizer: Any = trainer.optimizers[0] if trainer.optimizers else None
        grad_norm = getattr(optimizer, "grad_norm", None)
        if grad_norm is not None:
            self._shown["grad_norm"] = human(float(grad_norm))
        self._shown["speed"] = f"{human(rate)} {self._unit}/s"
        self._shown["memory"] = f"{peak_memory(trainer.strategy.root_device) / 2**30:.2f} GiB"
        skipped = int(getattr(optimizer, "num_skipped_steps", 0))
        if skipped or trainer.precision.startswith("16"):
            self._shown["skipped"] = str(skipped)

    def _write_line(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int) -> None:
        if self._lines is None or self.is_silent or not self._shown:
            return
        self._last_line = self._now()
        of_total = f"/{int(self._total)}" if self._total not in (None, float("inf")) else ""
        place = self._place(" | ", f"batch {batch_idx + 1}{of_total}")
        figures = [f"{name}: {value}" for name, value in self.get_metrics(trainer, pl_module).items()]
        self._lines.print(" | ".join([place, *figures]), markup=False)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the console, which holds locks."""
        return {**super().__getstate__(), "_lines": None}


def _batches_until_the_end(trainer: pl.Trainer, batch_idx: int) -> int | float:
    """Return the batches of the epoch, or those until the end of the run if that comes first."""
    # max_steps=20, accumulate_grad_batches=4, 300 batches in an epoch: 80. Lightning's bar says 20.
    batches: int | float = trainer.num_training_batches
    if trainer.max_steps < 0:
        return batches
    of_this_step = batch_idx % trainer.accumulate_grad_batches
    left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches - of_this_step
    return min(batches, batch_idx + left)


def _amount(batch: Any) -> tuple[str, int]:
    """Return the unit in which a batch is counted, and its amount: tokens if it has any, otherwise samples."""
    if isinstance(batch, Mapping):
        for name in _TOKENS:
            if isinstance(batch.get(name), torch.Tensor):
                return "tok", batch[name].numel()
    return "samples", extract_batch_size(batch)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes this rank has used so far: of the GPU by torch, or on a CPU by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 2**10


def model_copies(strategy: Any) -> int:
    """Return the number of model copies that read data in parallel under a Lightning strategy."""
    copies: int = getattr(strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
    return copies


class StepClock:
    """Measures tokens and wall-clock seconds from one optimizer step to the next, without validation.

    The owner calls :meth:`start` before each batch, :meth:`add` after it, :meth:`step` after each optimizer step and
    :meth:`pause` before validation.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since: float | None = None
        self._elapsed = 0.0
        self._tokens: Any = 0

    def start(self) -> None:
        """Start measuring, or continue after :meth:`pause`; do nothing if the clock is running."""
        if self._since is None:
            self._since = self._now()

    def add(self, tokens: Any) -> None:
        """Count the tokens of a batch: a number, or a one-element tensor that is read only after the step."""
        self._tokens += tokens

    def pause(self) -> None:
        """Stop measuring until the next :meth:`start`."""
        if self._since is not None:
            self._elapsed += self._now() - self._since
            self._since = None

    def step(self, over_copies: Callable[[Any], Any] = float) -> float:
        """Return the tokens per second since the last step, and start measuring the next one.

        ``over_copies`` turns this rank's count of tokens into the count that is divided by the time.
        """
        # Before the clock is read, because a count on a GPU waits for the step's work.
        tokens = float(over_copies(self._tokens))
        self.pause()
        rate = tokens / max(self._elapsed, 1e-9)
        self._elapsed, self._tokens = 0.0, 0
        self.start()
        return rate
