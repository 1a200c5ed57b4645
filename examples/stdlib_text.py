# SPDX-License-Identifier: Apache-2.0
"""Text that every machine has: the source of the Python standard library, as a LightningDataModule.

The examples train on it, so a first run downloads nothing. Each batch is an ordinary dictionary, and nothing here
depends on parallelism: as for any map-style dataset, the strategy gives the same windows to all ranks of a model copy,
and different windows to different copies.

How a run gets its tokens:

1. ``prepare_data`` (one process per machine) reads the modules, trains a byte-level BPE on the training files,
   encodes both splits and writes tokens and tokenizer to one cache file. This takes a few seconds, once.
2. ``setup`` (every rank) loads the file.
3. The loaders split the stream into windows of ``seq_length`` tokens, with labels shifted by one.

Every tenth file is held out for validation, so the model is never trained on validation text.
"""

import hashlib
import os
import sysconfig
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NUM_BYTES = 256
END_OF_FILE = "\0"  # separates files; Python source never contains it
VAL_EVERY = 10


class StdlibText(pl.LightningDataModule):
    """The standard library's source text in fixed windows of tokens.

    Args:
        seq_length: Tokens in a window.
        batch_size: Windows per batch on each data-parallel rank.
        vocab_size: 256 for plain bytes; a larger size trains a byte-level BPE with ``vocab_size - 256`` merges.
        max_bytes: Stop reading after this many bytes of source, in the order of the file names.
        max_val_windows: Validate on at most this many windows, spread evenly over the validation files; None: all.
        cache_dir: Folder for the tokens and the tokenizer.

    Raises:
        ValueError: ``vocab_size`` is below 256, a size is below 1, or ``max_bytes`` leaves a split without a window.
    """

    def __init__(
        self,
        seq_length: int = 128,
        batch_size: int = 8,
        vocab_size: int = 1024,
        max_bytes: int = 5_000_000,
        max_val_windows: int | None = 128,
        cache_dir: str = "outputs/cache",
    ) -> None:
        super().__init__()
        if vocab_size < NUM_BYTES:
            raise ValueError(f"vocab_size={vocab_size} cannot hold the {NUM_BYTES} bytes; choose 256 (bytes) or more")
        for name, size in {
            "seq_length": seq_length,
            "batch_size": batch_size,
            "max_bytes": max_bytes,
            "max_val_windows": max_val_windows,
        }.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} is not positive; choose 1 or more")
        self.seq_length = seq_length
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.max_bytes = max_bytes
        self.max_val_windows = max_val_windows
        self.cache_dir = Path(cache_dir)
        self.tokenizer: Tokenizer | None = None
        self.train_windows: Windows | None = None
        self.val_windows: Windows | None = None

    def prepare_data(self) -> None:
        """Write the cache file, unless one for the same text and settings exists."""
        if self.cache_file.exists():
            return
        started = time.perf_counter()
        train_text, val_text = join_files(self.train_files), join_files(self.val_files)
        rank_zero_info(f"data: {len(train_text) / 1e6:.1f} MB of {Path(stdlib_folder()).name} source, tokenising ...")
        if self.vocab_size > NUM_BYTES:
            self.tokenizer = train_bpe(self.train_files.values(), self.vocab_size)
        content = {
            "tokenizer": self.tokenizer.to_str() if self.tokenizer else None,
            "train": torch.tensor(self.encode(train_text), dtype=torch.int32),
            "val": torch.tensor(self.encode(val_text), dtype=torch.int32),
        }
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        partial = self.cache_file.with_suffix(f".{os.getpid()}")
        torch.save(content, partial)
        os.replace(partial, self.cache_file)  # other processes see the complete file or none
        rank_zero_info(
            f"data: {len(content['train']):,} training and {len(content['val']):,} validation tokens "
            f"of a vocabulary of {self.vocab_size:,} in {time.perf_counter() - started:.1f} s"
        )

    def setup(self, stage: str | None = None) -> None:
        """Load the cache file and cut both splits into windows.

        Raises:
            RuntimeError: The cache file does not exist yet.
        """
        if not self.cache_file.exists():
            raise RuntimeError(f"{self.cache_file} does not exist; call prepare_data() before setup()")
        content = torch.load(self.cache_file, weights_only=True)
        self.tokenizer = Tokenizer.from_str(content["tokenizer"]) if content["tokenizer"] else None
        self.train_windows = Windows(content["train"], self.seq_length)
        self.val_windows = Windows(content["val"], self.seq_length, at_most=self.max_val_windows)
        for name, windows in (("training", self.train_windows), ("validation", self.val_windows)):
            if not len(windows):
                raise ValueError(
                    f"max_bytes={self.max_bytes} leaves no {name} window of seq_length={self.seq_length}; "
                    "choose a larger max_bytes (the default is 5000000) or a shorter seq_length"
                )

    def train_dataloader(self) -> DataLoader:
        """Return the windows of the training files, shuffled."""
        return DataLoader(self.train_windows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Return the windows of the validation files, in order."""
        return DataLoader(self.val_windows, batch_size=self.batch_size)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        if self._loaded_tokenizer is None:
            return list(text.encode())
        return self._loaded_tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; invalid UTF-8 becomes the replacement character."""
        if self._loaded_tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return self._loaded_tokenizer.decode(list(tokens), skip_special_tokens=False)

    def save_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer for ``transformers`` into ``folder``, with the same ``encode`` and ``decode``."""
        from transformers import PreTrainedTokenizerFast  # only one process needs it, at the end of a run

        tokenizer = self._loaded_tokenizer or byte_tokenizer()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
        fast.save_pretrained(folder)

    @property
    def _loaded_tokenizer(self) -> Tokenizer | None:
        if self.tokenizer is None and self.vocab_size > NUM_BYTES:
            raise RuntimeError("the tokenizer is not loaded yet; call prepare_data() and setup() first")
        return self.tokenizer

    @cached_property
    def train_files(self) -> dict[str, str]:
        """Name and text of each training file."""
        return {name: text for name, text in self._files.items() if name not in self.val_files}

    @cached_property
    def val_files(self) -> dict[str, str]:
        """Name and text of each validation file: every tenth, from the fifth."""
        held_out = list(self._files)[VAL_EVERY // 2 :: VAL_EVERY]
        return {name: self._files[name] for name in held_out}

    @cached_property
    def cache_file(self) -> Path:
        """The cache file; its name contains a hash of everything that determines its content."""
        digest = hashlib.sha256(f"1 {self.vocab_size}".encode())
        for name, text in self._files.items():
            digest.update(f"\0{name}\0{text}".encode())
        return self.cache_dir / f"stdlib_text-{digest.hexdigest()[:16]}.pt"

    @cached_property
    def _files(self) -> dict[str, str]:
        return read_sources(Path(stdlib_folder()), self.max_bytes)


class Windows(Dataset):
    """A stream of tokens, split into windows that do not overlap; each label is the token that follows.

    Args:
        stream: Token ids [n].
        seq_length: Tokens in a window.
        at_most: Keep this many windows, spread evenly over the stream; None: all.
    """

    def __init__(self, stream: Tensor, seq_length: int, at_most: int | None = None) -> None:
        self.stream = stream
        self.seq_length = seq_length
        available = max(0, len(stream) - 1) // seq_length  # the last label needs one more token
        kept = available if at_most is None else min(at_most, available)
        self.starts = [seq_length * (index * available // kept) for index in range(kept)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self.starts[index]
        window = self.stream[start : start + self.seq_length + 1].long()
        return {"tokens": window[:-1], "labels": window[1:]}


def stdlib_folder() -> str:
    """Return this Python's standard library folder."""
    return sysconfig.get_paths()["stdlib"]


def read_sources(folder: Path, max_bytes: int) -> dict[str, str]:
    """Read the modules of ``folder`` in name order up to ``max_bytes`` bytes; the last one may be cut off."""
    files: dict[str, str] = {}
    left = max_bytes
    for path in sorted(folder.glob("*.py")):
        if left == 0:
            break
        source = path.read_bytes()[:left]
        left -= len(source)
        files[path.name] = source.decode("utf-8", errors="ignore")
    return files


def join_files(files: dict[str, str]) -> str:
    """Join the texts into one stream, with an end-of-file mark after each."""
    return "".join(text + END_OF_FILE for text in files.values())


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which can encode any text and decode it unchanged."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are single bytes: a BPE without merges."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in shown]  # ByteLevel uses letters from 256 on for these
    letters = {chr(byte): byte for byte in shown} | {chr(NUM_BYTES + n): byte for n, byte in enumerate(hidden)}
    return byte_level(models.BPE(vocab=letters, merges=[]))


def byte_level(model: models.Model) -> Tokenizer:
    """Return a tokenizer that can encode any byte."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
