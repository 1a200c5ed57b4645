# SPDX-License-Identifier: Apache-2.0
"""Files of Megatron's indexed datasets: ``PREFIX.bin`` holds tokens, ``PREFIX.idx`` lengths and offsets of documents.

``data/preprocess/run.py`` writes them; ``datamodule.py`` checks them before it passes them to Megatron. Megatron's own
``IndexedDatasetBuilder`` keeps every document as several Python objects (150 bytes each) and needs torch and four
seconds to import. Here the same bytes come from whole arrays; a test compares both.

Two more files are ours. ``PREFIX.preprocess.json`` (the *facts*) has the tokenizer's vocabulary size and
end-of-document token, which the others lack; only a data module that separates documents needs it. ``PREFIX.checksums``
has the checksums of the other three (``data/checked_files.py``): index and facts are compared before a run reads them,
and each token block when it is first read. A dataset that Megatron made has no checksums, so only contradictions are
found: in sizes, and between lengths and offsets.

Source: ``_IndexWriter`` and ``_IndexReader`` in megatron.core.datasets.indexed_dataset (0.16.1 and 0.19.2).
"""

import functools
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.data.checked_files import (
    Checksums,
    Marks,
    checksums_of,
    read_checksums,
    require_size,
    stat_marks,
    write_checksums,
)

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, documents + 1
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,  # Megatron's codes; the codes of floats are missing
}
_SMALL_VOCABULARY = 65500  # Source: DType.optimal_dtype
_BLOCK = 1 << 20


def token_type(vocab_size: int) -> type[np.generic]:
    """Return the type of a token in the .bin file, as Megatron chooses it."""
    return np.uint16 if vocab_size < _SMALL_VOCABULARY else np.int32


@dataclass(frozen=True)
class Index:
    """Content of an .idx file."""

    prefix: str
    dtype: type[np.generic]
    lengths: NDArray[np.int32]  # [sequences], tokens of each; memory-mapped
    documents: int

    def tokens(self, first: int = 0, last: int | None = None) -> int:
        """Return the number of tokens in the sequences ``first`` to ``last - 1``."""
        return int(self.lengths[first:last].sum(dtype=np.int64))


def write_index(path: str, lengths: NDArray[np.int32], dtype: type[np.generic]) -> None:
    """Write an .idx file of single-sequence documents of ``lengths`` [documents] tokens, and flush it to disk."""
    # Little-endian: head, the length of each sequence (i32), its offset in the .bin in bytes (i64), and the sequence at
    # which each document begins (i64), with the end. Documents of 3, 2 and 4 uint16 tokens make an 18-byte .bin and
    # this .idx of 102 bytes: 34 bytes of head, lengths 3 2 4, offsets 0 6 10, documents 0 1 2 3.
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
    """Read ``PREFIX.idx``, and check that ``PREFIX.bin`` has the right size.

    Once per process, and again when a file has changed, the entire index is checked: against its checksum, or for
    contradictions if there are no checksums. Raises FileNotFoundError if a file is missing, ValueError if the prefix
    names one of the files, or if they are damaged or do not belong together.
    """
    if prefix.endswith((".bin", ".idx")):
        raise ValueError(f"{prefix} is a file; give the prefix of both files of the dataset, {prefix[:-4]}")
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(prefix + suffix):
            raise FileNotFoundError(
                f"{prefix}{suffix} does not exist; give the prefix of a dataset that lightning-mcore preprocess or"
                " Megatron-LM made"
            )
    index = _open_index(prefix)
    _check(prefix, stat_marks([prefix + ".idx", prefix + ".bin", facts_path(prefix), checksums_path(prefix)]))
    return index


