# SPDX-License-Identifier: Apache-2.0
"""Model chunks in Megatron's wrappers.

A chunk is one virtual pipeline stage. For training it is wrapped in ``Float16Module`` (if parameters have 16 bits) and
in Megatron's ``DistributedDataParallel``, in the order of Megatron-LM's ``get_model``; for evaluation there is no
second wrapper. A LightningModule without ``pipeline()`` is one chunk, and keeps its own dtypes.

The strategy calls :func:`wrap_chunks` in ``setup`` and :func:`unwrap_chunks` in ``teardown``; in between, steps
use the chunks.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.extensions import transformer_engine
from megatron.core.fp8_utils import correct_amax_history_if_needed, is_float8tensor, post_all_gather_processing
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mcore.config.fp8 import TRANSFORMER_FIELDS as FP8_FIELDS
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules.model import check_average_in_collective, check_fields
from lightning_mcore.parallel.consensus import all_gather_object
from lightning_mcore.parallel.fully_sharded import FullyShardedChunk
from lightning_mcore.parallel.groups import is_spread_expert, process_group, replicas_of
from lightning_mcore.parallel.pipeline import Pipeline
from lightning_mcore.parallel.stage_layers import check_uniform_recompute

TAKES_FP32 = "takes_fp32"
"""An attribute of a layer that computes the same way if its own tensors are fp32 and its inputs are not."""

WrappedChunk: TypeAlias = DistributedDataParallel | FullyShardedChunk
"""A chunk wrapped for training."""

_COMPLETE = "has_complete_parameters"  # an attribute of a wrapped chunk
_T = TypeVar("_T")
_OWNED_FIELDS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "bf16",
    "fp16",
    "params_dtype",
)
_OWNED_FIELDS_BETWEEN_STAGES = (
    "pipeline_dtype",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "deallocate_pipeline_outputs",
    "microbatch_group_size_per_vp_stage",
)
# Source: get_attr_wrapped_model in megatron/core/pipeline_parallel/schedules.py and finalize_model_grads.py (0.16.1)
_READ_BY_SCHEDULES = ("model_type", "set_input_tensor")
_READ_BETWEEN_STAGES = ("pre_process", "post_process", "share_embeddings_and_output_weights")
_SCHEDULE_FUNCTIONS = (
    "finalize_model_grads_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "grad_scale_func",
)


@dataclass
class ModelChunks:
    """This rank's chunks and their config."""

    config: TransformerConfig
    wrapped: list[nn.Module]
    pipeline: Pipeline | None  # None for a plain module
    uncalled: Mapping[nn.Module, "UncalledModules"] = field(default_factory=dict)
    are_lost: bool = False  # parameters that were sharded when the run ended

    @property
    def ddp(self) -> list[WrappedChunk]:
        """The chunks wrapped for training; empty in evaluation."""
        return [chunk for chunk in self.wrapped if isinstance(chunk, WrappedChunk)]

    @property
    def bare(self) -> list[nn.Module]:
        """The chunks without their wrappers."""
        return [_unwrapped(chunk) for chunk in self.wrapped]

    def wait_for_uncalled(self, chunk: nn.Module) -> None:
        """Wait for a wrapped chunk's parameters for which no hook waits; call it before a forward pass."""
        if chunk in self.uncalled:
            self.uncalled[chunk].wait()
        elif isinstance(chunk, FullyShardedChunk):
            chunk.gather_outside_units()

    def scale_losses(self, scale: Callable[[Tensor], Tensor]) -> None:
        """Let Megatron's schedule scale each microbatch's loss; :func:`unwrap_chunks` undoes it."""
        self.config.grad_scale_func = scale

    @property
    def is_last(self) -> list[bool]:
        """For each chunk, whether it holds the end of the model."""
        return self.pipeline.is_last if self.pipeline is not None else [True]


