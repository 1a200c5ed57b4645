# SPDX-License-Identifier: Apache-2.0
"""The base of callbacks that record some steps on some ranks, each rank into a file named by its coordinates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_mcore.config.value_checks import require_size
from lightning_mcore.strategy.strategy import MCoreStrategy


def place_of(trainer: pl.Trainer, rank: int) -> str:
    """Return a rank with its coordinates, such as ``rank3-tp1.pp1.cp0.dp0``."""
    if not isinstance(trainer.strategy, MCoreStrategy):
        return f"rank{rank}"
    return f"rank{rank}-{trainer.strategy.layout.coordinates(rank, trainer.world_size)}"


class ChosenSteps(pl.Callback):
    """Records on some ranks, from before an optimizer step until after it, or until the run ends.

    Args:
        step: The first optimizer step; 0 is the first of a run.
        num_steps: Number of steps.
        ranks: Global ranks.
        folder: Folder for the files.
        suffix: Suffix of the files.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is too small.
    """

    def __init__(self, step: int, num_steps: int, ranks: Sequence[int], folder: str, suffix: str) -> None:
        require_size("step", step, at_least=0)
        require_size("num_steps", num_steps)
        for rank in ranks:
            require_size("ranks", rank, at_least=0)
        self.step, self.num_steps, self.ranks = step, num_steps, list(ranks)
        self.folder, self._suffix = folder, suffix
        self._has_begun = False

    def begin(self) -> None:
        """Start recording."""
        raise NotImplementedError

    def end(self, path: str) -> None:
        """Write the file and stop recording."""
        raise NotImplementedError

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject ranks that the run does not have."""
        last = trainer.world_size - 1
        if missing := [rank for rank in self.ranks if rank > last]:
            raise ValueError(
                f"ranks={self.ranks} of {type(self).__name__} has {missing[0]}, but there are ranks 0 to {last}; choose"
                " among them"
            )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Begin if the step is due."""
        is_due = self.step <= trainer.global_step < self.step + self.num_steps
        if is_due and trainer.global_rank in self.ranks and not self._has_begun:
            self._has_begun = True
            self.begin()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """End after the last step."""
        if trainer.global_step >= self.step + self.num_steps:
            self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End with the run."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End with what was recorded."""
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        if self._has_begun:
            self._has_begun = False
            folder = Path(self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            self.end(str(folder / f"step{self.step}-{place_of(trainer, trainer.global_rank)}{self._suffix}"))
