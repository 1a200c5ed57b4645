# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer state on one rank, and with activations the memory of the rank.

Weights, gradients and optimizer state stay from the first step to the last. Megatron's data parallelism keeps gradients
in one buffer for each chunk and kind of parameter; the distributed optimizer keeps the weights in such buffers too,
pads them so that every rank gets an equal shard, and holds fp32 copies and moments of that shard only. The weights of a
chunk are there twice while it is wrapped: 2 + 2 bytes and 4 of gradients for each of the 3.05 billion parameters on a
rank of Llama 3 405B (TP=8, PP=16) are 22.7 GiB, and with DP=128 and full recompute a step needs no more.
``formats.py`` says how many bytes an element of each takes, and :func:`state_memory` lays the buffers out. Pure
arithmetic.

Left out because they are small: the step counters of Adam, buffers of routers, scales of FP8. Left out because there
are no activations then: the fp32 gradients that an optimizer makes of 16-bit ones while it steps.

:func:`rank_memory` adds ``activation_memory.py``. What a process takes beside these (libraries, communication buffers,
a fragmented allocator, the work space of kernels) is not counted; on a GPU leave some gigabytes for it.

Sources: ``DistributedDataParallel``, ``_ParamAndGradBuffer``, ``DistributedOptimizer`` and
``Float16OptimizerWithFloat16Params`` of megatron-core 0.16.1.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.optimizer.layer_wise import assign_owners
from lightning_mcore.planning.activation_memory import Activations
from lightning_mcore.planning.built import ParameterTensor
from lightning_mcore.planning.formats import WHOLLY, Formats
from lightning_mcore.planning.parameters import chunk_tensors, count_of, rank_tensors
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.vision import patch_bytes, trained_parameters

