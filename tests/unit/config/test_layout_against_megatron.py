# SPDX-License-Identifier: Apache-2.0
"""The layout accepts exactly what Megatron's own code accepts, and puts ranks where Megatron puts them.

Each test draws or enumerates many sizes and asks both. Where we are stricter on purpose, the test says so.
"""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from lightning_mcore.config.layout import Coordinates, ModelShape, ParallelLayout

# TransformerConfig warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"

RANK_OF_AXIS = {
    "tp": "tensor_model_parallel_rank",
    "cp": "context_parallel_rank",
    "dp": "data_parallel_rank",
    "pp": "pipeline_model_parallel_rank",
}
RANK_OF_EXPERT_AXIS = {
    "tp": "expert_tensor_parallel_rank",
    "ep": "expert_model_parallel_rank",
    "dp": "expert_data_parallel_rank",
    "pp": "pipeline_model_parallel_rank",
}


def accepts(sizes: dict[str, Any], shape: dict[str, Any] | None = None) -> bool:
    try:
        ParallelLayout(**sizes).validate_model(ModelShape(**shape or {}))
    except ValueError:
        return False
    return True


def assert_same_groups(
    generator: parallel_state.RankGenerator, places: list[Coordinates], axes: dict[str, str]
) -> None:
    for axis, field in axes.items():
        others = [name for name in axes.values() if name != field]
        for group in generator.get_ranks(axis):
            assert [getattr(places[rank], field) for rank in group] == list(range(len(group)))
            assert len({tuple(getattr(places[rank], name) for name in others) for rank in group}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8, 12, 16, 24, 32])
