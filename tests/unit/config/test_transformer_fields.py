# SPDX-License-Identifier: Apache-2.0
"""What a user may write in ``transformer={...}``: refused in one sentence, or turned into Megatron's config."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.transformer_config import build_transformer_config, check_transformer_fields
from tests.support.sentences import refuses

TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}


def refusal(**fields: Any) -> str:
    with refuses(ValueError) as caught:
        check_transformer_fields({**TINY, **fields})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_misspelt_field_names_the_closest_one() -> None:
    assert "has no field num_query_group; did you mean num_query_groups?" in refusal(num_query_group=2)


def test_field_like_no_other_points_to_megatron() -> None:
    assert "see TransformerConfig" in refusal(zzzz=1)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ParallelLayout)])
def test_every_field_of_the_layout_is_sent_to_the_strategy(name: str) -> None:
    assert f"set it in MCoreStrategy({name}=...)" in refusal(**{name: 2})


@pytest.mark.parametrize("name", ["bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype", "fp8"])
def test_number_formats_are_sent_to_the_trainers_precision(name: str) -> None:
    assert "set it through Trainer(precision=...)" in refusal(**{name: True})


@pytest.mark.parametrize("name", ["grad_scale_func", "no_sync_func", "variable_seq_lengths", "_cpu_offloading_context"])
def test_what_the_schedule_fills_in_is_refused(name: str) -> None:
    assert "is filled in by the strategy" in refusal(**{name: None})


@pytest.mark.parametrize("name", ["rotary_base", "transformer_impl", "vocab_size"])
def test_arguments_of_the_module_are_sent_one_level_up(name: str) -> None:
    assert f"{name} is an argument of the module" in refusal(**{name: 1})


def test_fields_of_latent_attention_need_latent_attention() -> None:
    assert "set multi_latent_attention=True" in refusal(kv_lora_rank=8)
    assert check_transformer_fields({**TINY, "multi_latent_attention": True, "kv_lora_rank": 8})["kv_lora_rank"] == 8


@pytest.mark.parametrize("missing", list(TINY))
def test_required_fields_are_named(missing: str) -> None:
    fields = {name: value for name, value in TINY.items() if name != missing}
    with refuses(ValueError, f"transformer lacks {missing}"):
        check_transformer_fields(fields)


@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [
        ("num_layers", "2", "a whole number"),
        ("num_layers", True, "a whole number"),
        ("add_bias_linear", 1, "True or False"),
        ("hidden_dropout", "0.1", "a number"),
        ("normalization", "rmsnorm", "'LayerNorm' or 'RMSNorm'"),
        ("attention_backend", "fast", "'flash' or 'fused' or 'unfused' or 'local' or 'auto'"),
        ("window_size", 128, "None"),
        ("moe_layer_freq", [0.5], "int"),
        ("activation_func", torch.nn.functional.silu, "an import path such as 'torch.nn.functional.silu'"),
    ],
)
def test_value_of_the_wrong_kind_is_refused_with_the_choices(name: str, value: Any, choice: str) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r} does not fit; choose ")
    assert choice in message


@pytest.mark.parametrize("path", ["swish", "torch.nn.functional.nothing", "nowhere.silu", "math.pi", ""])
def test_path_that_names_no_function_is_refused(path: str) -> None:
    assert f"activation_func={path!r} is not a function" in refusal(activation_func=path)


def test_not_a_dict_is_a_type_error() -> None:
    with refuses(TypeError, "is not a dict of TransformerConfig fields"):
        check_transformer_fields(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["silu", "torch.nn.functional.silu"])
def test_activation_is_found_by_short_name_and_by_path(path: str) -> None:
    assert build_transformer_config({**TINY, "activation_func": path}, {}).activation_func is torch.nn.functional.silu


@pytest.mark.parametrize("name", ["gelu", "relu", "quick_gelu", "squared_relu"])
def test_short_names_are_functions(name: str) -> None:
    assert build_transformer_config({**TINY, "activation_func": name}, {}).activation_func.__name__ == name


def test_plain_data_becomes_what_megatron_wants() -> None:
    config = build_transformer_config({**TINY, "window_size": [8, 0], "attention_backend": "flash"}, {})
    assert config.window_size == (8, 0)
    assert config.attention_backend is AttnBackend.flash


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")  # what build_transformer_config silences
def test_our_defaults_are_four_and_the_rest_is_megatrons() -> None:
    ours, theirs = build_transformer_config(TINY, {}), TransformerConfig(**TINY)
    changed = {f.name for f in dataclasses.fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name)}
    changed -= {"init_method", "output_layer_init_method", "embedding_init_method"}  # made anew for each config
    dropout = {"hidden_dropout", "attention_dropout"}
    assert changed == {*dropout, "calculate_per_token_loss", "moe_token_dispatcher_type"}


def test_given_fields_win_over_our_defaults() -> None:
    assert build_transformer_config({**TINY, "hidden_dropout": 0.2}, {}).hidden_dropout == 0.2


def test_owned_fields_reach_the_config() -> None:
    config = build_transformer_config(TINY, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)


def test_field_given_twice_is_refused() -> None:
    with refuses(ValueError, "deallocate_pipeline_outputs is given in"):
        build_transformer_config({**TINY, "deallocate_pipeline_outputs": True}, {"deallocate_pipeline_outputs": False})


def test_contradiction_that_megatron_finds_is_one_sentence_of_ours() -> None:
    with refuses(ValueError, "refuses this model:"):
        build_transformer_config({**TINY, "recompute_granularity": "full"}, {})


def test_latent_attention_gets_its_own_config() -> None:
    config = build_transformer_config({**TINY, "multi_latent_attention": True, "v_head_dim": 8}, {"rotary_base": 500})
    assert isinstance(config, MLATransformerConfig)
    assert (config.v_head_dim, config.rotary_base) == (8, 500)
