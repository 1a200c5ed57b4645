# SPDX-License-Identifier: Apache-2.0
"""The groups of a plan are those of ``parallel_state``, and its schedule is the one that Megatron runs."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups
from lightning_mcore.planning.grid import GROUPS, RankGrid
from lightning_mcore.planning.schedule import PipelineTimeline
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but


def cut(
    tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, vp: int | None = None
) -> ParallelLayout:
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=tp > 1,
    )


LAYOUTS: dict[int, list[ParallelLayout]] = {
    2: [cut(), cut(tp=2), cut(pp=2), cut(cp=2), cut(ep=2), cut(pp=2, vp=2), cut(tp=2, ep=2, etp=1)],
    4: [
        cut(),
        cut(tp=4),
        cut(tp=2, pp=2),
        cut(tp=2, cp=2),
        cut(pp=2, cp=2, vp=2),
        cut(ep=2),
        cut(ep=4),
        cut(tp=2, ep=2),
        cut(tp=2, ep=4, etp=1),
        cut(cp=2, ep=4),
        cut(pp=2, ep=2),
        cut(tp=2, etp=1),
    ],
    8: [
        cut(),
        cut(tp=2),
        cut(tp=2, pp=2),
        cut(tp=2, pp=2, cp=2),
        cut(pp=4, vp=2),
        cut(pp=8),
        cut(cp=4),
        cut(cp=2, pp=2, ep=2),
        cut(ep=8),
        cut(tp=2, ep=4),
        cut(tp=2, ep=8, etp=1),
        cut(tp=2, ep=2, etp=1),
        cut(tp=4, cp=2, ep=4, etp=2),
        cut(tp=2, pp=2, ep=4, etp=1),
        cut(tp=2, pp=2, cp=2, ep=2, etp=2),
        cut(tp=2, pp=2, ep=2, vp=2),
        cut(tp=1, pp=2, ep=2, etp=2),
    ],
}

LIVE = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
    "tp_dp": lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=False),
    "tp_dp_cp": lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    "tp_pp": parallel_state.get_model_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "edp": parallel_state.get_expert_data_parallel_group,
    "etp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "etp_ep_pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
}


def live_groups(layouts: list[ParallelLayout]) -> list[tuple[dict[str, list[int]], int, int]]:
    """Open each layout in turn; return this rank's groups, dp and edp as Megatron has them."""
    found = []
    with cpu_runtime():
        for layout in layouts:
            open_process_groups(layout, 1, timedelta(minutes=2))
            groups = {name: dist.get_process_group_ranks(live()) for name, live in LIVE.items()}
            dp = parallel_state.get_data_parallel_world_size(with_context_parallel=False)
            found.append((groups, dp, parallel_state.get_expert_data_parallel_world_size()))
        close_process_groups()
    return found


def test_at_least_thirty_layouts_are_compared() -> None:
    assert sum(map(len, LAYOUTS.values())) >= 30
    assert set(LIVE) == set(GROUPS)


@pytest.mark.parametrize("world_size", thorough_but(LAYOUTS, 2, 4))
def test_groups_dp_and_edp_are_those_of_parallel_state(world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    of_ranks = run_ranks(world_size, live_groups, layouts, timeout=300)
    for rank, of_layouts in enumerate(of_ranks):
        for layout, (groups, dp, edp) in zip(layouts, of_layouts, strict=True):
            grid = RankGrid(layout, world_size)
            assert {name: grid.ranks(name, rank) for name in GROUPS} == groups, (layout, rank)
            assert {name: grid.size(name) for name in GROUPS} == {name: len(group) for name, group in groups.items()}
            assert (grid.sizes["dp"], grid.sizes["edp"]) == (dp, edp)


class Recorder(torch.nn.Module):
    """A chunk that writes down its passes."""

    def __init__(self, config: TransformerConfig, chunk: int, calls: list[tuple[bool, int, int]]) -> None:
        super().__init__()
        self.config, self.chunk, self.calls = config, chunk, calls
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.input: Any = None
        self.forwards = self.backwards = 0

    def set_input_tensor(self, tensors: Any) -> None:
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self) -> torch.Tensor:
        given = self.input if self.input is not None else torch.ones(4, 1, 8)
        self.calls.append((True, self.forwards, self.chunk))
        self.forwards += 1
        out = given * self.weight
        out.register_hook(self._backward)
        return out

    def _backward(self, gradient: torch.Tensor) -> None:
        self.calls.append((False, self.backwards, self.chunk))
        self.backwards += 1


def record_schedule(pp: int, vp: int | None, num_microbatches: int, group: int | None) -> list[tuple[bool, int, int]]:
    calls: list[tuple[bool, int, int]] = []
    layout = cut(pp=pp, vp=vp)
    with cpu_runtime():
        open_process_groups(layout, 1, timedelta(minutes=2))
        config = TransformerConfig(
            num_layers=pp * (vp or 1),
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=vp is not None,
            batch_p2p_comm=vp is None,
            microbatch_group_size_per_vp_stage=group,
        )
        chunks = [Recorder(config, chunk, calls) for chunk in range(vp or 1)]

        def forward_step(iterator: Any, chunk: Any) -> Any:
            return chunk(), lambda output: (output.sum(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * len(chunks) if vp is not None else None,
            model=chunks if vp is not None else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=4,
            micro_batch_size=1,
        )
        close_process_groups()
    return calls


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("pp", "vp", "num_microbatches", "group"),
    [(2, None, 3, None), (4, None, 6, None), (4, None, 2, None), (2, 2, 4, None), (4, 2, 8, None), (2, 3, 6, 3)],
)
def test_the_order_of_passes_is_megatrons(pp: int, vp: int | None, num_microbatches: int, group: int | None) -> None:
    of_ranks = run_ranks(pp, record_schedule, pp, vp, num_microbatches, group, timeout=180)
    for stage, calls in enumerate(of_ranks):
        expected = PipelineTimeline(pp, vp or 1, num_microbatches, group).order(stage)
        assert [(action.forward, action.microbatch, action.chunk) for action in expected] == calls, stage
