# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt: choose the window of tokens that the model sees, and sample the next token.

``MCoreGPT.generate`` and ``MCoreVisionGPT.generate`` call :func:`continue_prompt`. Each token is a full forward pass
without a cache, which works on every layout; ``interop/generate.py`` has the fast way. With ``seq_length=3`` on a
layout that needs multiples of 4, the tokens 1 2 3 4 5 become the row 3 4 5 0, and the logits after position 2 give
the next one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mcore.parallel.consensus import all_true


def continue_prompt(
    module: Any,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> list[int]:
    """Return a prompt followed by the tokens that an ``MCoreGPT`` generates during a run, the same on every rank.

    ``temperature`` divides the logits (0 takes the most probable token), ``top_k`` limits sampling to the most probable
    tokens, and ``prepare`` returns the batch of ``next_logits`` for a window of :func:`last_window`.
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
            # Every rank has the same logits and its own generator with the same seed, so all sample the same token
            tokens.append(sample(logits[0], temperature, top_k, generator))
    if module._trainer is None:  # a whole model, in single_process()
        return tokens
    whole: list[int] = module.trainer.strategy.broadcast(tokens)  # data-parallel copies may round differently
    return whole


def continue_rows(
    module: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    stop_token: int | None,
    generator: torch.Generator,
) -> list[list[int]]:
    """Return prompts, each followed by the generated tokens, ``seq_length`` tokens at most; collective.

    The ranks of a model copy have the same prompts and equal generators; each data-parallel copy has its own prompts,
    equally many. A row ends with ``stop_token``.
    """
    host = module._host()
    multiple = host.layout.sequence_multiple if host is not None else 1
    rows = [list(prompt) for prompt in prompts]
    longest = torch.tensor(max(map(len, rows)), device=module.device)
    length = int(module.trainer.strategy.reduce(longest, reduce_op="max"))  # experts want it equal
    is_open = [len(row) < module.seq_length for row in rows]
    with evaluating(module):
        for new in range(max_new_tokens):
            if all_true(not any(is_open)):
                break
            width = min(length + new, module.seq_length)
            tokens = torch.zeros(len(rows), -(-width // multiple) * multiple, dtype=torch.int64)
            for place, row in zip(tokens, rows, strict=True):
                place[: len(row)] = torch.tensor(row)
            last = torch.tensor([len(row) - 1 for row in rows])
            found = module.run_forward("next_logits", {"tokens": tokens, "last": last})
            for number in np.flatnonzero(is_open).tolist():
                row = rows[number]
                row.append(sample(found[number], temperature, None, generator))
                is_open[number] = row[-1] != stop_token and len(row) < module.seq_length
    return rows


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Sample a token id from logits, [vocab_size] in a floating-point type, on any device.

    The generator is on the CPU, so that the same seed samples the same token on every rank and device.
    """
    logits = logits.detach().cpu().double()
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        # More than top_k stay if logits at the limit are equal
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_sampling(
    prompt: list[int], vocab_size: int, max_new_tokens: int, temperature: float, top_k: int | None
) -> None:
    """Raise ValueError if the prompt is empty or has tokens outside the vocabulary, or a setting is out of range."""
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

    The batch is ``tokens`` [1, s] and ``last`` [1], both int64; ``last`` is the position of the last token before
    padding.
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
