# SPDX-License-Identifier: Apache-2.0
"""Random tiny models of every family: their logits against those of transformers, on one rank.

``python -m tests.random_models --count 700`` draws that many, as many of each family as of the others, and prints those
that differ; ``--family`` chooses one, ``--seed`` the first draw. A draw that a family refuses is drawn again.
"""

import argparse
import copy
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.hf import find_family
from lightning_mcore.hf.family import split_fields
from lightning_mcore.hf.source import complete_config
from tests.support.hf_models import (
    CONFIGS,
    UNKNOWN_TO_TRANSFORMERS,
    VOCAB_SIZE,
    auto_model,
    config_content,
    save_tiny,
    tiny_config,
)

LENGTH = 24
# Measured: at most 3.1e-5 with delta nets (kimi_linear --seed 11 on one CPU, 2.2e-5 on another). What heads of 4
# channels read from their memories nearly cancels, to 5e-6 in one draw, and a norm divides by it: noise of 3e-7 in the
# input of that layer becomes up to 5e-5 in its output, also in fp64. With the same inputs, reads are within 8e-8 of
# fp64 here, and within 4e-7 in transformers.
TOLERANCE = 3e-5
CONSOLE = Console(soft_wrap=True, markup=False, highlight=False)

_SWITCH, _EXPERTS, _CAP = (False, True), (4, 8), (None, 2.0)
CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias"), _SWITCH),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "use_qk_norm", "norm_topk_prob"), _SWITCH),
    **dict.fromkeys(("mup_enabled", "attn_temperature_tuning"), _SWITCH),
    "attention_chunk_size": (None, 5, 8, 40),
    "attn_scale": (0.1, 0.5),
    "floor_scale": (1, 4, 40),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), (2, 3)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (0.5, 1.0, 3.0)),
    **dict.fromkeys(("attention_multiplier", "logit_scale"), (0.0625, 0.25)),
    "layer_norm_eps": (1e-5, 1e-2),
    "decoder_sparse_step": (1, 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), (0, 1, 2)),
    "head_dim": (8, 16),
    "index_head_dim": (8, 12),
    "index_n_heads": (1, 3),
    "index_topk": (24, 40),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "shared_intermediate_size"), (20, 36, 48)),
    "kv_lora_rank": (8, 20),
    "linear_conv_kernel_dim": (2, 3, 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim"), (4, 8)),
    "linear_num_heads": (2, 4),
    "linear_num_key_heads": (2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_value_head_dim": (6, 8),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), (2, 3, 4)),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), (8, 12)),
    "mamba_head_dim": (4, 6),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), (1, 2, 4)),
    "mamba_num_heads": (4, 8),
    "position_embedding_type": (None, "rope"),
    "max_position_embeddings": (16, 64, 128),
    "moe_intermediate_size": (8, 16),
    "moe_layer_end_index": (-1, 1, 2),
    "moe_layer_interval": (1, 2),
    "moe_layer_start_index": (0, 1),
    "moe_num_shared_experts": (0, 1, 2),
    "n_group": (1, 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), (1, 2)),
    "num_hidden_layers": (1, 2, 3, 5),
    "q_lora_rank": (None, 8, 12),
    "qk_nope_head_dim": (4, 8),
    "qk_rope_head_dim": (4, 8),
    "query_pre_attn_scalar": (8, 16, 24),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2),
    **dict.fromkeys(("routed_scaling_factor", "route_scale"), (1.0, 2.5)),
    "shared_expert_intermediate_size": (8, 24),
    "sliding_window": (1, 5, 40),
    "swiglu_limit": (0.5, 7.0),
    "v_head_dim": (4, 6),
}
"""Values of keys, for the families that have them."""

FIXED: dict[str, tuple[str, ...]] = {
    "layers_block_type": ("attention_bias", "mlp_bias", "use_bias", "sliding_window"),
    "index_topk": ("attention_bias", "mlp_bias", "layer_types"),
    "moe_layers": ("layer_types", "num_experts_per_tok"),
}
"""Keys of which no value but the default is supported, by a key that only families of one kind have."""

