# SPDX-License-Identifier: Apache-2.0
"""Files of conversations as a dataset of tokens, kept in a cache.

Files are tokenised once. The cache's name depends on everything that decides the tokens: the files with their sizes and
modification times, the tokenizer with its chat template, and the settings of :class:`Reading`. Row length is not part
of it, so it can change without tokenising again. ``datamodule.py`` asks for the dataset on every rank, first on one
rank of each machine. That rank compares the cache with its checksums, and makes it again if they differ
(``data/checked_files.py``).

The cache also describes its sources (:func:`sources_of`), so that a resumed run can compare its data with the
checkpoint's.
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

from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.data.checked_files import cached_folder, first_change, named_fingerprints
from lightning_mcore.data.finetuning.chat import ChatEncoder, ChatTemplate, TemplateEncoder
from lightning_mcore.data.finetuning.conversations import ConversationReader, Format, LossOn, Message, Row
from lightning_mcore.data.finetuning.files import explained, file_marks, load_rows, require_datasets
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.preprocess.tokenizer import tokenizer_digest

_CACHE_VERSION = "5"  # part of the name; a change of format starts new caches
_FILES = "the files"
_SOURCES = "sources.json"
_TOKENS = "tokens"


class RowReader(Protocol):
    """Turns rows into conversations, like ``ConversationReader``; ``needed`` lists the columns of each row."""

    needed: tuple[str, ...]

    def messages(self, row: Row, name: str) -> list[Message]:
        """Return the conversation of a row; errors call the row ``name``."""


class Encoder(Protocol):
    """Tokenises conversations, like ``ChatEncoder``."""

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation; errors call it ``name``."""


@dataclass(frozen=True)
class Reading:
    """How rows become conversations and tokens; ``MCoreFinetuningData`` explains the fields.

    Subclasses read other data. Everything that decides the tokens is a field, and so part of the cache's name.
    """

    format: Format = "auto"
    prompt_column: str = "prompt"
    response_column: str = "response"
    loss_on: LossOn = "assistant"
    template: ChatTemplate | None = None
    longest: int | None = None  # tokens of a sample under a named template; None for no limit

    def __post_init__(self) -> None:
        require_choice("format", self.format, Format)
        require_choice("loss_on", self.loss_on, LossOn)

    def reader(self, columns: Iterable[str]) -> RowReader:
        """Return the reader that turns rows with these columns into conversations."""
        in_full = self.template is None  # a named template writes texts alone
        return ConversationReader(columns, self.format, self.prompt_column, self.response_column, in_full)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder that tokenises conversations."""
        if self.template is None:
            return ChatEncoder(tokenizer, self.loss_on)
        return TemplateEncoder(tokenizer, self.template, self.loss_on, self.longest)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of the rows to read out of ``rows``; None for all."""
        return None

    def with_partners(self, rows: Any) -> Any:
        """Return a ``datasets.Dataset`` of the same length, with the columns that a row needs of other rows."""
        return rows

    def columns(self, sample: Any) -> dict[str, Any]:
        """Return the columns of an encoded row; :func:`tokenize_files` lists them."""
        return columns_of(sample)

    def features(self) -> dict[str, Any]:
        """Return the types of the columns that :meth:`encoded` adds, by name: types of ``datasets``, or their names."""
        return {}

    def encoded(self, reader: RowReader, encoder: Encoder, row: Row, index: int, name: str) -> dict[str, Any]:
        """Return the cache's columns of row number ``index``, which errors call ``name``."""
        return self.columns(encoder.encode(reader.messages(row, name), index, name))


def tokenize_files(
    files: Sequence[str],
    name: str,
    tokenizer: Any,
    reading: Reading,
    cache_dir: str | None = None,
    num_proc: int = 1,
    check: bool = True,
) -> Any:
    """Return a ``datasets.Dataset`` with the tokens of each row of the files, from the cache if possible.

    Its columns: ``tokens`` and ``learnt`` as in :class:`~lightning_mcore.data.packing.best_fit.TokenSample`, both empty
    if the row has nothing to learn; ``length``, the places that the sample takes in a row; ``num_targets``;
    ``largest``, the largest token. ``check`` compares the cache with its checksums, which one process on each machine
    should.
    """
    encoder = reading.encoder(tokenizer)
    key = _key(files, tokenizer, reading)

    def make(folder: str) -> None:
        # The rows are not kept: nothing could tell whether they still match the files.
        rows_folder = os.path.join(folder, "rows")
        rows = load_rows(files, rows_folder)
        chosen = reading.chosen(len(rows))
        rows = rows if chosen is None else rows.select(chosen)
        reader = reading.reader(rows.column_names)
        rows = reading.with_partners(rows)
        try:
            rows.map(
                functools.partial(_tokenize, reading, reader, encoder, files[0] if len(files) == 1 else name, chosen),
                with_indices=True,
                remove_columns=rows.column_names,
                features=_features(reading),
                num_proc=num_proc if num_proc > 1 else None,
                cache_file_name=os.path.join(folder, f"{_TOKENS}.arrow"),  # one file per process with num_proc
                new_fingerprint=key,
                desc=f"tokenising {name}",
            )
        except UnicodeDecodeError:  # pyarrow reads such files without an error
            with explained(files):
                raise
        shutil.rmtree(rows_folder)
        with open(os.path.join(folder, _SOURCES), "w", encoding="utf-8") as file:
            json.dump(describe_sources(files, tokenizer, reading), file)

    folder = os.path.join(cache_folder(cache_dir), key)
    checksums = cached_folder(folder, make, f"the tokens of {name}", check)
    tokens = [os.path.join(folder, file) for file in sorted(checksums.files) if file.startswith(_TOKENS)]
    return _opened(tokens, reading)


