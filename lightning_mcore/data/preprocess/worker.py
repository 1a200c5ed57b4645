# SPDX-License-Identifier: Apache-2.0
"""A worker of ``lightning-mcore preprocess``: reads pieces of the input and writes a file of tokens for each.

It is a separate program, ``python -P data/preprocess/worker.py DESCRIPTOR``, that imports nothing from this package: it
starts within 0.1 s and 20 MB, while the package needs 5 s and 440 MB. The start methods of multiprocessing would import
the caller's script, which may lack a main guard, or fork a process that has threads. ``pool.py`` starts it and talks to
it over the pipe of that descriptor, in plain tuples:

=========  ===================================================================================================
to it      settings (dict) once, then pieces (dict, made by ``inputs.py``, with the path of their file as
           ``output``); the end of the pipe ends it
from it    ``("done", counts)``; or ``("refused", sentence)`` for bad input, ``("disk", (number, reason))`` if
           the file cannot be written, ``("failed", traceback)``
=========  ===================================================================================================

It tokenises in one thread: as many processes as cores are faster than one process with as many threads, because threads
share the tokenizer's cache of words.
"""

import functools
import importlib
import itertools
import json
import os
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from isal.isal_zlib import crc32

Piece = dict[str, Any]
Text = tuple[str | None, Callable[[], str]]  # a document, and its location for errors


class RefusedError(Exception):
    """Input that cannot be read; the message is one sentence for the user."""


def main() -> None:
    """Serve pieces until the pipe ends."""
    pipe = Connection(int(sys.argv[1]))
    try:
        encode: Encoder | None = None
        settings = pipe.recv()
        while True:
            piece = pipe.recv()
            try:
                encode = encode or encoder(settings)
                answer: tuple[str, Any] = "done", tokenise(piece, settings, encode)
            except RefusedError as error:
                answer = ("refused", str(error))
            except OSError as error:
                answer = ("disk", (error.errno, error.strerror)) if error.errno else ("failed", traceback.format_exc())
            except Exception:
                answer = ("failed", traceback.format_exc())
            pipe.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


Encoder = Callable[[list[str]], Iterator[list[int]]]


def encoder(settings: dict[str, Any]) -> Encoder:
    """Return a function that turns texts into token ids, from ``tokenizer_json`` or else by AutoTokenizer."""
    special = settings["add_special_tokens"]
    if settings["tokenizer_json"] is not None:
        tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_str(settings["tokenizer_json"])
        # A tokenizer.json may store the truncation and padding of its last use.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # without offsets into the text
        return lambda texts: (encoding.ids for encoding in batch(texts, add_special_tokens=special))
    kind: Any = importlib.import_module("transformers").AutoTokenizer
    slow = kind.from_pretrained(settings["tokenizer"], trust_remote_code=False)
    return lambda texts: (slow.encode(text, add_special_tokens=special, verbose=False) for text in texts)


def tokenise(piece: Piece, settings: dict[str, Any], encode: Encoder) -> dict[str, int]:
    """Write the tokens of a piece to its file; return how many documents, tokens, empty ones and text bytes it has."""
    texts, places = [], []
    empty = 0
    for text, place in READERS[piece["format"]](piece, settings):
        if text:
            texts.append(text)
            places.append(place)
        else:
            empty += 1
    size = sum(_size(text, place) for text, place in zip(texts, places, strict=True))
    # array codes: H is uint16, i is int32, as in the .bin file. Texts "a" and "" with ids [5] for "a" and eod 2: tokens
    # [5, 2] (4 bytes as uint16), lengths [2], 1 empty, 1 text byte.
    code = "H" if settings["token_bytes"] == 2 else "i"
    parts, lengths = [], array("i")
    for ids in encode(texts) if texts else ():  # one at a time, because lists of ints are large
        if not ids:
            empty += 1
            continue
        tokens = array(code, ids)
        if settings["eod"] is not None:
            tokens.append(settings["eod"])
        parts.append(tokens)
        lengths.append(len(tokens))
    counts = {"documents": len(lengths), "tokens": sum(lengths), "empty": empty, "text_bytes": size}
    write_tokens(piece["output"], counts, lengths.tobytes(), b"".join(parts))
    return counts


def write_tokens(path: str, counts: dict[str, int], lengths: bytes, tokens: bytes) -> None:
    """Write the file of a piece: its counts (a JSON line), lengths (i32), tokens as in the .bin, and a CRC32."""
    content = json.dumps(counts).encode() + b"\n" + lengths + tokens
    partial = f"{path}.{os.getpid()}"  # a worker of a killed command may still be writing the same piece
    with open(partial, "wb") as file:
        file.write(content + crc32(content).to_bytes(4, "little"))
    os.replace(partial, path)


