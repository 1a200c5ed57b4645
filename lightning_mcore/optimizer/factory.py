# SPDX-License-Identifier: Apache-2.0
"""Build the optimizers of ``megatron.py``: rebuild the user's optimizer as Megatron's, or wrap it.

The strategy calls :func:`make_optimizer` in ``setup`` for each optimizer that ``configure_optimizers`` returned.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.types import LRSchedulerConfig
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from torch.optim import Optimizer

from lightning_mcore.config.rules import raise_first
from lightning_mcore.optimizer.layer_wise import LayerWiseShares
from lightning_mcore.optimizer.loss_scale import LossScaler
from lightning_mcore.optimizer.megatron import (
    MCoreOptimizer,
    RebuiltOptimizer,
    WrappedOptimizer,
    optimizer_class,
)
from lightning_mcore.optimizer.muon import MuonWithAdamW, Placement, place_matrices
from lightning_mcore.optimizer.parts import GROUP_INDEX, follow_user_groups, optimizer_parts
from lightning_mcore.optimizer.rules import check_kind, megatron_fields, optimizer_option_faults, several_optimizers
from lightning_mcore.parallel.chunks import WrappedChunk, shards_shown
from lightning_mcore.parallel.groups import process_group


@dataclass(frozen=True)
class OptimizerSetting:
    """How Megatron runs the optimizer."""

    inline: bool  # Lightning's own loop runs backward (plain modules), not Megatron's schedule
    precision: Mapping[str, Any]  # fields of Megatron's OptimizerConfig that the precision owns
    distributed: bool
    layer_wise: bool
    overlap_param_gather: bool
    tensor_parallel_size: int  # ranks that share each matrix, including expert matrices
    expert_model_parallel_size: int
    pipeline_model_parallel_size: int = 1
    config: OptimizerConfig | None = None
    scaler: LossScaler | None = None

    @property
    def low_precision(self) -> bool:
        """Whether the optimizer works on fp32 copies of the parameters."""
        return bool(self.precision["params_dtype"] != torch.float32)


def configure_optimizers(
    module: pl.LightningModule, needs_one: str | None
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return what the module's ``configure_optimizers`` returns; ``needs_one`` is what allows only one."""
    try:
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    except RuntimeError as error:  # Lightning's, which recommends manual optimization
        if needs_one is not None and "multiple optimizers" in str(error):
            raise several_optimizers(needs_one) from error
        raise
    except ValueError as error:
        if "empty parameter list" in str(error):
            raise ValueError(
                f"{error} in configure_optimizers; give it all parameters of the stage, including frozen ones, "
                "because some stages may train none"
            ) from error
        raise
    if needs_one is not None and len(optimizers) > 1:
        raise several_optimizers(needs_one)
    return optimizers, schedulers


Groups: TypeAlias = tuple[list[int], dict[str, float] | None]
"""A rank's number of parameter groups in each optimizer, and the hyperparameters of a tied embedding."""


def describe_groups(optimizers: Sequence[Optimizer]) -> Groups:
    """Return what :func:`check_groups` compares; hyperparameters are None unless two stages hold a tied embedding."""
    tied: dict[str, float] | None = None
    for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        if any(getattr(parameter, "shared_embedding", False) for parameter in group["params"]):
            tied = {name: float(group[name]) for name in ("lr", "weight_decay") if name in group}
    return [len(optimizer.param_groups) for optimizer in optimizers], tied


def check_groups(of_ranks: Sequence[Groups]) -> None:
    """Raise ``ValueError`` if ranks have different parameter groups; given :func:`describe_groups` of each rank.

    Megatron and checkpoints find a group by its number. A tied embedding has copies on the first and the last stage,
    which get the same gradient and must take the same step.
    """
    first: tuple[int, dict[str, float]] | None = None
    for rank, (numbers, tied) in enumerate(of_ranks):
        if numbers != of_ranks[0][0]:
            raise ValueError(
                f"configure_optimizers returns {of_ranks[0][0]} parameter groups on rank 0, but {numbers} on rank"
                f" {rank}; return the same groups on every rank, with 'params': [] where a stage has no parameters of a"
                " group"
            )
        if tied is None:
            continue
        first = first or (rank, tied)
        if tied != first[1]:
            raise ValueError(
                f"the embedding and the output layer share their weight, but its parameter group has {_named(first[1])}"
                f" on rank {first[0]} and {_named(tied)} on rank {rank}, so its two copies would drift apart; put both"
                " into the same group: on the last stage, the weight is called output_layer.weight"
            )


