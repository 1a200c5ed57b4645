# SPDX-License-Identifier: Apache-2.0
"""Load only weights: into the chunks of a new run, or into a complete module built from a checkpoint.

:func:`load_weights` fills the chunks that a rank has just built, on any layout, and no rank holds the complete model.
:func:`build_from_checkpoint` makes a module from the hyper-parameters in a checkpoint, complete in this process.
``MCoreModule`` offers both as methods.
"""

import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

from lightning_mcore.checkpoint import manifest, model_state
from lightning_mcore.checkpoint.files import tensors_folder
from lightning_mcore.checkpoint.fp8_weights import fp8_weights_as_plain
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.model_state import StoredState
from lightning_mcore.layers.session import single_process
from lightning_mcore.layers.transformer_config import refuse_recorded_code
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.consensus import run_on_rank0

_INSTANTIATORS = (None, "lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")

_M = TypeVar("_M", bound=pl.LightningModule)


def load_weights(module: pl.LightningModule, path: str | Path, strict: bool = True) -> None:
    """Read a checkpoint's weights into the chunks that ``pipeline()`` has built; collective over the world.

    The checkpoint is a directory of ``MCoreStrategy``, Megatron-LM or NeMo 2, written on any layout. Raises
    ``FileNotFoundError`` if there is nothing at ``path``, ``RuntimeError`` if the module has no model yet,
    ``ValueError`` if the checkpoint is of another model (with ``strict``, also if names differ).
    """
    where, io = str(path), MCoreCheckpointIO()
    if not io.is_directory(where):
        raise ValueError(
            f"{where} is not a checkpoint directory of MCoreStrategy or Megatron-LM; load a file of another strategy"
            " with load_from_checkpoint"
        )
    with fp8_weights_as_plain([module]):
        _load(module, run_on_rank0(lambda: tensors_folder(where)), io, strict)


def build_from_checkpoint(
    cls: type[_M],
    path: str | Path,
    strict: bool | None = None,
    weights_only: bool | None = None,
    hyper_parameters: Mapping[str, Any] | None = None,
    check: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> _M:
    """Build a module from a sharded checkpoint, with the complete model in this process.

    This is Lightning's ``load_from_checkpoint`` for a directory, with any module: the module is built from the
    hyper-parameters in the checkpoint, and its weights are read in place, whatever layout wrote them.

    Args:
        cls: The module's class, a LightningModule or an ``MCoreModule``.
        path: The checkpoint, a directory.
        strict: Whether names must agree; the module's ``strict_loading`` by default.
        weights_only: As for ``torch.load``; applies to Lightning's state.
        hyper_parameters: Values to use instead of those in the checkpoint; None for none.
        check: Called with the path and the values in the checkpoint; may raise. None checks nothing more.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        RuntimeError: This process is one of several connected ranks.
        ValueError: It is not such a checkpoint, or it is of another model.
    """
    with single_process():
        return _build(cls, str(path), strict, weights_only, dict(hyper_parameters or {}), check)


def hyper_parameters_of(path: str | Path, weights_only: bool | None, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the hyper-parameters in a Lightning checkpoint file, except those ``given``; weights are not read."""
    # Mapped, so the tensors stay on the disk; files from before torch 1.6 are not zip archives and cannot be mapped.
    state = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    recorded = state.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) if isinstance(state, Mapping) else None
    return {name: value for name, value in dict(recorded or {}).items() if name not in given}


def refuse_code(path: str | Path, hyper_parameters: Any) -> None:
    """Raise ``ValueError`` if hyper-parameters name code to run: a file must not choose which code is imported.

    They may name classes that this process has already imported, and functions of Megatron and torch. Pass them without
    the ones that the user overrides.
    """
    if not isinstance(hyper_parameters, Mapping):
        return
    instantiator = hyper_parameters.get("_instantiator")
    if instantiator not in _INSTANTIATORS:
        raise ValueError(
            f"{path} wants to build its module with {instantiator!r}, but only {_INSTANTIATORS[1]!r} is allowed"
        )
    for class_path in _class_paths(hyper_parameters):
        if not _is_imported(class_path):
            raise ValueError(
                f"{path} names the class {class_path!r}, but a file must not choose which code is imported; if the "
                "class is your own, import its module first"
            )
    fields = hyper_parameters.get("transformer")
    if isinstance(fields, Mapping):
        refuse_recorded_code(str(path), fields)


def _class_paths(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("_class_path", "class_path"):
                yield item
            yield from _class_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _class_paths(item)


def _is_imported(class_path: Any) -> bool:
    """Return whether a class, or a method of one, is in an imported module; imports nothing."""
    module, _, name = str(class_path).rpartition(".")
    if module in sys.modules:
        return hasattr(sys.modules[module], name)
    above, _, owner = module.rpartition(".")
    return hasattr(getattr(sys.modules.get(above), owner, None), name)


def _build(
    cls: type[_M],
    path: str,
    strict: bool | None,
    weights_only: bool | None,
    arguments: dict[str, Any],
    check: Callable[[str, Mapping[str, Any]], None] | None,
) -> _M:
    io, path = MCoreCheckpointIO(), tensors_folder(path)
    state: dict[str, Any] = dict(_pl_migrate_checkpoint(io.load_checkpoint(path, weights_only=weights_only), path))
    recorded = state.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    refuse_code(path, {name: value for name, value in recorded.items() if name not in arguments})
    if check is not None:
        check(path, recorded)
    hyper_parameters = {**recorded, **arguments}
    lightning_state = {**state, cls.CHECKPOINT_HYPER_PARAMS_KEY: hyper_parameters}
    outside = lightning_state["state_dict"]
    with warnings.catch_warnings():
        # Lightning finds nothing in this empty dict; the weights are read from the shards.
        warnings.filterwarnings("ignore", message="Found keys that are in the model state dict but not in")
        module = _load_state(cls, {**lightning_state, "state_dict": {}}, strict=False, **arguments)
    assert isinstance(module, cls)
    strictly = module.strict_loading if strict is None else strict
    model_state.load_outside_chunks(module, outside, path, strictly)
    _load(module, path, io, strictly)
    return module


def _load(module: pl.LightningModule, path: str, io: MCoreCheckpointIO, strict: bool) -> None:
    stored = StoredState.open(io, path)
    manifest.check_model(path, stored.contents.manifest, module)
    model_state.load(stored, built_chunks(module), [], strict, advice="pass strict=False")
