# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt: choose the window of tokens that a model sees, and draw the next token."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def continue_prompt(
    module: Any,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> list[int]:
    """Return a prompt followed by the tokens that a model generates, the same on every rank.

    Args:
        module: An ``MCoreGPT``, during a run.
        prompt: Tokens to continue.
        max_new_tokens: Tokens to add.
        temperature: Divides the logits; 0 takes the most probable token each time.
        top_k: Draw among this many of the most probable tokens only.
        seed: Seed of the draws.
        prepare: Returns the batch of ``next_logits`` for a window of :func:`last_window`.
    """
    check_sampling(prompt, module.vocab_size, max_new_tokens, temperature, top_k)
    host = module._host()
    multiple = host.layout.sequence_multiple if host is not None else 1
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with evaluating(module):
        for _ in range(max_new_tokens):
            window = last_window(tokens, module.seq_length, multiple, module.device)
            logits = module.run_forward("next_logits", prepare(window))
            tokens.append(sample(logits[0], temperature, top_k, generator))
    whole: list[int] = module.trainer.strategy.broadcast(tokens)  # data-parallel copies may round differently
    return whole


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: [vocab_size] in a floating-point type, on any device.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw among this many of the most probable tokens only; None for all.
        generator: A generator on the CPU, so that equal seeds draw alike on every rank and device.

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
    """Refuse invalid prompts and settings.

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
        ``tokens`` [1, s] and ``last`` [1], both int64; ``last`` is the position of the last token that is not padding.
    """
    window = tokens[-seq_length:]
    padded = window + [0] * (-len(window) % multiple)
    last = torch.tensor([len(window) - 1], device=device)
    return {"tokens": torch.tensor([padded], device=device), "last": last}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and its submodules into evaluation mode, and restore the mode of each afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
