# SPDX-License-Identifier: Apache-2.0
"""Configs of every family: read as Megatron's fields, written back; keys that change the numbers are never ignored."""

import copy
import dataclasses
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.transformer.transformer_config import MLATransformerConfig
from packaging.version import Version

from lightning_mcore.config import field_homes
from lightning_mcore.config.positions import YARN_DEFAULTS
from lightning_mcore.config.rules.model import NOT_OF_A_GPT
from lightning_mcore.hf import Unused, family_names, find_family
from lightning_mcore.hf.families import WITH_TOWERS
from lightning_mcore.hf.family import IRRELEVANT, TRAINING_ONLY, complete_fields, split_fields
from lightning_mcore.hf.registry import UNSUPPORTED
from lightning_mcore.hf.safetensors import SafetensorsFolder
from lightning_mcore.hf.source import _unread_by_transformers, complete_config
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.layers.transformer_config import check_transformer_fields
from tests.support.hf_models import CONFIGS, FAMILIES, MULTI_TOKEN, VARIANTS, YARN, auto_model, tiny_folder
from tests.support.sentences import refuses

ALL: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in CONFIGS}, **VARIANTS}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """Return a whole config, as it is read from a folder."""
    content = copy.deepcopy({"model_type": family, **CONFIGS[family], **overrides})
    return complete_config(find_family(family), content)


def read(family: str, **overrides: Any) -> dict[str, Any]:
    """Return all fields of a config."""
    return complete_fields(find_family(family).read_config(config_of(family, **overrides)))


# ---- in and out


@pytest.mark.parametrize("name", ALL)
def test_a_config_survives_the_way_to_fields_and_back(name: str) -> None:
    family, overrides = ALL[name]
    fields = read(family, **overrides)
    keys = find_family(family).write_config(fields)
    again = complete_config(find_family(family), {"model_type": family, **keys})
    assert complete_fields(find_family(family).read_config(again)) == fields


@pytest.mark.parametrize("name", ALL)
def test_keys_are_written_as_they_were(name: str) -> None:
    family, overrides = ALL[name]
    config, fields = config_of(family, **overrides), read(family, **overrides)
    written = find_family(family).write_config(fields)
    left_out = {"rope_parameters", "moe_layer_end_index", *(key for key in ("head_dim",) if config.get(key) is None)}
    if family not in ("mixtral", "hunyuan_v1_moe") and fields["num_moe_experts"] and fields["moe_layer_freq"] == 1:
        left_out.add("intermediate_size")  # of no layer
    if config.get("decoder_sparse_step") == 2:
        left_out |= {"decoder_sparse_step", "mlp_only_layers"}  # the second says it all
    keys = written.keys() & config.keys() - left_out
    assert {key: written[key] or None for key in keys} == {key: config[key] or None for key in keys}
    if "rope_parameters" not in written:  # a model without rotary positions
        return
    rope = config["rope_parameters"]
    if "full_attention" in rope or "alpha" in rope:  # of two kinds of layers; of a base that is written stretched
        return
    assert {key: written["rope_parameters"].get(key, 1.0) for key in rope} == rope


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
OF_WINDOWS: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
BY_LAYER_TYPE = {"sliding_attention": OF_WINDOWS, "full_attention": DYNAMIC}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("olmo3", BY_LAYER_TYPE),
        ("gemma3_text", BY_LAYER_TYPE),
        ("qwen3_5_text", {**DYNAMIC, "mrope_section": [1, 1, 1]}),
    ],
)
def test_the_original_length_of_a_dynamic_stretch_is_kept(family: str, rope: dict[str, Any]) -> None:
    fields = read(family, max_position_embeddings=64, rope_parameters=rope)
    assert fields["stretch"]["original_max_position_embeddings"] == 64
    assert find_family(family).write_config(fields)["max_position_embeddings"] == 64


def test_the_original_length_of_llama3_stays_a_whole_number() -> None:
    fields = read("llama", **VARIANTS["llama, other constants"][1])
    lengths = [
        fields["stretch"]["original_max_position_embeddings"],
        find_family("llama").write_config(fields)["rope_parameters"]["original_max_position_embeddings"],
    ]
    assert [(length, type(length)) for length in lengths] == [(32, int)] * 2


def test_a_model_that_stretches_positions_twice_is_not_written() -> None:
    fields = {**read("qwen2", rope_parameters=YARN), "seq_len_interpolation_factor": 2.0}
    with refuses(ValueError, "'qwen2'"):
        find_family("qwen2").write_config(fields)


