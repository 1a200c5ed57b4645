# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoint hooks: what is one file, what is a directory, and when each part is read.

:class:`MCorePersistence` is the part of the strategy that saves and resumes; ``strategy.py`` builds the steps on it.

==========================================  ===================================================================
a plain module, optimizer not sharded       one file, as Lightning writes it; ``"ddp"`` reads it and the other way,
                                            but for the fp32 copies of ``bf16-true`` and ``16-true``
a plain module, distributed optimizer       a directory
a model built with ``pipeline()``           a directory, also on one rank: any layout reads it
==========================================  ===================================================================

Lightning asks for a checkpoint in two pieces. Before ``setup`` it calls ``load_checkpoint`` and hands out its state;
shards can only be read into the wrapped model, so they wait until the end of ``setup``.
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint import manifest as checkpoint_manifest
from lightning_mcore.checkpoint import model_state as sharded_state
from lightning_mcore.checkpoint.io import CONTENT_METADATA, MANIFEST, RANK_STATE, SHARDED_STATE, MCoreCheckpointIO
from lightning_mcore.checkpoint.model_state import StoredState
from lightning_mcore.checkpoint.optimizer_state import load_whole_state
from lightning_mcore.config.fp8 import check_start
from lightning_mcore.layers.metrics import settle_tokens_seen
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.parallel import rank_watch
from lightning_mcore.parallel.chunks import ModelChunks, find_pipeline, synchronize_parameters
from lightning_mcore.parallel.consensus import decide, on_all
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.strategy.parallelism import MCoreParallelism
from lightning_mcore.strategy.preemption import heed_requeue_signal

_log = logging.getLogger(__name__)

_NUMBERS = "lightning_mcore/optimizer_numbers"
# How Megatron-LM would say that every layout can read the optimizer's state.
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_EXCEPTION_TIMEOUT = 30.0  # seconds


