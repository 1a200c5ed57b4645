# SPDX-License-Identifier: Apache-2.0
"""What gated delta nets, Kimi delta attention and Mamba 2 have in common: where they may be, and what is refused."""

from typing import Any

import pytest
import torch

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.config.architecture import Architecture
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.delta_net import GatedDeltaNet
from lightning_mcore.layers.kimi_delta import KimiDeltaAttention
from lightning_mcore.layers.mamba import Mamba2
from lightning_mcore.planning.model import backend_of
from tests.support import tiny
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process

DELTA_NET: dict[str, Any] = dict(tiny.DELTA_NET)
KIMI_DELTA: dict[str, Any] = dict(tiny.KIMI_DELTA)
MAMBA: dict[str, Any] = dict(tiny.MAMBA)
HYBRID: dict[str, Any] = {"layer_pattern": "[M-][*-]", "mamba": MAMBA}
OTHER_LAYERS: dict[str, Any] = {**HYBRID, "layer_pattern": "[M-][*E]"}

ARCHITECTURES: dict[type, dict[str, Any]] = {
    GatedDeltaNet: {"delta_net": DELTA_NET},
    KimiDeltaAttention: {"kimi_delta": KIMI_DELTA},
    Mamba2: HYBRID,
}
of_each_kind = pytest.mark.parametrize("kind", ARCHITECTURES)


def gpt(architecture: dict[str, Any], **transformer: Any) -> MCoreGPT:
    """Return a model of two layers, one of which is recurrent."""
    fields = {**tiny.TRANSFORMER, "activation_func": "silu", "num_layers": 2, **transformer}
    return MCoreGPT(vocab_size=50, seq_length=16, transformer=fields, architecture=architecture)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"delta_net": [1, 0]}, "delta_net"),
        ({"delta_net": {**DELTA_NET, "more": 1}}, "delta_net"),
        ({"delta_net": {**DELTA_NET, "linear_attention_freq": [2, 0]}}, "delta_net"),
        ({"delta_net": {**DELTA_NET, "linear_key_head_dim": 0}}, "delta_net"),
        ({"delta_net": {**DELTA_NET, "linear_num_value_heads": 6}}, "delta_net"),
        ({"kimi_delta": [1, 0]}, "kimi_delta"),
        ({"kimi_delta": {**KIMI_DELTA, "more": 1}}, "kimi_delta"),
        ({"kimi_delta": {**KIMI_DELTA, "linear_attention_freq": [2, 0]}}, "kimi_delta"),
        ({"kimi_delta": {**KIMI_DELTA, "linear_head_dim": 0}}, "kimi_delta"),
        ({"layer_pattern": "M-G"}, "the setting delta_net"),
        ({"layer_pattern": "M+"}, "choose from M, *, - and E"),
        ({"layer_pattern": "MD"}, "choose from M, *, - and E"),
        ({"layer_pattern": "M-|*-"}, "pipeline_model_parallel_layout"),
        ({"layer_pattern": "M-/*-"}, "multi-token prediction"),
        ({"layer_pattern": "[M]-"}, "is not a pattern"),
        ({"layer_pattern": "[-M]"}, "is not a pattern"),
        ({"layer_pattern": ""}, "is not a pattern"),
        ({"layer_pattern": ["M", "*"]}, "give a text"),
        ({"mamba": [8]}, "give a dict with mamba_num_heads"),
        ({"mamba": {**MAMBA, "more": 1}}, "give a dict with mamba_num_heads"),
        ({"mamba": {**MAMBA, "mamba_state_dim": 0}}, "a whole number above 0"),
        ({"mamba": {**MAMBA, "mamba_num_groups": 3}}, "not a multiple of mamba_num_groups=3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with refuses(ValueError, said):
        Architecture.of(given)


@pytest.mark.parametrize(
    ("architecture", "transformer", "said"),
    [
        ({"delta_net": DELTA_NET}, {"num_layers": 3}, "num_layers"),
        ({"delta_net": DELTA_NET}, {"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"kimi_delta": KIMI_DELTA}, {"num_layers": 3}, "num_layers"),
        ({"kimi_delta": KIMI_DELTA}, {"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"kimi_delta": KIMI_DELTA, "delta_net": DELTA_NET}, {}, "delta_net"),
        ({"kimi_delta": KIMI_DELTA, "layer_pattern": "[*-][*-]"}, {}, "layer_pattern"),
        (HYBRID, {"num_layers": 3}, "has 2 layers, and the model has num_layers=3"),
        (HYBRID, {"mtp_num_layers": 1}, "mtp_num_layers=1"),
        (OTHER_LAYERS, {}, "moe_layer_freq=[0, 1], and num_moe_experts"),
        (OTHER_LAYERS, {**tiny.EXPERTS, "moe_layer_freq": [1, 0]}, "moe_layer_freq=[0, 1]"),
        (HYBRID, tiny.EXPERTS, "set num_moe_experts=None"),
        ({"layer_pattern": "[M-][*-]"}, {}, "give mamba's sizes if and only if"),
        ({"layer_pattern": "*-", "mamba": MAMBA}, {}, "give mamba's sizes if and only if"),
        ({"mamba": MAMBA}, {}, "give mamba's sizes if and only if"),
        ({**HYBRID, "layer_norms": "after"}, {}, "layer_norms='after'"),
        ({**HYBRID, "delta_net": DELTA_NET}, {}, "delta_net"),
        (HYBRID, {"multi_latent_attention": True}, "multi_latent_attention=True"),
        (HYBRID, {"is_hybrid_model": True}, "is_hybrid_model=True is for models other than a GPT"),
    ],
)
def test_models_that_cannot_have_them_are_refused(
    architecture: dict[str, Any], transformer: dict[str, Any], said: str
) -> None:
    with refuses(ValueError, said), single_process():
        gpt(architecture, **transformer).configure_model()


@of_each_kind
def test_they_are_layers_of_the_torch_backend_also_on_gpus(kind: type) -> None:
    given = ARCHITECTURES[kind]
    assert backend_of({"architecture": given}, "cuda") == "local"
    assert backend_of({"architecture": {"residual_scale": 2.0}}, "cuda") == "transformer_engine"
    with refuses(ValueError, *(f"{name}=" for name in given)):
        Architecture.of(given).check_transformer_engine()


@pytest.mark.parametrize(
    ("kind", "tp", "cp"),
    [
        *((kind, *sizes) for kind in (GatedDeltaNet, KimiDeltaAttention) for sizes in ((2, 4), (8, 1), (1, 3))),
        *((Mamba2, *sizes) for sizes in ((16, 1), (4, 4), (1, 3))),
    ],
)
def test_layouts_that_cannot_share_the_heads_are_refused(kind: type, tp: int, cp: int) -> None:
    layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
    with refuses(ValueError, f"context_parallel_size={tp * cp}"):
        layout.validate_model(gpt(ARCHITECTURES[kind], num_attention_heads=16, num_query_groups=16).model_shape())


@of_each_kind
def test_a_mask_of_scores_and_a_cache_of_keys_are_refused(kind: type) -> None:
    with single_process():
        module = gpt(ARCHITECTURES[kind])
        module.configure_model()
        layer = next(layer for layer in module.modules() if type(layer) is kind)
        with refuses(ValueError, "cannot store the memory"):
            layer(torch.zeros(16, 1, 32), inference_context=object())
        with refuses(ValueError, "has no scores that attention_mask could mask"):
            layer(torch.zeros(16, 1, 32), torch.zeros(1, 1, 16, 16, dtype=torch.bool))
