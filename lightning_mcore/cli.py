# SPDX-License-Identifier: Apache-2.0
"""The command ``lightning-mcore``; ``python -m lightning_mcore.cli`` is the same.

::

    lightning-mcore preprocess 'corpus/*.jsonl' --output data/corpus --tokenizer gpt2
    lightning-mcore import models/llama start.ckpt
    lightning-mcore export runs/last.ckpt models/tuned

Each command has its own parser and one function, and reads nothing but what that function is given. Exit code 0 says
that it was done, 1 that it could not be, 2 that an argument is wrong, 130 that Ctrl-C ended it. For ``import`` and
``export`` what cannot be done is a wrong argument: a folder, a family.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_mcore.data.preprocess import Options, ProgressLine, preprocess
from lightning_mcore.data.preprocess_inputs import FORMATS, UNFINISHED

__all__ = ["console", "main"]

_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT
_WRONG = 2  # as argparse has it
_DTYPES = ["auto", "bfloat16", "float16", "float32"]
_EXPECTED = (OSError, ValueError, RuntimeError, ImportError)  # of a command; their text is for the user


def console() -> int:
    """Run the command line, as the installed script does, and return the exit code."""
    return main(sys.argv[1:])


def main(arguments: Sequence[str]) -> int:
    """Run a command and return the exit code.

    Args:
        arguments: What follows the name of the program.
    """
    options = vars(_parser().parse_args(arguments))
    run: Callable[[dict[str, Any]], int] = options.pop("run")
    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-mcore", description="Tools around Lightning and megatron-core.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_preprocess(commands)
    _add_import(commands)
    _add_export(commands)
    return parser


def _add_preprocess(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "preprocess",
        help="make Megatron's indexed datasets from text, jsonl or parquet files",
        description=(
            "Make OUTPUT.bin and OUTPUT.idx, an indexed dataset of Megatron's, from text, jsonl or parquet files."
            " The same command goes on where an interrupted one stopped."
        ),
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, a pattern in quotes, or a folder")
    parser.add_argument(
        "--output", "--output-prefix", required=True, metavar="PREFIX", help="what the names of the files begin with"
    )
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        required=True,
        help="a tokenizer.json, or a folder or name for AutoTokenizer of transformers",
    )
    parser.add_argument(
        "--text-column",
        "--json-keys",
        default="text",
        metavar="NAME",
        help="the column of jsonl and parquet files that holds the text (text)",
    )
    parser.add_argument(
        "--format",
        choices=["auto", *FORMATS],
        default="auto",
        help="of all inputs; auto goes by suffixes: .txt, .jsonl, .ndjson, .json (one object a line), .parquet (auto)",
    )
    parser.add_argument(
        "--separator", help=r"text between two documents of a text file, where \n is a new line (one document a file)"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document token (yes)",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="that token (the tokenizer's end of sequence)")
    parser.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="let the tokenizer add what it adds to a sequence, such as a token at its beginning",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenise (one for each core)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a dataset of that name, or unfinished work of another command"
    )
    parser.set_defaults(run=_preprocess)


def _preprocess(options: dict[str, Any]) -> int:
    progress = ProgressLine()
    if options["separator"] is not None:
        options["separator"] = options["separator"].replace(r"\n", "\n").replace(r"\t", "\t")
    try:
        summary = preprocess(Options(**options), progress)
    except KeyboardInterrupt:
        progress.close()
        print(f"interrupted{_what_is_kept(options['output'])}", file=sys.stderr)
        return _INTERRUPTED
    except _EXPECTED as error:
        progress.close()
        text = str(error)
        if isinstance(error, OSError) and error.strerror:
            text = (
                f"{error.strerror}{f': {error.filename}' if error.filename else ''}{_what_is_kept(options['output'])}"
            )
        print(f"error: {text}", file=sys.stderr)
        return 1
    progress.close()
    print(summary, flush=True)
    return 0


def _add_import(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "import",
        help="make a sharded checkpoint from a Hugging Face model",
        description="Make CKPT, a sharded checkpoint for every layout, of a Hugging Face model; needs no GPU.",
    )
    parser.add_argument(
        "path", metavar="HF", help="folder of a Hugging Face model, in safetensors, or its name on the hub"
    )
    parser.add_argument("out", metavar="CKPT", help="the checkpoint, a directory that does not exist yet")
    parser.add_argument("--family", help='model_type, or "package.module:FAMILY" (what its config says)')
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights in it (that of the model's)")
    parser.set_defaults(run=_import)


def _import(options: dict[str, Any]) -> int:
    from lightning_mcore.hf.folder_import import import_checkpoint

    return _carried_out(lambda: import_checkpoint(options.pop("path"), options.pop("out"), **options))


def _add_export(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="make a Hugging Face model from a sharded checkpoint",
        description="Make OUT, a Hugging Face model, of a sharded checkpoint of any layout; needs no GPU.",
    )
    parser.add_argument("path", metavar="CKPT", help="a checkpoint of MCoreStrategy or, with --like, of Megatron-LM")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must be empty or not exist")
    parser.add_argument(
        "--like",
        metavar="HF",
        help="folder of a Hugging Face model whose config and tokenizer to use (those that the checkpoint names)",
    )
    parser.add_argument("--family", help='model_type, or "package.module:FAMILY" (what the checkpoint says)')
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (that of the checkpoint's)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file, such as 500MB (5GB)")
    parser.set_defaults(run=_export)


def _export(options: dict[str, Any]) -> int:
    from lightning_mcore.hf.export import export_checkpoint

    return _carried_out(lambda: export_checkpoint(options.pop("path"), options.pop("out"), **options))


def _carried_out(command: Callable[[], None]) -> int:
    """Run what leaves nothing behind when it fails, and return the exit code."""
    try:
        command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (*_EXPECTED, TypeError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror:  # without its number
            text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return _WRONG
    return 0


def _what_is_kept(output: str) -> str:
    """Return where unfinished work lies, as the end of a sentence; empty where there is none."""
    place = output + UNFINISHED
    return (
        f"; what is done is kept in {place}, and the same command goes on from there" if os.path.exists(place) else ""
    )


if __name__ == "__main__":
    sys.exit(console())
