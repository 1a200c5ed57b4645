# SPDX-License-Identifier: Apache-2.0
"""Decide how a training command ends: one sentence for an error before the run has begun, a traceback for a later one.

A wrong file, key, value or layout gives one sentence and exit code 2. An error during a run keeps its traceback, and so
does an error in the user's own code, because a sentence without a place would not help. ``lightning-mcore fit`` and
``llamafactory`` train under :func:`guarded`.
"""

import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mcore.cli.command import DONE, EXPECTED, INTERRUPTED, WRONG, refused, sentence
from lightning_mcore.parallel.known_warnings import ignore_known_warnings

# Folders of this package, of Python's library and of installed packages
_LIBRARY_FOLDERS = [
    str(Path(__file__).resolve().parents[1]),
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
]
_OTHER_RANKS_WAIT = 5.0  # seconds; rank 0 reports the same error and ends them first, unless it has none


class Beginning(pl.Callback):
    """Records whether a run has begun; an error after that is not a wrong setting."""

    is_over = False
    _trainer: pl.Trainer | None = None

    def end_other_ranks(self) -> None:
        """Kill the ranks that this process has started, which would report the same error again."""
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if isinstance(launcher, _SubprocessScriptLauncher):
            launcher.kill(signal.SIGKILL)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remember the trainer, whose ranks may have to be ended."""
        self._trainer = trainer

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that the run has begun."""
        self.is_over = True

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that the run begins again: Lightning reads the training data after the sanity check."""
        self.is_over = False

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start


def guarded(run: Callable[[Beginning], object]) -> int:
    """Run a training with a callback for its trainer, and return the exit code; early errors are one sentence."""
    beginning = Beginning()
    ignore_known_warnings()
    try:
        run(beginning)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning has shut down the run
            return INTERRUPTED
        raise
    except (*EXPECTED, MisconfigurationException) as error:
        if beginning.is_over or _is_in_code_of_the_user(error):
            raise
        # Every rank fails alike here, so rank 0 speaks for all.
        rank = getattr(rank_zero_only, "rank", 0)
        if rank == 0:
            beginning.end_other_ranks()
            return refused(error)
        # Rank 0 normally ends this process during the wait. If it does not, only this rank has the error.
        time.sleep(_OTHER_RANKS_WAIT)
        print(f"error on rank {rank}: {sentence(error)}", file=sys.stderr)
        return WRONG
    return DONE


def _is_in_code_of_the_user(error: Exception) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(not file.startswith(("<", *_LIBRARY_FOLDERS)) for file in files)
