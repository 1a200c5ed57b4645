# SPDX-License-Identifier: Apache-2.0
"""``FactoryData``, the data module of a LLaMA-Factory file: ``MCoreFinetuningData`` on several datasets.

The datasets are tokenised and cached separately, and then joined in order. ``run.py`` builds the module.

:class:`FactoryRows` turns rows into conversations. ``alpaca`` rows have an instruction, an optional input in another
column, an answer, and perhaps earlier exchanges. ``sharegpt`` and ``openai`` rows have a list of messages, whose roles
the dataset names. Three things differ from ``data/finetuning/conversations.py``: the names come from
``dataset_info.json``; one line break joins the two parts of an instruction; and a conversation whose roles do not
alternate is skipped and counted, as in LLaMA-Factory. A row that calls tools raises, because the templates here cannot
write tool calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.arguments.llamafactory.datasets import Columns, DatasetEntry
from lightning_mcore.data.finetuning.chat import DocumentEncoder
from lightning_mcore.data.finetuning.conversations import Message, Row, earlier_exchanges, has_tools
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.files import with_rows
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading
from lightning_mcore.data.packing.rows import TextBlocks


@dataclass(frozen=True)
class FactoryReading(Reading):
    """How to read the rows of one dataset. Every field is part of the cache's name, as in ``Reading``."""

    entry: DatasetEntry = field(default_factory=lambda: DatasetEntry("", ()))
    max_samples: int | None = None  # read only this many rows, from the start
    seed: int = 42  # for drawing num_samples rows
    documents: bool = False  # a row is a text (stage pt), not a conversation
    joined: bool = False  # texts become one stream, so none begins a sequence

    def reader(self, columns: Iterable[str]) -> "FactoryRows":
        """Return a reader for rows with these columns."""
        return FactoryRows(self.entry, list(columns))

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder for conversations or texts."""
        if self.documents:
            return DocumentEncoder(tokenizer, self.template, begins=not self.joined)
        return super().encoder(tokenizer)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the indices of the rows to read; None for all rows."""
        count = self.entry.num_samples
        if count is None:
            return None if self.max_samples is None else range(min(self.max_samples, rows))
        # num_samples: 8 in a dataset of 5 rows takes each row once, and then 3 rows at random: 4 2 3 1 0 2 4 0 with
        # seed 42. max_samples: 6 keeps the first six of them.
        draw = np.random.default_rng(self.seed)
        order = draw.permutation(rows)[:count]
        order = np.concatenate([order, draw.integers(rows, size=count - len(order))])
        return [int(number) for number in order[: self.max_samples]]


