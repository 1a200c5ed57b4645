# SPDX-License-Identifier: Apache-2.0
"""Load only weights: into the chunks of a new run, or into a whole module built from a checkpoint.

:func:`load_weights` fills the chunks that a rank has just built, on any layout, and no rank holds the whole model.
:func:`build_from_checkpoint` makes a module from the hyper-parameters in a checkpoint, whole in this process.
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
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.model_state import StoredState
from lightning_mcore.layers.session import single_process
from lightning_mcore.layers.transformer_config import refuse_recorded_code
from lightning_mcore.parallel.chunks import built_chunks, filled_as_plain

_INSTANTIATORS = (None, "lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")

_M = TypeVar("_M", bound=pl.LightningModule)


def load_weights(module: pl.LightningModule, path: str | Path, strict: bool = True) -> None:
    """Read the weights of a checkpoint into the chunks that ``pipeline()`` has built; collective over the world.

    Args:
        module: A module whose model is built and not wrapped yet, as at the end of ``configure_model``.
        path: A directory that ``MCoreStrategy`` or Megatron-LM wrote, on any layout.
        strict: Refuse missing and unexpected names instead of warning about them.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        RuntimeError: The module has no model yet.
        ValueError: It is not such a checkpoint, or it is of another model.
    """
    where, io = str(path), MCoreCheckpointIO()
    if not io.is_directory(where):
        raise ValueError(
            f"{where} is not a checkpoint directory of MCoreStrategy or Megatron-LM; load a file of another strategy"
            " with load_from_checkpoint"
        )
    with filled_as_plain([module]):
        _load(module, where, io, strict)


def build_from_checkpoint(
    cls: type[_M],
    path: str | Path,
    strict: bool | None = None,
    weights_only: bool | None = None,
    hyper_parameters: Mapping[str, Any] | None = None,
    check: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> _M:
    """Build a module from a sharded checkpoint, with the whole model in this process.

    This is Lightning's ``load_from_checkpoint`` for a directory, with any module: the module is built from the
    hyper-parameters in the checkpoint, and its weights are read in place, whatever layout wrote them.

    Args:
        cls: The module's class, a LightningModule or an ``MCoreModule``.
        path: The checkpoint, a directory.
        strict: Whether names must agree; the module's ``strict_loading`` by default.
        weights_only: As for ``torch.load``; applies to Lightning's state.
        hyper_parameters: Values to use instead of those in the checkpoint.
        check: Called with the path and the values in the checkpoint; may refuse them.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        RuntimeError: This process is one of several connected ranks.
        ValueError: It is not such a checkpoint, or it is of another model.
    """
    with single_process():
        return _build(cls, str(path), strict, weights_only, dict(hyper_parameters or {}), check)


def hyper_parameters_of(path: str | Path, weights_only: bool | None, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the hyper-parameters in a checkpoint file of Lightning; weights are not read.

    Args:
        path: The file.
        weights_only: As for ``torch.load``.
        given: Names for which the user gives values; they are left out.
    """
    state = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    recorded = state.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) if isinstance(state, Mapping) else None
    return {name: value for name, value in dict(recorded or {}).items() if name not in given}


def refuse_code(path: str | Path, hyper_parameters: Any) -> None:
    """Refuse hyper-parameters that name code to run, because a file must not choose which code is imported.

    Args:
        path: The file, named in errors.
        hyper_parameters: The values in it, except those that the user gives instead.

    Raises:
        ValueError: They name a class that this process has not imported, or a function that is neither Megatron's nor
            torch's.
    """
    if not isinstance(hyper_parameters, Mapping):
        return
    instantiator = hyper_parameters.get("_instantiator")
    if instantiator not in _INSTANTIATORS:
        raise ValueError(f"{path} asks for {instantiator!r} to build its module; only {_INSTANTIATORS[1]!r} may")
    for class_path in _class_paths(hyper_parameters):
        if not _is_imported(class_path):
            raise ValueError(
                f"{path} names the class {class_path!r}, and a file must not choose which code is imported; import "
                "its module yourself first, if it is your own"
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
    io = MCoreCheckpointIO()
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
