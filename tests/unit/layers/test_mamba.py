# SPDX-License-Identifier: Apache-2.0
"""The memory of a Mamba 2 layer in chunks equals the memory token by token; patterns and sizes are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.config.architecture import Architecture, pattern_layers
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.mamba import Mamba2, scan_by_kernel, state_space
from lightning_mcore.planning.model import backend_of
from tests.support import tiny
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process

MAMBA: dict[str, Any] = dict(tiny.MAMBA)
HYBRID: dict[str, Any] = {"layer_pattern": "[M-][*-]", "mamba": MAMBA}


def token_by_token(
    write: Tensor, read: Tensor, value: Tensor, step: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    found = []
    for token in range(value.size(2)):
        along, toward = (part[:, :, token, :, None, None] for part in (write, read))
        new = step[:, :, None, token, :, None] * along * value[:, :, None, token]
        memory = memory * decay[:, :, None, token, :, None].exp() + new
        found.append((toward * memory).sum(2))
    return torch.stack(found, dim=2), memory


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("begins", [False, True])
def test_chunks_equal_token_by_token(length: int, begins: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    write, read = (torch.randn(2, 3, length, 5, generator=generator).double() for _ in range(2))
    value = torch.randn(2, 3, length, 2, 4, generator=generator).double()
    step, decay = torch.rand(2, 2, 3, length, 2, generator=generator).double()
    memory = torch.randn(2, 3, 5, 2, 4, generator=generator).double()
    expected = token_by_token(write, read, value, step, -decay, torch.zeros_like(memory) if begins else memory)
    found = state_space(write, read, value, step, -decay, None if begins else memory)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-11, rtol=0)


@pytest.mark.parametrize("begins", [False, True])
def test_the_kernel_is_given_what_its_reference_takes(begins: bool) -> None:
    """The reference is that of transformers, which it calls where the kernel is not installed."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    generator = torch.Generator().manual_seed(1)
    write, read = (torch.randn(2, 3, 150, 5, generator=generator).requires_grad_() for _ in range(2))
    value = torch.randn(2, 3, 150, 2, 4, generator=generator).requires_grad_()
    step = torch.rand(2, 3, 150, 2, generator=generator).requires_grad_()
    rate = (-torch.rand(3, 1, 2, generator=generator)).requires_grad_()
    memory = None if begins else torch.randn(2, 3, 5, 2, 4, generator=generator)
    given = (write, read, value, step, rate)
    wanted = state_space(write, read, value, step, rate * step, memory)
    found = scan_by_kernel(mamba2_chunk_scan, torch.float32, rate, write, read, value, step, memory)
    gradients = [torch.autograd.grad(sum(part.square().sum() for part in of), given) for of in (found, wanted)]
    for ours, expected in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_vectors_of_a_group_are_not_copied_for_its_heads() -> None:
    """Kept for backward, of 512 tokens: fewer numbers than heads times rows, for which each head had a copy."""
    write, read = (torch.randn(1, 1, 512, 128, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 1, 512, 16, 8, requires_grad=True)
    step, decay = torch.ones(1, 1, 512, 16, requires_grad=True), torch.full((1, 1, 512, 16), -0.1, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        state_space(write, read, value, step, decay)
    scores, memories = 512 * 64 * (2 * 16 + 1), 8 * 128 * 16 * 8
    assert sum(kept.values()) < scores + 3 * memories + 512 * 16 * 128


def test_a_memory_that_has_decayed_away_keeps_gradients_finite() -> None:
    write, read = (torch.randn(1, 1, 70, 4, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 1, 70, 1, 4, requires_grad=True)
    step, decay = torch.ones(1, 1, 70, 1, requires_grad=True), torch.full((1, 1, 70, 1), -1e3, requires_grad=True)
    found, _ = state_space(write, read, value, step, decay)
    found.sum().backward()
    for part in (write, read, value, step, decay):
        assert part.grad is not None
        assert part.grad.isfinite().all()


def test_layers_of_a_pattern_have_one_part_or_two() -> None:
    assert pattern_layers("[M-]M*[*E]-E") == ("M-", "M", "*", "*E", "-", "E")


@pytest.mark.parametrize(
    ("given", "said"),
    [
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
    ("transformer", "architecture", "said"),
    [
        ({"num_layers": 3}, HYBRID, "has 2 layers, and the model has num_layers=3"),
        ({"mtp_num_layers": 1}, HYBRID, "mtp_num_layers=1"),
        ({}, {**HYBRID, "layer_pattern": "[M-][*E]"}, "moe_layer_freq=[0, 1], and num_moe_experts"),
        ({**tiny.EXPERTS, "moe_layer_freq": [1, 0]}, {**HYBRID, "layer_pattern": "[M-][*E]"}, "moe_layer_freq=[0, 1]"),
        (tiny.EXPERTS, HYBRID, "set num_moe_experts=None"),
        ({}, {"layer_pattern": "[M-][*-]"}, "give mamba's sizes if and only if"),
        ({}, {"layer_pattern": "*-", "mamba": MAMBA}, "give mamba's sizes if and only if"),
        ({}, {"mamba": MAMBA}, "give mamba's sizes if and only if"),
        ({}, {**HYBRID, "layer_norms": "after"}, "layer_norms='after'"),
        ({}, {**HYBRID, "delta_net": dict(tiny.DELTA_NET)}, "delta_net"),
        ({"multi_latent_attention": True}, HYBRID, "multi_latent_attention=True"),
        ({"is_hybrid_model": True}, HYBRID, "is_hybrid_model=True is for models other than a GPT"),
    ],
)
def test_models_that_cannot_have_them_are_refused(
    transformer: dict[str, Any], architecture: dict[str, Any], said: str
) -> None:
    with refuses(ValueError, said), single_process():
        gpt(architecture, **transformer).configure_model()


def test_the_plan_takes_the_torch_backend_for_them_on_gpus() -> None:
    assert backend_of({"architecture": HYBRID}, "cuda") == "local"


def test_transformer_engine_is_refused() -> None:
    with refuses(ValueError, "layer_pattern="):
        Architecture.of(HYBRID).check_transformer_engine()


@pytest.mark.parametrize(("tp", "cp"), [(16, 1), (4, 4), (1, 3)])
def test_layouts_that_cannot_share_the_heads_are_refused(tp: int, cp: int) -> None:
    layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
    with refuses(ValueError, f"context_parallel_size={tp * cp}"):
        layout.validate_model(gpt(HYBRID, num_attention_heads=16, num_query_groups=16).model_shape())


def test_weights_before_the_residual_start_as_for_one_part_a_layer() -> None:
    with single_process():
        for pattern, parts in (("M-", 2), ("[M-][*-]", 4)):
            torch.manual_seed(1)
            module = gpt({"layer_pattern": pattern, "mamba": MAMBA}, hidden_size=128, ffn_hidden_size=512)
            module.configure_model()
            last = module.model.chunks[0].decoder.layers[-1].mlp.linear_fc2.weight
            assert last.std().item() == pytest.approx(0.02 / parts**0.5, rel=0.05)


def test_a_mask_of_scores_is_refused() -> None:
    with single_process():
        module = gpt(HYBRID)
        module.configure_model()
        layer = next(layer for layer in module.modules() if isinstance(layer, Mamba2))
        with refuses(ValueError, "a Mamba 2 layer, which has no scores to mask; pass None"):
            layer(torch.zeros(16, 1, 32), torch.zeros(1, 1, 16, 16, dtype=torch.bool))


def gpt(architecture: dict[str, Any], **transformer: Any) -> MCoreGPT:
    return MCoreGPT(
        vocab_size=50,
        seq_length=16,
        transformer={**tiny.TRANSFORMER, "activation_func": "silu", "num_layers": 2, **transformer},
        architecture=architecture,
    )
