# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs against hand-computed sums, and the step clock against a clock of its own."""

from typing import Any

import pytest

from lightning_mcore.config.architecture import moe_layers
from lightning_mcore.config.flops import training_flops_per_token
from lightning_mcore.strategy.progress import StepClock

DENSE: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
OUTPUT = 2 * 8 * 32  # hidden size 8, vocabulary 32
SQUARE = 2 * 8 * 8


def flops(**fields: Any) -> float:
    return training_flops_per_token({**DENSE, **fields}, vocab_size=32, seq_length=16)


def test_dense_layer_counts_four_square_projections_causal_half_and_fourfold_mlp() -> None:
    layer = 4 * SQUARE + 2 * (2 * 8) * 8 + 2 * (2 * 8 * 32)  # q k v o; 16/2 keys, scores and values; up and down
    assert flops() == 3 * (2 * layer + OUTPUT)


def test_layers_with_rotary_positions_read_the_keys_of_their_chunk() -> None:
    # 16 tokens in chunks of 6 are two of 6 and one of 4: (6 * 6 + 6 * 6 + 4 * 4) / 2 / 16 keys instead of 16 / 2
    saved = (2 * 2 * 8) * (16 / 2 - (6 * 6 + 6 * 6 + 4 * 4) / 2 / 16)
    assert flops() - flops(attention_chunk=6) == pytest.approx(3 * 2 * saved)
    assert flops() - flops(attention_chunk=6, no_rope_freq=2) == pytest.approx(3 * saved)
    assert flops() - flops(attention_chunk=6, no_rope_freq=[0, 1]) == pytest.approx(3 * saved)
    assert flops(attention_chunk=64) == flops()


def test_query_groups_shrink_only_keys_and_values() -> None:
    assert flops() - flops(num_query_groups=1) == 3 * 2 * (2 * SQUARE / 2)


def test_kv_channels_set_the_width_of_attention() -> None:
    layer = 4 * (2 * 8 * 2 * 16) + 2 * (2 * 8) * (2 * 16) + 2 * (2 * 8 * 32)
    assert flops(kv_channels=16) == 3 * (2 * layer + OUTPUT)


def test_output_gate_adds_a_projection_as_wide_as_the_queries() -> None:
    assert flops(attention_output_gate=True) - flops() == 3 * 2 * SQUARE


def test_a_gated_delta_net_reads_and_writes_its_memory_whatever_the_length() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3}
    sizes |= {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 4}
    projections = 2 * 8 * (2 * 6 + 2 * 20 + 2 * 4) + 2 * 20 * 8  # queries, keys; values, gates; two numbers a head; out
    layer = projections + 2 * 4 * (2 * 6 + 20) + 4 * 3 * (2 * 3 * 5) + 2 * (2 * 8 * 32)
    for seq_length in (16, 64):
        fields = {**DENSE, **sizes, "linear_attention_freq": [1, 1]}
        assert training_flops_per_token(fields, vocab_size=32, seq_length=seq_length) == 3 * (2 * layer + OUTPUT)


def test_kimi_delta_attention_has_narrow_matrices_for_decays_and_gates() -> None:
    fields = {**DENSE, "linear_attention_freq": [1, 1]}
    fields |= {"linear_num_heads": 2, "linear_head_dim": 3, "linear_conv_kernel_dim": 4}
    projections = 2 * 8 * (3 * 6 + 2) + 2 * 6 * 8 + 2 * (2 * 8 * 3 + 2 * 3 * 6)
    layer = projections + 2 * 4 * (3 * 6) + 2 * 3 * (2 * 3 * 3) + 2 * (2 * 8 * 32)
    assert training_flops_per_token(fields, vocab_size=32, seq_length=16) == 3 * (2 * layer + OUTPUT)


def test_a_frozen_weight_costs_two_thirds_and_adapters_come_on_top() -> None:
    products = 2 * (4 * SQUARE + 2 * (2 * 8 * 32)) + OUTPUT
    scores = 2 * 2 * (2 * 8) * 8
    saved, added = 8 * 32, 10  # the output layer is trained; multiplications of A and B
    found = training_flops_per_token(DENSE, vocab_size=32, seq_length=16, trained=(saved, added))
    assert found == 3 * scores + 2 * products + OUTPUT + 3 * 2 * added


def test_a_frozen_delta_net_has_a_memory_without_weights() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 3, "linear_num_value_heads": 4}
    sizes |= {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 4}
    fields = {**DENSE, **sizes, "linear_attention_freq": [1, 1]}
    memory = 2 * 3 * (2 * 3 * 4 * 5)  # of two layers
    whole = training_flops_per_token(fields, vocab_size=32, seq_length=16)
    frozen = training_flops_per_token(fields, vocab_size=32, seq_length=16, trained=(0, 0))
    assert frozen == 3 * memory + 2 * (whole / 3 - memory)


