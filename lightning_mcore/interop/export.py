# SPDX-License-Identifier: Apache-2.0
"""Write a model in Hugging Face form, from a sharded checkpoint or from the running model.

Both ways write the files that ``save_pretrained`` of transformers writes: safetensors files of a limited size with an
index, ``config.json``, the generation config, and the source model's tokenizer files. Errors are found before the first
tensor is read, and the folder appears only when it is complete.

``lightning-mcore export`` runs :func:`export_checkpoint`: one process, no GPU, a few tensors in memory.
:func:`export_model` runs on every rank of a training run, and each rank writes its own files; the callback in
``callback.py`` calls it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.manifest import saving
from lightning_mcore.config.lora import NOT_MERGED
from lightning_mcore.hf.family import SCORE, SCORING
from lightning_mcore.hf.files import INDEX_FILE
from lightning_mcore.hf.pretrained import ModelPieces, pieces_of_module
from lightning_mcore.hf.registry import find_family, recorded_family
from lightning_mcore.hf.safetensors import SafetensorsFolder, write_safetensors
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import Shape
from lightning_mcore.interop import hub
from lightning_mcore.interop.export_adapter import save_adapter
from lightning_mcore.interop.export_config import (
    Description,
    describe,
    warn_of_losses,
    write_files,
    write_json,
    write_value_head,
)
from lightning_mcore.interop.export_folder import new_folder, require_free, shared_folder
from lightning_mcore.interop.export_plan import (
    MAX_SHARD_SIZE,
    ExportOptions,
    ExportPlan,
    Place,
    parse_dtype,
    parse_size,
)
from lightning_mcore.interop.export_tensors import StoredTensors, exchange, places_of_all, ready_to_read
from lightning_mcore.layers.session import single_process
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.kinds import kind_of
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.consensus import run_on_all_ranks, run_on_rank0

_SILENT_SECONDS = 2.0
_WRITERS = 4


def export_checkpoint(
    path: str,
    out: str,
    *,
    like: str | None = None,
    family: str | None = None,
    dtype: str = "auto",
    max_shard_size: str | int = MAX_SHARD_SIZE,
    adapter: bool = False,
    merge: bool = False,
    experts: str = "stacked",
    push_to_hub: str | None = None,
) -> None:
    """Write the weights of a sharded checkpoint as a Hugging Face model, in one process without a GPU.

    A checkpoint of LoRA adapters is merged into the weights of its base, which takes the memory of the whole model.

    Multi-token prediction layers are written as in the published models. transformers does not run them: it ignores as
    many as the published model has, and reports others as unexpected keys.

    Args:
        path: A checkpoint that ``MCoreStrategy`` or Megatron-LM wrote, on any layout; a folder on this machine.
        out: The folder to write, outside the checkpoint; it must not exist, or be empty. A link is followed.
        like: Hugging Face folder with the config, generation config and tokenizer to use, if the checkpoint has none,
            like Megatron-LM checkpoints, or if you want others.
        family: The kind of model to write: a ``model_type``, or ``"package.module:FAMILY"`` for your own family; None
            for the family in the checkpoint or in ``like``, or else the first that fits the model.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``, or ``"auto"`` for the type in the checkpoint. If the run
            used the type of most of the model's weights, ``"auto"`` gives each tensor the type that it had in the
            model.
        max_shard_size: Size of a file in bytes, or as text, such as ``"5GB"``.
        adapter: Write only the LoRA adapters, as a PEFT folder.
        merge: Raise an error if the checkpoint has no LoRA adapters. Adapters are merged with or without it.
        experts: With ``adapter``, the layout of routed experts: ``"stacked"``, a tensor for all experts of a layer, as
            PEFT with transformers 5 and vLLM from 0.23 read; ``"each"``, a pair for each projection of each expert.
        push_to_hub: Repository on the Hugging Face hub to which ``out`` is uploaded, as in :class:`SaveHFModel`.

    Raises:
        FileNotFoundError: There is nothing at ``path`` or ``like``.
        OSError: The disk reports an error; nothing is left at ``out``.
        RuntimeError: The folder was written, but not uploaded.
        ValueError: An argument is wrong, the checkpoint is damaged, or the family of its model is not known.
    """
    options = ExportOptions(like, family, dtype, max_shard_size)
    if push_to_hub is not None:
        hub.require_name(push_to_hub)
    stored, settings, out = _open_stored(path, out)
    _export_stored(stored, settings, out, options, adapter, merge, experts)
    if push_to_hub is not None:
        hub.upload(out, push_to_hub, hub.Origin.of_checkpoint(settings, stored.manifest))


def _open_stored(path: str, out: str) -> tuple[StoredTensors, dict[str, Any], str]:
    """Return a checkpoint's tensors, the settings of its module, and the folder to write, which is free."""
    # Check everything that is cheap first: nothing is created at `out` until the plan is complete
    out = require_free(out)
    stored = StoredTensors(path)
    if os.path.commonpath([os.path.realpath(path), os.path.realpath(out)]) == os.path.realpath(path):
        raise ValueError(f"{out} lies inside the checkpoint {path}; give a folder outside of it")
    # A Megatron-LM checkpoint does not describe its model; `like` has to
    state = MCoreCheckpointIO().load_checkpoint(path) if stored.is_ours else {}
    settings = state.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    return stored, settings, out


