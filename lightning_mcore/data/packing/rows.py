# SPDX-License-Identifier: Apache-2.0
"""Samples as tensors: packed rows, batches of rows, padded batches, and datasets of rows.

A *packed row* is a dict of tensors without a batch dimension, for ``s`` places and ``n`` sub-sequences:

* ``tokens``, ``labels`` [s] int64: each label is the next token of the same sample, so no target crosses a boundary; 0
  where nothing is predicted. ``loss_mask`` [s] fp32: 1 where the label counts.
* ``position_ids`` [s] int64: restart in each sub-sequence and continue through its padding.
* ``cu_seqlens``, ``cu_seqlens_padded`` [n + 1] int32, as in TransformerEngine: sub-sequence ``i`` occupies
  ``cu_seqlens_padded[i]`` to ``cu_seqlens_padded[i + 1]``, and its first ``cu_seqlens[i + 1] - cu_seqlens[i]`` places
  hold tokens. The rest of a row is padding of its last sub-sequence.
* ``sample_ids`` [n] int64.
* ``teacher_top_k`` [s, 2k + 1] fp32, if a teacher's logits are stored: its k most likely tokens at each place that
  counts, their log-probabilities, and the log-probability of all other tokens together; 0 elsewhere.

:func:`pack` is for samples in memory. :class:`PackedDataset` and :class:`TextBlocks` are map-style datasets over a
tokenised ``datasets.Dataset``: they keep a few numbers per sample in memory, and the tokens stay in memory-mapped
files. The data modules use them with the collate functions; ``MCoreModule.forward_step`` takes both kinds of batch.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.value_checks import neighbours
from lightning_mcore.data.packing.best_fit import (
    Empty,
    Overlong,
    PackingStatistics,
    RowPart,
    TokenSample,
    count_rows,
    fit_sample,
    fit_samples,
    multiple_in,
    pack_parts,
    require_multiple,
)
from lightning_mcore.parallel.context import segments_of

_TAUGHT = "teacher_top_k"
_PLACES = ("tokens", "labels", "loss_mask", "position_ids", _TAUGHT)


def pack(
    samples: Iterable[TokenSample | Sequence[int] | NDArray[Any]],
    row_length: int,
    *,
    multiple: int = 1,
    overlong: Overlong = "error",
    empty: Empty = "error",
    vocab_size: int | None = None,
    pad_token: int = 0,
    parts: int = 1,
) -> list[dict[str, Tensor]]:
    """Pack tokenised samples into rows of fixed length by best-fit decreasing, and log the counts.

    Args:
        samples: Lists or arrays of tokens, numbered by their index, or :class:`TokenSample` objects with a loss mask.
        row_length: Places in a row, in tokens.
        multiple: Each sub-sequence is padded to a multiple of this; :func:`packing_multiples` returns what a layout
            requires.
        overlong: For a sample longer than a row: ``"error"`` raises, ``"cut"`` keeps its beginning, ``"split"`` makes
            pieces that share one token, so that each target is trained once.
        empty: For a sample with fewer than two tokens or without a target: ``"error"`` raises, ``"drop"`` leaves it
            out.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding, which is masked and never attended to.
        parts: With ``hybrid_context_parallel``, the context-parallel size. A row then consists of parts for one or
            several of these ranks, and a sample is in a part for as few ranks as have room for it. Parts for one rank,
            of ``row_length / parts`` places, have no padding between samples.

    Returns:
        The rows, each a dict of tensors with the shapes and dtypes in the module's docstring; :func:`collate_rows`
        makes a batch of some.

    Raises:
        ValueError: A sample is rejected, or ``multiple`` or ``parts`` does not divide ``row_length``.

    Examples:
        >>> from lightning_mcore import pack
        >>> rows = pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], row_length=4)
        >>> [row["tokens"].tolist() for row in rows]
        [[4, 5, 6, 8], [1, 2, 0, 0]]
    """
    require_multiple(row_length, multiple)
    fitting, statistics = fit_samples(samples, row_length, overlong, empty)
    lengths = np.fromiter((sample.length for sample in fitting), np.int64, len(fitting))
    rows = pack_parts(lengths, row_length, multiple, parts)
    count_rows(rows, lengths, row_length, multiple, statistics)
    statistics.log()

    def build(samples: NDArray[np.int64], length: int, multiple: int) -> dict[str, Tensor]:
        return build_row([fitting[index] for index in samples], length, multiple, vocab_size, pad_token)

    return [build_parts(build, rows[row], row_length, multiple) for row in range(len(rows))]


def build_parts(
    build: Callable[[Any, int, int], dict[str, Any]], parts: Sequence[RowPart], row_length: int, multiple: int
) -> dict[str, Any]:
    """Build a packed row from its parts, whose widths add up to the number of ranks.

    ``build`` makes a part of its samples, its length in tokens, and the multiple of its sub-sequences' lengths.
    """
    ranks = sum(width for width, _ in parts)
    built = [
        build(samples, row_length // ranks * width, multiple_in(multiple, width, ranks)) for width, samples in parts
    ]
    if len(built) == 1:
        return built[0]
    row = {name: torch.cat([part[name] for part in built]) for name in built[0]}
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        # 0 3 4 and 0 2 4 become 0 3 4 6 8
        lengths = torch.cat([part[name].diff() for part in built])
        row[name] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return row


def build_row(
    samples: Sequence[TokenSample],
    row_length: int,
    multiple: int = 1,
    vocab_size: int | None = None,
    pad_token: int = 0,
) -> dict[str, Tensor]:
    """Return a packed row of samples, each of at least two tokens; the module docstring lists its tensors."""
    # Tokens 11 12 13 14 with mask 0 0 1 1, and 21 22 23 without a mask, in a row of 8 with multiple=2:
    #
    #   tokens             11 12 13  0 21 22  0  0
    #   labels              0 13 14  0 22 23  0  0    (label 12 is masked)
    #   loss_mask           0  1  1  0  1  1  0  0
    #   position_ids        0  1  2  3  0  1  2  3
    #   cu_seqlens          0 3 5
    #   cu_seqlens_padded   0 4 8    (the second sub-sequence takes the rest of the row)
    require_multiple(row_length, multiple)
    lengths = _lengths(samples)
    padded = -(-lengths // multiple) * multiple
    if padded.sum() > row_length:
        raise ValueError(
            f"{len(samples)} samples take {padded.sum()} tokens, padded to multiples of {multiple}, more than "
            f"row_length={row_length}; give fewer samples, or let pack_lengths() choose them"
        )
    # The last sub-sequence owns the rest of the row, so cu_seqlens_padded always ends at the row length.
    padded[-1] = row_length - padded[:-1].sum()
    starts = _running_sum(padded)
    tokens = np.full(row_length, pad_token, np.int64)
    labels, loss_mask = np.zeros(row_length, np.int64), np.zeros(row_length, np.float32)
    for sample, start, length in zip(samples, starts.tolist(), lengths.tolist(), strict=False):
        place = slice(start, start + length)
        tokens[place] = sample.tokens[:-1]
        labels[place] = sample.tokens[1:]
        loss_mask[place] = 1 if sample.loss_mask is None else sample.loss_mask[1:]
    # Before masked labels become 0: a token outside the vocabulary is an error even where it is not learnt.
    if vocab_size is not None:
        _check_vocabulary(samples, tokens, labels, vocab_size, pad_token)
    labels[loss_mask == 0] = 0
    taught = {}
    if samples[0].teacher_top_k is not None:
        table = np.concatenate([sample.teacher_top_k for sample in samples])
        values = np.zeros((row_length, table.shape[1]), np.float32)
        values[loss_mask > 0] = table
        taught = {_TAUGHT: torch.from_numpy(values)}
    return taught | {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.from_numpy(np.arange(row_length) - np.repeat(starts[:-1], padded)),
        "cu_seqlens": torch.from_numpy(_running_sum(lengths).astype(np.int32)),
        "cu_seqlens_padded": torch.from_numpy(starts.astype(np.int32)),
        "sample_ids": torch.from_numpy(np.fromiter((sample.sample_id for sample in samples), np.int64, len(samples))),
    }


def collate_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack packed rows into a batch; rows with fewer sub-sequences get empty ones (-1 in ``sample_ids``).

    Args:
        rows: Packed rows of one length.

    Returns:
        ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` [b, s], ``cu_seqlens`` and ``cu_seqlens_padded``
        [b, n + 1], and ``sample_ids`` [b, n], in the dtypes of the rows; ``n`` is the largest number of sub-sequences
        in a row.

    Raises:
        ValueError: There are no rows, or their lengths differ.

    Examples:
        >>> from lightning_mcore import collate_rows, pack
        >>> batch = collate_rows(pack([[1, 2, 3], [4, 5, 6, 7], [8, 9]], row_length=4))
        >>> batch["sample_ids"].tolist(), batch["cu_seqlens"].tolist()
        ([[1, 2], [0, -1]], [[0, 3, 4], [0, 2, 2]])
    """
    lengths = sorted({row["tokens"].numel() for row in rows})
    if len(lengths) != 1:
        raise ValueError(f"the {len(rows)} rows of a batch have {lengths} tokens; give rows of one length")
    most = max(row["sample_ids"].numel() for row in rows)
    batch = {name: torch.stack([row[name] for row in rows]) for name in _PLACES if name in rows[0]}
    # Repeating the last offset adds empty sub-sequences: [0, 3, 5] becomes [0, 3, 5, 5].
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        batch[name] = torch.stack([_extend(row[name], most + 1, int(row[name][-1])) for row in rows])
    batch["sample_ids"] = torch.stack([_extend(row["sample_ids"], most, -1) for row in rows])
    return batch


