# SPDX-License-Identifier: Apache-2.0
"""Token losses without the logits of a whole row: output layer and loss run over chunks of the row.

A row of 32,768 tokens with a vocabulary of 131,072 has 2^32 logits: 16 GiB in fp32. The loss needs each of them only
for a moment. So a chunk of 1,024 tokens goes through the output layer and the loss, its losses are kept, and its logits
(512 MiB) are dropped; backward computes them again, which costs one more matrix product. Everything that acts on the
output layer or on its logits acts on each chunk: adapters, caps, tied weights, padding of the vocabulary.

The loss is Megatron's, log(sum of exp(logits)) - logit of the label, over the vocabulary of all tensor-parallel ranks.
It is written here again because Megatron's keeps an fp32 copy of the logits and would send its sums again in backward.

Each chunk has a gradient of the output layer's weight, in the weight's dtype. Autograd would sum 32 of them in bf16,
which rounds 31 times. If Megatron keeps an fp32 ``main_grad``, the first 31 are added to it at once, and only the last
one takes the usual way there. No second sum exists, so that is less memory than autograd needs.

With tensor parallelism, each rank has its slice of the vocabulary for all tokens. With sequence parallelism, each rank
has the hidden states of some tokens, and the output layer gathers them. A chunk then has tokens of every rank. For 8
tokens on 2 ranks in chunks of 4:

    rank 0 has tokens 0 1 2 3, rank 1 has tokens 4 5 6 7
    first chunk: rank 0 gives 0 1, rank 1 gives 4 5      gathered: 0 1 4 5
    second chunk: rank 0 gives 2 3, rank 1 gives 6 7     gathered: 2 3 6 7

``gpt.GPTChunk`` calls :func:`in_chunks`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_mcore.layers.sampling import vocab_parallel_argmax
from lightning_mcore.parallel import random_state
from lightning_mcore.parallel.fully_sharded import is_fully_sharded


class Vocabulary(NamedTuple):
    """The columns of the logits on this rank: ``real`` tokens from ``first`` on, then padding."""

    first: int
    real: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, size: int, columns: int, group: dist.ProcessGroup) -> "Vocabulary":
        """Return the part of a vocabulary of ``size`` tokens on this rank of ``group``, which has ``columns``.

        Of 50 tokens on 2 ranks with 32 columns each, rank 1 has tokens 32 to 49, and 14 columns of padding.
        """
        first = columns * group.rank()
        return cls(first, min(max(size - first, 0), columns), group)


def in_chunks(
    logits_of: Callable[..., Tensor],
    hidden: Tensor,
    labels: Tensor,
    tokens: int,
    vocabulary: Vocabulary,
    *,
    wants_best: bool = False,
    draws: bool = False,
    trained: Mapping[str, Tensor] | None = None,
    kind: "Callable[..., ChunkedLoss] | None" = None,
    beside: Tensor | None = None,
    given: Tensor | None = None,
) -> list[Tensor]:
    """Return the loss of each token, [b, s] fp32, and with ``wants_best`` the most probable token, [b, s] int64.

    ``logits_of`` turns hidden states, [s, b, h] or a sequence-parallel share of them, into logits, [s, b, v / tp];
    ``draws`` says whether it draws random numbers. ``hidden`` are those of all tokens, ``labels`` is [b, s], and
    ``tokens`` is the size of a chunk, rounded down to whole positions of all rows and ranks; a chunk has at least one.
    Gradients of ``trained``, from :func:`summed_in_fp32`, are summed there; ``logits_of`` gets them as ``shares``.
    Another ``kind`` of chunk returns what it computes, [b, s] or [b, s, n]; it gets its part of ``beside``, which is
    split as ``hidden`` is, and of ``given``, [b, s, n], which is split as ``labels`` are.
    """
    rows, length = labels.shape
    ranks = length // hidden.size(0)  # that share the sequence
    own = max(tokens // (rows * ranks), 1)  # positions of a chunk on this rank
    again: dict[str, Any] = {}
    if draws:  # torch's own way to repeat random numbers does not know Megatron's generators
        again["context_fn"] = functools.partial(_repeating, hidden.device)
    found: list[list[Tensor]] = []

    def split(values: Tensor) -> list[Tensor]:
        by_rank = values.reshape(rows, ranks, -1, *values.shape[2:])
        return [part.flatten(1, 2).transpose(0, 1) for part in torch.split(by_rank, own, dim=2)]

    parts = torch.split(hidden, own)
    others: dict[str, Sequence[Tensor]] = {}  # further arguments of a chunk, in the same parts
    if beside is not None:
        others["beside"] = torch.split(beside, own)
    if given is not None:
        others["given"] = split(given)
    make = kind or functools.partial(_Chunk, wants_best=wants_best)
    trained = trained if trained and torch.is_grad_enabled() else {}
    sums = {name: _Sum(weight, len(parts)) for name, weight in trained.items()}
    for number, (part, wanted) in enumerate(zip(parts, split(labels), strict=True)):
        own_logits = logits_of
        if trained:
            shares = {name: _Share.apply(weight, sums[name]) for name, weight in trained.items()}  # type: ignore[no-untyped-call]
            own_logits = functools.partial(logits_of, shares=shares)
        compute = make(own_logits, wanted, vocabulary, **{name: each[number] for name, each in others.items()})
        if torch.is_grad_enabled() and len(parts) > 1:
            results = checkpoint(compute, part, use_reentrant=False, preserve_rng_state=False, **again)
        else:
            results = compute(part)
        found.append([result.transpose(0, 1).reshape(rows, ranks, -1, *result.shape[2:]) for result in results])
    return [torch.cat(results, dim=2).flatten(1, 2) for results in zip(*found, strict=True)]


class ChunkedLoss:
    """Computes a chunk: in forward, and again in backward, which knows the losses and repeats only the logits."""

    def __init__(self, logits_of: Callable[[Tensor], Tensor], labels: Tensor, vocabulary: Vocabulary) -> None:
        self.logits_of, self.labels, self.vocabulary = logits_of, labels, vocabulary
        self.known: list[Tensor] = []  # losses and log-sums, [s, b] each

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the results of a chunk, [s, b] each."""
        raise NotImplementedError

    def losses(self, logits: Tensor) -> Tensor:
        """Return the loss of each token, [s, b] fp32, from its logits, [s, b, v / tp]."""
        if not self.known:
            self.known = list(_losses_and_log_sums(logits.detach(), self.labels, self.vocabulary))
        losses: Tensor = _TokenLosses.apply(logits, self.labels, self.vocabulary, *self.known)  # type: ignore[no-untyped-call]
        return losses


