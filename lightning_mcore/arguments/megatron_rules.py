# SPDX-License-Identifier: Apache-2.0
"""The rules between fields of the argument classes, checked when the object is created.

``ParallelLayout`` checks sizes, ``FP8Settings`` FP8, and ``config/rules/strategy.py`` overlaps, as they do for
``MCoreStrategy`` and ``MCorePrecision``, so the messages are the same. This file has the other rules. Nothing is
corrected silently: a contradiction raises an error that names both sides.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.model import NOT_AVAILABLE
from lightning_mcore.config.rules.strategy import GRADIENT_SETTINGS, SHARDINGS, gradient_faults, schedule_faults
from lightning_mcore.config.text import unknown_name

# The modules of megatron-core 0.16.1 and 0.19.2; an older one raises for those that it lacks, when it builds the model.
_RECOMPUTED = (
    *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    "gdn_norm_out",
)
_NOT_YET = {
    "cuda_graph_impl": NOT_AVAILABLE["cuda_graph_impl"],
    "moe_enable_routing_replay": "nothing records and replays the routers' choices here",
    "save_merged_model": "adapters are saved apart; `lightning-mcore export --merge` merges them",
    "compile_warmup": "it warms up torch.compile for reinforcement learning, and nothing here is compiled",
}


def given_layout(arguments: Any) -> dict[str, Any]:
    """Return the arguments of ``ParallelLayout`` that are not None."""
    names = (field.name for field in dataclasses.fields(ParallelLayout))
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def interleaving_of(arguments: Any) -> int | None:
    """Return the virtual pipeline size, which a layout may imply.

    ``pipeline_model_parallel_layout="Et|t|t|tL"`` has four chunks; on two stages that makes two for each.
    """
    return ParallelLayout(**given_layout(arguments)).virtual_pipeline_model_parallel_size


def check_distribution(arguments: Any, extra: Mapping[str, Any]) -> None:
    """Raise ValueError for contradictions; ``extra`` are the rest of ``additional_configs``."""
    layout = ParallelLayout(**given_layout(arguments))
    raise_first(schedule_faults({"overlap_p2p_comm": arguments.overlap_p2p_comm}, {}, layout))
    if layout.pipeline_stages:
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
            if getattr(arguments, name):
                raise ValueError(
                    f"{name}=True contradicts pipeline_model_parallel_layout="
                    f"{arguments.pipeline_model_parallel_layout!r}, which says where every layer is; leave one out"
                )
    _check_recompute(arguments)
    _check_experts(arguments, extra)
    refuse_not_yet(arguments, "cuda_graph_impl", "moe_enable_routing_replay")
    if arguments.cuda_graph_scope != "full":
        raise ValueError(
            f"cuda_graph_scope={arguments.cuda_graph_scope!r} does nothing without cuda_graph_impl, which is not"
            " available yet; leave it out"
        )
    # For its errors alone.
    fp8_settings(arguments, extra)


def refuse_not_yet(arguments: Any, *names: str) -> None:
    """Raise ValueError if one of these fields, which are not supported yet, is set."""
    for name in names:
        if value := getattr(arguments, name):
            raise ValueError(f"{name}={value!r} is not available: {_NOT_YET[name]}; leave it out")


def fp8_settings(arguments: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the FP8 arguments of ``MCorePrecision`` that are set, with options of recipes from ``extra``."""
    own = {"fp8": arguments.fp8, "fp8_recipe": arguments.fp8_recipe, "fp8_param": arguments.fp8_param}
    given = {name: value for name, value in own.items() if value not in (None, False)}
    given |= {name: value for name, value in extra.items() if name in FP8Settings.__dataclass_fields__}
    if arguments.fp8_recipe == "mxfp8" and arguments.fp8_param:
        given["reuse_grad_buf_for_mxfp8_param_ag"] = True  # the only way to gather MXFP8 weights
    FP8Settings(**given)
    return given


def check_variable_lengths(arguments: Any, experts: bool, because: str) -> None:
    """Raise ValueError for rows of different lengths in a model with experts and the ``allgather`` dispatcher.

    ``because`` says in the error why the model is known to have experts.
    """
    if arguments.variable_seq_lengths and experts and arguments.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "variable_seq_lengths=True contradicts moe_token_dispatcher_type='allgather' in a model with experts"
            f" ({because}); set moe_token_dispatcher_type='alltoall', or variable_seq_lengths=False"
        )


def _check_experts(arguments: Any, extra: Mapping[str, Any]) -> None:
    # The model is not known yet, so look for other signs; mapping.py looks again when it has the model's folder.
    ep, experts = arguments.expert_model_parallel_size or 1, extra.get("num_moe_experts")
    because = f"expert_model_parallel_size={ep}" if ep > 1 else f"num_moe_experts={experts}"
    check_variable_lengths(arguments, ep > 1 or bool(experts), because)
    if arguments.moe_shared_expert_overlap and arguments.moe_token_dispatcher_type not in (None, "alltoall"):
        raise ValueError(
            "moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', but it is"
            f" {arguments.moe_token_dispatcher_type!r}; set one of them"
        )
    if arguments.moe_pad_expert_input_to_capacity and arguments.moe_expert_capacity_factor is None:
        raise ValueError("moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor; set it, such as 1.0")
    if arguments.mtp_num_layers is not None and arguments.mtp_num_layers < 0:
        raise ValueError(f"mtp_num_layers={arguments.mtp_num_layers} is too small; choose 0 or more")