def read_tokens(path: str) -> tuple[dict[str, int], bytes, bytes]:
    """Return the counts, lengths and tokens of a piece; ValueError if its file is damaged."""
    with open(path, "rb") as file:
        content = file.read()
    content, checksum = content[:-4], content[-4:]
    if crc32(content).to_bytes(4, "little") != checksum:
        raise ValueError(f"{path} is damaged; repeat the command to rebuild it")
    head, _, arrays = content.partition(b"\n")
    counts: dict[str, int] = json.loads(head)
    end = 4 * counts["documents"]
    return counts, arrays[:end], arrays[end:]


def _size(text: str, place: Callable[[], str]) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RefusedError(
            f"{place()} contains half of a surrogate pair, {text[error.start]!a}, which is not text; fix that line"
        ) from None


def read_lines(piece: Piece, settings: dict[str, Any]) -> Iterator[Text]:
    """Yield the text column of each JSON line."""
    path, start, column = piece["path"], piece["start"], settings["text_column"]
    lines = _decoded(piece).removesuffix("\n").split("\n")
    for number, line in enumerate(lines):

        def place(number: int = number) -> str:
            # Called only for an error: counting the lines before a piece reads the file up to there.
            return f"{path}, line {_lines_before(path, start) + number + 1}"

        if not line or line.isspace():
            yield None, place
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or type(error).__name__
            raise RefusedError(f"{place()} is not JSON ({reason}); fix or delete that line") from None
        if not isinstance(row, dict):
            raise RefusedError(f"{place()} holds {_kind(row)}, not an object with a column {column!r}; fix that line")
        if column not in row:
            raise RefusedError(f"{place()} has no column {column!r}; {_choose(list(row))}")
        text = row[column]
        if text is not None and not isinstance(text, str):
            others = _choose([name for name in row if name != column])
            raise RefusedError(f"{place()} has {_kind(text)} in column {column!r}, not text; {others}")
        yield text, place


def read_whole(piece: Piece, settings: dict[str, Any]) -> Iterator[Text]:
    """Yield each text file as one document."""
    for path in piece["paths"]:
        yield _decoded({"path": path, "start": 0, "end": None}), functools.partial(str, path)


def read_separated(piece: Piece, settings: dict[str, Any]) -> Iterator[Text]:
    """Yield the documents between the separators of a text file."""
    separator: str = settings["separator"]
    for text in _decoded(piece).removesuffix(separator).split(separator):
        yield text, lambda: str(piece["path"])


def read_parquet(piece: Piece, settings: dict[str, Any]) -> Iterator[Text]:
    """Yield the text column of some rows of a row group."""
    path, column = piece["path"], settings["text_column"]
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(256, [piece["group"]], [column], use_threads=False)
            rows = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
            for text in itertools.islice(rows, piece["first"], piece["first"] + piece["rows"]):
                yield text, lambda: f"{path}, row group {piece['group']}"
    except (OSError, ValueError, ArithmeticError) as error:  # pyarrow's own are among these
        raise RefusedError(f"{path} cannot be read as parquet: {first_line(error)}; fix or remove the file") from None


READERS = {"jsonl": read_lines, "whole": read_whole, "separated": read_separated, "parquet": read_parquet}


def _decoded(piece: Piece) -> str:
    path, start, end = piece["path"], piece["start"], piece["end"]
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read() if end is None else file.read(end - start)
    except OSError as error:
        raise RefusedError(
            f"{path} cannot be read: {error.strerror}; check the disk and the file's permissions"
        ) from None
    if end is not None and len(data) < end - start:
        raise RefusedError(f"{path} became shorter while it was read; do not change inputs while the command runs")
    try:
        # "-sig" drops a byte-order mark, which only the first piece of a file can have.
        return data.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line = _lines_before(path, start) + data.count(b"\n", 0, error.start) + 1
        raise RefusedError(
            f"{path}, line {line} is not UTF-8 text (byte {start + error.start} is {data[error.start]:#04x}); convert"
            " the file to UTF-8, for example with iconv"
        ) from None


def _lines_before(path: str, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(end, 1 << 24))):
            count += block.count(b"\n")
            end -= len(block)
    return count


def _choose(columns: list[str]) -> str:
    shown = ", ".join(columns[:20]) + (", ..." if len(columns) > 20 else "")
    return f"choose another of {shown} with --text-column" if columns else "it has no other column"


def _kind(value: object) -> str:
    kinds = {list: "a list", dict: "an object", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, cut to 300 characters, for the middle of a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".: ")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for destructors of tokenizers
