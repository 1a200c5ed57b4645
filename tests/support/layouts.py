# SPDX-License-Identifier: Apache-2.0
"""The one table of parallel layouts that tests run, as data.

A row says how many ranks there are and how the model is cut; it knows nothing of torch, devices or Lightning, so that
CPU and GPU tests, Megatron loops and the strategy read the same table. Its id names what differs from one rank:
``tp2-sp-pp2-vp2-do`` is tensor 2 with sequence parallelism, pipeline 2, interleaved 2, distributed optimizer.

Every row fits the tiny model of ``tests/support/tiny.py`` (4 layers, 8 heads, 4 query groups, 4 experts, sequences of
32) and a global batch of 4 sequences.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread the tiny model over ranks.

    Args:
        dp: Data-parallel size: full copies of the model that read different sequences.
        tp: ``tensor_model_parallel_size``.
        pp: ``pipeline_model_parallel_size``.
        vp: ``virtual_pipeline_model_parallel_size``, chunks for each rank.
        group: ``microbatch_group_size_per_vp_stage``; ``None`` follows ``pp`` as in Megatron.
        cp: ``context_parallel_size``.
        ep: ``expert_model_parallel_size``; more than 1 makes the model a mixture of experts.
        etp: ``expert_tensor_parallel_size``; ``None`` follows ``tp`` as in Megatron.
        sp: ``sequence_parallel``.
        moe: Whether the model is a mixture of experts.
        tied: Whether the output layer shares the embedding's weight.
        distributed_optimizer: Whether optimizer states are sharded over data-parallel ranks.
        layer_wise: Whether they are sharded by whole parameters instead.
        sharding: ``data_parallel_sharding``, of Megatron's FSDP.
        overlap: Whether gradient reduction, and parameter gathering if sharded, overlap with computation.
        split: ``pipeline_model_parallel_layout`` in Megatron's text form, for an uneven pipeline.
        first: ``num_layers_in_first_pipeline_stage``, for an uneven pipeline.
        last: ``num_layers_in_last_pipeline_stage``, for an uneven pipeline.
        label: What the id says about ``split``.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    group: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    moe: bool = False
    tied: bool = False
    distributed_optimizer: bool = False
    layer_wise: bool = False
    sharding: str | None = None
    overlap: bool = False
    split: str | None = None
    first: int | None = None
    last: int | None = None
    label: str = field(default="split", compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def one_rank(self) -> "Layout":
        """The same model on one rank: what every layout is compared with."""
        return Layout(moe=self.moe, tied=self.tied)

    @property
    def id(self) -> str:
        """A short name, unique in the table."""
        parts = ["moe"] if self.moe else []
        parts += ["tied"] if self.tied else []
        for name in ("dp", "tp", "sp", "pp", "vp", "group", "cp", "ep", "etp"):
            size = getattr(self, name)
            if size is True:
                parts.append(name)
            elif (name == "etp" and size is not None) or size not in (None, False, 1):
                parts.append(f"{name}{size}")
        parts += [self.label] if self.split else []
        parts += [f"first{self.first}"] if self.first else []
        parts += [f"last{self.last}"] if self.last else []
        parts += ["do"] if self.distributed_optimizer else []
        parts += ["lw"] if self.layer_wise else []
        parts += [self.sharding] if self.sharding else []
        parts += ["overlap"] if self.overlap else []
        return "-".join(parts) or "one"

    @property
    def strategy_arguments(self) -> dict[str, Any]:
        """The layout in the spelling of ``MCoreStrategy``."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp,
            "microbatch_group_size_per_vp_stage": self.group,
            "pipeline_model_parallel_layout": self.split,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
            **self._gradient_arguments,
        }

    @property
    def _gradient_arguments(self) -> dict[str, Any]:
        if self.sharding:
            return {"data_parallel_sharding": self.sharding}
        return {
            "use_distributed_optimizer": self.distributed_optimizer,
            "use_layer_wise_distributed_optimizer": self.layer_wise,
            "overlap_grad_reduce": self.overlap,
            "overlap_param_gather": self.overlap and self.distributed_optimizer,
        }


ONE_RANK: tuple[Layout, ...] = (Layout(), Layout(tied=True), Layout(moe=True))

LAYOUTS: tuple[Layout, ...] = (
    # one axis
    Layout(dp=2),
    Layout(dp=4),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4, sp=True),
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=2, vp=2),
    Layout(pp=2, vp=2, group=4),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp=2, distributed_optimizer=True),
    Layout(dp=2, distributed_optimizer=True, overlap=True),
    Layout(dp=2, overlap=True),
    Layout(dp=2, sharding="optim_grads_params"),
    Layout(dp=4, sharding="optim_grads_params"),
    Layout(dp=2, sharding="optim_grads"),
    Layout(moe=True, dp=2),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, dp=4, ep=4),
    # two
    Layout(dp=2, tp=2, sp=True),
    Layout(dp=2, pp=2, distributed_optimizer=True),
    Layout(dp=2, cp=2, distributed_optimizer=True),
    Layout(dp=2, tp=2, sp=True, sharding="optim_grads_params"),
    Layout(dp=2, cp=2, sharding="optim_grads_params"),
    Layout(moe=True, dp=4, ep=2, sharding="optim_grads_params"),
    Layout(tied=True, dp=2, sharding="optim_grads_params"),
    Layout(tp=2, pp=2, sp=True),
    Layout(tp=2, pp=2, vp=2),
    Layout(tp=2, cp=2, sp=True),
    Layout(pp=2, cp=2),
    Layout(dp=4, tp=2, sp=True, distributed_optimizer=True, overlap=True),
    Layout(moe=True, dp=4, ep=2, distributed_optimizer=True),
    Layout(moe=True, tp=2, sp=True),
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1),
    Layout(moe=True, cp=2, ep=2),
    Layout(moe=True, dp=2, pp=2, ep=2),
    Layout(tied=True, pp=2),
    Layout(tied=True, dp=2, pp=2, distributed_optimizer=True),
    Layout(tied=True, tp=2, pp=2, sp=True),
    # uneven pipelines
    Layout(pp=2, first=1),
    Layout(pp=2, last=1),
    Layout(pp=2, split="Et*3|t,L", label="split3and1"),
    Layout(pp=2, vp=2, split="Et|t*2|t|L", label="splitvp"),
    # three and more
    Layout(dp=2, tp=2, pp=2, sp=True, distributed_optimizer=True),
    Layout(dp=2, tp=2, pp=2, vp=2, sp=True, distributed_optimizer=True, overlap=True),
    Layout(tp=2, pp=2, cp=2, sp=True),
    Layout(dp=2, tp=2, cp=2, sp=True, distributed_optimizer=True),
    Layout(moe=True, dp=2, tp=2, pp=2, ep=2, etp=1, sp=True, distributed_optimizer=True),
    Layout(moe=True, dp=2, pp=2, vp=2, cp=2, ep=2),
)
