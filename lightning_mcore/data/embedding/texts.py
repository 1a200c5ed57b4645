# SPDX-License-Identifier: Apache-2.0
"""The texts of a query as tokens, and batches of them, padded or packed, for ``MCoreEmbedding`` and ``MCoreReranker``.

A row of data for an embedding is a query, its positive and k hard negatives: g = 2 + k texts. One for a reranker is a
query with each of its g documents in one text, and how relevant each document is. In a batch they are neighbouring
sequences in this order, with the row's number as their ``sample_ids``. There are no labels. A reranker's batch has the
relevances of its sequences as ``relevance``, fp32: [n * g] if padded, [b, m] if packed.

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
from torch.nn import functional

from lightning_mcore.config.embedding import Embedding
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.inputs import is_packed

_UNUSED = ("labels", "loss_mask")
_RELEVANCE = "relevance"


class Texts(NamedTuple):
    """The texts of a row of data, each as tokens, [l] integers: the query, the positive and the hard negatives.

    For a reranker, the query with each document, and in ``relevance`` a number for each.
    """

    tokens: Sequence[NDArray[Any]]
    sample_id: int = 0
    relevance: Sequence[float] | None = None


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
    batch = collate_padded(_samples(rows), multiple, row_length, pad_token=pad_token) | _relevance(rows)
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
    return build_row(_samples(rows), row_length, multiple, pad_token=pad_token) | _relevance(rows)


def collate_texts_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack packed rows of one length into a batch, as described above; ValueError if their lengths differ."""
    batch = collate_rows(rows)
    if _RELEVANCE in rows[0]:
        most = batch["sample_ids"].size(1)
        values = [row[_RELEVANCE] for row in rows]
        batch[_RELEVANCE] = torch.stack([functional.pad(each, (0, most - len(each))) for each in values])
    return {name: values for name, values in batch.items() if name not in _UNUSED}


def _relevance(rows: Sequence[Texts]) -> dict[str, Tensor]:
    """Return the relevances of all texts in turn, if the rows have any."""
    if rows[0].relevance is None:
        return {}
    values = [torch.as_tensor(row.relevance, dtype=torch.float32) for row in rows]
    return {_RELEVANCE: torch.cat(values)}


def _samples(rows: Sequence[Texts]) -> list[TokenSample]:
    """Return the texts as samples of a language model, whose last token is only a label: it is written twice."""
    return [
        TokenSample(np.append(tokens, tokens[-1:]), np.zeros(len(tokens) + bool(len(tokens)), np.bool_), row.sample_id)
        for row in rows
        for tokens in row.tokens
    ]


def check_texts(batch: dict[str, Any], setting: Embedding | Reranker) -> None:
    """Raise unless a batch contains whole rows of data; only a batch on the host is checked.

    Args:
        batch: As described above.
        setting: The module's, which says how many texts a row of data has.

    Raises:
        ValueError: The number of sequences is not a multiple of that, neighbours do not belong together or nothing
            shows that they do, a padded batch does not tell where its texts end, or relevances are missing.
    """
    tokens = batch.get("tokens") if isinstance(batch, dict) else None
    if not isinstance(tokens, Tensor) or tokens.is_cuda:  # reading values on a GPU would stall it
        return
    packed, texts, ranks = is_packed(batch), setting.texts, isinstance(setting, Reranker)
    for name in ("sample_ids",) if packed else ("sample_ids", "lengths"):
        if name not in batch:
            raise ValueError(
                f"a batch with {', '.join(batch)} has no {name}, so it does not tell the texts of a query apart; read"
                f" texts with {'MCoreRerankingData' if ranks else 'MCoreEmbeddingData'}, or train MCoreGPT"
            )
    number = batch["cu_seqlens"].size(1) - 1 if packed else len(tokens)
    if number % texts:
        has, remedy = f"{texts} texts with its positive and {texts - 2} negatives", "Embedding(negatives=...)"
        if ranks:
            has, remedy = f"{texts} documents", "Reranker(documents=...)"
        raise ValueError(
            f"a batch has {number} sequences, but each query has {has}; give a multiple of {texts}, or change {remedy}"
        )
    groups = batch["sample_ids"].reshape(-1, texts)
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        wrong = int((groups != groups[:, :1]).any(1).nonzero()[0])
        raise ValueError(
            f"sequences {texts * wrong} to {texts * (wrong + 1) - 1} of a batch come from samples"
            f" {groups[wrong].tolist()}, not from one query; give the {texts} texts of each query one after the other"
        )
    if ranks and _RELEVANCE not in batch:
        raise ValueError(
            f"a batch with {', '.join(batch)} has no relevance, so it does not tell which documents should have high"
            " scores; read them with MCoreRerankingData, or give Texts a relevance"
        )
