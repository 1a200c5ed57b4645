# SPDX-License-Identifier: Apache-2.0
"""``FactoryData``: the data module of a LLaMA-Factory file: ``MCoreFinetuningData`` on several datasets.

The datasets are tokenised and cached separately, and then joined in order. Conversations are packed or padded as in
``MCoreFinetuningData``. In stage ``pt``, texts are either joined and cut into blocks (:class:`TextBlocks`), or each
text has its own row; ``run.py`` chooses.

:class:`FactoryRows` turns rows into conversations, or into texts. ``alpaca`` rows have an instruction, an optional
input in another column, an answer, and perhaps earlier exchanges. ``sharegpt`` and ``openai`` rows have a list of
messages, whose roles the dataset names. Three things differ from ``data/finetuning/conversations.py``: the names come
from ``dataset_info.json``; one line break joins the two parts of an instruction; and a conversation whose roles do not
alternate is skipped and counted, as in LLaMA-Factory. A row that calls tools is refused, because the templates here
cannot write tool calls. ``images.py`` adds images and videos.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.arguments.llamafactory.datasets import Columns, DatasetEntry
from lightning_mcore.data.finetuning.chat import DocumentEncoder
from lightning_mcore.data.finetuning.conversations import Message, Row, earlier_exchanges
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.files import with_rows
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading
from lightning_mcore.data.packing.rows import TextBlocks


@dataclass(frozen=True)
class FactoryReading(Reading):
    """How to read the rows of one dataset.

    Args:
        entry: Its entry in ``dataset_info.json``.
        max_samples: Read only this many rows, from the start; None for all.
        seed: Seed for drawing rows.
        documents: Read each row as a text instead of a conversation.
        joined: The texts will be joined into one stream, so that they do not each begin a sequence.
    """

    entry: DatasetEntry = field(default_factory=lambda: DatasetEntry("", ()))
    max_samples: int | None = None
    seed: int = 42
    documents: bool = False
    joined: bool = False

    def reader(self, columns: Iterable[str]) -> "FactoryRows":
        """Return a reader for rows with these columns."""
        return FactoryRows(self.entry, list(columns))

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder for conversations or texts."""
        if self.documents:
            return DocumentEncoder(tokenizer, self.template, begins=not self.joined)
        return super().encoder(tokenizer)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the indices of the rows to read, at most ``max_samples``; None for all rows."""
        count = self.entry.num_samples
        if count is None:
            return None if self.max_samples is None else range(min(self.max_samples, rows))
        draw = np.random.default_rng(self.seed)
        order = draw.permutation(rows)[:count]
        order = np.concatenate([order, draw.integers(rows, size=count - len(order))])
        return [int(number) for number in order[: self.max_samples]]


class FactoryRows:
    """Turns the rows of a dataset into conversations.

    Args:
        entry: Its entry in ``dataset_info.json``.
        columns: The names of the columns of its files.

    Attributes:
        needed: The columns that each row must have.

    Raises:
        ValueError: The files lack a column that the entry names.
    """

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
        """Return the columns that each row must have; None for those that the entry does not name."""
        names = entry.columns
        if entry.formatting == "alpaca":
            return (names.prompt, names.query, names.response, names.history, *self._beside(names))
        return (names.messages, *self._beside(names))

    def _beside(self, names: Columns) -> tuple[str | None, ...]:
        return (names.system, names.tools, names.images, names.videos)

    def messages(self, row: Row, name: str, answer: str | None = None) -> list[Message]:
        """Return the conversation of a row; an empty list if the row is skipped.

        Args:
            row: Its values by column.
            name: The name of the row in errors.
            answer: The column of the answer of an alpaca row; None for the one that the entry names.

        Raises:
            ValueError: The row calls tools, or a message lacks a field.
            TypeError: A value is not text.
        """
        columns = self._entry.columns
        if columns.tools is not None and row[columns.tools]:
            raise ValueError(
                f"{name} calls tools ({columns.tools}), which the templates here cannot write; leave the row out"
            )
        system = _text(row, columns.system, name) if columns.system is not None else ""
        if self._entry.formatting == "alpaca":
            turns = self._exchanges(row, name, answer or columns.response)
        else:
            spoken, turns = self._spoken(row, name)
            system = spoken or system
        return [{"role": "system", "content": system}, *turns] if system and turns else turns

    def _exchanges(self, row: Row, name: str, response: str | None) -> list[Message]:
        """Return the turns of an alpaca row; the last answer is empty if the row has none."""
        columns = self._entry.columns
        history = row[columns.history] if columns.history is not None else None
        turns = earlier_exchanges(history if isinstance(history, list) else None, str(columns.history), name)
        parts = [_text(row, column, name) for column in (columns.prompt, columns.query) if column is not None]
        prompt = "\n".join(part for part in parts if part)
        answer = _text(row, response, name) if response is not None else ""
        return [*turns, *_exchange(prompt, answer)]

    def _spoken(self, row: Row, name: str) -> tuple[str, list[Message]]:
        """Return the system message and the turns of a row of messages; no turns if the roles do not alternate."""
        tags = self._entry.tags
        roles = {tags.user_tag: "user", tags.assistant_tag: "assistant"}
        tools = {tags.observation_tag, tags.function_tag} - {None}
        column = str(self._entry.columns.messages)
        messages = row[column] or []
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise TypeError(f"{column!r} of {name} is not a list of messages; give objects with roles and texts")
        system, turns = "", []
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
                turns.append({"role": roles.get(role, ""), "content": text})
        alternates = [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        return system, turns if alternates else []


def _exchange(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


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

    Args:
        readings: How to read each training dataset; with ``streaming``, exactly one.
        tokenizer: The tokenizer of the model.
        seq_length: Tokens of a row.
        evaluation: How to read each evaluation dataset.
        batch_size: Rows of a microbatch on each data-parallel rank.
        eval_batch_size: Rows of a microbatch in evaluation; None for ``batch_size``.
        validation_share: Share of the training samples to evaluate on; above 1, their number.
        packing: Put several samples into a row; texts are joined and cut into blocks.
        streaming: Tokenise while training.
        shuffle_buffer: With ``streaming``, the number of samples from which the next one is drawn.
        shuffle: Whether rows come in random order.
        seed: Seed of that order.
        num_workers: Worker processes of each DataLoader.
        num_proc: Number of processes that tokenise.
        cache_dir: Where ``datasets`` keeps rows and tokens.
        pad_to_seq_length: Pad every batch to ``seq_length`` instead of to its longest row.

    Raises:
        ValueError: A setting is out of its range, or two contradict each other.
    """

    def __init__(
        self,
        readings: Sequence[FactoryReading],
        tokenizer: Any,
        seq_length: int,
        evaluation: Sequence[FactoryReading] = (),
        batch_size: int = 1,
        eval_batch_size: int | None = None,
        validation_share: float = 0.0,
        packing: bool = False,
        streaming: bool = False,
        shuffle_buffer: int = 1000,
        shuffle: bool = True,
        seed: int = 42,
        num_workers: int = 0,
        num_proc: int = 1,
        cache_dir: str | None = None,
        pad_to_seq_length: bool = False,
    ) -> None:
        self._readings = {"train": list(readings), "validation": list(evaluation)}
        self._joined = readings[0].documents and packing
        super().__init__(
            _files(readings),
            tokenizer,
            seq_length,
            batch_size,
            validation_files=_files(evaluation) or None,
            validation_share=validation_share,
            packing=packing and not readings[0].documents,
            overlong="cut",
            streaming=streaming,
            shuffle_buffer=shuffle_buffer,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            num_proc=num_proc,
            cache_dir=cache_dir,
            eval_batch_size=eval_batch_size,
            pad_to_seq_length=pad_to_seq_length,
        )
        self.reading = readings[0]

    def _tokenized(self, split: str) -> Any:
        """Return the tokens of all datasets, joined in their order."""
        from datasets import concatenate_datasets

        parts = []
        for reading in self._readings["train" if self.validation_share else split]:
            name = f"the dataset {reading.entry.name!r}"
            files = with_rows(reading.entry.files)
            parts.append(self._tokenized_files(files, name, reading))
        return parts[0] if len(parts) == 1 else concatenate_datasets(parts)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> Any:
        """Return the dataset of conversations, texts, or blocks of texts."""
        if not self._joined:
            return super()._samples(tokenized, indices, name)
        first = self.tokenizer.bos_token_id if getattr(self.tokenizer, "add_bos_token", False) else None
        return TextBlocks(tokenized, indices, self.seq_length, name, first)


def _files(readings: Sequence[FactoryReading]) -> list[str]:
    return [file for reading in readings for file in reading.entry.files]