class UncalledModules:
    """Modules whose parameters are used in training without a call, so that no forward hook waits for these.

    Source: ``enable_forward_pre_hook`` and ``_make_forward_pre_hook`` of ``DistributedDataParallel`` (0.16.1, 0.19.2).
    """

    def __init__(self, chunk: DistributedDataParallel) -> None:
        # overlap_param_gather gathers a parameter before its module is called. One that is read from outside, as in
        # functional.linear(x, self.projection.weight), would have the values of the step before.
        self._wait_for = chunk._make_forward_pre_hook()
        self._modules: dict[int, tuple[nn.Module, RemovableHandle]] = {}  # metrics change their hash
        for module in chunk.module.modules():
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                self._modules[id(module)] = module, module.register_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._modules.pop(id(module))[1].remove()

    def wait(self) -> None:
        """Wait until the uncalled modules' parameters are gathered; collective over the data-parallel ranks."""
        for module, _ in self._modules.values():
            self._wait_for(module)

    def close(self) -> None:
        """Remove the hooks that are left."""
        for _, handle in self._modules.values():
            handle.remove()


def _unwrapped(chunk: nn.Module) -> nn.Module:
    while isinstance(chunk, DistributedDataParallel | FullyShardedChunk | MegatronFSDP | Float16Module):
        chunk = chunk.module
    return chunk


def built_chunks(module: nn.Module) -> ModelChunks:
    """Return a module's model as it was built, outside a run; a plain module is one chunk."""
    pipeline = find_pipeline(module)
    modules: list[nn.Module] = list(pipeline.chunks) if pipeline is not None else [module]
    return ModelChunks(config=getattr(modules[0], "config", None), wrapped=modules, pipeline=pipeline)


def find_pipeline(module: nn.Module) -> Pipeline | None:
    """Return the model that a module built with ``pipeline()``, or None; ValueError for anything else to train."""
    pipelines = [child for _, child in module.named_modules(remove_duplicate=False) if isinstance(child, Pipeline)]
    if not pipelines:
        return None
    if len(pipelines) > 1:
        raise ValueError(f"{type(module).__name__} builds {len(pipelines)} models with pipeline(); build only one")
    # Megatron reduces only the gradients of chunks.
    inside = {id(parameter) for parameter in pipelines[0].parameters()}
    outside = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise ValueError(
            f"{type(module).__name__} trains parameters outside the model built with pipeline(), such as "
            f"{outside[0]!r}; move them into a chunk or freeze them with requires_grad_(False)"
        )
    return pipelines[0]


def plain_config(dtype: torch.dtype) -> TransformerConfig:
    """Return a config for a plain module, which is not a transformer, because Megatron's wrappers need one."""
    return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, params_dtype=dtype)


