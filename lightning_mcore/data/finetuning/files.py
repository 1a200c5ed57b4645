# SPDX-License-Identifier: Apache-2.0
"""Files of fine-tuning data: find them, open them with Hugging Face ``datasets``, and say what is broken in them.

``datasets`` reads jsonl and parquet fast, but its errors name neither the broken file nor the line. So after a failure
the files are read once more, slowly, until the place is found (:func:`explained`). ``datamodule.py``, ``tokenized.py``
and ``stream_reader.py`` open files here.
"""

import contextlib
import functools
import glob
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # suffix -> format of ``datasets``
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json"}


def find_files(given: str | Sequence[str], name: str) -> list[str]:
    """Return the files that the setting ``name`` stands for, sorted within each folder and pattern.

    ``given`` is a file, a folder (all data files in it), a pattern such as ``"data/*.jsonl"``, or a list of these.
    """
    found: list[str] = []
    for place in [given] if isinstance(given, str | os.PathLike) else given:
        path = Path(place)
        is_folder = os.path.isdir(path)  # Path.is_dir raises for some impossible names
        if is_folder:
            if os.path.isfile(path / "config.json") and any(path.glob("*.safetensors*")):
                raise ValueError(f"{name}={str(place)!r} is the folder of a model; give jsonl or parquet files")
            matches = [str(file) for file in sorted(path.iterdir()) if _format(file) and file.name not in _DESCRIPTIONS]
        else:
            matches = [str(path)] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(str(place))))
        if not matches:
            what = "is a folder without jsonl or parquet files" if is_folder else "does not exist"
            raise FileNotFoundError(f"{name}={str(place)!r} {what}; give a file, a folder or a pattern that exists")
        found += matches
    if not found:
        raise ValueError(f"{name} is an empty list; give at least one file")
    unknown = [file for file in found if _format(file) is None]
    if unknown:
        raise ValueError(f"{name} has the file {unknown[0]!r}; give files that end with .jsonl, .json or .parquet")
    if len({_format(file) for file in found}) > 1:
        raise ValueError(f"{name} mixes JSON and parquet files; give files of one kind")
    twice = [file for file, count in Counter(found).items() if count > 1]
    if twice:
        raise ValueError(f"{name} has the file {twice[0]!r} twice; name each file once")
    return found


def _format(file: str | Path) -> str | None:
    return _FORMATS.get(Path(file).suffix.lower())


def with_rows(files: Sequence[str]) -> list[str]:
    """Return the files that are not empty, or raise ValueError: an empty one makes ``datasets`` fail on the next."""
    found = [file for file in files if not _is_empty(file)]
    if not found:
        raise ValueError(f"{files[0]} is empty; remove it")
    return found


def require_datasets() -> None:
    """Raise ModuleNotFoundError if the package ``datasets`` is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise ModuleNotFoundError(
            'reading jsonl and parquet needs the package datasets; install it: pip install "lightning-mcore[data]"'
        )


def load_rows(files: Sequence[str], cache_dir: str | None = None, streaming: bool = False) -> Any:
    """Open files as a ``datasets.Dataset``; with ``streaming`` an ``IterableDataset``, which needs no cache."""
    require_datasets()
    from datasets import load_dataset

    with explained(files):
        return load_dataset(
            _format(files[0]),
            data_files={"train": list(files)},
            split="train",
            cache_dir=cache_dir,
            streaming=streaming,
        )


def file_marks(files: Sequence[str]) -> list[str]:
    """Return each file's path, size and modification time, by which a cache recognises it."""
    stats = [(os.path.abspath(file), os.stat(file)) for file in files]
    return [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]


@contextlib.contextmanager
def explained(files: Sequence[str]) -> Iterator[None]:
    """Turn a failure to read files in the block into a ValueError that names the file and the line."""
    try:
        yield
    except Exception as error:
        if not _is_of_files(error):
            raise
        reason = next(filter(None, map(_what_is_wrong, files)), None) or _different_columns(files)
        if reason is None:
            cause = error.__cause__ or error
            reason = f"{_listed(files)} cannot be read: {' '.join(str(cause).split()) or type(cause).__name__}"
        raise ValueError(reason) from error


