# SPDX-License-Identifier: Apache-2.0
"""``MCoreEmbeddingData`` and ``MCoreRerankingData``: queries with texts, from jsonl or parquet files.

The files go through the pipeline of ``finetuning/datamodule.py``: tokenised once into a cache, read in the same order
on every layout, and resumed exactly. ``rows.py`` and ``reranking_rows.py`` describe the rows, ``texts.py`` the batches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_mcore.config.embedding import ALONE, Embedding
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.data.embedding.reranking_rows import RerankingReading
from lightning_mcore.data.embedding.rows import TextReading
from lightning_mcore.data.embedding.texts import Texts, build_texts_row, collate_padded_texts, collate_texts_rows
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.tokenized import Reading
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics
from lightning_mcore.data.packing.rows import PackingMultiples
from lightning_mcore.data.preference.datamodule import PackedPairs
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.parallel.consensus import run_on_all_ranks


class TextSamples(Dataset[Texts]):
    """The rows of a split, each with its texts.

    ``tokenized`` is a dataset of a :class:`~lightning_mcore.data.embedding.rows.TextReading`, and ``indices`` [n]
    selects its rows; row numbers become sample ids. A text may have up to ``places`` tokens. Raises ValueError if one
    is longer.
    """

    def __init__(self, tokenized: Any, indices: NDArray[np.int64], places: int, name: str) -> None:
        self._tokenized = tokenized.with_format("numpy")
        self._indices = indices
        # Texts of 3, 4 and 2 tokens lie at 0-3, 3-7 and 7-9 of a row of the cache
        self.each = np.stack(tokenized.data.column("lengths").to_numpy(zero_copy_only=False))[indices]  # [n, texts]
        self.lengths: NDArray[np.int64] = self.each.sum(1)
        self.statistics = PackingStatistics(samples=len(indices), packed=len(indices))
        if self.each.max() > places:
            number = int(self.each.max(1).argmax())
            raise ValueError(
                f"{int((self.each > places).any(1).sum())} of {len(indices)} rows of {name} have a text of more than"
                f" {places} tokens, the longest {self.each[number].max()} (row {indices[number]}); choose a larger"
                " seq_length, or overlong='cut'"
            )

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Texts:
        return self.take([index])[0]

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[Texts]:
        """Return the rows at ``indices`` [n], in one read."""
        rows = self._indices[indices].tolist()
        read = self._tokenized[rows]
        relevance = read.get("relevance", [None] * len(rows))
        return [
            Texts(np.split(np.asarray(tokens, np.int64), each[:-1].cumsum()), row, of_row)
            for tokens, each, row, of_row in zip(read["tokens"], self.each[indices], rows, relevance, strict=True)
        ]


class PackedTexts(PackedPairs):
    """Packed rows of texts; ``samples`` are :class:`TextSamples`. All texts of a data row stay together."""

    def _build(self, samples: NDArray[np.int64], length: int, multiple: int) -> dict[str, Tensor]:
        return build_texts_row(self.samples.take(samples), length, multiple)


@inherit_help(MCoreFinetuningData)
class MCoreEmbeddingData(MCoreFinetuningData):
    """Queries, each with a text that answers it and perhaps hard negatives, from jsonl or parquet files.

    ``rows.py`` lists the columns that a file may have. Prompts and the number of negatives come from the module's
    ``Embedding``. A row that does not fit is an error. Arguments that are not explained here are those of
    :class:`~lightning_mcore.MCoreFinetuningData`.

    Args:
        tokenizer: Folder or name of a ``transformers`` tokenizer, or the tokenizer itself. Its special tokens are
            added to each text, as ``SentenceTransformer`` does.
        seq_length: Length of a row, in tokens. A packed row contains all texts of a query, so with k negatives each
            text may use ``1 / (2 + k)`` of it.
        batch_size: Queries in a batch on one data-parallel rank; rows if ``packing``.
        packing: Put several texts into a row; otherwise each has its own row.
        overlong: For a text that is too long: ``error`` raises, ``cut`` lets the tokenizer cut it.

    Attributes:
        statistics: Counts of each split, after ``setup``.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.

    Examples:
        >>> from lightning_mcore import MCoreEmbeddingData
        >>> data = MCoreEmbeddingData("queries.jsonl", "Qwen/Qwen3-Embedding-0.6B", seq_length=512, batch_size=32)
    """

    def __init__(
        self,
        train_files: str | list[str],
        tokenizer: Any,
        seq_length: int,
        batch_size: int = 1,
        validation_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        validation_share: float = 0.0,
        packing: bool = False,
        overlong: Overlong = "error",
        shuffle: bool = True,
        seed: int = 1234,
        num_workers: int = 0,
        num_proc: int = 1,
        cache_dir: str | None = None,
        eval_batch_size: int | None = None,
        pad_to_seq_length: bool = False,
    ) -> None:
        arguments = passed_on(locals())
        if overlong == "split":
            raise ValueError("overlong='split' would give a query several texts; choose 'error' or 'cut'")
        super().__init__(**arguments)

    def setup(self, stage: str | None = None) -> None:
        """Open the cache and pack.

        Args:
            stage: Lightning's stage: fit, validate, test or predict; None for all.

        Raises:
            ValueError: As in ``MCoreFinetuningData``; or a training batch has nothing to compare.
        """
        super().setup(stage)
        run_on_all_ranks(self._check_batch)

    def _check_module(self) -> None:
        remedy = "does not learn from these; train MCoreEmbedding, or read other data"
        self._require_module("embedding", "queries with texts to compare", remedy)

    def _check_batch(self) -> None:
        is_alone = self.batch_size == 1 and self._embedding.negatives == 0 and data_parallel_place(self.trainer)[1] == 1
        if is_alone and not self.packing and "train" in self._data:
            raise ValueError(ALONE)

    @property
    def _embedding(self) -> Embedding:
        """The module's settings; the default ones without a module."""
        module: Any = self.trainer and self.trainer.lightning_module
        return getattr(module, "embedding", None) or Embedding()

    @property
    def _texts(self) -> int:
        return self._embedding.texts

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        return super()._tokenized_files(files, name, self._reading(self._places if self.overlong == "cut" else None))

    def _reading(self, most: int | None) -> Reading:
        """Return how rows become texts of at most so many tokens."""
        return TextReading(setting=self._embedding.of_rows, most=most)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> TextSamples:
        return TextSamples(tokenized, indices, self._places, name)

    def _packed(self, samples: TextSamples, multiples: PackingMultiples) -> PackedTexts:
        return PackedTexts(samples, self.seq_length, multiples)

    @property
    def _other_texts(self) -> str:
        return f"{self._texts - 1} texts"

    def _note_template(self) -> None:
        """Say nothing: texts are not turns of a conversation."""

    def _summary(self, samples: TextSamples) -> str:
        lengths, rows = samples.each, samples.statistics.rows
        into = f", in {rows:,} rows, {samples.statistics.fill:.2%} filled" if rows else ""
        return (
            f"{len(lengths):,} queries with {self._other_texts} each, {lengths.sum():,} tokens{into},"
            f" {lengths.mean():.1f} on average in a text and {lengths.max()} at most"
        )

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        if self.packing:
            return collate_texts_rows
        return partial(collate_padded_texts, multiple=self._multiples().row, row_length=self._padded_to)