@pytest.mark.parametrize("window", [(7, -1), (7, 1), (-1, 0)])
def test_a_window_that_is_no_number_of_earlier_keys_is_not_written(window: tuple[int, int]) -> None:
    with refuses(ValueError, "cannot be expressed in its config; only"):
        find_family("mistral").write_config({**read("mistral"), "window_size": window})


@pytest.mark.parametrize("name", ALL)
def test_fields_of_a_config_are_arguments_of_the_module(name: str) -> None:
    family, overrides = ALL[name]
    module, transformer = split_fields(find_family(family).read_config(config_of(family, **overrides)))
    assert check_transformer_fields(transformer) == transformer
    assert module["vocab_size"] == CONFIGS[family]["vocab_size"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_known_by_its_settings_alone(family: str) -> None:
    fields = read(family)
    assert next(name for name in family_names() if _accepts(name, fields)) == family


def _accepts(family: str, fields: dict[str, Any]) -> bool:
    try:
        find_family(family).write_config(fields)
    except ValueError:
        return False
    return True


# ---- every key

NO_NUMBERS = {
    "llama": {"pretraining_tp"},
    "mixtral": {"router_aux_loss_coef"},  # without output_router_logits transformers has no such loss
    "qwen2_moe": {"router_aux_loss_coef"},
    "qwen3_moe": {"router_aux_loss_coef"},
    "deepseek_v3": {"pretraining_tp"},
    "kimi_k2": {"pretraining_tp"},
    "seed_oss": {"pretraining_tp"},
    **{name: {"router_aux_loss_coef"} for name in ("granitemoe", "olmoe", "minimax_m2", "ernie4_5_moe", "qwen3_next")},
    "gpt_oss": {"router_aux_loss_coef"},
    "qwen3_5_moe_text": {"router_aux_loss_coef", "intermediate_size"},
    "exaone4": {"sliding_window_pattern"},  # makes layer_types
    "gemma3_text": {"_sliding_window_pattern"},
    "hunyuan_v1_dense": {"pretraining_tp", "eod_token_id"},
    "hunyuan_v1_moe": {"pretraining_tp", "eod_token_id", "sep_token_id"},
    "solar_open": {"intermediate_size"},
    **{name: {"pretraining_tp"} for name in ("glm4_moe_lite", "kimi_linear", "mistral4")},
    "exaone_moe": {"sliding_window_pattern"},
    "afmoe": {"global_attn_every_n_layers"},
    "granitemoehybrid": {"router_aux_loss_coef", "mamba_chunk_size"},
    "llama4_text": {"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"},
    "nemotron_h": {
        *("chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "n_shared_experts", "num_logits_to_keep", "num_nextn_predict_layers"),
        *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min"),
        "use_mamba_kernels",
    },
}
"""Keys of a config class that change no number, beside those of any config."""

MADE_OF_OTHERS = {
    "deepseek_v3": {"head_dim"},
    "kimi_k2": {"head_dim"},
    "smollm3": {"no_rope_layer_interval"},
    "llama4_text": {"no_rope_layer_interval", "interleave_moe_layer_step"},
    "seed_oss": {"residual_dropout"},  # affects training only
    "phi3": {"resid_pdrop", "embd_pdrop", "original_max_position_embeddings"},  # the last is of longrope only
    "dots1": {"max_window_layers"},
    "exaone_moe": {"first_k_dense_replace"},
    **{name: {"first_k_dense_replace", "head_dim"} for name in ("deepseek_v32", "glm_moe_dsa")},
    "cohere2": {"head_dim"},
    "kimi_linear": {"head_dim"},  # of nothing
    "gemma": {"hidden_act"},  # transformers takes "gelu" as its approximation
}
"""Keys that transformers overwrites, and those without effect beside ``no_rope_layers`` or ``layer_types``."""

BASES: dict[str, dict[str, Any]] = {
    "qwen2": WINDOWS,
    "qwen2_moe": WINDOWS,
    "qwen3": WINDOWS,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 8, "mlp_only_layers": [1]},
    "glm4_moe": {"n_group": 2},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8},
    **{name: {"n_group": 2} for name in ("dots1", "solar_open", "exaone_moe", "glm_moe_dsa")},
    "mistral4": {"n_group": 2, "norm_topk_prob": False},
    "granitemoehybrid": {"position_embedding_type": "rope"},
}
"""What a config has beside the plain one, so that each of its keys has an effect."""

