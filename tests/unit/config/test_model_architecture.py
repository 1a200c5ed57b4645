# SPDX-License-Identifier: Apache-2.0
"""Settings that Megatron's config has no field for: refused in a sentence, and computed as their formulas say."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mcore import MCoreGPT
from lightning_mcore.config.architecture import (
    Architecture,
    architecture_of,
    check_architecture,
    set_architecture,
)
from lightning_mcore.layers.attention import Softmax, attend_once
from tests.support.sentences import refuses

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 64,
}

INDEXER = {"indexer_freq": [1, 0], "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}

REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown name": {"embeding_scale": 2.0},
    "another place": {"layer_norms": "inside"},
    "a number for a switch": {"mlp_bias": 1},
    "a factor of zero": {"residual_scale": 0.0},
    "a switch for a number": {"logits_cap": True},
    "a growth without a length": {"query_growth": {"beta": 0.1}},
    "a growth with an unknown key": {
        "query_growth": {"beta": 0.1, "original_max_position_embeddings": 8, "last_position": 1}
    },
    "half a token": {"attention_chunk": 8.5},
    "no number": {"embedding_scale": None},
    "an unknown stretch": {"stretch": {"kind": "ntk"}},
    "half a stretch": {"stretch": {"kind": "dynamic", "factor": 2.0}},
    "an indexer without heads": {"indexer": {"indexer_freq": [1, 1], "index_topk": 8, "index_head_dim": 8}},
    "an indexer twice": {"indexer": {**INDEXER, "indexer_freq": [2, 1]}},
    "an indexer of no tokens": {"indexer": {**INDEXER, "index_topk": 0}},
    "a longer sequence than indexers select": {"indexer": {**INDEXER, "index_topk": 7}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused_before_a_model_is_built(name: str) -> None:
    with refuses(ValueError):
        MCoreGPT(vocab_size=32, seq_length=8, transformer=MODEL, architecture=REFUSED[name])


def test_settings_are_a_dict() -> None:
    with refuses(TypeError, "architecture='after'"):
        Architecture.of("after")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": True},
        {"seq_len_interpolation_factor": 2.0},
        {"position_embedding_type": "none"},
    ],
)
def test_positions_are_stretched_in_one_way(settings: dict[str, Any]) -> None:
    with refuses(ValueError, *settings):
        MCoreGPT(vocab_size=32, seq_length=8, transformer=MODEL, architecture={"stretch": LLAMA3}, **settings)


@pytest.mark.parametrize(
    "given",
    [{"layer_norms": "after"}, {"head_norms": "all_heads"}, {"attention_cap": 50.0}, {"attention_chunk": 8192}],
)
def test_transformer_engine_refuses_what_its_layers_lack(given: dict[str, Any]) -> None:
    architecture = Architecture.of(given)
    assert not architecture.fits_transformer_engine
    with refuses(ValueError, "transformer_impl='local'"):
        architecture.check_transformer_engine()
    Architecture.of({"embedding_scale": 12.0, "softmax_choice_bias": True}).check_transformer_engine()


@pytest.mark.parametrize(
    ("given", "fields", "other"),
    [
        ({"head_norms": "all_heads"}, {"qk_layernorm": True}, "qk_layernorm=True"),
        ({"latent_epsilon": 1e-6}, {}, "multi_latent_attention=False"),
        ({"softmax_choice_bias": True}, {}, "num_moe_experts=None"),
        ({"expert_bias": True}, {}, "num_moe_experts=None"),
        ({"attention_cap": 2.0}, {"softmax_type": "learnable"}, "softmax_type='learnable'"),
        (
            {"mlp_bias": True},
            {"num_moe_experts": 2, "moe_ffn_hidden_size": 8, "add_bias_linear": False},
            "experts in every layer",
        ),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, Any], fields: dict[str, Any], other: str) -> None:
    module = MCoreGPT(vocab_size=32, seq_length=8, transformer={**MODEL, **fields}, architecture=given)
    with refuses(ValueError, f"which does not work with {other}"):
        module.check_settings()


def test_ranks_that_do_not_divide_the_channels_of_all_keys_are_refused() -> None:
    config = SimpleNamespace(
        **{"multi_latent_attention": False, "num_moe_experts": None, "moe_router_score_function": "softmax"},
        **{"moe_router_enable_expert_bias": False, "mtp_num_layers": None, "qk_layernorm": False, "num_layers": 2},
        **{"softmax_type": "vanilla", "moe_layer_freq": 1, "num_query_groups": 1, "kv_channels": 6},
        tensor_model_parallel_size=4,
    )
    set_architecture(config, Architecture(head_norms="all_heads"))
    with refuses(ValueError, "tensor_model_parallel_size=4"):
        check_architecture(config, "local")
    config.tensor_model_parallel_size = 2
    check_architecture(config, "local")


def test_a_config_without_settings_has_the_defaults() -> None:
    class Config:
        pass

    config = Config()
    assert architecture_of(config) == Architecture()
    set_architecture(config, Architecture(logits_cap=30.0))
    assert architecture_of(config).logits_cap == 30.0


@pytest.mark.parametrize("is_causal", [False, True])
def test_unfused_attention_is_that_of_torch_where_its_cap_is_far_away(is_causal: bool) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    plain = attend_once(query, key, value, Softmax(0.3), is_causal=is_causal)
    capped = attend_once(query, key, value, Softmax(0.3, cap=1e6), is_causal=is_causal)
    torch.testing.assert_close(capped, plain, rtol=0, atol=1e-5)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    if is_causal:
        masked = attend_once(query, key, value, Softmax(0.3, cap=1e6), mask)
        torch.testing.assert_close(masked, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"multi_latent_attention": False}, "multi_latent_attention=False"),
        ({"q_lora_rank": None}, "q_lora_rank=None"),
        ({"num_layers": 3}, "num_layers=3"),
    ],
)
def test_indexers_are_of_latent_attention(fields: dict[str, Any], said: str) -> None:
    given = {**MODEL, "multi_latent_attention": True, "q_lora_rank": 8, "num_layers": 2, **fields}
    if not given["multi_latent_attention"]:
        del given["q_lora_rank"]
    module = MCoreGPT(vocab_size=32, seq_length=8, transformer=given, architecture={"indexer": INDEXER})
    with refuses(ValueError, said):
        module.check_settings()
