# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt: choose the window of tokens that the model sees, and sample the next token.

``MCoreGPT.generate`` calls :func:`continue_prompt`, a distilled student that answers by itself :func:`continue_rows`,
and ``interop/generate.py``, which has transformers' ways to sample, :func:`last_logits`. With a cache
(``layers/token_cache.py``) only the new token of a row runs through the model. There is none for images, for layers
that are not ours, and once a row is longer than ``seq_length``; each token is then a forward pass over a window. With
``seq_length=3`` on a layout that needs multiples of 4, the tokens 1 2 3 4 5 become the row 3 4 5 0, and the logits
after position 2 give the next one.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.layers.padded_rows import PaddedRows
from lightning_mcore.layers.sampling import logits_at
from lightning_mcore.layers.token_cache import TokenCache
from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.parallel.groups import from_last_stage, process_group
from lightning_mcore.parallel.pipeline import Pipeline


def continue_prompt(
    module: Any,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | Collection[int] | None = None,
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> list[int]:
    """Return a prompt followed by the tokens that an ``MCoreGPT`` generates during a run, the same on every rank.

    The settings are those of ``MCoreGPT.generate``. ``prepare`` turns a window from :func:`last_window` into a batch
    for ``next_logits``.
    """
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    check_sampling(prompt, module.vocab_size, max_new_tokens, temperature, top_k, top_p, ends)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    is_ended = False
    with contextlib.closing(_logits_of(module, tokens, max_new_tokens, prepare)) as logits:
        for found in logits:
            # Every rank has the same logits and its own generator with the same seed, so all sample the same token
            tokens.append(sample(found, temperature, top_k, generator, top_p))
            is_ended = is_ended or tokens[-1] in ends
            if ends and all_true(is_ended):  # data-parallel copies may round differently
                break
    if module._trainer is not None:  # otherwise a whole model, in single_process()
        tokens = module.trainer.strategy.broadcast(tokens)
    new = range(len(prompt), len(tokens))
    return tokens[: next((place + 1 for place in new if tokens[place] in ends), len(tokens))]


def _logits_of(
    module: Any, tokens: list[int], most: int, prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Generator[Tensor]:
    """Yield the logits of the next token, [vocab_size] fp32, ``most`` times; the caller adds it to ``tokens``."""
    host = module._host()
    multiple = host.layout.sequence_multiple if host is not None else 1
    # With seq_length=8, a prompt of 5 tokens has a cache for 4 new ones: the last is chosen from a window of 8
    cached = min(most, max(0, module.seq_length - len(tokens) + 1)) if module.takes_cache else 0
    if cached:
        with _cached_logits(module) as last:
            for number in range(cached):
                given = torch.tensor([tokens[number and -1 :]], device=module.device)
                yield (last.of_next(given[0]) if number else last.of_prompt(given, None))[0]
    with evaluating(module):
        for _ in range(most - cached):
            window = last_window(tokens, module.seq_length, multiple, module.device)
            yield module.run_forward("next_logits", prepare(window))[0]


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
    rows = [list(prompt) for prompt in prompts]
    longest = torch.tensor(max(map(len, rows)), device=module.device)
    length = int(module.trainer.strategy.reduce(longest, reduce_op="max"))  # experts want it equal
    is_open = [len(row) < module.seq_length for row in rows]
    compute = _cached_rows if module.takes_cache else _whole_rows
    with compute(module, rows, length) as next_logits:
        for _ in range(max_new_tokens):
            if all_true(not any(is_open)):
                break
            found = next_logits()
            for number in np.flatnonzero(is_open).tolist():
                row = rows[number]
                row.append(sample(found[number], temperature, None, generator))
                is_open[number] = row[-1] != stop_token and len(row) < module.seq_length
    return rows


@contextlib.contextmanager
def _whole_rows(module: Any, rows: list[list[int]], length: int) -> Iterator[Callable[[], Tensor]]:
    """Yield what computes the logits after the last token of each row, [b, vocab_size] fp32, from whole rows.

    ``length`` is of the longest prompt of all data-parallel ranks.
    """
    host = module._host()
    multiple = host.layout.sequence_multiple if host is not None else 1
    widths = itertools.count(length)

    def next_logits() -> Tensor:
        tokens, last = _padded(rows, -(-min(next(widths), module.seq_length) // multiple) * multiple)
        found: Tensor = module.run_forward("next_logits", {"tokens": tokens, "last": last - 1})
        return found

    with evaluating(module):
        yield next_logits


@contextlib.contextmanager
def _cached_rows(module: Any, rows: list[list[int]], length: int) -> Iterator[Callable[[], Tensor]]:
    """Yield what :func:`_whole_rows` does, with a cache; a row that has ended is computed along, but not used."""
    with _cached_logits(module) as last_logits:
        calls = itertools.count()

        def next_logits() -> Tensor:
            if next(calls):
                return last_logits.of_next(torch.tensor([row[-1] for row in rows], device=module.device))
            tokens, lengths = _padded(rows, length)
            mask = torch.arange(length) < lengths[:, None]
            return last_logits.of_prompt(tokens.to(module.device), mask.int().to(module.device))

        yield next_logits


def _padded(rows: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return rows as a tensor, [b, length] int64, and their lengths, [b] int64."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = torch.tensor(row)
    return tokens, torch.tensor([len(row) for row in rows])


def sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator, top_p: float = 1.0
) -> int:
    """Sample a token id from logits, [vocab_size] in a floating-point type, on any device.

    The generator is on the CPU, so that the same seed samples the same token on every rank and device.
    """
    logits = logits.detach().cpu().double()
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(distribution(logits, temperature, top_k, top_p), 1, generator=generator))


def distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Return the probability of each token, [vocab_size], after the filters of transformers' ``generate``."""
    if top_k is not None and top_k < logits.numel():
        # More than top_k stay if logits at the limit are equal
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = torch.softmax(logits / temperature, dim=-1)
    if top_p == 1:
        return probabilities
    # Probabilities 0.5, 0.3 and 0.2 with top_p=0.7: the last is within 1 - 0.7, so 0.5 / 0.8 and 0.3 / 0.8 stay
    rising, order = probabilities.sort()
    outside = rising.cumsum(dim=-1) <= 1 - top_p
    outside[-1] = False
    probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return probabilities / probabilities.sum()


def check_sampling(
    prompt: list[int],
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    ends: Collection[int],
) -> None:
    """Raise ValueError if the prompt is empty, tokens are outside the vocabulary, or a setting is out of range."""
    if not prompt:
        raise ValueError("prompt is empty; give at least one token to continue")
    for name, tokens in (("prompt", prompt), ("eos_token_id", ends)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} holds the token {token}, outside the vocabulary; choose 0 to {vocab_size - 1}"
                )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} is negative; choose 0 or more")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative; choose 0 for the most probable token, or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no token to draw; choose 1 or more, or None for all")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p={top_p} is outside 0 to 1; choose 1 for all tokens")


