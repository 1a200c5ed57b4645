# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed datasets as files: ``PREFIX.bin`` holds tokens, ``PREFIX.idx`` where each document lies in it.

``preprocess.py`` writes them and ``pretraining_data.py`` looks into them before it gives them to Megatron. Megatron's
own ``IndexedDatasetBuilder`` keeps every document as several Python objects, 150 bytes each, and takes torch and four
seconds to import; here the same bytes come from whole arrays. A test compares both.

A third file, ``PREFIX.preprocess.json``, is ours: the tokenizer's vocabulary and end-of-document token, which the other
two do not say. Nothing needs it but a data module that is asked to tell documents apart.

The index, little-endian: magic, version (u64), type of a token (u8), sequences (u64), documents + 1 (u64), then the
length of each sequence (i32), its place in the .bin in bytes (i64), and the sequence at which each document begins
(i64), with the end. Here a document is one sequence.

Source: ``_IndexWriter`` and ``_IndexReader`` in megatron.core.datasets.indexed_dataset (0.16.1 and 0.19.2).
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_SMALL_VOCABULARY = 65500  # Source: DType.optimal_dtype
_BLOCK = 1 << 20  # documents that are written at a time


def token_type(vocab_size: int) -> type[np.generic]:
    """Return the type of a token in the .bin file; Megatron's choice."""
    return np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32


@dataclass(frozen=True)
class Index:
    """What an .idx file says.

    Attributes:
        prefix: The dataset's.
        dtype: Of a token.
        lengths: Tokens of each sequence, read from the file when they are looked at.
        documents: How many there are.
    """

    prefix: str
    dtype: type[np.generic]
    lengths: NDArray[np.int32]
    documents: int

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """Return the tokens of the sequences from ``first`` to before ``last``."""
        return int(self.lengths[first:last].sum(dtype=np.int64))


def write_index(path: str, lengths: NDArray[np.int32], dtype: type[np.generic]) -> None:
    """Write an .idx file of documents of one sequence each, to the disk.

    Args:
        path: Of the file.
        lengths: Tokens of each document.
        dtype: Of a token.
    """
    code = next(code for code, known in _TYPES.items() if known is dtype)
    count, size = len(lengths), np.dtype(dtype).itemsize
    with open(path, "wb") as file:
        file.write(_HEAD.pack(_MAGIC, _VERSION, code, count, count + 1))
        for start in range(0, count, _BLOCK):
            file.write(lengths[start : start + _BLOCK].astype("<i4", copy=False).tobytes())
        place = 0
        for start in range(0, count, _BLOCK):
            ends = place + np.cumsum(lengths[start : start + _BLOCK], dtype=np.int64) * size
            file.write(np.concatenate(([place], ends[:-1])).astype("<i8").tobytes())
            place = int(ends[-1])
        for start in range(0, count + 1, _BLOCK):
            file.write(np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def read_index(prefix: str) -> Index:
    """Read what ``PREFIX.idx`` says, and check that ``PREFIX.bin`` is as long as it says.

    Raises:
        FileNotFoundError: One of the files is not there.
        ValueError: The prefix is the name of one of the files, or the two do not belong together.
    """
    if prefix.endswith((".bin", ".idx")):
        raise ValueError(f"{prefix} is a file; give what both files of the dataset begin with, {prefix[:-4]}")
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise FileNotFoundError(
                f"{prefix}{suffix} does not exist; give the prefix of a dataset that lightning-mcore preprocess or"
                " Megatron-LM made"
            )
    size = os.path.getsize(prefix + ".idx")
    with open(prefix + ".idx", "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise ValueError(f"{prefix}.idx is no index of Megatron's; make the dataset with lightning-mcore preprocess")
    _, version, code, sequences, ends = _HEAD.unpack(head)
    if version != _VERSION or code not in _TYPES or size < _HEAD.size + 12 * sequences + 8 * ends:
        raise ValueError(f"{prefix}.idx is damaged or of an unknown version; make the dataset anew")
    lengths = np.memmap(prefix + ".idx", np.int32, "r", _HEAD.size, (sequences,)) if sequences else np.zeros(0, "i4")
    index = Index(prefix, _TYPES[code], lengths, ends - 1)
    wanted, found = index.tokens() * np.dtype(index.dtype).itemsize, os.path.getsize(prefix + ".bin")
    if wanted != found:
        raise ValueError(
            f"{prefix}.bin has {found} bytes and {prefix}.idx speaks of {wanted}, so they do not belong together;"
            " make the dataset anew"
        )
    return index


def facts_path(prefix: str) -> str:
    """Return the name of the file of our own."""
    return f"{prefix}.preprocess.json"


def read_facts(prefix: str) -> dict[str, Any]:
    """Return what the file of our own says of tokenizer and counts; empty where there is none, or none to be read."""
    try:
        facts = json.loads(Path(facts_path(prefix)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
