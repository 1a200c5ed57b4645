# SPDX-License-Identifier: Apache-2.0
"""The settings of training embeddings, as plain data: pooling, loss, hard negatives and prompts.

``layers/embedding.py`` has pooling and loss, ``models/embedding.py`` the module that trains with them. Files and
hyper-parameters hold the settings as a dict, which :meth:`Embedding.of` reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_mcore.config.rules.model import faults_of_mean
from lightning_mcore.config.value_checks import Settings, require_choice, require_number, require_size

Pooling: TypeAlias = Literal["last", "mean"]
"""How the hidden states of a text become its vector."""


@dataclass(frozen=True)
class Embedding(Settings):
    r"""How a model learns to give a query and the text that answers it similar vectors.

    The loss of a query is InfoNCE, ``-log(exp(s+ / temperature) / sum(exp(s / temperature)))``. ``s`` are the cosine
    similarities to all positives and hard negatives of the microbatch on all data-parallel ranks, and ``s+`` is the one
    to its own positive.

    Args:
        pooling: ``"last"`` takes the hidden state of a text's last token, as Qwen3-Embedding and E5-Mistral do;
            ``"mean"`` takes the mean over its tokens.
        temperature: Divides the similarities.
        negatives: Hard negatives of each query; the data must have as many in each row.
        matryoshka_sizes: Sizes at which the beginning of a vector is trained as a vector of its own; the loss is the
            sum over them. None trains whole vectors only.
        query_prompt: Text that is put before each query, such as ``"Instruct: ...\nQuery:"``.
        document_prompt: Text that is put before each positive and negative.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.

    Examples:
        >>> from lightning_mcore import Embedding
        >>> hard = Embedding(negatives=7, query_prompt="Instruct: Find the answer.\nQuery:")
        >>> of_any_size = Embedding("mean", temperature=0.05, matryoshka_sizes=[1024, 256, 64])
    """

    argument = "embedding"
    pooling: Pooling = "last"
    temperature: float = 0.02
    negatives: int = 0
    matryoshka_sizes: list[int] | None = None
    query_prompt: str = ""
    document_prompt: str = ""

    def __post_init__(self) -> None:
        require_choice("pooling", self.pooling, Pooling)
        require_number("temperature", self.temperature)
        require_size("negatives", self.negatives, at_least=0)
        for name in ("query_prompt", "document_prompt"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r} is not text; give text, or leave it out")
        sizes = self.matryoshka_sizes
        if sizes is None:
            return
        if not isinstance(sizes, list) or not sizes:
            raise TypeError(f"matryoshka_sizes={sizes!r} is not a list of sizes; give one, such as [1024, 256, 64]")
        for size in sizes:
            require_size("matryoshka_sizes", size)
        if len({*sizes}) < len(sizes):
            raise ValueError(f"matryoshka_sizes={sizes} has a size twice; give each once")

    @property
    def texts(self) -> int:
        """Texts of a row: the query, its positive and its hard negatives."""
        return 2 + self.negatives

    @property
    def of_rows(self) -> "Embedding":
        """The settings that decide what is read from a row; the others have their defaults."""
        return Embedding(negatives=self.negatives, query_prompt=self.query_prompt, document_prompt=self.document_prompt)


def faults_with_model(embedding: Embedding, config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that a model with such a config does not allow."""
    largest = max(embedding.matryoshka_sizes or [0])
    if largest > config.hidden_size:
        yield (
            f"matryoshka_sizes={embedding.matryoshka_sizes} with hidden_size={config.hidden_size}: a vector has no"
            f" {largest} numbers; choose sizes up to {config.hidden_size}"
        )
    yield from faults_of_mean(config)


def faults_of_batch(embedding: Embedding, rows: int, copies: int) -> Iterator[str]:
    """Yield a sentence if microbatches of so many rows on so many data-parallel ranks cut rows apart or teach nothing.

    A query, its positive and each negative have a row of their own, so packed rows are not checked.
    """
    if rows % embedding.texts:
        yield (
            f"micro_batch_size={rows} cuts the {embedding.texts} texts of a query apart; choose a multiple of"
            f" {embedding.texts}"
        )
    elif rows == embedding.texts == 2 and copies == 1:
        yield ALONE


ALONE = (
    "a batch of one query with negatives=0 on one data-parallel rank has nothing to compare, so its loss is always 0;"
    " choose a larger batch_size, more data-parallel ranks, or Embedding(negatives=...)"
)
"""What is wrong with a batch in which nothing is compared."""