def describe_sources(files: Sequence[str], tokenizer: Any, reading: Reading) -> dict[str, Any]:
    """Return everything that decides the tokens, in a user's words; files count by content, not by location."""
    template = {} if reading.template is not None else {"the chat template": _short(str(tokenizer.chat_template))}
    # File names within the settings lose their folder, so that data may move between runs.
    settings = functools.reduce(lambda text, file: text.replace(file, os.path.basename(file)), files, repr(reading))
    return {
        _FILES: named_fingerprints(files),
        "the tokenizer": tokenizer_digest(tokenizer),
        **template,
        "the reading of the rows": _short(settings),
    }


def sources_of(tokenized: Any) -> list[dict[str, Any]]:
    """Return the descriptions (:func:`describe_sources`) stored with a dataset of :func:`tokenize_files`."""
    folders = dict.fromkeys(os.path.dirname(file["filename"]) for file in tokenized.cache_files)
    found = []
    for folder in folders:
        with open(os.path.join(folder, _SOURCES), encoding="utf-8") as file:
            found.append(json.load(file))
    return found


def compare_sources(then: Mapping[str, Any], now: Mapping[str, Any], in_epoch: bool) -> None:
    """Warn if the training data has changed since a checkpoint was taken; raise ValueError if that was mid-epoch."""
    changed = _changed_source(then, now)
    if changed is None:
        return
    if in_epoch:
        raise ValueError(
            f"the checkpoint was taken in the middle of an epoch over different data, which differs in {changed};"
            " resume with the data of its run, or from the end of an epoch"
        )
    rank_zero_warn(f"the run continues with different training data than before: it differs in {changed}")


def _changed_source(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first difference between two descriptions, as part of a sentence; None if they are equal."""
    counts = [sum(name.startswith(_FILES) for name in part) for part in (then, now)]
    if counts[0] != counts[1]:
        return f"the number of datasets, which was {counts[0]} and is now {counts[1]}"
    if (change := first_change(then, now)) is None:
        return None
    name, before, value = change
    if isinstance(value, list) and isinstance(before, list):
        pairs = zip_longest(before, value, fillvalue="absent")
        before, value = next((old, new) for old, new in pairs if old != new)
    return f"{name}, which was {before} and is now {value}"


def cache_folder(cache_dir: str | None) -> str:
    """Return the folder for this package's files in the cache of ``datasets``, or in ``cache_dir``."""
    require_datasets()
    if cache_dir is None:
        from datasets import config

        cache_dir = str(config.HF_DATASETS_CACHE)
    return os.path.join(os.path.abspath(cache_dir), "lightning_mcore")


def _opened(files: Sequence[str], reading: Reading) -> Any:
    from datasets import Dataset, concatenate_datasets

    if not files:
        features = _features(reading)
        return Dataset.from_dict({name: [] for name in features}, features)
    return concatenate_datasets([Dataset.from_file(file) for file in files])


def columns_of_stream(rows: Any, files: Sequence[str]) -> list[str]:
    """Return the columns of a ``datasets.IterableDataset``; if unknown, of its first row."""
    with explained(files):
        columns = rows.column_names if rows.column_names is not None else list(next(iter(rows), {}))
        if not columns:
            raise ValueError("its rows have no columns; give each row a prompt and a response, or messages")
    return list(columns)


def _tokenize(
    reading: Reading, reader: RowReader, encoder: Encoder, name: str, chosen: Sequence[int] | None, row: Row, index: int
) -> dict[str, Any]:
    """Return the cache's columns of a row; other processes get this function with all but the row and its index."""
    number = index if chosen is None else chosen[index]
    return reading.encoded(reader, encoder, row, index, f"row {number} of {name}")


def columns_of(sample: TokenSample) -> dict[str, Any]:
    """Return a sample as a row of the cache."""
    return {
        "tokens": sample.tokens,
        "learnt": sample.loss_mask,
        "length": sample.length,
        "num_targets": sample.num_targets,
        "largest": int(sample.tokens.max(initial=0)),
    }


def _features(reading: Reading) -> Any:
    from datasets import Features, Sequence, Value

    types: dict[str, Any] = dict.fromkeys(("length", "num_targets", "largest"), "int64")
    types |= reading.features()
    more = {name: Value(kind) if isinstance(kind, str) else kind for name, kind in types.items()}
    return Features({"tokens": Sequence(Value("int32")), "learnt": Sequence(Value("bool")), **more})


def _key(files: Sequence[str], tokenizer: Any, reading: Reading) -> str:
    parts = [
        *(_CACHE_VERSION, repr(reading), importlib.metadata.version("transformers")),
        *(tokenizer_digest(tokenizer), str(tokenizer.chat_template), *file_marks(files)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
