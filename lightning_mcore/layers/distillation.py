# SPDX-License-Identifier: Apache-2.0
"""A student's chunk with the teacher's chunk beside it, and the divergence of their probabilities.

The teacher is split over the ranks as the student is. Each stage runs its teacher layers without gradients, then its
student layers, and sends both activations to the next stage as one tensor. With hidden sizes 4096 and 2048:

    stage 0   teacher [s, b, 4096], student [s, b, 2048]      sends [s, b, 6144], the student first
    stage 1   splits it at 2048; the gradient that it sends back is zero for the teacher's part

If hidden states are matched too (``hidden_states.py``), each stage adds the distance of its pairs of layers, one more
channel, [s, b, 6145]. So the last stage weighs it like the other losses, and its gradient takes the way back. If the
layers of a pair are on two stages, the earlier one's hidden states travel behind this channel to the later one's stage,
which compares them. The gradient of a student's states comes back the same way.

The last stage computes token losses and divergences in chunks of tokens (``chunked_loss.py``), so the logits of neither
model exist for a whole row. The gradient of the divergence by the student's logits is written out below, because
autograd would keep several copies of the probabilities, and cannot see through the sums over tensor-parallel ranks.

With ``top_k``, a token's probabilities become those of k + 1 categories: the teacher's k most likely tokens, and all
others together (:func:`category_logits`). What the teacher gives to them, [s, b, 2k + 1] fp32, may come from its chunk
or from a file (``models/stored_logits.py``): the k tokens, their log-probabilities, and that of the others.

The teacher's chunk is not a submodule of the student's: it has no gradients, no optimizer state, and no place in
checkpoints. ``models/distillation.py`` builds both.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from lightning_mcore.config.distillation import Distillation, PairPlaces, StatesOf
from lightning_mcore.layers.chunked_loss import (
    ChunkedLoss,
    Vocabulary,
    draws_numbers,
    in_chunks,
    logits_of_layer,
    summed_in_fp32,
)
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.hidden_states import HiddenDistance, keeping
from lightning_mcore.layers.sampling import vocab_parallel_top_k
from lightning_mcore.layers.vision import VisionGPT

_SHARED = ("packed_seq_params", "padding_mask", "rope_positions", "vision_rows", "patches", "vision_grids")
"""Arguments of a call that the teacher gets too."""
_LEAST = -1e4  # log-probability of nothing: exp(-1e4) is 0, and 0 * -1e4 as well


class TeacherChunk(GPTChunk):
    """A teacher's layers of one virtual pipeline stage; the last one returns hidden states instead of logits."""

    def _losses_or_logits(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden


class StudentChunk(GPTChunk):
    """A student's layers of one virtual pipeline stage, with those of its teacher, if there is one.

    Inside :meth:`learning`, a call returns what it returns otherwise, and the teacher's activations; with the output
    layer, the loss of each token and its divergence from the teacher, [2, b, s] fp32; [3, b, s] with the distance of
    hidden states, if layers are paired. With stored logits, no teacher runs. Inside :meth:`storing`, a call with the
    output layer returns what would be stored, [b, s, 2k + 1] fp32.
    """

    setting: Distillation
    taught_tokens: int  # tokens that both vocabularies have
    _teacher: tuple[TeacherChunk] | None = None  # in a tuple, so that it does not become a submodule
    _distance: HiddenDistance | None = None  # if layers are paired
    _is_learning = _is_storing = False
    _stored: Tensor | None = None  # [b, s, 2k + 1] fp32
    _given: Mapping[str, Any] = {}  # arguments that differ for the teacher
    _received: Tensor | None = None  # from the stage before, [s, b, both hidden sizes]
    _taught: Tensor | None = None  # the teacher's output of the current call

    def learn_from(
        self,
        teacher: TeacherChunk | None,
        setting: Distillation,
        tokens: int,
        places: PairPlaces | None = None,
        number: int = 0,
    ) -> None:
        """Let calls inside :meth:`learning` run a teacher's chunk too; None for a teacher whose logits are stored.

        ``tokens`` is how many tokens both vocabularies have, ``places`` says where paired layers are, and ``number`` is
        how many chunks of the pipeline come before this one.
        """
        self._teacher = None if teacher is None else (teacher,)
        self.setting, self.taught_tokens = setting, tokens
        self._distance = None
        if teacher is not None and places is not None:
            self._distance = HiddenDistance(self, teacher, places, number, setting.intermediate_loss)

    @contextlib.contextmanager
    def learning(self, given: Mapping[str, Any], stored: Tensor | None = None) -> Iterator[None]:
        """Let calls learn from the teacher, or from its stored logits, inside the ``with`` block.

        ``given`` are arguments that the teacher gets instead of the student's.
        """
        self._is_learning, self._stored, self._given = stored is None, stored, given
        try:
            yield
        finally:
            self._is_learning, self._given = False, {}
            self._taught = self._received = self._stored = None

    @contextlib.contextmanager
    def storing(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Let calls return what is stored inside the ``with`` block; ``given`` as in :meth:`learning`."""
        self._is_storing = True
        try:
            with self.learning(given):
                yield
        finally:
            self._is_storing = False

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take the activations of the stage before: the student's, and perhaps the teacher's behind them."""
        [self._received] = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        super().set_input_tensor(input_tensor)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the chunk as :class:`GPTChunk` does, and the teacher's first inside :meth:`learning`."""
        if not self._is_learning:
            return super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)
        assert self._teacher is not None, "a model learns from a teacher that it has"
        [teacher] = self._teacher
        compare = self._distance
        distance: Tensor | float = 0.0  # from the stages before
        states: dict[StatesOf, Tensor] = {}
        if self._received is not None and not self.pre_process:
            widths = self.config.hidden_size, teacher.config.hidden_size
            coming = [] if compare is None else compare.received
            sizes = [*widths, int(compare is not None), *(widths[each.is_teacher] for each in coming)]
            own, given, distance, *parts = torch.split(self._received, sizes, dim=-1)
            for each, part in zip(coming, parts, strict=True):
                states[each] = part.detach() if each.is_teacher else part
            super().set_input_tensor(own)
            teacher.set_input_tensor(given.detach())
        shared = {**{name: kwargs[name] for name in _SHARED if name in kwargs}, **self._given}
        kept = [] if compare is None else compare.kept
        with torch.no_grad(), keeping(teacher, [each.layer for each in kept if each.is_teacher]) as of_teacher:
            self._taught = teacher(input_ids, position_ids, attention_mask, **shared)
        with keeping(self, [each.layer for each in kept if not each.is_teacher]) as of_student:
            found: Tensor = super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)
        results = [found] if self.post_process else [found, self._taught.to(found.dtype)]
        if compare is not None:
            for each in kept:
                states[each] = (of_teacher if each.is_teacher else of_student)[each.layer]
            distance = distance + compare(states, self._taught)
            results.append(self._of_all_ranks(distance) if self.post_process else distance.to(found.dtype))
            results += [states[each].to(found.dtype) for each in compare.sent]
        return torch.cat(results, dim=0 if self.post_process else -1)

    def _of_all_ranks(self, distance: Tensor) -> Tensor:
        """Return a distance of each token, [s, b, 1] or a sequence-parallel share, as [1, b, s]."""
        if self.config.sequence_parallel:
            # All ranks have the same gradients, so backward takes its part instead of summing
            distance = tensor_parallel.gather_from_sequence_parallel_region(distance, tensor_parallel_output_grad=False)
        return distance.permute(2, 1, 0)

    def _losses_or_logits(
        self, hidden: Tensor, labels: Tensor | None, weight: Tensor | None, places: Tensor | None, gathered: bool | None
    ) -> Tensor:
        """Return what :class:`GPTChunk` does, and while learning losses and divergences, [2, b, s] fp32."""
        if labels is None or (self._taught is None and self._stored is None):
            return super()._losses_or_logits(hidden, labels, weight, places, gathered)
        of_teacher = None
        if self._stored is None:
            assert self._teacher is not None
            [teacher] = self._teacher
            tied = teacher.share_embeddings_and_output_weights
            of_teacher = functools.partial(
                logits_of_layer, teacher.output_layer, teacher.shared_embedding_or_output_weight() if tied else None
            )
        both = Vocabulary.of(self.taught_tokens, self._columns, self.tp_group)
        kind = _StoredChunk if self._is_storing else _ChunkWithTeacher if self.setting.top_k is None else _ChunkOfTopK
        found = in_chunks(
            functools.partial(logits_of_layer, self.output_layer, weight),
            hidden,
            labels,
            self._tokens_of_chunk(labels) or labels.numel(),
            Vocabulary.of(self.existing_tokens or self.vocab_size, self._columns, self.tp_group),
            draws=draws_numbers(self.output_layer),
            trained=summed_in_fp32(self.output_layer, weight),
            kind=functools.partial(kind, of_teacher, both, self.setting),
            beside=self._taught,
            given=self._stored,
        )
        return found[0] if self._is_storing else torch.stack(found)


