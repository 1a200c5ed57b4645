# SPDX-License-Identifier: Apache-2.0
"""The settings of training a reranker, as plain data: loss, score, documents of a query and the text of a pair.

``layers/reranking.py`` has the losses, ``models/reranker.py`` the module that trains with them. Files and
hyper-parameters hold the settings as a dict, which :meth:`Reranker.of` reads.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_mcore.config.value_checks import Settings, choices, make_fields_plain, require_choice, require_size

RerankingLoss: TypeAlias = Literal["softmax", "binary_cross_entropy", "ranknet"]
"""The losses; ``layers/reranking.py`` has the formulas."""

TEMPLATES: Mapping[str, str] = {
    "plain": "Query: {query}\nDocument: {document}",
    "qwen3-reranker": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    ),
}
"""Named templates for a pair; the text of ``qwen3-reranker`` is from the model card."""

_PLACES = ("instruction", "query", "document")


@dataclass(frozen=True)
class Reranker(Settings):
    r"""How a model learns to give a query's relevant documents higher scores than its other ones.

    A query has documents in a list, each with a relevance: 1 for a positive, 0 for a negative, or the label in a file.

    Args:
        loss: ``"softmax"`` is the cross-entropy between the softmax of a list's scores and its relevances, divided by
            their sum; with one positive, ``-log(softmax(scores)[positive])``. ``"binary_cross_entropy"`` is the mean
            over a list's documents of the cross-entropy between ``sigmoid(score)`` and the relevance, 0 to 1.
            ``"ranknet"`` is the mean over a list's pairs of documents, the first of which is more relevant, of
            ``log(1 + exp(-(first score - second score)))``.
        documents: Documents in each query's list: a positive and its negatives, or the labelled documents.
        tokens: The score is a language model's logit of the first of these tokens minus that of the second, if there is
            one, after the pair's last token: texts that are one token each, such as ``["yes", "no"]``, or their ids.
            None scores the last token with a layer of one output, as transformers' ``*ForSequenceClassification``.
        template: The text of a pair, with ``{query}``, then ``{document}``, and perhaps ``{instruction}``, including
            all special tokens; or ``"plain"`` or ``"qwen3-reranker"``.
        instruction: Stands for ``{instruction}`` if a row has none of its own.
        top_k: Places of a ranked list that ``val_mrr`` and ``val_ndcg`` look at.

    Raises:
        ValueError: A value is out of range, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        >>> from lightning_mcore import Reranker
        >>> scoring = Reranker(documents=8, template="Q: {query}\nD: {document}\nRelevant:")
        >>> qwen = Reranker(
        ...     "binary_cross_entropy", 1, ["yes", "no"], "qwen3-reranker", "Given a web search query, ..."
        ... )
    """

    argument = "reranker"
    loss: RerankingLoss = "softmax"
    documents: int = 2
    tokens: list[Any] | None = None
    template: str = "plain"
    instruction: str = ""
    top_k: int = 10

    def __post_init__(self) -> None:
        make_fields_plain(self)
        require_choice("loss", self.loss, RerankingLoss)
        require_size("documents", self.documents)
        require_size("top_k", self.top_k)
        for name in ("template", "instruction"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r} is not text; give text, or leave it out")
        if self.documents == 1 and self.loss != "binary_cross_entropy":
            raise ValueError(
                f"documents=1 leaves the loss {self.loss!r} nothing to compare; choose 2 or more, or"
                " 'binary_cross_entropy'"
            )
        self._check_template()
        self._check_tokens()

    def _check_template(self) -> None:
        found = [place for place in self.pieces if place in _BRACES]
        if [*dict.fromkeys(found)] != found or [place for place in found if place != _BRACES[0]] != [*_BRACES[1:]]:
            raise ValueError(
                f"template={self.template!r} does not say where the pair is; choose"
                f" {choices(map(repr, TEMPLATES))}, or give a text with {{query}}, then {{document}}, each once"
            )
        if self.instruction and _BRACES[0] not in found:
            raise ValueError(
                f"instruction={self.instruction!r} has no place in template={self.template!r}; put {{instruction}} into"
                " it, or leave instruction out"
            )

    def _check_tokens(self) -> None:
        tokens = self.tokens
        if tokens is None:
            return
        kinds = {type(token) for token in tokens} if isinstance(tokens, list) else set()
        if kinds not in ({str}, {int}):
            quoted = "; in YAML, put quotes around yes and no" if bool in kinds else ""
            raise TypeError(f"tokens={tokens!r} are neither texts nor ids of tokens; give one or two of them{quoted}")
        if len(tokens) > 2 or len({*tokens}) < len(tokens):
            raise ValueError(f"tokens={tokens!r} are not one token or two different ones; give the yes token, and no's")

    @property
    def pieces(self) -> list[str]:
        """The template's text, cut before and after each place: ``["Q: ", "{query}", " D: ", "{document}", ""]``."""
        return _PLACE.split(TEMPLATES.get(self.template, self.template))

    @property
    def texts(self) -> int:
        """Sequences of a row: a pair of the query and each document."""
        return self.documents

    @property
    def of_rows(self) -> "Reranker":
        """The settings that decide what is read from a row; the others have their defaults."""
        return dataclasses.replace(self, tokens=None, top_k=Reranker.top_k)

    def text_of(self, query: str, document: str, instruction: str | None = None) -> str:
        """Return the text of a pair; ``instruction`` is the row's own, if it has one."""
        values = (self.instruction if instruction is None else instruction, query, document)
        given = dict(zip(_BRACES, values, strict=True))
        return "".join(given.get(piece, piece) for piece in self.pieces)


_BRACES = tuple(f"{{{name}}}" for name in _PLACES)
_PLACE = re.compile("(" + "|".join(map(re.escape, _BRACES)) + ")")


def faults_of_batch(reranker: Reranker, rows: int) -> Iterator[str]:
    """Yield a sentence if microbatches of so many padded rows cut the documents of a query apart."""
    if rows % reranker.documents:
        yield (
            f"micro_batch_size={rows} cuts the {reranker.documents} documents of a query apart; choose a multiple of"
            f" {reranker.documents}"
        )
