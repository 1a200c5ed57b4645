# SPDX-License-Identifier: Apache-2.0
"""Rotary positions against the functions of transformers, and settings of positions that are refused."""

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as factor_of,
)
from megatron.core.models.gpt import GPTModel
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_mcore.config.positions import YARN_DEFAULTS
from lightning_mcore.models.gpt import MCoreGPT
from tests.parity.bare_loop import process_groups
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses

TRANSFORMER: dict[str, Any] = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2}
LENGTH = 12  # positions
HEAD_SIZE = 64

YARN = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"rotary_base": 500}, {"rope_type": "default", "rope_theta": 500.0}),
    "half": ({"rotary_percent": 0.5}, {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "stretched": (
        {"seq_len_interpolation_factor": 4.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama3": (
        {"rope_scaling": True, "rope_scaling_factor": 16.0, "rotary_base": 500000},
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": (
        {"position_embedding_type": "yarn", "yarn": YARN},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    ),
}


def gpt(**arguments: Any) -> MCoreGPT:
    return MCoreGPT(**{"vocab_size": 100, "seq_length": 16, "transformer": TRANSFORMER, **arguments})


@pytest.mark.distributed
@on_ranks(1)
def test_angles_are_those_of_transformers() -> None:
    results = []
    with process_groups(Layout()):
        for arguments, _ in VARIANTS.values():
            module = gpt(**arguments)
            model: GPTModel = module.build_chunk(pre_process=True, post_process=True, vp_stage=None)
            emb = model.rotary_pos_emb(LENGTH)
            emb = emb[0] if isinstance(emb, tuple) else emb
            results.append((emb[:, 0, 0], float(factor_of(module.config))))
    for (name, (_, parameters)), (angles, factor) in zip(VARIANTS.items(), results, strict=True):
        config = LlamaConfig(
            hidden_size=128, num_attention_heads=2, rope_parameters=parameters, max_position_embeddings=1024
        )
        if parameters["rope_type"] == "default":
            width = int(HEAD_SIZE * parameters.get("partial_rotary_factor", 1.0))
            frequencies = parameters["rope_theta"] ** -(torch.arange(0, width, 2) / width)
            wanted_factor = 1.0
        else:
            frequencies, wanted_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        wanted = torch.arange(LENGTH)[:, None] * torch.cat((frequencies, frequencies))[None]
        assert factor == pytest.approx(wanted_factor), name
        torch.testing.assert_close(angles, wanted, msg=name)


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_embedding_type": "mrope"},
        {"position_embedding_type": "none", "rotary_percent": 0.5},
        {"position_embedding_type": "learned_absolute", "rope_scaling": True},
        {"position_embedding_type": "yarn", "yarn": YARN, "rotary_percent": 0.5},
        {"seq_len_interpolation_factor": 0.5},
        {"rotary_base": float("inf")},
        {"rope_scaling_factor": 0},
        {"rotary_percent": 2},
        {"transformer": {**TRANSFORMER, 5: 1}},
        {"yarn": YARN},
        {"position_embedding_type": "yarn"},
        {"position_embedding_type": "yarn", "yarn": {**YARN, "beta": 1}},
        {"position_embedding_type": "yarn", "yarn": dict(YARN_DEFAULTS)},
        {"position_embedding_type": "yarn", "yarn": YARN}
        | {"transformer": {**TRANSFORMER, "rotary_interleaved": True}},
        {"rope_scaling": True, "transformer": {**TRANSFORMER, "multi_latent_attention": True}},
        {"position_embedding_type": "yarn", "transformer": {**TRANSFORMER, "multi_latent_attention": True}},
    ],
)
def test_settings_that_megatron_would_ignore_are_refused(arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        gpt(**arguments)