class MCoreRerankingData(MCoreEmbeddingData):
    """Queries, each with documents that are relevant or not, from jsonl or parquet files, for ``MCoreReranker``.

    ``reranking_rows.py`` lists the columns that a file may have. The template and the number of documents come from the
    module's ``Reranker``. A row that does not fit is an error. Arguments that are not explained here are those of
    :class:`~lightning_mcore.MCoreEmbeddingData`.

    Args:
        tokenizer: Folder or name of a ``transformers`` tokenizer, or the tokenizer itself. It adds no special tokens;
            the template has them.
        seq_length: Length of a row, in tokens. A packed row contains all pairs of a query, so with k documents each
            pair may use ``1 / k`` of it.
        overlong: For a pair that is too long: ``error`` raises, ``cut`` cuts it before the end of the template.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.

    Examples:
        >>> from lightning_mcore import MCoreRerankingData
        >>> data = MCoreRerankingData("queries.jsonl", "Qwen/Qwen3-Reranker-0.6B", seq_length=1024, batch_size=8)
    """

    def _check_module(self) -> None:
        remedy = "does not learn from these; train MCoreReranker, or read other data"
        self._require_module("reranker", "queries with documents to rank", remedy)

    def _check_batch(self) -> None:
        setting, pad = self._reranker, self.tokenizer.pad_token_id
        end = self.tokenizer(setting.pieces[-1], add_special_tokens=False)["input_ids"] if setting.pieces[-1] else []
        if setting.tokens is None and pad is not None and end[-1:] == [pad]:
            raise ValueError(
                f"template={setting.template!r} ends with the padding token {self.tokenizer.pad_token!r}, which"
                " transformers would not score; end it with another token"
            )

    @property
    def _reranker(self) -> Reranker:
        """The module's settings; the default ones without a module."""
        module: Any = self.trainer and self.trainer.lightning_module
        return getattr(module, "reranker", None) or Reranker()

    @property
    def _texts(self) -> int:
        return self._reranker.texts

    def _reading(self, most: int | None) -> Reading:
        return RerankingReading(setting=self._reranker.of_rows, most=most)

    @property
    def _other_texts(self) -> str:
        return f"{self._texts} document(s)"
