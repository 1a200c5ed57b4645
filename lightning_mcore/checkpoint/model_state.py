# SPDX-License-Identifier: Apache-2.0
"""The model and its optimizer as sharded tensors: collect them for a save, and fill them on any layout.

Every tensor is a part of a global tensor with Megatron-LM's name, such as ``decoder.layers.mlp.linear_fc1.weight``, so
a checkpoint does not depend on the layout that wrote it: each rank that loads it asks for the parts that it needs.

``strategy/checkpointing.py`` calls :func:`collect` and :func:`load`, ``weights.py`` only :func:`load`; both open a
:class:`StoredState` to read from. The optimizer's part is ``optimizer_state.py``; ``io.py`` reads and writes the disk.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Self

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_mcore.checkpoint import extra_state, megatron_lm
from lightning_mcore.checkpoint.differences import Differences, Shape
from lightning_mcore.checkpoint.io import Contents, MCoreCheckpointIO
from lightning_mcore.checkpoint.optimizer_state import (
    MAIN_NAMES,
    Numbers,
    Share,
    gather_numbers,
    identity_of,
    numbers_of,
    pieces_of,
    place_range,
    place_share,
    shares_of,
    tensors_in,
)
from lightning_mcore.checkpoint.reader import OF_AN_OPTIMIZER
from lightning_mcore.layers.hidden_states import is_projection
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.parallel.chunks import ModelChunks, scatter_parameters, synchronize_parameters
from lightning_mcore.parallel.consensus import any_true, combine_on_rank0, run_on_all_ranks
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.pipeline import Pipeline

# On PP=2 x TP=2, 4 layers with [8, 6] weights, split by rows, make one tensor [4, 8, 6]: stage 1 with TP rank 0 holds
# layers 2 and 3, rows 0 to 3 of each. Plain modules are complete on every rank. Other chunks are named
# "chunk<n>.<name>" by their position in the pipeline, so they load only on the same number of stages.
TRAINED_ONLY = "saves_trained_only"  # attribute of a chunk whose frozen weights come from another place
OPTIMIZER = "optimizer"
STRICT_LOADING = "set strict_loading=False in the module"


@dataclass(frozen=True)
class CollectedState:
    """The saved state of a model and its optimizers."""

    tensors: dict[str, Any]  # Megatron's sharded tensors, in the memory of model and optimizers
    numbers: list[Numbers]  # the rest of each optimizer's state; the same on every rank
    num_parameters: int


@dataclass(frozen=True)
class StoredState:
    """A checkpoint opened for reading."""

    path: str
    contents: Contents  # without TransformerEngine's objects if the model ran without it
    numbers: Sequence[Numbers] | None  # as in CollectedState; None without optimizer state
    read: Callable[[dict[str, Any]], dict[str, Any]]  # fills a sharded state; collective

    @classmethod
    def open(
        cls,
        io: MCoreCheckpointIO,
        path: str,
        numbers: Sequence[Numbers] | None = None,
        weights_only: bool | None = None,
        manifest: dict[str, Any] | None = None,
    ) -> Self:
        """Open a checkpoint and read its contents; collective over the world."""
        contents = io.contents_for_all(path, manifest)
        read = partial(io.load_shards, path, weights_only=weights_only, contents=contents)
        return cls(path, contents, numbers, read)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a stored tensor."""
        entry = self.contents.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def weights(self) -> dict[str, Shape]:
        """Global shapes of the tensors that are not optimizer state."""
        shapes = self.contents.shapes
        return {name: shape for name, shape in shapes.items() if not name.startswith(OF_AN_OPTIMIZER)}