_TENSOR_ALIGNMENT = 64  # elements
_BUCKET_ALIGNMENT = 128
_UNIT_SIZE = 10**9
"""Megatron's smallest ``suggested_communication_unit_size``, in elements."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, at the moment of a step when most is held."""

    weights: int  # of parameters, padding included, and with FP8 of their copies in 8 bits
    gradients: int  # of the buffers in which gradients are summed
    optimizer: int  # of fp32 copies and moments, on the device
    activations: int = 0  # of what forward keeps for backward, of all microbatches in flight
    host: int = 0  # optimizer state that is kept in the memory of the host; not in the total
    setup: int = 0  # before the first step, while weights are copied into the buffers of the distributed optimizer

    @property
    def step(self) -> int:
        """Bytes on the device in a step."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total(self) -> int:
        """Bytes on the device, in a step or before the first one."""
        return max(self.step, self.setup)


def state_memory(
    chunks: Sequence[Sequence[ParameterTensor]],
    layout: ParallelLayout,
    formats: Formats,
    world_size: int,
    pipeline_rank: int = 0,
) -> RankMemory:
    """Return the bytes on a rank of one pipeline stage, without activations.

    They are those of the rank that holds most; shards differ by their padding.
    """
    weights = gradients = copied = 0
    state = 0.0
    for index, tensors in enumerate(chunks):
        copied = 0  # of the last chunk that is wrapped, when all gradients are there already
        frozen = [tensor for tensor in tensors if not tensor.is_trained and tensor.bits is None]
        weights += round(sum(tensor.elements * tensor.bits / 8 for tensor in tensors if tensor.bits is not None))
        ranks = _shards(False, layout, formats, world_size) if formats.sharding == WHOLLY else 1
        weights += _weight_bytes(frozen, sum(tensor.elements for tensor in frozen) // ranks, formats)
        for buffer in _buffers(tensors, layout, formats):
            shards = _shards(buffer[0].expert, layout, formats, world_size)
            bucket_size = formats.bucket_size if pipeline_rank == index == 0 else None
            if bucket_size == 0:
                bucket_size = max(40_000_000, 1_000_000 * layout.data_parallel_size(world_size))
            elements = sum(tensor.elements for tensor in buffer)
            padded = _padded(buffer, shards, bucket_size, formats.large_buckets) if formats.distributed else elements
            share = -(-padded // shards) if formats.sharding else padded
            weights += _weight_bytes(buffer, share if formats.sharding == WHOLLY else padded, formats)
            gradients += share * formats.gradient
            copied += elements * formats.parameter
            of_state = sum(tensor.elements * formats.state_bytes(tensor) for tensor in buffer)
            if formats.layer_wise:
                state += _largest_share(buffer, shards, formats)
            else:  # a shard may be all padding but for one that is full
                state += min(padded / shards, elements) / elements * of_state
    host = round(state * formats.offloaded)
    has_buffers = formats.distributed and not formats.fp8
    setup = has_buffers * (weights + gradients + copied)
    return RankMemory(weights, gradients, round(state) - host, host=host, setup=setup)


def _buffers(
    tensors: Iterable[ParameterTensor], layout: ParallelLayout, formats: Formats
) -> list[list[ParameterTensor]]:
    """Return the trained tensors of each buffer: experts apart where ranks share them, weights in FP8 apart."""
    apart = layout.expert_model_parallel_size > 1
    buffers: dict[tuple[bool, bool], list[ParameterTensor]] = {}
    for tensor in (tensor for tensor in tensors if tensor.is_trained):
        key = (apart and tensor.expert, formats.fp8_param and tensor.is_linear)
        buffers.setdefault(key, []).append(tensor)
    return list(buffers.values())


def _shards(expert: bool, layout: ParallelLayout, formats: Formats, world_size: int) -> int:
    """Return over how many ranks the optimizer state of a buffer is divided."""
    if not (formats.distributed or formats.layer_wise or formats.sharding):
        return 1
    if expert and layout.expert_model_parallel_size > 1:
        return layout.expert_data_parallel_size(world_size) // formats.instances
    return layout.data_parallel_size(world_size) * layout.context_parallel_size // formats.instances


def _largest_share(buffer: Sequence[ParameterTensor], ranks: int, formats: Formats) -> int:
    """Return the bytes of the state of the rank that owns most of the tensors' state."""
    # Matrices and the rest are groups of their own, as MuonWithAdamW has them, shared out one after the other.
    held, loads = [0] * ranks, [0] * ranks
    for is_linear in (True, False):
        tensors = [t for t in buffer if t.is_linear == is_linear for _ in range(t.copies)]
        for tensor, owner in zip(tensors, assign_owners([t.size for t in tensors], loads), strict=True):
            held[owner] += tensor.size * formats.state_bytes(tensor)
    return max(held)


def _padded(tensors: Sequence[ParameterTensor], shards: int, bucket_size: int | None, large: bool) -> int:
    """Return the elements of a buffer with its padding: in front of each tensor and behind each bucket.

    Source: ``_ParamAndGradBuffer.__init__`` (0.16.1), which goes through the parameters from the last to the first.
    """
    multiple = math.lcm(shards, _BUCKET_ALIGNMENT, 2**16 if large else 1)
    start = bucket = end = 0
    for tensor in reversed(tensors):
        step = _rounded_up(tensor.size, _TENSOR_ALIGNMENT)
        if tensor.is_shared and end > bucket:
            start = bucket = end = _rounded_up(_rounded_up(start, _TENSOR_ALIGNMENT), multiple)
        for copies in (1,) * tensor.copies if bucket_size is not None else (tensor.copies,):
            start = _rounded_up(start, _TENSOR_ALIGNMENT)
            start = end = start + (copies - 1) * step + tensor.size
            if tensor.is_shared or (bucket_size is not None and end - bucket >= bucket_size):
                start = bucket = end = _rounded_up(end, multiple)
    return _rounded_up(end, multiple)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _weight_bytes(buffer: Sequence[ParameterTensor], padded: int, formats: Formats) -> int:
    """Return the bytes of the weights in a buffer.

    In FP8, TransformerEngine keeps each weight of a linear layer twice, as it is and transposed: beside the 16-bit
    weight, or in its place, and then one of the two is in the buffer.
    """
    linear = sum(tensor.elements for tensor in buffer if tensor.is_linear) if formats.fp8 else 0
    if formats.fp8_param and linear:
        return padded + linear
    return padded * formats.parameter + 2 * linear