def costs_of_rows(batch: dict[str, Tensor], parts: int = 1) -> Tensor:
    """Return the work of attention in each row of a packed batch, [b] fp64, on the rank of ``parts`` that has most."""
    # Rows of 8 and two ranks. Sequences of 3, 1 and 4 tokens at 0, 3 and 4: the ranks have 10 and 16, so the row costs
    # 16. Of 6 and 2 tokens, which both ranks share: 40 / 2.
    squares, boundaries = batch["cu_seqlens"].diff(dim=1).double().square().numpy(), batch["cu_seqlens_padded"].tolist()
    length = batch["tokens"].size(1)
    costs = []
    for starts, of_row in zip(boundaries, squares, strict=True):
        segments = segments_of([starts], length, parts)
        ends = [segment.stop * (length // parts) for segment in segments]
        place = np.searchsorted(ends, starts[:-1], side="right").clip(max=len(ends) - 1)  # an empty one is at the end
        work = np.bincount(place, of_row, minlength=len(segments))
        costs.append(max(work / np.array([len(segment) for segment in segments])))
    return torch.tensor(costs, dtype=torch.float64)


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
        multiple: Row length is a multiple of this.
        row_length: Places in a row, in tokens; None for the longest sample, rounded up to ``multiple``.
        vocab_size: Vocabulary size to check tokens against; None for no check.
        pad_token: Token written into padding.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` [b, s] int64 and ``loss_mask`` [b, s] fp32; ``lengths`` [b] int64, the
        number of tokens in each row without padding; ``sample_ids`` [b] int64.

    Raises:
        ValueError: There are no samples, one is empty or longer than the row, or a token is outside the vocabulary.

    Examples:
        >>> import numpy as np
        >>> from lightning_mcore import TokenSample, collate_padded
        >>> batch = collate_padded([TokenSample(np.array([1, 2, 3])), TokenSample(np.array([4, 5, 6, 7]))], multiple=4)
        >>> batch["tokens"].tolist(), batch["lengths"].tolist()
        ([[1, 2, 0, 0], [4, 5, 6, 0]], [2, 3])
    """
    lengths = _lengths(samples)
    longest = int(lengths.max())
    length = -(-longest // multiple) * multiple if row_length is None else row_length
    require_multiple(length, multiple)
    if longest > length:
        culprit = samples[int(lengths.argmax())].sample_id
        raise ValueError(f"sample {culprit} takes {longest} tokens, more than row_length={length}; cut or split it")
    rows = [build_row([sample], length, multiple, vocab_size, pad_token) for sample in samples]
    batch = {name: torch.stack([row[name] for row in rows]) for name in _PLACES if name in rows[0]}
    return batch | {"lengths": torch.from_numpy(lengths), "sample_ids": torch.cat([row["sample_ids"] for row in rows])}


def _lengths(samples: Sequence[TokenSample]) -> NDArray[np.int64]:
    """Return the places that each sample takes [samples]; raise ValueError for an empty sample or list."""
    if not samples:
        raise ValueError("no samples were given for a row; give at least one")
    lengths = np.fromiter((sample.length for sample in samples), np.int64, len(samples))
    if not lengths.all():
        culprit = samples[int(lengths.argmin())]
        raise ValueError(
            f"sample {culprit.sample_id} has {len(culprit.tokens)} tokens, so there is nothing to learn from it; "
            "remove samples with fewer than two tokens"
        )
    return lengths


def _check_vocabulary(
    samples: Sequence[TokenSample],
    tokens: NDArray[np.int64],
    labels: NDArray[np.int64],
    vocab_size: int,
    pad_token: int,
) -> None:
    """Raise ValueError for a token that does not exist; ``labels`` [s] are not masked yet."""
    if min(tokens.min(), labels.min()) >= 0 and max(tokens.max(), labels.max()) < vocab_size:
        # Fast path: two reductions over the row. The sample is searched only to name it in the error.
        return
    for sample in samples:
        outside = sample.tokens[(sample.tokens < 0) | (sample.tokens >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"sample {sample.sample_id} has the token {outside[0]}, outside the vocabulary of 0 to "
                f"{vocab_size - 1}; use the model's own tokenizer, or a model with a larger vocab_size"
            )
    raise ValueError(f"pad_token={pad_token} is outside the vocabulary; choose 0 to {vocab_size - 1}")


def _running_sum(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of the first 0, 1, 2, ... lengths, [n + 1]."""
    sums = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _extend(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.numel()), value=value)


class PackingMultiples(NamedTuple):
    """Required divisors of lengths, in tokens.

    Context parallelism cuts each sub-sequence into two slices per rank, so each sub-sequence is padded. Sequence
    parallelism and FP8 recipes cut a row as a whole, wherever sub-sequences begin, so only the row must divide; padding
    every sub-sequence to their multiple as well would fill rows with padding.
    """

    sub_sequence: int  # for each sub-sequence with its padding
    row: int  # for a whole row
    parts: int = 1  # context-parallel ranks that may have parts of a row to themselves, with hybrid_context_parallel

    def check_row(self, row_length: int) -> None:
        """Raise ValueError unless ``row_length`` is a multiple of :attr:`row`."""
        if row_length % self.row:
            raise ValueError(
                f"seq_length={row_length} is not a multiple of {self.row}, as the layout and the precision of this run"
                f" require; choose {neighbours(row_length, self.row)}"
            )


def packing_multiples(trainer: pl.Trainer | None) -> PackingMultiples:
    """Return the multiples that a run requires of packed sequences; 1 and 1 outside a run or if nothing is split."""
    strategy: Any = getattr(trainer, "strategy", None)
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, ParallelLayout):
        return PackingMultiples(1, 1)
    cp = layout.context_parallel_size
    row = layout.sequence_multiple
    fp8 = getattr(strategy.precision_plugin, "fp8", None)
    if isinstance(fp8, FP8Settings) and fp8.is_on:
        # Each rank needs an aligned length; CP ranks, and with sequence parallelism TP ranks, share a row.
        ranks = cp * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
        row = math.lcm(row, ranks * fp8.alignment)
    return PackingMultiples(2 * cp if cp > 1 else 1, row, cp if layout.hybrid_context_parallel else 1)


class TokenizedSamples(Dataset[TokenSample]):
    """Samples that fit into a row, and pieces of longer ones; empty samples are left out and counted.

    ``tokenized`` is a dataset of ``finetuning/tokenized.py``, and ``indices`` [n] selects its rows; row numbers become
    sample ids. ``lengths`` [samples] are the places that each sample takes, ``statistics`` counts all samples. Raises
    ValueError if a sample is longer than a row and ``overlong="error"``, or if no sample is left.
    """

    _or_overlong = ", overlong='cut' or overlong='split'"
    teacher_table: str | None = None  # file of ``teacher_top_k`` of all samples, one after the other

    def __init__(
        self, tokenized: Any, indices: NDArray[np.int64], row_length: int, overlong: Overlong, name: str
    ) -> None:
        self._tokenized = tokenized
        self._row_length = row_length
        self._overlong: Overlong = overlong
        self.statistics = PackingStatistics()
        lengths = _column(tokenized, "length")[indices]
        targets = _column(tokenized, "num_targets")[indices]
        if overlong == "error" and (lengths > row_length).any():
            count, longest = int((lengths > row_length).sum()), int(lengths.argmax())
            raise ValueError(
                f"{count} of {len(lengths)} samples of {name} take more than the {row_length} tokens of a row, the"
                f" longest {lengths[longest]} (row {indices[longest]}); choose a larger seq_length{self._or_overlong}"
            )
        # Most samples fit, so they are taken as arrays. Only the others are read, one by one, to see what they become.
        whole = (lengths <= row_length) & (targets > 0)
        plain = indices[whole]
        self.statistics.samples = self.statistics.packed = len(plain)
        found, places = [(plain, np.zeros_like(plain), lengths[whole])], [np.flatnonzero(whole)]
        for place in np.flatnonzero(~whole).tolist():
            found.append(self._pieces(int(indices[place])))
            places.append(np.full_like(found[-1][0], place))
        # Rows 0 and 2 fit and row 1 becomes two pieces: found at places 0, 2, 1, 1, they get the order 0, 1, 1, 2
        order = np.argsort(np.concatenate(places), kind="stable")
        # Sample k is piece ``_piece[k]`` of row ``_source[k]``, counting pieces without a target.
        self._source, self._piece, self.lengths = (np.concatenate(parts)[order] for parts in zip(*found, strict=True))
        if not len(self.lengths):
            raise ValueError(f"{name} has nothing to learn ({self.statistics}); give rows with answers")

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        sample = self._read(index)
        if not len(sample.tokens):
            self.statistics.leave_out_unanswered()
            return (np.zeros(0, np.int64),) * 3
        pieces = fit_sample(sample, self._row_length, self.statistics, self._overlong, "drop")
        lengths = np.array([piece.length for piece in pieces], np.int64)
        # In rows of 4, targets 3 and 9 are in pieces 0 (inputs 0..3) and 2 (inputs 8..11)
        assert sample.loss_mask is not None
        numbers = np.unique(np.flatnonzero(sample.loss_mask[1:]) // self._row_length)[: len(pieces)]
        return np.full_like(lengths, index), numbers, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        return self.take([index])[0]

    @functools.cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Number of the first target of each sample among the targets of all, and of all, [samples + 1]."""
        targets = _column(self._tokenized, "num_targets")[self._source]
        for index in np.flatnonzero(_column(self._tokenized, "length")[self._source] > self._row_length).tolist():
            targets[index] = self[index].num_targets
        return _running_sum(targets)

    @property
    def order(self) -> bytes:
        """What tells the samples and their order from others of the same files."""
        return b"".join(values.astype("<i8").tobytes() for values in (self._source, self._piece, self.lengths))

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[TokenSample]:
        """Return the samples at ``indices`` [n]; pieces are cut again here rather than stored."""
        places = zip(self._source[indices].tolist(), self._piece[indices].tolist(), strict=True)
        samples = [self._read(row, self._row_length, piece) for row, piece in places]
        if self.teacher_table is None:
            return samples
        # Opened anew each time, so that nothing but a path goes to a DataLoader's workers
        table = np.memmap(self.teacher_table, "<f4", "r").reshape(int(self.offsets[-1]), -1)
        return [
            replace(sample, teacher_top_k=table[slice(*self.offsets[index : index + 2])])
            for index, sample in zip(np.asarray(indices).tolist(), samples, strict=True)
        ]

    def _read(self, row: int, length: int | None = None, piece: int = 0) -> TokenSample:
        """Read a row, or one of its pieces of ``length`` inputs and no other."""
        part = slice(None) if length is None else slice(piece * length, (piece + 1) * length + 1)
        # Slices of the mapped file, because a row may be a whole book
        tokens, learnt = (self._tokenized.data.column(name)[row].values[part] for name in ("tokens", "learnt"))
        return TokenSample(tokens.to_numpy().astype(np.int64), learnt.to_numpy(zero_copy_only=False), row)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Packed rows of samples. Which samples share a row is decided once, here; loaders shuffle whole rows.

    ``samples`` are :class:`TokenizedSamples`, or what a subclass packs. The multiples are a run's, as
    :func:`packing_multiples` returns them.
    """

    def __init__(self, samples: Any, row_length: int, multiples: PackingMultiples) -> None:
        self.samples = samples
        self._row_length = row_length
        self._multiple = multiples.sub_sequence
        self._rows = pack_parts(self._lengths, row_length, self._multiple, multiples.parts)
        count_rows(self._rows, self._lengths, row_length, self._multiple, samples.statistics)

    @property
    def _lengths(self) -> NDArray[np.int64]:
        """Places that each sample takes without padding, [samples], or each of its sequences, [samples, n]."""
        lengths: NDArray[np.int64] = self.samples.lengths
        return lengths

    def _build(self, samples: NDArray[np.int64], length: int, multiple: int) -> dict[str, Any]:
        """Return a part of a row, or a whole row."""
        return build_row(self.samples.take(samples), length, multiple)

    @functools.cached_property
    def digest(self) -> str:
        """Tell from other ways to pack the samples: which of them share a row, and in which order."""
        rows = self._rows
        arrays = rows.parts.order, rows.parts.offsets, rows.offsets
        return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()

    @property
    def costs(self) -> NDArray[np.float64]:
        """Work of attention in each row, [rows], on the context-parallel rank that has most."""
        return self._rows.costs(self._rows.padded(self._lengths, self._multiple))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row; the module docstring lists its tensors."""
        return build_parts(self._build, self._rows[index], self._row_length, self._multiple)


def _column(tokenized: Any, name: str) -> NDArray[np.int64]:
    """Return a column of numbers, [rows], without reading the others."""
    column: NDArray[np.int64] = tokenized.data.column(name).to_numpy().astype(np.int64)
    return column


class TextBlocks(TokenizedSamples):
    """Blocks of ``row_length + 1`` tokens of running text, one per row, for pretraining on tokenised files.

    Documents are joined and cut; the last, incomplete block is left out. Attention crosses documents within a block, as
    in Megatron's and LLaMA-Factory's pretraining; to keep documents apart, pack them. ``first_token`` replaces the
    first token of each block. Raises ValueError if all documents together are shorter than one block.
    """

    def __init__(
        self,
        tokenized: Any,
        indices: NDArray[np.int64],
        row_length: int,
        name: str,
        first_token: int | None = None,
    ) -> None:
        self._documents = tokenized
        self._indices = indices
        self._block = row_length + 1
        self._first_token = first_token
        lengths = np.asarray(tokenized.data.column("length").to_numpy(), np.int64)[indices]
        counts = np.where(lengths > 0, lengths + 1, 0)
        # ``_ends``: where each document ends in the joined text.
        self._ends = np.cumsum(counts)
        total = int(self._ends[-1]) if len(counts) else 0
        blocks = total // self._block
        if not blocks:
            raise ValueError(
                f"{name} has only {total} tokens, fewer than the {self._block} of one block; choose a smaller"
                " seq_length, or give more text"
            )
        self.lengths = np.full(blocks, row_length, np.int64)
        empty = int((counts == 0).sum())
        self.statistics = PackingStatistics(samples=len(counts), packed=len(counts) - empty, without_answer=empty)
        self.statistics.add_rows(blocks, row_length, blocks * row_length, 0)

    def __getitem__(self, index: int) -> TokenSample:
        start, stop = index * self._block, (index + 1) * self._block
        # side="right" skips documents that end where the block begins, empty ones included.
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        # Slices of the mapped file: a document may be a whole book, or all of Wikipedia
        documents, parts = self._documents.data.column("tokens"), []
        for place in range(first, last + 1):
            begins = int(self._ends[place - 1]) if place else 0
            document = documents[int(self._indices[place])].values
            # Not behind its own end: a document of its end token alone counts as empty
            end = min(stop, int(self._ends[place])) - begins
            parts.append(document[max(start - begins, 0) : end].to_numpy())
        tokens = np.concatenate(parts).astype(np.int64)
        if self._first_token is not None:
            tokens[0] = self._first_token
        return TokenSample(tokens, None, index)

    def take(self, indices: Any) -> list[TokenSample]:
        """Return several blocks."""
        return [self[int(index)] for index in indices]
