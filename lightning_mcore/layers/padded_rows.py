# SPDX-License-Identifier: Apache-2.0
"""Convert rows with padding on either side, as Hugging Face's collators write them, for layers without a mask.

In a causal model, tokens do not see padding that follows them, so rows with padding at the end need no attention mask.
:class:`PaddedRows` moves each row's tokens to its beginning, makes the rows as long as the layout needs, gives each
context-parallel rank its share, and puts results back in their places. Rotary positions are relative, so the move does
not change the results. The models of ``hf_model()`` use it for calls in Hugging Face's form.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from lightning_mcore.layers.host_values import host_values, send
from lightning_mcore.layers.inputs import IGNORED_LABEL
from lightning_mcore.parallel.context import split_for_context_parallel


@dataclass(frozen=True)
class PaddedRows:
    """The places of the tokens in each row; ``shape`` is (b, s)."""

    shape: tuple[int, int]
    starts: Tensor | None  # [b], column of each row's first token; None if all are 0
    lengths: Tensor | None  # [b]; None if no row has padding
    length: int  # s, rounded up to a multiple that the layout needs
    real: Tensor | None = None  # [b, s] bool on the host: True for a token; None if no row has padding

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        multiple: int,
        is_relative: bool = True,
    ) -> "PaddedRows":
        """Read a batch's padding; waits for the device if the host does not know the mask or the positions.

        ``attention_mask`` is [b, s], 1 for a token and 0 for padding; ``position_ids`` [b, s] or [1, s].
        ``is_relative`` says that only differences of positions matter, so that a row may begin with any. Raises
        ValueError if the mask or the positions do not describe padded rows.
        """
        if tokens.dim() != 2:
            raise ValueError(f"input_ids has the shape {list(tokens.shape)}; give [rows, tokens]")
        shape = (tokens.size(0), tokens.size(1))
        rows = cls(shape, None, None, -(-shape[1] // multiple) * multiple)
        if attention_mask is not None:
            rows = rows._masked(attention_mask)
        if position_ids is not None:
            rows._check_positions(position_ids, is_relative)
        return rows

    def _masked(self, attention_mask: Tensor) -> "PaddedRows":
        if attention_mask.shape != self.shape:
            raise ValueError(
                f"attention_mask has the shape {list(attention_mask.shape)}, but only a padding mask of the shape of"
                f" input_ids, {list(self.shape)}, is supported; give 1 for a token and 0 for padding"
            )
        mask, device = host_values(attention_mask), attention_mask.device
        seen = mask != 0
        lengths = seen.sum(dim=1)
        starts = seen.int().argmax(dim=1)
        columns = torch.arange(self.shape[1])
        expected = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
        wrong = (seen != expected).any() | ((mask != 0) & (mask != 1)).any()
        is_wrong, is_moved, is_padded = torch.stack(
            [wrong, (starts > 0).any(), (lengths < self.shape[1]).any()]
        ).tolist()
        if is_wrong:
            raise ValueError(
                "attention_mask is not a padding mask: a row has a 0 between tokens, or a value besides 0 and 1; pad"
                " rows on the left or on the right only"
            )
        return replace(
            self,
            starts=send(starts, device) if is_moved else None,
            lengths=send(lengths, device) if is_padded else None,
            real=seen if is_padded else None,
        )

    def _check_positions(self, position_ids: Tensor, is_relative: bool) -> None:
        positions = host_values(position_ids).expand(self.shape)
        steps = positions.diff(dim=1) == 1
        if self.real is not None:
            steps = steps | ~(self.real[:, 1:] & self.real[:, :-1])
        if not bool(steps.all()):
            raise ValueError(
                "position_ids do not count up by one along the tokens of a row, and other positions are not supported;"
                " leave position_ids out"
            )
        first = positions[:, :1]
        if self.real is not None:
            first = positions.gather(1, self.real.int().argmax(dim=1, keepdim=True))
        if not is_relative and bool(first.any()):
            raise ValueError(
                "position_ids do not begin with 0 at the first token of a row, and other positions are not supported"
                " for this model, whose attention uses the positions themselves; leave position_ids out"
            )

    @cached_property
    def tokens(self) -> Tensor | None:
        """[b, s] bool: True for a token, False for padding; None if no row has padding."""
        if self.lengths is None:
            return None
        starts = self.lengths.new_zeros(self.shape[0]) if self.starts is None else self.starts
        columns = torch.arange(self.shape[1], device=starts.device)
        return (columns >= starts[:, None]) & (columns < (starts + self.lengths)[:, None])

    def share(self, values: Tensor, filler: int, rank: int, size: int) -> Tensor:
        """Return a context-parallel rank's share of [b, s] values, [b, length / size], each row's tokens first."""
        # The row . . 7 8 9 (two places of padding) for a multiple of 4 becomes 7 8 9 . . and is filled up to 7 8 9 . .
        # x x x. restore() gathers columns 3 4 0 1 2 of the results, which are 5 again.
        if self.starts is not None:
            values = values.gather(1, self._turned(self.starts))
        if self.length > self.shape[1]:
            values = functional.pad(values, (0, self.length - self.shape[1]), value=filler)
        return split_for_context_parallel(values, rank, size)

    def restore(self, values: Tensor) -> Tensor:
        """Put whole rows back in their places: [b, length, ...] to [b, s, ...], differentiable."""
        values = values[:, : self.shape[1]]
        if self.starts is None:
            return values
        index = self._turned(-self.starts)
        return values.gather(1, index.view(*index.shape, *(1,) * (values.dim() - 2)).expand(values.shape))

    def targets(self, labels: Tensor) -> Tensor:
        """Return each token's target, [b, s]: the next token's label, or -100."""
        if labels.shape != self.shape:
            raise ValueError(
                f"labels have the shape {list(labels.shape)} and input_ids {list(self.shape)}; give one for each token"
            )
        targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        if self.tokens is None or self.real is None:
            return targets
        if bool(((host_values(labels) != IGNORED_LABEL) & ~self.real).any()):
            raise ValueError(
                "labels has targets where attention_mask is 0, which would train on padding; set them to"
                f" {IGNORED_LABEL}"
            )
        return targets.masked_fill(~self.tokens, IGNORED_LABEL)

    def _turned(self, by: Tensor) -> Tensor:
        """Return [b, s] int64: for each column, the column ``by`` [b] places later, cyclically."""
        return (torch.arange(self.shape[1], device=by.device) + by[:, None]) % self.shape[1]
