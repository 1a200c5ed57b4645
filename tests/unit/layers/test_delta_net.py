# SPDX-License-Identifier: Apache-2.0
"""The memory of a gated delta net in chunks equals the memory token by token, and settings are refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.config.architecture import Architecture
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.delta_net import GatedDeltaNet, gated_delta_rule
from lightning_mcore.planning.model import backend_of
from tests.support import tiny
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process

DELTA_NET: dict[str, Any] = dict(tiny.DELTA_NET)


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    read = []
    for token in range(query.size(2)):
        q, k, v = (part[:, :, token, :, None] for part in (query, key, value))
        memory = memory * decay[:, :, token, None, None].exp()
        missing = v - memory.transpose(-1, -2) @ k
        memory = memory + beta[:, :, token, None, None] * k @ missing.transpose(-1, -2)
        read.append((memory.transpose(-1, -2) @ q).squeeze(-1))
    return torch.stack(read, dim=2), memory


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("begins", [False, True])
def test_chunks_equal_token_by_token(length: int, begins: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(2, 3, length, n, generator=generator).double() for n in (6, 6, 4))
    key = key / key.norm(dim=-1, keepdim=True)
    decay, beta = -torch.rand(2, 2, 3, length, generator=generator).double()
    memory = torch.randn(2, 3, 6, 4, generator=generator).double()
    expected = token_by_token(query, key, value, decay, -beta, torch.zeros_like(memory) if begins else memory)
    found = gated_delta_rule(query, key, value, decay, -beta, None if begins else memory)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-11, rtol=0)


def test_a_memory_that_has_decayed_away_keeps_gradients_finite() -> None:
    tokens = [torch.randn(1, 1, 70, 4, requires_grad=True) for _ in range(3)]
    decay, beta = torch.full((1, 1, 70), -1e3, requires_grad=True), torch.ones(1, 1, 70, requires_grad=True)
    read, _ = gated_delta_rule(*tokens, decay, beta)
    read.sum().backward()
    for part in (*tokens, decay, beta):
        assert part.grad is not None
        assert part.grad.isfinite().all()


@pytest.mark.parametrize(
    "given",
    [
        {"delta_net": [1, 0]},
        {"delta_net": {**DELTA_NET, "more": 1}},
        {"delta_net": {**DELTA_NET, "linear_attention_freq": [2, 0]}},
        {"delta_net": {**DELTA_NET, "linear_key_head_dim": 0}},
        {"delta_net": {**DELTA_NET, "linear_num_value_heads": 6}},
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with refuses(ValueError, *given):
        Architecture.of(given)


@pytest.mark.parametrize(
    "given",
    [
        {"num_layers": 3},
        {"mtp_num_layers": 1},
    ],
)
def test_models_that_cannot_have_them_are_refused(given: dict[str, Any]) -> None:
    with refuses(ValueError, *given), single_process():
        gpt(**given).configure_model()


def test_the_plan_takes_the_torch_backend_for_them_on_gpus() -> None:
    assert backend_of({"architecture": {"delta_net": DELTA_NET}}, "cuda") == "local"
    assert backend_of({"architecture": {"residual_scale": 2.0}}, "cuda") == "transformer_engine"


def test_transformer_engine_is_refused() -> None:
    with refuses(ValueError, "delta_net="):
        Architecture.of({"delta_net": DELTA_NET}).check_transformer_engine()


def gpt(**transformer: Any) -> MCoreGPT:
    return MCoreGPT(
        vocab_size=50,
        seq_length=16,
        transformer={**tiny.TRANSFORMER, "activation_func": "silu", "num_layers": 2, **transformer},
        architecture={"delta_net": DELTA_NET},
    )


@pytest.mark.parametrize(("tp", "cp"), [(2, 4), (8, 1), (1, 3)])
def test_layouts_that_cannot_share_the_heads_are_refused(tp: int, cp: int) -> None:
    layout = ParallelLayout(tensor_model_parallel_size=tp, context_parallel_size=cp)
    with refuses(ValueError, f"context_parallel_size={tp * cp}"):
        layout.validate_model(gpt().model_shape())


def test_a_mask_of_scores_is_refused() -> None:
    with single_process():
        module = gpt()
        module.configure_model()
        layer = next(layer for layer in module.modules() if isinstance(layer, GatedDeltaNet))
        with refuses(ValueError, "has no scores to mask; pass None"):
            layer(torch.zeros(16, 1, 32), torch.zeros(1, 1, 16, 16, dtype=torch.bool))