def last_window(tokens: list[int], seq_length: int, multiple: int, device: torch.device) -> dict[str, Tensor]:
    """Return the last ``seq_length`` tokens as a batch of one row, padded at its end to a multiple of ``multiple``.

    The batch is ``tokens`` [1, s] and ``last`` [1], both int64; ``last`` is the position of the last token before
    padding.
    """
    window = tokens[-seq_length:]
    padded = window + [0] * (-len(window) % multiple)
    last = torch.tensor([len(window) - 1], device=device)
    return {"tokens": torch.tensor([padded], device=device), "last": last}


def _cached_logits(module: Any) -> contextlib.AbstractContextManager["LastLogits"]:
    """Return the context with what computes logits of an ``MCoreGPT`` that takes a cache, between its steps."""
    host = module._host()
    calls = contextlib.nullcontext() if host is None else host.model_calls()
    return last_logits(module, module.model, module.vocab_size, longest=module.seq_length, calls=calls)


class LastLogits:
    """Computes the logits after the last token of each row; :func:`last_logits` makes it.

    All calls are collective over the ranks of a model copy, on which the results are the same.
    """

    def __init__(self, pipeline: Pipeline, vocab_size: int, cache: TokenCache | None) -> None:
        self.has_cache = cache is not None
        self._pipeline, self._vocab_size, self._cache = pipeline, vocab_size, cache

    def of_prompt(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the logits, [b, vocab_size] fp32, after whole rows, [b, s] int64.

        ``attention_mask`` is [b, s], 1 for a token and 0 for padding on either side; None without padding.
        """
        layout = self._pipeline.layout
        rows = PaddedRows.of(tokens, attention_mask, None, layout.sequence_multiple)
        size = layout.context_parallel_size
        rank = process_group("cp").rank() if size > 1 else 0
        batch = {"tokens": rows.share(tokens, 0, rank, size)}
        last = torch.full((len(tokens),), tokens.size(1), device=tokens.device)
        if rows.lengths is not None:
            last = batch["lengths"] = rows.lengths
        if self._cache is not None:
            self._cache.begin(rows, tokens.device)
        inputs = ModelInputs.of(batch, rank, size)
        more = inputs.arguments(self._pipeline.chunks[0].config, self._pipeline.boundaries_on_host)
        asked = inputs.position_ids == last[:, None] - 1
        return self._run(inputs.tokens, inputs.position_ids, asked, places=asked, **more)

    def of_next(self, tokens: Tensor, order: Tensor | None = None) -> Tensor:
        """Return the logits, [b, vocab_size] fp32, after one more token of each row, [b] int64; needs a cache.

        ``order`` [b] says which row so far each token continues; None for the same rows.
        """
        assert self._cache is not None
        if order is not None:
            self._cache.reorder(order)
        with self._cache.next_token() as positions:
            # All context-parallel ranks compute it, and the first one's logits count
            asked = torch.full_like(tokens[:, None], self._cache.rank == 0, dtype=torch.bool)
            return self._run(tokens[:, None], positions[:, None], asked)

    def _run(self, tokens: Tensor, position_ids: Tensor, asked: Tensor, **more: Any) -> Tensor:
        """Return the logits at the one position of each row that is ``asked``, [b, s / cp] like the tokens."""
        local = self._pipeline(tokens, position_ids, None, **more)
        found = None
        if local is not None:
            found = logits_at(local, asked, self._vocab_size, process_group("tp"), process_group("cp"))
        sent: Any = from_last_stage(found, tokens.device) if self._pipeline.is_staged else found
        return cast(Tensor, sent)


@contextlib.contextmanager
def last_logits(
    module: nn.Module,
    pipeline: Pipeline,
    vocab_size: int,
    use_cache: bool = True,
    longest: int | None = None,
    calls: contextlib.AbstractContextManager[None] | None = None,
) -> Iterator[LastLogits]:
    """Yield what computes logits, with the module in evaluation mode and a cache if its layers can use one.

    Rows end with ``longest`` tokens. Calls of ``pipeline`` must run all stages, which ``calls`` may be the context for.
    """
    with contextlib.ExitStack() as stack:
        if calls is not None:
            stack.enter_context(calls)
        stack.enter_context(evaluating(module))
        stack.enter_context(torch.no_grad())
        cache = TokenCache(pipeline, longest) if use_cache and TokenCache.fits(pipeline) else None
        if cache is not None:
            stack.enter_context(cache.attached())
        yield LastLogits(pipeline, vocab_size, cache)


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
