# SPDX-License-Identifier: Apache-2.0
"""The pipeline schedule of a plan: its bubble, its time, its picture; the global batch and what a rank sends."""

import pytest

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.arguments import with_adapters
from lightning_mcore.planning.communication import communication_volume
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch, global_batch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import count_of, rank_tensors
from lightning_mcore.planning.schedule import PipelineTimeline, schedule_picture
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.step import StepWork, step_work

GPT = {
    "vocab_size": 256,
    "seq_length": 64,
    "transformer": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
    },
}
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 8, "q_lora_rank": 8, "num_query_groups": 4}


def gpt(**changes: object) -> GPTFields:
    return GPTFields.of({**GPT, "transformer": {**GPT["transformer"], **changes}})  # type: ignore[dict-item]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8, 12])
def test_the_bubble_of_1f1b_is_that_of_the_formula(num_stages: int, num_microbatches: int) -> None:
    timeline = PipelineTimeline(num_stages, 1, num_microbatches)
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "groups"), [(2, 2, 1), (2, 2, 4), (4, 2, 2), (4, 4, 3), (8, 2, 2)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(num_stages: int, num_chunks: int, groups: int) -> None:
    timeline = PipelineTimeline(num_stages, num_chunks, groups * num_stages)
    assert timeline.bubble == pytest.approx(timeline.formula)
    idle = num_stages - 1
    assert timeline.formula == idle / (num_chunks * groups * num_stages + idle)


def test_one_stage_never_waits() -> None:
    assert PipelineTimeline(1, 1, 4).bubble == 0
    assert [str(action) for action in PipelineTimeline(1, 1, 2).order(0)] == ["F0", "B0", "F1", "B1"]


@pytest.mark.parametrize(("num_chunks", "group"), [(1, None), (2, None), (2, 6), (3, 5)])
def test_a_long_schedule_takes_as_long_as_if_it_were_played_to_its_end(num_chunks: int, group: int | None) -> None:
    num_stages, size = 4, group or 4
    long = PipelineTimeline(num_stages, num_chunks, 700 * size, group)
    assert long.num_passes > 20_000
    assert long.duration == max(row[-1].end for row in long.played)


def test_every_stage_runs_every_pass_once_and_backward_behind_forward() -> None:
    for stage in range(4):
        order = PipelineTimeline(4, 2, 8).order(stage)
        assert len(order) == len(set(order)) == 2 * 2 * 8
        for place, action in enumerate(order):
            if not action.forward:
                assert order.index(action._replace(forward=True)) < place


def test_the_picture_has_a_row_for_each_stage_and_shows_the_bubble() -> None:
    lines = schedule_picture(PipelineTimeline(2, 1, 2)).splitlines()
    assert lines[0] == "stage 0 |F0 F1 ......B0--- ...B1--- "
    assert lines[1] == "stage 1 |...F0 B0--- F1 B1--- ......"
    assert lines[2].startswith("9 units; bubble 33.3%")


def test_a_wide_picture_is_cut_and_a_long_pipeline_too() -> None:
    lines = schedule_picture(PipelineTimeline(64, 2, 512), width=100).splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert "..." in lines[0]
    assert len(lines) == 26


def test_the_sentence_of_the_global_batch() -> None:
    batch = global_batch({"expert_model_parallel_size": 2}, {"accumulate_grad_batches": 2}, 4, 128, 4)
    assert batch.rows == 32
    assert batch.sentence == "micro batch 4 x 2 microbatches x data parallel 4 = 32 rows; experts do not lower dp"


def test_micro_batch_size_cuts_a_batch_of_the_loader() -> None:
    batch = global_batch({"micro_batch_size": 4}, {"accumulate_grad_batches": 3}, 10, 128, 2)
    assert (batch.num_microbatches, batch.rows) == (9, 60)
    assert "shorter" in batch.sentence


def run_of(
    fields: GPTFields, layout: ParallelLayout, world: int, length: int = 64, microbatches: int = 2, **strategy: object
) -> Sizes:
    dp = layout.data_parallel_size(world)
    batch = GlobalBatch(1, microbatches, dp, microbatches * dp, length)
    return Sizes(fields, layout, world, batch, Formats.of({"precision": "bf16-mixed"}, strategy))


def sent(fields: GPTFields, layout: ParallelLayout, world: int, stage: int = 0, **strategy: object) -> dict[str, float]:
    volumes = communication_volume(run_of(fields, layout, world, **strategy), stage)  # type: ignore[arg-type]
    return {volume.axis: volume.sent for volume in volumes}


def work_of(fields: GPTFields, layout: ParallelLayout | None = None, world: int = 1) -> StepWork:
    return step_work(run_of(fields, layout or ParallelLayout(), world))


def test_tensor_parallel_volume_is_the_published_one() -> None:
    """Each layer all-reduces twice forward and twice backward: 8 b s h (t - 1) / t elements."""
    fields, layout = gpt(), ParallelLayout(tensor_model_parallel_size=2)
    whole = 64 * 32 * 2
    layers = 4 * 8 * whole * 0.5
    ends = (2 + 2) * whole * 0.5 + 3 * 2 * 64 * 4 * 0.5
    assert sent(fields, layout, 2)["tp"] == pytest.approx(2 * (layers + ends))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_send_what_their_ranks_make(sequence_parallel: bool) -> None:
    """Row parallel forward, column parallel backward; with sequence parallelism half each way."""
    layout = ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    for target in ("o_proj", "q_proj"):
        model = {**GPT, "lora": {"r": 3, "target_modules": [target]}}
        more = sent(with_adapters(gpt(), model), layout, 2)["tp"] - sent(gpt(), layout, 2)["tp"]
        assert more == pytest.approx(2 * 4 * 2 * 64 * 3 * 2 * 0.5)


def test_full_recomputation_sends_the_forward_pass_again() -> None:
    again = gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    layout = ParallelLayout(tensor_model_parallel_size=2)
    more = sent(again, layout, 2)["tp"] - sent(gpt(), layout, 2)["tp"]
    assert more == pytest.approx(2 * 4 * 4 * 64 * 32 * 2 * 0.5)


def test_gradients_are_all_reduced_or_scattered_and_gathered() -> None:
    parameters = count_of(rank_tensors(gpt(), ParallelLayout(), 0)).total
    assert sent(gpt(), ParallelLayout(), 4)["dp"] == pytest.approx(parameters * 2 * 4 * 3 / 4)
    sharded = sent(gpt(), ParallelLayout(), 4, use_distributed_optimizer=True)["dp"]
    assert sharded == pytest.approx(parameters * (4 + 2) * 3 / 4)


def test_stages_send_an_activation_forward_and_a_gradient_back() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=4)
    ends, middle = sent(gpt(), layout, 4)["pp"], sent(gpt(), layout, 4, 1)["pp"]
    assert middle == 2 * ends == 2 * 2 * 64 * 32 * 2