class FactoryRows:
    """Turns the rows of a dataset into conversations; ValueError if ``columns`` lack one that the entry names."""

    def __init__(self, entry: DatasetEntry, columns: Sequence[str]) -> None:
        self.needed = tuple(name for name in self._wanted(entry) if name is not None)
        missing = [name for name in self.needed if name not in columns]
        if missing:
            raise ValueError(
                f"the dataset {entry.name!r} has the columns {', '.join(map(repr, columns))}, but not "
                f"{', '.join(map(repr, missing))}; name its columns in dataset_info.json"
            )
        self._entry = entry

    def _wanted(self, entry: DatasetEntry) -> tuple[str | None, ...]:
        """Return the columns that each row must have; None for columns that the entry does not name."""
        names = entry.columns
        if entry.formatting == "alpaca":
            return (names.prompt, names.query, names.response, names.history, *self._beside(names))
        return (names.messages, *self._beside(names))

    def _beside(self, names: Columns) -> tuple[str | None, ...]:
        return (names.system, names.tools, names.images, names.videos)

    def messages(self, row: Row, name: str, answer: str | None = None) -> list[Message]:
        """Return a row's conversation, empty if the row is skipped; ``answer`` names another column."""
        columns = self._entry.columns
        if columns.tools is not None and has_tools(row[columns.tools]):
            raise ValueError(
                f"{name} calls tools ({columns.tools}), which the templates here cannot write; leave the row out"
            )
        system = _text(row, columns.system, name) if columns.system is not None else ""
        if self._entry.formatting == "alpaca":
            turns = self._exchanges(row, name, answer or columns.response)
        else:
            spoken, turns = self._spoken(row, name)
            # As in LLaMA-Factory, a system message counts even if it is empty.
            system = system if spoken is None else spoken
        # A skipped row has no turns, and then no system message either.
        return [{"role": "system", "content": system}, *turns] if system and turns else turns

    def _exchanges(self, row: Row, name: str, response: str | None) -> list[Message]:
        """Return the turns of an alpaca row; the last answer is empty if the row has none."""
        columns = self._entry.columns
        history = row[columns.history] if columns.history is not None else None
        turns = earlier_exchanges(history if isinstance(history, list) else None, str(columns.history), name)
        parts = [_text(row, column, name) for column in (columns.prompt, columns.query) if column is not None]
        prompt = "\n".join(part for part in parts if part)
        answer = _text(row, response, name) if response is not None else ""
        return [*turns, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    def _spoken(self, row: Row, name: str) -> tuple[str | None, list[Message]]:
        """Return the system message (None if there is none) and the turns of a row of messages.

        There are no turns if the roles do not alternate.
        """
        tags = self._entry.tags
        roles = {tags.user_tag: "user", tags.assistant_tag: "assistant"}
        tools = {tags.observation_tag, tags.function_tag} - {None}
        column = str(self._entry.columns.messages)
        messages = row[column] or []
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f"{column!r} of {name} is not a list of messages; give objects with roles and texts")
        system: str | None = None
        turns: list[Message] = []
        for number, message in enumerate(messages):
            place = f"message {number} of {name}"
            for key in (tags.role_tag, tags.content_tag):
                if key not in message:
                    raise ValueError(f"{place} has no {key!r}; name its fields in the tags of dataset_info.json")
            role = message[tags.role_tag]
            if role in tools or message.get("tool_calls"):
                raise ValueError(f"{place} calls a tool, which the templates here cannot write; leave the row out")
            text = _text(message, tags.content_tag, place)
            if number == 0 and tags.system_tag is not None and role == tags.system_tag:
                system = text
            else:
                # An unknown role becomes "", which fails the comparison below.
                turns.append({"role": roles.get(role, ""), "content": text})
        alternates = [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        return system, turns if alternates else []


def _text(fields: Mapping[str, Any], key: str | None, name: str) -> str:
    """Return the text of a field; empty text for null."""
    value = fields[str(key)]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{key!r} of {name} is of type {type(value).__name__}; give text")
    return value


class FactoryData(MCoreFinetuningData):
    """The datasets of a training file.

    ``readings`` and ``evaluation`` say how to read each dataset; a stream trains on exactly one. ``packing`` packs
    conversations, and cuts joined texts into blocks (:class:`TextBlocks`). ``settings`` are other arguments of
    ``MCoreFinetuningData``.
    """

    def __init__(
        self,
        readings: Sequence[FactoryReading],
        tokenizer: Any,
        seq_length: int,
        evaluation: Sequence[FactoryReading] = (),
        packing: bool = False,
        seed: int = 42,
        **settings: Any,
    ) -> None:
        self._readings = {"train": list(readings), "validation": list(evaluation)}
        self._joined = readings[0].documents and packing
        super().__init__(
            _files(readings),
            tokenizer,
            seq_length,
            validation_files=_files(evaluation) or None,
            # Joined texts are cut into blocks instead (_samples).
            packing=packing and not readings[0].documents,
            overlong="cut",
            seed=seed,
            **settings,
        )
        # For streaming, which reads one dataset; _tokenized uses the reading of each.
        self.reading = readings[0]

    def _tokenized(self, split: str) -> Any:
        """Return the tokens of all datasets, joined in their order."""
        from datasets import concatenate_datasets

        parts = []
        # With validation_share, both splits come from the training datasets.
        for reading in self._readings["train" if self.validation_share else split]:
            name = f"the dataset {reading.entry.name!r}"
            files = with_rows(reading.entry.files)
            parts.append(self._tokenized_files(files, name, reading))
        return parts[0] if len(parts) == 1 else concatenate_datasets(parts)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> Any:
        """Return the dataset of conversations, texts, or blocks of texts."""
        if not self._joined:
            return super()._samples(tokenized, indices, name)
        # As in LLaMA-Factory, every block begins with the tokenizer's first token, if the tokenizer adds one to texts.
        first = self.tokenizer.bos_token_id if getattr(self.tokenizer, "add_bos_token", False) else None
        return TextBlocks(tokenized, indices, self.seq_length, name, first)


def _files(readings: Sequence[FactoryReading]) -> list[str]:
    return [file for reading in readings for file in reading.entry.files]
