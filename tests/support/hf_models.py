# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face models of every family, made by transformers on the spot.

:func:`save_tiny` writes the folder of one (``config.json``, ``generation_config.json``, safetensors);
:func:`tiny_folder` has one written once for a whole run of tests. Every tensor is
drawn from its name on the disk, so that two runs make the same model, and none has the value that transformers starts
with: a norm of ones or a bias of zeros could be swapped for another one without anybody seeing it. The vocabulary is a
prime, so that every padded size differs from it.

Only the process that calls this imports transformers; ranks read the folders.
"""

import copy
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB_SIZE = 101

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # far from any default, so that every norm shows that it has it
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,  # no other is supported
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""Rotary positions as in YaRN, for any family."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "rope_parameters": _LLAMA3},
    "mistral": {**_SIZES, "sliding_window": 8},
    "mixtral": {**_SIZES, "num_local_experts": 4},
    "qwen2": {**_SIZES, "tie_word_embeddings": True},
    "qwen2_moe": {
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [2],
    },
    "qwen3": {**_SIZES, "head_dim": 16},
    "qwen3_moe": {
        **_SIZES,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {**_SIZES, **_GROUPED, **_LATENT, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "glm4_moe": {
        **_SIZES,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
}
"""A config of each of the first nine families, by ``model_type``."""

_OF_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(\w+)\.weight")

FAMILIES = tuple(CONFIGS)

DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 12, "mamba_d_conv": 3}
_SIGMOID = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_LAYERS = ["full_attention", "sliding_attention"] * 2

MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_k2": {
        **_SIZES,
        **_GROUPED,
        **_LATENT,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.827,
    },
    "ministral": {**_SIZES, "head_dim": 16, "sliding_window": 8, "layer_types": _LAYERS},
    "smollm3": {**_SIZES, "no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True},
    "seed_oss": {**_SIZES, "head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "phi3": {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "glm": {**_SIZES, "head_dim": 16},
    "ernie4_5": {**_SIZES, "head_dim": 16},
    "dots1": {
        **_SIZES,
        **_SIGMOID,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window": 8,
        "layer_types": _LAYERS,
    },
    "granite": {
        **_SIZES,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "granitemoe": {
        **_SIZES,
        "num_local_experts": 4,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
    },
    "olmo2": _SIZES,
    "olmo3": {
        **_SIZES,
        "sliding_window": 8,
        "layer_types": _LAYERS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": YARN,
        },
    },
    "exaone4": {**_SIZES, "sliding_window": 8, "layer_types": _LAYERS},
    "glm4": {**_SIZES, "head_dim": 16},
    "gemma": {**_SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {
        **_SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": _LAYERS,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_SIZES,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": _LAYERS,
        "tie_word_embeddings": True,
    },
    "arcee": {**_SIZES, "hidden_act": "relu2", "head_dim": 8},
    "olmoe": {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {
        **_SIZES,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 10.0, "factor": 1.0},
    },
    "minimax_m2": {
        **_SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        **_SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": _LAYERS,
        "swiglu_limit": 0.5,  # which many values exceed
        "rope_parameters": {**YARN, "factor": 8.0, "truncate": False},
    },
    "ministral3": {
        **_SIZES,
        "head_dim": 16,
        "sliding_window": 20,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    "ernie4_5_moe": {
        **_SIZES,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    "qwen3_next": {
        **_SIZES,
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [2],
    },
    "qwen3_5_text": {**_SIZES, **DELTA_NET},
    "qwen3_5_moe_text": {
        **_SIZES,
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "granitemoehybrid": {
        **_SIZES,
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
    },
    "nemotron_h": {
        **{key: value for key, value in _SIZES.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
        **_GROUPED,
        "layer_norm_epsilon": 1e-3,
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 12,
        "conv_kernel": 3,
    },
    "glm4_moe_lite": {
        **_SIZES,
        **_GROUPED,
        **_LATENT,
        "rms_norm_eps": 1e-3,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "num_nextn_predict_layers": 0,
    },
    "kimi_linear": {
        **_SIZES,
        **_LATENT,
        "rms_norm_eps": 1e-3,
        "q_lora_rank": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 6,
        "linear_conv_kernel_dim": 3,
    },
    "deepseek_v32": {
        **_SIZES,
        **_GROUPED,
        **_LATENT,
        "rms_norm_eps": 1e-3,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "index_topk": 48,
        "index_n_heads": 3,
        "index_head_dim": 10,
    },
    "glm_moe_dsa": {
        **_SIZES,
        **_LATENT,
        **_SIGMOID,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full", "shared"],
        "index_topk": 56,
        "index_n_heads": 2,
        "index_head_dim": 6,
    },
    "solar_open": {**_SIZES, **_SIGMOID, "head_dim": 16, "attention_bias": True, "routed_scaling_factor": 2.5},
    "exaone_moe": {
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_shared_experts": 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "sliding_window": 8,
        "layer_types": _LAYERS,
    },
    "hunyuan_v1_moe": {
        **_SIZES,
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 10.0, "factor": 1.0},
    },
    "afmoe": {
        **_SIZES,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 2.5,
        "mup_enabled": True,
        "sliding_window": 8,
        "layer_types": _LAYERS,
    },
    "cohere2": {
        **{key: value for key, value in _SIZES.items() if key != "rms_norm_eps"},
        "layer_norm_eps": 1e-3,
        "logit_scale": 0.25,
        "sliding_window": 8,
        "layer_types": _LAYERS,
    },
    "llama4_text": {
        **_SIZES,
        "head_dim": 16,
        "intermediate_size": 20,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 16},
    },
    "apertus": {**_SIZES, "hidden_act": "xielu", "attention_bias": True},
    "mistral4": {
        **_SIZES,
        **_LATENT,
        "rms_norm_eps": 1e-3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
"""The same of the families after them."""

MORE_FAMILIES = tuple(MORE_CONFIGS)
CONFIGS |= MORE_CONFIGS

UNKNOWN_TO_TRANSFORMERS = {"kimi_k2": "deepseek_v3"}
"""Families that transformers reads as another one."""

MULTI_TOKEN = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
"""Families that may have layers for multi-token prediction: ``save_tiny(..., num_nextn_predict_layers=1)``."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, plain": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama, stretched evenly": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama, tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, rows of 128": ("llama", {"hidden_size": 128, "intermediate_size": 128}),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid, no Mamba": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 4, "mamba_expand": 1, "mamba_n_heads": 1, "mamba_d_head": 32},
    ),
    "nemotron_h, latent experts": ("nemotron_h", {"moe_latent_size": 20}),
    "llama4_text, dense": (
        "llama4_text",
        {
            "moe_layers": [],
            "use_qk_norm": False,
            "attention_bias": True,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 1, 1, 1],  # without rotation, a key's bias changes nothing
            "attn_temperature_tuning": False,
            "rope_parameters": {**_LLAMA3, "high_freq_factor": 1.0, "original_max_position_embeddings": 16},
        },
    ),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "olmo2, one key head": ("olmo2", {"num_key_value_heads": 1}),
    "minimax_m2, one key head": ("minimax_m2", {"num_key_value_heads": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral, window": ("mixtral", {"sliding_window": 8}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen2, YaRN": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_moe, normalised, windows": (
        "qwen2_moe",
        {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen2_moe, every second, no bias": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "qkv_bias": False},
    ),
    "qwen3, windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "qwen3, tied, YaRN": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe, not normalised": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0, 3]}),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "deepseek_v3, one query projection": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v3, YaRN": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "n_shared_experts": 2},
    ),
    "deepseek_v3, multi-token": ("deepseek_v3", {"num_nextn_predict_layers": 1}),
    "glm4_moe, no bias, no norm": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 3, "tie_word_embeddings": True},
    ),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, other constants": (
        "llama",
        {"rope_parameters": {**_LLAMA3, "high_freq_factor": 8.0, "original_max_position_embeddings": 32}},
    ),
    "llama, stretched with the length": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.5],
                "original_max_position_embeddings": 16,
                "attention_factor": 1.25,
            },
        },
    ),
    "deepseek_v3, another epsilon": ("deepseek_v3", {"rms_norm_eps": 1e-3}),
    "glm4_moe, multi-token": ("glm4_moe", {"num_nextn_predict_layers": 1}),
}
"""What else a family may be: its name and what its config has instead."""