def pipeline_config(pipeline: Pipeline, owned: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of a pipeline's chunks, checked against the fields ``owned`` by strategy and precision."""
    config = getattr(pipeline.chunks[0], "config", None)
    if not isinstance(config, TransformerConfig):
        raise TypeError(
            f"a chunk built by pipeline() must be a Megatron module with a TransformerConfig in `.config`; "
            f"{type(pipeline.chunks[0]).__name__} has {type(config).__name__}"
        )
    staged = owned["pipeline_model_parallel_size"] > 1
    needed = (*_READ_BY_SCHEDULES, *(_READ_BETWEEN_STAGES if staged else ()))
    for chunk in pipeline.chunks:
        if missing := [name for name in needed if getattr(chunk, name, None) is None]:
            raise TypeError(
                f"the chunk {type(chunk).__name__} built by pipeline() has no {', '.join(missing)}, which Megatron's"
                " schedules read; set values in its __init__ and define set_input_tensor(self, input_tensor), as the"
                " guide 'Your own model' shows"
            )
    defaults = {each.name: each.default for each in fields(TransformerConfig) if each.name in FP8_FIELDS}
    wanted_values = {**defaults, **owned}
    for name in (*_OWNED_FIELDS, *FP8_FIELDS, *(_OWNED_FIELDS_BETWEEN_STAGES if staged else ())):
        given, wanted = getattr(config, name), wanted_values[name]
        if given != wanted:
            raise ValueError(
                f"the model's TransformerConfig has {name}={given!r} but MCoreStrategy and Trainer(precision=...) need "
                f"{name}={wanted!r}; build it with TransformerConfig(..., **self.megatron_fields())"
            )
    parameter = next(pipeline.parameters(), None)
    check_fields(config, device_type=None if parameter is None else parameter.device.type)
    check_uniform_recompute(config)
    return config


def wrap_chunks(
    modules: Sequence[nn.Module],
    config: TransformerConfig,
    pipeline: Pipeline | None,
    ddp_config: DistributedDataParallelConfig | None,
    align_grad_reduce: bool = False,
) -> ModelChunks:
    """Wrap chunks on their device, and give all data-parallel ranks the same weights; connects ``config`` to them.

    ``ddp_config`` is None for evaluation. ``align_grad_reduce`` lets all stages of a pipeline reduce at the same time.
    Raises ValueError if gradients would be averaged although the loss is weighted by tokens.

    Source: ``get_model`` and ``train`` in megatron/training/training.py (0.16).
    """
    wrapped: list[nn.Module] = list(modules)
    _mark_shares_of_norm(wrapped)
    if transformer_engine.HAVE_TE:
        _forget_earlier_run(wrapped)
    if pipeline is not None and (config.bf16 or config.fp16):
        wrapped = [cast_chunk(config, module) for module in wrapped]
        if config.fp8_param:
            correct_amax_history_if_needed(wrapped)  # casting damages it before TransformerEngine 2
    if ddp_config is not None:
        check_average_in_collective(ddp_config.average_in_collective, config)
    if pipeline is None:
        broadcast_buffers(wrapped[0])
    if ddp_config is None:
        for module in wrapped:
            _broadcast_parameters(module)
        return ModelChunks(config, wrapped, pipeline)
    ddp = _wrapped_for_training(wrapped, config, ddp_config)
    _set_schedule_functions(config, ddp, ddp_config, align_grad_reduce)
    gathers_later = (chunk for chunk in ddp if isinstance(chunk, DistributedDataParallel) and chunk.use_forward_hook)
    uncalled = {chunk: UncalledModules(chunk) for chunk in gathers_later}
    return ModelChunks(config, list(ddp), pipeline, uncalled)


def _wrapped_for_training(
    modules: Sequence[nn.Module], config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> Sequence[WrappedChunk]:
    if ddp_config.use_megatron_fsdp:
        for module in modules:
            _broadcast_parameters(module)
        return [FullyShardedChunk(config, ddp_config, module) for module in modules]
    ddp = [
        # Buckets for the first chunk only, as in Megatron-LM: the others overlap with chunks after them in backward.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in ddp:
        chunk.broadcast_params()
    return ddp


def cast_chunk(config: TransformerConfig, module: nn.Module) -> Float16Module:
    """Cast a chunk as Megatron does, but keep what is fp32 in its routers and delta nets, which compute with it.

    Megatron rounds the bias by which a router chooses experts, and then keeps the rounded values in fp32. Source:
    ``TopKRouter._maintain_float32_expert_bias`` (megatron.core.transformer.moe.router, 0.16.1 and 0.19.2).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, TopKRouter) or hasattr(layer, TAKES_FP32)]
    tables: list[dict[str, Any]] = [table for layer in layers for table in (layer._parameters, layer._buffers)]
    kept = [
        (table, name, tensor, tensor.data)
        for table in tables
        for name, tensor in table.items()
        if tensor is not None and tensor.dtype == torch.float32
    ]
    cast = Float16Module(config, module)
    for table, name, tensor, values in kept:
        tensor.data = values
        table[name] = tensor
    return cast


def _mark_shares_of_norm(modules: Sequence[nn.Module]) -> None:
    """Set the marks by which Megatron counts each parameter once in the gradient norm, and clips by it.

    Source: ``TELinear`` (megatron.core.extensions.transformer_engine, 0.16.1 and 0.19.2), ``reset_parameters`` of
    TransformerEngine's ``Linear``, ``DotProductAttention`` of both, and ``param_is_not_tensor_parallel_duplicate``
    (megatron.core.tensor_parallel, 0.16.1; in 0.19 it knows the ranks that share an expert).
    """
    # Megatron counts a slice on every rank, any other parameter on tensor-parallel rank 0. Three marks are wrong:
    # TransformerEngine marks linear layers that are not cut; sinks are slices without a mark; and with tp2-ep2-etp1 the
    # output biases of rank 1's own experts have no mark, so they would not be counted at all.
    for module in modules:
        for layer in module.modules():
            if transformer_engine.HAVE_TE and type(layer) is transformer_engine.TELinear:
                for parameter in layer.parameters(recurse=False):
                    parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
            sinks = layer._parameters.get("softmax_offset")
            if sinks is not None:
                sinks.tensor_model_parallel = True  # type: ignore[attr-defined]
        for parameter in module.parameters():
            if is_spread_expert(parameter) and not getattr(parameter, "tensor_model_parallel", False):
                is_counted = process_group("expert_tp").rank() == 0
                parameter.tensor_model_parallel = is_counted  # type: ignore[attr-defined]
                parameter.shared = not is_counted  # type: ignore[attr-defined]  # this rank may be tensor-parallel 0


def _forget_earlier_run(modules: Sequence[nn.Module]) -> None:
    """Make TransformerEngine forget the layers of an earlier run of this process.

    Source: ``FP8GlobalStateManager`` in transformer_engine/pytorch/quantization.py (2.11).
    """
    # Delayed scaling would reduce the largest values of those layers over process groups that are closed by now.
    manager = transformer_engine.FP8GlobalStateManager
    manager.reset()
    for module in modules:
        for layer in module.modules():
            getattr(layer, "fp8_meta", {}).pop(manager.get_buffer_info(), None)


def unwrap_chunks(chunks: ModelChunks) -> ModelChunks:
    """Return the chunks without wrappers, hooks and gradient buffers; not collective: it also follows exceptions."""
    for modules in chunks.uncalled.values():
        modules.close()
    are_lost = False
    for chunk in chunks.ddp:
        if isinstance(chunk, FullyShardedChunk):
            are_lost |= not chunk.close()
            continue
        _remove_forward_hooks(chunk)
        _remove_gradient_hooks(chunk)
        chunk.param_to_bucket_group.clear()
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            # Megatron's optimizer, which writes a later save, keeps the buffers, and with this option weights in them.
            # NCCL has registered the memory of others, in its own pool (nccl_ub), and would send from what is gone.
            if not (buffer.ddp_config.reuse_grad_buf_for_mxfp8_param_ag or buffer.nccl_ub):
                buffer.grad_data.untyped_storage().resize_(0)
        for parameter in chunk.parameters():
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                del parameter.main_grad
    for name in _SCHEDULE_FUNCTIONS:
        setattr(chunks.config, name, None)
    return ModelChunks(chunks.config, chunks.bare, chunks.pipeline, are_lost=are_lost)


def _remove_gradient_hooks(chunk: Any) -> None:
    """Remove the hooks that Megatron's wrapper adds to nodes of autograd, in case a graph with them is kept."""
    # The fp32 shards of Megatron's distributed optimizer are such graphs: views of the weights. Python's garbage
    # collector does not see through a node, so hook, wrapper and optimizer would keep each other alive.
    for node in chunk.grad_accs:
        hooks = node.register_hook(_do_nothing).hooks_dict_ref()  # all of the node's hooks
        hooks.clear()
    chunk.grad_accs.clear()


def _do_nothing(*_: object) -> None:
    """Stand in for a hook."""


def count_parameters(chunks: ModelChunks, layout: ParallelLayout) -> int:
    """Return the number of parameters of the whole model; collective over the world."""
    return count_whole({"model": [parameter for chunk in chunks.bare for parameter in chunk.parameters()]}, layout)[
        "model"
    ]


def count_whole(parts: Mapping[str, Iterable[torch.nn.Parameter]], layout: ParallelLayout) -> dict[str, int]:
    """Return how many parameters the whole model has in each part, of which this rank has some; collective."""
    # TP=2, PP=2: a rank of stage 0 has 500 parameters, of which 400 are halves of matrices: its stage has 900. With 700
    # in stage 1, four ranks sum up to 2 * 900 + 2 * 700, which is twice the model.
    of_stage = {
        name: sum(parameter.numel() * _ranks_that_share(parameter, layout) for parameter in parameters)
        for name, parameters in parts.items()
    }
    of_ranks = all_gather_object(of_stage)
    copies = dist.get_world_size() // layout.pipeline_model_parallel_size
    # Only some stages may have a part.
    return {name: sum(of_rank.get(name, 0) for of_rank in of_ranks) // copies for name in parts}


def _ranks_that_share(parameter: torch.nn.Parameter, layout: ParallelLayout) -> int:
    """Return how many ranks of a stage hold a shard of a parameter; 0 for one that is counted elsewhere."""
    if getattr(parameter, "shared", False):  # the last stage's copy of tied embeddings
        return 0
    is_of_expert = is_spread_expert(parameter)
    ranks = layout.expert_model_parallel_size if is_of_expert else 1
    if getattr(parameter, "tensor_model_parallel", False):
        ranks *= layout.expert_tensor_size if is_of_expert else layout.tensor_model_parallel_size
    return ranks


def synchronize_parameters(chunks: ModelChunks) -> None:
    """Gather parameters that are still sharded after an overlapped step; collective over the data-parallel ranks."""
    for chunk in chunks.ddp:
        if isinstance(chunk, FullyShardedChunk):
            chunk.gather()
        elif chunk.use_forward_hook and not getattr(chunk, _COMPLETE, False):
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)
                if quantized := [weight for weight in chunk.parameters() if is_float8tensor(weight)]:
                    post_all_gather_processing(quantized)  # Megatron does this only if the forward pass gathers them
            setattr(chunk, _COMPLETE, True)


def scatter_parameters(chunks: ModelChunks, with_main: bool) -> None:
    """Copy parameters that were written while gathered into shards, ``with_main`` also into those in fp32."""
    for chunk in chunks.ddp:
        if isinstance(chunk, FullyShardedChunk):
            chunk.scatter(with_main)


@contextlib.contextmanager
def shards_shown(chunks: Sequence[WrappedChunk]) -> Iterator[None]:
    """Let fully sharded chunks show the shards that an optimizer steps in place of their parameters."""
    sharded = [chunk for chunk in chunks if isinstance(chunk, FullyShardedChunk)]
    for chunk in sharded:
        chunk.show_shards()
    try:
        yield
    finally:
        for chunk in sharded:
            chunk.show_parameters()


def parameters_changed(chunks: Sequence[WrappedChunk]) -> None:
    """Record that an optimizer has stepped, so that parameters may be sharded again."""
    for chunk in chunks:
        if isinstance(chunk, FullyShardedChunk):
            chunk.forget_gathered()
        else:
            setattr(chunk, _COMPLETE, False)


def check_overlapped_sums(model: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if sums that overlap with backward wait for parameters that this step did not use.

    Source: the assertions in ``reset`` and ``finish_grad_sync`` of ``_ParamAndGradBucketGroup`` in
    megatron/core/distributed/param_and_grad_buffer.py (0.16.1 and 0.19.2).
    """
    for chunk in model:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.overlap_grad_reduce:
            continue
        unused: set[Tensor] = set()
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            # A group that no step has used yet is summed after backward.
            waits = group.grad_reduce_handle is None and (group.per_param_grad_ready_counts or not group.is_first_batch)
            unused |= group.params - group.per_param_grad_ready_counts.keys() if waits else set()
        if unused:
            first = next(name for name, parameter in chunk.module.named_parameters() if parameter in unused)
            raise RuntimeError(
                "overlap_grad_reduce=True sums gradients as soon as all parameters have one, but"
                f" {len(unused)} parameters, such as {first!r}, have none in this step; set it to False, or freeze"
                " parameters that are never used"
            )


def check_gradients(chunks: ModelChunks) -> None:
    """Raise RuntimeError on every rank if summed gradients hold a NaN or infinity on any; collective over the world."""
    device = next(chunks.ddp[0].parameters()).device
    finite = [data.isfinite().all() for chunk in chunks.ddp for data in gradient_buffers(chunk)]
    wrong = (~torch.stack([torch.ones((), dtype=torch.bool, device=device), *finite])).any().int()
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    if not wrong:
        return
    named = (pair for chunk in chunks.ddp for pair in _summed_gradients(chunk))
    names = [name for name, gradient in named if not gradient.isfinite().all()]
    here = f"of this rank in {names[0]!r} and {len(names) - 1} others" if names else "of another rank"
    raise RuntimeError(
        f"the gradients contain NaN or infinity, {here}; lower the learning rate, clip, or check the data"
        " (ddp_config.check_for_nan_in_grad=True enables this check)"
    )


def _summed_gradients(chunk: WrappedChunk) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter with what this rank holds of its summed gradient."""
    if isinstance(chunk, FullyShardedChunk):
        yield from chunk.named_gradients()
        return
    for name, parameter in chunk.module.named_parameters():
        if hasattr(parameter, "main_grad"):
            yield name, parameter.main_grad


def gradient_buffers(chunk: WrappedChunk) -> list[Tensor]:
    """Return the memory in which a chunk's gradients are summed."""
    if isinstance(chunk, FullyShardedChunk):
        return chunk.gradients
    return [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _remove_forward_hooks(chunk: DistributedDataParallel) -> None:
    """Remove Megatron's forward hooks, as ``disable_forward_pre_hook`` does, from modules of all kinds.

    Megatron looks up each module by its hash, but the hash of a torchmetrics object changes with its state. Source:
    ``DistributedDataParallel.disable_forward_pre_hook`` (0.16).
    """
    for handle in chunk.remove_forward_pre_hook_handles.values():
        handle.remove()
    chunk.remove_forward_pre_hook_handles.clear()


def _set_schedule_functions(
    config: TransformerConfig,
    ddp: Sequence[WrappedChunk],
    ddp_config: DistributedDataParallelConfig,
    align_grad_reduce: bool,
) -> None:
    config.finalize_model_grads_func = _finalize_gradients
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in ddp])
    if align_grad_reduce:
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in ddp])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in ddp])


