# SPDX-License-Identifier: Apache-2.0
"""``MCorePreferenceData``: preference data from jsonl or parquet files, for ``MCorePreference``.

The files go through the pipeline of ``finetuning/datamodule.py``: tokenised once into a cache, read in the same order
on every layout, and resumed exactly. ``rows.py`` describes the rows, ``pairs.py`` the batches.
:meth:`PairLoading.pair_sources` offers each split's pairs, so that log-probabilities under the reference can be
computed before training and kept in the cache.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.data.finetuning.chat import ChatTemplate
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.tokenized import Reading, cache_folder, sources_of
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics, TokenSample
from lightning_mcore.data.packing.rows import PackedDataset, PackingMultiples
from lightning_mcore.data.preference.pairs import (
    Pair,
    build_pair_row,
    collate_padded_pairs,
    collate_pair_rows,
    with_last_token,
)
from lightning_mcore.data.preference.rows import LEFT_OUT, PairReading
from lightning_mcore.parallel.consensus import run_on_all_ranks


class PairSamples(Dataset[Pair]):
    """The pairs of a split that are used; a ``PairSource``.

    ``tokenized`` is a dataset of a :class:`~lightning_mcore.data.preference.rows.PairReading`, and ``indices`` [n]
    selects its rows; row numbers become the pairs' numbers. A sequence may have up to ``places`` tokens; ``scored``
    keeps the last token, for a reward model. Raises ValueError if a sequence is longer, or no pair is left.
    """

    def __init__(
        self,
        tokenized: Any,
        indices: NDArray[np.int64],
        places: int,
        scored: bool,
        folder: str,
        batch_size: int,
        name: str,
    ) -> None:
        self._tokenized = tokenized.with_format("numpy")
        self._scored = scored
        # Fields of PairSource, like ``key`` below.
        self.folder, self.batch_size = folder, batch_size
        self.reference: NDArray[np.float64] | None = None
        length, second, desirable, self.left_out = (
            np.asarray(tokenized.data.column(column).to_numpy(), np.int64)[indices]
            for column in ("length", "second", "desirable", "left_out")
        )
        used = self.left_out == 0
        self.is_tagged = bool((desirable[used] >= 0).any())
        self._indices = indices[used]
        # "length" is the sum of both, in places. Tokens 1 2 3 4 5 and 1 2 3 9: second=5, length=4 + 3, so each =
        # [4, 3], or [5, 4] if the last tokens are scored.
        first = second[used] - 1
        self.each = np.stack([first, length[used] - first], 1) + scored  # [pairs, 2]
        self.lengths: NDArray[np.int64] = self.each.sum(1)
        count = len(self._indices)
        # ``without_answer`` counts all rows that are left out; ``counts`` tells the reasons apart.
        self.statistics = PackingStatistics(samples=len(indices), packed=count, without_answer=len(indices) - count)
        if not count:
            raise ValueError(f"{name} has no pair to learn from ({self.counts()}); give rows with two answers")
        if self.each.max() > places:
            number = int(self.each.max(1).argmax())
            raise ValueError(
                f"{int((self.each > places).any(1).sum())} of {count} pairs of {name} have a sequence of more than"
                f" {places} tokens, the longest {self.each[number].max()} (row {self._indices[number]}); choose a"
                " larger seq_length, or overlong='cut'"
            )
        # Key of the cached reference log-probabilities: it changes with the data, the cut and the selection.
        digest = hashlib.sha256(json.dumps(sources_of(tokenized)).encode())
        digest.update(self._indices.astype("<i8").tobytes() + self.each.astype("<i8").tobytes())
        self.key = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pair:
        return self.take([index])[0]

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[Pair]:
        """Return the pairs at ``indices`` [n], in one read."""
        rows = self._indices[indices].tolist()
        read = self._tokenized[rows]
        pairs = []
        for place, (index, row) in enumerate(zip(np.asarray(indices).tolist(), rows, strict=True)):
            tokens, learnt = np.asarray(read["tokens"][place], np.int64), np.asarray(read["learnt"][place], np.bool_)
            at, tag = int(read["second"][place]), int(read["desirable"][place])
            pair = Pair(
                TokenSample(tokens[:at], learnt[:at], row),
                TokenSample(tokens[at:], learnt[at:], row),
                None if tag < 0 else bool(tag),
                None if self.reference is None else (float(self.reference[index, 0]), float(self.reference[index, 1])),
            )
            pairs.append(with_last_token(pair) if self._scored else pair)
        return pairs

    def counts(self) -> str:
        """Return how many pairs are used and skipped, as part of a sentence."""
        numbers = np.bincount(self.left_out, minlength=len(LEFT_OUT))
        counted = zip(numbers[1:].tolist(), LEFT_OUT[1:], strict=True)
        reasons = [f"left out {number:,} {why}" for number, why in counted if number]
        return "; ".join([f"{numbers[0]:,} of {len(self.left_out):,} pairs", *reasons])


class PackedPairs(PackedDataset):
    """Packed rows of pairs; ``samples`` are :class:`PairSamples`. The two sequences of a pair stay together."""

    @property
    def _lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.samples.each
        return lengths

    def _build(self, samples: NDArray[np.int64], length: int, multiple: int) -> dict[str, Tensor]:
        return build_pair_row(self.samples.take(samples), length, multiple)


class PairLoading(MCoreFinetuningData):
    """The part of ``MCoreFinetuningData`` that differs for pairs; its ``reading`` is a ``PairReading``."""

    def pair_sources(self) -> dict[str, PairSamples]:
        """Return the pairs of each split that is set up, for ``MCorePreference`` to compute its reference."""
        found: dict[str, Any] = self._data
        return {name: data.samples if isinstance(data, PackedPairs) else data for name, data in found.items()}

    def setup(self, stage: str | None = None) -> None:
        """Open the cache and pack.

        Args:
            stage: Lightning's stage: fit, validate, test or predict; None for all.

        Raises:
            ValueError: As in ``MCoreFinetuningData``; or the module does not learn from pairs, or its loss needs the
                other kind of rows.
        """
        super().setup(stage)
        run_on_all_ranks(self._check_tags)

    def _check_module(self) -> None:
        remedy = "learns from single ones; train MCorePreference, or read single answers with MCoreFinetuningData"
        self._require_module("preference", "pairs of answers", remedy)

    def _check_tags(self) -> None:
        for name, source in self.pair_sources().items():
            if self._loss is not None and source.is_tagged != (self._loss == "kto"):
                held, learnt, other = (
                    ("tagged answers", "pairs", "choose 'kto'")
                    if source.is_tagged
                    else ("pairs", "tagged answers", "choose another loss")
                )
                raise ValueError(
                    f"the {name} data contains {held}, but the loss {self._loss!r} learns from {learnt}; give files"
                    f" with these, or {other}"
                )

    @property
    def _loss(self) -> str | None:
        module: Any = self.trainer and self.trainer.lightning_module
        return getattr(getattr(module, "preference", None), "loss", None)

    @property
    def _is_scored(self) -> bool:
        return self._loss == "reward"

    @property
    def _texts(self) -> int:
        return 2

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        assert isinstance(reading, PairReading)
        if self.overlong == "cut":
            # A sequence of n places has n + 1 tokens, or n if the last token must be an input.
            reading = replace(reading, most=self._places + (0 if self._is_scored else 1))
        return super()._tokenized_files(files, name, reading)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> PairSamples:
        folder = f"{cache_folder(self.cache_dir)}/references"
        return PairSamples(tokenized, indices, self._places, self._is_scored, folder, self.batch_size, name)

    def _packed(self, samples: PairSamples, multiples: PackingMultiples) -> PackedPairs:
        return PackedPairs(samples, self.seq_length, multiples)

    def _summary(self, samples: PairSamples) -> str:
        lengths, rows = samples.each, samples.statistics.rows
        into = f", in {rows:,} rows, {samples.statistics.fill:.2%} filled" if rows else ""
        counts, _, more = samples.counts().partition(";")
        return (
            f"{counts}, {lengths.sum():,} tokens{into}, {lengths.mean():.1f} on average in a sequence and"
            f" {lengths.max()} at most{';' if more else ''}{more}"
        )

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        if self.packing:
            return collate_pair_rows
        return partial(collate_padded_pairs, multiple=self._multiples().row, row_length=self._padded_to)


@inherit_help(MCoreFinetuningData)
class MCorePreferenceData(PairLoading):
    """Prompts with two answers, or with one labelled answer, from jsonl or parquet files.

    ``rows.py`` lists the columns that a file may have. Rows without an answer, with equal answers, or with turns that
    do not alternate are skipped and counted in the log. Arguments that are not explained here are those of
    :class:`~lightning_mcore.MCoreFinetuningData`.

    Args:
        seq_length: Length of a row, in tokens. A packed row contains both answers of a pair, so each sequence may use
            up to half.
        batch_size: Pairs in a batch on one data-parallel rank; rows if ``packing``.
        packing: Put several pairs into a row; otherwise each sequence has its own row.
        overlong: For a pair that is too long: ``error`` raises, ``cut`` cuts the prompt and both answers as
            LLaMA-Factory does.
        cache_dir: Folder for the cache of tokens and log-probabilities; None for the cache of ``datasets``.

    Attributes:
        statistics: Counts of each split, after ``setup``.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.

    Examples:
        >>> from lightning_mcore import MCorePreferenceData
        >>> data = MCorePreferenceData("pairs.jsonl", "Qwen/Qwen3-0.6B", seq_length=4096, batch_size=2)
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
        template: str | ChatTemplate | None = None,
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
            raise ValueError("overlong='split' would separate an answer from its prompt; choose 'error' or 'cut'")
        super().__init__(**arguments)
        self.reading = PairReading(loss_on="last_assistant", template=self.reading.template)
