# SPDX-License-Identifier: Apache-2.0
"""A Megatron training loop written by hand, as a Megatron user would: what the strategy is measured against.

It uses megatron-core alone. From our package it takes only what megatron-core itself lacks on the CPU: the runtime that
makes ``torch.cuda`` mean the CPU, and (in ``tests/support/tiny.py``) the layer spec with our norm and core attention.
It shares no line with the strategy, the schedule, the chunks or the optimizer adapter.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from torch import nn

from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from tests.parity.global_tensors import Slice, fill_weights, gradient_slices, weight_slices
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.tiny import Batch, Recipe

Watch: TypeAlias = Callable[[int, list[DistributedDataParallel], MegatronOptimizer], None]
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}  # by the first word of a precision


@dataclass
class Trace:
    """What one rank saw of a run.

    Attributes:
        dp_rank: Which part of the global batch it read.
        losses: For each step the loss over what this model copy read, rounded to fp32; on every rank.
        grad_norms: Norm of the whole model's gradient before clipping, for each step; None for one that was skipped.
        loss_scales: The loss scale after each step; 1 without loss scaling.
        gradients: For each step this rank's slices of the gradients before clipping; empty unless asked for.
        weights: This rank's slices of the weights after the last step.
    """

    dp_rank: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    gradients: list[list[Slice]] = field(default_factory=list)
    weights: list[Slice] = field(default_factory=list)


def train(
    layout: Layout,
    recipe: Recipe,
    keep_gradients: bool = False,
    before_step: Watch | None = None,
    after_step: Watch | None = None,
) -> Trace:
    """Train the tiny GPT on this rank of ``layout``; the default process group is open and stays so.

    The two functions are called around each step with its number, the wrapped chunks and the optimizer.
    """
    with process_groups(layout):
        config = tiny.make_config({**tiny.transformer_fields(layout, recipe), **_parallel_fields(layout, recipe)})
        chunks = _build_chunks(config, layout, recipe)
        optimizer = _build_optimizer(chunks, layout, recipe)
        _connect(config, chunks, optimizer)
        trace = Trace(parallel_state.get_data_parallel_rank())
        for step in range(recipe.steps):
            if before_step is not None:
                before_step(step, chunks, optimizer)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            trace.losses.append(_forward_backward(chunks, layout, recipe, step))
            if keep_gradients:
                trace.gradients.append(gradient_slices(chunks))
            succeeded, grad_norm, _ = optimizer.step()
            assert succeeded or recipe.precision.startswith("16-")
            trace.grad_norms.append(grad_norm)
            trace.loss_scales.append(optimizer.get_loss_scale().item())
            if after_step is not None:
                after_step(step, chunks, optimizer)
        if layout.overlap and layout.distributed_optimizer:  # the last step's parameters are still to be gathered
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=True)
        for chunk in chunks if layout.sharding else []:
            chunk.start_param_sync(force_sync=True)
            chunk.module._replace_param_with_raw_if_needed()
            for part in chunk.modules():
                part._state_dict_pre_hooks.clear()  # they would show the shards
        trace.weights = weight_slices(chunks)
        return trace


def draw_weights(layout: Layout, recipe: Recipe, seed: int) -> list[Slice]:
    """Return this rank's slices of the weights that Megatron-LM begins with, given ``--seed``."""
    with process_groups(layout):
        seed_as_megatron_lm(seed)
        fields = {**tiny.transformer_fields(layout, recipe), **_parallel_fields(layout, recipe)}
        return weight_slices(_build_chunks(tiny.make_config(fields), layout, recipe, fill=False))