def _finalize_gradients(model: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Reduce gradients as Megatron does, but divide them by the number of all tokens without reading it on the host.

    ``num_tokens`` is this rank's number on the last stage, an int scalar ``[]``, or None for losses that are not
    weighted by tokens. Source: ``finalize_model_grads`` in megatron/core/distributed (0.16), which compares it with 0,
    for which the host waits once for each chunk; 0.19 does what this does.
    """
    check_overlapped_sums(model)
    finalize_model_grads(model, None, **options)
    if num_tokens is not None:
        _divide_by_tokens(model, num_tokens)
    for chunk in model:
        if isinstance(chunk, FullyShardedChunk):
            chunk.show_parameters()


def _divide_by_tokens(model: list[nn.Module], num_tokens: Tensor) -> None:
    stages = process_group("pp")
    dist.broadcast(num_tokens, src=dist.get_global_rank(stages, stages.size() - 1), group=stages)
    dist.all_reduce(num_tokens, group=process_group("dp_cp"))
    scale = 1.0 / num_tokens.clamp(min=1)
    for chunk in model:
        chunk.scale_gradients(scale)  # type: ignore[operator]  # Megatron's wrapper


def _one_or_all(functions: list[_T]) -> "_T | list[_T]":
    return functions[0] if len(functions) == 1 else functions


def _broadcast_parameters(module: nn.Module) -> None:
    """Broadcast a bare module's parameters, as ``DistributedDataParallel.broadcast_params`` does."""
    for parameter in module.parameters():
        owner = replicas_of(parameter)
        dist.broadcast(parameter.data, src=dist.get_global_rank(owner, 0), group=owner)


def broadcast_buffers(module: nn.Module, stored_only: bool = False) -> None:
    """Copy the first rank's buffers to all copies, as DDP does; ``stored_only`` skips those not in state dicts."""
    group = process_group("dp_cp")
    if group.size() == 1:
        return
    tables: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if not (stored_only and name in layer._non_persistent_buffers_set):
                tables.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
    for buffers in tables.values():
        # A batch norm of 3 channels: means [3] and variances [3] travel as 6 numbers, and its count as 1.
        values = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
        for buffer, value in zip(buffers, torch.split(values, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(value.view_as(buffer))
