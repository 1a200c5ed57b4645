# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore import``: make a sharded checkpoint of a Hugging Face model, in one process without a GPU.

The model is built without memory for its weights, to find their names, shapes and places. Each tensor is read while the
previous one is written, so only two are in memory at any time. The result is an ordinary ``MCoreGPT`` checkpoint with
only weights. Every layout loads it (``self.load_weights(out)``, ``MCoreGPT.from_pretrained(out)``,
``MCoreGPT.load_from_checkpoint(out)``), and it remembers the Hugging Face model that it was made from.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.checkpoint import manifest as checkpoint_manifest
from lightning_mcore.checkpoint import model_state
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.checkpoint.save import MANIFEST, SHARDED_STATE, CheckpointSave
from lightning_mcore.checkpoint.save_plan import ShardPlanner
from lightning_mcore.checkpoint.writer import Piece
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.hf.peft_folder import adapter_dtype
from lightning_mcore.hf.pretrained import check_downloads, pieces_of_module, running_fields
from lightning_mcore.hf.source import HFSource, refuse_megatron_checkpoint, seeing_name, sees_images, settings_of_source
from lightning_mcore.hf.weight_map import whole_name, whole_names
from lightning_mcore.hf.weights import HFWeights
from lightning_mcore.interop.export_plan import parse_dtype
from lightning_mcore.layers.session import single_process
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.groups import process_group

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-true", torch.float32: "32-true"}
_SILENT_SECONDS = 2.0


def import_checkpoint(
    path: str, out: str, *, family: str | None = None, dtype: Dtype = "auto", adapters: Sequence[str] = ()
) -> None:
    """Make a sharded checkpoint of a Hugging Face model, or of a PEFT adapter for one.

    An adapter's checkpoint holds the adapter alone and remembers its base, which has to fit into memory whole.

    Args:
        path: Folder of the model, with safetensors files, or its name on the Hugging Face hub.
        out: The checkpoint, a directory that does not exist yet or is empty.
        family: Name or path of its family; None for the one in its config.
        dtype: Type of the weights in the checkpoint; ``"auto"`` is the type of most of the model's weights, or of the
            adapter's.
        adapters: Folders of PEFT adapters, or their names on the hub. The checkpoint is of the last one; those before
            it are merged into the base, one after the other.

    Raises:
        FileNotFoundError: There is no such model, or one of its files is missing.
        OSError: The disk reports an error.
        ValueError: Its family is unknown, its config or weights are not supported, or ``out`` is not empty.
    """
    path, out = os.fspath(path), os.fspath(out)
    if os.path.islink(out):
        out = os.path.realpath(out)
    given = parse_dtype(dtype)
    if checkpoint_files.names_in(*checkpoint_files.open_store(out)) or os.path.isfile(out):
        raise ValueError(f"{out} already exists; give the name of a checkpoint that does not exist yet")
    if checkpoint_files.is_checkpoint_directory(path):
        raise ValueError(f"{path} is already a checkpoint; give the folder of a Hugging Face model")
    refuse_megatron_checkpoint(path)
    if adapters:
        _import_adapter(path, out, adapters, family, given)
        return
    source = HFSource.open(path, family)
    seeing = seeing_name(path, family)
    if source.family.tower is None and seeing != family:
        rank_zero_info(f"{source.folder} has a vision tower, which is left out; family={seeing!r} reads it too")
    folder = source.open_tensors()
    settings = settings_of_source(source, folder.shapes, path, family, folder.stored if given is None else None)
    # With "auto", tensors stored in a wider dtype than most keep it (_keep_wide); a chosen dtype rounds them
    most = folder.stored.most
    kept = given or (most if most in PRECISIONS else torch.float32)
    kind = MCoreVisionGPT if "vision" in settings else MCoreGPT
    kind.check_kind(path, settings)
    with single_process():
        module = kind(**settings)
        _build_without_memory(module, kept)
        fields, shapes = running_fields(source, module), pieces_of_module(module).shapes
        predicted = source.fields.get("mtp_num_layers") or 0
        weights = HFWeights(folder, source.family, fields, shapes, predicted, rounds=given is not None)
        if given is None:
            _keep_wide(module, weights)
        check_downloads(source.folder, {path for name in folder.shapes for path in folder.files_of(name)})
        _write(module, _ReadingPlanner(weights), out, kept)


def _import_adapter(
    path: str, out: str, adapters: Sequence[str], family: str | None, dtype: torch.dtype | None
) -> None:
    *merged, last = adapters
    kind = MCoreVisionGPT if sees_images(path, family) else MCoreGPT
    # The base needs memory and weights here, because adapters may be merged into it
    module = kind.from_pretrained(path, family=family, lora=last, adapters=merged)
    module.check_settings()
    with single_process():
        module.configure_model()
        kept = dtype or adapter_dtype(last)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(kept) if parameter.requires_grad else parameter.data
        _write(module, ShardPlanner(), out, kept)