def _export_stored(
    stored: StoredTensors,
    settings: dict[str, Any],
    out: str,
    options: ExportOptions,
    adapter: bool,
    merge: bool,
    experts: str,
) -> None:
    """Write a checkpoint as :func:`export_checkpoint` does."""
    path, like = stored.path, options.like
    if settings.get("lora"):
        if settings["lora"].get("quantization") and not adapter:
            raise ValueError(NOT_MERGED)
        layout = experts if adapter else None
        _export_adapted(kind_of(settings), path, out, layout, options)
        return
    for option, given in (("adapter", adapter), ("merge", merge)):
        if given:
            raise ValueError(f"{path} has no LoRA adapters; leave --{option} ({option}=True) out")
    description = describe(path, settings, stored.shapes, like, options.family)
    plan = _plan(description, options, stored.shapes, stored.places, stored.runs_in, stored.read)
    warn_of_losses(description, settings, like)
    with new_folder(out) as folder, _progress(plan, out) as bar, saving(out):
        _write_all(plan, folder, stored.read, bar)
        _finish(plan, description, folder)


def _export_adapted(kind: type[MCoreGPT], path: str, out: str, experts: Any, options: ExportOptions) -> None:
    """Write a checkpoint's adapters in a layout of experts; if that is None, its base with the adapters merged in."""
    with single_process():
        module = kind.load_from_checkpoint(path)
        if experts is not None:
            save_adapter(module, out, experts=experts)
        else:
            export_model(module, out, **vars(options))


def export_model(
    module: pl.LightningModule,
    out: str,
    *,
    like: str | None = None,
    family: str | None = None,
    dtype: str = "auto",
    max_shard_size: str | int = MAX_SHARD_SIZE,
    replace: bool = False,
) -> None:
    """Write the running model as a Hugging Face model; collective over the world, at any layout.

    Call it on every rank, during a run or after it. Each rank writes its own files into a folder that all ranks see.

    Args:
        module: A module whose model is built with ``pipeline()``.
        out: The folder to write, on a disk that all ranks see.
        like: As in :func:`export_checkpoint`.
        family: As in :func:`export_checkpoint`.
        dtype: As in :func:`export_checkpoint`; ``"auto"`` is the type of the weights in the model.
        max_shard_size: As in :func:`export_checkpoint`.
        replace: Whether to replace a Hugging Face model at ``out`` once the new one is complete.

    Raises:
        RuntimeError: The module has no model yet, or there are no process groups.
        Exception: An error of :func:`export_checkpoint`; the same on every rank.
    """
    require_groups()
    out = run_on_rank0(partial(require_free, out, replace))
    with ready_to_read(module):
        options = run_on_all_ranks(lambda: ExportOptions(like, family, dtype, max_shard_size))
        model = LiveModel.prepare(module, options)
        plan = model.plan
        run_on_rank0(lambda: warn_of_losses(model.description, dict(module.hparams), like))
        with shared_folder(out) as folder, _progress(plan, out) as bar:
            # With 5 files and 4 ranks, ranks 0-3 write files 0-3, then rank 0 writes file 4
            files, ranks = list(plan.files), dist.get_world_size()
            for first in range(0, len(files), ranks):
                of_round = files[first : first + ranks]
                tensors = exchange(plan, model.pieces, of_round)
                # A failed write is raised on all ranks here: in the next round, the others would wait for this rank
                run_on_all_ranks(saving(out)(partial(_write_own, plan, folder, of_round, tensors)))
                bar.update(sum(plan.size(tensor) for file in of_round for tensor in plan.files[file]))
            run_on_rank0(saving(out)(partial(_finish, plan, model.description, folder)))


