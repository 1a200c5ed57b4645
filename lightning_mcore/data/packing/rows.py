# SPDX-License-Identifier: Apache-2.0
"""Samples as tensors: packed rows, batches of them, and the same samples padded.

A *packed row* is a dict of tensors without a batch dimension, ``s`` places and ``n`` sub-sequences:

* ``tokens`` [s], ``labels`` [s] int64: each label is the next token of the same sample, so that no target crosses a
  boundary; 0 where nothing is predicted. ``loss_mask`` [s] fp32: 1 where the label counts.
* ``position_ids`` [s] int64: they start again in each sub-sequence and continue through its padding.
* ``cu_seqlens``, ``cu_seqlens_padded`` [n + 1] int32, with TransformerEngine's meaning: sub-sequence ``i`` lies at
  ``cu_seqlens_padded[i]`` to ``cu_seqlens_padded[i + 1]``, and its first ``cu_seqlens[i + 1] - cu_seqlens[i]`` places
  hold tokens. The rest of a row is padding of its last sub-sequence.
* ``sample_ids`` [n] int64.

:func:`pack` does everything at once for samples that fit into memory. Data modules call :func:`build_row` for each row
that is asked for, and their loaders call the collate functions. ``MCoreModule.forward_step`` takes both kinds of batch.

A layout and a precision may need lengths that divide: :func:`packing_multiples` says by what. Context parallelism cuts
each sub-sequence into two slices per rank, so each sub-sequence is padded to a multiple of that. Sequence parallelism
and the FP8 recipes cut a row as a whole, wherever sub-sequences begin, so only the row must be a multiple of theirs.
Padding every sub-sequence to it as well would fill rows with padding.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.value_checks import neighbours
from lightning_mcore.data.packing.best_fit import (
    Empty,
    Overlong,
    TokenSample,
    count_rows,
    fit_samples,
    pack_lengths,
    require_multiple,
)

_PLACES = ("tokens", "labels", "loss_mask", "position_ids")  # one value for each place of a row


def pack(
    samples: Iterable[TokenSample | Sequence[int] | NDArray[Any]],
    row_length: int,
    *,
    multiple: int = 1,
    overlong: Overlong = "error",
    empty: Empty = "error",
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> list[dict[str, Tensor]]:
    """Pack tokenised samples into rows of fixed length by best-fit decreasing, and log the counts.

    Args:
        samples: Lists or arrays of tokens, which get their index as number, or samples with a loss mask.
        row_length: Places in a row, tokens.
        multiple: Each sub-sequence is padded to a multiple of this; :func:`packing_multiples` says what a layout needs.
        overlong: A sample longer than a row is refused (``"error"``), cut after the row (``"cut"``), or split into
            pieces that share one token (``"split"``).
        empty: A sample of fewer than two tokens or without a target is refused (``"error"``) or left out (``"drop"``).
        vocab_size: Size of the vocabulary, to check tokens against; None for no check.
        pad_token: The token in padding; it is masked and never attended to.

    Returns:
        The rows, each a dict of tensors as in the module's docstring; :func:`collate_rows` makes a batch of some.

    Raises:
        ValueError: A sample is refused, or ``multiple`` does not divide ``row_length``.
    """
    require_multiple(row_length, multiple)
    fitting, statistics = fit_samples(samples, row_length, overlong, empty)
    lengths = np.fromiter((sample.length for sample in fitting), np.int64, len(fitting))
    rows = pack_lengths(lengths, row_length, multiple)
    count_rows(rows, lengths, row_length, multiple, statistics)
    statistics.log()
    return [
        build_row([fitting[index] for index in rows[row]], row_length, multiple, vocab_size, pad_token)
        for row in range(len(rows))
    ]


def build_row(
    samples: Sequence[TokenSample],
    row_length: int,
    multiple: int = 1,
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Return a packed row of samples, in the given order; see the table above for shapes and dtypes of its tensors.

    Args:
        samples: One or more samples of at least two tokens each.
        row_length: Places in the row, tokens.
        multiple: Each sub-sequence is padded to a multiple of this.
        vocab_size: Size of the vocabulary, to check tokens against; None for no check.
        pad_token: The token in padding.

    Raises:
        ValueError: There are no samples, one is empty, they do not fit, ``multiple`` does not divide the row, or a
            token is outside the vocabulary.
    """
    require_multiple(row_length, multiple)
    lengths = _lengths(samples)
    padded = -(-lengths // multiple) * multiple
    if padded.sum() > row_length:
        raise ValueError(
            f"{len(samples)} samples take {padded.sum()} places, padded to multiples of {multiple}, more than "
            f"row_length={row_length}; give fewer of them, or let pack_lengths() choose"
        )
    padded[-1] = row_length - padded[:-1].sum()
    starts = _running_sum(padded)
    tokens = np.full(row_length, pad_token, np.int64)
    labels, loss_mask = np.zeros(row_length, np.int64), np.zeros(row_length, np.float32)
    for sample, start, length in zip(samples, starts.tolist(), lengths.tolist(), strict=False):
        place = slice(start, start + length)
        tokens[place] = sample.tokens[:-1]
        labels[place] = sample.tokens[1:]
        loss_mask[place] = 1 if sample.loss_mask is None else sample.loss_mask[1:]
    if vocab_size is not None:
        _check_vocabulary(samples, tokens, labels, vocab_size, pad_token)
    labels[loss_mask == 0] = 0
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.from_numpy(np.arange(row_length) - np.repeat(starts[:-1], padded)),
        "cu_seqlens": torch.from_numpy(_running_sum(lengths).astype(np.int32)),
        "cu_seqlens_padded": torch.from_numpy(starts.astype(np.int32)),
        "sample_ids": torch.from_numpy(np.fromiter((sample.sample_id for sample in samples), np.int64, len(samples))),
    }