def test_another_token_ahead_costs_a_layer_a_projection_and_an_output_layer() -> None:
    more = flops(mtp_num_layers=2) - flops()
    assert more == 2 * (flops(num_layers=3) - flops() + 3 * (2 * 16 * 8 + OUTPUT))


def test_gated_mlp_has_a_third_matrix() -> None:
    assert flops(gated_linear_unit=True, ffn_hidden_size=24) - flops(ffn_hidden_size=24) == 3 * 2 * (2 * 8 * 24)


def test_moe_layer_runs_the_router_and_the_chosen_experts_only() -> None:
    moe = flops(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
    expert = 2 * (2 * 8 * 16)
    assert moe - flops() == 3 * 2 * ((2 * 8 * 4) + 2 * expert - 2 * (2 * 8 * 32))


def test_narrow_experts_cost_their_own_width_and_two_projections_of_each_token() -> None:
    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    saved = 2 * 2 * (2 * (8 - 4) * 16) - 2 * (2 * 8 * 4)
    assert flops(**moe) - flops(**moe, moe_latent_size=4) == 3 * 2 * saved


def test_shared_expert_is_added_to_every_moe_layer() -> None:
    moe = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16}
    shared = flops(**moe, moe_shared_expert_intermediate_size=24) - flops(**moe)
    assert shared == 3 * 2 * 2 * (2 * 8 * 24)


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [True] * 4), (2, [True, False, True, False]), ([0, 1, 1, 1], [False] + [True] * 3)]
)
def test_moe_layer_freq_decides_which_layers_have_experts(frequency: int | list[int], expected: list[bool]) -> None:
    assert moe_layers({"num_layers": 4, "num_moe_experts": 2, "moe_layer_freq": frequency}) == expected


def test_without_experts_no_layer_is_moe() -> None:
    assert moe_layers({"num_layers": 2}) == [False, False]


@pytest.mark.parametrize("window", [1, 4, 15])
def test_sliding_window_counts_the_mean_of_the_keys_that_are_read(window: int) -> None:
    keys = window - window * window / 32
    saved = 2 * 2 * 8 * (8 - keys)
    assert flops() - flops(window_size=(window - 1, 0)) == pytest.approx(3 * 2 * saved)


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    assert flops(window_size=[16, 0]) == flops()


def test_window_attn_skip_freq_leaves_full_attention_in_the_skipped_layers() -> None:
    assert flops() - flops(window_size=(3, 0), window_attn_skip_freq=2) == (flops() - flops(window_size=(3, 0))) / 2


def test_multi_latent_attention_counts_its_low_rank_projections() -> None:
    latent = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_head_dim": 5, "qk_pos_emb_head_dim": 3, "v_head_dim": 7}
    query = 2 * 8 * 6 + 2 * 6 * (2 * 8)
    key_value = 2 * 8 * (4 + 3) + 2 * 4 * (2 * (5 + 7))
    core = 2 * 8 * (2 * 8) + 2 * 8 * (2 * 7)
    layer = query + key_value + core + 2 * (2 * 7) * 8 + 2 * (2 * 8 * 32)
    assert flops(multi_latent_attention=True, **latent) == 3 * (2 * layer + OUTPUT)


def test_multi_latent_attention_without_query_compression() -> None:
    latent = {"q_lora_rank": None, "kv_lora_rank": 4, "qk_head_dim": 5, "qk_pos_emb_head_dim": 3, "v_head_dim": 7}
    compressed = 2 * 8 * 6 + 2 * 6 * 16
    assert flops(multi_latent_attention=True, **latent | {"q_lora_rank": 6}) - flops(
        multi_latent_attention=True, **latent
    ) == 3 * 2 * (compressed - 2 * 8 * 16)


def test_clock_divides_the_tokens_of_a_step_by_its_seconds() -> None:
    times = iter([10.0, 12.0, 12.0, 16.0, 16.0])
    clock = StepClock(now=lambda: next(times))
    clock.start()
    clock.add(100)
    clock.add(100)
    assert clock.step() == 100.0
    clock.add(400)
    assert clock.step() == 100.0


def test_clock_leaves_validation_out() -> None:
    times = iter([0.0, 1.0, 51.0, 52.0, 52.0])
    clock = StepClock(now=lambda: next(times))
    clock.start()
    clock.add(10)
    clock.pause()
    clock.start()
    assert clock.step() == 5.0


def test_starting_a_running_clock_does_not_restart_it() -> None:
    times = iter([0.0, 2.0, 2.0])
    clock = StepClock(now=lambda: next(times))
    clock.start()
    clock.start()
    clock.add(4)
    assert clock.step() == 2.0
