# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer state on one rank, and with activations the memory of the rank.

Weights, gradients and optimizer state stay from the first step to the last. Megatron's data parallelism keeps gradients
in one buffer for each chunk and kind of parameter; the distributed optimizer keeps the weights in such buffers too,
pads them so that every rank gets an equal shard, and holds fp32 copies and moments of that shard only.
:class:`StateFormats` says how many bytes an element of each takes, and :func:`state_memory` lays the buffers out. Pure
arithmetic.

Left out because they are small: the step counters of Adam, buffers of routers, scales of FP8. Left out because there
are no activations then: the fp32 gradients that an optimizer makes of 16-bit ones while it steps.

:func:`rank_memory` adds ``activation_memory.py``. What a process takes beside these (libraries, communication buffers,
a fragmented allocator, the work space of kernels) is not counted; on a GPU leave some gigabytes for it.

Sources: ``DistributedDataParallel``, ``_ParamAndGradBuffer``, ``DistributedOptimizer`` and
``Float16OptimizerWithFloat16Params`` of megatron-core 0.16.1. Weights in FP8 and TransformerEngine's optimizer are as
documented there; they need a GPU and are not measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.text import unknown_name
from lightning_mcore.planning.activation_memory import Activations, NumberFormat
from lightning_mcore.planning.model import FP32, GPTFields
from lightning_mcore.planning.parameters import ParameterTensor, Tensors, rank_tensors
from lightning_mcore.planning.vision import patch_bytes

OPTIMIZERS: Mapping[str, int] = {"adam": 2, "adamw": 2, "sgd": 1, "sgd_without_momentum": 0, "muonwithadamw": 2}
"""Moments that an optimizer keeps of each element; Muon keeps one of each matrix."""

BYTES = {"32-true": (4, 4), "bf16-mixed": (2, 4), "bf16-true": (2, 2), "16-mixed": (2, 4), "16-true": (2, 2)}
_TENSOR_ALIGNMENT = 64  # elements
_BUCKET_ALIGNMENT = 128
_BACKENDS = ("local", "transformer_engine")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def optimizer_of(model: Mapping[str, Any]) -> str:
    """Return the name in :data:`OPTIMIZERS` of the optimizer that arguments of ``MCoreGPT`` ask for."""
    recipe = model.get("recipe") or {}
    name = str(recipe.get("optimizer") or "adamw")
    return "sgd_without_momentum" if name == "sgd" and recipe.get("sgd_momentum") == 0 else name


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, at the moment of a step when most is held."""

    weights: int  # of parameters, padding included, and with FP8 of their copies in 8 bits
    gradients: int  # of the buffers in which gradients are summed
    optimizer: int  # of fp32 copies and moments, on the device
    activations: int = 0  # of what forward keeps for backward, of all microbatches in flight
    host: int = 0  # optimizer state that is kept in the memory of the host; not in the total

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class StateFormats:
    """How many bytes an element takes, and who holds it; made by :meth:`of`."""

    parameter: int  # bytes of a parameter
    gradient: int  # bytes of a gradient in its buffer
    main: int  # bytes of the copy that the optimizer works on; 0 where it works on the parameters
    moments: tuple[int, ...]  # bytes of each moment
    optimizer: str  # A name of :data:`OPTIMIZERS`
    distributed: bool  # whether the optimizer state is sharded over the data-parallel ranks
    instances: int = 1  # groups of these ranks, each of which holds a whole state
    bucket_size: int | None = None  # elements of a bucket; None for one bucket, 0 for Megatron's default
    large_buckets: bool = False  # ``pad_buckets_for_high_nccl_busbw``
    fp8: bool = False  # whether linear layers compute in FP8
    fp8_param: bool = False  # whether their weights are kept in it
    offloaded: float = 0.0  # share of the optimizer state that is kept on the host

    @classmethod
    def of(cls, precision: Mapping[str, Any], strategy: Mapping[str, Any], optimizer: str = "adamw") -> "StateFormats":
        """Read them from the arguments of a run.

        Raises ValueError for a name or a size that is unknown.
        """
        name = precision.get("precision") or "32-true"
        if name not in BYTES:
            raise ValueError(f"precision={name!r} is unknown; choose one of {tuple(BYTES)}")
        if optimizer not in OPTIMIZERS:
            raise ValueError(unknown_name("optimizer", optimizer, OPTIMIZERS))
        parameter, gradient = BYTES[name]
        ddp, own = strategy.get("ddp_config") or {}, strategy.get("optimizer_config") or {}
        main, moments = _of_optimizer(parameter, optimizer, own, precision)
        overlaps = bool(strategy.get("overlap_grad_reduce") or ddp.get("overlap_grad_reduce"))
        fraction = own.get("optimizer_offload_fraction") if own.get("optimizer_cpu_offload") else 0.0
        return cls(
            parameter=parameter,
            gradient=gradient,
            main=main,
            moments=moments,
            optimizer=optimizer,
            distributed=bool(strategy.get("use_distributed_optimizer") or ddp.get("use_distributed_optimizer")),
            instances=ddp.get("num_distributed_optimizer_instances") or 1,
            bucket_size=(ddp.get("bucket_size") or 0) if overlaps else None,
            large_buckets=bool(ddp.get("pad_buckets_for_high_nccl_busbw")),
            fp8=precision.get("fp8") is not None or precision.get("fp8_recipe") is not None,
            fp8_param=bool(precision.get("fp8_param")),
            offloaded=float(fraction or 0.0),
        )

    def state_bytes(self, tensor: ParameterTensor) -> int:
        """Return the bytes of the optimizer's state of one element: its copy and its moments."""
        if self.optimizer == "muonwithadamw" and tensor.is_linear:
            return self.main + self.moments[0]
        return self.main + sum(self.moments)


