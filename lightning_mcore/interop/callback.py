# SPDX-License-Identifier: Apache-2.0
"""``SaveHFModel``: write the model in Hugging Face form at the end of a run, or next to every checkpoint.

The weights are written from the running model's memory, so its Hugging Face form may exist while a checkpoint is still
being saved asynchronously. ModelCheckpoint decides how checkpoints are named and which are kept. After each of its
hooks, before the weights change, this callback looks for checkpoints that are new or deleted. At the end of an epoch,
Lightning calls ModelCheckpoint's hook last; a checkpoint saved there is noticed when the next epoch starts, or when
training ends.
"""

import logging
import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.config.lora import NOT_MERGED, LoRA
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, CONFIG_FILE
from lightning_mcore.hf.peft_tensors import ExpertLayout
from lightning_mcore.interop import hub
from lightning_mcore.interop.export import check_export, export_model
from lightning_mcore.interop.export_adapter import check_adapter_export, save_adapter
from lightning_mcore.interop.export_folder import is_own, mark_own, require_free
from lightning_mcore.interop.export_plan import MAX_SHARD_SIZE, ExportOptions
from lightning_mcore.parallel.consensus import run_on_rank0

SUFFIX = "-hf"

_log = logging.getLogger(__name__)


class SaveHFModel(Callback):
    """Write the model in Hugging Face form at the end of ``fit``, or next to every checkpoint of a ModelCheckpoint.

    With ``every_checkpoint=True``, ``runs/gpt/epoch=1-step=200.ckpt`` gets a ``runs/gpt/epoch=1-step=200.ckpt-hf`` next
    to it, with the same weights. When ModelCheckpoint deletes the checkpoint, this is deleted too. When a checkpoint is
    saved again under the same name, such as ``last.ckpt``, its Hugging Face form is replaced. Three kinds of
    checkpoints get no Hugging Face form: links, as from ``save_last="link"``; checkpoints of ``PreemptionCheckpoint``,
    which has little time; and checkpoints that you save yourself. Export those with ``lightning-mcore export``.

    A model that cannot be exported raises an error when training starts. After an exception, nothing more is written.

    Args:
        folder: Where to write the model at the end of ``fit``. It must be empty, not exist, or contain only what this
            callback wrote in an earlier run, such as the run that ``ckpt_path`` continues; that is replaced at the end.
            None to write none.
        every_checkpoint: Whether to write next to every checkpoint.
        like: Hugging Face folder with the config, generation config and tokenizer to use; None for the model's source.
        family: The kind of model to write: a ``model_type``, or ``"package.module:FAMILY"`` for your own family; None
            for the family of the model's source, or else the first that fits.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``, or ``"auto"`` for the dtype of the model's weights.
        max_shard_size: Size of a file in bytes, or as text, such as ``"5GB"``.
        adapter: Write only the LoRA adapters, as a PEFT folder; False writes the whole model, with adapters merged into
            its weights.
        experts: With ``adapter``, the layout of routed experts: ``"stacked"``, a tensor for all experts of a layer, as
            PEFT with transformers 5 and vLLM from 0.23 read; ``"each"``, a pair for each projection of each expert.
        push_to_hub: Repository on the Hugging Face hub, such as ``"organization/name"``, to which ``folder`` is
            uploaded at the end of ``fit``, with a model card. It is made when training starts, private, unless it
            exists. None to upload nothing.

    Raises:
        ValueError: Nothing would be written, or an argument has an unknown value.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> from lightning_mcore import SaveHFModel
        >>> callbacks = [ModelCheckpoint("runs/gpt", save_top_k=2, monitor="val_loss"), SaveHFModel("runs/gpt/final")]
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=callbacks)
    """

    def __init__(
        self,
        folder: str | None = None,
        every_checkpoint: bool = False,
        like: str | None = None,
        family: str | None = None,
        dtype: str = "auto",
        max_shard_size: str | int = MAX_SHARD_SIZE,
        adapter: bool = False,
        experts: ExpertLayout = "stacked",
        push_to_hub: str | None = None,
    ) -> None:
        super().__init__()
        if folder is None and not every_checkpoint:
            raise ValueError(
                f"{type(self).__name__}() writes nothing; give a folder, or every_checkpoint=True, or both"
            )
        if push_to_hub is not None:
            if folder is None:
                raise ValueError(f"push_to_hub={push_to_hub!r} uploads folder, which is None; give folder too")
            hub.require_name(push_to_hub)
        self.folder = None if folder is None else os.path.abspath(folder)
        self.every_checkpoint = every_checkpoint
        self.adapter = adapter
        self.experts = experts
        self.push_to_hub = push_to_hub
        self._options = ExportOptions(like, family, dtype, max_shard_size)
        self._tracked: list[_SavedCheckpoints] = []
        self._beside: set[str] = set()  # checkpoints that have, or soon will have, a Hugging Face form
        self._there: set[str] = set()  # those that have been seen on disk, so one that is gone was deleted

    @property
    def state_key(self) -> str:
        """A key that distinguishes several of these callbacks in one trainer."""
        return self._generate_state_key(folder=self.folder, every_checkpoint=self.every_checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run: the checkpoints that have a Hugging Face form."""
        return {"beside": sorted(self._beside)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add the result of :meth:`state_dict` to what earlier fits wrote, without folders that no longer exist."""
        self._beside |= {path for path in state_dict["beside"] if os.path.isdir(path + SUFFIX)}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move after the other callbacks, to see what ModelCheckpoint has saved; the model is not built yet.

        Raises:
            ValueError: The trainer has no ModelCheckpoint to write next to, there are no adapters to write, or they
                cannot be written or merged.
        """
        lora = getattr(pl_module, "lora", None)
        if stage == "fit" and self._is_active(trainer):
            if self.adapter:
                check_adapter_export(pl_module, self.experts)
            elif isinstance(lora, LoRA) and lora.quantization:
                raise ValueError(NOT_MERGED)
            if self.every_checkpoint and not _model_checkpoints(trainer):
                raise ValueError(
                    f"{type(self).__name__}(every_checkpoint=True) writes beside a ModelCheckpoint, and the trainer has"
                    " none; add ModelCheckpoint(dirpath) to its callbacks, or give folder"
                )
        # Lightning runs hooks in list order; a checkpoint must be there before this callback looks for it
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined] # a new list, because Lightning is iterating

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the model can be written later.

        Raises:
            RuntimeError: The hub cannot be written to.
            ValueError: The model's family is unknown, the folder is taken, or checkpoints go to another machine.
        """
        if not self._is_active(trainer):
            return
        folder = self.folder
        if folder is not None:
            # Rank 0 looks, so that ranks with different views of the disk agree
            run_on_rank0(lambda: _require_replaceable(folder, pl_module))
        for checkpoint in _model_checkpoints(trainer) if self.every_checkpoint else []:
            if not checkpoint_files.writes_directly(str(checkpoint.dirpath)):
                raise ValueError(
                    f"{type(self).__name__}(every_checkpoint=True) writes to a disk of this machine, and"
                    f" {checkpoint.dirpath} is not on one; give folder, or export the checkpoints afterwards"
                )
        if not self.adapter:
            check_export(pl_module, self._options)
        if self.push_to_hub is not None:
            run_on_rank0(partial(hub.open_repository, self.push_to_hub))
        self._tracked = [_SavedCheckpoints(checkpoint) for checkpoint in _model_checkpoints(trainer)]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Write next to the checkpoints that were saved after this batch."""
        self._follow(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write next to the checkpoints that were saved after the validation."""
        self._follow(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write next to the checkpoints of the last epoch's end, where ModelCheckpoint's hook is the last.

        Source: ``_FitLoop.on_advance_end`` (Lightning 2.6.6).
        """
        self._follow(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write next to the checkpoints that were saved last, and into the folder, which may go to the hub.

        Raises:
            RuntimeError: The folder was written, but not uploaded.
        """
        self._follow(trainer, pl_module)
        if self.folder is not None and self._is_active(trainer):
            self._write(pl_module, self.folder, replace=run_on_rank0(partial(is_own, self.folder)))
            try:
                if self.push_to_hub is not None:
                    origin = hub.Origin.of_run(trainer, pl_module)
                    run_on_rank0(partial(hub.upload, self.folder, self.push_to_hub, origin))
            finally:
                run_on_rank0(partial(mark_own, self.folder))  # after the model card

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Delete the Hugging Face forms of deleted checkpoints; asynchronous saves delete some at the very end."""
        self._delete_stale(trainer)
        self._tracked = []

    def _follow(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Write next to the checkpoints saved since the last call; collective over the world if there are any."""
        if not self.every_checkpoint or not self._tracked or trainer.sanity_checking:
            return
        # ModelCheckpoint's attributes are the same on every rank, so all ranks take this branch together
        saved = sorted({path for tracked in self._tracked for path in tracked.saved_since()})
        if not saved:
            return
        # Rank 0 looks at the disk for all
        for path in run_on_rank0(lambda: [found for found in saved if not os.path.islink(found)]):
            self._write(module, path + SUFFIX, replace=True)
            self._beside.add(path)
        self._delete_stale(trainer)

    def _write(self, module: pl.LightningModule, out: str, replace: bool) -> None:
        if self.adapter:
            save_adapter(module, out, replace, self.experts)
        else:
            export_model(module, out, **vars(self._options), replace=replace)

    def _delete_stale(self, trainer: pl.Trainer) -> None:
        """Delete the Hugging Face forms of deleted checkpoints, on rank 0; only warn if that fails."""
        if not trainer.is_global_zero:
            return
        # An asynchronous save makes the checkpoint's path later: only a path that was there and is gone was deleted
        self._there |= {path for path in self._beside if os.path.lexists(path)}
        for path in {path for path in self._there if not os.path.lexists(path)}:
            beside = path + SUFFIX
            try:
                if _is_beside(beside, trainer):
                    atomic.remove(beside)
                elif os.path.lexists(beside):
                    _log.warning("%s is not a model beside a checkpoint of this run, so it is not deleted", beside)
            except (OSError, ValueError) as error:
                _log.warning("%s is no longer needed and could not be deleted: %s", beside, error)
            self._there.remove(path)
            self._beside.remove(path)

    def _is_active(self, trainer: pl.Trainer) -> bool:
        return not trainer.fast_dev_run  # type: ignore[attr-defined]


class _SavedCheckpoints:
    """Finds the checkpoints that a ModelCheckpoint has saved, from its attributes; the same on every rank.

    One hook saves at most two checkpoints: a ranked one, and then ``last``.

    Source: ``ModelCheckpoint._save_topk_checkpoint`` and ``_save_last_checkpoint`` (Lightning 2.6.6).
    """

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._step, self._scores = self._now()

    def saved_since(self) -> set[str]:
        """Return the paths that were saved since the last call, including links."""
        step, scores = self._now()
        if (step, scores) == (self._step, self._scores):
            return set()
        ranked = {path for path, score in scores.items() if self._scores.get(path) != score}
        # Without a monitor there are no scores; the newest checkpoint is the best one
        if self._checkpoint.monitor is None and self._checkpoint.save_top_k != 0:
            ranked.add(self._checkpoint.best_model_path)
        self._step, self._scores = step, scores
        found = {*ranked, step[1]} - {""}
        folder = str(self._checkpoint.dirpath)  # the best path may come from the checkpoint of another run
        return {os.path.abspath(path) for path in found if checkpoint_files.lies_in(path, folder)}

    def _now(self) -> tuple[tuple[int, str], dict[str, float]]:
        own = self._checkpoint
        scores = {path: float(score) for path, score in own.best_k_models.items()}
        return (own._last_global_step_saved, own._last_checkpoint_saved), scores


def _require_replaceable(folder: str, module: pl.LightningModule) -> None:
    """Raise ValueError if a folder holds anything but an earlier export, or the model that this run starts from."""
    require_free(folder, replace=is_own(folder))
    base = (module.hparams.get("hf") or {}).get("path")
    if base is not None and os.path.isdir(base) and os.path.realpath(base) == os.path.realpath(folder):
        raise ValueError(f"folder={folder!r} is the model that this run starts from; give another folder")


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _is_beside(path: str, trainer: pl.Trainer) -> bool:
    """Return whether ``path`` is a Hugging Face model next to this trainer's checkpoints."""
    folders = [str(checkpoint.dirpath) for checkpoint in _model_checkpoints(trainer)]
    in_folder = any(checkpoint_files.lies_in(path, folder) for folder in folders)
    return in_folder and any(os.path.isfile(os.path.join(path, name)) for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE))