def state_of_rank(run: Sizes, stage: int) -> RankMemory:
    """Return the bytes on a rank of a pipeline stage, without activations."""
    layout, formats, world_size = run.layout, run.formats, run.world_size
    state = state_memory(run.tensors(stage), layout, formats, world_size, stage)
    if run.fields.teacher is None:
        return state
    of_teacher = rank_tensors(run.fields.teacher, layout, stage, formats.backend)
    frozen = [[tensor._replace(is_trained=False) for tensor in chunk] for chunk in of_teacher]
    own = state_memory(frozen, layout, formats, world_size).weights
    return replace(state, weights=state.weights + own, setup=state.setup + own * (state.setup > 0))


def rank_memory(run: Sizes, stage: int) -> RankMemory:
    """Return the bytes that a rank of a pipeline stage holds; all ranks of a stage are alike but for padding."""
    fields, layout, batch = run.fields, run.layout, run.batch
    activations = Activations(run).peak(stage)
    if stage == 0:
        # Tensor-parallel ranks sum the gradients of the vision tower in a copy of them all, after the last backward.
        copied = trained_parameters(fields) * run.formats.gradient if layout.tensor_model_parallel_size > 1 else 0
        patches = patch_bytes(fields, batch.micro_batch_size * batch.num_microbatches)
        activations = max(activations, copied) + patches
    memory = replace(state_of_rank(run, stage), activations=activations)
    return _with_whole_layers(run, memory) if run.formats.sharding else memory


def _with_whole_layers(run: Sizes, shares: RankMemory) -> RankMemory:
    """Return the memory of a rank that shares gradients and parameters, with those that are whole for a while.

    As backward begins, all activations are there, and whole gradients of the last layer and of what is outside the
    layers. Each layer frees its activations, and leaves whole gradients that are being reduced, up to ``unit_size``.
    Megatron's default is a billion: 5 layers of Llama 3 8B with 218 million parameters each, 4.1 GiB in fp32. For a
    checkpoint, all parameters are gathered, without activations.

    Source: ``MegatronFSDP``, ``AllGatherPipeline`` and ``GradReducePipeline`` (0.16.1).
    """
    formats, [chunk] = run.formats, run.stages[0]
    parts = [replace(chunk, layers=(layer,), embedding=False, output=False, mtp=0, pairs=0) for layer in chunk.layers]
    counts = [count_of([chunk_tensors(run.fields, run.layout, part, formats.backend)]) for part in parts]
    layer, every = max(count.total for count in counts), count_of(run.tensors(0))
    outside = every.total - sum(count.total for count in counts)
    trained = (every.trained_dense + every.trained_expert) / every.total  # frozen ones have no gradients
    is_wholly = formats.sharding == WHOLLY
    size = formats.unit_size or max(_UNIT_SIZE, 2 * layer if is_wholly else formats.bucket_size or 0)
    ahead = 1 + math.ceil(size // 2 / layer)
    gathered = is_wholly * (outside + layer * min(ahead, len(parts)))
    moments = [(gathered, 0, shares.activations)]  # (whole parameters, whole gradients, bytes of activations)
    for done in (0, min(len(parts) - 1, math.ceil(size / layer))):
        gathered = is_wholly * (outside + layer * min(ahead, len(parts) - done))
        # The gradients of a layer are there twice, as autograd made them and in the whole buffer.
        left = Activations(run).left(chunk, done) + trained * layer * formats.parameter
        moments.append((gathered, round(trained * (outside + layer * (1 + done))), round(left)))
    moments.append((is_wholly * every.total, 0, 0))
    whole, gradients, activations = max(
        moments, key=lambda moment: moment[0] * formats.parameter + moment[1] * formats.gradient + moment[2]
    )
    return replace(
        shares,
        weights=shares.weights + whole * formats.parameter,
        gradients=shares.gradients + gradients * formats.gradient,
        activations=activations,
    )
