# SPDX-License-Identifier: Apache-2.0
"""A rehearsal's parameters and collectives are those of real ranks over gloo, which another counter counts."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mcore.parallel.groups import process_group
from lightning_mcore.rehearsal.processes import Played, run_jobs
from tests.support import toy
from tests.support.ranks import run_ranks
from tests.support.rehearsed import gpt_run, job

pytestmark = pytest.mark.distributed

KINDS = {
    torch.ops.c10d._allgather_base_.default: "all-gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce-scatter",
    torch.ops.c10d.allgather_into_tensor_coalesced_.default: "all-gather",
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default: "reduce-scatter",
    torch.ops.c10d.alltoall_base_.default: "all-to-all",
    torch.ops.c10d.send.default: "send",
    torch.ops.c10d.recv_.default: "receive",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sp-dp2-do": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True},
    "pp2-cp2": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
}
Found = dict[tuple[str, str], tuple[int, int]]


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of the collectives in ``KINDS``, by kind and axis."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in KINDS:
            boxed = next(item for item in args if isinstance(item, torch.ScriptObject) and "Group" in str(item))
            group = dist.ProcessGroup.unbox(boxed)
            [axis] = [axis for axis in ("tp", "cp", "pp", "dp_cp") if process_group(axis) is group] or ["?"]  # type: ignore[arg-type]
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
        if trainer.global_step == 2:
            self.mode.__exit__(None, None, None)


def real(layout: str) -> tuple[int, Found]:
    """Train two steps on this gloo rank; return its number of parameters, and the collectives of the second."""
    seen = SecondStep()

    def cpu_trainer(world: int, strategy: Any, **arguments: Any) -> pl.Trainer:
        return toy.make_trainer(strategy, max_steps=2, limit_val_batches=0, callbacks=[seen], **arguments)

    trainer, module, (loader, _) = gpt_run(4, "32-true", trainer=cpu_trainer, **LAYOUTS[layout])
    trainer.fit(module, loader)
    return sum(parameter.numel() for parameter in module.parameters()), seen.mode.found


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Played]:
    jobs = [job(partial(gpt_run, 4, "32-true", **layout)) for layout in LAYOUTS.values()]
    found = run_jobs(jobs, lambda rank, what: None)
    assert all(isinstance(each, Played) for each in found), found
    return dict(zip(LAYOUTS, found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_and_collectives_are_those_of_real_ranks(rehearsed: dict[str, Played], layout: str) -> None:
    ranks = run_ranks(4, real, layout, timeout=120)
    for report in rehearsed[layout].ranks:
        parameters, collectives = ranks[report.rank]
        assert report.parameters == parameters
        found = {(item.kind, item.group): (item.calls, item.bytes) for item in report.traffic}
        assert {key: value for key, value in found.items() if key[0] in KINDS.values()} == collectives
