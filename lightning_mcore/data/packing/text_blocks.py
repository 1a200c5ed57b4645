# SPDX-License-Identifier: Apache-2.0
"""Documents one after another, cut into blocks of one length: the rows of pretraining on tokenised files.

Attention goes across the documents in a block, as it does in Megatron's pretraining and in LLaMA-Factory's; for
documents that do not see each other, pack them (``dataset.py``). The tokens stay in the memory-mapped files of
``datasets``. The data of a LLaMA-Factory file with ``stage: pt`` are made of it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.dataset import TokenizedSamples
from lightning_mcore.data.packing.statistics import PackingStatistics


class TextBlocks(TokenizedSamples):
    """Blocks of ``row_length + 1`` tokens each, so that a block takes one row; what is left at the end is left out.

    Args:
        tokenized: A ``datasets.Dataset`` with ``tokens`` (lists of ints) and their ``length``.
        indices: [n] numbers of the documents of it that belong here.
        row_length: Places in a row, tokens.
        name: What the data is, for errors.
        first_token: Put in the place of the first token of each block; None: that stays.

    Attributes:
        lengths: [blocks] places that each takes; all are ``row_length``.
        statistics: What became of the documents.

    Raises:
        ValueError: All documents together are shorter than a block.
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
                f"{name} has {total} tokens in all, fewer than the {self._block} of a block; choose a smaller"
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