def test_ranks_stand_where_megatrons_rank_generator_puts_them(world_size: int) -> None:
    order, compared = "tp-cp-ep-dp-pp", 0
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 2, 4), (None, 1, 2)):
        layout = ParallelLayout(tp, pp, None, None, cp, ep, etp, sequence_parallel=tp > 1)
        expert_tp = etp or tp
        if world_size % (tp * pp * cp) or world_size % (expert_tp * ep * pp):
            with pytest.raises(ValueError, match="does not divide the number of ranks"):
                layout.validate_world(world_size)
            continue
        dp, edp = layout.data_parallel_size(world_size), layout.expert_data_parallel_size(world_size)
        dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = parallel_state.RankGenerator(tp=expert_tp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
        assert dense.world_size == expert.world_size == world_size
        places = [layout.coordinates(rank, world_size) for rank in range(world_size)]
        assert_same_groups(dense, places, RANK_OF_AXIS)
        assert_same_groups(expert, places, RANK_OF_EXPERT_AXIS)
        compared += 1
    assert compared


def test_coordinates_print_in_short_form() -> None:
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [str(layout.coordinates(rank, 8)) for rank in (0, 3, 7)] == [
        "tp0.pp0.cp0.dp0",
        "tp1.pp0.cp0.dp1",
        "tp1.pp1.cp0.dp1",
    ]


def megatron_cuts_layers(sizes: dict[str, Any], shape: dict[str, Any]) -> bool:
    """Whether Megatron's config takes the split and its stages then hold every layer exactly once."""
    try:
        config = TransformerConfig(**sizes, **shape, hidden_size=64, pipeline_dtype=torch.float32)
        counts = [
            get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
            for stage in range(sizes[VP] or 1)
            for rank in range(sizes[PP])
        ]
    except (ValueError, AssertionError):
        return False
    return min(counts) >= 0 and sum(counts) == shape["num_layers"]


def test_splits_of_layers_and_heads_are_accepted_exactly_where_megatron_accepts_them() -> None:
    draw, verdicts = random.Random(0), {True: 0, False: 0}
    for _ in range(4000):
        pp = draw.choice([1, 2, 3, 4])
        sizes = {PP: pp, VP: draw.choice([None, 2, 3]) if pp > 1 else None, TP: draw.choice([1, 2, 4])}
        shape = {"num_layers": draw.randint(1, 12), "num_attention_heads": draw.choice([2, 4, 8])}
        shape |= {"num_query_groups": draw.choice([n for n in (1, 2, 4, 8) if n <= shape["num_attention_heads"]])}
        way = draw.choice(["even", "ends", "flags", "all"])
        if way in ("ends", "all"):
            # Megatron takes two end stages on one rank where its negative remainders happen to cancel; we never do.
            shape |= {FIRST: draw.choice([None, 1, 2, 4, 6]), LAST: draw.choice([None, 1, 2, 3]) if pp > 1 else None}
        if way in ("flags", "all"):
            shape |= {EMBEDDING: draw.random() < 0.5, LOSS: draw.random() < 0.5}
        expected = megatron_cuts_layers(sizes, shape)
        assert accepts(sizes, shape) is expected, (sizes, shape)
        verdicts[expected] += 1
    assert min(verdicts.values()) > 500


def megatron_takes_pipeline_layout(text: str, pp: int, num_layers: int, mtp_num_layers: int) -> bool:
    try:
        PipelineParallelLayerLayout(text, pp).validate_layer_layout(num_layers, mtp_num_layers)
    except AssertionError:
        return False
    return True


def test_pipeline_layouts_are_accepted_exactly_where_megatron_accepts_them() -> None:
    draw, verdicts = random.Random(0), {True: 0, False: 0}
    middle = ["", "t", "t*2", "t", "(t)*3", "m", "tm", "t|t", "(t|)*2", "x"]
    for _ in range(6000):
        inner = [draw.choice(middle) for _ in range(draw.randint(0, 3))]
        text = "|".join(
            [draw.choice(["E", "E,t", "E,t*2", "E,t", "t"]), *inner, draw.choice(["L", "t,L", "m,L", "mmL", "t"])]
        )
        stages, pp = text.count("|") + 1, draw.choice([1, 2, 3, 4])
        pp = draw.choice([pp, stages])
        layers = draw.choice([2, 3, *[max(1, text.count("t"))] * 3])
        mtp = draw.choice([0, *[text.count("m")] * 3])
        # Megatron's parser would keep several stages on one rank as chunks that no schedule runs.
        expected = megatron_takes_pipeline_layout(text, pp, layers, mtp) and (pp > 1 or stages == 1)
        got = accepts({PP: pp, LAYOUT: text}, {"num_layers": layers, "mtp_num_layers": mtp})
        assert got is expected, (text, pp, layers, mtp)
        verdicts[expected] += 1
    assert min(verdicts.values()) > 300


def test_stages_are_read_as_megatron_reads_them() -> None:
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    for text in ("E,t*3|t*4,L", "Et|(t|tt|)*3,t*2|m|L", "E(tt)*2||(|t)*2|L", "E|t*0|L", "Et,|*2,tL"):
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
        expected = [[letters[layer.name] for layer in stage] for stage in stages]
        assert ParallelLayout(**{PP: len(stages), LAYOUT: text}).pipeline_stages == expected


class ScheduleReachedError(Exception):
    """Megatron's schedule has passed its checks of the number of microbatches."""


def megatron_runs_interleaved(config: TransformerConfig, num_microbatches: int) -> bool:
    """Whether Megatron's interleaved schedule gets past its own checks, on stand-ins for the process groups."""
    chunk = torch.nn.Module()
    chunk.config, chunk.model_type = config, None
    pipeline = SimpleNamespace(size=lambda: config.pipeline_model_parallel_size, rank=lambda: 0)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    try:
        schedules.forward_backward_pipelining_with_interleaving(
            forward_step_func=None,
            data_iterator=[None, None],
            model=[chunk, chunk],
            num_microbatches=num_microbatches,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=SimpleNamespace(config=config, pp_group=pipeline),
            pg_collection=SimpleNamespace(tp=alone, cp=alone, embd=None, pos_embd=None, pp=pipeline, dp_cp=alone),
        )
    except (ValueError, RuntimeError):
        return False
    except ScheduleReachedError:
        return True
    raise AssertionError("the schedule ran to its end")


def test_microbatches_are_accepted_exactly_where_the_interleaved_schedule_accepts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reached(*_: object, **__: object) -> None:
        raise ScheduleReachedError

    zeros = torch.zeros
    monkeypatch.setattr(schedules, "get_pp_rank_microbatches", reached)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    verdicts = {True: 0, False: 0}
    for pp, group_size, num_microbatches in itertools.product((2, 3, 4), (None, 2, 3, 4, 5), range(1, 13)):
        layout = ParallelLayout(pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=2)
        config = TransformerConfig(
            num_layers=12,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=2,
            microbatch_group_size_per_vp_stage=group_size,
            pipeline_dtype=torch.float32,
        )
        expected = megatron_runs_interleaved(config, num_microbatches)
        try:
            layout.validate_microbatches(num_microbatches, group_size)
        except ValueError:
            assert not expected, (pp, group_size, num_microbatches)
        else:
            assert expected, (pp, group_size, num_microbatches)
        verdicts[expected] += 1
    assert min(verdicts.values()) > 30
