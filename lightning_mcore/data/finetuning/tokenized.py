# SPDX-License-Identifier: Apache-2.0
"""Files of conversations as a dataset of tokens, kept in a cache.

Tokenising is done once. The cache is named after all that decides the tokens: the files with their sizes and times of
change, the tokenizer with its chat template, and the settings of :class:`Reading`. The length of a row is not among
them, so that it can be changed without tokenising again. ``datamodule.py`` asks for the dataset on every rank, one
of each machine first. That one compares the cache with its checksums, and makes it anew where they differ
(``data/checked_files.py``). The rows that Hugging Face ``datasets`` reads on the way are not kept: nothing would tell
whether they are still those of the files.

Beside the tokens lies what they were made of (:func:`sources_of`), by which a run that is resumed knows its data again.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.data.checked_files import cached_folder, fingerprints
from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.conversations import (
    ConversationReader,
    Format,
    LossOn,
    Message,
    Row,
    require_choice,
)
from lightning_mcore.data.finetuning.files import explained, file_marks, load_rows
from lightning_mcore.data.finetuning.templates import ChatTemplate, TemplateEncoder
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.preprocess.tokenizer import tokenizer_digest

_CACHE_VERSION = "2"
_SOURCES = "sources.json"
_TOKENS = "tokens"


class RowReader(Protocol):
    """Makes conversations of rows, as ``ConversationReader`` does; ``needed`` are the columns of each row."""

    needed: tuple[str, ...]

    def messages(self, row: Row, name: str) -> list[Message]:
        """Return the conversation of a row, which is called ``name`` in errors."""


class Encoder(Protocol):
    """Makes tokens of conversations, as ``ChatEncoder`` does."""

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation, which is called ``name`` in errors."""


@dataclass(frozen=True)
class Reading:
    """How rows become conversations and conversations tokens; ``MCoreFinetuningData`` says what each means.

    Data of other forms derive from it; all that decides the tokens is a field, so that the cache goes by it.

    Raises:
        ValueError: There is no such ``format`` or ``loss_on``.
    """

    format: Format = "auto"
    prompt_column: str = "prompt"
    response_column: str = "response"
    loss_on: LossOn = "assistant"
    template: ChatTemplate | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        require_choice("format", self.format, Format)
        require_choice("loss_on", self.loss_on, LossOn)

    def reader(self, columns: Iterable[str]) -> RowReader:
        """Return what makes conversations of rows with these columns."""
        return ConversationReader(columns, self.format, self.prompt_column, self.response_column)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return what makes tokens of conversations."""
        if self.template is None:
            return ChatEncoder(tokenizer, self.loss_on)
        return TemplateEncoder(tokenizer, self.template, self.loss_on, self.longest)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of the rows that are read, of so many; None for all of them."""
        return None


def tokenize_files(
    files: Sequence[str],
    name: str,
    tokenizer: Any,
    reading: Reading,
    cache_dir: str | None = None,
    num_proc: int = 1,
    check: bool = True,
) -> Any:
    """Return a ``datasets.Dataset`` with a row of tokens for each row of the files, from the cache if they are there.

    Its columns: ``tokens`` and ``learnt`` as in :class:`~lightning_mcore.data.packing.best_fit.TokenSample`, both empty
    where nothing is to be learnt; ``length``, places that the sample takes in a row; ``num_targets``;
    ``largest``, the largest token.

    Args:
        files: What ``find_files`` found.
        name: What to call them in errors, such as ``"train_files"``.
        tokenizer: Of ``transformers``.
        reading: How to read them.
        cache_dir: Where ``datasets`` keeps rows and tokens; None: its own place.
        num_proc: Processes that tokenise.
        check: Compare the cache with its checksums; one process of a machine does.

    Raises:
        ModuleNotFoundError: ``datasets`` is not installed.
        ValueError: A file is broken, a column is missing, a row does not make a conversation, or the tokenizer cannot
            write one.
        TypeError: What should be text is something else.
    """
    encoder = reading.encoder(tokenizer)
    key = _key(files, tokenizer, reading)

    def make(folder: str) -> None:
        rows_folder = os.path.join(folder, "rows")
        rows = load_rows(files, rows_folder)
        chosen = reading.chosen(len(rows))
        rows = rows if chosen is None else rows.select(chosen)
        reader = reading.reader(rows.column_names)
        try:
            rows.map(
                _Tokenize(reader, encoder, files[0] if len(files) == 1 else name, chosen),
                with_indices=True,
                remove_columns=rows.column_names,
                features=_features(),
                num_proc=num_proc if num_proc > 1 else None,
                cache_file_name=os.path.join(folder, f"{_TOKENS}.arrow"),
                new_fingerprint=key,
                desc=f"tokenising {name}",
            )
        except UnicodeDecodeError:  # pyarrow reads over it
            with explained(files):
                raise
        shutil.rmtree(rows_folder)
        with open(os.path.join(folder, _SOURCES), "w", encoding="utf-8") as file:
            json.dump(describe_sources(files, tokenizer, reading), file)

    folder = os.path.join(_cache_folder(cache_dir), "lightning_mcore", key)
    checksums = cached_folder(folder, make, f"the tokens of {name}", check)
    return _opened([os.path.join(folder, file) for file in sorted(checksums.files) if file.startswith(_TOKENS)])