def state_memory(
    chunks: Sequence[Sequence[ParameterTensor]],
    layout: ParallelLayout,
    formats: StateFormats,
    world_size: int,
    pipeline_rank: int = 0,
) -> RankMemory:
    """Return the bytes on a rank of one pipeline stage, without activations.

    They are those of the rank that holds most; shards differ by their padding.
    """
    weights = gradients = 0
    state = 0.0
    for index, tensors in enumerate(chunks):
        frozen = [tensor for tensor in tensors if not tensor.is_trained and tensor.bits is None]
        weights += round(sum(tensor.elements * tensor.bits / 8 for tensor in tensors if tensor.bits is not None))
        weights += _weight_bytes(frozen, sum(tensor.elements for tensor in frozen), formats)
        for buffer in _buffers(tensors, layout, formats):
            shards = _shards(buffer[0].expert, layout, formats, world_size)
            bucket_size = formats.bucket_size if pipeline_rank == index == 0 else None
            if bucket_size == 0:
                bucket_size = max(40_000_000, 1_000_000 * layout.data_parallel_size(world_size))
            elements = sum(tensor.elements for tensor in buffer)
            padded = _padded(buffer, shards, bucket_size, formats.large_buckets) if formats.distributed else elements
            weights += _weight_bytes(buffer, padded, formats)
            gradients += padded * formats.gradient
            of_state = sum(tensor.elements * formats.state_bytes(tensor) for tensor in buffer)
            # A shard may be all padding but for one that is full.
            state += min(padded / shards, elements) / elements * of_state
    host = round(state * formats.offloaded)
    return RankMemory(weights, gradients, round(state) - host, host=host)


