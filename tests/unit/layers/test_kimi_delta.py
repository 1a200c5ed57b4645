# SPDX-License-Identifier: Apache-2.0
"""The memory of Kimi delta attention in chunks equals the memory token by token, however strongly channels decay."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.layers.delta_net import gated_delta_rule
from tests.unit.layers.test_delta_net import token_by_token

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process

LENGTHS = [1, 2, 5, 63, 64, 65, 150]


def tokens_of(length: int, strong: bool) -> list[Tensor]:
    """Return query, key, value, decay, beta and memory in fp64; strong decays are up to -2000 among weak ones."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(2, 3, length, n, generator=generator).double() for n in (6, 6, 4))
    decay = -torch.rand(2, 3, length, 6, generator=generator).double()
    if strong:
        is_strong = torch.rand(2, 3, length, 6, generator=generator) < 0.1
        decay = torch.where(is_strong, 2000 * decay, 0.01 * decay)
    beta = torch.rand(2, 3, length, generator=generator).double()
    memory = torch.randn(2, 3, 6, 4, generator=generator).double()
    return [query, key / key.norm(dim=-1, keepdim=True), value, decay, beta, memory]


def with_gradients(rule: Any, tokens: list[Tensor]) -> list[Tensor]:
    """Return what is read, the memory, and gradients of both."""
    tokens = [part.detach().requires_grad_() for part in tokens]
    read, memory = rule(*tokens)
    return [read, memory, *torch.autograd.grad(read.sin().sum() + memory.cos().sum(), tokens)]


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_token_by_token(length: int, strong: bool) -> None:
    tokens = tokens_of(length, strong)
    found, expected = (with_gradients(rule, tokens) for rule in (gated_delta_rule, token_by_token))
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_weak_decays_after_strong_ones_are_exact_in_fp32(length: int) -> None:
    """Differences of sums that reach 6000 would be wrong by 5e-4."""
    tokens = tokens_of(length, strong=True)
    expected = with_gradients(token_by_token, tokens)
    found = with_gradients(gated_delta_rule, [part.float() for part in tokens])
    for ours, wanted in zip(found, expected, strict=True):  # measured: 2e-6 of the greatest
        largest = wanted.abs().max().clamp_min(1e-9)
        torch.testing.assert_close(ours.double() / largest, wanted / largest, atol=5e-6, rtol=0)


def test_channels_that_decay_alike_are_a_gated_delta_net() -> None:
    query, key, value, decay, beta, memory = tokens_of(150, strong=False)
    alike = decay[..., 0]
    found = gated_delta_rule(query, key, value, alike[..., None].expand_as(key), beta, memory)
    for ours, wanted in zip(found, gated_delta_rule(query, key, value, alike, beta, memory), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=0)


def test_a_memory_that_has_decayed_away_keeps_gradients_finite() -> None:
    tokens = [torch.randn(1, 1, 70, 4) for _ in range(3)]
    tokens += [torch.full((1, 1, 70, 4), -1e6), torch.ones(1, 1, 70), torch.ones(1, 1, 4, 4)]
    assert all(part.isfinite().all() for part in with_gradients(gated_delta_rule, tokens))
