# SPDX-License-Identifier: Apache-2.0
"""Metrics of language models: torchmetrics objects that count each token once, whatever the layout.

Make them attributes of the module, update them in a step, and hand them to ``self.log``::

    losses, inputs = self.token_losses(batch)
    self.perplexity.update(losses, inputs.loss_mask)
    self.log("perplexity", self.perplexity, on_step=False, on_epoch=True)

The ranks of a tensor-parallel group hold the same tokens. The ranks of a data- or context-parallel group hold
different ones, so the strategy makes every metric sum over these ranks (``process_group``). Code after the model call
in a step runs on the last pipeline stage, and ``strategy/logs/pipeline.py`` sends the states to the other stages.
Values about whole rows, such as ``cu_seqlens``, are the same on each context-parallel rank: ratios do not change by
that, and :class:`TokensSeen` counts them on the first of these ranks only.

Sums are kept in fp64 and counts in int64, even if the module is cast to another precision. A mean over no tokens is
nan.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_mcore.layers.inputs import IGNORED_LABEL
from lightning_mcore.layers.sampling import vocab_parallel_argmax
from lightning_mcore.parallel.groups import process_group, process_groups_are_open

logger = logging.getLogger(__name__)
Batch = Mapping[str, Any]


class _ExactMetric(Metric):
    """A metric of sums that start at zero and keep their precision."""

    is_differentiable = False
    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Any = "") -> nn.Module:
        """Move the state to another device, but not to another precision, as ``module.to(torch.bfloat16)`` would."""
        exact = {name: value for name, value in self.metric_state.items() if isinstance(value, Tensor)}
        super()._apply(fn, exclude_state)
        for name, value in exact.items():
            device = getattr(self, name).device
            setattr(self, name, value.to(device))
            self._defaults[name] = torch.zeros_like(value, device=device)
        return self


class TokenLoss(_ExactMetric):
    """Mean loss over the tokens that count, of all batches and ranks.

    Examples:
        >>> import torch
        >>> from lightning_mcore import TokenLoss
        >>> loss = TokenLoss()
        >>> loss.update(torch.tensor([2.0, 4.0]), weights=torch.tensor([1.0, 0.5]))
        >>> loss.compute()  # (2 + 2) / 1.5
        tensor(2.6667)
    """

    higher_is_better = False
    loss: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, weights: Tensor | float | None = None) -> None:
        """Add the losses of some tokens.

        Args:
            losses: The loss of each token of this rank, of any shape and float dtype, or a scalar mean over tokens.
            weights: The loss mask, shaped like ``losses``; or for a scalar mean its number of tokens, ``num_tokens``
                in the result of ``forward_step``. None: every loss counts once.

        Raises:
            ValueError: The shapes differ.
        """
        losses = losses.detach().double()
        weighed = torch.ones_like(losses) if weights is None else torch.as_tensor(weights).to(losses)
        if weighed.shape != losses.shape:
            raise ValueError(
                f"losses of shape {tuple(losses.shape)} with weights of shape {tuple(weighed.shape)}; give one weight "
                "for each loss"
            )
        self.loss = self.loss + torch.where(weighed > 0, losses * weighed, 0.0).sum()  # a loss in padding may be nan
        self.tokens = self.tokens + weighed.sum()

    def compute(self) -> Tensor:
        """Return the mean, an fp32 scalar."""
        return self._mean().float()

    def _mean(self) -> Tensor:
        return self.loss / self.tokens


class TokenPerplexity(TokenLoss):
    """Exponential of the mean loss over the tokens that count, of all batches and ranks.

    Examples:
        >>> import torch
        >>> from lightning_mcore import TokenPerplexity
        >>> perplexity = TokenPerplexity()
        >>> perplexity.update(torch.tensor([2.0, 4.0]), weights=torch.tensor([1.0, 0.0]))
        >>> perplexity.compute()  # exp(2)
        tensor(7.3891)
    """

    def compute(self) -> Tensor:
        """Return the perplexity, an fp32 scalar."""
        return self._mean().exp().float()


class MeanOfQueries(TokenLoss):
    """Mean of a measure over the queries that have a relevant document; 0, with a warning, if there is none.

    As torchmetrics' retrieval metrics with ``empty_target_action="skip"``.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the mean, an fp32 scalar."""
        if self.tokens > 0:
            return super().compute()
        rank_zero_warn("no query has a document with a relevance above 0, so its mrr and ndcg are logged as 0")
        return torch.zeros_like(self.loss, dtype=torch.float32)


