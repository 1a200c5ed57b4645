# SPDX-License-Identifier: Apache-2.0
"""``MCoreFinetuningData``: fine-tuning on jsonl or parquet files of prompts and responses, or of conversations.

What happens to a file, and when:

1. ``prepare_data``, in one process on each machine, reads the files with Hugging Face ``datasets``, makes a
   conversation of each row (``conversations.py``) and tokenises it (``chat.py``) into a cache (``tokenized.py``).
2. ``setup``, on every rank, opens the cache, skips samples without anything to learn, cuts or splits overlong ones, and
   decides which samples share a row (``data/packing/rows.py``). The log has one line of counts. If a file or a row is
   broken, every rank raises the same error.
3. The loaders read rows in the same order on every layout (``data/sampling.py``).

With ``streaming``, training files are tokenised and packed while they are read (``stream.py``).
``data/packing/rows.py`` describes the batches, packed or dense, for ``MCoreModule.forward_step``.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import packed_row_faults
from lightning_mcore.config.text import counted
from lightning_mcore.config.value_checks import require_choice, require_flag, require_size
from lightning_mcore.data.finetuning.chat import ChatTemplate, named_template
from lightning_mcore.data.finetuning.conversations import Format, LossOn
from lightning_mcore.data.finetuning.files import find_files, first_rows, load_rows, require_same_columns, with_rows
from lightning_mcore.data.finetuning.stream import StreamLoader
from lightning_mcore.data.finetuning.stream_reader import StreamSettings
from lightning_mcore.data.finetuning.tokenized import (
    Reading,
    columns_of_stream,
    compare_sources,
    describe_sources,
    sources_of,
    tokenize_files,
)
from lightning_mcore.data.loop_progress import LoopProgress
from lightning_mcore.data.packing.best_fit import Overlong, PackingStatistics, TokenSample
from lightning_mcore.data.packing.rows import (
    PackedDataset,
    PackingMultiples,
    TokenizedSamples,
    collate_padded,
    collate_rows,
    packing_multiples,
)
from lightning_mcore.data.preprocess.tokenizer import auto_tokenizer
from lightning_mcore.data.sampling import data_parallel_place, evaluation_loader, is_on_cuda, training_loader
from lightning_mcore.data.sources import names_of_sources, with_sources
from lightning_mcore.parallel.consensus import run_on_all_ranks, run_on_rank0

_SPLITS = {"train": "train_files", "validation": "validation_files", "test": "test_files"}
_OF_STAGE = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",), "predict": ()}


class MCoreFinetuningData(pl.LightningDataModule):
    """Prompts and responses, or conversations, from jsonl or parquet files, packed into rows or one per row.

    Args:
        train_files: A file, a folder (all data files in it), a pattern such as ``data/*.jsonl``, or a list of these.
            ``.jsonl``, ``.json`` and ``.parquet`` files are read.
        tokenizer: Folder or name of a ``transformers`` tokenizer, or the tokenizer itself.
        seq_length: Length of a row, in tokens.
        batch_size: Rows in a batch on one data-parallel rank.
        validation_files: Files to validate on, given like ``train_files``; None for none.
        test_files: Files to test on, given like ``train_files``; None for none.
        validation_share: Instead of ``validation_files``, the fraction of training samples to validate on, chosen by
            ``seed``; a number above 1 is a number of samples.
        format: Format of a row: ``prompt_response``, ``alpaca``, ``sharegpt`` or ``messages``; ``auto`` detects it from
            the columns.
        prompt_column: Column of the prompt, for ``prompt_response``.
        response_column: Column of the response, for ``prompt_response``.
        loss_on: What to learn: the turns of the ``assistant``, only the ``last_assistant`` turn, or ``all`` tokens.
        template: How turns are written: name of a LLaMA-Factory template, such as ``llama3``, or a
            :class:`~lightning_mcore.data.finetuning.chat.ChatTemplate`; None for the tokenizer's own.
        packing: Put several samples into a row; otherwise each has its own row, padded to the longest in the batch.
        overlong: For a sample longer than a row: ``error`` raises, ``cut`` keeps its beginning, ``split`` cuts it into
            pieces.
        streaming: Read, tokenise and pack the training files while training, for data that is too large to prepare. The
            sample order then depends on ``seed``, the number of data-parallel ranks and ``num_workers``, and resuming
            in the middle of an epoch requires the same values.
        shuffle_buffer: With ``streaming``, the number of samples from which the next one is drawn; 1 keeps the order of
            the files. Without ``streaming``, all samples are shuffled.
        shuffle: Draw a new order of the rows in each epoch; otherwise keep their order. Not for a stream.
        seed: Seed of the order and of ``validation_share``.
        num_workers: Number of processes per rank that load batches ahead.
        num_proc: Number of processes that tokenise in ``prepare_data``.
        cache_dir: Folder for the cache of tokens; None for the cache of ``datasets``.
        eval_batch_size: The ``batch_size`` of validation and testing; None for the same.
        pad_to_seq_length: Without packing, pad every row to ``seq_length`` instead of to the longest of its batch.
        log_sources: Also log the loss of each file, as ``train_loss/NAME`` and ``val_loss/NAME``.

    Attributes:
        statistics: Counts of used, cut and dropped samples of each split, after ``setup``; not for a stream.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.

    Examples:
        >>> from lightning_mcore import MCoreFinetuningData
        >>> data = MCoreFinetuningData("chats.jsonl", "Qwen/Qwen3-0.6B", seq_length=4096, validation_share=0.05)
    """

    def __init__(
        self,
        train_files: str | list[str],
        tokenizer: Any,
        seq_length: int,
        batch_size: int = 1,
        validation_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        validation_share: float = 0.0,
        format: Format = "auto",
        prompt_column: str = "prompt",
        response_column: str = "response",
        loss_on: LossOn = "assistant",
        template: str | ChatTemplate | None = None,
        packing: bool = True,
        overlong: Overlong = "error",
        streaming: bool = False,
        shuffle_buffer: int = 1000,
        shuffle: bool = True,
        seed: int = 1234,
        num_workers: int = 0,
        num_proc: int = 1,
        cache_dir: str | None = None,
        eval_batch_size: int | None = None,
        pad_to_seq_length: bool = False,
        log_sources: bool = False,
    ) -> None:
        super().__init__()
        evaluated = batch_size if eval_batch_size is None else eval_batch_size
        sizes = {"seq_length": seq_length, "batch_size": batch_size, "eval_batch_size": evaluated}
        for name, size in {**sizes, "shuffle_buffer": shuffle_buffer, "num_proc": num_proc}.items():
            require_size(name, size)
        require_size("num_workers", num_workers, at_least=0)
        require_choice("overlong", overlong, Overlong)
        flags = {"packing": packing, "streaming": streaming, "shuffle": shuffle, "pad_to_seq_length": pad_to_seq_length}
        for name, flag in {**flags, "log_sources": log_sources}.items():
            require_flag(name, flag)
        _check_validation(validation_share, validation_files, streaming)
        self.train_files = train_files
        self.validation_files = validation_files
        self.test_files = test_files
        self.seq_length = seq_length
        self.batch_size = batch_size
        self.eval_batch_size = evaluated
        self.validation_share = validation_share
        chosen = None if template is None else named_template(template)
        self.reading = Reading(format, prompt_column, response_column, loss_on, chosen)
        self.packing = packing
        self.pad_to_seq_length = pad_to_seq_length
        self.overlong: Overlong = overlong
        self.streaming = streaming
        self.shuffle_buffer = shuffle_buffer
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.num_proc = num_proc
        self.cache_dir = cache_dir
        self.statistics: dict[str, PackingStatistics] = {}
        self._given_tokenizer = tokenizer
        self._data: dict[str, TokenizedSamples | PackedDataset] = {}
        self._packed_for: PackingMultiples | None = None
        self._stream: StreamSettings | None = None
        self._failure: Exception | None = None  # of prepare_data, until setup raises it
        self._sources: dict[str, Any] = {}
        self.log_sources = log_sources
        self.source_names: list[str] = []
        """Name of each file in the names of logged losses, after ``setup``; empty without ``log_sources``."""
        self._numbers_of_files: dict[str, int] = {}
        self._rows_of_sources: dict[str, tuple[NDArray[np.int64], list[int]]] = {}  # by split, for with_sources

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded at the first access."""
        if not isinstance(self._given_tokenizer, str):
            return self._given_tokenizer
        try:
            return auto_tokenizer(self._given_tokenizer)
        except ValueError as error:
            raise ValueError(
                f"tokenizer={self._given_tokenizer!r} cannot be loaded: {error}; give the folder"
                " or name of a tokenizer of transformers, or the tokenizer itself"
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer, including added ones."""
        return len(self.tokenizer)

    def prepare_data(self) -> None:
        """Read and tokenise the files into the cache, in one process on each machine.

        Failures are raised in ``setup``, on every rank.
        """
        try:
            for split in self._prepared_splits(None):
                self._tokenized(split)
        except Exception as error:
            # Raised here, it would end this process only, and the others would wait for it at Lightning's next barrier.
            self._failure = error

    def setup(self, stage: str | None = None) -> None:
        """Open the cache and pack.

        Args:
            stage: Lightning's stage: fit, validate, test or predict; None for all.

        Raises:
            ValueError: A file or row is broken, ``seq_length`` does not fit the layout, or the module learns from
                pairs; every rank raises the same error.
            ModuleNotFoundError: ``datasets`` is not installed.
        """
        # Each call is collective: all ranks take the same steps, and if one fails, all raise its error.
        run_on_all_ranks(self._check_module)
        run_on_all_ranks(self._raise_failure)
        multiples = run_on_all_ranks(self._multiples)
        if multiples != self._packed_for:  # another trainer, with another layout
            self._data, self._packed_for = {}, multiples
        splits = [name for name in self._prepared_splits(stage) if name not in self._data]
        run_on_all_ranks(lambda: self._open(splits, multiples))
        if self.log_sources:
            self._number_sources(splits)
        if self.streaming and stage in ("fit", None):
            self._stream = settings = run_on_all_ranks(self._stream_settings)
            # Only rank 0 reads the files for this.
            self._sources = run_on_rank0(partial(describe_sources, settings.files, self.tokenizer, self.reading))
        self._note_template()

    def _note_template(self) -> None:
        if self.reading.template is None and self.tokenizer.chat_template is None:
            rank_zero_info("the tokenizer has no chat template: each row becomes prompt, response and EOS token")

    def _check_module(self) -> None:
        module = self.trainer and self.trainer.lightning_module
        if hasattr(module, "preference"):
            raise ValueError(
                f"the data contains single answers, but {type(module).__name__} learns from pairs of answers; read"
                " pairs with MCorePreferenceData, or train MCoreGPT"
            )
        for setting, reader in (("embedding", "MCoreEmbeddingData"), ("reranker", "MCoreRerankingData")):
            if hasattr(module, setting):
                raise ValueError(
                    f"the data contains single answers, but {type(module).__name__} learns from texts to compare; read"
                    f" these with {reader}, or train MCoreGPT"
                )

    def _require_module(self, setting: str, data: str, remedy: str) -> None:
        """Raise ValueError for one of our modules without a setting that says how it learns from this data."""
        module = self.trainer and self.trainer.lightning_module
        if hasattr(module, "learned_losses") and not hasattr(module, setting):
            raise ValueError(f"the data contains {data}, but {type(module).__name__} {remedy}")

    @property
    def _places(self) -> int:
        """Places that a sequence may take; all sequences of a row of data share a packed row."""
        if not self.packing:
            return self.seq_length
        multiple = self._multiples().sub_sequence
        return self.seq_length // self._texts // multiple * multiple

    @property
    def _texts(self) -> int:
        """Sequences of a row of data."""
        return 1

    def train_dataloader(self) -> Any:
        """Return the loader of the training rows, shuffled in each epoch."""
        if self._stream is not None:
            return StreamLoader(self.trainer, self._stream, *data_parallel_place(self.trainer), self.num_workers)
        data = self._opened("train")
        return training_loader(
            self.trainer,
            data,
            self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            collate_fn=self._collator("train"),
            num_workers=self.num_workers,
            of="rows" if self.packing else "samples",
            costs=data.costs if isinstance(data, PackedDataset) else None,
        )

    def val_dataloader(self) -> Any:
        """Return the loader of the validation rows, in order; an empty list without validation data."""
        return self._evaluation_loader("validation") if self._has("validation") else []

    def test_dataloader(self) -> Any:
        """Return the loader of the test rows, in order; an empty list without test files."""
        return self._evaluation_loader("test") if self._has("test") else []

    def samples_to_store(self) -> tuple[TokenizedSamples, str] | None:
        """Return the training samples and a digest of them and their order, for a teacher's logits; None for a stream.

        Raises:
            RuntimeError: ``setup`` was not called.
        """
        if self.streaming:
            return None
        data = self._opened("train")
        samples = data.samples if isinstance(data, PackedDataset) else data
        digest = hashlib.sha256(json.dumps(self._sources).encode() + samples.order)
        return samples, digest.hexdigest()

    def padded(self, samples: list[TokenSample], multiple: int, row_length: int) -> dict[str, Tensor]:
        """Return samples as a padded batch, as :func:`collate_padded` does."""
        return collate_padded(samples, multiple, row_length)

    def state_dict(self) -> dict[str, Any]:
        """Return the sources and the packing of the training data, and whether training is within an epoch."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return {}
        progress = LoopProgress.of(self.trainer)
        return {"sources": self._sources, "in_epoch": progress.in_epoch, "packing": self._digest_of_rows}

    @property
    def _digest_of_rows(self) -> str | None:
        """Which samples share a packed row; None for other rows."""
        data = self._data.get("train")
        return data.digest if isinstance(data, PackedDataset) else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the training data with a checkpoint's, and warn if other rows continue its epoch.

        Raises:
            ValueError: The checkpoint was taken in the middle of an epoch of other data.
        """
        # A mid-epoch resume requires the same sources; at the end of an epoch, a change is only a warning.
        if state_dict and self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            compare_sources(state_dict["sources"], self._sources, state_dict["in_epoch"])
            if state_dict["in_epoch"] and state_dict.get("packing", self._digest_of_rows) != self._digest_of_rows:
                rank_zero_warn(
                    "the run continues in the middle of an epoch, but packs samples into other rows than before: this"
                    " epoch repeats some samples and leaves out others; to read each once, resume with the same"
                    " packing, seq_length and context_parallel_size, or from the end of an epoch"
                )

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        return evaluation_loader(
            self._opened(split),
            self.eval_batch_size,
            collate_fn=self._collator(split),
            num_workers=self.num_workers,
            pin_memory=is_on_cuda(self.trainer),
        )

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        # Padded rows must divide as a whole. In packed rows, sub-sequences have been padded already.
        if self.packing:
            return collate_rows
        return partial(collate_padded, multiple=self._multiples().row, row_length=self._padded_to)

    def _collator(self, split: str) -> Callable[[list[Any]], Any]:
        if split not in self._rows_of_sources:
            return self._collate
        return partial(_collate_with_sources, self._collate, *self._rows_of_sources[split])

    def _number_sources(self, splits: Sequence[str]) -> None:
        """Number the files of these splits, and remember which rows are of which file."""
        for split in splits:
            files = self._files(split)
            firsts = run_on_rank0(partial(first_rows, files))
            self._rows_of_sources[split] = firsts, list(self._sources_of(files).values())

    def _sources_of(self, files: Sequence[str]) -> dict[str, int]:
        """Return each file's number among all sources, and give new ones a number and a name."""
        numbers = self._numbers_of_files
        found = {file: numbers.setdefault(file, len(numbers)) for file in files}
        self.source_names = names_of_sources([*numbers])
        return found

    @property
    def _padded_to(self) -> int | None:
        return self.seq_length if self.pad_to_seq_length else None

    def _multiples(self) -> PackingMultiples:
        multiples = packing_multiples(self.trainer)
        multiples.check_row(self.seq_length)
        if multiples.parts > 1 and self.packing:
            sizes = {name: getattr(self, name) for name in ("batch_size", "eval_batch_size")}
            raise_first(packed_row_faults(getattr(self.trainer.strategy, "micro_batch_size", None), sizes))  # type: ignore[union-attr]
        return multiples

    def _model_vocab_size(self) -> int | None:
        size = getattr(self.trainer and self.trainer.lightning_module, "vocab_size", None)
        return size if isinstance(size, int) else None

    def _has(self, split: str) -> bool:
        return getattr(self, _SPLITS[split]) is not None or (split == "validation" and self.validation_share > 0)

    def _prepared_splits(self, stage: str | None) -> list[str]:
        wanted = tuple(_SPLITS) if stage is None else _OF_STAGE[stage]
        return [name for name in wanted if self._has(name) and not (self.streaming and name == "train")]

    def _opened(self, split: str) -> TokenizedSamples | PackedDataset:
        if split not in self._data:
            raise RuntimeError(f"the {split} data is not set up yet; call prepare_data() and setup() first")
        return self._data[split]

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _open(self, splits: list[str], multiples: PackingMultiples) -> None:
        for split in splits:
            tokenized, indices = self._chosen(split)
            self._check_vocabulary(tokenized, split)
            if split == "train":
                self._sources = _numbered(sources_of(tokenized))
            name = f"{_SPLITS[split]}={getattr(self, _SPLITS[split]) or self.train_files!r}"
            samples = self._samples(tokenized, indices, name)
            self._data[split] = self._packed(samples, multiples) if self.packing else samples
            self.statistics[split] = samples.statistics
            rank_zero_info(f"{split} data: {self._summary(samples)}")

    def _packed(self, samples: Any, multiples: PackingMultiples) -> PackedDataset:
        return PackedDataset(samples, self.seq_length, multiples)

    def _summary(self, samples: Any) -> str:
        """Return a line with the counts of used, cut and dropped samples."""
        if self.packing or samples.statistics.rows:
            return str(samples.statistics)
        statistics, lengths = samples.statistics, samples.lengths
        counts = str(statistics).partition(";")
        return (
            f"{statistics.samples - statistics.left_out:,} of {statistics.samples:,} samples in"
            f" {counted(len(lengths), 'row')}, not packed, {lengths.sum():,} tokens, {lengths.mean():.1f} on average"
            f" and {lengths.max()} at most{counts[1]}{counts[2]}"
        )

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> Any:
        return TokenizedSamples(tokenized, indices, self.seq_length, self.overlong, name)

    def _chosen(self, split: str) -> tuple[Any, NDArray[np.int64]]:
        """Return a tokenised dataset and which of its rows belong to a split."""
        tokenized = self._tokenized(split)
        if not self.validation_share or split == "test":
            return tokenized, np.arange(len(tokenized))
        # The same on every rank. 1,001 rows with validation_share=0.1: the first 101 of the permutation validate.
        # Source: Dataset.train_test_split in datasets (5.2)
        order = np.random.default_rng(self.seed).permutation(len(tokenized))
        share = self.validation_share
        count = math.ceil(len(tokenized) * share) if share < 1 else int(share)
        if count >= len(tokenized):
            raise ValueError(
                f"validation_share={self.validation_share} of {len(tokenized)} samples leaves none to train on; choose"
                " another share, or give validation_files"
            )
        return tokenized, np.sort(order[:count] if split == "validation" else order[count:])

    def _tokenized(self, split: str) -> Any:
        """Return the tokens of a split, from the cache if possible; a validation share lies in the training files."""
        return self._tokenized_files(self._files(split), self._setting(split), self.reading)

    def _setting(self, split: str) -> str:
        return _SPLITS["train" if self.validation_share and split == "validation" else split]

    def _files(self, split: str) -> list[str]:
        name = self._setting(split)
        return with_rows(find_files(getattr(self, name), name))

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        # One process on each machine compares the cache with its checksums.
        checks = self.trainer is None or self.trainer.local_rank == 0
        return tokenize_files(files, name, self.tokenizer, reading, self.cache_dir, self.num_proc, checks)

    def _check_vocabulary(self, tokenized: Any, split: str) -> None:
        vocab_size = self._model_vocab_size()
        if vocab_size is None or not len(tokenized):
            return
        largest = tokenized.data.column("largest").to_numpy()
        if largest.max() >= vocab_size:
            row = int(largest.argmax())
            raise ValueError(
                f"row {row} of {_SPLITS[split]} has the token {largest[row]}, but the model's vocab_size={vocab_size}"
                f" ends at {vocab_size - 1}; use the model's own tokenizer, or a larger vocab_size"
            )

    def _stream_settings(self) -> StreamSettings:
        files = with_rows(find_files(self.train_files, "train_files"))
        reader = self.reading.reader(columns_of_stream(load_rows(files, streaming=True), files))
        require_same_columns(files)
        multiples = self._multiples()
        return StreamSettings(
            files=files,
            reader=reader,
            encoder=self.reading.encoder(self.tokenizer),
            row_length=self.seq_length,
            multiple=multiples.sub_sequence if self.packing else multiples.row,
            batch_size=self.batch_size,
            packing=self.packing,
            overlong=self.overlong,
            shuffle_buffer=self.shuffle_buffer,
            seed=self.seed,
            vocab_size=self._model_vocab_size(),
            padded_to=self._padded_to,
            parts=multiples.parts,
            sources=self._sources_of(files) if self.log_sources else None,
        )


def _collate_with_sources(
    collate: Callable[[list[Any]], Any], firsts: NDArray[np.int64], sources: Sequence[int], samples: list[Any]
) -> dict[str, torch.Tensor]:
    return with_sources(collate(samples), firsts, sources)


def _check_validation(share: float, files: Any, streaming: bool) -> None:
    if share < 0 or share == 1 or (share > 1 and share != int(share)):
        raise ValueError(
            f"validation_share={share} is out of range; choose a share from 0 to below 1, or a number of samples"
            " above 1"
        )
    if share and files is not None:
        raise ValueError(f"validation_share={share} and validation_files={files!r} are both given; give one of them")
    if share and streaming:
        raise ValueError(
            f"validation_share={share} does not work with streaming=True, which has no length; give validation_files"
        )


def _numbered(sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sources of several datasets as one description."""
    if len(sources) == 1:
        return sources[0]
    return {f"{name} of dataset {number}": value for number, part in enumerate(sources) for name, value in part.items()}