def _of_optimizer(
    parameter: int, optimizer: str, own: Mapping[str, Any], precision: Mapping[str, Any]
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of the optimizer's copy of an element, and of each moment."""
    main, count = 0 if parameter == FP32 else FP32, OPTIMIZERS[optimizer]
    if not own.get("use_precision_aware_optimizer"):
        return main, (FP32,) * count
    main_type = _type_bytes(own.get("main_params_dtype"))
    recipe = precision.get("fp8_recipe") or ("delayed" if precision.get("fp8") else None)
    if parameter != FP32 and (main_type != FP32 or recipe in (None, "delayed")):
        # TransformerEngine's optimizer holds the copy: what bf16 lacks of fp32, where it stores remainders.
        halved = str(precision.get("precision")).startswith("bf16") and own.get("store_param_remainders", True)
        main = 2 if halved else main_type
    return main, tuple(_type_bytes(own.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")[:count])


def _type_bytes(dtype: Any) -> int:
    """Return the bytes of an element of a torch type, or of its name; None is fp32."""
    name = str(dtype).rpartition(".")[2]
    return {"uint8": 1, "float8_e4m3fn": 1, "fp8": 1, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2}.get(name, 4)


def _buffers(
    tensors: Iterable[ParameterTensor], layout: ParallelLayout, formats: StateFormats
) -> list[list[ParameterTensor]]:
    """Return the trained tensors of each buffer: experts apart where ranks share them, weights in FP8 apart."""
    apart = layout.expert_model_parallel_size > 1
    buffers: dict[tuple[bool, bool], list[ParameterTensor]] = {}
    for tensor in (tensor for tensor in tensors if tensor.is_trained):
        key = (apart and tensor.expert, formats.fp8_param and tensor.is_linear)
        buffers.setdefault(key, []).append(tensor)
    return list(buffers.values())


def _shards(expert: bool, layout: ParallelLayout, formats: StateFormats, world_size: int) -> int:
    """Return over how many ranks the optimizer state of a buffer is divided."""
    if not formats.distributed:
        return 1
    if expert and layout.expert_model_parallel_size > 1:
        return layout.expert_data_parallel_size(world_size) // formats.instances
    return layout.data_parallel_size(world_size) * layout.context_parallel_size // formats.instances


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


def _weight_bytes(buffer: Sequence[ParameterTensor], padded: int, formats: StateFormats) -> int:
    """Return the bytes of the weights in a buffer.

    In FP8, TransformerEngine keeps each weight of a linear layer twice, as it is and transposed: beside the 16-bit
    weight, or in its place, and then one of the two is in the buffer.
    """
    linear = sum(tensor.elements for tensor in buffer if tensor.is_linear) if formats.fp8 else 0
    if formats.fp8_param and linear:
        return padded + linear
    return padded * formats.parameter + 2 * linear


def rank_memory(
    fields: GPTFields,
    layout: ParallelLayout,
    pipeline_rank: int,
    *,
    world_size: int,
    precision: Mapping[str, Any] = _NOTHING,
    strategy: Mapping[str, Any] = _NOTHING,
    optimizer: str = "adamw",
    micro_batch_size: int = 1,
    num_microbatches: int = 1,
    seq_length: int | None = None,
    packed: bool = False,
    backend: str = "local",
    tensors: Tensors | None = None,
) -> RankMemory:
    """Return the bytes that a rank of a pipeline stage holds; all ranks of a stage are alike but for padding.

    Raises ValueError if the precision, the optimizer or the backend is unknown.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose one of {_BACKENDS}")
    formats = StateFormats.of(precision, strategy, optimizer)
    tensors = tensors or rank_tensors(fields, layout, pipeline_rank, backend)
    state = state_memory(tensors, layout, formats, world_size, pipeline_rank)
    if fields.teacher is not None:
        of_teacher = rank_tensors(fields.teacher, layout, pipeline_rank, backend)
        frozen = [[tensor._replace(is_trained=False) for tensor in chunk] for chunk in of_teacher]
        state = replace(state, weights=state.weights + state_memory(frozen, layout, formats, world_size).weights)
    in_fp8 = formats.fp8 and backend == "transformer_engine"
    form = NumberFormat(formats.parameter, backend, in_fp8, packed, formats.gradient)
    length = fields.seq_length if seq_length is None else seq_length
    group = strategy.get("microbatch_group_size_per_vp_stage")
    meter = Activations(fields, layout, micro_batch_size, length, form, strategy.get("loss_chunk_size", "auto"))
    activations = meter.peak(pipeline_rank, num_microbatches, group)
    activations += patch_bytes(fields, micro_batch_size * num_microbatches) if pipeline_rank == 0 else 0
    return replace(state, activations=activations)
