# SPDX-License-Identifier: Apache-2.0
"""A student's chunk with the teacher's chunk beside it, and the divergence of their probabilities.

The teacher is split over the ranks as the student is. Each stage runs its teacher layers without gradients, then its
student layers, and sends both activations to the next stage as one tensor. With hidden sizes 4096 and 2048:

    stage 0   teacher [s, b, 4096], student [s, b, 2048]      sends [s, b, 6144], the student first
    stage 1   splits it at 2048; the gradient that it sends back is zero for the teacher's part

The last stage computes token losses and divergences in chunks of tokens (``chunked_loss.py``), so the logits of neither
model exist for a whole row. The gradient of the divergence by the student's logits is written out below, because
autograd would keep several copies of the probabilities, and cannot see through the sums over tensor-parallel ranks.

The teacher's chunk is not a submodule of the student's: it has no gradients, no optimizer state, and no place in
checkpoints. ``models/distillation.py`` builds both.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.config.distillation import Distillation
from lightning_mcore.layers.chunked_loss import (
    ChunkedLoss,
    Vocabulary,
    draws_numbers,
    in_chunks,
    logits_of_layer,
    summed_in_fp32,
)
from lightning_mcore.layers.gpt import GPTChunk


class TeacherChunk(GPTChunk):
    """A teacher's layers of one virtual pipeline stage; the last one returns hidden states instead of logits."""

    def _losses_or_logits(self, hidden: Tensor, *_: Any) -> Tensor:
        return hidden


