# SPDX-License-Identifier: Apache-2.0
"""A rehearsal's parameters and collectives are those of real ranks over gloo, which another counter counts."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.parallel.groups import Axis, process_group
from lightning_mcore.planning.communication import communication_volume
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.rehearsal.processes import Failure, Played
from tests.distributed.test_plan_memory import RUNS as PLANNED
from tests.support import toy
from tests.support.ranks import run_ranks
from tests.support.rehearsed import EXPERTS, GATED, LENGTH, RECOMPUTE, gpt_run, job, live_run, play, selected
from tests.support.thorough import thorough_but

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("test_rehearsed_collectives")]  # they share runs

AXES: tuple[Axis, ...] = get_args(Axis)
KINDS = {
    torch.ops.c10d._allgather_base_.default: "all-gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce-scatter",
    torch.ops.c10d.allgather_into_tensor_coalesced_.default: "all-gather",
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default: "reduce-scatter",
    torch.ops.c10d.alltoall_base_.default: "all-to-all",
    torch.ops.c10d.send.default: "send",
    torch.ops.c10d.recv_.default: "receive",
}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LORA: dict[str, Any] = {"model": {"lora": {"r": 4}}, "transformer": GATED}
DPO: dict[str, Any] = {"preference": {"loss": "sigmoid"}}
# Each token goes to all four experts, so that loads are even on real ranks too.
EVEN = {**EXPERTS, "moe_router_topk": 4}
run = partial(partial, gpt_run, 4, "32-true")
RUNS: dict[str, Callable[..., Any]] = {
    "tp2-sp-dp2-do": run(**TP2, use_distributed_optimizer=True),
    "tp2-sp-dp2-overlap": run(**TP2, **toy.OVERLAPPED),
    "tp2-sp-recompute": run(**TP2, transformer=RECOMPUTE),
    "pp2-cp2": run(pipeline_model_parallel_size=2, context_parallel_size=2),
    "experts-ep2-pp2-do": run(
        expert_model_parallel_size=2, pipeline_model_parallel_size=2, use_distributed_optimizer=True, transformer=EVEN
    ),
    "lora-tp2-sp-dp2-do": run(**TP2, use_distributed_optimizer=True, **LORA),
    "lora-tp2-pp2": run(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **LORA),
    "dpo-tp2-sp-pp2": run(**TP2, pipeline_model_parallel_size=2, model=DPO, transformer=GATED),
    "dpo-lora-tp2-sp-dp2": run(**TP2, **{**LORA, "model": {**LORA["model"], **DPO}}),
    "images-tp2-sp": partial(live_run, PLANNED["images-qwen3-tp2-sp-bf16"]),
    "images-pp2": partial(live_run, PLANNED["images-qwen3-pp2"]),
}
for groups in (1, 2, 4):  # whose B and C 4 ranks gather, but for 4 groups
    mamba = {"mamba_num_groups": groups, "mamba_state_dim": 48 // groups, "mamba_num_heads": 8, "mamba_head_dim": 4}
    settings = {"layer_pattern": "[M-][*-]" * 2, "mamba": {**mamba, "mamba_conv_kernel_dim": 3}}
    RUNS[f"mamba-{groups}-groups"] = run(**TP2, context_parallel_size=2, model={"architecture": settings})
SOON = (*("dpo-tp2-sp-pp2", "images-tp2-sp", "lora-tp2-sp-dp2-do", "mamba-1-groups", "pp2-cp2", "tp2-sp-dp2-overlap"),)
Found = dict[tuple[str, str], tuple[int, int]]


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of the collectives in ``KINDS``, by kind and axis."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        boxed = next((item for item in args if isinstance(item, torch.ScriptObject) and "Group" in str(item)), None)
        group = dist.ProcessGroup.unbox(boxed) if function in KINDS else None
        if group is not None and group.size() > 1:  # a group of one rank sends nothing
            axis = next((axis for axis in AXES if process_group(axis) is group), "?")
            sizes = [tensor.nbytes for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
            calls, size = self.found.get((KINDS[function], axis), (0, 0))
            self.found[KINDS[function], axis] = calls + 1, size + max(sizes)
        return function(*args, **(kwargs or {}))


class SecondStep(pl.Callback):
    """Counts from the first batch of the second step to the end of its last."""

    def __init__(self) -> None:
        self.mode = Collectives()
        self.open = False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and not self.open:
            self.mode.__enter__()
            self.open = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and self.open:
            self.open = False
            self.mode.__exit__(None, None, None)


def cpu_trainer(world: int, strategy: Any, **arguments: Any) -> pl.Trainer:
    """Return a Trainer for three steps on gloo ranks; the last one also gathers parameters for what comes after."""
    plugins = [LightningEnvironment(), *arguments.pop("plugins", ())]
    quiet = {"limit_val_batches": 0, "callbacks": [SecondStep()], "plugins": plugins}
    return toy.make_trainer(strategy, max_steps=3, **quiet, **arguments)


def real(name: str) -> tuple[int, Found]:
    """Train on this gloo rank; return its number of parameters, and the collectives of the second."""
    trainer, module, (loader, *_) = RUNS[name](trainer=cpu_trainer)
    trainer.fit(module, loader)
    [seen] = [callback for callback in trainer.callbacks if isinstance(callback, SecondStep)]  # type: ignore[attr-defined]
    return sum(parameter.numel() for parameter in module.parameters()), seen.mode.found


@functools.cache
def on_real_ranks(name: str, size: int) -> list[tuple[int, Found]]:
    return run_ranks(size, real, name, timeout=120)


@pytest.fixture(scope="module")
def rehearsed(request: pytest.FixtureRequest) -> dict[str, Played | Failure]:
    return play({name: job(RUNS[name]) for name in selected(request)})


@pytest.mark.parametrize("name", thorough_but(RUNS, *SOON))
def test_parameters_and_collectives_are_those_of_real_ranks(rehearsed: dict[str, Played | Failure], name: str) -> None:
    played = rehearsed[name]
    assert isinstance(played, Played), played.trace
    ranks = on_real_ranks(name, played.world.size)
    for report in played.ranks:
        parameters, collectives = ranks[report.rank]
        assert report.parameters == parameters
        found = {(item.kind, item.group): (item.calls, item.bytes) for item in report.traffic}
        assert {key: value for key, value in found.items() if key[0] in KINDS.values()} == collectives


@pytest.mark.parametrize("groups", thorough_but([1, 2], 1))
def test_what_groups_shared_by_ranks_send_is_planned(groups: int) -> None:
    """Beside a model of as many channels whose groups the ranks divide."""
    gathers, divides = (f"mamba-{number}-groups" for number in (groups, 4))
    counted, planned = (
        {axis: of(gathers)[axis] - of(divides)[axis] for axis in ("tp", "cp")} for of in (_counted, _planned)
    )
    assert counted == pytest.approx(planned)
    assert min(planned.values()) > 0


def _counted(name: str) -> dict[str, float]:
    """Return the bytes that rank 0 of two sends in all-gathers and reduce-scatters, half of each, by axis."""
    found = on_real_ranks(name, 4)[0][1]
    ends = ("all-gather", "reduce-scatter")
    return {axis: sum(found.get((kind, axis), (0, 0))[1] for kind in ends) / 2 for axis in ("tp", "cp")}


def _planned(name: str) -> dict[str, float]:
    _, module, _ = RUNS[name](trainer=cpu_trainer)
    layout = ParallelLayout(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    batch = GlobalBatch(2, 2, 1, 4, LENGTH)
    sizes = Sizes(GPTFields.of(module.hparams), layout, 4, batch, Formats.of({}, {}))
    volumes = communication_volume(sizes, 0)
    return {volume.axis: volume.sent for volume in volumes}