OTHERS: dict[str, list[Any]] = {
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 5.0},
        {**YARN, "factor": 2.0},
        {**YARN, "original_max_position_embeddings": 16},
        {**YARN, "beta_fast": 8.0},
        {**YARN, "beta_slow": 2.0},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 0.25},
        {**YARN, "mscale": 0.5, "mscale_all_dim": 0.5},
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 2.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        {**CONFIGS["llama"]["rope_parameters"], "factor": 4.0},
        {**CONFIGS["llama"]["rope_parameters"], "low_freq_factor": 2.0},
        {**CONFIGS["llama"]["rope_parameters"], "high_freq_factor": 2.0},
        {**CONFIGS["llama"]["rope_parameters"], "original_max_position_embeddings": 4096},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ],
    "layer_types": [["sliding_attention", "full_attention"] * 2, ["chunked_attention"] * 4],
    "mlp_only_layers": [[0], [0, 3]],
    "mlp_layer_types": [["sparse"] * 4],
    "moe_layers": [[], [0, 1, 2, 3]],
    "no_rope_layers": [[1, 1, 1, 1], [0, 1, 0, 1]],
    "decoder_sparse_step": [2, 3],
    "first_k_dense_replace": [0, 2],
    "num_experts_per_tok": [1, 3],
    "moe_layer_start_index": [0, 2],
    "moe_layer_end_index": [2],
    "hidden_act": ["gelu", "relu"],
    "indexer_types": [["full"] * 4, ["full", "full", "none", "full"], ["shared", "full", "full", "full"]],
    "hidden_activation": ["gelu", "relu"],
}
"""Other values of keys; of the rest, switches are turned and numbers doubled."""


@pytest.mark.parametrize("family", CONFIGS)
def test_no_key_of_the_config_class_is_passed_over(family: str) -> None:
    base = BASES.get(family, {})
    config, plain = config_of(family, **base), read(family, **base)
    without = {key for rule in find_family(family).config if isinstance(rule, Unused) for key in rule.keys}
    assert without & config.keys() == NO_NUMBERS.get(family, set())
    fields = set()
    for key in config.keys() - IRRELEVANT - without - MADE_OF_OTHERS.get(family, set()):
        for value in [value for value in OTHERS.get(key) or [_other(config[key])] if value != config[key]]:
            changed = _read_or_refuse(family, {**CONFIGS[family], **base}, key, value)
            assert changed is None or changed != plain, f"{key}={value}"
            fields |= {name for name in plain if changed is not None and changed[name] != plain[name]}
    assert len(fields) >= 10


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return 2 * value + 0.25 if isinstance(value, float) else 2 * (value or 2)


def _read_or_refuse(family: str, config: dict[str, Any], key: str, value: Any) -> dict[str, Any] | None:
    if key == "num_local_experts":
        config.pop("num_experts", None)  # the same, in older words
    try:
        whole = complete_config(find_family(family), copy.deepcopy({"model_type": family, **config, key: value}))
        return complete_fields(find_family(family).read_config(whole))
    except ValueError:
        return None