def require_same_columns(files: Sequence[str]) -> None:
    """Raise ValueError unless all files have the same columns; usually only the first rows are read."""
    reason = _different_columns(files)
    if reason is not None:
        raise ValueError(reason)


def name_of_row(files: Sequence[str], number: int) -> str:
    """Return a name for a row, with its file, for errors; ``number`` counts the rows of all files."""
    # Files of 100 and 50 rows: row 120 is "row 20 of" the second.
    first = 0
    for file in files:
        rows = _count_rows(file)
        if number < first + rows:
            return f"row {number - first} of {file}"
        first += rows
    return f"row {number} of {_listed(files)}"


def first_rows(files: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each file's first row among the rows of all files, [files]; reads JSON files whole."""
    return np.cumsum([0, *map(_count_rows, files[:-1])])


def _is_of_files(error: BaseException) -> bool:
    """Whether the content of files may be the cause of an error."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    if isinstance(error, TimeoutError | MemoryError) or isinstance(error.__cause__, TimeoutError | MemoryError):
        return False
    # datasets raises StopIteration for a file of zeros
    return isinstance(error, ValueError | OSError | ArrowException | DatasetsError | StopIteration)


def _what_is_wrong(file: str) -> str | None:
    """Return a sentence about a file that cannot be read; None if it can."""
    if _format(file) == "parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            ParquetFile(file).close()
        except (ArrowException, OSError, ValueError) as error:  # a name in it may not be UTF-8
            return f"{file} is not a complete parquet file: {' '.join(str(error).split())}"
        return None
    with open(file, "rb") as lines:
        # ``datasets`` also reads one JSON list of objects.
        if lines.read(1) == b"[":
            return _broken_list(file)
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            reason = _broken_line(line)
            if reason is not None:
                return f"line {number} of {file} is not a JSON object: {reason}; fix or delete it"
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
    return None if isinstance(row, dict) else f"it holds {type(row).__name__} instead of named columns"


def _broken_list(file: str) -> str | None:
    try:
        json.loads(Path(file).read_bytes())
    except json.JSONDecodeError as error:
        return f"line {error.lineno} of {file} is not JSON: {error.msg} at column {error.colno}; fix it"
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8 at byte {error.start}; write it as UTF-8"
    return None


def _different_columns(files: Sequence[str]) -> str | None:
    """Return a sentence about two files whose columns differ; None if there are no such files."""
    every = functools.cache(_all_columns)
    first: str | None = None
    for file in files:
        columns = _columns(file)
        if not columns:
            continue
        first = first or file
        # A first row may lack columns that later rows have: all rows decide, but only if the first rows differ.
        if columns != _columns(first) and every(file) != every(first):
            return (
                f"{file} has the columns {', '.join(every(file))} but {first} has {', '.join(every(first))}; give"
                " files with the same columns, or read them in two runs"
            )
    return None


def _columns(file: str) -> list[str]:
    """Return the columns of a file, sorted; for JSON, of its first row."""
    if _format(file) == "parquet":
        from pyarrow.parquet import read_schema

        return sorted(read_schema(file).names)
    row = next(_rows(file), None)
    return sorted(row) if isinstance(row, dict) else []


def _all_columns(file: str) -> list[str]:
    """Return all columns that occur in the rows of a file, sorted."""
    if _format(file) == "parquet":
        return _columns(file)
    return sorted(set().union(*(row for row in _rows(file) if isinstance(row, dict))))


def _rows(file: str) -> Iterator[Any]:
    """Yield the rows of a JSON file, up to a broken line."""
    with open(file, "rb") as lines, contextlib.suppress(ValueError):
        if lines.read(1) == b"[":
            yield from json.loads(Path(file).read_bytes())
            return
        lines.seek(0)
        yield from (json.loads(line.decode("utf-8-sig")) for line in lines if line.strip())


def _count_rows(file: str) -> int:
    if _format(file) == "parquet":
        from pyarrow.parquet import read_metadata

        rows: int = read_metadata(file).num_rows
        return rows
    return sum(1 for _ in _rows(file))


def _is_empty(file: str) -> bool:
    """Whether a JSON file has only blank lines."""
    if _format(file) == "parquet":
        return False
    with open(file, "rb") as lines:
        return not any(line.strip() for line in lines)


def _listed(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
