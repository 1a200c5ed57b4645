# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoint hooks: they write one file or a directory, and read each part when it can be read.

==========================================  ===================================================================
a plain module, optimizer not sharded       one file, as Lightning writes it; ``"ddp"`` reads it, and vice versa,
                                            except for the fp32 copies of ``bf16-true`` and ``16-true``
a plain module, distributed optimizer       a directory
a model built with ``pipeline()``           a directory, also on one rank: any layout reads it
==========================================  ===================================================================

The strategy owns a :class:`Checkpoints`, which saves and loads for it. Lightning reads a checkpoint before the model
exists: it calls ``load_checkpoint`` and distributes its own state before ``setup``. Shards can only be read into the
wrapped model, so they wait until the end of ``setup``.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint import manifest as checkpoint_manifest
from lightning_mcore.checkpoint import model_state
from lightning_mcore.checkpoint.background import BackgroundTask
from lightning_mcore.checkpoint.extra_state import checked_extra_state
from lightning_mcore.checkpoint.fp8_weights import fp8_weights_as_plain
from lightning_mcore.checkpoint.io import CONTENT_METADATA, MANIFEST, RANK_STATE, SHARDED_STATE, MCoreCheckpointIO
from lightning_mcore.checkpoint.megatron_lm import optimizer_class, random_state
from lightning_mcore.checkpoint.model_state import StoredState
from lightning_mcore.checkpoint.optimizer_state import load_whole_state, reload_weights
from lightning_mcore.data import loop_progress
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.parallel import rank_watch
from lightning_mcore.parallel.chunks import ModelChunks, find_pipeline, synchronize_parameters
from lightning_mcore.parallel.consensus import all_true, combine_on_rank0, run_on_all_ranks, run_on_rank0
from lightning_mcore.parallel.groups import collectives_issued
from lightning_mcore.parallel.random_state import RandomState
from lightning_mcore.parallel.rank_hub import out_of_step
from lightning_mcore.strategy.module import MCoreModule

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_log = logging.getLogger(__name__)

_NUMBERS = "lightning_mcore/optimizer_numbers"
_COORDINATES = "lightning_mcore/coordinates"  # of rank 0
_SCHEDULE = "lightning_mcore/schedule_steps"  # of a run of Megatron-LM
# Megatron-LM's way of saying that every layout can read the optimizer's state.
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
MORE_SHARDS = "lightning_mcore/more_shards"
"""Where a callback puts blocks of global tensors into Lightning's dict, to be saved among the shards."""

WEIGHT_AVERAGE = "lightning_mcore/weight_average"
"""Where a checkpoint of one file has the averages of weights, by name."""

EXCEPTION_TIMEOUT = 30.0
"""Seconds for all ranks to arrive, after all have raised an exception."""

_DEVICE_TIMEOUT = 10.0  # seconds for work queued on the device before the exception


