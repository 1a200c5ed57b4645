# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models that no single rank holds.

A model that is not split is saved as Lightning saves it: one file, interchangeable with ``"ddp"``. A split model
(tensor, pipeline or expert parallel, or with the distributed optimizer) is saved as a directory::

    last.ckpt/
        .metadata, __0_0.distcp, ...   tensors, written by every rank (megatron.core.dist_checkpointing)
        common.pt, metadata.json       what Megatron keeps beside them
        meta.pt                        Lightning's own state: loops, callbacks, hyper-parameters, LR schedulers,
                                       and what the module holds beside its chunks

It is written under a temporary name and renamed when it is whole. It is read on the layout that wrote it; any other is
refused.
"""

import contextlib
import os
import queue
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import nn

from lightning_mcore.chunks import ModelChunks
from lightning_mcore.module import Pipeline
from lightning_mcore.optimizer import MCoreOptimizer
from lightning_mcore.optimizer_parts import optimizer_parts
from lightning_mcore.process_groups import process_group

_META = "meta.pt"
_WRITTEN_BY = "written_by"
_NO_PARAMETER = "no parameter"
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def is_sharded(path: str | Path) -> bool:
    """Whether ``path`` is a directory checkpoint."""
    return Path(path).is_dir()


def save_sharded(
    path: str,
    chunks: ModelChunks,
    optimizers: Sequence[MCoreOptimizer],
    lightning_state: dict[str, Any],
    written_by: dict[str, Any],
) -> None:
    """Write a directory checkpoint; collective over the world.

    Args:
        path: The directory; what stands there is replaced once the new one is whole.
        chunks: The wrapped model.
        optimizers: The optimizers whose state is saved; empty for weights alone.
        lightning_state: Lightning's checkpoint without the state that is in the shards.
        written_by: The settings that decide how the shards are cut.
    """
    for optimizer in optimizers:
        _allocate_adam_state(optimizer)  # there is none before the first step, or while fp16 skips every step
    final = Path(path)
    unfinished = final.with_name(final.name + ".unfinished")
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    # Left to itself, Megatron starts a process for its queue, which imports the user's script again: without a main
    # guard it would train a second time. While this save lasts, a queue of this process stands in.
    with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        dist_checkpointing.save(_sharded_state(chunks, optimizers, is_loading=False), str(unfinished))
    dist.barrier()
    if is_first:
        torch.save({**lightning_state, _WRITTEN_BY: written_by}, unfinished / _META)
        if final.is_symlink() or final.is_file():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        os.replace(unfinished, final)
    dist.barrier()


def load_lightning_state(path: str, weights_only: bool | None, read_by: dict[str, Any]) -> dict[str, Any]:
    """Read Lightning's part of a directory checkpoint.

    Args:
        path: The directory.
        weights_only: As ``torch.load`` takes it.
        read_by: The settings of this run, of those that decide how shards are cut.

    Raises:
        FileNotFoundError: The directory is not such a checkpoint.
        ValueError: It was written with other settings.
    """
    meta = Path(path) / _META
    if not meta.is_file():
        raise FileNotFoundError(f"{path} is a directory without {_META}, so it is not a checkpoint of MCoreStrategy")
    state: dict[str, Any] = torch.load(meta, map_location="cpu", weights_only=weights_only)
    written_by = state.pop(_WRITTEN_BY)
    other = [name for name, value in read_by.items() if written_by[name] != value]
    if other:
        written, read = (" and ".join(f"{name}={of[name]!r}" for name in other) for of in (written_by, read_by))
        raise ValueError(
            f"{path} was written with {written}, this run has {read}; read it with the settings of the save"
        )
    return state


def state_outside_chunks(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what of a module's ``state_dict`` is in no shard: buffers and frozen parameters beside the pipeline."""
    paths = [path for path, child in module.named_modules() if isinstance(child, Pipeline)]
    if not paths:
        return {}
    return {name: value for name, value in state_dict.items() if not name.startswith(f"{paths[0]}.")}


def load_sharded(path: str, chunks: ModelChunks, optimizers: Sequence[MCoreOptimizer], strict: bool) -> None:
    """Read weights and, where optimizers are given, their state into the running model; collective over the world."""
    for optimizer in optimizers:
        _allocate_state(optimizer)
    state = dist_checkpointing.load(_sharded_state(chunks, optimizers, is_loading=True), path)
    for key, chunk in _named_chunks(chunks):
        chunk.load_state_dict(state[key], strict=strict)
    for index, optimizer in enumerate(optimizers):
        _load_optimizer(optimizer, state[f"optimizer{index}"])