def describe_sources(files: Sequence[str], tokenizer: Any, reading: Reading) -> dict[str, Any]:
    """Return what decides the tokens of files, part by part as a user would call it, by content and not by place."""
    marks = [f"{os.path.basename(file)} ({mark})" for file, mark in zip(files, fingerprints(files), strict=True)]
    template = {} if reading.template is not None else {"the chat template": _short(str(tokenizer.chat_template))}
    settings = functools.reduce(lambda text, file: text.replace(file, os.path.basename(file)), files, repr(reading))
    return {
        "the files": marks,
        "the tokenizer": tokenizer_digest(tokenizer),
        **template,
        "the reading of the rows": _short(settings),
    }


def sources_of(tokenized: Any) -> list[dict[str, Any]]:
    """Return what :func:`describe_sources` said when the tokens of a dataset of :func:`tokenize_files` were made."""
    folders = dict.fromkeys(os.path.dirname(file["filename"]) for file in tokenized.cache_files)
    found = []
    for folder in folders:
        with open(os.path.join(folder, _SOURCES), encoding="utf-8") as file:
            found.append(json.load(file))
    return found


def compare_sources(then: Mapping[str, Any], now: Mapping[str, Any], in_epoch: bool) -> None:
    """Say what changed since a checkpoint was taken.

    Args:
        then: What :func:`describe_sources` said in the run that took it.
        now: What it says now.
        in_epoch: Whether it was taken in the middle of an epoch.

    Raises:
        ValueError: Something changed, and the epoch could not go on with the rest of the same rows.
    """
    changed = _changed_source(then, now)
    if changed is None:
        return
    if in_epoch:
        raise ValueError(
            f"the checkpoint was taken in the middle of an epoch of other data: it differs in {changed}; resume with"
            " the data of its run, or from the end of an epoch"
        )
    rank_zero_warn(f"the run goes on with other training data than before: it differs in {changed}")


def _changed_source(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return what changed between two descriptions of sources, as a part of a sentence; None where nothing did."""
    for name, value in now.items():
        before = then.get(name, value)
        if before != value:
            if isinstance(value, list) and isinstance(before, list):
                pairs = zip_longest(before, value, fillvalue="absent")
                before, value = next((old, new) for old, new in pairs if old != new)
            return f"{name}, which was {before} and is now {value}"
    return None


def _cache_folder(cache_dir: str | None) -> str:
    if cache_dir is not None:
        return os.path.abspath(cache_dir)
    from datasets import config

    return str(config.HF_DATASETS_CACHE)


def _opened(files: Sequence[str]) -> Any:
    """Return the tokens in files of arrow as one dataset; no file stands for no rows."""
    from datasets import Dataset, concatenate_datasets

    if not files:
        return Dataset.from_dict({name: [] for name in _features()}, _features())
    return concatenate_datasets([Dataset.from_file(file) for file in files])


def columns_of_stream(rows: Any, files: Sequence[str]) -> list[str]:
    """Return the columns of a ``datasets.IterableDataset``, from its first row where it does not know them.

    Raises:
        ValueError: Its rows have no columns, or a file is broken.
    """
    with explained(files):
        columns = rows.column_names if rows.column_names is not None else list(next(iter(rows), {}))
        if not columns:
            raise ValueError("its rows have no columns")
    return list(columns)


class _Tokenize:
    """Makes tokens of a row; a class, so that other processes can be handed it."""

    def __init__(self, reader: RowReader, encoder: Encoder, name: str, chosen: Sequence[int] | None) -> None:
        self._reader = reader
        self._encoder = encoder
        self._name = name
        self._chosen = chosen

    def __call__(self, row: Row, index: int) -> dict[str, Any]:
        name = f"row {index if self._chosen is None else self._chosen[index]} of {self._name}"
        sample = self._encoder.encode(self._reader.messages(row, name), index, name)
        return {
            "tokens": sample.tokens,
            "learnt": sample.loss_mask,
            "length": sample.length,
            "num_targets": sample.num_targets,
            "largest": int(sample.tokens.max(initial=0)),
        }


def _features() -> Any:
    from datasets import Features, Sequence, Value

    numbers = {name: Value("int64") for name in ("length", "num_targets", "largest")}
    return Features({"tokens": Sequence(Value("int32")), "learnt": Sequence(Value("bool")), **numbers})


def _key(files: Sequence[str], tokenizer: Any, reading: Reading) -> str:
    """Return the name under which the tokens are kept."""
    parts = [
        *(_CACHE_VERSION, repr(reading), importlib.metadata.version("transformers")),
        *(tokenizer_digest(tokenizer), str(tokenizer.chat_template), *file_marks(files)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