def check_export(module: pl.LightningModule, options: ExportOptions) -> None:
    """Raise the errors of :func:`export_model` in advance, except for a non-empty folder; collective over the world."""
    require_groups()
    with ready_to_read(module):
        LiveModel.prepare(module, options)


@dataclass(frozen=True)
class LiveModel:
    """The running model, and the plan of its export."""

    pieces: ModelPieces
    description: Description
    plan: ExportPlan  # the same on every rank

    @classmethod
    def prepare(cls, module: pl.LightningModule, options: ExportOptions) -> "LiveModel":
        """Plan an export; collective over the world."""
        pieces = pieces_of_module(module)
        places = places_of_all(pieces)
        settings, name = dict(module.hparams), type(module).__name__
        # Rank 0 reads `like` and the hub's cache, then every rank plans from the same description
        description = run_on_rank0(lambda: describe(name, settings, pieces.shapes, options.like, options.family))
        runs_in = built_chunks(module).config.params_dtype
        plan = run_on_all_ranks(lambda: _plan(description, options, pieces.shapes, places, runs_in))
        return cls(pieces, description, plan)


def require_groups(function: str = "export_model") -> None:
    """Raise RuntimeError if there are no process groups; ``function`` is what the user called."""
    if not dist.is_initialized():
        raise RuntimeError(
            f"there is no running model: call {function}() during or after a run of MCoreStrategy, or inside"
            " single_process(); or use export_checkpoint(), which exports a checkpoint without one"
        )


def _write_own(plan: ExportPlan, folder: str, files: Sequence[str], tensors: dict[str, Tensor]) -> None:
    """Write this rank's file, if it has one in this round."""
    if tensors:
        file = files[dist.get_rank()]
        write_safetensors(os.path.join(folder, file), plan.described(file), tensors.__getitem__)


def _write_all(plan: ExportPlan, folder: str, read: Callable[[Place], Tensor], bar: Any) -> None:
    """Write all files, a few at a time, so that one waits for the disk while another reads."""
    stopped, lock = Event(), Lock()

    def write(file: str) -> None:
        # The system provides only pages that are used.
        memory = torch.empty(max(map(plan.size, plan.files[file])), dtype=torch.uint8)

        def assemble(name: str) -> Tensor:
            if stopped.is_set():
                raise CancelledError
            with lock:
                bar.update(plan.size(name))
            return plan.assemble(name, read, memory)

        write_safetensors(os.path.join(folder, file), plan.described(file), assemble)

    with ThreadPoolExecutor(_WRITERS) as pool:
        try:
            for future in as_completed([pool.submit(write, file) for file in plan.files]):
                future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _plan(
    description: Description,
    options: ExportOptions,
    shapes: Mapping[str, Shape],
    places: Mapping[str, list[Place]],
    runs_in: torch.dtype | None,
    read: Callable[[Place], Tensor] | None = None,
) -> ExportPlan:
    known = find_family(options.family) if options.family else recorded_family(description.family)
    weights = WeightMap(known, description.fields, shapes)
    stored = description.stored
    # A model stored in bf16 but trained in fp32 is exported in fp32: its values no longer fit the stored dtypes
    is_as_stored = stored is not None and stored.most == runs_in
    dtype, size = parse_dtype(options.dtype), parse_size(options.max_shard_size)
    return ExportPlan(weights, places, dtype, size, stored if is_as_stored else None, read)


def _finish(plan: ExportPlan, description: Description, folder: str) -> None:
    if plan.index is not None:
        write_json(os.path.join(folder, INDEX_FILE), plan.index)
    write_files(description, plan.main_dtype, folder)
    if description.family.endswith(SCORING):
        tensors = SafetensorsFolder(folder)
        write_value_head(folder, tensors.read(SCORE, (0, 0), tensors.shapes[SCORE]))


def _progress(plan: ExportPlan, out: str) -> Any:
    first = not dist.is_initialized() or dist.get_rank() == 0
    return tqdm(
        desc=f"writing {out}",
        total=plan.total_size,
        unit="B",
        unit_scale=True,
        disable=not first,
        delay=_SILENT_SECONDS,
        leave=False,
    )
