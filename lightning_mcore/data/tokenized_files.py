# SPDX-License-Identifier: Apache-2.0
"""Files of conversations as a dataset of tokens, kept in the cache of Hugging Face ``datasets``.

Tokenising is done once. The cache is named after all that decides the tokens: the files with their sizes and times of
change, the tokenizer with its chat template, and the settings of :class:`Reading`. The length of a row is not among
them, so that it can be changed without tokenising again. ``finetuning_data.py`` asks for the dataset on every rank, one
of each machine first.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_mcore.data.chat_templates import ChatTemplate
from lightning_mcore.data.chat_tokens import ChatEncoder
from lightning_mcore.data.conversations import ConversationReader, Format, LossOn, Message, Row, require_choice
from lightning_mcore.data.data_files import explained, file_marks, load_rows
from lightning_mcore.data.packing import TokenSample
from lightning_mcore.data.template_encoder import TemplateEncoder

_CACHE_VERSION = "1"


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
) -> Any:
    """Return a ``datasets.Dataset`` with a row of tokens for each row of the files, from the cache if they are there.

    Its columns: ``tokens`` and ``learnt`` as in :class:`~lightning_mcore.data.packing.TokenSample`, both empty where
    nothing is to be learnt; ``length``, places that the sample takes in a row; ``num_targets``;
    ``largest``, the largest token.

    Args:
        files: What ``find_files`` found.
        name: What to call them in errors, such as ``"train_files"``.
        tokenizer: Of ``transformers``.
        reading: How to read them.
        cache_dir: Where ``datasets`` keeps rows and tokens; None: its own place.
        num_proc: Processes that tokenise.

    Raises:
        ModuleNotFoundError: ``datasets`` is not installed.
        ValueError: A file is broken, a column is missing, a row does not make a conversation, or the tokenizer cannot
            write one.
        TypeError: What should be text is something else.
    """
    encoder = reading.encoder(tokenizer)
    rows = load_rows(files, cache_dir)
    chosen = reading.chosen(len(rows))
    rows = rows if chosen is None else rows.select(chosen)
    reader = reading.reader(rows.column_names)
    tokenize = _Tokenize(reader, encoder, files[0] if len(files) == 1 else name, chosen)
    try:
        return rows.map(
            tokenize,
            with_indices=True,
            remove_columns=rows.column_names,
            features=_features(),
            num_proc=num_proc if num_proc > 1 else None,
            new_fingerprint=_fingerprint(files, tokenizer, reading),
            desc=f"tokenising {name}",
        )
    except UnicodeDecodeError:  # pyarrow reads over it
        with explained(files):
            raise


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


def _fingerprint(files: Sequence[str], tokenizer: Any, reading: Reading) -> str:
    """Return the name under which the tokens are kept."""
    whole = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    parts = [
        *(_CACHE_VERSION, str(reading), importlib.metadata.version("transformers"), type(tokenizer).__name__),
        *(whole, str(tokenizer.chat_template), str(tokenizer.special_tokens_map), *file_marks(files)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