def collect(chunks: ModelChunks, optimizers: Sequence[MCoreOptimizer]) -> CollectedState:
    """Return the sharded state of a model and of the optimizers to save (may be none); collective over the world."""
    model_state, shares = run_on_all_ranks(lambda: _shares(chunks, optimizers))
    for key, chunk in zip(_keys(chunks), chunks.bare, strict=True):
        extra_state.as_tensors(chunk, chunks.config, model_state[key])
    state = dict(model_state)
    numbers = []
    for index, own in enumerate(shares):
        untrained = _untrained(own, model_state)
        # Each rank reports what it steps itself. Frozen parameters are on several ranks, and one copy speaks for them.
        without_state = dict.fromkeys(identity_of(entry) for entry in untrained if _speaks_for_copies())
        numbers.append(gather_numbers({**without_state, **numbers_of(own)}))
        blocks = [*_state_blocks(index, own), *_missing_blocks(index, own, untrained, _state_dtypes(own))]
        state[f"{OPTIMIZER}{index}"] = {str(number): block for number, block in enumerate(blocks)}
    parameters = [entry for entry in tensors_in(model_state) if isinstance(entry.data, nn.Parameter)]
    count = sum(prod(shape) for shape in _global_shapes(parameters).values())
    for entry in tensors_in(model_state):
        if isinstance(entry, ShardedTensorFactory) and is_float8tensor(entry.data):
            entry.data = entry.data.dequantize()  # MXFP8 weights of TransformerEngine 2.11 cannot be cut
    return CollectedState(state, numbers, count)


def _shares(chunks: ModelChunks, optimizers: Sequence[MCoreOptimizer]) -> tuple[dict[str, Any], list[list[Share]]]:
    """Return the sharded state of the chunks, and the share of each parameter that this rank steps."""
    model_state = {key: sharded_chunk(chunks, index) for index, key in enumerate(_keys(chunks))}
    for entry in tensors_in(model_state):
        pieces_of(entry)
    return model_state, [shares_of(optimizer, model_state) for optimizer in optimizers]


def shares_of_optimizers(chunks: ModelChunks, optimizers: Sequence[MCoreOptimizer]) -> list[Share]:
    """Return the shares of all parameters that this rank steps."""
    return [share for shares in _shares(chunks, optimizers)[1] for share in shares]


def _prefix(index: int, name: str) -> str:
    return f"{OPTIMIZER}{index or ''}.state.{name}.{{}}"


def _state_blocks(index: int, shares: Sequence[Share]) -> Iterator[ShardedTensor]:
    for share in shares:
        for name, tensor in share.tensors().items():
            yield from place_share(_prefix(index, name), tensor, share)
        if share.has_copy:
            yield from place_share(_prefix(index, share.name_of_copy), share.copy(), share)


def _missing_blocks(
    index: int,
    shares: Sequence[Share],
    untrained: Sequence[ShardedTensor | ShardedTensorFactory],
    dtypes: Mapping[str, Mapping[str, torch.dtype]],
) -> Iterator[ShardedTensor]:
    """Yield blocks for the layers of stacked tensors that have no state, such as frozen ones."""
    # A save must fill all layers of a stacked tensor. If layer 0 is frozen and layer 1 trained, exp_avg [2, ...] gets
    # zeros for layer 0, as before a first step, and the fp32 copy of layer 0 is its weight.
    for share in shares:
        own = {*share.tensors(), *([share.name_of_copy] if share.has_copy else [])}
        for name, dtype in dtypes.get(share.sharded.key, {}).items():
            if name not in own:
                yield from place_share(_prefix(index, name), _filled(share.stepped, name, dtype), share)
    for entry in untrained:
        for name, dtype in dtypes.get(entry.key, {}).items():
            filled = _filled(entry.data.reshape(-1), name, dtype)
            yield from place_range(_prefix(index, name), filled, entry, begin=0)


