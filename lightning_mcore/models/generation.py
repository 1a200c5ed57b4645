# SPDX-License-Identifier: Apache-2.0
"""Tokens out of logits that are spread over ranks: the likeliest one, and one drawn at random.

Under tensor parallelism a rank holds the logits of a slice of the vocabulary, under context parallelism those of a
share of the positions. Whole logits are gathered for one position at most; for all positions only the best value and
its index travel. The vocabulary is padded, and padding is never chosen. ``MCoreGPT`` calls these functions on the last
pipeline stage and in ``generate``; they know nothing of Lightning.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore.parallel.context import packed_positions, unsplit_from_context_parallel


def continue_prompt(
    module: Any,
    prompt: list[int],
    max_new_tokens: int,
    multiple: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Return a prompt and the tokens that a model continues it with.

    Args:
        module: Has ``next_logits`` as a step, ``vocab_size`` and ``seq_length``.
        prompt: Tokens to continue.
        max_new_tokens: Tokens to add.
        multiple: What the length of a sequence must be a multiple of on this layout.
        temperature: Divides the logits; 0 takes the most probable token each time.
        top_k: Draw among this many of the most probable tokens only.
        seed: Of the draws.
    """
    check_sampling(prompt, module.vocab_size, max_new_tokens, temperature, top_k)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with evaluating(module):
        for _ in range(max_new_tokens):
            window = last_window(tokens, module.seq_length, multiple, module.device)
            logits = module.run_forward("next_logits", window)
            tokens.append(sample(logits[0], temperature, top_k, generator))
    return tokens


def vocab_parallel_argmax(logits: Tensor, vocab_size: int, tp_group: dist.ProcessGroup) -> Tensor:
    """Return the most probable token at each position; the lowest id among equals.

    Args:
        logits: [b, s, v / tp], this rank's slice of the padded vocabulary.
        vocab_size: Tokens that exist; ids from here on are padding.
        tp_group: The tensor-parallel ranks.

    Returns:
        [b, s] int64, the same on every rank of the group.
    """
    first = tp_group.rank() * logits.size(-1)
    real = min(max(vocab_size - first, 0), logits.size(-1))
    padding = torch.arange(logits.size(-1), device=logits.device) >= real
    value, index = logits.float().masked_fill(padding, float("-inf")).max(dim=-1)
    values, indices = _gather(value, tp_group), _gather(index + first, tp_group)
    return indices.gather(0, values.argmax(dim=0, keepdim=True))[0]


def logits_at(
    logits: Tensor,
    position_ids: Tensor,
    position: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
) -> Tensor:
    """Return the whole vocabulary's logits at one position of each sequence.

    Args:
        logits: [b, s / cp, v / tp], this rank's share.
        position_ids: [b, s / cp], where in the sequence the share's tokens stand.
        position: [b], the position that is asked for.
        vocab_size: Tokens that exist; the padding is cut off.
        tp_group: The tensor-parallel ranks.
        cp_group: The context-parallel ranks.

    Returns:
        [b, vocab_size] fp32, the same on every rank of both groups.
    """
    asked = (position_ids == position[:, None])[..., None]
    found = torch.where(asked, logits.float(), 0.0).sum(dim=1)
    if cp_group.size() > 1:  # one rank holds the position, the others add zeros
        dist.all_reduce(found, group=cp_group)
    slices = _gather(found, tp_group)
    return slices.transpose(0, 1).flatten(1)[:, :vocab_size]


def gather_sequence(shares: Tensor, cp_group: dist.ProcessGroup, cu_seqlens_padded: Tensor | None = None) -> Tensor:
    """Return whole sequences in their own order.

    Args:
        shares: [b, s / cp], those of this context-parallel rank.
        cp_group: The context-parallel ranks.
        cu_seqlens_padded: [b, n + 1], where the sub-sequences of packed rows begin; None where they are not packed.

    Returns:
        [b, s], the same on every rank of the group.
    """
    gathered = list(_gather(shares, cp_group))
    if cu_seqlens_padded is None or cp_group.size() == 1:
        return unsplit_from_context_parallel(gathered)
    size = cp_group.size()
    places = [packed_positions(cu_seqlens_padded, shares.size(1) * size, rank, size) for rank in range(size)]
    joined = torch.cat(gathered, dim=1)
    return torch.empty_like(joined).scatter_(1, torch.cat(places, dim=1), joined)


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: [vocab_size], on any device.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw among this many of the most probable tokens only; None for all.
        generator: On the CPU, so that equal seeds draw alike on every rank and device.

    Returns:
        The token's id.
    """
    logits = logits.detach().cpu().double()
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_sampling(
    prompt: list[int], vocab_size: int, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    """Refuse what cannot be continued or drawn.

    Raises:
        ValueError: The prompt is empty or not of this vocabulary, or a number is out of its range.
    """
    if not prompt:
        raise ValueError("prompt is empty; give at least one token to continue")
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"prompt holds the token {outside[0]}, outside the vocabulary; choose 0 to {vocab_size - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative; choose 0 or more")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; choose 0 for the most probable token, or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token to draw; choose 1 or more, or None for all")


def last_window(tokens: list[int], seq_length: int, multiple: int, device: torch.device) -> dict[str, Tensor]:
    """Return the last ``seq_length`` tokens as a batch of one row, padded at its end to a multiple of ``multiple``.

    Returns:
        ``tokens`` [1, s] and ``last`` [1], the position of the last token that is not padding.
    """
    window = tokens[-seq_length:]
    padded = window + [0] * (-len(window) % multiple)
    last = torch.tensor([len(window) - 1], device=device)
    return {"tokens": torch.tensor([padded], device=device), "last": last}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and all inside it in evaluation mode, and give each its own mode back afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack a tensor of all ranks of a group along a new first dimension."""
    if group.size() == 1:
        return tensor[None]
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)