def test_context_parallel_ranks_send_keys_and_values_three_times() -> None:
    layout = ParallelLayout(context_parallel_size=2)
    keys = 32 * 2 * 2 * 8 * 2  # tokens here, keys and values, groups, channels, bytes
    assert sent(gpt(), layout, 2)["cp"] == pytest.approx(2 * 4 * 3 * keys)


def test_experts_exchange_tokens_four_times_a_layer() -> None:
    fields = gpt(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall")
    layout = ParallelLayout(expert_model_parallel_size=2)
    volumes = sent(fields, layout, 2)
    assert volumes["ep"] == pytest.approx(2 * 4 * 4 * 64 * 2 * 32 * 2 * 0.5)
    assert "edp" not in volumes


def test_hardware_flops_add_what_is_recomputed() -> None:
    plain = work_of(gpt())
    assert plain.hardware_flops == pytest.approx(plain.model_flops)
    full = gpt(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    work = work_of(full)
    output = 3 * 2 * 32 * 256 * 128
    assert work.hardware_flops - work.model_flops == pytest.approx((work.model_flops - output) / 3)
    core = work_of(gpt(recompute_granularity="selective"))
    assert core.hardware_flops - core.model_flops == pytest.approx(4 * 64 / 2 * 2 * 2 * 32 * 128)


@pytest.mark.parametrize(
    "changes", [{}, {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True}, LATENT]
)
def test_adapters_cost_as_much_on_ranks_as_in_the_model(changes: dict[str, object]) -> None:
    arguments = {**GPT, "transformer": {**GPT["transformer"], **changes}}  # type: ignore[dict-item]
    arguments["lora"] = {"r": 4, "modules_to_save": ["lm_head"]}
    fields = with_adapters(GPTFields.of(arguments), arguments)
    layout = ParallelLayout(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    work = work_of(fields, layout, 8)
    frozen = work_of(gpt(**changes), layout, 8)
    assert sum(work.hardware_flops_of_rank) * 4 == pytest.approx(work.model_flops)
    assert 0.67 * frozen.model_flops < work.model_flops < frozen.model_flops


def test_frozen_gradients_are_not_sent() -> None:
    arguments = {**GPT, "lora": {"r": 4}}
    fields = with_adapters(GPTFields.of(arguments), arguments)
    trained = count_of(rank_tensors(fields, ParallelLayout(), 0)).trained_dense
    assert trained == 4 * 4 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 96) * 3)
    assert sent(fields, ParallelLayout(), 2)["dp"] == pytest.approx(trained * 2 * 4 / 2)


def test_attention_is_counted_over_the_rows_of_the_data() -> None:
    short, long = (step_work(run_of(gpt(), ParallelLayout(), 1, length, 1)) for length in (16, 64))
    assert long.flops_per_token - short.flops_per_token == pytest.approx(3 * 4 * (64 - 16) / 2 * 2 * 2 * 32)
    for work in (short, long):
        assert work.hardware_flops == pytest.approx(work.model_flops)


def test_the_work_of_all_ranks_is_that_of_the_model() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    work = work_of(gpt(num_moe_experts=4, moe_router_topk=1), layout, 8)
    assert sum(work.hardware_flops_of_rank) * 4 == pytest.approx(work.model_flops)