def tiny_config(family: str, **overrides: Any) -> "PreTrainedConfig":
    """Return the config of a tiny model.

    Args:
        family: Its ``model_type``.
        overrides: Keys to have instead of those in ``CONFIGS``.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(
        UNKNOWN_TO_TRANSFORMERS.get(family, family), **copy.deepcopy({**CONFIGS[family], **overrides})
    )  # it changes what it is given


def auto_model() -> Any:
    """Return ``AutoModelForCausalLM``, which then knows Mistral 4 too; transformers maps only the one with a tower."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return AutoModelForCausalLM


def config_content(folder: str | Path) -> dict[str, Any]:
    """Return the content of a ``config.json``, where transformers writes infinity as an object."""
    from transformers import PreTrainedConfig

    found: dict[str, Any] = PreTrainedConfig._dict_from_json_file(Path(folder, "config.json"))
    return found


def save_tiny(
    family: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "5GB",
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a tiny model as transformers would, and return its folder.

    Args:
        family: Its ``model_type``.
        folder: Where; made if it is not there.
        dtype: Of its weights.
        max_shard_size: Of a file; ``"50KB"`` makes several.
        tokenizer: Whether to write a tokenizer too, whose words are ``w0`` to ``w100``.
        overrides: Keys to have instead of those in ``CONFIGS``. ``num_nextn_predict_layers=1`` adds the tensors of
            a layer for multi-token prediction, which transformers itself would not write.
    """
    from huggingface_hub import save_torch_state_dict

    where = Path(folder)
    config = tiny_config(family, **overrides)
    extra = getattr(config, "num_nextn_predict_layers", 0) if family in MULTI_TOKEN else 0
    config.num_hidden_layers += extra
    lists = [key for key in ("mlp_layer_types", "layer_types") if extra and getattr(config, key, None)]
    for key in lists:
        setattr(config, key, [*getattr(config, key), *getattr(config, key)[-1:] * extra])
    model = auto_model().from_config(config, dtype=dtype)
    model.save_pretrained(where)
    tensors = {published_name(name): tensor for name, tensor in read_tensors(where)}
    tensors = {name: draw_tensor(name, tensor) for name, tensor in tensors.items()}
    if "linear_num_key_heads" in CONFIGS[family]:  # norms have their weights minus 1, but not those behind a memory
        norms = [name for name in tensors if "norm" in name and "linear_attn" not in name]
        tensors |= {name: tensors[name] - 1 for name in norms}
    if extra:
        tensors |= _multi_token_tensors(tensors, config.num_hidden_layers - extra, extra)
        content = json.loads((where / "config.json").read_text())
        content["num_hidden_layers"] -= extra
        content |= {key: content[key][:-extra] for key in lists}
        (where / "config.json").write_text(json.dumps(content, indent=2))
    if family in UNKNOWN_TO_TRANSFORMERS:
        content = json.loads((where / "config.json").read_text())
        (where / "config.json").write_text(json.dumps({**content, "model_type": family}, indent=2))
    (where / "model.safetensors").unlink()
    save_torch_state_dict(tensors, where, max_shard_size=max_shard_size)
    if tokenizer:
        _save_tokenizer(where)
    return where


def published_name(name: str) -> str:
    """Return the name on the hub of a tensor that transformers writes: the MLP of a layer of Kimi without experts."""
    return re.sub(r"\bblock_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name)


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model with their names, file by file."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                yield name, file.get_tensor(name)


@functools.cache
def tiny_folder(name: str) -> Path:
    """Return the folder of one of ``VARIANTS``, or of the plain model of a family, made once for all tests.

    Args:
        name: Of the variant, or a ``model_type``.
    """
    family, overrides = VARIANTS.get(name, (name, {}))
    return save_tiny(family, Path(_root().name) / re.sub(r"\W+", "-", name), **overrides)


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hf_models_")  # removed when this process ends


def draw_tensor(name: str, like: Tensor) -> Tensor:
    """Return values that depend on the name alone: around 1 for norms, such that nothing grows for matrices."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    if like.dim() > 1:
        noise /= 2.0 if "embed_tokens" in name else like.size(-1) ** 0.5
    elif "norm" in name:
        noise = 1 + 0.2 * noise
    else:
        noise *= 0.2
    return noise.to(like.dtype)


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with one for all experts of a layer, as the hub has those of Qwen3.5, instead of one for each."""
    found = {name: _OF_EXPERT.fullmatch(name) for name in tensors}
    whole = {name: tensor for name, tensor in tensors.items() if not found[name]}
    for prefix in dict.fromkeys(match[1] for match in found.values() if match):
        count = sum(match is not None and match[1] == prefix and match[2] == "up_proj" for match in found.values())
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{expert}.{part}.weight"] for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        whole |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return whole


def _multi_token_tensors(tensors: dict[str, Tensor], first: int, count: int) -> dict[str, Tensor]:
    """Return what such layers have beside an ordinary layer, under the names of DeepSeek's and GLM's checkpoints."""
    hidden = tensors["model.norm.weight"]
    wide = hidden.new_empty(len(hidden), 2 * len(hidden))
    found = {}
    for layer in range(first, first + count):
        prefix = f"model.layers.{layer}."
        for name, like in {"enorm": hidden, "hnorm": hidden, "shared_head.norm": hidden, "eh_proj": wide}.items():
            found[f"{prefix}{name}.weight"] = draw_tensor(f"{prefix}{name}.weight", like)
        found[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        found[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return found


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w0"
    ).save_pretrained(folder)
