# SPDX-License-Identifier: Apache-2.0
"""Tokenised samples from disk as map-style datasets: one sample per row, packed rows, or blocks of running text.

Only three numbers per sample are held in memory (its length, its targets, its row). The tokens stay in the
memory-mapped files of ``datasets`` until a row is asked for. ``data/finetuning/datamodule.py`` makes the datasets.

:class:`PackedDataset` packs rows once, before training, from all samples; loaders shuffle whole rows in each epoch.
:class:`TextBlocks` joins documents and cuts them into blocks of one length, for pretraining on tokenised files.
Attention crosses the documents in a block, as in Megatron's and LLaMA-Factory's pretraining; to keep documents apart,
pack them. A LLaMA-Factory file with ``stage: pt`` uses it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_mcore.data.packing.best_fit import (
    Overlong,
    PackingStatistics,
    TokenSample,
    count_rows,
    fit_sample,
    pack_lengths,
)
from lightning_mcore.data.packing.rows import build_row


class TokenizedSamples(Dataset[TokenSample]):
    """Samples that fit into a row, and pieces of longer ones; empty samples are left out and counted.

    Args:
        tokenized: A ``datasets.Dataset`` with ``tokens`` (lists of ints), ``learnt`` (lists of bools), ``length`` and
            ``num_targets``.
        indices: [n] int64, which of its rows to use; they become the numbers of the samples.
        row_length: Places in a row, tokens.
        overlong: Whether a sample longer than a row is refused, cut or split.
        name: What to call the data in errors.

    Attributes:
        lengths: [samples] int64, the places that each sample takes.
        statistics: What became of all samples.

    Raises:
        ValueError: A sample is longer than a row and ``overlong="error"``, or no sample is left.
    """

    def __init__(
        self, tokenized: Any, indices: NDArray[np.int64], row_length: int, overlong: Overlong, name: str
    ) -> None:
        self._tokenized = tokenized.with_format("numpy")
        self._row_length = row_length
        self._overlong: Overlong = overlong
        self.statistics = PackingStatistics()
        lengths = _column(tokenized, "length")[indices]
        targets = _column(tokenized, "num_targets")[indices]
        if overlong == "error" and (lengths > row_length).any():
            count, longest = int((lengths > row_length).sum()), int(lengths.argmax())
            raise ValueError(
                f"{count} of {len(lengths)} samples of {name} take more than the {row_length} tokens of a row, the"
                f" longest {lengths[longest]} (row {indices[longest]}); choose a larger seq_length, overlong='cut' or"
                " overlong='split'"
            )
        whole = (lengths <= row_length) & (targets > 0)
        plain = indices[whole]
        self.statistics.samples = self.statistics.packed = len(plain)
        found = [(plain, np.zeros_like(plain), lengths[whole])]
        found += [self._pieces(index) for index in indices[~whole].tolist()]
        self._source, self._piece, self.lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if not len(self.lengths):
            raise ValueError(f"{name} has nothing to learn ({self.statistics}); give rows with answers")

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        [sample] = self._read([index])
        if not len(sample.tokens):
            self.statistics.leave_out_unanswered()
            return (np.zeros(0, np.int64),) * 3
        pieces = fit_sample(sample, self._row_length, self.statistics, self._overlong, "drop")
        lengths = np.array([piece.length for piece in pieces], np.int64)
        return np.full_like(lengths, index), np.arange(len(pieces)), lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenSample:
        """Return a sample."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[TokenSample]:
        """Return several samples, reading them at once; ``indices`` [n]."""
        samples = self._read(self._source[indices].tolist())
        return [
            sample if sample.length <= self._row_length and not piece else self._fitted(sample)[piece]
            for sample, piece in zip(samples, self._piece[indices].tolist(), strict=True)
        ]

    def _fitted(self, sample: TokenSample) -> list[TokenSample]:
        return fit_sample(sample, self._row_length, PackingStatistics(), self._overlong, "drop")

    def _read(self, rows: list[int]) -> list[TokenSample]:
        read = self._tokenized[rows]
        return [
            TokenSample(np.asarray(tokens, np.int64), np.asarray(learnt, np.bool_), row)
            for tokens, learnt, row in zip(read["tokens"], read["learnt"], rows, strict=True)
        ]


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Packed rows of samples; which samples share a row is decided once.

    Args:
        samples: The samples to pack.
        row_length: Places in a row, tokens.
        multiple: Each sub-sequence is padded to a multiple of this.
    """

    def __init__(self, samples: TokenizedSamples, row_length: int, multiple: int) -> None:
        self._samples = samples
        self._row_length = row_length
        self._multiple = multiple
        self._rows = pack_lengths(samples.lengths, row_length, multiple)
        count_rows(self._rows, samples.lengths, row_length, multiple, samples.statistics)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row; ``rows.py`` lists its tensors."""
        return build_row(self._samples.take(self._rows[index]), self._row_length, self._multiple)


def _column(tokenized: Any, name: str) -> NDArray[np.int64]:
    """Return a column of numbers, [rows]."""
    column: NDArray[np.int64] = tokenized.data.column(name).to_numpy().astype(np.int64)
    return column


class TextBlocks(TokenizedSamples):
    """Blocks of ``row_length + 1`` tokens of running text, one per row; the last, incomplete block is left out.

    Args:
        tokenized: A ``datasets.Dataset`` with ``tokens`` (lists of ints) and their ``length``.
        indices: [n] int64, which of its documents to use.
        row_length: Places in a row, tokens.
        name: What to call the data in errors.
        first_token: Replaces the first token of each block; None keeps it.

    Attributes:
        lengths: [blocks] int64, the places that each block takes, all ``row_length``.
        statistics: What became of the documents.

    Raises:
        ValueError: All documents together are shorter than one block.
    """

    def __init__(
        self,
        tokenized: Any,
        indices: NDArray[np.int64],
        row_length: int,
        name: str,
        first_token: int | None = None,
    ) -> None:
        self._documents = tokenized.with_format("numpy")
        self._indices = indices
        self._block = row_length + 1
        self._first_token = first_token
        lengths = np.asarray(tokenized.data.column("length").to_numpy(), np.int64)[indices]
        counts = np.where(lengths > 0, lengths + 1, 0)  # an empty document has no token
        self._ends = np.cumsum(counts)
        total = int(self._ends[-1]) if len(counts) else 0
        blocks = total // self._block
        if not blocks:
            raise ValueError(
                f"{name} has {total} tokens in all, fewer than the {self._block} of one block; choose a smaller"
                " seq_length, or give more text"
            )
        self.lengths = np.full(blocks, row_length, np.int64)
        empty = int((counts == 0).sum())
        self.statistics = PackingStatistics(samples=len(counts), packed=len(counts) - empty, without_answer=empty)
        self.statistics.add_rows(blocks, row_length, blocks * row_length, 0)

    def __getitem__(self, index: int) -> TokenSample:
        """Return a block."""
        start = index * self._block
        first, last = np.searchsorted(self._ends, [start, start + self._block - 1], side="right").tolist()
        read = self._documents[self._indices[first : last + 1].tolist()]["tokens"]
        tokens = np.concatenate([np.asarray(document, np.int64) for document in read])
        begins = start - (int(self._ends[first - 1]) if first else 0)
        tokens = tokens[begins : begins + self._block].copy()
        if self._first_token is not None:
            tokens[0] = self._first_token
        return TokenSample(tokens, None, index)

    def take(self, indices: Any) -> list[TokenSample]:
        """Return several blocks."""
        return [self[int(index)] for index in indices]