class _Chunk(ChunkedLoss):
    """Computes the losses of a chunk, and its most probable tokens if they are wanted."""

    def __init__(self, *given: Any, wants_best: bool) -> None:
        super().__init__(*given)
        self.wants_best = wants_best

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = self.logits_of(hidden)
        losses = self.losses(logits)
        if not self.wants_best:
            return (losses,)
        size = self.vocabulary.first + self.vocabulary.real
        return losses, vocab_parallel_argmax(logits, size, self.vocabulary.group)


def _losses_and_log_sums(logits: Tensor, labels: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the losses, [s, b] fp32, and the logarithm of the sum over the vocabulary of exp(logit)."""
    _, real, group = vocabulary
    values = logits[..., :real]
    most = values.amax(-1).float() if real else labels.new_full(labels.shape, -torch.inf, dtype=torch.float32)
    if group.size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    is_own, column = _columns_of(labels, vocabulary)
    # The largest logit is subtracted first: log(exp(0) + exp(-15)) - 0 keeps digits that 300.0000003 - 300 would lose.
    chosen = (logits.gather(-1, column[..., None])[..., 0].float() - most).where(is_own, 0.0)
    sums = torch.stack([torch.sub(values, most[..., None]).exp_().sum(-1), chosen])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    log_sums = sums[0].log()
    return log_sums - sums[1], log_sums + most


def _columns_of(labels: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return which labels, [s, b], are of this rank, and their columns; 0 for those that are not."""
    first, real, _ = vocabulary
    is_own = (labels >= first) & (labels < first + real)
    return is_own, (labels - first).where(is_own, 0)


class _TokenLosses(torch.autograd.Function):
    """The losses of a chunk, whose gradient by the logits is softmax minus 1 at the label."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary, losses: Tensor, log_sums: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.vocabulary = vocabulary
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, log_sums = ctx.saved_tensors
        gradient = torch.sub(logits, log_sums[..., None]).exp_()  # in fp32
        gradient[..., ctx.vocabulary.real :] = 0
        is_own, column = _columns_of(labels, ctx.vocabulary)
        gradient.scatter_add_(-1, column[..., None], -is_own[..., None].to(gradient.dtype))
        return gradient.mul_(gradients[0][..., None]).to(logits.dtype), None, None, None, None


class _Sum:
    """The sum of a weight's gradients over the chunks of a microbatch, in fp32.

    It is ``main_grad``. Fully sharded parameters have none until their backward is done; theirs is in memory of its
    own, and rounded once.
    """

    def __init__(self, weight: Tensor, num_chunks: int) -> None:
        self._main_grad: Tensor | None = None if is_fully_sharded(weight) else weight.main_grad  # type: ignore[attr-defined]
        self._own: Tensor | None = None
        self._is_last = itertools.cycle([*[False] * (num_chunks - 1), True])

    def add(self, gradient: Tensor) -> Tensor | None:
        """Add the gradient of a chunk; return what Megatron's hook is to add, after which the weight is ready."""
        is_last = next(self._is_last)
        if self._main_grad is None:
            self._own = gradient.float() if self._own is None else self._own.add_(gradient)
            if is_last:
                total, self._own = self._own.to(gradient.dtype), None
                return total
        elif is_last:
            return gradient
        else:
            self._main_grad.add_(gradient)
        return None


class _Share(torch.autograd.Function):
    """One chunk's view of a weight. Backward gives its gradient to the sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(gradients[0]), None


def summed_in_fp32(layer: nn.Module, weight: Tensor | None) -> dict[str, Tensor]:
    """Return the parameters of an output layer whose gradients Megatron sums in fp32, though they are in 16 bits.

    They are named as in the layer; ``weight``, which it is given in place of its own, is ``""``. A kernel that adds to
    ``main_grad`` itself needs no help.
    """
    found: dict[str, Tensor] = dict(layer.named_parameters())
    if weight is not None:
        found[""] = weight
    if any(map(is_fully_sharded, found.values())):  # Megatron's hooks find a weight by identity, not a view
        found = {"": found.get("", found.get("weight"))} if found.keys() & {"", "weight"} else {}  # type: ignore[dict-item]
    if getattr(layer, "gradient_accumulation_fusion", False):
        found = {name: parameter for name, parameter in found.items() if name not in ("", "weight")}
    fp32 = torch.float32
    return {
        name: parameter
        for name, parameter in found.items()
        if parameter.requires_grad and parameter.dtype != fp32 and _sum_of(parameter) == fp32
    }


def _sum_of(parameter: Any) -> torch.dtype | None:
    if is_fully_sharded(parameter):
        return torch.float32
    return parameter.main_grad.dtype if hasattr(parameter, "main_grad") else None


def logits_of_layer(
    layer: nn.Module, weight: Tensor | None, hidden: Tensor, shares: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return an output layer's logits, [s, b, v / tp], computed with ``shares`` in place of its parameters."""
    own = dict(shares or {})
    given = {"weight": own.pop("", weight)}
    logits: Tensor = (functional_call(layer, own, (hidden,), given) if own else layer(hidden, **given))[0]
    return logits


def draws_numbers(output: nn.Module) -> bool:
    """Return whether a layer, or an adapter in it, drops values at random."""
    return any(module.training and bool(getattr(module, "dropout", 0)) for module in output.modules())


def _repeating(device: torch.device) -> tuple[Any, Any]:
    """Return contexts for a forward pass and for its repetition, which draws the same random numbers."""
    return contextlib.nullcontext(), _with_state(random_state.take(device), device)


@contextlib.contextmanager
def _with_state(state: random_state.RandomState, device: torch.device) -> Iterator[None]:
    now = random_state.take(device)
    random_state.put(state, device)
    try:
        yield
    finally:
        random_state.put(now, device)
