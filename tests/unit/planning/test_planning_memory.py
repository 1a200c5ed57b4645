# SPDX-License-Identifier: Apache-2.0
"""Parameters and memory of a run that is not there: known models, known rules, and the cost of asking."""

import cProfile
import pstats
from dataclasses import replace
from typing import Any

import pytest

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.activation_memory import layer_rows
from lightning_mcore.planning.built import ParameterTensor
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameters import ParameterCount, count_of, model_parameters, rank_tensors
from lightning_mcore.planning.schedule import PipelineTimeline, in_flight
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.state_memory import RankMemory, rank_memory, state_memory
from tests.support.sentences import refuses

LLAMA: dict[str, Any] = {"gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm"}
LLAMA_8B = LLAMA | {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
}
QWEN2_7B = LLAMA | {
    "num_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_query_groups": 4,
    "ffn_hidden_size": 18944,
    "add_qkv_bias": True,
}
QWEN3_30B_A3B = LLAMA | {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "qk_layernorm": True,
}
MIXTRAL_8X7B = LLAMA_8B | {"num_moe_experts": 8, "moe_router_topk": 2}
DEEPSEEK_V3 = LLAMA | {
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
    "num_moe_experts": 256,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "ffn_hidden_size": 18432,
    "moe_layer_freq": [0] * 3 + [1] * 58,
}
TINY = LLAMA | {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
WHOLE, PIPELINE = ParallelLayout(), ParallelLayout(pipeline_model_parallel_size=4)


def gpt(transformer: dict[str, Any], vocab_size: int = 1000, **model: Any) -> GPTFields:
    return GPTFields.of({"vocab_size": vocab_size, "seq_length": 1024, "transformer": transformer, **model})


@pytest.mark.parametrize(
    ("transformer", "vocab_size", "total", "active"),
    [
        (LLAMA_8B, 128256, 8_030_261_248, 8_030_261_248),
        (QWEN2_7B, 152064, 7_615_616_512, 7_615_616_512),
        (QWEN3_30B_A3B, 151936, 30_532_122_624, 3_353_032_704),
        (MIXTRAL_8X7B, 32000, 46_702_792_704, 12_879_925_248),
        (DEEPSEEK_V3, 129280, 671_026_404_352, 37_552_282_624),
    ],
    ids=["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V3"],
)
def test_published_models_have_their_published_parameters(
    transformer: dict[str, Any], vocab_size: int, total: int, active: int
) -> None:
    parameters = model_parameters(gpt(transformer, vocab_size))

    assert (parameters.total, parameters.active) == (total, active)


def test_the_split_into_stages_says_nothing_of_the_whole_model() -> None:
    uneven = TINY | {"num_layers_in_first_pipeline_stage": 1}

    assert model_parameters(gpt(uneven)) == model_parameters(gpt(TINY))


def test_defaults_are_those_of_megatron() -> None:
    fields = gpt({"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4})

    assert (fields.ffn_hidden_size, fields.kv_channels, fields.num_query_groups) == (256, 16, 4)
    assert fields.add_bias_linear
    assert fields.subtracts_mean
    assert fields.padded_vocab_size == 1024
    assert not gpt({**TINY, "multi_latent_attention": True, "normalization": None}).subtracts_mean


def test_chunks_go_round_the_stages() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)

    assert stage_layers(gpt(TINY | {"num_layers": 8}), layout) == [
        [ChunkLayers((0, 1), True, False), ChunkLayers((4, 5), False, False)],
        [ChunkLayers((2, 3), False, False), ChunkLayers((6, 7), False, True)],
    ]


# ---- microbatches in flight


def peaks(layout: ParallelLayout, num_microbatches: int) -> list[int]:
    timeline = PipelineTimeline.of(layout, num_microbatches)
    return [max(sum(counts) for counts, _ in in_flight(timeline, stage)) for stage in range(timeline.num_stages)]


def test_a_stage_holds_as_many_microbatches_as_stages_are_left() -> None:
    assert peaks(PIPELINE, 16) == [4, 3, 2, 1]
    assert peaks(PIPELINE, 2) == [2, 2, 2, 1]


def test_an_interleaved_stage_holds_a_group_of_each_further_chunk() -> None:
    layout = replace(PIPELINE, virtual_pipeline_model_parallel_size=2)

    assert peaks(layout, 16) == [11, 9, 7, 5]
    assert peaks(layout, 4) == [8, 8, 7, 5]


def test_an_interleaved_step_brings_every_microbatch_back() -> None:
    layout = replace(PIPELINE, virtual_pipeline_model_parallel_size=3)

    moments = list(in_flight(PipelineTimeline.of(layout, 4), 1))

    assert len(moments) == 12
    assert sum(moments[-1][0]) == 1


# ---- bytes of an element


@pytest.mark.parametrize(
    ("precision", "bytes_of_one"),
    [
        ("32-true", (4, 4, 8)),
        ("bf16-mixed", (2, 4, 12)),
        ("bf16-true", (2, 2, 12)),
        ("16-mixed", (2, 4, 12)),
        ("16-true", (2, 2, 12)),
    ],
)
def test_precision_decides_the_bytes_of_an_element(precision: str, bytes_of_one: tuple[int, int, int]) -> None:
    assert state(precision) == bytes_of_one


def state(
    precision: str = "bf16-mixed", optimizer: str = "adamw", world: int = 1, **strategy: Any
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state, by element of a large matrix."""
    size = 2**20
    formats = Formats.of({"precision": precision}, strategy, optimizer)
    memory = state_memory([[ParameterTensor("weight", size, is_linear=True)]], ParallelLayout(), formats, world)
    return memory.weights / size, memory.gradients / size, memory.optimizer / size


def test_the_distributed_optimizer_divides_its_state_only() -> None:
    assert state(world=4, use_distributed_optimizer=True) == (2, 4, 3)
    assert state(world=4) == (2, 4, 12)


def test_several_instances_hold_a_whole_state_each() -> None:
    ddp = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}

    assert state(world=4, ddp_config=ddp) == (2, 4, 6)


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("adam", 12), ("sgd", 8), ("sgd_without_momentum", 4), ("muonwithadamw", 8)]
)
def test_optimizers_differ_by_their_moments(optimizer: str, expected: int) -> None:
    assert state(optimizer=optimizer)[2] == expected


def test_a_precision_aware_optimizer_keeps_what_it_is_told() -> None:
    halves = {"exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "bf16"}

    assert state(optimizer_config={"use_precision_aware_optimizer": True, **halves})[2] == 2 + 2 + 2
    assert state(optimizer_config={"use_precision_aware_optimizer": True, "store_param_remainders": False})[2] == 12


def test_offloaded_state_is_on_the_host() -> None:
    config = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.75}
    formats = Formats.of({"precision": "bf16-mixed"}, {"optimizer_config": config}, "adamw")

    memory = state_memory([[ParameterTensor("weight", 1000)]], ParallelLayout(), formats, 1)

    assert (memory.optimizer, memory.host) == (2500, 7500)


def test_weights_in_fp8_are_kept_twice() -> None:
    def weights(**precision: Any) -> int:
        formats = Formats.of({"precision": "bf16-mixed", **precision}, {"use_distributed_optimizer": True})
        tensors = [[ParameterTensor("fc1", 1024, is_linear=True), ParameterTensor("embedding", 2048)]]
        return state_memory(tensors, ParallelLayout(), formats, 1).weights

    assert weights() == 2 * 3072
    assert weights(fp8_recipe="tensorwise") == 2 * 3072 + 2 * 1024
    assert weights(fp8="hybrid", fp8_param=True) == 2 * 2048 + 2 * 1024


# ---- a rank


def memory(
    transformer: dict[str, Any] = TINY, world: int = 1, layout: ParallelLayout | None = None, **formats: Any
) -> RankMemory:
    made = Formats.of(**{"precision": {}, "strategy": {}, **formats})
    return rank_memory(
        Sizes(gpt(transformer), layout or ParallelLayout(), world, GlobalBatch(1, 1, 1, 1, 1024), made), 0
    )


def parameters(fields: GPTFields, layout: ParallelLayout = WHOLE, backend: str = "local") -> ParameterCount:
    return count_of(rank_tensors(fields, layout, 0, backend))


def test_expert_parameters_are_divided_by_both_sizes_of_experts() -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
    )
    fields = gpt(TINY | {"num_moe_experts": 8})

    assert parameters(fields, layout).expert == parameters(fields).expert / 4
    layout = replace(layout, expert_tensor_parallel_size=2)
    assert parameters(fields, layout).expert == parameters(fields).expert / 8


def test_transformer_engine_keeps_compressing_projections_whole() -> None:
    fields = gpt(TINY | {"multi_latent_attention": True})
    layout = ParallelLayout(tensor_model_parallel_size=2)

    more = parameters(fields, layout, "transformer_engine").dense - parameters(fields, layout).dense

    assert more == 4 * 64 * (512 + 512 + 64) / 2


@pytest.mark.parametrize("modules", [["core_attn"], ["mlp"]])
def test_recomputing_more_keeps_less(modules: list[str]) -> None:
    part = TINY | {"recompute_granularity": "selective", "recompute_modules": modules}
    whole = TINY | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    kept = [memory(transformer).activations for transformer in (TINY, part, whole)]

    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_fp8_halves_what_linear_layers_keep() -> None:
    rows = {}
    for fp8 in (False, True):
        precision = {"precision": "bf16-mixed", "fp8": "hybrid" if fp8 else None}
        rows[fp8] = layer_rows(gpt(TINY), 0, 1024, Formats.of(precision, {}, backend="transformer_engine"))
    inputs = ("input_layernorm output", "pre_mlp_layernorm output", "activation")

    kept = {fp8: sum(row.width * row.element for row in rows[fp8] if row.name in inputs) for fp8 in rows}

    assert kept[True] == kept[False] / 2


def test_transformer_engine_keeps_less_of_a_norm() -> None:
    kinds = [memory(precision={"precision": "bf16-mixed"}, backend=name) for name in ("local", "transformer_engine")]

    assert kinds[1].activations < kinds[0].activations


def test_a_norm_on_a_gpu_keeps_its_input_as_it_is() -> None:
    fields = gpt(TINY | {"normalization": "RMSNorm"})
    kept = {}
    for on_gpu in (False, True):
        rows = layer_rows(fields, 0, 1024, Formats.of({"precision": "bf16-mixed"}, {}, on_gpu=on_gpu))
        kept[on_gpu] = [(row.name, row.element) for row in rows if row.name.startswith("input_layernorm input")]

    assert kept[False] == [("input_layernorm input", 4), ("input_layernorm input, scaled", 4)]
    assert kept[True] == [("input_layernorm input", 2)]


def test_only_the_context_parallel_size_divides_tokens_without_sequence_parallelism() -> None:
    rows = [row for row in layer_rows(gpt(TINY), 0, 1024, Formats.of({}, {})) if row.shared == "sequence"]
    whole = memory().activations
    halved = memory(world=2, layout=ParallelLayout(context_parallel_size=2)).activations

    assert rows
    assert halved == pytest.approx(whole / 2, rel=0.05)


def test_an_unknown_backend_is_refused() -> None:
    with refuses(ValueError, "backend='te'"):
        memory(backend="te")


def test_sixteen_thousand_devices_cost_no_more_than_eight() -> None:
    fields = gpt(DEEPSEEK_V3, 129280)
    stages = "Ettt|" + "tttt|" * 14 + "ttL"
    large = ParallelLayout(
        pipeline_model_parallel_size=16, expert_model_parallel_size=64, pipeline_model_parallel_layout=stages
    )
    small = ParallelLayout(expert_model_parallel_size=8)

    formats = Formats.of({}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True})

    def calls_a_stage(layout: ParallelLayout, world: int) -> float:
        """Count the functions called, which a busy machine does not change as it does seconds."""
        profile = cProfile.Profile()
        with profile:
            run = Sizes(fields, layout, world, GlobalBatch(1, 512, 1, 512, 1024), formats)
            for stage in range(layout.pipeline_model_parallel_size):
                rank_memory(run, stage)
        return pstats.Stats(profile).total_calls / layout.pipeline_model_parallel_size

    assert calls_a_stage(large, 16_384) < calls_a_stage(small, 8)
