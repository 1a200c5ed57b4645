# SPDX-License-Identifier: Apache-2.0
"""``FactoryData``: the data module of a LLaMA-Factory file, ``MCoreFinetuningData`` over several datasets.

Each dataset is tokenised and cached separately; then they are joined in order. Conversations are packed or padded as in
``MCoreFinetuningData``. In stage ``pt``, texts are either joined and cut into blocks (:class:`TextBlocks`), or each
text has its own row; ``run.py`` chooses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.arguments.llamafactory.rows import FactoryReading
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.files import with_rows
from lightning_mcore.data.packing.rows import TextBlocks, TokenizedSamples


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
        packing: Put several samples into a row; join texts and cut them into blocks.
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

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> TokenizedSamples:
        """Return conversations, texts, or blocks of texts."""
        if not self._joined:
            return super()._samples(tokenized, indices, name)
        first = self.tokenizer.bos_token_id if getattr(self.tokenizer, "add_bos_token", False) else None
        return TextBlocks(tokenized, indices, self.seq_length, name, first)


def _files(readings: Sequence[FactoryReading]) -> list[str]:
    return [file for reading in readings for file in reading.entry.files]
