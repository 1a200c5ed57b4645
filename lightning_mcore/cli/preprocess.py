# SPDX-License-Identifier: Apache-2.0
r"""``lightning-mcore preprocess``: text, jsonl or parquet files to Megatron's indexed datasets.

``__init__.py`` calls :func:`run`; ``data/preprocess/run.py`` does the work. An interruption does not lose finished
work, so errors say where it is kept, and their exit code is 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command import DONE, EXPECTED, FAILED, INTERRUPTED, CommandParser, refused, sentence
from lightning_mcore.data.preprocess.inputs import FORMATS, UNFINISHED
from lightning_mcore.data.preprocess.run import Options, ProgressLine, preprocess


def run(arguments: Sequence[str]) -> int:
    """Run the command on the words after its name, and return the exit code."""
    options = _parser().read(arguments)
    if options["separator"] is not None:
        # A shell passes "\n" as two characters.
        options["separator"] = options["separator"].replace(r"\n", "\n").replace(r"\t", "\t")
    return _preprocess(options)


def _parser() -> CommandParser:
    parser = CommandParser(
        "preprocess",
        "Convert text, jsonl or parquet files to a Megatron indexed dataset, PREFIX.bin and PREFIX.idx."
        " If it is interrupted, run the same command again to continue.",
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, a pattern in quotes, or a folder")
    parser.add_argument(
        "--output",
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="path of the dataset, without .bin and .idx",
    )
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        required=True,
        help="a tokenizer.json, or a folder or name for transformers' AutoTokenizer",
    )
    _add_options_of_documents(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="tokenizer processes (default: one per core)")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a dataset of that name, or the unfinished work of another command",
    )
    return parser


def _add_options_of_documents(parser: CommandParser) -> None:
    parser.add_argument(
        "--text-column",
        "--json-keys",
        default="text",
        metavar="NAME",
        help="column with the text in jsonl and parquet files (default: text)",
    )
    parser.add_argument(
        "--format",
        choices=["auto", *FORMATS],
        default="auto",
        help="format of all inputs; auto goes by suffix: .txt, .jsonl, .ndjson, .json (one object per line), .parquet"
        " (default: auto)",
    )
    parser.add_argument(
        "--separator",
        help=r"separator between documents in a text file; \n is a new line (default: each file is one document)",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document token (default: yes)",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="that token (default: the tokenizer's end of sequence)")
    parser.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="let the tokenizer add its special tokens to each document, such as a token at the beginning",
    )


def _preprocess(options: dict[str, Any]) -> int:
    progress = ProgressLine()
    try:
        summary = preprocess(Options(**options), progress)
    except KeyboardInterrupt:
        progress.close()
        print(f"interrupted{_what_is_kept(options['output'])}", file=sys.stderr)
        return INTERRUPTED
    except EXPECTED as error:
        progress.close()
        # An error of the disk may come after hours of work; other errors come before it.
        of_the_system = isinstance(error, OSError) and error.strerror
        return refused(sentence(error) + (_what_is_kept(options["output"]) if of_the_system else ""), FAILED)
    progress.close()
    print(summary, flush=True)
    return DONE


def _what_is_kept(output: str) -> str:
    """Return the end of a sentence that says where unfinished work is kept; empty if there is none."""
    place = output + UNFINISHED
    return (
        f"; the finished work is kept in {place}, and the same command resumes from there"
        if os.path.exists(place)
        else ""
    )