class MCorePersistence(MCoreParallelism):
    """Saving and resuming of :class:`~lightning_mcore.MCoreStrategy`."""

    _chunks: ModelChunks | None = None
    _finished_chunks: ModelChunks | None = None
    _pending: StoredState | None = None  # shards that wait for the model
    _saved: frozenset[str] = frozenset()  # paths of this process's checkpoints

    def setup_environment(self) -> None:
        """Open the process groups, and let SLURM's requeue signal wait for the end of a step."""
        super().setup_environment()
        if self.lightning_module is not None:
            heed_requeue_signal(self.lightning_module.trainer)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Lightning reads its own part before ``setup``; shards are read at the end of it."""
        return False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads checkpoints; :class:`~lightning_mcore.MCoreCheckpointIO` unless told otherwise."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MCoreCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = MCoreCheckpointIO()  # goes to the innermost, if that wraps nothing yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def _shard_io(self) -> MCoreCheckpointIO:
        io = self.checkpoint_io
        if not isinstance(io, MCoreCheckpointIO):
            raise TypeError(
                f"{type(io).__name__} writes one file, and this model is saved as a directory of shards; leave it out,"
                " or give MCoreCheckpointIO(), which also saves asynchronously (async_save=True)"
            )
        return io

    @property
    def _saves_one_file(self) -> bool:
        if self.gradients.distributed:
            return False
        chunks = self._chunks or self._finished_chunks
        if chunks is not None:
            return chunks.pipeline is None
        module = self.lightning_module
        return module is None or not (isinstance(module, MCoreModule) or find_pipeline(module))

    @property
    def _splits_weights(self) -> bool:
        layout = self.layout
        return layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size > 1 or (
            layout.expert_model_parallel_size > 1
        )

    def _megatron_optimizers(self) -> list[MCoreOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, MCoreOptimizer)]

    # ---- saving

    def complete_parameters(self) -> None:
        """Gather parameters that overlap_param_gather would gather in the next step; collective, while a run lasts."""
        if self._chunks is not None:
            synchronize_parameters(self._chunks)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a one-file checkpoint, or what stands beside the shards of a split model."""
        assert self.lightning_module is not None
        settle_tokens_seen(self.lightning_module)
        state = super().lightning_module_state_dict()
        return state if self._saves_one_file else sharded_state.state_outside_chunks(self.lightning_module, state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer; beside shards only what LR schedulers read back."""
        owner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._saves_one_file:
            state: dict[str, Any] = owner.state_dict()
            return state
        return {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one file, or a directory where the model is split; collective over the world.

        Works during a run and after it, as ``trainer.save_checkpoint`` does.

        Raises:
            RuntimeError: There has been no run yet, and a run may split the model.
            TypeError: The ``checkpoint_io`` given to the strategy cannot write shards.
        """
        if not rank_watch.can_meet(_EXCEPTION_TIMEOUT):
            _log.error("%s is not saved: an exception was raised on some ranks, and others are in their step", filepath)
            return
        self._saved = self._saved | {str(filepath)}
        chunks = self._chunks or self._finished_chunks
        if chunks is not None:
            synchronize_parameters(chunks)
        if self._saves_one_file:
            checkpoint = {**checkpoint, RANK_STATE: self.resume.gather(checkpoint)}
            write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
            if dist.is_initialized() and dist.get_world_size() > 1:
                on_all(write)  # rank 0 writes, and the others wait for it
            else:
                write()
            return
        if chunks is None:
            raise RuntimeError("there is no model to save before the first run; call fit() or validate() first")
        io = self._shard_io
        optimizers = self._megatron_optimizers() if "optimizer_states" in checkpoint else []
        with self.runtime():
            state = sharded_state.collect(chunks, optimizers)
            own: dict[str, Any] = {
                SHARDED_STATE: state.tensors,
                MANIFEST: {**self._describe(chunks, optimizers), "parameters": state.num_parameters},
                RANK_STATE: self.resume.rank_state(checkpoint),
            }
            if optimizers:
                own[_NUMBERS] = state.numbers
                own[CONTENT_METADATA] = _CONTENT
            io.save_checkpoint({**checkpoint, **own}, self.broadcast(str(filepath)), storage_options)
            if self._chunks is None:  # after a run there are no steps to finish it between
                io.drain()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint of this run; what lies elsewhere stays, with a warning.

        The paths come from Lightning, which takes them over from the checkpoint that a run resumes from.
        """
        if not self.is_global_zero:
            return
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        callbacks = trainer.checkpoint_callbacks if trainer is not None else []
        folders = {str(getattr(callback, "dirpath", None) or "") for callback in callbacks} - {""}
        path = str(filepath)
        if path in self._saved or any(checkpoint_files.lies_in(path, folder) for folder in folders):
            self.checkpoint_io.remove_checkpoint(filepath)
        else:
            _log.warning("%s was to be deleted, and this run does not save there, so it stays", filepath)

    def prepare_links(self, trainer: pl.Trainer) -> None:
        """Let links to the last checkpoint be set when it is whole, and refuse one whose checkpoint is gone.

        With ``ckpt_path="last"`` Lightning passes over such a link and would begin anew, as it would where a crash left
        the last checkpoint moved away.

        Raises:
            FileNotFoundError: Training begins anew where that is so.
        """
        begins_anew = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if not isinstance(callback, ModelCheckpoint) or not checkpoint_files.writes_directly(str(folder or "")):
                continue
            links = decide(partial(_last_links, callback, trainer, begins_anew))
            if callback.save_last == "link" and isinstance(self.checkpoint_io, MCoreCheckpointIO):
                self.checkpoint_io.watch_links(links)
                if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
                    callback._link_checkpoint = _link_when_whole  # type: ignore[method-assign]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Finish a save whose files are written."""
        if isinstance(self._checkpoint_io, MCoreCheckpointIO):
            self._checkpoint_io.poll()

    def on_train_end(self) -> None:
        """Wait for what is being saved."""
        self.resume.on_train_end()
        self._finish_saves()

    def on_exception(self, exception: BaseException) -> None:
        """Finish what is being saved, if the other ranks come here too; one of them may have died."""
        self._finish_saves(_EXCEPTION_TIMEOUT)

    def _finish_saves(self, timeout: float | None = None) -> None:
        """Wait for what is being saved; collective over the world."""
        if isinstance(self._checkpoint_io, MCoreCheckpointIO) and self._checkpoint_io.has_saves_in_flight:
            with self.runtime():
                self._checkpoint_io.drain(timeout)

    def _describe(self, chunks: ModelChunks, optimizers: list[MCoreOptimizer]) -> dict[str, Any]:
        assert self.lightning_module is not None
        return checkpoint_manifest.describe(
            self.lightning_module,
            self.layout,
            self.world_size,
            self.precision_plugin.precision,
            self.gradients.distributed,
            chunks.config if chunks.pipeline is not None else None,
            [optimizer.user for optimizer in optimizers],
        )

    # ---- loading

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or Lightning's part of a directory, whose shards follow in ``setup``.

        Raises:
            FileNotFoundError: There is nothing, or a directory that is no checkpoint.
            ValueError: The checkpoint is of another model, or cannot be read whole; or it has weights alone, and the
                run keeps them in FP8.
        """
        self._finish_saves()
        path: str = self.broadcast(str(checkpoint_path))  # not a Path, which breaks "http://"
        state: dict[str, Any] = on_all(lambda: self._read(path, weights_only))
        self.resume.restore(state.pop(RANK_STATE, None), state)
        if state.pop(MANIFEST, None) is not None:
            numbers = state.pop(_NUMBERS, None)
            if numbers is None and self._is_fitting:
                check_start(self.precision_plugin.fp8.fp8_param, f"the weights alone of {path}")
            self._pending = StoredState.open(self._shard_io, path, numbers, weights_only)
        return state

    @property
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def _read(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        state: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if MANIFEST not in state and self._splits_weights:
            raise ValueError(
                f"{path} is one file, as it is written by other strategies; this run splits the model into"
                f" {self.layout.describe(self.world_size)}, and reads directories that MCoreStrategy wrote: load it on"
                " one rank, or with data parallelism alone, and save it there"
            )
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a one-file checkpoint, or what stands beside the shards of a split model."""
        if self._pending is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        saved = checkpoint["state_dict"]
        sharded_state.load_outside_chunks(self.lightning_module, saved, self._pending.path, strict)
        if self._chunks is not None:  # in the middle of a run, as after a search for a learning rate
            self._load_pending(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state` returned; the state itself, if it is in shards, is there already.

        Raises:
            ValueError: The checkpoint holds the states of another number of optimizers, and not of none.
        """
        optimizers, states = self.optimizers, checkpoint["optimizer_states"]
        if len(states) not in (0, len(optimizers)):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers and configure_optimizers returned"
                f" {len(optimizers)}; resume with the optimizers of the run that saved it"
            )
        for optimizer, saved in zip(optimizers, states, strict=False):
            if self.gradients.distributed and "megatron" in saved:
                raise ValueError(
                    "the checkpoint's optimizer keeps whole fp32 copies of the parameters, as in bf16-true without"
                    " the distributed optimizer; resume it with use_distributed_optimizer=False"
                )
            if self.gradients.distributed and "state" in saved and isinstance(optimizer, MCoreOptimizer):
                load_whole_state(optimizer, saved)
                continue
            if "state" in saved or "megatron" in saved:
                optimizer.load_state_dict(saved)
                continue
            groups = saved["param_groups"]
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(
                    f"the checkpoint's optimizer has {len(groups)} parameter groups and that of configure_optimizers"
                    f" {len(optimizer.param_groups)}; resume with the groups of the run that saved it"
                )
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    def _load_pending(self, fitting: bool) -> None:
        if self._pending is None:
            return
        stored, self._pending = self._pending, None
        module = self.lightning_module
        assert self._chunks is not None
        assert module is not None
        path, manifest = stored.path, stored.contents.manifest
        checkpoint_manifest.check_model(path, manifest, module)
        optimizers = self._megatron_optimizers() if fitting and stored.numbers is not None else []
        if optimizers:
            checkpoint_manifest.check_optimizer(path, manifest, [optimizer.user for optimizer in optimizers])
        sharded_state.load(stored, self._chunks, optimizers, strict=module.strict_loading)
        if not optimizers:
            for optimizer in self._megatron_optimizers():
                optimizer.megatron.reload_model_params()


def _link_when_whole(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    """Do what ``ModelCheckpoint._link_checkpoint`` does, at a moment at which there is something to link to.

    Source: Lightning 2.6.6, where the old checkpoint goes before the link, and the link before it is set anew.
    """
    io = trainer.strategy.checkpoint_io
    if isinstance(io, MCoreCheckpointIO):
        io.link_checkpoint(filepath, linkpath)
    else:
        ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)


def _last_links(callback: ModelCheckpoint, trainer: pl.Trainer, begins_anew: bool) -> list[str]:
    """Return the links among which ``ckpt_path="last"`` looks for the last checkpoint of a callback."""
    if begins_anew:
        seen = callback._find_last_checkpoints(trainer)
        if checkpoint_files.recover_all(str(callback.dirpath)):
            for path in callback._find_last_checkpoints(trainer) - seen:
                raise FileNotFoundError(
                    f"{path} was not there, because a save that replaced it was interrupted, and is there again; start"
                    " once more to resume from it, or delete it to start anew"
                )
    links = [path for path in callback._find_last_checkpoints(trainer) if os.path.islink(path)]
    for link in links if begins_anew else []:
        if not os.path.exists(link):
            newest = checkpoint_files.newest_in(os.path.dirname(link))
            advice = "" if newest is None else f"resume with ckpt_path={newest!r}, the newest whole one there, or "
            raise FileNotFoundError(
                f"{link} leads to the checkpoint {os.readlink(link)}, which is gone; {advice}delete the link to start"
                " anew"
            )
    return links