class VisionTeacherChunk(TeacherChunk, VisionGPT):
    """A :class:`TeacherChunk` with a vision tower of its own."""


class VisionStudentChunk(StudentChunk, VisionGPT):  # type: ignore[misc]  # VisionGPT has more arguments, by name
    """A :class:`StudentChunk` with a vision tower of its own; its teacher sees the same patches."""


class Sums(NamedTuple):
    """What is summed over the vocabulary of all tensor-parallel ranks, [s, b] fp32 each."""

    student: Tensor  # logarithm of the sum of exp(logit / temperature)
    teacher: Tensor
    divergence: Tensor
    slope: Tensor  # the mean slope of the divergence under the student's probabilities; see _slope_for

    @classmethod
    def of(cls, logits: Tensor, taught: Tensor, vocabulary: Vocabulary, setting: Distillation) -> "Sums":
        """Return the sums for the student's and the teacher's logits, [s, b, v / tp]."""
        _, real, group = vocabulary
        both = [_scaled(values[..., :real], setting.temperature) for values in (logits, taught)]
        empty = logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float32)
        most = torch.stack([values.amax(-1) if real else empty for values in both])
        if group.size() > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack([(values - top[..., None]).exp_().sum(-1) for values, top in zip(both, most, strict=True)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sums = sums.log_().add_(most)
        student, teacher = (values.sub_(log_sum[..., None]) for values, log_sum in zip(both, log_sums, strict=True))
        del both
        found = torch.stack(_summed(student, teacher, setting.beta))
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return cls(*log_sums, *found)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return a copy of logits in fp32, divided by the temperature."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return what each category adds to the divergence, from log-probabilities."""
    if beta == 0:
        return teacher.exp() * (teacher - student)
    if beta == 1:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return beta * teacher.exp() * (teacher - mixture) + student.exp() * ((1 - beta) * (student - mixture))


# The logits of a chunk are its largest tensors. So the functions below overwrite the student's and the teacher's, and
# need at most four fp32 tensors of this size at once, these two included. Forward and reverse KL need three.


def _summed(student: Tensor, teacher: Tensor, beta: float) -> list[Tensor]:
    """Return the divergence and the mean slope of it, [s, b], from log-probabilities; see :func:`_slope_for`.

    The divergence is the sum of :func:`_terms`. The mean slope is 0 for forward KL, which needs none.
    """
    if beta == 0:
        by_token = student.neg_().add_(teacher).mul_(teacher.exp_())
        found = by_token.sum(-1)
        return [found, torch.zeros_like(found)]
    if beta == 1:
        found = teacher.neg_().add_(student).mul_(student.exp_()).sum(-1)
        return [found, found]
    mixture = _mixture(student, teacher, beta)
    slope = (student - mixture).mul_(1 - beta)
    by_token = mixture.neg_().add_(teacher).mul_(teacher.exp_().mul_(beta))
    slope.mul_(student.exp_())
    return [by_token.add_(slope).sum(-1), slope.sum(-1)]


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return ``log((1 - beta) * p + beta * q)`` from ``log(p)`` and ``log(q)``."""
    mixture = student + math.log(1 - beta)
    return torch.logaddexp(mixture, teacher + math.log(beta), out=mixture)


def _slope_for(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the slope of the divergence for each token of the vocabulary, from log-probabilities; not for forward KL.

    With p = softmax(z), a divergence D of p has dD/dz_i = p_i * (slope_i - mean slope under p), where slope_i is
    dD/dp_i, up to a number that is the same for all i. For reverse KL, D = sum of p * log(p / q), and the slope is
    log(p / q). For p = [0.8, 0.2] and q = [0.5, 0.5] it is [0.470, -0.916], with mean 0.193, which is D itself, so the
    gradient is [0.222, -0.222]. Forward KL has the slope -q / p; its gradient is p - q.
    """
    if beta == 1:
        return teacher.neg_().add_(student)
    return _mixture(student, teacher, beta).neg_().add_(student).mul_(1 - beta)


class _Divergences(torch.autograd.Function):
    """The divergences of a chunk, [s, b] fp32, with their gradient by the student's logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, taught: Tensor, vocabulary: Vocabulary, setting: Distillation, *sums: Tensor
    ) -> Tensor:
        own = Sums(*sums)
        ctx.save_for_backward(logits, taught, own.student, own.teacher, own.slope)
        ctx.real, ctx.setting = vocabulary.real, setting
        return own.divergence.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, taught, *log_sums, mean_slope = ctx.saved_tensors
        beta, temperature = ctx.setting.beta, ctx.setting.temperature
        student, teacher = (
            _scaled(values[..., : ctx.real], temperature).sub_(log_sum[..., None])
            for values, log_sum in zip((logits, taught), log_sums, strict=True)
        )
        if beta == 0:
            by_logits = student.exp_().sub_(teacher.exp_())
        else:
            by_logits = _slope_for(student, teacher, beta).sub_(mean_slope[..., None]).mul_(student.exp_())
        gradient = torch.zeros_like(logits)
        gradient[..., : ctx.real] = by_logits.mul_(gradients[0][..., None] / temperature)
        return gradient, *[None] * (3 + len(Sums._fields))


def category_logits(logits: Tensor, tokens: Tensor, vocabulary: Vocabulary, temperature: float) -> Tensor:
    """Return the logits of ``tokens``, [s, b, k], and of all others together, [s, b, k + 1] fp32 on every rank.

    The logit of the others is the logarithm of their sum of exp(logit / temperature). With the logits 2, 1, 0 and 0 of
    four tokens, the categories of tokens 0 and 1 have 2, 1 and log(1 + 1) = 0.693.
    """
    is_own, column, is_rest = _places(logits, tokens, vocabulary)
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, column).where(is_own, 0.0)
    rest = scaled.masked_fill_(~is_rest, -torch.inf)
    most = rest.amax(-1, keepdim=True)
    group = vocabulary.group
    if group.size() > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    most.clamp_(min=_LEAST)
    found = torch.cat([chosen, rest.sub_(most).exp_().sum(-1, keepdim=True)], dim=-1)
    if group.size() > 1:
        dist.all_reduce(found, group=group)
    found[..., -1:] = (found[..., -1:].log() + most).clamp_(min=_LEAST)
    return found


def _places(logits: Tensor, tokens: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens are of this rank and their columns, [s, b, k], and the others' columns, [s, b, v / tp]."""
    first, real, _ = vocabulary
    columns = logits.size(-1)
    is_own = (tokens >= first) & (tokens < first + real)
    column = (tokens - first).where(is_own, 0)
    is_rest = torch.ones(*logits.shape[:-1], columns + 1, dtype=torch.bool, device=logits.device)
    is_rest.scatter_(-1, column.where(is_own, columns), False)
    is_rest[..., real:] = False
    return is_own, column, is_rest[..., :columns]


class _Categories(torch.autograd.Function):
    """The logits of a chunk's categories, [s, b, k + 1] fp32, with their gradient by the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, vocabulary: Vocabulary, temperature: float, known: Tensor
    ) -> Tensor:
        ctx.save_for_backward(logits, tokens, known[..., -1:])
        ctx.vocabulary, ctx.temperature = vocabulary, temperature
        return known.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, rest = ctx.saved_tensors
        is_own, column, is_rest = _places(logits, tokens, ctx.vocabulary)
        own, of_rest = gradients[0][..., :-1].where(is_own, 0.0), gradients[0][..., -1:]
        gradient = _scaled(logits, ctx.temperature).sub_(rest).exp_().mul_(of_rest).masked_fill_(~is_rest, 0)
        gradient.scatter_add_(-1, column, own)
        return gradient.div_(ctx.temperature).to(logits.dtype), None, None, None, None


class _TaughtChunk(ChunkedLoss):
    """A chunk of tokens with the teacher's hidden states, [s, b, h], or with what was stored, [s, b, 2k + 1]."""

    def __init__(
        self,
        of_teacher: Callable[[Tensor], Tensor] | None,
        both: Vocabulary,
        setting: Distillation,
        *arguments: Any,
        beside: Tensor | None = None,
        given: Tensor | None = None,
    ) -> None:
        super().__init__(*arguments)
        self.of_teacher, self.both, self.setting = of_teacher, both, setting
        self.beside, self.given = beside, given

    def taught(self) -> Tensor:
        """Return the teacher's logits, [s, b, v / tp]."""
        assert self.of_teacher is not None
        assert self.beside is not None
        with torch.no_grad():
            return self.of_teacher(self.beside)

    def top_k(self) -> Tensor:
        """Return the teacher's k most likely tokens and log-probabilities, [s, b, 2k + 1] fp32, on every rank."""
        if self.given is None:
            assert self.setting.top_k is not None
            taught = self.taught()
            tokens = vocab_parallel_top_k(taught, *self.both, self.setting.top_k)
            logits = category_logits(taught, tokens, self.both, self.setting.temperature)
            self.given = torch.cat([tokens.float(), logits.log_softmax(-1).clamp_(min=_LEAST)], dim=-1)
        return self.given


class _ChunkWithTeacher(_TaughtChunk):
    """Computes the token losses and divergences of a chunk of tokens."""

    sums: Sums | None = None

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the losses and divergences, [s, b] fp32 each."""
        logits, taught = self.logits_of(hidden), self.taught()
        if self.sums is None:
            with torch.no_grad():
                self.sums = Sums.of(logits.detach(), taught, self.both, self.setting)
        return self.losses(logits), _Divergences.apply(logits, taught, self.both, self.setting, *self.sums)  # type: ignore[no-untyped-call]


class _ChunkOfTopK(_TaughtChunk):
    """Computes the token losses of a chunk of tokens, and the divergences of their k + 1 categories."""

    categories: Tensor | None = None  # the student's logits of them, [s, b, k + 1]

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the losses and divergences, [s, b] fp32 each."""
        logits = self.logits_of(hidden)
        found = self.top_k()
        size, temperature = found.size(-1) // 2, self.setting.temperature
        tokens, teacher = found[..., :size].long(), found[..., size:]
        if self.categories is None:
            self.categories = category_logits(logits.detach(), tokens, self.both, temperature)
        student = _Categories.apply(logits, tokens, self.both, temperature, self.categories).log_softmax(-1)  # type: ignore[no-untyped-call]
        return self.losses(logits), _terms(student, teacher, self.setting.beta).sum(-1)


class _StoredChunk(_TaughtChunk):
    """Computes what is stored of a chunk of tokens."""

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the teacher's most likely tokens and their log-probabilities, [s, b, 2k + 1] fp32."""
        return (self.top_k(),)