def _named(values: Mapping[str, float]) -> str:
    """Return ``lr=0.1, weight_decay=0.0``."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def make_optimizer(user: Optimizer, chunks: Sequence[WrappedChunk], setting: OptimizerSetting) -> MCoreOptimizer:
    """Put Megatron's step behind a torch optimizer, and return it, in the user's class; collective."""
    check_kind(
        user,
        inline=setting.inline,
        distributed=setting.distributed,
        layer_wise=setting.layer_wise,
        tensor_parallel_size=setting.tensor_parallel_size,
        expert_model_parallel_size=setting.expert_model_parallel_size,
        pipeline_model_parallel_size=setting.pipeline_model_parallel_size,
        may_skip_steps=setting.scaler is not None,
    )
    # Without sharding, a plain module's Adam or SGD keeps its own step, as under "ddp".
    keeps_its_step = setting.inline or setting.layer_wise
    rebuilt = setting.distributed or (megatron_fields(user) is not None and not keeps_its_step)
    if setting.config is not None:
        fields = (megatron_fields(user) if rebuilt else None) or {}
        raise_first(optimizer_option_faults(vars(setting.config), fields, type(user).__name__))
    parameters = list(itertools.chain.from_iterable(group["params"] for group in user.param_groups))
    if not setting.distributed and not setting.low_precision:
        _check_dtypes(parameters)
    if isinstance(user, MuonWithAdamW) and not setting.inline:
        place_matrices(user, chunks)
    shares = LayerWiseShares(user) if setting.layer_wise else None  # before Megatron copies the parameters
    megatron = _rebuild(user, chunks, setting) if rebuilt else _wrap(user, setting)
    scaler = setting.scaler.attach(megatron) if setting.scaler is not None else None
    kind = RebuiltOptimizer if rebuilt else WrappedOptimizer
    combined = optimizer_class(kind, type(user))  # type: ignore[arg-type]  # a class can be hashed
    return combined(user, megatron, parameters, chunks, setting.inline, scaler, shares)


def _check_dtypes(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise ``ValueError`` for a parameter whose ``grad`` cannot be its gradient buffer, which has another dtype."""
    differ = [p for p in parameters if hasattr(p, "main_grad") and p.main_grad.dtype != p.dtype]
    if differ:
        first, summed = differ[0], differ[0].main_grad.dtype
        raise ValueError(
            f"{len(differ)} parameters are trained in {first.dtype}, the first of shape {list(first.shape)}, but their"
            f" gradients are summed in {summed}, which their optimizer cannot step with; convert them to {summed}, use"
            " Trainer(precision=...) of their dtype, or set MCoreStrategy(use_distributed_optimizer=True)"
        )


def _config(fields: dict[str, Any], setting: OptimizerSetting) -> OptimizerConfig:
    return dataclasses.replace(
        setting.config or OptimizerConfig(),
        use_distributed_optimizer=setting.distributed,
        overlap_param_gather=setting.overlap_param_gather,
        # The Trainer clips; MCoreOptimizer sets the value at each step.
        clip_grad=0.0,
        **setting.precision,
        **fields,
    )