FOREIGN = sorted(CONFIGS.keys() - transformers.CONFIG_MAPPING.keys())  # read by classes of other models


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_that_neither_a_rule_nor_transformers_knows_are_ignored_with_a_warning(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(family, query_rescale=None) == read(family)
    if family in FOREIGN:
        with pytest.raises(ValueError, match=r"query_rescale=2.0 is not a known key of"):
            read(family, query_rescale=2.0)
        return
    _unread_by_transformers.cache_clear()
    for _ in range(2):
        assert read(family, query_rescale=2.0) == read(family)
    said = (
        f"keys of config.json are ignored, because transformers does not read them for '{family}' models: query_rescale"
    )
    assert caplog.messages.count(said) == 1


@pytest.mark.parametrize(
    ("key", "value", "version"),
    [
        ("sliding_window", 8, None),  # any model's cache and mask read it
        ("quantization_config", {"bits": 4}, None),
        ("query_rescale", 2.0, "99.0"),  # a newer transformers may read it
        ("query_rescale", 2.0, "newest"),
    ],
)
def test_keys_that_transformers_may_read_are_refused(key: str, value: Any, version: str | None) -> None:
    with pytest.raises(ValueError, match=rf"{key}=.* is not a known key of"):
        read("llama", **{key: value}, transformers_version=version)


@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - set(FOREIGN)))
def test_the_code_that_reads_a_config_is_in_the_folder_of_its_class(family: str) -> None:
    """Keys that another model's code reads would be ignored."""
    folder = Path(inspect.getfile(transformers.CONFIG_MAPPING[family])).parent
    borrowed = set()
    for file in (*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if (found := re.match(r"\s*from (?:\.\.|\.\.\.models\.)(\w+)\S* import (.+)", line)) is not None:
                borrowed.add((found[1], found[2]))
    # The norm is given sizes, not a config. Siglip is the default of a tower, which the config names.
    known = {("zamba2", "Zamba2RMSNormGated"), ("siglip", "SiglipVisionConfig")}
    assert {pair for pair in borrowed if pair[0] != "auto"} <= known


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"num_attention_heads": 0}),
    ("llama", {"num_key_value_heads": 0}),
    ("llama", {"head_dim": 0}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("mistral", {"sliding_window": 0}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"router_jitter_noise": 0.1}),
    ("mixtral", {"output_router_logits": True}),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}),
    ("ministral", {"sliding_window": None}),
    ("qwen2", {"use_mrope": True}),
    ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 2.0}}),
    ("qwen3_moe", {"decoder_sparse_step": 0}),
    ("qwen3_moe", {"num_experts_per_tok": 1}),
    ("deepseek_v3", {"num_key_value_heads": 2}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"attention_bias": True}),
    ("gemma", {"hidden_act": "relu"}),
    ("gemma", {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}),  # transformers reads the first
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("olmoe", {"clip_qkv": 8.0}),
    ("olmo3", {"rope_parameters": {"sliding_attention": YARN}}),
    ("olmo3", {"rope_parameters": {"sliding_attention": {}, "full_attention": {**YARN, "truncate": False}}}),
    ("deepseek_v3", {"n_group": 8}),
    ("deepseek_v3", {"n_group": 3}),
    ("deepseek_v3", {"num_experts_per_tok": 3}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"n_shared_experts": 0}),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}),
    ("glm4_moe", {"rope_parameters": YARN}),
    ("kimi_linear", {"layer_types": ["linear_attention", "sliding_attention"] * 2}),
    ("kimi_linear", {"linear_head_dim": 0}),
    ("kimi_linear", {"norm_topk_prob": False}),
    ("kimi_linear", {"n_group": 3}),
    ("kimi_linear", {"mla_use_nope": False}),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}),
    ("kimi_linear", {"num_nextn_predict_layers": 1}),
    ("kimi_linear", {"tie_word_embeddings": True}),
    ("kimi_linear", {"attention_bias": True}),
    ("deepseek_v32", {"index_topk": 0}),
    ("deepseek_v32", {"index_n_heads": 2.5}),
    ("deepseek_v32", {"layer_types": ["indexed_attention", "full_attention"] * 2}),
    ("deepseek_v32", {"mlp_bias": True}),
    ("deepseek_v32", {"rope_interleave": False}),
    ("glm_moe_dsa", {"indexer_types": ["full", "full", "none", "full"]}),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full", "full"]}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "hash", "sparse"]}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 4, 2]}),
    ("hunyuan_v1_moe", {"moe_topk": 1}),
    ("afmoe", {"attention_bias": True}),
    ("afmoe", {"num_experts_per_tok": 1}),
    ("mistral4", {"n_group": 2}),
    ("llama4_text", {"num_experts_per_tok": 2}),
    ("llama4_text", {"layer_types": ["full_attention"] * 4}),
    ("llama4_text", {"attention_chunk_size": 0}),
    ("llama4_text", {"floor_scale": 0}),
    (
        "mistral4",
        {
            "rope_parameters": {
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    ("mistral4", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize(
    ("family", "overrides"),
    REFUSED,
)
def test_values_that_megatron_cannot_compute_are_refused(family: str, overrides: dict[str, Any]) -> None:
    with refuses(ValueError, *overrides):
        read(family, **overrides)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_well_known_models_that_are_no_family_are_refused_by_name(name: str) -> None:
    _, nearest = UNSUPPORTED[name]
    if Version(transformers.__version__) >= Version("5.24"):  # older releases lack the newest
        assert name in transformers.CONFIG_MAPPING
    assert nearest in family_names()
    for kind in (name, f"{name}_text"):
        if kind in family_names():  # of a model type with a tower, gemma3
            continue
        with refuses(ValueError, f"{kind!r}"):
            find_family(kind)


def test_the_guide_lists_all_families() -> None:
    guide = Path("docs/guides/hugging-face.md").read_text()
    listed = re.findall("`([a-z0-9_]+)`", "".join(re.findall(r"^\| (`.*?) \|", guide, flags=re.MULTILINE)))
    assert sorted(listed) == sorted(name for name in family_names() if name not in WITH_TOWERS)


def test_a_model_with_another_epsilon_is_no_deepseek() -> None:
    fields = {**read("deepseek_v3"), "layernorm_epsilon": 1e-5}
    with refuses(ValueError, "latent_epsilon=None"):
        find_family("deepseek_v3").write_config(fields)


def test_a_config_is_completed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    asked = []
    monkeypatch.setattr(AutoConfig, "for_model", lambda name, **keys: asked.append(name) or CompleteConfig())
    content = {"model_type": "llama", "asked_for_by": "this test"}
    first, second = (complete_config(find_family("llama"), content) for _ in range(2))
    assert asked == ["llama"]
    first["rope_parameters"]["factor"] = 2
    assert second["rope_parameters"]["factor"] == 1


class CompleteConfig:
    """Stands for a config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return {"rope_parameters": {"factor": 1}}


# ---- models that are published, with the keys that they have

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 2": (
        {"model_type": "llama", "hidden_size": 4096, "pretraining_tp": 1, "rope_scaling": None, "rms_norm_eps": 1e-5},
        {"rotary_base": 10000, "rope_scaling": False, "layernorm_epsilon": 1e-5},
    ),
    "Llama 3.1": (
        {
            "model_type": "llama",
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        {"rotary_base": 500000, "rope_scaling": True, "rope_scaling_factor": 8.0, "num_query_groups": 8},
    ),
    "Mistral 0.1": (
        {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 4096},
        {"window_size": (4095, 0)},
    ),
    "Mixtral": (
        {"model_type": "mixtral", "rope_theta": 1e6, "sliding_window": None, "router_aux_loss_coef": 0.02},
        {"num_moe_experts": 8, "moe_ffn_hidden_size": 14336, "rotary_base": 1000000},
    ),
    "Qwen2.5, stretched": (
        {
            "model_type": "qwen2",
            "rope_theta": 1e6,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "use_mrope": False,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        {"position_embedding_type": "yarn", "window_size": None, "add_qkv_bias": True},
    ),
    "Qwen1.5-MoE": (
        {"model_type": "qwen2_moe", "norm_topk_prob": False, "decoder_sparse_step": 1, "sliding_window": 32768},
        {"moe_router_pre_softmax": True, "moe_shared_expert_gate": True, "num_moe_experts": 60, "window_size": None},
    ),
    "Kimi Linear": (
        {
            "model_type": "kimi_linear",
            "first_k_dense_replace": 1,
            "head_dim": 72,
            "linear_attn_config": {
                "full_attn_layers": [4, 5],
                "kda_layers": [1, 2, 3],
                "head_dim": 64,
                "num_heads": 16,
                "short_conv_kernel_size": 3,
            },
            "mla_use_nope": True,
            "model_max_length": 4096,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "num_experts": 32,
            "num_experts_per_token": 4,
            "num_hidden_layers": 5,
            "num_nextn_predict_layers": 0,
            "num_shared_experts": 2,
            "q_lora_rank": None,
            "rope_theta": 10000.0,
            "topk_group": 1,
            "use_grouped_topk": True,
        },
        {
            "kimi_delta": {
                "linear_attention_freq": [1, 1, 1, 0, 0],
                "linear_num_heads": 16,
                "linear_head_dim": 64,
                "linear_conv_kernel_dim": 3,
            },
            "moe_layer_freq": (False, True, True, True, True),
            "moe_router_topk": 4,
            "moe_shared_expert_intermediate_size": 2048,
            "num_moe_experts": 32,
            "position_embedding_type": "none",
        },
    ),
    "Qwen3-MoE": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "max_window_layers": 48,
            "head_dim": 128,
            "norm_topk_prob": True,
        },
        {"num_moe_experts": 128, "moe_router_pre_softmax": False, "kv_channels": 128, "qk_layernorm": True},
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_method": "noaux_tc",
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        {
            "rope_type": "yarn",
            "rotary_scaling_factor": 40,
            "mscale_all_dim": 1.0,
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_layer_freq": (False,) * 3 + (True,) * 58,
            "mtp_num_layers": 1,
            "moe_router_bias_update_rate": 0.0,
        },
    ),
    "DeepSeek-V3.2": (
        {
            "model_type": "deepseek_v32",
            "ep_size": 1,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
        {
            "indexer": {"indexer_freq": [1] * 61, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
            "moe_layer_freq": (False,) * 3 + (True,) * 58,
            "mtp_num_layers": 1,
            "rope_type": "yarn",
        },
    ),
    "GLM-5.2": (
        {
            "model_type": "glm_moe_dsa",
            "first_k_dense_replace": 3,
            "head_dim": 192,
            "index_share_for_mtp_iteration": True,
            "index_skip_topk_offset": 3,
            "index_topk_freq": 4,
            "indexer_rope_interleave": True,
            "max_position_embeddings": 1048576,
            "moe_router_dtype": "float32",
            "num_hidden_layers": 8,
            "num_nextn_predict_layers": 1,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        },
        {
            "indexer": {
                "indexer_freq": [1, 1, 1, 0, 0, 0, 1, 0],
                "index_topk": 2048,
                "index_n_heads": 32,
                "index_head_dim": 128,
            },
            "qk_head_dim": 192,
            "rotary_base": 8000000,
            "latent_epsilon": 1e-6,
        },
    ),
    "gpt-oss": (
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "num_hidden_layers": 4,
            "output_router_logits": False,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        {
            "softmax_type": "learnable",
            "activation_func_clamp_value": 7.0,
            "window_size": (127, 0),
            "window_attn_skip_freq": (True, False) * 2,
            "rotary_base": 150000,
            "moe_ffn_hidden_size": 2880,
        },
    ),
    "OLMo 3": (
        {
            "model_type": "olmo3",
            "num_hidden_layers": 4,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
        },
        {
            "rotary_base": 500000,
            "window_rotary_base": 500000.0,
            "window_attn_skip_freq": (True, True, True, False),
            "yarn": {
                **YARN_DEFAULTS,
                "rotary_scaling_factor": 8.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
            },
        },
    ),
    "GLM-4.5": (
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
        {
            "rotary_percent": 0.5,
            "kv_channels": 128,
            "moe_router_topk_scaling_factor": 2.5,
            "add_qkv_bias": True,
            "moe_router_num_groups": None,
            "moe_router_enable_expert_bias": True,
        },
    ),
}

# ---- keys of published models that transformers does not read, with the values that they have

UNREAD_KEYS: dict[str, dict[str, Any]] = {
    "phi3": {  # Phi-4-mini
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    "dots1": {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1, "pretraining_tp": 1},
    "gemma2": {"sliding_window_size": 8},
    "solar_open": {"first_k_dense_replace": 0, "use_qk_norm": False},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True, "hidden_dropout": 0.0},
    "afmoe": {"num_expert_groups": 1, "num_limited_groups": 1},
    "cohere2": {"use_parallel_embedding": True},
    "granitemoehybrid": {"normalization_function": "rmsnorm", "init_method": "mup"},
    "nemotron_h": {
        "attention_head_dim": 16,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "time_step_rank": 256,
    },
    "ernie4_5_moe": {
        "moe_gate": "topk",
        "moe_use_aux_free": True,
        "moe_capacity": [64, 64, 64],
        "num_nextn_predict_layers": 1,
    },
    "exaone_moe": {
        "first_last_k_dense_replace": 1,
        "is_moe_layer": [False, True, False, True],
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "hunyuan_v1_dense": {"mlp_bias": False, "add_classification_head": False, "num_experts": 1},
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},  # Qwen3-Coder
    "qwen3_5_text": {"mlp_only_layers": []},
}


@pytest.mark.parametrize("family", UNREAD_KEYS)
def test_keys_of_published_models_that_transformers_does_not_read_are_accepted(family: str) -> None:
    assert read(family, **UNREAD_KEYS[family]) == read(family)


@pytest.mark.parametrize("family", [*UNREAD_KEYS, "llama"])
def test_transformers_computes_the_same_without_the_keys_that_are_ignored(family: str, tmp_path: Path) -> None:
    strange = {**UNREAD_KEYS.get(family, {}), "logit_softcapping": 30.0, "rope_interleaved": True, "head_norm": True}
    folder = shutil.copytree(tiny_folder(family), tmp_path / "model")
    tokens = torch.arange(24)[None] % 50
    logits = []
    for keys in ({}, strange):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**keys, **content}))
        with torch.no_grad():
            model = auto_model().from_pretrained(folder, attn_implementation="eager").eval()
            logits.append(model(tokens, use_cache=False).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "finetuned", True),  # YaRN Llama 2
        ("qwen3", "attn_factor", 0.8782488562869419),  # DeepSeek-R1-0528-Qwen3-8B
    ],
)
def test_keys_of_positions_that_transformers_does_not_read_are_ignored(
    family: str, key: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _unread_by_transformers.cache_clear()
    folder, tokens = shutil.copytree(tiny_folder(family), tmp_path / "model"), torch.arange(24)[None]
    logits, fields = [], []
    for more in ({}, {key: value}):
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4, **more}
        content = {**json.loads((folder / "config.json").read_text()), "rope_parameters": rope}
        (folder / "config.json").write_text(json.dumps(content))
        known = find_family(family)
        fields.append(known.read_config(complete_config(known, content)))
        with torch.no_grad():
            logits.append(auto_model().from_pretrained(folder).eval()(tokens).logits)
    assert fields[0] == fields[1]
    assert torch.equal(*logits)
    assert f"rope_parameters.{key}" in caplog.text
    with refuses(ValueError, "low_freq_factor"):  # which it reads for another type
        read(family, rope_parameters={"rope_type": "linear", "factor": 4.0, "low_freq_factor": 1.0})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma2", "sliding_window_size", 16),
        ("nemotron_h", "attention_head_dim", 8),
        ("phi3", "attention_bias", True),
        ("apertus", "post_norm", True),
        ("exaone_moe", "is_moe_layer", [True] * 4),
        ("exaone_moe", "first_last_k_dense_replace", 2),
    ],
)
def test_such_keys_with_another_meaning_are_refused(family: str, key: str, value: Any) -> None:
    with refuses(ValueError, key):
        read(family, **{key: value})


@pytest.mark.parametrize("family", ["ernie4_5_moe", "exaone_moe"])
def test_multi_token_weights_that_transformers_does_not_read_are_left_out(family: str, tmp_path: Path) -> None:
    import safetensors.torch

    whole = safetensors.torch.load_file(tiny_folder(family) / "model.safetensors")
    model = getattr(transformers, find_family(family).architecture)
    [pattern] = model._keys_to_ignore_on_load_unexpected
    more = ("block.0.mlp.weight", "emb_norm.0.weight", "hidden_norm.0.weight", "linear_proj.0.weight")
    names = ["mtp.fc.weight"] if family == "exaone_moe" else [f"model.mtp_{name}" for name in more]
    assert all(re.search(pattern, name) for name in names)
    safetensors.torch.save_file({**whole, **{name: torch.zeros(2) for name in names}}, tmp_path / "model.safetensors")
    assert SafetensorsFolder(str(tmp_path), find_family(family).unread).shapes.keys() == whole.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_published_models_are_read(name: str) -> None:
    content, wanted = PUBLISHED[name]
    generated = {"torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True, "auto_map": {"A": "b"}}
    generated |= {"gradient_checkpointing": False}  # of a program that trained it
    family = find_family(content["model_type"])
    fields = complete_fields(family.read_config(complete_config(family, copy.deepcopy({**generated, **content}))))
    assert {key: fields[key] for key in wanted} == wanted


# ---- what a model is, and how it is trained

SAID_BY_A_FAMILY = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "mtp_num_layers",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "normalization",
    "qk_layernorm",
    "window_size",
    "window_attn_skip_freq",
    "num_moe_experts",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "softmax_type",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "moe_latent_size",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
]
"""Fields that have a place in the config of one family or another."""

SAID_BY_NONE = [
    "softmax_scale",
    "apply_residual_connection_post_layernorm",
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
    "qk_l2_norm",
    "attention_output_gate",
    "no_rope_freq",
    "moe_router_load_balancing_type",
    "moe_router_topk_limited_devices",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_apply_probs_on_input",
    "moe_token_dropping",
    "mtp_use_repeated_layer",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "experimental_attention_variant",
    "experimental_attention_variant_loss_scale_func",
]
"""Fields that change what a model computes and that a config cannot express."""

OF_OTHER_MODELS = (
    "dsa_",
    "enable_mhc",
    "mhc_",
    "linear_",
    "mamba_",
    "mup_",
    "use_mamba",
    "use_mup",
    "mrope",
    "heterogeneous",
    "_",
)


def test_every_field_is_known_to_say_what_a_model_is_or_how_it_is_trained() -> None:
    elsewhere = {
        *field_homes._STRATEGY_FIELDS,
        *field_homes._PRECISION_FIELDS,
        *field_homes._SCHEDULE_FIELDS,
    }
    known = elsewhere | TRAINING_ONLY | {*SAID_BY_A_FAMILY, *SAID_BY_NONE, *NOT_OF_A_GPT}
    names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert {name for name in names - known if not name.startswith(OF_OTHER_MODELS)} == set()
    assert not TRAINING_ONLY & {*SAID_BY_A_FAMILY, *SAID_BY_NONE}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_another_is_not_written(family: str) -> None:
    fields = read(family)
    for name, value in {
        "layernorm_zero_centered_gamma": True,
        "softmax_scale": 0.5,
        "rotary_interleaved": True,
    }.items():
        with pytest.raises(
            ValueError, match=rf"not one of '{family}': {name}={value} cannot be expressed in its config"
        ):
            find_family(family).write_config({**fields, name: value})
    with pytest.raises(ValueError, match=r"position_embedding_type|learned_absolute"):
        find_family(family).write_config({**fields, "position_embedding_type": "learned_absolute"})


@pytest.mark.parametrize("family", FAMILIES)
def test_how_a_model_was_trained_has_no_say_in_its_config(family: str) -> None:
    fields = read(family)
    trained = {
        "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_bias_update_rate": 0.001,
        "moe_expert_capacity_factor": 1.0,
        "recompute_granularity": "full",
        "hidden_dropout": 0.1,
        "mtp_loss_scaling_factor": 0.3,
    }
    plain = find_family(family).write_config(fields)
    assert find_family(family).write_config(complete_fields({**fields, **trained})) == plain
    for kind in ("sinkhorn", "quantile_balancing"):
        with refuses(ValueError, kind):
            find_family(family).write_config(complete_fields({**fields, "moe_router_load_balancing_type": kind}))


def test_what_can_be_said_in_several_ways_is_said_in_one() -> None:
    some = read("qwen2_moe")
    assert complete_fields({**some, "moe_layer_freq": [1, 1, 0, 1]}) == some
    every = read("qwen2_moe", mlp_only_layers=[1, 3])
    assert complete_fields({**every, "moe_layer_freq": 2}) == every
    assert complete_fields({**read("qwen3_moe"), "moe_layer_freq": [1] * 4}) == read("qwen3_moe")
    windows = read("qwen3", **VARIANTS["qwen3, windows"][1])
    assert complete_fields({**windows, "window_attn_skip_freq": [0, 1, 0, 1]}) == windows
    assert complete_fields({**read("mistral"), "window_attn_skip_freq": [1] * 4}) == read("mistral")
    assert complete_fields({**read("llama"), "window_attn_skip_freq": 2}) == read("llama")
    assert complete_fields({**read("llama"), "activation_func": "torch.nn.functional.silu"}) == read("llama")
    stretched = read("qwen2", rope_parameters=YARN)
    assert (
        complete_fields({**stretched, "yarn": {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 32}})
        == stretched
    )


# ---- weights


@pytest.mark.parametrize("family", MULTI_TOKEN)
def test_the_bias_of_a_router_stays_in_fp32_and_repeated_tensors_are_known(family: str) -> None:
    fields = read(family, num_nextn_predict_layers=1)
    tensors = {
        "embedding.word_embeddings.weight": (128, 32),
        "output_layer.weight": (128, 32),
        "decoder.layers.1.mlp.router.expert_bias": (4,),
        "decoder.layers.1.mlp.router.weight": (4, 32),
        "mtp.layers.0.eh_proj.weight": (32, 64),
        "mtp.layers.0.transformer_layer.mlp.router.expert_bias": (4,),
    }
    weights = WeightMap(find_family(family), fields, {name: torch.Size(shape) for name, shape in tensors.items()})
    assert weights.in_fp32 == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 4)}
    assert weights.repeated == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }
    assert weights.shapes["model.layers.4.embed_tokens.weight"] == (101, 32)
    assert weights.shapes["model.layers.4.eh_proj.weight"] == (32, 64)
