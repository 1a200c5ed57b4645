# SPDX-License-Identifier: Apache-2.0
"""Rules between the settings of ``MCoreStrategy`` (gradients, schedule, overlaps, expert ranks) and of ``Trainer``.

``given`` holds arguments of the strategy by name; None or absent means the default. ``ddp`` holds the fields of
``ddp_config`` that differ from Megatron's defaults, which are all off where they matter here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_mcore.config.field_homes import DDP_NOT_AVAILABLE, FSDP
from lightning_mcore.config.layout import ParallelLayout

GRADIENT_SETTINGS = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Settings that both the strategy and ``ddp_config`` have."""

SHARDINGS = ("optim_grads", "optim_grads_params")
"""Values of ``data_parallel_sharding``, in Megatron's words (``data_parallel_sharding_strategy``)."""

# Fields of ddp_config, and the setting without which they do nothing
_NEEDS = {
    "num_distributed_optimizer_instances": "use_distributed_optimizer",
    "reduce_scatter_with_fp32_accumulation": "use_distributed_optimizer",
    "align_param_gather": "overlap_param_gather",
    "disable_symmetric_registration": "nccl_ub",
}
_UNIT_SIZE = "suggested_communication_unit_size"  # elements that data_parallel_sharding gathers ahead, times 2
_NOT_WITH_SHARDING = (
    *("num_distributed_optimizer_instances", "average_in_collective", "reduce_scatter_with_fp32_accumulation"),
    *("nccl_ub", "align_param_gather"),
)
NO_SYNC_BATCHNORM = "sync_batchnorm=True is not available for a model built with pipeline(); set it to False"

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_INTERLEAVED = "needs the interleaved schedule; set virtual_pipeline_model_parallel_size=2 or more"