STRETCHES: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "default": lambda draw, size: {},
    "linear": lambda draw, size: {"factor": draw.choice((1.5, 4.0))},
    "dynamic": lambda draw, size: {"factor": draw.choice((2.0, 4.0))},
    "llama3": lambda draw, size: {
        "factor": draw.choice((2.0, 8.0)),
        "low_freq_factor": draw.choice((1.0, 2.0)),
        "high_freq_factor": draw.choice((4.0, 8.0)),
        "original_max_position_embeddings": draw.choice((16, 8192)),
    },
    "yarn": lambda draw, size: {
        "factor": draw.choice((2.0, 4.0)),
        "beta_fast": draw.choice((8.0, 32.0)),
        "beta_slow": 1.0,
        "truncate": draw.choice(_SWITCH),
        "original_max_position_embeddings": draw.choice((16, 32)),
    },
    "longrope": lambda draw, size: {
        "short_factor": [1 + draw.random() for _ in range(size // 2)],
        "long_factor": [1 + 4 * draw.random() for _ in range(size // 2)],
        "factor": draw.choice((2.0, 4.0)),
        "original_max_position_embeddings": draw.choice((16, 64)),
    },
}
"""Keys of each kind of rotary positions, for a number of rotated channels."""


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """Return the keys of a random config that the family reads; the same for the same seed."""
    draw, known = random.Random(f"{family} {seed}"), find_family(family)
    while True:
        keys = _draw(family, draw)
        content = copy.deepcopy({**CONFIGS[family], **keys, "model_type": family})
        try:
            module, fields = split_fields(known.read_config(complete_config(known, content)))
            MCoreGPT(**module, seq_length=LENGTH, transformer=fields).check_settings()
        except ValueError:
            continue
        return keys


def _draw(family: str, draw: random.Random) -> dict[str, Any]:
    whole = tiny_config(family).to_dict()
    known = {key for rule in find_family(family).config for key in rule.keys} & whole.keys() | CONFIGS[family].keys()
    keys = {key: draw.choice(values) for key, values in CHOICES.items() if key in known}
    heads, layers = draw.choice((2, 4, 6)), keys.get("num_hidden_layers") or draw.choice(CHOICES["num_hidden_layers"])
    is_latent = "kv_lora_rank" in known
    keys |= {"num_attention_heads": heads, "hidden_size": heads * draw.choice((8, 12))}
    keys["num_key_value_heads"] = heads if is_latent else draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0])
    if is_latent:
        keys.pop("head_dim", None)
    if whole.get("layer_types") and "layer_types" in known:
        other = "linear_attention" if {"linear_conv_kernel_dim", "mamba_d_conv"} & known else "sliding_attention"
        keys["layer_types"] = [draw.choice(("full_attention", other)) for _ in range(layers)]
    if "mamba_n_heads" in known:  # as many channels as mamba_expand says
        keys |= {"mamba_n_heads": 2 * heads, "mamba_d_head": keys["hidden_size"] // heads}
        keys["num_local_experts"] = draw.choice((0, keys["num_local_experts"]))
    if "layers_block_type" in known:
        kinds = ("linear_attention", "full_attention", "mlp", "moe")
        keys["layers_block_type"] = [draw.choice(kinds) for _ in range(layers)]
    keys |= _layers(known, draw, layers)
    fixed = {key for mark, only in FIXED.items() if mark in known for key in only}
    keys = {key: value for key, value in keys.items() if key not in fixed}
    size = keys.get("qk_rope_head_dim") or keys.get("head_dim") or keys["hidden_size"] // heads
    if "rope_parameters" in known:
        keys["rope_parameters"] = _positions(whole["rope_parameters"], draw, size)
    return keys


def _layers(known: set[str], draw: random.Random, layers: int) -> dict[str, Any]:
    """Return the keys that say which layers have experts or positions."""
    keys: dict[str, Any] = {}
    if "mlp_layer_types" in known:
        keys["mlp_layer_types"] = [draw.choice(("dense", "sparse")) for _ in range(layers)]
    if "indexer_types" in known:
        keys["indexer_types"] = ["full", *(draw.choice(("full", "shared")) for _ in range(layers - 1))]
    for name, share in (("mlp_only_layers", 0.3), ("moe_layers", 0.6)):
        if name in known:
            keys[name] = [layer for layer in range(layers) if draw.random() < share]
    if "no_rope_layers" in known:
        keys["no_rope_layers"] = [draw.randint(0, 1) for _ in range(layers)]
    return keys


def _positions(like: dict[str, Any], draw: random.Random, size: int) -> dict[str, Any]:
    if "full_attention" in like:
        window = {"rope_type": "default", "rope_theta": draw.choice((300.0, 1e4))}
        return {"sliding_attention": window, "full_attention": _positions({}, draw, size)}
    if "alpha" in like and draw.random() < 0.5:
        return {**like, "alpha": draw.choice((10.0, 1000.0))}
    share = {"partial_rotary_factor": draw.choice((0.5, 1.0))} if "partial_rotary_factor" in like else {}
    if "llama_4_scaling_beta" in like:
        share = {"llama_4_scaling_beta": draw.choice((0.1, 0.5)), "original_max_position_embeddings": 8}
    kind = draw.choice(list(STRETCHES))
    more = STRETCHES[kind](draw, int(size * share.get("partial_rotary_factor", 1.0)))
    return {"rope_type": kind, "rope_theta": draw.choice((500.0, 1e4, 5e5)), **share, **more}


def difference(family: str, keys: dict[str, Any]) -> float:
    """Return the greatest difference of the logits of a tiny model from those of transformers, both in fp32.

    It is a share of the greatest logit, which may be 30 where a norm follows a delta net.
    """
    from transformers import AutoConfig

    tokens = torch.randint(1, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(len(str(keys))))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        content = config_content(save_tiny(family, folder, **keys))
        known = UNKNOWN_TO_TRANSFORMERS.get(family, family)
        more: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        more["config"] = AutoConfig.for_model(**{**content, "model_type": known})
        expected = auto_model().from_pretrained(folder, **more).eval()(tokens, use_cache=False).logits
        with single_process():
            model = MCoreGPT.from_pretrained(folder, seq_length=LENGTH)
            model.configure_model()
            model.eval()
            logits, _ = model.token_logits({"tokens": tokens, "labels": tokens})
    return float((logits[..., :VOCAB_SIZE] - expected).abs().max() / expected.abs().max())


def differences(draws: list[tuple[str, int]]) -> Iterator[tuple[str, int, float]]:
    """Yield the difference of each draw, a family and a seed."""
    for family, seed in draws:
        yield family, seed, difference(family, draw_config(family, seed))


def main() -> int:
    """Draw, print what differs, and return the number of models that do, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_models", description=__doc__)
    parser.add_argument("--count", type=int, default=700, help="models to draw")
    parser.add_argument("--seed", type=int, default=0, help="the first draw of each family")
    parser.add_argument("--family", help="the only family to draw")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    families = [arguments.family] if arguments.family else list(CONFIGS)
    draws = [(families[n % len(families)], arguments.seed + n // len(families)) for n in range(arguments.count)]
    wrong, worst = 0, 0.0
    for family, seed, found in differences(draws):
        worst = max(worst, found)
        if not found < TOLERANCE:
            wrong += 1
            CONSOLE.print(f"{family} --seed {seed}: {found:.2g} {draw_config(family, seed)}")
    CONSOLE.print(f"{len(draws)} models of {len(families)} families: {wrong} differ, by at most {worst:.2g}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