@contextlib.contextmanager
def process_groups(layout: Layout) -> Iterator[None]:
    """Hold Megatron's process groups open, in the CPU runtime; those of an earlier run are closed first."""
    with cpu_runtime():
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        try:
            seed_as_megatron_lm(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()


def seed_as_megatron_lm(seed: int) -> None:
    """Seed all generators of this rank, as ``_set_random_seed`` of its training/initialize.py does."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _parallel_fields(layout: Layout, recipe: Recipe) -> dict[str, Any]:
    dtype = DTYPES[recipe.precision.split("-")[0]]
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp,
        "pipeline_model_parallel_layout": layout.split,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sp,
        "microbatch_group_size_per_vp_stage": layout.group or layout.pp,
        "overlap_p2p_comm": layout.vp is not None,
        "batch_p2p_comm": layout.vp is None,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def _build_chunks(
    config: TransformerConfig, layout: Layout, recipe: Recipe, fill: bool = True
) -> list[DistributedDataParallel]:
    models: list[nn.Module] = []
    for vp_stage in range(layout.vp) if layout.vp else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        models.append(tiny.build_gpt(config, layout, recipe, first, last, vp_stage, is_reference=True))
    if fill:
        fill_weights(models)
    if recipe.precision != "32-true":
        models = [Float16Module(config, model) for model in models]
    if layout.sharding:
        return [_fully_sharded(config, layout, recipe, model) for model in models]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=recipe.precision not in ("bf16-true", "16-true"),
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distributed_optimizer,
    )
    chunks = [
        DistributedDataParallel(config, ddp_config, model, disable_bucketing=i > 0) for i, model in enumerate(models)
    ]
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def _fully_sharded(config: TransformerConfig, layout: Layout, recipe: Recipe, model: nn.Module) -> Any:
    sums_in_fp32 = recipe.precision not in ("bf16-true", "16-true")
    fields = {"grad_reduce_in_fp32": sums_in_fp32, "gradient_reduce_div_fusion": False}  # gloo has no multiplying sum
    if sums_in_fp32 and hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_grads_dtype"):  # 0.19
        fields |= dict.fromkeys(("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"), torch.float32)
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=layout.sharding,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **fields,
    )
    return FullyShardedDataParallel(config, ddp_config, model, device=torch.device("cpu"))


def _build_optimizer(chunks: list[DistributedDataParallel], layout: Layout, recipe: Recipe) -> MegatronOptimizer:
    dtype = DTYPES[recipe.precision.split("-")[0]]
    config = OptimizerConfig(
        optimizer="adam",
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=recipe.eps,
        clip_grad=recipe.clip,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=recipe.initial_loss_scale,
        loss_scale_window=recipe.loss_scale_window,
        params_dtype=dtype,
        use_distributed_optimizer=bool(layout.distributed_optimizer or layout.sharding),
        overlap_param_gather=bool((layout.overlap and layout.distributed_optimizer) or layout.sharding),
    )
    return get_megatron_optimizer(config, chunks, config_overrides={}, use_gloo_process_groups=False)


def _connect(config: TransformerConfig, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Give the schedule what it calls, as Megatron's own ``training.py`` does."""
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync


def _forward_backward(chunks: list[DistributedDataParallel], layout: Layout, recipe: Recipe, step: int) -> float:
    """Run the schedule of one step and return its loss, on every pipeline rank."""
    batches = tiny.microbatches(recipe, layout, parallel_state.get_data_parallel_rank(), step)
    batches = [_context_share(batch) for batch in batches]
    iterators = [iter(batches) for _ in chunks]
    outputs = get_forward_backward_func()(
        forward_step_func=_forward_step_tokens if recipe.token_weighted else _forward_step_mean,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=tiny.SEQ_LENGTH,
        micro_batch_size=recipe.micro_batch_size,
        forward_only=False,
    )
    return _step_loss(outputs)


def _context_share(batch: Batch) -> Batch:
    """Return this context-parallel rank's tokens: of 2 cp slices the r-th and the r-th last, which balances attention.

    Source: ``get_batch_on_this_cp_rank`` in megatron/core/utils.py, whose arguments differ between 0.16 and 0.19.
    """
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    shares = {}
    for name, tensor in batch.items():
        slices = tensor.chunk(2 * size, dim=1)
        shares[name] = torch.cat([slices[rank], slices[2 * size - 1 - rank]], dim=1)
    return shares


def _step_loss(outputs: list[torch.Tensor]) -> float:
    """Return the loss of the step from the last stage's ``[loss * weight, weight]`` of each microbatch."""
    total = torch.stack(outputs).sum(0) if outputs else torch.zeros(2, dtype=torch.float64)
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())  # the other stages have zeros
    return (total[0] / total[1]).float().item()


def _forward_step_mean(iterator: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch, losses = _call(iterator, model)
    return losses, partial(_mean, batch["loss_mask"])


def _forward_step_tokens(iterator: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch, losses = _call(iterator, model)
    return losses, partial(_token_sum, batch["loss_mask"])


def _call(iterator: Iterator[Batch], model: nn.Module) -> tuple[Batch, torch.Tensor]:
    batch = next(iterator)
    return batch, model(**tiny.model_arguments(batch, get_model_config(model)))


def _mean(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the mean over all tokens of the microbatch; context-parallel ranks add up."""
    count = loss_mask.sum()
    dist.all_reduce(count, group=parallel_state.get_context_parallel_group())
    share = (losses.float() * loss_mask).sum() / count
    weight = 1 / parallel_state.get_context_parallel_world_size()
    return share, torch.tensor([share.item(), weight], dtype=torch.float64)


def _token_sum(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum over this rank's tokens and their number; Megatron divides by the number of the whole step."""
    total, count = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, count.int(), torch.tensor([total.item(), count.item()], dtype=torch.float64)