def _filled(weight: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return the state ``name`` of a weight that has none."""
    return weight.detach().to(dtype) if name in MAIN_NAMES else torch.zeros_like(weight, dtype=dtype)


def _state_dtypes(shares: Sequence[Share]) -> dict[str, dict[str, torch.dtype]]:
    """Return the dtype of each state tensor of each weight, over all ranks; collective over the world."""

    def own() -> dict[str, dict[str, torch.dtype]]:
        found: dict[str, dict[str, torch.dtype]] = {}
        for share in shares:
            dtypes = found.setdefault(share.sharded.key, {})
            dtypes.update({name: tensor.dtype for name, tensor in share.tensors().items()})
            if share.has_copy:
                dtypes[share.name_of_copy] = share.copy().dtype
        return found

    def combine(of_ranks: list[dict[str, dict[str, torch.dtype]]]) -> dict[str, dict[str, torch.dtype]]:
        merged: dict[str, dict[str, torch.dtype]] = {}
        for found in of_ranks:
            for key, dtypes in found.items():
                merged.setdefault(key, {}).update(dtypes)
        return merged

    return combine_on_rank0(own, combine)


def _untrained(shares: Sequence[Share], model_state: dict[str, Any]) -> list[ShardedTensor | ShardedTensorFactory]:
    trained = {id(share.parameter) for share in shares}
    return [
        entry
        for entry in tensors_in(model_state)
        if isinstance(entry.data, nn.Parameter) and not entry.data.requires_grad and id(entry.data) not in trained
    ]


def _global_shapes(entries: Iterable[ShardedTensor | ShardedTensorFactory]) -> dict[str, Shape]:
    """Return the global shapes of the stored tensors, over all ranks; collective over the world."""
    shapes: dict[str, Shape] = {}
    for entry in entries if _speaks_for_copies() else ():
        for piece in pieces_of(entry):
            shapes[piece.place.key] = tuple(piece.place.global_shape)

    def combine(of_ranks: list[dict[str, Shape]]) -> dict[str, Shape]:
        merged: dict[str, Shape] = {}
        for found in of_ranks:
            merged.update(found)
        return merged

    return combine_on_rank0(lambda: shapes, combine)


def _speaks_for_copies() -> bool:
    """Return whether this rank is the first of the ranks that hold copies of its parameters, or of its experts."""
    return process_group("dp_cp").rank() == 0 or process_group("expert_dp").rank() == 0


def _keys(chunks: ModelChunks) -> list[str]:
    return [f"model{index}" for index in range(len(chunks.bare))]


def sharded_tensors(chunks: ModelChunks, index: int) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """Yield this rank's weights of its chunk number ``index`` as they are stored, frozen ones included.

    Leaves out projections to a teacher's hidden size.
    """
    for entry in tensors_in(sharded_chunk(chunks, index, whole=True)):
        if not is_projection(entry.key):
            yield entry


def sharded_chunk(chunks: ModelChunks, index: int, whole: bool = False) -> dict[str, Any]:
    """Return this rank's sharded chunk ``index``, with its parameters as data; ``whole`` includes frozen weights."""
    chunk = chunks.bare[index]
    trained_only = getattr(chunk, TRAINED_ONLY, False)
    method = getattr(type(chunk), "sharded_state_dict", None)
    if method is not None and method is not MegatronModule.sharded_state_dict:
        metadata = ensure_metadata_has_dp_cp_group(None)  # Megatron's own default fails with multi-token prediction
        if trained_only:
            metadata["non_homogeneous_layers"] = True
        state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        if trained_only and not whole:
            return {name: entry for name, entry in state.items() if _is_trained(entry)}
        return state
    stages = process_group("pp")
    prefix = f"chunk{index * stages.size() + stages.rank()}." if chunks.pipeline is not None else ""
    # Pipeline, tensor-parallel and data-parallel rank: Megatron takes the copy with (0, 0, 0) as the main one.
    replica = (0, process_group("tp").rank(), process_group("dp_cp").rank())
    parameters = dict(chunk.named_parameters(remove_duplicate=False))
    return {
        name: _whole(prefix + name, parameters.get(name, value), replica) for name, value in chunk.state_dict().items()
    }


def _is_trained(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory) and bool(entry.data.requires_grad)


def _whole(key: str, value: Any, replica: tuple[int, int, int]) -> ShardedTensor | ShardedObject:
    if isinstance(value, Tensor) and value.numel() > 0:
        return ShardedTensor.from_rank_offsets(key, value, replica_id=replica)
    return ShardedObject(key, value, (1,), (0,), replica_id=replica)


def state_outside_chunks(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a ``state_dict`` outside the shards: buffers and frozen parameters outside the pipeline."""
    paths = [path for path, child in module.named_modules() if isinstance(child, Pipeline)]
    if not paths:
        return {}
    return {name: value for name, value in state_dict.items() if not name.startswith(f"{paths[0]}.")}


def load_outside_chunks(module: nn.Module, saved: Mapping[str, Any], path: str, strict: bool) -> None:
    """Load what :func:`state_outside_chunks` returned; with ``strict``, ``ValueError`` if names differ."""
    own = state_outside_chunks(module, module.state_dict())
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    shapes = [
        f"{name} ({list(saved[name].shape)} in it, {list(value.shape)} in the model)"
        for name, value in own.items()
        if isinstance(value, Tensor) and name in saved and saved[name].shape != value.shape
    ]
    Differences(missing, unexpected, shapes).check(path, strict, STRICT_LOADING)
    with extra_state.checked_extra_state(saved):
        module.load_state_dict(saved, strict=False)


def load(
    stored: StoredState,
    chunks: ModelChunks,
    optimizers: Sequence[MCoreOptimizer],
    strict: bool,
    advice: str = STRICT_LOADING,
) -> None:
    """Read the weights, and the state of the given optimizers, into the running model; collective over the world.

    ``strict`` makes missing and unexpected names an error instead of a warning, and ``advice`` tells the user how to
    allow them. Raises ``ValueError``, the same on every rank, if the checkpoint is of another model or lacks optimizer
    state.
    """
    synchronize_parameters(chunks)  # fully sharded ones have no memory otherwise
    model_state, _ = run_on_all_ranks(lambda: _shares(chunks, []))
    differences = compare(stored, model_state)
    differences.check(stored.path, strict, advice)
    wanted = {key: _without(state, differences, stored) for key, state in model_state.items()}
    loaded = stored.read(wanted)
    for key, chunk in zip(_keys(chunks), chunks.bare, strict=True):
        # load_state_dict may complain about missing names only if all names were asked for.
        is_all = len(wanted[key]) == len(model_state[key]) and not getattr(chunk, TRAINED_ONLY, False)
        state = loaded.get(key, {})
        with extra_state.restored(chunk, chunks.config, state), extra_state.checked_extra_state(state):
            chunk.load_state_dict(state, strict=is_all)
    scatter_parameters(chunks, with_main=True)
    if not optimizers:
        return
    # Build the state again: loading has replaced its tensors by the parameters.
    model_state, shares = run_on_all_ranks(lambda: _shares(chunks, optimizers))
    is_by_bucket = any(map(megatron_lm.is_by_bucket, stored.contents.shapes))
    for index, (optimizer, own) in enumerate(zip(optimizers, shares, strict=True)):
        if is_by_bucket:
            assert stored.numbers is not None
            step = stored.numbers[index]["common"]["step"]
            megatron_lm.load_buckets(stored.path, stored.read, optimizer, own, step)
            continue
        _load_optimizer(stored, index, own, model_state, keeps_dtypes=not optimizer.rebuilt)
    scatter_parameters(chunks, with_main=False)  # what _load_optimizer has read into parameters


def compare(stored: StoredState, model_state: dict[str, Any]) -> Differences:
    """Compare a model's names and shapes, over all ranks, with a checkpoint; collective."""
    wanted = _global_shapes(tensors_in(model_state))
    found = {name: shape for name, shape in stored.weights().items() if name in wanted or not is_projection(name)}
    return Differences.between(found, wanted)


def _without(state: dict[str, Any], differences: Differences, stored: StoredState) -> dict[str, Any]:
    """Drop the tensors that the checkpoint lacks; they stay unchanged in the model."""
    absent = set(differences.missing)

    def is_there(entry: Any) -> bool:
        if isinstance(entry, ShardedObject):
            return entry.unique_key in stored.contents.objects
        return not any(piece.place.key in absent for piece in pieces_of(entry))

    return {name: entry for name, entry in state.items() if is_there(entry)}


def _load_optimizer(
    stored: StoredState, index: int, shares: Sequence[Share], model_state: dict[str, Any], keeps_dtypes: bool
) -> None:
    """Read the state of one optimizer; ``keeps_dtypes`` gives it the stored dtypes, such as the uint8 of 8-bit Adam."""
    assert stored.numbers is not None
    numbers, names_of = stored.numbers[index], _stored_names(stored, index)
    wanted: list[ShardedTensor] = []
    read: list[tuple[Share, dict[str, Tensor]]] = []
    for share in shares:
        names = names_of(share.sharded)
        own = numbers["own"].get(identity_of(share.sharded), numbers["common"] if names else None)
        wished = [name for name in names if name not in MAIN_NAMES] if own is not None else []
        key = pieces_of(share.sharded)[0].place.key
        dtypes = {name: stored.dtype(_prefix(index, name).format(key)) for name in wished}
        targets = share.targets(wished, dtypes if keeps_dtypes else {})
        share.set_numbers(own or {})
        for name, tensor in targets.items():
            wanted += place_range(_prefix(index, name), tensor.view(-1), share.sharded, share.begin)
        if share.has_copy:
            targets["param"] = share.target_of_copy()
            copy = next((_prefix(index, name) for name in MAIN_NAMES if name in names), "{}")
            wanted += place_range(copy, targets["param"].view(-1), share.sharded, share.begin)
        read.append((share, targets))
    read_into(stored, wanted)
    weights: list[tuple[Tensor, Tensor]] = []
    wanted = []
    for entry in tensors_in(model_state):
        names = [name for name in MAIN_NAMES if name in names_of(entry)]
        # A copy in the checkpoint is the exact value. The weight there is rounded, and serves a run in the same dtype.
        # An fp32 parameter has no copy here.
        if names and isinstance(entry.data, nn.Parameter) and _needs_exact_value(stored, entry):
            weight = entry.data.detach()
            # On the host, because a device may have no room for all weights in fp32
            is_exact = weight.dtype == torch.float32
            exact = weight if is_exact else torch.empty_like(weight, dtype=torch.float32, device="cpu")
            weights.append((weight, exact))
            wanted += place_range(_prefix(index, names[0]), exact.view(-1), entry, begin=0)
    # Not read together with this rank's shares of the same copies: Megatron takes blocks with one offset for the same.
    if any_true(bool(wanted)):
        read_into(stored, wanted)
    for weight, exact in weights:
        weight.copy_(exact)  # does nothing in fp32, where it is the same memory
    for share, targets in read:
        share.accept(targets)


def _needs_exact_value(stored: StoredState, entry: ShardedTensor | ShardedTensorFactory) -> bool:
    """Whether a parameter is in fp32, or its weight in the checkpoint is rounded to another dtype."""
    if is_float8tensor(entry.data):
        return False
    dtype: torch.dtype = entry.data.dtype
    return dtype == torch.float32 or stored.dtype(pieces_of(entry)[0].place.key) not in (dtype, torch.float32)


def read_into(stored: StoredState, wanted: Sequence[ShardedTensor]) -> None:
    """Read blocks of stored tensors into their memory; collective over the world."""
    loaded = stored.read({str(number): block for number, block in enumerate(wanted)})
    for number, block in enumerate(wanted):
        # Blocks are read into place, but Megatron may return a new tensor instead.
        if loaded[str(number)].data_ptr() != block.data.data_ptr():
            block.data.copy_(loaded[str(number)])


def place_weights(key: str, chunks: ModelChunks, value_of: Callable[[Tensor], Tensor | None]) -> list[ShardedTensor]:
    """Return a value of each stored weight's shape, in any dtype, as blocks of global tensors; None leaves one out.

    ``key`` has ``{}`` in place of the weight's name. The blocks share the memory of the values, which are contiguous.
    """
    placed = []
    for index in range(len(chunks.bare)):
        for entry in tensors_in(sharded_chunk(chunks, index)):
            value = value_of(entry.data)
            if value is not None:
                placed += place_range(key, value.view(-1), entry, begin=0)
    return placed


def _stored_names(stored: StoredState, index: int) -> Callable[[ShardedTensor | ShardedTensorFactory], list[str]]:
    """Return a function that lists the optimizer tensors that the checkpoint holds for a parameter."""
    start = f"{OPTIMIZER}{index or ''}.state."
    known: dict[str, set[str]] = {}
    for stored_name in stored.contents.shapes:
        if stored_name.startswith(start):
            name, _, weight = stored_name.removeprefix(start).partition(".")
            known.setdefault(weight, set()).add(name)

    def names_of(sharded: ShardedTensor | ShardedTensorFactory) -> list[str]:
        weights = [known.get(piece.place.key, set()) for piece in pieces_of(sharded)]
        # A parameter in several parts (gate and up of a gated MLP) has a state only if all parts do.
        return sorted(set.intersection(*weights)) if weights else []

    return names_of