def _open_index(prefix: str) -> Index:
    size = os.path.getsize(prefix + ".idx")
    with open(prefix + ".idx", "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise ValueError(
            f"{prefix}.idx is not an index of Megatron; create the dataset with lightning-mcore preprocess"
        )
    _, version, code, sequences, ends = _HEAD.unpack(head)
    wanted = _HEAD.size + 12 * sequences + 8 * ends
    sizes = (wanted, wanted + sequences)  # the second: Megatron's multimodal datasets have a mode per sequence
    if version != _VERSION or code not in _TYPES or ends < 1 or size not in sizes:
        raise ValueError(f"{prefix}.idx is damaged or of an unknown version; create the dataset again")
    lengths = np.memmap(prefix + ".idx", np.int32, "r", _HEAD.size, (sequences,)) if sequences else np.zeros(0, "i4")
    index = Index(prefix, _TYPES[code], lengths, ends - 1)
    wanted, found = index.tokens() * np.dtype(index.dtype).itemsize, os.path.getsize(prefix + ".bin")
    if wanted != found:
        raise ValueError(
            f"{prefix}.bin has {found} bytes but {prefix}.idx expects {wanted}, so they do not belong together;"
            " create the dataset again"
        )
    return index


@functools.lru_cache(maxsize=1024)
def _check(prefix: str, marks: Marks) -> None:
    """Check all files of a dataset except its tokens, which are checked when read; once for these ``marks``."""
    checksums = dataset_checksums(prefix)
    if checksums is None:
        _check_structure(prefix)
        return
    try:
        checksums.check("idx", prefix + ".idx")
        require_size(prefix + ".bin", checksums.files["bin"][0])
        if os.path.exists(facts_path(prefix)):
            checksums.check("facts", facts_path(prefix))
    except ValueError as error:
        raise ValueError(
            f"{error}; restore it or rebuild the dataset; if you changed it yourself, delete {checksums.path} to have"
            " it read unchecked"
        ) from None


def _check_structure(prefix: str) -> None:
    """Check that sequence offsets follow from the lengths, and that the documents cover all sequences in order."""
    index = _open_index(prefix)
    count, size, place = len(index.lengths), np.dtype(index.dtype).itemsize, 0
    # Read in blocks: an index of a billion sequences has 20 GB.
    places = _HEAD.size + 4 * count
    with open(prefix + ".idx", "rb") as file:
        for start in range(0, count, _BLOCK):
            lengths = index.lengths[start : start + _BLOCK]
            ends = place + np.cumsum(lengths, dtype=np.int64) * size
            file.seek(places + 8 * start)
            found = np.frombuffer(file.read(8 * len(lengths)), "<i8")
            if (lengths < 0).any() or not np.array_equal(found, np.concatenate(([place], ends[:-1]))):
                raise ValueError(
                    f"{prefix}.idx is damaged: the offsets of its sequences do not follow from their lengths;"
                    " create the dataset again"
                )
            place = int(ends[-1])
        last = -1
        for start in range(0, index.documents + 1, _BLOCK):
            file.seek(places + 8 * (count + start))
            begins = np.frombuffer(file.read(8 * min(_BLOCK, index.documents + 1 - start)), "<i8")
            # -1 fails the comparison with ``count`` below.
            if begins[0] < max(last, 0) or (np.diff(begins) < 0).any() or (start == 0 and begins[0] != 0):
                last = -1
                break
            last = int(begins[-1])
        if last != count:
            raise ValueError(
                f"{prefix}.idx is damaged: its documents do not hold its sequences in order; create the dataset again"
            )


def checksums_path(prefix: str) -> str:
    """Return the path of the checksum file."""
    return f"{prefix}.checksums"


def dataset_checksums(prefix: str) -> Checksums | None:
    """Return a dataset's checksums; None if it has none. Raises ValueError if they are damaged."""
    path = checksums_path(prefix)
    if not os.path.lexists(path):
        return None
    try:
        checksums = read_checksums(path)
        if not {"bin", "idx", "facts"} <= checksums.files.keys():
            raise ValueError(f"{path} is damaged")
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; restore it, or delete it to have {prefix} read unchecked") from None
    return checksums


def write_dataset_checksums(path: str, tokens: str, index: str, facts: str) -> None:
    """Write the checksums of a dataset's files to ``path``."""
    write_checksums(path, {"bin": checksums_of(tokens), "idx": checksums_of(index), "facts": checksums_of(facts)})


def facts_path(prefix: str) -> str:
    """Return the path of the facts."""
    return f"{prefix}.preprocess.json"


def read_facts(prefix: str) -> dict[str, Any]:
    """Return the facts about tokenizer and counts; empty if the file is missing or unreadable."""
    try:
        facts = json.loads(Path(facts_path(prefix)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