def _rebuild(user: Optimizer, chunks: Sequence[WrappedChunk], setting: OptimizerSetting) -> MegatronOptimizer:
    fields = megatron_fields(user)
    assert fields is not None
    _check_every_parameter_is_grouped(user, chunks)
    own = ("betas", "eps") if fields["optimizer"] == "adam" else ("momentum",)
    hyperparameters = ("lr", "weight_decay", *own)
    overrides = {}
    for index, group in enumerate(user.param_groups, start=1):
        # Megatron may split a user's group (dense, expert); GROUP_INDEX, from 1 on, leads back to the user's.
        values = {name: group[name] for name in hyperparameters}
        overrides[_group_key(index, group["params"])] = {GROUP_INDEX: index, **values, "lr": float(group["lr"])}
    with shards_shown(chunks):
        megatron = get_megatron_optimizer(
            _config(fields, setting), list(chunks), config_overrides=overrides, use_gloo_process_groups=False
        )
    if chunks[0].ddp_config.use_megatron_fsdp:
        megatron = ChainedOptimizer([megatron])  # a single one measures the norm only to clip
    for part in optimizer_parts(megatron):
        _order_parameters(part)
        if getattr(part, "init_state_fn", _no_initial_state) is None:  # SGD's; Megatron calls it when it loads
            part.init_state_fn = _no_initial_state
    follow_user_groups(megatron, user.param_groups)
    return megatron


def _order_parameters(part: MegatronOptimizer) -> None:
    """Correct the sharded optimizer's positions of parameters, for groups that mix fp32 and other parameters.

    Checkpoints find a parameter's state by them. Source: ``_build_optimizer_group_ranges`` and
    ``_build_model_and_main_param_groups`` of ``DistributedOptimizer`` (megatron.core.optimizer.distrib_optimizer,
    0.16.1 and 0.19.2).
    """
    # Megatron counts weight (bf16), router (fp32), bias (bf16) as 0, 1, 2 and puts fp32 first: here they get 1, 0, 2.
    if isinstance(part, DistributedOptimizer) and not (part.is_stub_optimizer or part.ddp_config.use_megatron_fsdp):
        for index, groups in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for position, parameter in enumerate(itertools.chain(*groups)):
                part.model_param_group_index_map[parameter] = (index, position)


def _group_key(index: int, parameters: Sequence[torch.nn.Parameter]) -> ParamKey:
    """Return the key by which Megatron finds the parameters of a user's group."""
    members = {id(parameter) for parameter in parameters}

    def is_member(parameter: torch.nn.Parameter, name: str) -> bool:
        return id(getattr(parameter, "orig_param", parameter)) in members  # a shard has the parameter there

    return ParamKey(with_name_predicate=ParamWithNamePredicate(f"group_{index}", is_member))


def _check_every_parameter_is_grouped(user: Optimizer, chunks: Sequence[WrappedChunk]) -> None:
    grouped: set[int] = set()
    for group in user.param_groups:
        grouped.update(map(id, group["params"]))
    missing: list[str] = []
    for chunk in chunks:
        named = chunk.module.named_parameters()
        missing += [name for name, parameter in named if parameter.requires_grad and id(parameter) not in grouped]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters need gradients but are in no group of the optimizer, the first is "
            f"{missing[0]!r}; add them in configure_optimizers or freeze them with requires_grad_(False)"
        )


def _wrap(user: Optimizer, setting: OptimizerSetting) -> MegatronOptimizer:
    # Megatron never steps with this: it only names an optimizer that its config knows.
    config = _config({"optimizer": "sgd", "lr": 0.0}, setting)
    if not setting.inline:
        for index, group in enumerate(user.param_groups, start=1):
            group |= {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, GROUP_INDEX: index}
    if setting.low_precision:
        scaler = setting.scaler.megatron if setting.scaler is not None else None
        megatron: MegatronOptimizer = Float16OptimizerWithFloat16Params(user, config, scaler, _no_initial_state)
        if isinstance(user, MuonWithAdamW):
            for models, copies in zip(megatron.float16_groups, megatron.fp32_from_float16_groups, strict=True):
                for model, copy in zip(models, copies, strict=True):
                    # The copies have replaced the model's parameters in the groups that Muon steps.
                    user.placements[copy] = user.placements.pop(model, Placement())
    else:
        megatron = FP32Optimizer(user, config, _no_initial_state)
    # Norms and counts of zeros are summed over one model copy, which layer-wise shares spread over the world;
    # tensor-parallel duplicates count once.
    megatron.grad_stats_parallel_group = None if setting.layer_wise else process_group("model")
    megatron.tp_group = process_group("tp")
    return megatron


def _no_initial_state(optimizer: Optimizer, config: OptimizerConfig | None = None) -> None:
    """Do nothing: the user's optimizer creates its state at its first step."""
