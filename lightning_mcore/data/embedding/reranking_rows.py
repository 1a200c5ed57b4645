# SPDX-License-Identifier: Apache-2.0
"""Rows of queries with documents that are relevant or not, and these as tokens, for ``MCoreReranker``.

A row has ``query`` (or ``anchor``), and

* ``positive``, a text, and ``negatives``, a list of texts, or ``negative``, a text; or
* ``documents``, a list of texts, and ``labels``, a list of as many numbers; or
* ``document``, a text, and ``label`` (or ``score``), a number;
* optionally ``instruction``: this row's, instead of ``Reranker(instruction=...)``.

A pair of a query and a document becomes one text by the template of :class:`~lightning_mcore.Reranker`. The tokenizer
adds no special tokens to it, as to a text of a chat template.
"""

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mcore.config.reranking import Reranker
from lightning_mcore.data.embedding.rows import TextReading
from lightning_mcore.data.embedding.texts import Texts
from lightning_mcore.data.finetuning.conversations import Row

_QUERY, _INSTRUCTION, _POSITIVE = ("query", "anchor"), "instruction", "positive"
_FORMS = (
    ((_POSITIVE,), ("negatives", "negative")),
    (("documents",), ("labels", "label", "scores")),
    (("document",), ("label", "score")),
)
Judged = list[tuple[str, float]]  # the text of each pair, and its relevance


class RerankingReader:
    """Turns rows into the text of the query with each document, and its relevance."""

    def __init__(self, columns: Iterable[str], setting: Reranker) -> None:
        present = list(columns)
        self._setting = setting
        query, *found = (
            next((name for name in names if name in present), None)
            for names in (_QUERY, *(names for form in _FORMS for names in form))
        )
        forms = [(first, second) for first, second in zip(found[::2], found[1::2], strict=True) if first and second]
        if query is None or len(forms) != 1:
            raise ValueError(
                f"the columns {', '.join(map(repr, present)) or 'none'} are not those of queries with documents; rename"
                " them to 'query' with 'positive' and 'negatives', or 'documents' and 'labels', or 'document' and"
                " 'label'"
            )
        if setting.instruction == "" and "{instruction}" not in setting.pieces and _INSTRUCTION in present:
            raise ValueError(
                f"the files have a column {_INSTRUCTION!r}, which has no place in template={setting.template!r}; put"
                " {instruction} into it, or remove the column"
            )
        self._query: str = query
        self._first, self._second = forms[0]
        self.needed: tuple[str, ...] = (query, self._first, self._second)

    def messages(self, row: Row, name: str) -> Judged:
        """Return a row's pairs; ValueError for an empty text, another number or a label that the loss cannot use."""
        setting = self._setting
        first, second = (_listed(row[column]) for column in (self._first, self._second))
        documents, labels, columns = first, second, [self._first] * len(first)
        if self._first == _POSITIVE:
            documents, labels = [*first, *second], [1.0] + [0.0] * len(second)
            columns += [self._second] * len(second)
        if len(documents) != setting.documents or len(labels) != len(documents):
            raise ValueError(
                f"{name} has {len(documents)} document(s) with {len(labels)} label(s), but"
                f" documents={setting.documents} is set; give each row {setting.documents}, or change"
                " Reranker(documents=...)"
            )
        self._check_texts([(self._query, row[self._query]), *zip(columns, documents, strict=True)], name)
        relevance = [self._relevance(label, name) for label in labels]
        if setting.loss != "binary_cross_entropy" and not max(relevance) > (
            min(relevance) if setting.loss == "ranknet" else 0
        ):
            raise ValueError(
                f"{name} has the labels {labels}, none of which is a positive for the loss {setting.loss!r}; remove the"
                " row, or choose 'binary_cross_entropy'"
            )
        own = row.get(_INSTRUCTION)
        if own is not None and not isinstance(own, str):
            raise TypeError(f"{_INSTRUCTION!r} of {name} is of type {type(own).__name__}; give text")
        texts = [setting.text_of(row[self._query], document, own) for document in documents]
        return list(zip(texts, relevance, strict=True))

    def _check_texts(self, texts: list[tuple[str, Any]], name: str) -> None:
        for column, text in texts:
            if not isinstance(text, str):
                raise TypeError(f"{column!r} of {name} is of type {type(text).__name__}; give text")
            if not text.strip():
                raise ValueError(f"{column!r} of {name} is empty, so there is nothing to score; remove the row")

    def _relevance(self, label: Any, name: str) -> float:
        most = 1.0 if self._setting.loss == "binary_cross_entropy" else math.inf
        is_number = isinstance(label, numbers.Real | bool)
        if not is_number or not 0 <= label <= most or math.isinf(label):
            allowed = "0 to 1" if most == 1 else "0 or more"
            raise ValueError(
                f"{self._second!r} of {name} has {label!r}, which the loss {self._setting.loss!r} cannot use; give"
                f" numbers of {allowed}"
            )
        return float(label)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


class RerankingEncoder:
    """Tokenises pairs. Those of more than ``most`` tokens are cut, and the template's end is put behind the cut."""

    def __init__(self, tokenizer: Any, most: int | None, setting: Reranker) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._end: list[int] = self._tokens([setting.pieces[-1]])[0] if setting.pieces[-1] else []
        if most is not None and len(self._end) >= most:
            raise ValueError(
                f"the text after {{document}} in template={setting.template!r} has {len(self._end)} tokens, and a pair"
                f" may have {most}; choose a larger seq_length"
            )

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found

    def encode(self, pairs: Judged, sample_id: int, name: str) -> Texts:
        """Return the tokens of a row's pairs and their relevances; errors call the row ``name``."""
        tokens = [np.asarray(self._cut(ids), np.int32) for ids in self._tokens([text for text, _ in pairs])]
        return Texts(tokens, sample_id, [relevance for _, relevance in pairs])

    def _cut(self, ids: list[int]) -> list[int]:
        # 10 tokens, of which the last 2 are the template's end, in 6 places: the first 4 and these 2
        if self._most is None or len(ids) <= self._most:
            return ids
        return [*ids[: self._most - len(self._end)], *self._end]


@dataclass(frozen=True)
class RerankingReading(TextReading):
    """How rows become pairs and tokens; ``most`` cuts longer ones."""

    setting: Reranker = Reranker()  # type: ignore[assignment]

    def reader(self, columns: Iterable[str]) -> Any:
        """Return the reader of rows with these columns."""
        return RerankingReader(columns, self.setting)

    def encoder(self, tokenizer: Any) -> Any:
        """Return the encoder of pairs."""
        return RerankingEncoder(tokenizer, self.most, self.setting)

    def columns(self, sample: Texts) -> dict[str, Any]:
        """Return a row of the cache, with the relevance of each text."""
        return {**super().columns(sample), "relevance": sample.relevance}

    def features(self) -> dict[str, Any]:
        """Return the types of the additional columns."""
        from datasets import Sequence, Value

        return {**super().features(), "relevance": Sequence(Value("float32"))}
