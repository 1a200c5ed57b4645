# SPDX-License-Identifier: Apache-2.0
"""Input of ``lightning-mcore preprocess``: its files, and how they are cut into pieces for the workers.

Cuts depend only on the files and one size. So they are the same for any number of workers and after an interruption,
and the tokens of piece 17 always come after piece 16's. Only what is needed to find the cuts is read here: a few
bytes at each cut of a file of lines, the metadata of a parquet file. ``run.py`` calls both functions.

=============  ===============================================================  ============================
``format``     a piece                                                          cut at
=============  ===============================================================  ============================
``jsonl``      a range of bytes                                                 the ends of lines
``separated``  a range of bytes of a text file                                  separators
``whole``      some text files, each one document                               files
``parquet``    some rows of a row group                                         any row
=============  ===============================================================  ============================
"""

import glob
import hashlib
import importlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore.data.preprocess.worker import Piece, first_line

FORMATS = ("text", "jsonl", "parquet")
UNFINISHED = ".unfinished"  # suffix of the folder in which a dataset is made

_BY_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_NOT_IN_FOLDERS = {".json"}  # in a folder it usually describes the data
_PATHS_AT_ONCE = 16_000  # characters; a piece must fit into a pipe
_ROWS_AT_LEAST = 256  # rows of a parquet piece, as the worker reads batches of this size
_PIECES_AT_MOST = 64  # of a row group; on average, the worker reads half of the group to reach the rows of one


@dataclass(frozen=True)
class InputFile:
    """A file to read."""

    path: str
    format: str
    real_path: str  # without links
    size: int
    modified: int  # ns


def find_inputs(inputs: Sequence[str], format: str = "auto") -> tuple[list[InputFile], int]:
    """Return the input files in reading order, and how many files in folders are left out.

    ``inputs`` are files, glob patterns, and folders, which are searched recursively; the files of a pattern or folder
    are sorted by name. ``format`` ``"auto"`` goes by suffix. Raises FileNotFoundError if an input has no files,
    ValueError for an unknown format or a file that is given twice.
    """
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format={format!r} is unknown; choose auto, {', '.join(FORMATS)}")
    if not inputs:
        raise ValueError("no input is given; give files, patterns or folders")
    found: list[InputFile] = []
    left_out = 0
    for name in inputs:
        rest = 0
        if os.path.isdir(name):
            paths, rest = _in_folder(name, format)
            left_out += rest
        else:
            paths = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not paths:
            what = (
                "holds no file" if os.path.isdir(name) else "is neither a file nor a folder, nor a pattern that matches"
            )
            suffixes = f" with one of the suffixes {', '.join(_BY_SUFFIX)}" if os.path.isdir(name) else " a file"
            others = f" ({_suffixes_below(name)})" if rest else ""
            example = ", such as --format text" if rest else ""
            raise FileNotFoundError(f"{name} {what}{suffixes}{others}; give another input, or --format{example}")
        found += [_describe(path, format) for path in paths]
    seen: set[str] = set()
    for file in found:
        # Through links too: the same documents would be learnt twice.
        if file.real_path in seen:
            raise ValueError(f"{file.path} is given twice, so its documents would occur twice; give it once")
        seen.add(file.real_path)
    return found, left_out


def _in_folder(folder: str, format: str) -> tuple[list[str], int]:
    paths: list[str] = []
    left_out = 0
    for place, folders, names in os.walk(folder):
        # In place, so that os.walk skips the others; a dataset in the making may lie in the same folder.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not name.endswith(UNFINISHED))
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            wanted = format != "auto" or (suffix in _BY_SUFFIX and suffix not in _NOT_IN_FOLDERS)
            if wanted and not name.startswith("."):
                paths.append(os.path.join(place, name))
            else:
                left_out += 1
    return sorted(paths), left_out


def _suffixes_below(folder: str) -> str:
    """Return the suffixes in a folder that are not read, such as ``it has .md and .rst``."""
    found = {os.path.splitext(name)[1].lower() or name for _, _, names in os.walk(folder) for name in names}
    return f"it has {', '.join(sorted(found)[:4])}"


def _describe(path: str, format: str) -> InputFile:
    suffix = os.path.splitext(path)[1].lower()
    if format == "auto" and suffix not in _BY_SUFFIX:
        raise ValueError(
            f"the suffix of {path} does not show its format; give --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]},"
            " and decompress the file first if it is compressed"
        )
    format = _BY_SUFFIX[suffix] if format == "auto" else format
    status = os.stat(path)
    return InputFile(path, format, os.path.realpath(path), status.st_size, status.st_mtime_ns)


