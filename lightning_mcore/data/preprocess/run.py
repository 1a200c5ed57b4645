# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore preprocess``: Megatron's indexed datasets from text, jsonl and parquet files.

The input is cut into pieces (``inputs.py``), other processes write a file of tokens for each piece (``pool.py``), and
these are concatenated in input order (``unfinished.py``). So the dataset is the same, byte for byte, for any number
of workers and however often the command was interrupted. After an interruption it resumes where it stopped.

:func:`preprocess` is the command as a function; ``cli/preprocess.py`` is its command line.
``data/pretraining/datamodule.py`` and Megatron-LM read what it makes.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np

from lightning_mcore.data.preprocess.inputs import InputFile, check_parquet, cut, find_inputs
from lightning_mcore.data.preprocess.pool import Workers
from lightning_mcore.data.preprocess.tokenizer import TokenizerFacts, load_tokenizer
from lightning_mcore.data.preprocess.unfinished import Progress, UnfinishedDataset
from lightning_mcore.data.pretraining.index import token_type

PIECE_BYTES = 1 << 20
TEXT_COLUMN = "text"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, which ``cli/preprocess.py`` explains."""

    inputs: Sequence[str]
    output: str
    tokenizer: str
    text_column: str = TEXT_COLUMN
    format: str = "auto"
    separator: str | None = None
    append_eod: bool = True
    eod_token: str | None = None
    add_special_tokens: bool = False
    workers: int | None = None
    overwrite: bool = False
    piece_bytes: int = PIECE_BYTES  # that a worker takes at once; does not change the result

    def check(self) -> None:
        """Raise ValueError for what can be seen without reading a file."""
        output = self.output
        if output.endswith((".bin", ".idx")):
            raise ValueError(f"--output {output} is a file; give the prefix of both files, {output[:-4]}")
        if not os.path.basename(output):
            raise ValueError(f"--output {output!r} is a folder; add a prefix for the files in it")
        if self.separator == "":
            raise ValueError("--separator is empty; give the text between two documents, or remove it")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers} is not positive; choose 1 or more")

    def check_formats(self, formats: set[str]) -> None:
        """Raise ValueError for an option that applies to none of the inputs."""
        if self.separator is not None and "text" not in formats:
            raise ValueError("--separator applies to text files, but no input is one; remove it")
        if self.text_column != TEXT_COLUMN and formats == {"text"}:
            raise ValueError(
                f"--text-column {self.text_column} applies to jsonl and parquet files, but all inputs are text files;"
                " remove it"
            )

    def command(self, files: list[InputFile], facts: TokenizerFacts, eod: int | None) -> dict[str, Any]:
        """Return everything that decides the content of the dataset, under the names that a user knows."""
        return {
            "inputs": [[file.real_path, file.format, file.size, file.modified] for file in files],
            "tokenizer": [facts.digest, facts.vocab_size],
            "end-of-document token": eod,
            "--add-special-tokens": self.add_special_tokens,
            "--text-column": self.text_column,
            "--separator": self.separator,
        }

    def worker_settings(self, facts: TokenizerFacts, eod: int | None) -> dict[str, Any]:
        """Return the settings of ``worker.py``."""
        return {
            "tokenizer_json": facts.json,
            "tokenizer": self.tokenizer,
            "add_special_tokens": self.add_special_tokens,
            "eod": eod,
            "text_column": self.text_column,
            "separator": self.separator,
            "token_bytes": np.dtype(token_type(facts.vocab_size)).itemsize,
        }


@dataclass(frozen=True)
class Summary:
    """The result of the command."""

    prefix: str
    documents: int
    tokens: int  # end-of-document tokens included
    empty: int  # documents without tokens, left out
    text_bytes: int
    left_out: int
    vocab_size: int
    seconds: float  # of this run
    bytes_per_second: float  # of text, in this run
    resumed: bool

    def __str__(self) -> str:
        """Return a summary for the terminal, with the next step."""
        left_out = f", {self.empty:,} empty ones left out" if self.empty else ", none empty"
        files = f"; {self.left_out:,} files with other suffixes left out" if self.left_out else ""
        return (
            f"{self.prefix}.bin and .idx: {self.documents:,} documents{left_out}{files}\n"
            f"{self.tokens:,} tokens of {self.text_bytes / 1e6:,.1f} MB of text, a vocabulary of {self.vocab_size:,};"
            f" {self.bytes_per_second / 1e6:.2f} MB/s in {self.seconds:.0f} s"
            f"{' since it resumed' if self.resumed else ''}\n"
            f'to train on it: MCorePretrainingData("{self.prefix}", seq_length=..., batch_size=...)'
        )


def preprocess(options: Options, on_progress: Callable[[Progress, int], None] | None = None) -> Summary:
    """Make ``OUTPUT.bin`` and ``OUTPUT.idx``, resuming unfinished work; report bytes done and in all."""
    options.check()
    files, left_out = find_inputs(options.inputs, options.format)
    options.check_formats({file.format for file in files})
    # All files are checked before the tokenizer loads and the first worker starts.
    for file in files:
        if file.format == "parquet":
            check_parquet(file, options.text_column)
    facts = load_tokenizer(options.tokenizer, options.eod_token)
    eod = _end_of_document(facts, options.append_eod)
    command = options.command(files, facts, eod)
    clock = time.monotonic()
    with closing(UnfinishedDataset(options.output, command, options.overwrite)) as dataset:
        workers = Workers(options.workers or len(os.sched_getaffinity(0)), options.worker_settings(facts, eod))
        _tokenise(dataset, workers, files, options, on_progress or (lambda progress, total: None))
        done = dataset.progress
        if done.documents == 0:
            dataset.discard()
            raise ValueError(
                f"none of the {done.empty} documents in {len(files)} files has any text; give other inputs or another"
                " --text-column"
            )
        dataset.publish(token_type(facts.vocab_size), _about(facts, options.append_eod, done))
    seconds = time.monotonic() - clock
    return Summary(
        prefix=options.output,
        documents=done.documents,
        tokens=done.tokens,
        empty=done.empty,
        text_bytes=done.text_bytes,
        left_out=left_out,
        vocab_size=facts.vocab_size,
        seconds=seconds,
        bytes_per_second=(done.text_bytes - done.resumed_bytes) / max(seconds, 1e-9),
        resumed=done.resumed_bytes > 0,
    )


def _end_of_document(facts: TokenizerFacts, append_eod: bool) -> int | None:
    if append_eod and facts.eod is None:
        raise ValueError(
            f"{facts.name} has no end-of-sequence token; choose a token with --eod-token, or none with --no-append-eod"
        )
    return facts.eod if append_eod else None


def _about(facts: TokenizerFacts, append_eod: bool, done: Progress) -> dict[str, Any]:
    return {
        "tokenizer": facts.name,
        "vocab_size": facts.vocab_size,
        "eod_token_id": facts.eod,
        "eod_appended": append_eod,
        "documents": done.documents,
        "empty_documents": done.empty,
        "tokens": done.tokens,
        "text_bytes": done.text_bytes,
    }


def _tokenise(
    dataset: UnfinishedDataset,
    workers: Workers,
    files: list[InputFile],
    options: Options,
    on_progress: Callable[[Progress, int], None],
) -> None:
    """Tokenise the pieces that an earlier run has not finished."""
    total = sum(file.size for file in files)
    on_progress(dataset.progress, total)
    pieces = cut(files, options.separator, options.text_column, options.piece_bytes)
    with workers:
        for piece, counts in workers.results(dataset.missing(pieces)):
            dataset.add(piece, counts)
            on_progress(dataset.progress, total)


class ProgressLine:
    """Shows the progress of the command: a bar on a terminal, otherwise a line every ten seconds."""

    EVERY = 10.0  # seconds

    def __init__(self, output: TextIO = sys.stderr) -> None:
        self._output = output
        self._bar: Any = None
        self._begun: float | None = None
        self._last = 0.0

    def __call__(self, progress: Progress, total: int) -> None:
        """Show the progress."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = self._last = now
            if self._output.isatty():
                self._open(total)
        if self._bar is not None:
            self._bar.update(progress.input_bytes - self._bar.n)
            self._bar.set_postfix_str(f"{progress.tokens:,} tokens", refresh=False)
        elif now - self._last >= self.EVERY:
            self._last = now
            speed = (progress.text_bytes - progress.resumed_bytes) / (now - self._begun)
            share = progress.input_bytes / max(total, 1)
            line = f"{share:4.0%}  {progress.documents:,} documents, {progress.tokens:,} tokens, {speed / 1e6:.1f} MB/s"
            print(line, file=self._output, flush=True)

    def _open(self, total: int) -> None:
        self._bar = importlib.import_module("tqdm").tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            file=self._output,
            desc="tokenising",
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