def collate_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows into a packed batch; rows with fewer sub-sequences get empty ones (-1 in ``sample_ids``).

    Args:
        rows: Packed rows of one length.

    Returns:
        ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` [b, s], ``cu_seqlens`` and ``cu_seqlens_padded``
        [b, n + 1], ``sample_ids`` [b, n]; ``n`` is the largest number of sub-sequences in a row. Dtypes as in the rows.

    Raises:
        ValueError: There are no rows, or they differ in length.
    """
    lengths = sorted({row["tokens"].numel() for row in rows})
    if len(lengths) != 1:
        raise ValueError(f"a batch of {len(rows)} rows with {lengths} places; give rows of one length")
    most = max(row["sample_ids"].numel() for row in rows)
    batch = {name: torch.stack([row[name] for row in rows]) for name in _PLACES}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        batch[name] = torch.stack([_extend(row[name], most + 1, int(row[name][-1])) for row in rows])
    batch["sample_ids"] = torch.stack([_extend(row["sample_ids"], most, -1) for row in rows])
    return batch


def collate_padded(
    samples: Sequence[TokenSample],
    multiple: int = 1,
    row_length: int | None = None,
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Return a dense batch: one sample per row, padded at its end.

    Args:
        samples: One or more samples of at least two tokens each.
        multiple: The length of the rows is a multiple of this.
        row_length: Places in a row, tokens; None for as many as the longest sample takes, rounded up.
        vocab_size: Size of the vocabulary, to check tokens against; None for no check.
        pad_token: The token in padding.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` [b, s] int64 and ``loss_mask`` [b, s] fp32; ``lengths`` [b] int64, the
        number of tokens in each row without padding; ``sample_ids`` [b] int64.

    Raises:
        ValueError: There are no samples, one is empty or longer than the row, or a token is outside the vocabulary.
    """
    lengths = _lengths(samples)
    longest = int(lengths.max())
    length = -(-longest // multiple) * multiple if row_length is None else row_length
    require_multiple(length, multiple)
    if longest > length:
        culprit = samples[int(lengths.argmax())].sample_id
        raise ValueError(f"sample {culprit} takes {longest} places, more than row_length={length}; cut or split it")
    rows = [build_row([sample], length, multiple, vocab_size, pad_token) for sample in samples]
    batch = {name: torch.stack([row[name] for row in rows]) for name in _PLACES}
    return batch | {"lengths": torch.from_numpy(lengths), "sample_ids": torch.cat([row["sample_ids"] for row in rows])}


def _lengths(samples: Sequence[TokenSample]) -> NDArray[np.int64]:
    """Return the places that each sample takes, [samples]; refuse an empty sample or an empty list."""
    if not samples:
        raise ValueError("no samples were given for a row; give at least one")
    lengths = np.fromiter((sample.length for sample in samples), np.int64, len(samples))
    if not lengths.all():
        culprit = samples[int(lengths.argmin())]
        raise ValueError(
            f"sample {culprit.sample_id} has {len(culprit.tokens)} tokens, so there is nothing to learn from it; "
            "leave out samples of fewer than two tokens"
        )
    return lengths


def _check_vocabulary(
    samples: Sequence[TokenSample],
    tokens: NDArray[np.int64],
    labels: NDArray[np.int64],
    vocab_size: int,
    pad_token: int,
) -> None:
    """Refuse a row with a token that does not exist; ``labels`` [s] are not masked yet."""
    if min(tokens.min(), labels.min()) >= 0 and max(tokens.max(), labels.max()) < vocab_size:
        return
    for sample in samples:
        outside = sample.tokens[(sample.tokens < 0) | (sample.tokens >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"sample {sample.sample_id} holds the token {outside[0]}, outside the vocabulary; allowed are 0 to "
                f"{vocab_size - 1}: use the model's own tokenizer, or a model with a larger vocab_size"
            )
    raise ValueError(f"pad_token={pad_token} is outside the vocabulary; choose 0 to {vocab_size - 1}")


def _running_sum(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of the first 0, 1, 2 ... lengths, [n + 1]."""
    sums = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _extend(values: Tensor, length: int, value: int) -> Tensor:
    """Return a vector of ``length`` values, filled up with ``value``."""
    return torch.nn.functional.pad(values, (0, length - values.numel()), value=value)


class PackingMultiples(NamedTuple):
    """The multiples that lengths must have, in tokens.

    Attributes:
        sub_sequence: Multiple for each sub-sequence with its padding.
        row: Multiple for a whole row.
    """

    sub_sequence: int
    row: int

    def check_row(self, row_length: int) -> None:
        """Refuse a row that this run cannot divide.

        Args:
            row_length: Places in a row, tokens.

        Raises:
            ValueError: The length is not a multiple of :attr:`row`.
        """
        if row_length % self.row:
            raise ValueError(
                f"seq_length={row_length} is not a multiple of {self.row}, as the layout and the precision of this run"
                f" require; choose {neighbours(row_length, self.row)}"
            )


def packing_multiples(trainer: pl.Trainer | None) -> PackingMultiples:
    """Return the multiples that a run requires of packed sequences; 1 and 1 if nothing is split.

    Args:
        trainer: The trainer of the run, with any strategy; None outside a run.
    """
    strategy: Any = getattr(trainer, "strategy", None)
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, ParallelLayout):
        return PackingMultiples(1, 1)
    cp = layout.context_parallel_size
    row = layout.sequence_multiple
    fp8 = getattr(strategy.precision_plugin, "fp8", None)
    if isinstance(fp8, FP8Settings) and fp8.is_on:
        ranks = cp * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
        row = math.lcm(row, ranks * fp8.alignment)
    return PackingMultiples(2 * cp if cp > 1 else 1, row)