def cut(files: Iterable[InputFile], separator: str | None, column: str, size: int) -> Iterator[Piece]:
    """Yield the pieces of all files, in order, of about ``size`` bytes each; a document or row may be larger.

    In each piece, ``input_bytes`` is its size, and ``name`` changes with the piece and the files that it is cut from.
    ``separator`` None makes one document of each text file. Raises ValueError if a parquet file is damaged or lacks
    ``column``, OSError if a file is unreadable.
    """
    for group in _groups(files, separator, size):
        file = group[0]
        if file.format == "text" and separator is None:
            pieces: Iterable[Piece] = [_whole(group)]
        elif file.format == "parquet":
            pieces = _parquet_pieces(file, column, size)
        elif file.format == "jsonl":
            pieces = _ranges(file, "jsonl", b"\n", size)
        else:
            pieces = _ranges(file, "separated", (separator or "").encode(), size)
        for piece in pieces:
            yield {**piece, "name": _name(group, piece)}


def _name(files: list[InputFile], piece: Piece) -> str:
    marks = [(file.real_path, file.size, file.modified) for file in files]
    part = {key: value for key, value in piece.items() if key not in ("path", "paths")}
    content = json.dumps([marks, part], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _groups(files: Iterable[InputFile], separator: str | None, size: int) -> Iterator[list[InputFile]]:
    """Yield groups of files that share a piece; only text files of one document each share one."""
    group: list[InputFile] = []
    for file in files:
        shares = file.format == "text" and separator is None
        if group and not shares:
            yield group
            group = []
        group.append(file)
        full = sum(one.size for one in group) >= size or sum(len(one.path) for one in group) >= _PATHS_AT_ONCE
        if full or not shares:
            yield group
            group = []
    if group:
        yield group


def _whole(files: list[InputFile]) -> Piece:
    return {
        "format": "whole",
        "paths": [file.path for file in files],
        "input_bytes": sum(file.size for file in files),
    }


def _ranges(file: InputFile, format: str, separator: bytes, size: int) -> Iterator[Piece]:
    if file.size == 0:
        return
    # Mapped, so that only the pages around each cut are read.
    with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        while start < file.size:
            end = _cut_after(content, separator, start, start + size)
            yield {"format": format, "path": file.path, "start": start, "end": end, "input_bytes": end - start}
            start = end


def _cut_after(content: mmap.mmap, separator: bytes, start: int, least: int) -> int:
    """Return the end of the first separator that ends at ``least`` or later."""
    # Separators count from left to right from ``start``. In "a\n\n\nb\n\nc" with separator "\n\n" they end at 3 and 7.
    # A search from byte 2 would also find one that ends at 4. So a separator that can overlap with itself is only found
    # by looking at everything before it; any other one by looking back by its own length.
    overlaps = any(separator.endswith(separator[:length]) for length in range(1, len(separator)))
    place = start if overlaps else max(start, least - len(separator))
    while (found := content.find(separator, place)) >= 0:
        place = found + len(separator)
        if place >= least:
            return place
    return len(content)


def check_parquet(file: InputFile, column: str) -> Any:
    """Return the metadata of a parquet file; ValueError if it is damaged or lacks such a column of text."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'reading {file.path} needs pyarrow; pip install "lightning-mcore[data]"', name="pyarrow"
        ) from None
    try:
        with parquet.ParquetFile(file.path) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
    except (OSError, ValueError, ArithmeticError) as error:  # pyarrow's own are among these
        raise ValueError(
            f"{file.path} cannot be read as parquet: {first_line(error)}; fix or remove the file"
        ) from None
    if column not in schema.names:
        raise ValueError(
            f"{file.path} has no column {column!r}; choose another of {', '.join(schema.names)} with --text-column"
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view", "null"):
        raise ValueError(
            f"column {column!r} of {file.path} holds {kind}, not strings; choose another with --text-column"
        )
    return metadata


def _parquet_pieces(file: InputFile, column: str, size: int) -> Iterator[Piece]:
    metadata = check_parquet(file, column)
    if metadata.num_rows == 0:
        return
    place = next(index for index in range(metadata.num_columns) if metadata.schema.column(index).path == column)
    for group in range(metadata.num_row_groups):
        part = metadata.row_group(group)
        if part.num_rows == 0:
            continue
        text_bytes = part.column(place).total_uncompressed_size
        # About 4 x ``size`` bytes of text: the worker reads the row group from the beginning to reach these rows.
        # A row group of 3 GB would have 750 such pieces, and reading it 375 times takes longer than tokenising it.
        rows = max(-(-part.num_rows * 4 * size // max(text_bytes, 1)), -(-part.num_rows // _PIECES_AT_MOST))
        rows = max(rows, _ROWS_AT_LEAST)
        for first in range(0, part.num_rows, rows):
            count = min(rows, part.num_rows - first)
            share = file.size * count // metadata.num_rows  # input_bytes of all pieces add up to about the file
            yield {
                "format": "parquet",
                "path": file.path,
                "group": group,
                "first": first,
                "rows": count,
                "input_bytes": share,
            }