def _sharded_state(chunks: ModelChunks, optimizers: Sequence[MCoreOptimizer], is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {key: _sharded_chunk(key, chunk) for key, chunk in _named_chunks(chunks)}
    model_state = dict(state)
    for index, optimizer in enumerate(optimizers):
        with _step_on_every_rank(optimizer):
            state[f"optimizer{index}"] = optimizer.megatron.sharded_state_dict(
                model_state, is_loading=is_loading, metadata=dict(_SHARDING)
            )
    return state


@contextlib.contextmanager
def _step_on_every_rank(optimizer: MCoreOptimizer) -> Iterator[None]:
    """Let ranks that step no parameter know the number of steps; collective over the world.

    Megatron saves one number for all, as the first rank has it, and asserts that its distributed optimizer has it on
    every rank. A pipeline stage that is frozen as a whole has no state to take it from.
    """
    filled = []
    for part in optimizer_parts(optimizer.megatron):
        states = part.optimizer.state if not part.is_stub_optimizer else {}
        mine = next((float(values["step"]) for values in states.values() if "step" in values), None)
        steps: list[float | None] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, mine)
        known = [step for step in steps if step is not None]
        if mine is None and known and not part.is_stub_optimizer:
            states[_NO_PARAMETER] = {"step": torch.tensor(max(known))}
            filled.append(states)
    try:
        yield
    finally:
        for states in filled:
            del states[_NO_PARAMETER]


def _named_chunks(chunks: ModelChunks) -> list[tuple[str, nn.Module]]:
    """Return the bare chunks under the keys that Megatron's optimizer expects: ``model``, or ``model0``, ``model1``."""
    modules = chunks.bare
    if len(modules) == 1:
        return [("model", modules[0])]
    return [(f"model{index}", module) for index, module in enumerate(modules)]


def _sharded_chunk(key: str, chunk: nn.Module) -> dict[str, Any]:
    method = getattr(type(chunk), "sharded_state_dict", None)
    if method is not None and method is not MegatronModule.sharded_state_dict:
        metadata = ensure_metadata_has_dp_cp_group(None)  # Megatron's own default fails with multi-token prediction
        state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        return state
    stage = f"stage{process_group('pp').rank()}.{key}."
    replica = (0, process_group("tp").rank(), process_group("dp_cp").rank())
    return {
        name: ShardedTensor.from_rank_offsets(stage + name, tensor, replica_id=replica)
        for name, tensor in chunk.state_dict(keep_vars=True).items()
    }


def _load_optimizer(optimizer: MCoreOptimizer, state: dict[Any, Any]) -> None:
    parts = optimizer_parts(optimizer.megatron)
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, part_state in zip(parts, states, strict=True):
        shards = part_state.pop("param_state", None)
        if isinstance(part.optimizer, torch.optim.Adam):
            for values in part_state.get("optimizer", {}).get("state", {}).values():
                if isinstance(values, dict):
                    values.setdefault("step", torch.zeros(()))  # Megatron does not save a step of zero
        part.load_state_dict(part_state)
        if shards is None:
            continue
        # Megatron copies every entry of the state from the shards, but keeps torch's `step` outside them.
        steps = {parameter: values.pop("step", None) for parameter, values in part.optimizer.state.items()}
        part.load_parameter_state_from_fully_reshardable(shards)
        for parameter, step in steps.items():
            if step is not None:
                part.optimizer.state[parameter]["step"] = step.clone()  # Megatron gives all the same tensor


def _allocate_state(optimizer: MCoreOptimizer) -> None:
    """Make the state that the optimizer makes at its first step: Megatron reads into it, and fails where none is."""
    for part in optimizer_parts(optimizer.megatron):
        if not part.is_stub_optimizer and not isinstance(part.optimizer, torch.optim.Adam):
            _step_without_effect(part.optimizer)
    _allocate_adam_state(optimizer)


def _allocate_adam_state(optimizer: MCoreOptimizer) -> None:
    """Make the state of torch's Adam where there is none, as its first step would."""
    for part in optimizer_parts(optimizer.megatron):
        if part.is_stub_optimizer or not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _step_without_effect(optimizer: torch.optim.Optimizer) -> None:
    """Step with gradients and a learning rate of zero; what it may move nevertheless is about to be read."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