class _OnMeta(TorchFunctionMode):
    """Makes tensors without memory, even if Megatron names a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {"device": torch.device("meta")} if kwargs and kwargs.get("device") is not None else {}
        return func(*args, **{**(kwargs or {}), **named})


def _build_without_memory(module: MCoreGPT, dtype: torch.dtype) -> None:
    with torch.device("meta"), _OnMeta():
        module.configure_model()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)  # what Megatron keeps in fp32, such as a router's bias, is a buffer


def _keep_wide(module: MCoreGPT, weights: HFWeights) -> None:
    """Give each tensor without memory a dtype that holds what it will be filled with."""
    chunks = built_chunks(module)
    for index in range(len(chunks.bare)):
        for entry in model_state.sharded_tensors(chunks, index):
            for piece in pieces_of(entry):
                names = whole_names(piece.place.key, tuple(piece.place.global_shape))
                entry.data.data = entry.data.to(weights.dtype(next(iter(names)), entry.data.dtype))


def _write(module: MCoreGPT, planner: ShardPlanner, out: str, dtype: torch.dtype) -> None:
    chunks = built_chunks(module)
    chunks.config.params_dtype = dtype  # for the manifest
    state = model_state.collect(chunks, [])
    manifest = checkpoint_manifest.describe(
        module,
        ParallelLayout(),
        1,
        PRECISIONS[dtype],
        use_distributed_optimizer=False,
        config=chunks.config,
        optimizers=[],
    )
    checkpoint: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": model_state.state_outside_chunks(module, module.state_dict()),
        module.CHECKPOINT_HYPER_PARAMS_NAME: module._hparams_name,
        module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams),
        SHARDED_STATE: state.tensors,
        MANIFEST: {**manifest, "parameters": state.num_parameters},
    }
    module.on_save_checkpoint(checkpoint)
    save = None
    try:
        # The same save as a run's, advanced by hand: reading and writing run in threads meanwhile
        save = CheckpointSave.start(os.path.abspath(out), checkpoint, process_group("dp_cp"), planner)
        while not save.advance():
            pass
    except BaseException:
        if isinstance(planner, _ReadingPlanner):
            planner.stop()
            if save is not None:
                save.join()  # a thread in torch's code crashes the process when Python exits
        raise


class _ReadingPlanner(ShardPlanner):
    """Plans pieces that are read from a Hugging Face model when they are accessed."""

    def __init__(self, weights: HFWeights) -> None:
        super().__init__()
        self._weights = weights
        self._pieces: _PiecesToRead | None = None

    def stop(self) -> None:
        """Stop the reading at the next piece, even one that has not begun yet."""
        if self._pieces is not None:
            self._pieces.stop()

    def plan(self, sharded_state: dict[str, Any], replica_group: Any) -> tuple[Sequence[Piece], Metadata | None]:
        """Plan as usual, for tensors without memory."""
        planned, metadata = super().plan(sharded_state, replica_group)
        self._pieces = _PiecesToRead(planned, self._weights)
        return self._pieces, metadata


class _PiecesToRead(Sequence[Piece]):
    """Pieces that are read when they are accessed, into two buffers in turn.

    The first access to new memory is slower than a good disk, so the buffers are reused. ``planned`` are the same
    pieces, with tensors without memory.
    """

    def __init__(self, planned: Sequence[Piece], weights: HFWeights) -> None:
        self._planned = planned
        self._weights = weights
        largest = max((piece.content.nbytes for piece in planned if isinstance(piece.content, Tensor)), default=0)
        self._memory = torch.empty((2, largest), dtype=torch.uint8, device="cpu")
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the iteration at the next piece."""
        self._stopped.set()

    def __len__(self) -> int:
        return len(self._planned)

    def __getitem__(self, index: Any) -> Any:  # one piece; nobody asks for a slice
        piece = self._planned[index]
        if not isinstance(piece.content, Tensor):
            return piece
        # When piece 2 is read into buffer 0, the writer must be done with piece 0
        memory = self._memory[index % 2, : piece.content.nbytes]
        values = memory.view(piece.content.dtype).view(piece.content.shape)
        name, start, shape = whole_name(piece.index.fqn, tuple(piece.index.offset or ()), tuple(values.shape))
        self._weights.fill(values, name, start, shape)
        return Piece(piece.index, values)

    def __iter__(self) -> Iterator[Piece]:
        """Read each piece while the previous one is written; RuntimeError once :meth:`stop` was called."""
        size = sum(piece.content.nbytes for piece in self._planned if isinstance(piece.content, Tensor))
        progress = tqdm(total=size, desc="importing", unit="B", unit_scale=True, delay=_SILENT_SECONDS, leave=False)
        with progress, ThreadPoolExecutor(1) as reader:
            coming = [reader.submit(self.__getitem__, 0)] if self._planned else []
            for place in range(len(self)):
                piece = coming.pop().result()
                if self._stopped.is_set():
                    raise RuntimeError("the import was stopped")
                # The writer has just asked for piece n, so it no longer needs n - 1, whose buffer n + 1 takes
                if place + 1 < len(self):
                    coming.append(reader.submit(self.__getitem__, place + 1))
                yield piece
                progress.update(piece.content.nbytes if isinstance(piece.content, Tensor) else 0)