class TokenAccuracy(_ExactMetric):
    """Share of counted tokens whose most probable prediction is the label; the logits are not gathered.

    Args:
        vocab_size: Size of the vocabulary without padding; padding is never predicted.

    Examples:
        >>> import torch
        >>> from lightning_mcore import TokenAccuracy
        >>> accuracy = TokenAccuracy(vocab_size=3)
        >>> accuracy.update(torch.tensor([[[0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]), labels=torch.tensor([[1, 0]]))
        >>> accuracy.compute()
        tensor(0.5000)
    """

    higher_is_better = True
    correct: Tensor
    tokens: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> None:
        """Compare predictions with labels; with logits collective over the tensor-parallel ranks.

        Args:
            logits: [b, s, v / tp] (or any [..., v / tp]), any float dtype, this rank's slice of the padded vocabulary;
                or the predicted tokens, [b, s] int64.
            labels: [b, s] int64, already shifted; -100 for a token without a target.
            loss_mask: [b, s], 1 where a token counts; None counts every token with a target.

        Raises:
            ValueError: The number of labels is not the number of positions.
        """
        is_predicted = not logits.is_floating_point()
        if labels.numel() != (logits.numel() if is_predicted else logits.numel() // logits.size(-1)):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} with labels of shape {tuple(labels.shape)}; give one label for "
                "each position of this rank"
            )
        predicted = (logits if is_predicted else self._predict(logits.detach())).reshape(-1)
        counts = labels.reshape(-1) != IGNORED_LABEL
        if loss_mask is not None:
            counts = counts & (loss_mask.reshape(-1) > 0)
        self.correct = self.correct + ((predicted == labels.reshape(-1)) & counts).sum()
        self.tokens = self.tokens + counts.sum()

    def compute(self) -> Tensor:
        """Return the share, 0 to 1, an fp32 scalar."""
        return (self.correct.double() / self.tokens).float()

    def _predict(self, logits: Tensor) -> Tensor:
        if process_groups_are_open():
            return vocab_parallel_argmax(logits, self.vocab_size, process_group("tp"))
        return logits[..., : self.vocab_size].argmax(dim=-1)


