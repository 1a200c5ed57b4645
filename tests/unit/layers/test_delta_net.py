# SPDX-License-Identifier: Apache-2.0
"""The memory of a gated delta net in chunks equals the memory token by token, also with the kernels of others."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.layers import delta_net
from lightning_mcore.layers.delta_net import gated_delta_rule, remembered
from lightning_mcore.layers.recurrent import RecurrentState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")  # where the layers run in this process


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each token reads and the last memory; ``decay`` is of heads, [b, h, s], or of channels too."""
    decay = decay if decay.dim() == 4 else decay[..., None]
    read = []
    for token in range(query.size(2)):
        q, k, v = (part[:, :, token, :, None] for part in (query, key, value))
        memory = memory * decay[:, :, token, :, None].exp()
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


KINDS = {3: "one decay for each head", 4: "one for each channel"}  # by the dimensions of decays
CASES: dict[str, tuple[list[int], bool]] = {  # lengths of sequences, and whether others come before
    "first": ([70], False),
    "later": ([70], True),
    "next token": ([1], True),
    "packed": ([5, 66, 17], False),
}


def through_memories(
    kernels: Sequence[Callable[..., Any]] | None, kind: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Return what random tokens read, and either the memory after one token or the gradients of all inputs; fp32."""
    (lengths, follows), generator = CASES[case], torch.Generator().manual_seed(1)
    keys, values, rows, total = (2, 4, 32, sum(lengths)) if kind == 3 else (2, 2, 16, sum(lengths))
    batch = 2 if len(lengths) == 1 else 1
    shapes = [(keys, total, 16), (keys, total, 16), (values, total, rows), (values, total, 16), (values, total)]
    query, key, value, decay, beta = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    tokens = (query, key, value, -decay.exp() if kind == 4 else -decay[..., 0].exp(), beta.sigmoid())
    for part in tokens:
        part.requires_grad_()
    memory = torch.randn(batch, values, 16, rows, generator=generator)
    monkeypatch.setattr(delta_net, "kernels_for", lambda *given: kernels)
    state = RecurrentState(torch.empty(0), memory) if follows else None
    read, memory = remembered(tokens, lengths, state, is_recomputed=case == "first")
    if case == "next token":
        return [read.detach(), memory.detach()]
    loss = read.sin().sum() + (memory.cos().sum() if len(lengths) == 1 else 0.0)
    return [read, *torch.autograd.grad(loss, tokens)]


def stand_ins(kind: int) -> tuple[Callable[..., Any], ...]:
    """Return the code of transformers that stands in for its kernels, here also for packed rows."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    def chunked(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> Any:
        offsets = options.pop("cu_seqlens", torch.tensor([0, query.size(1)])).tolist()
        assert options.pop("cu_seqlens_cpu", torch.tensor(offsets)).tolist() == offsets
        found = []
        for start, end in itertools.pairwise(offsets):
            own = (part[:, start:end] for part in (query, key, value))
            found.append(in_chunks(*own, g=g[:, start:end], beta=beta[:, start:end], **options))
        return torch.cat([read for read, _ in found], dim=1), torch.cat([memory for _, memory in found])

    if kind == 3:
        in_chunks, token_by_token = qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule
    else:
        in_chunks, token_by_token = kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention
    return chunked, token_by_token


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_kernels_are_given_what_their_references_take(kind: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, found = (through_memories(kernels, kind, case, monkeypatch) for kernels in (None, stand_ins(kind)))
    for ours, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_each_kernel_is_used_for_what_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """That for single tokens has no backward, and neither takes more than 256 channels in a key."""
    used: list[str] = []

    def kernel(name: str) -> Callable[..., Any]:
        def run(query: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            used.append(name)
            return query, torch.zeros(1)

        return run

    kernels = (kernel("sequences"), kernel("tokens"))
    monkeypatch.setattr(delta_net, "kernels_for", lambda *given: kernels)
    before = RecurrentState(torch.empty(0), torch.zeros(1, 1, 8, 8))
    for channels, length, state in ((8, 5, None), (8, 5, before), (8, 1, None), (8, 1, before), (264, 5, None)):
        heads = torch.zeros(1, 1, length, channels)
        remembered((heads, heads, heads, heads[..., 0], heads[..., 0]), [length], state, is_recomputed=False)
    assert used == ["sequences", "sequences", "sequences", "tokens"]