class StudentChunk(GPTChunk):
    """A student's layers of one virtual pipeline stage, with those of its teacher, if there is one.

    Inside :meth:`learning`, a call returns what it returns otherwise, and the teacher's activations; with the output
    layer, the loss of each token and its divergence from the teacher, [2, b, s] fp32.
    """

    _teacher: tuple[TeacherChunk, Distillation] | None = None  # in a tuple, so that it does not become a submodule
    _is_learning = False
    _received: Tensor | None = None  # from the stage before, [s, b, both hidden sizes]
    _taught: Tensor | None = None  # the teacher's output of the current call

    def learn_from(self, teacher: TeacherChunk, setting: Distillation) -> None:
        """Let calls inside :meth:`learning` run a teacher's chunk too."""
        self._teacher = teacher, setting

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Let calls learn from the teacher inside the ``with`` block."""
        self._is_learning = True
        try:
            yield
        finally:
            self._is_learning = False
            self._taught = self._received = None

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
        teacher, _ = self._teacher
        if self._received is not None and not self.pre_process:
            sizes = [self.config.hidden_size, teacher.config.hidden_size]
            own, given = torch.split(self._received, sizes, dim=-1)
            super().set_input_tensor(own)
            teacher.set_input_tensor(given.detach())
        shared = {name: kwargs[name] for name in ("packed_seq_params", "padding_mask") if name in kwargs}
        with torch.no_grad():
            self._taught = teacher(input_ids, position_ids, attention_mask, **shared)
        found: Tensor = super().forward(input_ids, position_ids, attention_mask, *args, **kwargs)
        return found if self.post_process else torch.cat([found, self._taught.to(found.dtype)], dim=-1)

    def _losses_or_logits(
        self, hidden: Tensor, labels: Tensor | None, weight: Tensor | None, places: Tensor | None, gathered: bool | None
    ) -> Tensor:
        """Return what :class:`GPTChunk` does, and while learning losses and divergences, [2, b, s] fp32."""
        if self._taught is None or labels is None:
            return super()._losses_or_logits(hidden, labels, weight, places, gathered)
        assert self._teacher is not None
        teacher, setting = self._teacher
        tied = teacher.share_embeddings_and_output_weights
        of_teacher = functools.partial(
            logits_of_layer, teacher.output_layer, teacher.shared_embedding_or_output_weight() if tied else None
        )
        smaller = min(chunk.existing_tokens or chunk.vocab_size for chunk in (self, teacher))
        both = Vocabulary.of(smaller, self._columns, self.tp_group)
        losses = in_chunks(
            functools.partial(logits_of_layer, self.output_layer, weight),
            hidden,
            labels,
            self._tokens_of_chunk(labels) or labels.numel(),
            Vocabulary.of(self.existing_tokens or self.vocab_size, self._columns, self.tp_group),
            draws=draws_numbers(self.output_layer),
            trained=summed_in_fp32(self.output_layer, weight),
            kind=functools.partial(_ChunkWithTeacher, of_teacher, both, setting),
            beside=self._taught,
        )
        return torch.stack(losses)


class Sums(NamedTuple):
    """What is summed over the vocabulary of all tensor-parallel ranks, [s, b] fp32 each."""

    student: Tensor  # logarithm of the sum of exp(logit / temperature)
    teacher: Tensor
    divergence: Tensor
    slope: Tensor  # the mean slope of the divergence under the student's probabilities; see _terms

    @classmethod
    def of(cls, logits: Tensor, taught: Tensor, vocabulary: Vocabulary, setting: Distillation) -> "Sums":
        """Return the sums for the student's and the teacher's logits, [s, b, v / tp]."""
        _, real, group = vocabulary
        both = [values[..., :real].float() / setting.temperature for values in (logits, taught)]
        empty = logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float32)
        most = torch.stack([values.amax(-1) if real else empty for values in both])
        if group.size() > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack([(values - top[..., None]).exp_().sum(-1) for values, top in zip(both, most, strict=True)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sums = sums.log_().add_(most)
        student, teacher = (values.sub_(log_sum[..., None]) for values, log_sum in zip(both, log_sums, strict=True))
        divergence, slope = _terms(student, teacher, setting.beta)
        found = torch.stack([divergence.sum(-1), (student.exp() * slope).sum(-1)])
        if group.size() > 1:
            dist.all_reduce(found, group=group)
        return cls(*log_sums, *found)


def _terms(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return what each token of the vocabulary adds to the divergence, and its slope, from log-probabilities.

    With p = softmax(z), a divergence D of p has dD/dz_i = p_i * (slope_i - mean slope under p), where slope_i is
    dD/dp_i, up to a number that is the same for all i. For reverse KL, D = sum of p * log(p / q), and the slope is
    log(p / q). For p = [0.8, 0.2] and q = [0.5, 0.5] it is [0.470, -0.916], with mean 0.193, which is D itself, so the
    gradient is [0.222, -0.222]. Forward KL has the slope -q / p; its gradient is p - q, so no slope is needed, and 0 is
    returned.
    """
    if beta == 0:
        return teacher.exp() * (teacher - student), torch.zeros_like(student)
    if beta == 1:
        slope = student - teacher
        return student.exp() * slope, slope
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    slope = (1 - beta) * (student - mixture)
    return beta * teacher.exp() * (teacher - mixture) + student.exp() * slope, slope


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
            (values[..., : ctx.real].float() / temperature).sub_(log_sum[..., None])
            for values, log_sum in zip((logits, taught), log_sums, strict=True)
        )
        if beta == 0:
            by_logits = student.exp_().sub_(teacher.exp_())
        else:
            _, slope = _terms(student, teacher, beta)
            by_logits = student.exp_().mul_(slope.sub_(mean_slope[..., None]))
        gradient = torch.zeros_like(logits)
        gradient[..., : ctx.real] = by_logits.mul_(gradients[0][..., None] / temperature)
        return gradient, *[None] * (3 + len(Sums._fields))


class _ChunkWithTeacher(ChunkedLoss):
    """Computes the token losses and divergences of a chunk of tokens."""

    def __init__(
        self,
        of_teacher: Callable[[Tensor], Tensor],
        both: Vocabulary,
        setting: Distillation,
        *given: Any,
        beside: Tensor,
    ) -> None:
        super().__init__(*given)
        self.of_teacher, self.both, self.setting, self.beside = of_teacher, both, setting, beside
        self.sums: Sums | None = None

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the losses and divergences, [s, b] fp32 each."""
        logits = self.logits_of(hidden)
        with torch.no_grad():
            taught = self.of_teacher(self.beside)
            if self.sums is None:
                self.sums = Sums.of(logits.detach(), taught, self.both, self.setting)
        return self.losses(logits), _Divergences.apply(logits, taught, self.both, self.setting, *self.sums)  # type: ignore[no-untyped-call]
