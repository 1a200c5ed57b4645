# SPDX-License-Identifier: Apache-2.0
"""Rows of a LLaMA-Factory dataset as conversations, or as texts.

``alpaca`` rows are an instruction, more of it in another column, and an answer, perhaps with earlier exchanges;
``sharegpt`` and ``openai`` rows a list of messages under the dataset's own names of roles. What differs from
``data/finetuning/conversations.py``: the names come from ``dataset_info.json``, the two parts of an instruction are
joined by one line break, and a conversation that does not alternate is left out and counted, because there a file with
a few such rows is trained on too. A row that calls tools is refused: the templates here do not write them. ``data.py``
gives the readings of this file to the data module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_mcore.arguments.llamafactory.datasets import DatasetEntry
from lightning_mcore.data.finetuning.conversations import Message, Row
from lightning_mcore.data.finetuning.templates import DocumentEncoder
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading


@dataclass(frozen=True)
class FactoryReading(Reading):
    """How the rows of one dataset are read.

    Args:
        entry: What ``dataset_info.json`` says of it.
        max_samples: Its first so many rows; None: all of them.
        seed: Of the rows that are drawn.
        documents: A row is a text, and not a conversation.
        joined: Texts stand one after another in rows, and none begins a row of its own.
    """

    entry: DatasetEntry = field(default_factory=lambda: DatasetEntry("", ()))
    max_samples: int | None = None
    seed: int = 42
    documents: bool = False
    joined: bool = False

    def reader(self, columns: Iterable[str]) -> "FactoryRows":
        """Return what makes conversations of rows with these columns."""
        return FactoryRows(self.entry, list(columns))

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return what makes tokens of conversations, or of texts."""
        if self.documents:
            return DocumentEncoder(tokenizer, self.template, begins=not self.joined)
        return super().encoder(tokenizer)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of the rows that are read: those that are drawn, and of them the first."""
        count = self.entry.num_samples
        if count is None:
            return None if self.max_samples is None else range(min(self.max_samples, rows))
        draw = np.random.default_rng(self.seed)
        order = draw.permutation(rows)[:count]
        order = np.concatenate([order, draw.integers(rows, size=count - len(order))])
        return [int(number) for number in order[: self.max_samples]]


class FactoryRows:
    """Makes conversations of the rows of a dataset.

    Args:
        entry: What ``dataset_info.json`` says of it.
        columns: Names of the columns that its files have.

    Attributes:
        needed: The columns that each row must have.

    Raises:
        ValueError: Its files lack a column that it names.
    """

    def __init__(self, entry: DatasetEntry, columns: Sequence[str]) -> None:
        names = entry.columns
        wanted: tuple[str | None, ...]
        if entry.formatting == "alpaca":
            wanted = (names.prompt, names.query, names.response, names.history, names.system, names.tools)
        else:
            wanted = (names.messages, names.system, names.tools)
        self.needed = tuple(name for name in wanted if name is not None)
        missing = [name for name in self.needed if name not in columns]
        if missing:
            raise ValueError(
                f"the dataset {entry.name!r} has the columns {', '.join(map(repr, columns))}, and not"
                f" {', '.join(map(repr, missing))}; name its columns in dataset_info.json"
            )
        self._entry = entry

    def messages(self, row: Row, name: str) -> list[Message]:
        """Return the conversation of a row; none where it is left out.

        Args:
            row: Its columns by name.
            name: What to call it in an error.

        Raises:
            ValueError: It calls tools, or a message lacks a field.
            TypeError: What should be text is something else.
        """
        columns = self._entry.columns
        if columns.tools is not None and row[columns.tools]:
            raise ValueError(
                f"{name} calls tools ({columns.tools}), which the templates here do not write; leave the row out"
            )
        system = _text(row, columns.system, name) if columns.system is not None else ""
        if self._entry.formatting == "alpaca":
            turns = self._exchanges(row, name)
        else:
            spoken, turns = self._spoken(row, name)
            system = spoken or system
        return [{"role": "system", "content": system}, *turns] if system and turns else turns

    def _exchanges(self, row: Row, name: str) -> list[Message]:
        """Return the exchanges of an alpaca row; the last has no answer where the row has none."""
        columns = self._entry.columns
        turns: list[Message] = []
        history = row[columns.history] if columns.history is not None else None
        for number, pair in enumerate(history if isinstance(history, list) else []):
            if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise TypeError(f"exchange {number} in {columns.history!r} of {name} is no pair of texts")
            turns += _exchange(*pair)
        parts = [_text(row, column, name) for column in (columns.prompt, columns.query) if column is not None]
        prompt = "\n".join(part for part in parts if part)
        answer = _text(row, columns.response, name) if columns.response is not None else ""
        return [*turns, *_exchange(prompt, answer)]

    def _spoken(self, row: Row, name: str) -> tuple[str, list[Message]]:
        """Return the system's text and the turns of a row of messages."""
        tags = self._entry.tags
        roles = {tags.user_tag: "user", tags.assistant_tag: "assistant"}
        tools = {tags.observation_tag, tags.function_tag} - {None}
        column = str(self._entry.columns.messages)
        messages = row[column] or []
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f"{column!r} of {name} is no list of messages; give objects with roles and texts")
        system, turns = "", []
        for number, message in enumerate(messages):
            place = f"message {number} of {name}"
            for key in (tags.role_tag, tags.content_tag):
                if key not in message:
                    raise ValueError(f"{place} has no {key!r}; name its fields in the tags of dataset_info.json")
            role = message[tags.role_tag]
            if role in tools or message.get("tool_calls"):
                raise ValueError(f"{place} calls a tool, which the templates here do not write; leave the row out")
            text = _text(message, tags.content_tag, place)
            if number == 0 and tags.system_tag is not None and role == tags.system_tag:
                system = text
            else:
                turns.append({"role": roles.get(role, ""), "content": text})
        alternates = [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        return system, turns if alternates else []


def _exchange(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _text(fields: Mapping[str, Any], key: str | None, name: str) -> str:
    """Return a text; null is empty."""
    value = fields[str(key)]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{key!r} of {name} is of type {type(value).__name__}; give text")
    return value
