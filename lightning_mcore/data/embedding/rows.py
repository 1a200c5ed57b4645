# SPDX-License-Identifier: Apache-2.0
"""Rows of queries with texts that answer them and texts that do not, and these as tokens.

A row has the columns

* ``query`` (or ``anchor``) and ``positive``: texts;
* ``negatives``, a list of texts, or ``negative``, a text: hard negatives, if the model learns from some;
* optionally ``query_prompt``: text before this row's query, instead of ``Embedding(query_prompt=...)``.

:class:`TextReading` tokenises them in the pipeline of ``finetuning/tokenized.py``, with the special tokens that the
tokenizer adds to a text, as ``SentenceTransformer.encode`` does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mcore.config.embedding import Embedding
from lightning_mcore.data.embedding.texts import Texts
from lightning_mcore.data.finetuning.conversations import Row
from lightning_mcore.data.finetuning.tokenized import Reading

_QUERY, _NEGATIVES, _PROMPT = ("query", "anchor"), ("negatives", "negative"), "query_prompt"


class TextReader:
    """Turns rows into lists of texts with their prompts: query, positive, negatives."""

    def __init__(self, columns: Iterable[str], setting: Embedding) -> None:
        present = list(columns)
        self._setting = setting
        found = [next((name for name in names if name in present), None) for names in (_QUERY, _NEGATIVES)]
        if found[0] is None or "positive" not in present:
            raise ValueError(
                f"the columns {', '.join(map(repr, present)) or 'none'} contain no queries with texts that answer them;"
                " rename them to 'query' and 'positive', and hard negatives to 'negatives'"
            )
        self._query, self._negatives = found[0], found[1]
        if setting.negatives and self._negatives is None:
            raise ValueError(
                f"negatives={setting.negatives} needs a column 'negatives', and the files have"
                f" {', '.join(map(repr, present))}; add it, or set Embedding(negatives=0)"
            )
        if self._negatives is not None and not setting.negatives:
            raise ValueError(
                f"the files have a column {self._negatives!r}, which negatives=0 would not use; set"
                " Embedding(negatives=...) to their number in a row, or remove the column"
            )
        self.needed: tuple[str, ...] = (self._query, "positive", *([self._negatives] if self._negatives else []))

    def messages(self, row: Row, name: str) -> list[str]:
        """Return a row's texts; ValueError for an empty one or another number, TypeError for something else."""
        setting = self._setting
        given: Any = row[self._negatives] if self._negatives else []
        negatives = [given] if isinstance(given, str) else list(given or [])
        if len(negatives) != setting.negatives:
            raise ValueError(
                f"{name} has {len(negatives)} hard negative(s), but negatives={setting.negatives} is set;"
                f" give each row {setting.negatives}, or change Embedding(negatives=...)"
            )
        prompt = row.get(_PROMPT)
        before = setting.query_prompt if prompt is None else prompt
        columns = [self._query, "positive", *[self._negatives] * len(negatives), _PROMPT]
        texts = [row[self._query], row["positive"], *negatives, before]
        for column, text in zip(columns, texts, strict=True):
            if not isinstance(text, str):
                raise TypeError(f"{column!r} of {name} is of type {type(text).__name__}; give text")
            if not text.strip() and column != _PROMPT:
                raise ValueError(f"{column!r} of {name} is empty, so there is nothing to compare; remove the row")
        return [before + texts[0], *(setting.document_prompt + text for text in texts[1:-1])]


class TextEncoder:
    """Tokenises texts, cut to ``most`` tokens, or whole if that is None."""

    def __init__(self, tokenizer: Any, most: int | None) -> None:
        self._tokenizer = tokenizer
        self._cut = {} if most is None else {"truncation": True, "max_length": most}

    def encode(self, texts: list[str], sample_id: int, name: str) -> Texts:
        """Return the tokens of texts; ValueError if one has none. Errors call the row ``name``."""
        tokens = [np.asarray(ids, np.int32) for ids in self._tokenizer(texts, **self._cut)["input_ids"]]
        if not all(map(len, tokens)):
            raise ValueError(f"{name} has a text without a token: {texts[[*map(len, tokens)].index(0)]!r}; remove it")
        return Texts(tokens, sample_id)


@dataclass(frozen=True)
class TextReading(Reading):
    """How rows become texts and tokens; ``most`` cuts longer texts, and the fields of :class:`Reading` have no use."""

    setting: Embedding = Embedding()
    most: int | None = None

    def reader(self, columns: Iterable[str]) -> Any:
        """Return the reader of rows with these columns."""
        return TextReader(columns, self.setting)

    def encoder(self, tokenizer: Any) -> Any:
        """Return the encoder of texts."""
        return TextEncoder(tokenizer, self.most)

    def columns(self, sample: Texts) -> dict[str, Any]:
        """Return a row of the cache: the texts end to end, and in ``lengths`` how long each is."""
        tokens = np.concatenate(sample.tokens)
        return {
            "tokens": tokens,
            "learnt": np.zeros(len(tokens), np.bool_),
            "length": len(tokens),
            "num_targets": 0,
            "largest": int(tokens.max()),
            "lengths": [len(text) for text in sample.tokens],
        }

    def features(self) -> dict[str, Any]:
        """Return the type of the additional column."""
        from datasets import Sequence, Value

        return {"lengths": Sequence(Value("int64"))}
