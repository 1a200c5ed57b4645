# SPDX-License-Identifier: Apache-2.0
"""The output of a LLaMA-Factory run in ``output_dir``: losses, checkpoints and, at the end, the model.

:class:`LossRecord` writes ``trainer_log.jsonl``, where LLaMA-Factory's tools look for losses and for progress::

    {"current_steps": 10, "total_steps": 40, "loss": 1.25, "lr": 1e-05, "epoch": 0.5, "percentage": 25.0,
     "elapsed_time": "0:00:20", "remaining_time": "0:01:00"}

A line for an evaluation has ``eval_loss`` instead of ``loss`` and ``lr``. Stages that learn from preferences add
``accuracy``, ``rewards/...``, ``logps/...`` and the other values that the module logs; in evaluation their names begin
with ``eval_``. Rank 0 writes the file. A resumed run removes the lines of steps that it repeats, so each step appears
once.

Checkpoints (``checkpoint-<step>...``) are saved during the run. The model in Hugging Face form is added at the end, so
that ``output_dir`` itself can be loaded; :func:`move_in` explains how a crash cannot damage it.
"""

import json
import math
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore.checkpoint.atomic import sync_directory

LOG = "trainer_log.jsonl"
PICTURE = "training_loss.png"


class LossRecord(Callback):
    """Records the losses of training and evaluation, and plots them at the end if ``picture`` is set.

    Each loss is a mean over the tokens that are not masked, or over pairs in stages that learn from preferences. Raises
    ModuleNotFoundError if the plot needs matplotlib, which is not installed.
    """

    def __init__(self, folder: str, picture: bool = False) -> None:
        super().__init__()
        if picture:
            _require_matplotlib()
        self.training: list[tuple[int, float]] = []
        self.evaluation: list[tuple[int, float]] = []
        self._folder = folder
        self._file = Path(folder) / LOG
        self._picture = picture
        self._step = self._first = 0
        self._rate = 0.0
        self._began: float | None = None  # seconds of the monotonic clock

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin with the step that the run resumes from."""
        self._begin(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin with the step that the run resumes from, if no evaluation came before."""
        if self._began is None:
            self._begin(trainer)

    def _begin(self, trainer: pl.Trainer) -> None:
        self._step = self._first = trainer.global_step
        self._began = time.monotonic()
        if trainer.is_global_zero:
            _forget_after(self._file, self._first)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Keep the learning rate of this step, before the scheduler sets the next one."""
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._rate = max(rates, default=0.0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Record the loss of an optimizer step, if it is logged."""
        step = trainer.global_step
        # Another microbatch of the same step
        if step == self._step:
            return
        self._step = step
        every = getattr(trainer, "log_every_n_steps", 0)
        loss = trainer.callback_metrics.get("train_loss")
        if not every or step % every or loss is None:
            return
        self.training.append((step, float(loss)))
        self._write(trainer, {"loss": float(loss), "lr": self._rate}, _of_preferences(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the loss of an evaluation, including the one before the first step (``eval_on_start``)."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None:
            return
        self.evaluation.append((trainer.global_step, float(loss)))
        self._write(trainer, {"eval_loss": float(loss)}, _of_preferences(trainer, "val_", "eval_"))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Plot the losses."""
        if self._picture and trainer.is_global_zero and (self.training or self.evaluation):
            self._draw()

    def _write(self, trainer: pl.Trainer, found: dict[str, float], more: dict[str, float]) -> None:
        """Append a line, with the names and order of LLaMA-Factory's ``LogCallback``."""
        if not trainer.is_global_zero:
            return
        total = _all_steps(trainer)
        step = trainer.global_step
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        # Steps of an earlier run took no time in this one.
        left = elapsed / (step - self._first) * (total - step) if step > self._first else 0.0
        accuracy = more.get("rewards/accuracies")
        line = {
            "current_steps": step,
            "total_steps": total,
            **found,
            **({} if accuracy is None else {"accuracy": accuracy}),
            "epoch": _epoch(trainer, total),
            "percentage": round(100 * step / total, 2) if total else 0.0 if trainer.sanity_checking else 100.0,
            "elapsed_time": str(timedelta(seconds=int(elapsed))),
            "remaining_time": str(timedelta(seconds=int(left))),
            **more,
        }
        os.makedirs(self._folder, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name, losses in (("training", self.training), ("evaluation", self.evaluation)):
            if losses:
                axes.plot(*zip(*losses, strict=True), label=name, marker="." if len(losses) < 30 else None)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.legend()
        figure.savefig(os.path.join(self._folder, PICTURE), dpi=120)


def _all_steps(trainer: pl.Trainer) -> int:
    """Return the number of steps of a whole run; 0 if the trainer only evaluates, or does not know it yet."""
    if trainer.state.fn != TrainerFn.FITTING:
        return 0
    if trainer.sanity_checking:  # estimated_stepping_batches would build the training loaders too early
        return max(trainer.max_steps, 0)
    return int(trainer.estimated_stepping_batches)


def _epoch(trainer: pl.Trainer, total: int) -> float:
    """Return how many epochs have passed, as a fraction; for a stream, the share of the run."""
    # In the third epoch (current_epoch = 2), after 30 of 120 batches: 2.25
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    length = float(trainer.num_training_batches)
    if math.isinf(length):
        length = max(total * trainer.accumulate_grad_batches, 1)
    return trainer.current_epoch + (batches.ready / length if length and not trainer.sanity_checking else 0.0)


def _forget_after(file: Path, step: int) -> None:
    """Remove the lines of later steps, which this run repeats."""
    if not file.exists():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        part = file.with_suffix(".part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, file)


def _step_of(line: str) -> float:
    """Return the step of a line."""
    try:
        # A line without a step is kept, and one that a dying process has cut short is removed.
        return float(json.loads(line).get("current_steps", -1))
    except (ValueError, TypeError, AttributeError):
        return math.inf


def _of_preferences(trainer: pl.Trainer, prefix: str = "", written: str = "") -> dict[str, float]:
    """Return the logged values of a preference loss, with ``prefix`` replaced by ``written`` in their names."""
    names = tuple(prefix + name for name in ("rewards/", "logps/", "sft_loss", "odds_ratio_loss", "kl"))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(names)}
    # A value is NaN if the batch had no example of its kind.
    return {written + name.removeprefix(prefix): value for name, value in logged.items() if math.isfinite(value)}


def _require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plot_loss: True needs the package matplotlib; install it, or leave plot_loss out and read the losses in"
            f" {LOG}"
        ) from None


# "-v1" is Lightning's suffix for a name that is taken.
_CHECKPOINT = re.compile(r"checkpoint-(\d+)(-v\d+)?\.ckpt")
_PREEMPTED = re.compile(r"last-preempted(-v\d+)?\.ckpt")  # written for enable_jit_checkpoint
_CONFIGS = ("config.json", "adapter_config.json")  # without these, nothing can load a model or adapters
_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")
_OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
_UNFINISHED = "unfinished-model"
_NAMES, _PART = ".files-of-the-model", ".part"  # the names of the files to move


def where_to_resume(output_dir: str, overwrite: bool) -> str | None:
    """Return the newest checkpoint in a folder; None to start a new run, which ``overwrite`` always does."""
    folder = Path(output_dir)
    if overwrite or not folder.is_dir():
        return None
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    preempted = [path for path in folder.iterdir() if _PREEMPTED.fullmatch(path.name)]
    newest = ([max(found)[1]] if found else []) + preempted
    if newest:
        # By time, because a preempted checkpoint has no step in its name.
        return str(max(newest, key=lambda path: path.stat().st_mtime))
    there = [name for name in _OF_A_MODEL + _OF_ADAPTERS if (folder / name).exists()]
    if there:
        raise ValueError(
            f"output_dir: {output_dir} already holds a model ({there[0]}), but no checkpoint to resume from; choose"
            " another folder, or set overwrite_output_dir: true"
        )
    return None


def unfinished(output_dir: str) -> str:
    """Return the folder inside ``output_dir`` where the model is written first."""
    return os.path.join(output_dir, _UNFINISHED)


def is_waiting(output_dir: str) -> bool:
    """Return whether the inner folder contains a complete model that is not moved yet, or only partly."""
    source = Path(unfinished(output_dir))
    # The folder appears only when complete, so a config in it is enough; the list of names means a move has begun.
    return any((source / name).is_file() for name in (_NAMES, *_CONFIGS))


def _noted(source: Path) -> list[str]:
    """Return the names of the files to move; ValueError if their list is damaged."""
    try:
        names = json.loads((source / _NAMES).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or any(name != os.path.basename(str(name)) for name in names):
        raise ValueError(f"{source / _NAMES} is damaged; move the files of {source} to {source.parent}, or delete both")
    return names


def move_in(output_dir: str) -> None:
    """Move the finished model from the inner folder to ``output_dir``, replacing an older one; without one, do nothing.

    If the process dies in between, the next call finishes the move: the new model's file names are saved before the
    first file of the old one is deleted. Until the move ends there is no ``config.json``, so nothing can load a mixture
    of both. Adapters and their ``adapter_config.json`` are moved in the same way.
    """
    source, target = Path(unfinished(output_dir)), Path(output_dir)
    if not is_waiting(output_dir):
        return
    if not (source / _NAMES).is_file():
        _note(source, sorted({path.name for path in source.iterdir()} - {_NAMES + _PART}))
    names = _noted(source)
    model, adapters = _CONFIGS
    config = adapters if adapters in names else model
    if (source / config).exists():
        (target / config).unlink(missing_ok=True)
    older = [*target.glob("model*.safetensors"), *(target / name for name in (_OF_A_MODEL[2], *_OF_ADAPTERS))]
    for stale in older if config == model else ():  # adapters do not replace a model
        if stale.name not in names:
            stale.unlink(missing_ok=True)
    # The config moves last.
    for name in sorted(names, key=lambda name: (name == config, name)):
        if (source / name).exists():
            os.replace(source / name, target / name)
    # The moves must be on disk before the list of them is deleted.
    sync_directory(output_dir)
    (source / _NAMES).unlink()
    source.rmdir()


def _note(source: Path, names: list[str]) -> None:
    part = source / (_NAMES + _PART)
    with part.open("w") as file:
        json.dump(names, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, source / _NAMES)