def _check_recompute(arguments: Any) -> None:
    kind, method = arguments.recompute_granularity, arguments.recompute_method
    layers, modules = arguments.recompute_num_layers, arguments.recompute_modules
    if arguments.moe_layer_recompute and kind == "full":
        raise ValueError(
            "moe_layer_recompute=True contradicts recompute_granularity='full', which recomputes whole layers;"
            " leave one of them out"
        )
    if kind != "full":
        for name, value in (("recompute_method", method), ("recompute_num_layers", layers)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} contradicts recompute_granularity={kind!r}, because it counts whole layers; set"
                    " recompute_granularity='full', or leave it out"
                )
    # moe_layer_recompute adds to the modules, so it counts as selective.
    if modules is not None and kind != "selective" and not arguments.moe_layer_recompute:
        raise ValueError(
            f"recompute_modules={modules!r} contradicts recompute_granularity={kind!r}; set"
            " recompute_granularity='selective', or leave it out"
        )
    for name in modules or ():
        if name not in _RECOMPUTED:
            raise ValueError(f"recompute_modules={modules!r}: {unknown_name('module', name, _RECOMPUTED)}")
    if kind == "full" and (method is None) != (layers is None):
        missing = "recompute_method='uniform' or 'block'" if method is None else "recompute_num_layers"
        given = f"recompute_num_layers={layers}" if method is None else f"recompute_method={method!r}"
        raise ValueError(f"{given} lacks {missing}; give both, or neither for 'uniform' and 1")
    if layers is not None and layers < 1:
        raise ValueError(f"recompute_num_layers={layers} is too small; choose 1 or more")


def check_megatron(arguments: Any) -> None:
    """Raise ValueError for contradictions in ``MegatronArguments``."""
    raise_first(gradient_faults({name: getattr(arguments, name) for name in GRADIENT_SETTINGS}, {}))
    _check_fsdp(arguments)
    if arguments.ckpt_format == "legacy":
        raise ValueError(
            "ckpt_format='legacy' loads only on the layout that saved it, and is no longer written; choose"
            " 'torch_dist', which every layout can load"
        )
    if arguments.ddp_bucket_size is not None and not arguments.overlap_grad_reduce:
        raise ValueError(
            f"ddp_bucket_size={arguments.ddp_bucket_size} does nothing without overlap_grad_reduce=True, because "
            "otherwise all gradients share one bucket; set both"
        )
    if arguments.ddp_average_in_collective and arguments.calculate_per_token_loss in (None, True):
        raise ValueError(
            "ddp_average_in_collective=True averages over ranks, and calculate_per_token_loss=True, the default, weighs"
            " by tokens; set calculate_per_token_loss=False, or leave ddp_average_in_collective out"
        )
    refuse_not_yet(arguments, "save_merged_model", "compile_warmup")
    mem_efficient = "distrib_optim_fully_reshardable_mem_efficient"
    if getattr(arguments, mem_efficient) and not arguments.distrib_optim_fully_reshardable:
        raise ValueError(f"{mem_efficient}=True needs distrib_optim_fully_reshardable=True; set both")
    _check_offload(arguments)


def _check_fsdp(arguments: Any) -> None:
    sharding = arguments.data_parallel_sharding_strategy
    if not arguments.use_megatron_fsdp:
        if sharding != "no_shard":
            raise ValueError(f"data_parallel_sharding_strategy={sharding!r} needs use_megatron_fsdp=True; set both")
    elif sharding not in SHARDINGS:
        raise ValueError(
            f"use_megatron_fsdp=True with data_parallel_sharding_strategy={sharding!r} is not available; choose"
            " 'optim_grads_params' or 'optim_grads', or set use_distributed_optimizer=True instead"
        )
    elif (arguments.pipeline_model_parallel_size or 1) > 1:
        layout = ParallelLayout(pipeline_model_parallel_size=arguments.pipeline_model_parallel_size)
        raise_first(schedule_faults({"data_parallel_sharding": sharding}, {}, layout))


def _check_offload(arguments: Any) -> None:
    fraction = arguments.optimizer_offload_fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"optimizer_offload_fraction={fraction} is not a fraction; choose 0 to 1")
    if not arguments.optimizer_cpu_offload:
        # 1.0 is the default, and 0.0 is mcore_adapter's default: both may stand in a file without offload.
        if 0 < fraction < 1:
            raise ValueError(
                f"optimizer_offload_fraction={fraction} does nothing without optimizer_cpu_offload=True; set both"
            )
        return
    if fraction == 0:
        raise ValueError(
            "optimizer_offload_fraction=0.0 contradicts optimizer_cpu_offload=True, because it would offload nothing;"
            " choose a number above 0, at most 1"
        )
    if not arguments.use_distributed_optimizer:
        raise ValueError(
            "optimizer_cpu_offload=True needs use_distributed_optimizer=True, whose code Megatron's offload uses; "
            "set both"
        )
    if arguments.optimizer != "adam":
        raise ValueError(
            f"optimizer_cpu_offload=True needs optimizer='adam', but it is {arguments.optimizer!r}; set one of them"
        )
