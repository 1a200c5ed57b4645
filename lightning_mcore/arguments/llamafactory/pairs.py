# SPDX-License-Identifier: Apache-2.0
"""Datasets for ``stage: dpo``, ``kto`` and ``rm`` of a LLaMA-Factory file, as pairs.

A dataset with ``ranking: true`` has two answers in each row, in the columns ``chosen`` and ``rejected``: texts in
alpaca's form, and messages in sharegpt's. One with ``kto_tag`` has one answer, and a boolean that says whether it is
desirable. ``data/preference`` turns them into pairs of tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore.arguments.llamafactory.data import FactoryData, FactoryReading, FactoryRows
from lightning_mcore.arguments.llamafactory.datasets import DatasetEntry
from lightning_mcore.data.finetuning.conversations import Message, Row
from lightning_mcore.data.preference.datamodule import PairLoading
from lightning_mcore.data.preference.rows import PairReading, PreferenceRow, partner_of, preference_row, require_tag


@dataclass(frozen=True)
class FactoryPairReading(PairReading, FactoryReading):
    """How to read the pairs of one dataset."""

    def reader(self, columns: Iterable[str]) -> Any:
        """Return a reader for rows with these columns."""
        return FactoryPairRows(self.entry, list(columns))


class FactoryPairRows(FactoryRows):
    """Turns the rows of a dataset into prompts with two answers; ValueError if the files lack a column."""

    def __init__(self, entry: DatasetEntry, columns: Sequence[str]) -> None:
        self.tag = entry.columns.kto_tag  # says whether an answer is desirable; None for pairs
        super().__init__(entry, columns)

    def _wanted(self, entry: DatasetEntry) -> tuple[str | None, ...]:
        names = entry.columns
        wanted = super()._wanted(entry)
        if self.tag is not None:
            return (*wanted, self.tag)
        # A row of pairs has no single answer.
        return (*(name for name in wanted if name != names.response), names.chosen, names.rejected)

    def messages(self, row: Row, name: str) -> PreferenceRow:  # type: ignore[override]  # read by PairEncoder
        """Return the prompt and the answers of a row, called ``name`` in errors."""
        if self.tag is not None:
            # In KTO, another row of the same block, added to this one, gives the answer for the KL term.
            partner = super().messages(partner_of(row), name)
            return preference_row(super().messages(row, name), partner, require_tag(row, self.tag, name))
        columns = self._entry.columns
        return preference_row(
            self._answered(row, str(columns.chosen), name), self._answered(row, str(columns.rejected), name)
        )

    def _answered(self, row: Row, column: str, name: str) -> list[Message]:
        """Return the conversation of a row that ends with the answer in a column."""
        if self._entry.formatting == "alpaca":
            return super().messages(row, name, answer=column)
        answer, key = row[column], str(self._entry.columns.messages)
        if answer is not None and not isinstance(answer, Mapping):
            raise TypeError(
                f"{column!r} of {name} is of type {type(answer).__name__}; give one message, with a role and a text"
            )
        return super().messages({**row, key: [*(row[key] or []), *([answer] if answer else [])]}, name)


class FactoryPairs(FactoryData, PairLoading):
    """The datasets of a file with ``stage: dpo``, ``kto`` or ``rm``; same arguments as :class:`FactoryData`."""