class PackingEfficiency(_ExactMetric):
    """Share of the places in rows that hold a token and not padding, over all batches and ranks.

    Args:
        pad_token: The padding token, for batches that do not mark padding; None rejects such batches.

    Examples:
        >>> from lightning_mcore import PackingEfficiency, collate_rows, pack
        >>> efficiency = PackingEfficiency()
        >>> efficiency.update(collate_rows(pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], row_length=4)))
        >>> efficiency.compute()  # 6 tokens in 8 places
        tensor(0.7500)
    """

    higher_is_better: bool | None = True
    tokens: Tensor
    places: Tensor

    def __init__(self, pad_token: int | None = None) -> None:
        super().__init__()
        self.pad_token = pad_token
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("places", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, batch: Batch) -> None:
        """Count the places of a batch; call it in a step, where the batch is split for context parallelism.

        Args:
            batch: Packed, with ``cu_seqlens`` [b, n + 1]; or dense, with ``lengths`` [b], the tokens of each row
                without padding.

        Raises:
            ValueError: The batch does not mark padding, and ``pad_token`` is None.
        """
        tokens, places = self._count(batch)
        self.tokens = self.tokens + tokens
        self.places = self.places + places

    def compute(self) -> Tensor:
        """Return the share, 0 to 1, an fp32 scalar."""
        return (self.tokens.double() / self.places).float()

    def _count(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        if "cu_seqlens" in batch:
            return _real_tokens(batch), batch["cu_seqlens_padded"][:, -1].sum()
        if "lengths" in batch:
            return _real_tokens(batch), batch["tokens"].numel() * _context_place()[1]
        if self.pad_token is None:
            raise ValueError(
                f"a batch with {', '.join(sorted(batch))} does not mark its padding; give it lengths, [b], as "
                f"collate_padded() does, or {type(self).__name__}(pad_token=...)"
            )
        return (batch["tokens"] != self.pad_token).sum(), batch["tokens"].numel()


class PaddingShare(PackingEfficiency):
    """Share of the places in rows that are padding, over all batches and ranks.

    Args:
        pad_token: The padding token, for batches that do not mark padding; None rejects such batches.

    Examples:
        >>> from lightning_mcore import PaddingShare, collate_rows, pack
        >>> padding = PaddingShare()
        >>> padding.update(collate_rows(pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], row_length=4)))
        >>> padding.compute()  # 2 of 8 places
        tensor(0.2500)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the share, 0 to 1, an fp32 scalar."""
        return (1 - self.tokens.double() / self.places).float()


class TokensSeen(_ExactMetric):
    """Number of tokens that a run has read, without padding; the count continues over epochs and resumes.

    ``reset()``, which Lightning calls at the end of each epoch, keeps the count. ``MCoreStrategy`` calls :meth:`settle`
    before it saves a checkpoint; under another strategy with several ranks, call it yourself.

    Examples:
        >>> from lightning_mcore import TokensSeen, collate_rows, pack
        >>> seen = TokensSeen()
        >>> seen.update(collate_rows(pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], row_length=4)))
        >>> seen.compute()
        tensor(6)
    """

    higher_is_better = None
    before: Tensor
    since: Tensor

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.int64)
        self.add_state("before", zero, dist_reduce_fx="max", persistent=True)  # of all ranks
        self.add_state("since", zero.clone(), dist_reduce_fx="sum")  # of this rank

    def update(self, batch: Batch | Tensor | int) -> None:
        """Count the tokens of a batch; call it in a step, where the batch is split for context parallelism.

        Args:
            batch: Packed, with ``cu_seqlens`` [b, n + 1] int32; or dense, with or without ``lengths`` [b] int64, the
                tokens of each row without padding; or a number of tokens of this rank, or a tensor of any shape to sum,
                such as the loss mask.
        """
        self.since = self.since + self._number(batch)

    def forward(self, batch: Batch | Tensor | int) -> Tensor:
        """Count the tokens of a batch and return this rank's count so far, an int64 scalar."""
        self.update(batch)
        known = self.before + self.since
        self._forward_cache = known  # type: ignore[assignment]
        return known

    def compute(self) -> Tensor:
        """Return the count of all ranks, an int64 scalar."""
        return self.before + self.since

    def settle(self) -> None:
        """Add up the counts of all ranks that share the metric; collective over them."""
        total = self.since.clone()
        if self._num_ranks() > 1:
            dist.all_reduce(total, group=self.process_group)
        self.before = self.before + total
        self.since = torch.zeros_like(total)
        self._computed = None

    def reset(self) -> None:
        """Keep the count, which covers the whole run."""
        self._computed = self._forward_cache = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the count at the last :meth:`settle`; on a single rank the current one."""
        if self._num_ranks() == 1:
            self.settle()
        elif self.since.any():
            logger.warning(
                "a state of TokensSeen leaves out %d tokens that this rank has read since settle(); call settle() on "
                "every rank before saving a checkpoint",
                int(self.since),
            )
        return super().state_dict(*args, **kwargs)

    def _num_ranks(self) -> int:
        return dist.get_world_size(self.process_group) if dist.is_available() and dist.is_initialized() else 1

    @staticmethod
    def _number(batch: Batch | Tensor | int) -> Tensor | int:
        if not isinstance(batch, Mapping):
            # In the mask's own dtype, fp32 would round a sum above 2^24, and bf16 one above 256
            return batch.detach().sum(dtype=torch.float64).long() if isinstance(batch, Tensor) else batch
        if "cu_seqlens" in batch or "lengths" in batch:
            return _real_tokens(batch) if _context_place()[0] == 0 else 0
        return int(batch["tokens"].numel())


class MeansOfKinds(_ExactMetric):
    """Mean rewards and log-probabilities of chosen and of rejected answers, over all batches and ranks.

    The margin is a difference of two means, each over its own number of answers, so it cannot be averaged over batches.
    """

    sums: Tensor  # [rewards, log-probabilities, number][chosen, rejected]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, 2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, rewards: Tensor, logps: Tensor, is_chosen: Tensor, counts: Tensor) -> None:
        """Add answers: rewards, log-probabilities, kinds, and whether each counts, all [n]."""
        values = torch.stack([rewards, logps, torch.ones_like(rewards)]).detach().double()
        kinds = torch.stack([counts & is_chosen, counts & ~is_chosen])
        self.sums = self.sums + torch.where(kinds[None], values[:, None], 0.0).sum(-1)

    def means(self, sums: Tensor | None = None) -> Tensor:
        """Return rewards and log-probabilities of chosen and of rejected answers, [2, 2] fp64; nan without answers.

        ``sums`` is the state of all ranks; None for this rank's.
        """
        sums = self.sums if sums is None else sums
        return sums[:2] / sums[2]

    def compute(self) -> Tensor:
        """Return the margin: the mean reward of chosen answers minus that of rejected ones, an fp32 scalar."""
        of_rewards = self.means()[0]
        return (of_rewards[0] - of_rewards[1]).float()


class RunningMean(_ExactMetric):
    """Mean of all values of a run, over epochs and resumes; every rank gets the sums of all ranks."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="max", persistent=True)

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add the sum and the number of some values: scalars, the same on every rank."""
        self.total = self.total + total.detach()
        self.count = self.count + count

    @property
    def mean(self) -> Tensor:
        """The mean so far, an fp64 scalar; 0 without values."""
        return self.total / self.count.clamp(min=1)

    def compute(self) -> Tensor:
        """Return the mean, an fp32 scalar."""
        return self.mean.float()


def sum_tokens_seen(module: nn.Module) -> None:
    """Call ``settle()`` on every :class:`TokensSeen` of a module; collective over the world."""
    for child in module.modules():
        if isinstance(child, TokensSeen):
            child.settle()


def _real_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens in whole rows, without padding, an int64 scalar."""
    real: Tensor = batch["cu_seqlens"][:, -1] if "cu_seqlens" in batch else batch["lengths"]
    return real.sum(dtype=torch.int64)


def _context_place() -> tuple[int, int]:
    """Return this rank's context-parallel rank and the size of the group."""
    if not process_groups_are_open():
        return 0, 1
    group = process_group("cp")
    return group.rank(), group.size()