def resolved(given: Mapping[str, Any], ddp: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``ddp_config`` with the strategy's arguments filled in."""
    values = {**ddp, **{name: given[name] for name in GRADIENT_SETTINGS if given.get(name) is not None}}
    sharding = given.get("data_parallel_sharding")
    if sharding is None:
        return values
    of_fsdp = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": sharding}
    return {**values, **dict.fromkeys(GRADIENT_SETTINGS, True), **of_fsdp}


def gradient_faults(given: Mapping[str, Any], ddp: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of the gradient settings on any layout."""
    for name in GRADIENT_SETTINGS:
        if given.get(name) is not None and name in ddp and ddp[name] != given[name]:
            yield f"{name}={given[name]} contradicts ddp_config.{name}={ddp[name]}; set it in one place"
    values = resolved(given, ddp)
    yield from _sharding_faults(given, ddp)
    yield from _option_faults(ddp, values)
    # Parameters can be gathered during forward only if the optimizer is sharded and gradients overlap.
    missing = [name for name in GRADIENT_SETTINGS[:2] if not values.get(name)]
    if values.get("overlap_param_gather") and missing:
        needed = " and ".join(f"{name}=True" for name in missing)
        yield f"overlap_param_gather=True needs {needed}; set {'both' if len(missing) == 1 else 'all three'}"
    if given.get("use_layer_wise_distributed_optimizer") and values.get("use_distributed_optimizer"):
        yield (
            "use_layer_wise_distributed_optimizer=True shards the optimizer by whole parameters, and"
            " use_distributed_optimizer=True by ranges of elements; set one of them"
        )
    if given.get("align_grad_reduce") and not values.get("overlap_grad_reduce"):
        yield "align_grad_reduce=True needs overlap_grad_reduce=True; set both, or neither"


def _sharding_faults(given: Mapping[str, Any], ddp: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with ``data_parallel_sharding``, and the settings of gradients that it excludes."""
    sharding = given.get("data_parallel_sharding")
    if sharding is None:
        return
    asked = _asked(sharding)
    if sharding not in SHARDINGS:
        yield (
            f"{asked} is not available; choose 'optim_grads_params' or 'optim_grads', or set"
            " use_distributed_optimizer=True, which shards the optimizer state alone"
        )
        return
    for name in GRADIENT_SETTINGS:
        if given.get(name) is False:
            yield f"{name}=False contradicts {asked}, which always does this; leave it out"
    if given.get("use_layer_wise_distributed_optimizer"):
        yield f"use_layer_wise_distributed_optimizer=True contradicts {asked}, which shards by rows; set one of them"
    if given.get("align_grad_reduce"):
        yield f"align_grad_reduce=True contradicts {asked}, which reduces after each layer; leave it out"
    for name in _NOT_WITH_SHARDING:
        if ddp.get(name):
            yield f"ddp_config.{name}={ddp[name]} is not available with {asked}; leave it out"


def _asked(sharding: str) -> str:
    return f"data_parallel_sharding={sharding!r}"


def sharding_faults(sharding: str | None, precision: str, fp8: bool, optimizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield number formats, and fields of ``optimizer_config``, that ``data_parallel_sharding`` does not take."""
    if sharding is None:
        return
    if precision.startswith("16") or fp8:
        what = "FP8" if fp8 else f"precision={precision!r}"
        yield f"{what} is not available with {_asked(sharding)}; choose precision='bf16-mixed', or leave the latter out"
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if optimizer.get(name):
            yield (
                f"optimizer_config.{name}=True is not available with {_asked(sharding)}; leave it out, or set"
                " use_distributed_optimizer=True instead"
            )


def sharding_faults_on(sharding: str | None, layout: ParallelLayout, world_size: int) -> Iterator[str]:
    """Yield a sentence if the ranks leave ``data_parallel_sharding`` nothing to shard over."""
    if sharding is None:
        return
    replicas = layout.data_parallel_size(world_size) * layout.context_parallel_size
    experts = layout.expert_model_parallel_size
    if replicas == 1:
        yield (
            f"{_asked(sharding)} shards over data-parallel and context-parallel ranks, and this run has one; leave it"
            " out"
        )
    # In a group of one rank, Megatron divides the gradients again at each microbatch (0.16.1 and 0.19.2).
    elif experts > 1 and layout.expert_data_parallel_size(world_size) == 1:
        yield (
            f"{_asked(sharding)} needs each expert on two ranks or more, and with expert_model_parallel_size={experts}"
            f" each is on one; run on {2 * world_size} ranks, or choose a smaller expert_model_parallel_size"
        )


def _option_faults(ddp: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields of ``ddp_config`` that are not available, would do nothing, or that Megatron rejects."""
    for name, value in ddp.items():
        reason = FSDP if "fsdp" in name else DDP_NOT_AVAILABLE.get(name)
        if name == _UNIT_SIZE and values.get("use_megatron_fsdp"):
            continue
        if reason is not None:
            yield f"ddp_config.{name}={value!r} is not available: {reason}; leave it out"
        elif name in _NEEDS and not values.get(_NEEDS[name]):
            yield f"ddp_config.{name}={value} needs {_NEEDS[name]}=True; set both"
    if ddp.get("reduce_scatter_with_fp32_accumulation"):
        for name in ("average_in_collective", "num_distributed_optimizer_instances"):
            if name in ddp:
                yield (
                    f"ddp_config.{name}={ddp[name]} contradicts reduce_scatter_with_fp32_accumulation=True, which sums"
                    " over all data-parallel ranks; set one of them"
                )


def world_faults(ddp: Mapping[str, Any], layout: ParallelLayout, world_size: int, device_type: str) -> Iterator[str]:
    """Yield gradient settings that the ranks or the device do not support; the layout divides the world."""
    instances = ddp.get("num_distributed_optimizer_instances", 1)
    # Gradients are also reduced over context-parallel ranks. Each instance shards the optimizer over its part of them.
    replicas = layout.data_parallel_size(world_size) * layout.context_parallel_size
    for name, size in (
        ("data-parallel times context-parallel size", replicas),
        ("expert data-parallel size", layout.expert_data_parallel_size(world_size)),
    ):
        if size % instances:
            yield (
                f"ddp_config.num_distributed_optimizer_instances={instances} does not divide the {name}, which is"
                f" {size}; choose one of its divisors"
            )
    for name in ("average_in_collective", "nccl_ub"):
        if ddp.get(name) and device_type != "cuda":
            yield (
                f"ddp_config.{name}=True is an option of NCCL, but this run is on {device_type!r}, whose groups are"
                " gloo; leave it out"
            )


def schedule_faults(given: Mapping[str, Any], ddp: Mapping[str, Any], layout: ParallelLayout) -> Iterator[str]:
    """Yield settings of overlap, grouping and alignment that the pipeline does not support."""
    sharding, stages = given.get("data_parallel_sharding"), layout.pipeline_model_parallel_size
    if sharding is not None and stages > 1:
        yield (
            f"{_asked(sharding)} is not available with pipeline_model_parallel_size={stages}, where each microbatch"
            " would gather all layers of its stage; set use_distributed_optimizer=True instead, or"
            " pipeline_model_parallel_size=1"
        )
    if given.get("overlap_p2p_comm") and not layout.is_interleaved:
        yield f"overlap_p2p_comm=True {_INTERLEAVED}"
    group = given.get("microbatch_group_size_per_vp_stage")
    if group is not None and not layout.is_interleaved:
        yield f"microbatch_group_size_per_vp_stage={group} {_INTERLEAVED}, or leave it None"
    if given.get("align_grad_reduce") and layout.pipeline_model_parallel_size == 1:
        yield (
            "align_grad_reduce=True acts between pipeline stages only; set pipeline_model_parallel_size=2 or more, or"
            " leave it out"
        )
    if ddp.get("align_param_gather") and not layout.is_interleaved:
        yield (
            "ddp_config.align_param_gather=True acts in the interleaved schedule only; set"
            " virtual_pipeline_model_parallel_size=2 or more, or leave it out"
        )


def packed_row_faults(micro_batch_size: int | None, batch_sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for a microbatch of several packed rows, of which hybrid context parallelism may split some.

    ``batch_sizes`` are the rows of DataLoader batches, by the names of their settings.
    """
    given = batch_sizes if micro_batch_size is None else {"micro_batch_size": micro_batch_size}
    for name, size in given.items():
        if size > 1:
            yield (
                f"{name}={size} puts several rows into a microbatch, but with hybrid_context_parallel=True each row is"
                " split or not; set micro_batch_size=1 in MCoreStrategy"
            )


def tensor_overlap_faults(enabled: bool, config_path: str | None, layout: ParallelLayout) -> Iterator[str]:
    """Yield the missing requirements of ``tp_comm_overlap`` and ``tp_comm_overlap_cfg``."""
    if config_path is not None and not enabled:
        yield f"tp_comm_overlap_cfg={config_path!r} needs tp_comm_overlap=True; set both"
    if enabled and not layout.sequence_parallel:
        yield (
            "tp_comm_overlap=True needs sequence_parallel=True, and with it tensor_model_parallel_size of 2 or more;"
            " set both"
        )


def tensor_overlap_device_faults(enabled: bool, device_type: str) -> Iterator[str]:
    """Yield a sentence if ``tp_comm_overlap`` is set and the device is not ``"cuda"``."""
    if enabled and device_type != "cuda":
        yield f"tp_comm_overlap=True needs CUDA and TransformerEngine, but this run is on {device_type!r}; leave it out"


def expert_faults(layout: ParallelLayout, device_type: str) -> Iterator[str]:
    """Yield ways of sharing experts that the device does not support."""
    if device_type == "cpu" and layout.expert_model_parallel_size > 1 and layout.expert_tensor_size > 1:
        yield (
            f"expert_tensor_parallel_size={layout.expert_tensor_size} with expert_model_parallel_size="
            f"{layout.expert_model_parallel_size} needs collectives of uneven sizes, which gloo does not have on the"
            " CPU; set expert_tensor_parallel_size=1"
        )


def fp8_device_faults(recipe: str, device_type: str) -> Iterator[str]:
    """Yield a sentence if the device, ``"cuda"`` or ``"cpu"``, does not have FP8."""
    if device_type != "cuda":
        kind = "FP4" if recipe == "nvfp4" else "FP8"
        yield (
            f"{kind} needs a CUDA device, and this run is on {device_type!r}; leave {kind.lower()}_recipe={recipe!r}"
            f' out, run with accelerator="gpu", or install lightning-mcore[te-cpu], which computes {kind} on the CPU'
        )


def trainer_faults(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments of ``Trainer`` that Lightning accepts but ``MCoreStrategy`` does not."""
    accelerator = trainer.get("accelerator", "auto")
    if accelerator not in _ACCELERATORS:
        yield f"trainer.accelerator={accelerator!r} is not available under MCoreStrategy; choose 'gpu' or 'cpu'"
    if trainer.get("sync_batchnorm"):
        yield NO_SYNC_BATCHNORM


def precision_faults(asked: str | None, plugin: str) -> Iterator[str]:
    """Yield a sentence if two precisions are given: Lightning would use the plugin's and ignore the trainer's."""
    # "32-true" is Trainer's default, and cannot be told apart from a given value.
    if asked not in (None, "32-true", plugin):
        yield (
            f"Trainer(precision={asked!r}) contradicts the precision_plugin of MCoreStrategy, which has {plugin!r}; set"
            " it in one place"
        )
