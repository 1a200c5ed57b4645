# SPDX-License-Identifier: Apache-2.0
"""Files of fine-tuning data: found, opened through Hugging Face ``datasets``, and named where they are broken.

``datasets`` reads jsonl and parquet fast and keeps what it read in a cache. Of a broken file it does not say which one
it is, nor which line. So where it fails the files are read once more, slowly, until the place is found
(:func:`explained`). ``finetuning_data.py`` and ``token_stream.py`` open files here.
"""

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def find_files(given: str | Sequence[str], name: str) -> list[str]:
    """Return the files that are meant, sorted within each folder and pattern.

    Args:
        given: A file, a folder (all data files in it), a pattern such as ``"data/*.jsonl"``, or a list of these.
        name: The setting that says so, for errors.

    Raises:
        FileNotFoundError: There is no such file, or no data file in a folder.
        ValueError: A file is neither jsonl nor parquet, files are of both kinds, or one is named twice.
    """
    found: list[str] = []
    for place in [given] if isinstance(given, str | os.PathLike) else given:
        path = Path(place)
        if path.is_dir():
            matches = [str(file) for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
        else:
            matches = [str(path)] if path.is_file() else sorted(filter(os.path.isfile, glob.glob(str(place))))
        if not matches:
            kinds = " a folder without jsonl or parquet files" if path.is_dir() else " no file"
            raise FileNotFoundError(f"{name}={str(place)!r} is{kinds}; give a file, a folder or a pattern that exists")
        found += matches
    if not found:
        raise ValueError(f"{name} is an empty list; give at least one file")
    unknown = [file for file in found if Path(file).suffix not in SUFFIXES]
    if unknown:
        raise ValueError(f"{name} has the file {unknown[0]!r}; give files that end with .jsonl, .json or .parquet")
    if len({SUFFIXES[Path(file).suffix] for file in found}) > 1:
        raise ValueError(f"{name} has files of JSON and of parquet; give files of one kind")
    twice = [file for file in found if found.count(file) > 1]
    if twice:
        raise ValueError(f"{name} has the file {twice[0]!r} twice; name each file once")
    return found


def load_rows(files: Sequence[str], cache_dir: str | None = None, streaming: bool = False) -> Any:
    """Open files as a ``datasets.Dataset``, or an ``IterableDataset`` with ``streaming``.

    Args:
        files: What :func:`find_files` found.
        cache_dir: Where ``datasets`` keeps what it read; None: its own place.
        streaming: Read while iterating, and keep nothing.

    Raises:
        ModuleNotFoundError: ``datasets`` is not installed.
        ValueError: A file is broken.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'reading jsonl and parquet needs the package datasets; install it: pip install "lightning-mcore[data]"'
        ) from None
    kind = SUFFIXES[Path(files[0]).suffix]
    with explained(files):
        return load_dataset(
            kind, data_files={"train": list(files)}, split="train", cache_dir=cache_dir, streaming=streaming
        )


def file_marks(files: Sequence[str]) -> list[str]:
    """Return for each file its path, size and time of change, by which a cache knows that it is the same."""
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]


@contextlib.contextmanager
def explained(files: Sequence[str]) -> Iterator[None]:
    """Name the file and the line, if what runs inside fails to read the files.

    Raises:
        ValueError: It failed.
    """
    try:
        yield
    except Exception as error:
        reason = next(filter(None, map(_what_is_wrong, files)), None) or _different_columns(files)
        if reason is None:
            cause = error.__cause__ or error
            reason = f"{_listed(files)} cannot be read: {' '.join(str(cause).split()) or type(cause).__name__}"
        raise ValueError(reason) from error


def _what_is_wrong(file: str) -> str | None:
    """Return a sentence about a file that cannot be read; None where each row can be."""
    if Path(file).suffix == ".parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            ParquetFile(file).close()
        except (ArrowException, OSError) as error:
            return f"{file} is no whole parquet file: {' '.join(str(error).split())}"
        return None
    with open(file, "rb") as lines:
        if not any(line.strip() for line in lines):
            return f"{file} is empty; leave it out"
        lines.seek(0)
        if lines.read(1) == b"[":
            return _broken_list(file)
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            reason = _broken_line(line)
            if reason is not None:
                return f"line {number} of {file} is no JSON object: {reason}; mend it or leave it out"
    return None


def _broken_line(line: bytes) -> str | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        return f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at byte {error.start}"
    return None if isinstance(row, dict) else f"it holds {type(row).__name__} and not named columns"


def _broken_list(file: str) -> str | None:
    try:
        json.loads(Path(file).read_bytes())
    except json.JSONDecodeError as error:
        return f"line {error.lineno} of {file} is no JSON: {error.msg} at column {error.colno}; mend it"
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8 at byte {error.start}; write it as UTF-8"
    return None


def _different_columns(files: Sequence[str]) -> str | None:
    """Return a sentence about files that do not have the same columns."""
    first = _columns(files[0])
    for file in files[1:]:
        if _columns(file) != first:
            return (
                f"{file} has the columns {', '.join(_columns(file))}, and {files[0]} has {', '.join(first)}; give files"
                " with the same columns, or read them in two runs"
            )
    return None


def _columns(file: str) -> list[str]:
    """Return the columns of a file, of its first row where it is JSON, sorted."""
    if Path(file).suffix == ".parquet":
        from pyarrow.parquet import read_schema

        return sorted(read_schema(file).names)
    with open(file, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"{}")
    try:
        row = json.loads(first)
    except ValueError:
        return []
    return sorted(row) if isinstance(row, dict) else []


def _listed(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
