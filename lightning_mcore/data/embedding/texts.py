# SPDX-License-Identifier: Apache-2.0
"""The texts of a query as tokens, and batches of them, padded or packed, for ``MCoreEmbedding``.

A row of data is a query, its positive and k hard negatives: g = 2 + k texts. In a batch they are neighbouring sequences
in this order, with the row's number as their ``sample_ids``. There are no labels.

* Padded: n rows of data are n * g rows. ``tokens`` and ``position_ids`` [n * g, s] int64, ``lengths`` and
  ``sample_ids`` [n * g] int64. ``MCoreStrategy(micro_batch_size=...)`` counts rows and must be a multiple of g.
* Packed: the texts are neighbouring sub-sequences. ``tokens`` and ``position_ids`` [b, s], ``cu_seqlens`` and
  ``cu_seqlens_padded`` [b, m + 1] int32, ``sample_ids`` [b, m] int64, with m a multiple of g; rows with fewer texts end
  in empty sub-sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.inputs import is_packed

_UNUSED = ("labels", "loss_mask")


class Texts(NamedTuple):
    """The texts of a row of data, each as tokens, [l] integers: the query, the positive and the hard negatives."""

    tokens: Sequence[NDArray[Any]]
    sample_id: int = 0


def collate_padded_texts(
    rows: Sequence[Texts], multiple: int = 1, row_length: int | None = None, pad_token: int = 0
) -> dict[str, Tensor]:
    """Return a padded batch, as described above.

    Args:
        rows: Rows of data with the same number of texts.
        multiple: Row length is a multiple of this.
        row_length: Places in a row, in tokens; None for the longest text, rounded up to ``multiple``.
        pad_token: Token written into padding.

    Raises:
        ValueError: There are no rows, or a text is empty or does not fit.
    """
    # A query of the tokens 1 2 3 and a positive of 4 5 are the rows 1 2 3 and 4 5 0, with lengths 3 and 2
    batch = collate_padded(_samples(rows), multiple, row_length, pad_token=pad_token)
    return {name: values for name, values in batch.items() if name not in _UNUSED}


def build_texts_row(rows: Sequence[Texts], row_length: int, multiple: int = 1, pad_token: int = 0) -> dict[str, Tensor]:
    """Return a packed row; :func:`collate_texts_rows` makes a batch of some.

    Args:
        rows: Rows of data with the same number of texts.
        row_length: Places in the packed row, in tokens.
        multiple: Each text is padded to a multiple of this.
        pad_token: Token written into padding.

    Raises:
        ValueError: There are no rows, a text is empty, or they do not fit.
    """
    return build_row(_samples(rows), row_length, multiple, pad_token=pad_token)


def collate_texts_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack packed rows of one length into a batch, as described above; ValueError if their lengths differ."""
    return {name: values for name, values in collate_rows(rows).items() if name not in _UNUSED}


def _samples(rows: Sequence[Texts]) -> list[TokenSample]:
    """Return the texts as samples of a language model, whose last token is only a label: it is written twice."""
    return [
        TokenSample(np.append(tokens, tokens[-1:]), np.zeros(len(tokens) + bool(len(tokens)), np.bool_), row.sample_id)
        for row in rows
        for tokens in row.tokens
    ]


def check_texts(batch: dict[str, Any], texts: int) -> None:
    """Raise unless a batch contains rows of data with so many texts; only a batch on the host is checked.

    Args:
        batch: As described above.
        texts: Texts of a row of data: a query, its positive and its hard negatives.

    Raises:
        ValueError: The number of sequences is not a multiple of that, neighbours do not belong together or nothing
            shows that they do, or a padded batch does not tell where its texts end.
    """
    tokens = batch.get("tokens") if isinstance(batch, dict) else None
    if not isinstance(tokens, Tensor) or tokens.is_cuda:  # reading values on a GPU would stall it
        return
    packed = is_packed(batch)
    for name in ("sample_ids",) if packed else ("sample_ids", "lengths"):
        if name not in batch:
            raise ValueError(
                f"a batch with {', '.join(batch)} has no {name}, so it does not tell the texts of a query apart; read"
                " texts with MCoreEmbeddingData, or train MCoreGPT"
            )
    number = batch["cu_seqlens"].size(1) - 1 if packed else len(tokens)
    if number % texts:
        raise ValueError(
            f"a batch has {number} sequences, but each query has {texts} texts with its positive and"
            f" {texts - 2} negatives; give a multiple of {texts}, or change Embedding(negatives=...)"
        )
    groups = batch["sample_ids"].reshape(-1, texts)
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        wrong = int((groups != groups[:, :1]).any(1).nonzero()[0])
        raise ValueError(
            f"sequences {texts * wrong} to {texts * (wrong + 1) - 1} of a batch come from samples"
            f" {groups[wrong].tolist()}, not from one query; give the {texts} texts of each query one after the other"
        )