class Checkpoints:
    """Saves and loads for the strategy that owns it."""

    def __init__(self, strategy: "MCoreStrategy") -> None:
        self._strategy = strategy
        self._pending: StoredState | None = None
        self.resumed_from: StoredState | None = None  # the shards that this run has loaded
        self.average_in_file: dict[str, torch.Tensor] | None = None  # from the single file that it has loaded
        self._saved: set[str] = set()  # paths of this process's checkpoints

    @staticmethod
    def resolve_io(io: CheckpointIO | None) -> CheckpointIO:
        """Return the plugin that writes and reads checkpoints; a wrapper around no plugin gets ours."""
        if isinstance(io, _WrappingCheckpointIO):
            io.checkpoint_io = MCoreCheckpointIO()
        return io if io is not None else MCoreCheckpointIO()

    @property
    def _shard_io(self) -> MCoreCheckpointIO:
        io = self._strategy.checkpoint_io
        if not isinstance(io, MCoreCheckpointIO):
            raise TypeError(
                f"{type(io).__name__} writes a single file, but this model is saved as a directory of shards; remove"
                " it, or use MCoreCheckpointIO(), which can also save asynchronously (async_save=True)"
            )
        return io

    @property
    def _own_io(self) -> MCoreCheckpointIO | None:
        """Our own plugin, if one was created or given."""
        io = self._strategy._checkpoint_io
        return io if isinstance(io, MCoreCheckpointIO) else None

    @property
    def _chunks(self) -> ModelChunks | None:
        """The chunks of this run, or of the last one after it has ended."""
        return self._strategy._chunks or self._strategy._finished_chunks

    @property
    def saves_one_file(self) -> bool:
        """Whether the model is saved as one file instead of a directory of shards."""
        if self._strategy.gradients.distributed:
            return False
        chunks = self._chunks
        if chunks is not None:
            return chunks.pipeline is None
        module = self._strategy.lightning_module
        return module is None or not (isinstance(module, MCoreModule) or find_pipeline(module))

    def module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` for a single-file checkpoint; for a split model, only what is outside the shards."""
        return state if self.saves_one_file else model_state.state_outside_chunks(self._module, state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state; for a directory, only the part that LR schedulers read back."""
        owner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.saves_one_file:
            state: dict[str, Any] = owner.state_dict()
            return state
        return {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]}

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        """Write one file, or a directory if the model is split; collective over the world."""
        strategy = self._strategy
        if (hindrance := self._hindrance()) is not None:
            _log.error("%s is not saved: %s", filepath, hindrance)
            return
        chunks = self._chunks
        if chunks is not None and chunks.are_lost:
            raise RuntimeError(
                f"{filepath} cannot be saved: the parameters were sharded over the ranks when an exception ended the"
                " run; load the last checkpoint, and save from there"
            )
        is_first = not self._saved
        self._saved.add(str(filepath))
        # With overlap_param_gather, the last step's parameters may still be scattered over the ranks.
        if chunks is not None:
            synchronize_parameters(chunks)
        if self.saves_one_file:
            self._save_file({**checkpoint, RANK_STATE: strategy.resume.gather(checkpoint)}, filepath, storage_options)
            return
        if chunks is None:
            raise RuntimeError("there is no model to save before the first run; call fit() or validate() first")
        if is_first and not isinstance(self._module, MCoreModule):
            name = type(self._module).__name__
            rank_zero_info(
                f"{filepath} is a directory, which only MCoreStrategy can resume from, and which"
                f" {name}.load_from_checkpoint cannot read; use lightning_mcore.build_from_checkpoint({name}, path)"
            )
        io = self._shard_io
        optimizers = strategy.megatron_optimizers if "optimizer_states" in checkpoint else []
        with strategy.runtime():
            state = model_state.collect(chunks, optimizers)
            more = dict(enumerate(checkpoint.pop(MORE_SHARDS, ())))
            own: dict[str, Any] = {
                SHARDED_STATE: {**state.tensors, "more": {str(number): block for number, block in more.items()}},
                MANIFEST: {**self._describe(chunks, optimizers), "parameters": state.num_parameters},
                RANK_STATE: strategy.resume.rank_state(checkpoint),
            }
            own[_COORDINATES] = own[RANK_STATE].get("coordinates")
            if optimizers:
                own[_NUMBERS] = state.numbers
                own[CONTENT_METADATA] = _CONTENT
            io.save_checkpoint({**checkpoint, **own}, strategy.broadcast(str(filepath)), storage_options)
            if not strategy.is_set_up:  # after a run, no steps follow that could finish it
                io.drain()

    def _hindrance(self) -> str | None:
        """Return why a save after an exception would not end; None if all ranks can save together."""
        if not rank_watch.has_failed():
            return None
        if not rank_watch.collectives_usable():
            return "an exception was raised on some ranks, and others are in their step"
        device = self._strategy.root_device

        def have_all_issued_the_same(positions: list[dict[str, int]]) -> str | None:
            return out_of_step(dict(enumerate(positions)))

        # Unequal counts would pair the wrong collectives: rank 0's 41st all-reduce with rank 1's 40th.
        if (said := combine_on_rank0(collectives_issued, have_all_issued_the_same)) is not None:
            return said
        # A kernel of NCCL whose peers never came stays at the head of its queue, and copies would wait behind it.
        if device.type == "cuda" and not all_true(_finishes(partial(torch.cuda.synchronize, device))):
            return "the device waits for ranks that raised an exception elsewhere"
        return None

    def _save_file(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        strategy = self._strategy

        def write() -> None:
            if strategy.is_global_zero:
                strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

        run_on_all_ranks(write)

    def remove(self, filepath: str | Path) -> None:
        """Delete a checkpoint of this run (rank 0); others stay, with a warning."""
        if not self._strategy.is_global_zero:
            return
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        callbacks = trainer.checkpoint_callbacks if trainer is not None else []
        folders = {str(getattr(callback, "dirpath", None) or "") for callback in callbacks} - {""}
        path = str(filepath)
        # The paths may come from the checkpoint that a run resumes from, which could name any folder for deletion.
        if path in self._saved or any(checkpoint_files.lies_in(path, folder) for folder in folders):
            self._strategy.checkpoint_io.remove_checkpoint(filepath)
        else:
            _log.warning("%s is not deleted, because this run does not save there", filepath)

    def prepare_links(self, trainer: pl.Trainer, restores: contextlib.ExitStack) -> None:
        """Make ModelCheckpoint set links only to complete checkpoints until ``restores`` is closed.

        Raises ``FileNotFoundError`` if a link leads to no checkpoint and training would start a new run: with
        ``ckpt_path="last"`` Lightning would skip such a link. The same holds after a crash that left the last
        checkpoint moved aside.
        """
        begins_anew = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is None
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if not isinstance(callback, ModelCheckpoint) or not checkpoint_files.writes_directly(str(folder or "")):
                continue
            links = run_on_rank0(partial(_last_links, callback, trainer, begins_anew))
            io = self._strategy.checkpoint_io
            if callback.save_last == "link" and isinstance(io, MCoreCheckpointIO):
                io.watch_links(links)
                if callback._link_checkpoint is ModelCheckpoint._link_checkpoint:  # not one of the user's
                    restores.enter_context(mock.patch.object(callback, "_link_checkpoint", _link_when_whole))

    def poll(self) -> None:
        """Put a save in place once its files are written."""
        if self._own_io is not None:
            self._own_io.poll()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the saves in flight; collective over the world."""
        if self._own_io is not None and self._own_io.has_saves_in_flight:
            with self._strategy.runtime():
                self._own_io.drain(timeout)

    def _describe(self, chunks: ModelChunks, optimizers: list[MCoreOptimizer]) -> dict[str, Any]:
        strategy = self._strategy
        return checkpoint_manifest.describe(
            self._module,
            strategy.layout,
            strategy.world_size,
            strategy.precision_plugin.precision,
            strategy.gradients.distributed,
            chunks.config if chunks.pipeline is not None else None,
            [optimizer.user for optimizer in optimizers],
        )

    def load(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a file, or Lightning's part of a directory; the shards are read in ``setup``."""
        strategy = self._strategy
        self.finish()
        path: str = strategy.broadcast(str(checkpoint_path))  # not a Path, which breaks "http://"
        io = strategy.checkpoint_io
        if isinstance(io, MCoreCheckpointIO) and run_on_rank0(lambda: io.is_directory(path)):
            path = run_on_rank0(lambda: checkpoint_files.tensors_folder(path))
            if run_on_rank0(lambda: checkpoint_files.is_megatron_checkpoint(path)):
                return self._load_megatron(path, io, weights_only)
            state = io.load_directory(path, weights_only)
        else:
            state = run_on_all_ranks(lambda: self._read_file(path, weights_only))
            self.average_in_file = self.average_in_file or state.get(WEIGHT_AVERAGE)
        # Ours go out of the dict before Lightning sees it.
        states, saved, manifest = (state.pop(key, None) for key in (RANK_STATE, _COORDINATES, MANIFEST))
        read: Any = None
        if manifest is not None:
            stored = StoredState.open(self._shard_io, path, state.pop(_NUMBERS, None), weights_only, manifest)
            self._pending = stored
            read = partial(self._shard_io.load_rank_state, path, stored.contents, weights_only=weights_only)
        if states:  # one file, or a directory of format version 1
            saved, read = states[0].get("coordinates"), states.__getitem__
        strategy.resume.restore(saved, read, state)
        return state

    def _load_megatron(self, path: str, io: MCoreCheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Return Lightning's state after the iteration at which Megatron saved ``path``."""
        stored = StoredState.open(io, path, None, weights_only)
        progress = run_on_rank0(lambda: io.megatron_progress(path, stored.contents.metadata))
        state = {
            "pytorch-lightning_version": checkpoint_manifest.versions()["lightning"],
            "epoch": 0,
            "state_dict": {},
            "callbacks": {},
        }
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            contents = {"optimizer_class": run_on_all_ranks(lambda: optimizer_class(path, stored.contents.shapes))}
            loops = trainer._checkpoint_connector._get_loops_state_dict()
            loop_progress.write_steps(loops["fit_loop"], progress.iteration)
            stored = replace(
                stored,
                contents=replace(stored.contents, manifest={"contents": contents}),
                numbers=[{"common": {"step": progress.adam_step}, "own": {}}],
            )
            state |= {"loops": loops, "optimizer_states": [], "lr_schedulers": [], _SCHEDULE: progress.schedule_steps}
            scaling = {**progress.loss_scaling, "num_skipped_steps": [progress.iteration - progress.adam_step]}
            state[type(self._strategy.precision_plugin).__qualname__] = scaling

            def read(mine: Mapping[str, int], now: RandomState) -> RandomState | str:
                objects = stored.contents.objects
                return random_state(partial(io.read_object, path, stored.contents), objects, mine, now)

            why = self._strategy.resume.restore_of_megatron(progress, loops["fit_loop"], read)
            rank_zero_info(
                f"resuming from Megatron's iteration {progress.iteration:,}, "
                + (f"after {progress.consumed:,} samples" if progress.batches else "with the data from its beginning")
                + ("; random states continue" if why is None else f"; random states begin anew, because {why}")
            )
        self._pending = stored
        return {**state, "global_step": progress.iteration}

    def _read_file(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        strategy, layout = self._strategy, self._strategy.layout
        state: dict[str, Any] = strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        splits = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size > 1
        if MANIFEST not in state and (splits or layout.expert_model_parallel_size > 1):
            raise ValueError(
                f"{path} is a single-file checkpoint, as other strategies write, but this run splits the model into "
                f"{layout.describe(strategy.world_size)} and reads only directories that MCoreStrategy wrote; load it "
                "on one rank or with data parallelism only, and save it from there"
            )
        return state

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the weights of a single-file checkpoint, or the state outside the shards of a split model."""
        module, saved = self._module, checkpoint["state_dict"]
        if self._pending is None:
            with checked_extra_state(saved):
                module.load_state_dict(saved, strict=strict)
            return
        model_state.load_outside_chunks(module, saved, self._pending.path, strict)
        if self._strategy.is_set_up:  # during a run, such as after a search for a learning rate
            self.load_pending(module.trainer.state.fn == TrainerFn.FITTING)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the result of :meth:`optimizer_state`; state in shards is already loaded."""
        optimizers, states = self._strategy.optimizers, checkpoint["optimizer_states"]
        if states:
            _check_number(states, optimizers)
        if _SCHEDULE in checkpoint:
            advance_schedules(self._strategy.lr_scheduler_configs, checkpoint[_SCHEDULE])
        gradients = self._strategy.gradients
        distributed = gradients.distributed or gradients.use_layer_wise_distributed_optimizer
        for optimizer, saved in zip(optimizers, states, strict=False):
            if distributed and "megatron" in saved:
                raise ValueError(
                    "the checkpoint's optimizer keeps unsharded fp32 copies of the parameters, as bf16-true does"
                    " without the distributed optimizer; resume with use_distributed_optimizer=False"
                )
            if distributed and "state" in saved and isinstance(optimizer, MCoreOptimizer):
                load_whole_state(optimizer, saved)
                continue
            if "state" in saved or "megatron" in saved:
                optimizer.load_state_dict(saved)
                continue
            groups = saved["param_groups"]
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(
                    f"the checkpoint's optimizer has {len(groups)} parameter groups, but the one from"
                    f" configure_optimizers has {len(optimizer.param_groups)}; resume with the groups of the run that"
                    " saved it"
                )
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    def load_pending(self, fitting: bool) -> None:
        """Read the shards that wait for the model, into its chunks and, in a fit, into their optimizers."""
        if self._pending is None:
            return
        stored, self._pending = self._pending, None
        self.resumed_from = self.resumed_from or stored  # a search for a learning rate loads once more
        chunks, optimizers = self._strategy.chunks, self._strategy.megatron_optimizers
        path, manifest = stored.path, stored.contents.manifest
        checkpoint_manifest.check_model(path, manifest, self._module)
        resumed = optimizers if fitting and stored.numbers is not None else []
        if resumed:
            _check_number(stored.numbers or [], resumed)
            checkpoint_manifest.check_optimizer(path, manifest, [optimizer.user for optimizer in resumed])
        strict = self._module.strict_loading
        if resumed:
            model_state.load(stored, chunks, resumed, strict)
            return
        # The fp32 copies must follow the weights; copies of FP8 weights come from the values before rounding.
        with fp8_weights_as_plain(chunks.bare) as written:
            model_state.load(stored, chunks, [], strict)
        for optimizer in optimizers:
            reload_weights(optimizer, written)

    def forget_pending(self) -> None:
        """Forget the shards of this run, also those for which no model was set up."""
        self._pending = self.resumed_from = self.average_in_file = None

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module


def _check_number(states: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Raise ``ValueError`` if a checkpoint is of another number of optimizers."""
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint contains the states of {len(states)} optimizers, but configure_optimizers returned"
            f" {len(optimizers)}; resume with the optimizers of the run that saved it"
        )


def advance_schedules(configs: Iterable[LRSchedulerConfig], steps: int) -> None:
    """Take the steps of a run of Megatron-LM, whose checkpoint knows its own schedule only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # before optimizer.step()
        for config in configs:
            scheduler: Any = config.scheduler
            if config.interval == "step" and not config.reduce_on_plateau:
                for _ in range(steps // config.frequency):
                    scheduler.step()


def _finishes(function: Callable[[], object]) -> bool:
    """Call a function that may never return, and return whether it has, after some seconds."""
    task = BackgroundTask("waits for the device", function)
    task.join(_DEVICE_TIMEOUT)
    return task.done()


def _link_when_whole(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    """Do what ``ModelCheckpoint._link_checkpoint`` does, but once the target exists.

    Source: Lightning 2.6.6, which deletes the old checkpoint before the link, and the link before it sets the new one.
    """
    io = trainer.strategy.checkpoint_io
    if isinstance(io, MCoreCheckpointIO):
        io.link_checkpoint(filepath, linkpath)
    else:
        ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)


def _last_links(callback: ModelCheckpoint, trainer: pl.Trainer, begins_anew: bool) -> list[str]:
    """Return the links among which ``ckpt_path="last"`` looks for a callback's last checkpoint."""
    if begins_anew:
        seen = callback._find_last_checkpoints(trainer)
        if checkpoint_files.recover_all(str(callback.dirpath)):
            for path in callback._find_last_checkpoints(trainer) - seen:
                raise FileNotFoundError(
                    f"{path} had been moved aside by an interrupted save and has been restored; rerun to resume from "
                    "it, or delete it to start a new run"
                )
    links = [path for path in callback._find_last_checkpoints(trainer) if os.path.islink(path)]
    for link in links if begins_anew else []:
        if not os.path.exists(link):
            newest = checkpoint_files.newest_in(os.path.dirname(link))
            advice = "" if newest is None else f"resume with ckpt_path={newest!r}, the newest complete one there, or "
            raise FileNotFoundError(
                f"{link} links to the checkpoint {os.readlink(link)}, which no longer exists; {advice}delete the link"
                " to start a new run"
            )
    return links


def last_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the newest complete checkpoint of a trainer: its URL, or its path as :func:`path_from_here` writes it."""
    # Lightning sets the last two before a save, which may have been interrupted; a URL is taken as it is.
    names = ("_last_checkpoint_saved", "best_model_path", "last_model_path")
    paths = [str(getattr(callback, name, "")) for name in names for callback in trainer.checkpoint_callbacks]
    complete = [path for path in paths if "://" in path or os.path.exists(path)]
    if not complete:
        return None
    return path_from_here(max(complete, key=lambda path: 0.0 if "://" in path else os.path.getmtime(path)))


def path_from_here(path: str) -> str:
    """Return a path relative to the current folder if it is in it, and a URL as it is."""
    if "://" in path:
        return path
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.normpath(path)
