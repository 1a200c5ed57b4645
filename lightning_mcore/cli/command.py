# SPDX-License-Identifier: Apache-2.0
"""The common parts of the commands of ``lightning-mcore``: reading their arguments, and ending.

:class:`CommandParser` rejects wrong arguments in one sentence and suggests the nearest option for a misspelt one. Every
command runs in :func:`run_command`, so wrong input gives one sentence instead of a traceback. Any other error keeps its
traceback, because it is a bug in this package. This file imports no slow module, so ``--help`` answers at once.
"""

import argparse
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning_mcore.config.text import unknown_name

TRAINING = ("fit", "validate", "test", "predict")
"""The commands that LightningCLI has."""

DONE = 0
FAILED = 1
WRONG = 2  # wrong input, as in argparse
INTERRUPTED = 130  # as in shells: 128 plus the number of SIGINT

EXPECTED = (OSError, ValueError, TypeError, RuntimeError, ImportError)
"""Errors whose text is for the user."""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command, print an expected error as one line, and return the exit code; None is success."""
    try:
        code = command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except EXPECTED as error:
        return DONE if isinstance(error, BrokenPipeError) and discard_unread_output() else refused(error)
    return DONE if code is None else code


def discard_unread_output() -> bool:
    """Discard the rest of the output if nobody reads it any more, as after ``| head``; return whether that is so."""
    try:
        sys.stdout.flush()
        file = sys.stdout.fileno()
        poll = select.poll()
        poll.register(file, 0)
        if not poll.poll(0):  # a pipe without a reader reports an error unasked
            return False
    except BrokenPipeError:
        file = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return True


def find_modules_here() -> None:
    """Let the class paths of a file name modules of the current folder, as with ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def refused(error: Exception | str, code: int = WRONG) -> int:
    """Print an error as one line, and return the exit code."""
    label = "error:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        label = f"\033[1;31m{label}\033[0m"
    print(label, sentence(error), file=sys.stderr)
    return code


def sentence(error: Exception | str) -> str:
    """Return the text of an error as one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(text.split()) or type(error).__name__
    if isinstance(error, Exception) and is_of_transformer_engine(error):
        return (
            f"TransformerEngine is installed and cannot be imported: {text.rstrip('.')}; install its core for your CUDA"
            " (transformer-engine[core_cu13,pytorch]), or remove the package"
        )
    return text


def is_of_transformer_engine(error: Exception) -> bool:
    """Return whether importing TransformerEngine failed with an error that megatron-core does not expect."""
    # megatron-core tries the import, and expects ImportError. Without its core, TransformerEngine raises RuntimeError
    # or OSError instead.
    if isinstance(error, ImportError) or not isinstance(error, RuntimeError | OSError):
        return False
    # Only frames of modules that were being imported count, not calls into TransformerEngine.
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    return any(str(frame.f_globals.get("__name__", "")).startswith("transformer_engine") for frame in frames)


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that ends with one line, ``error: <sentence>``, and exit code 2."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"lightning-mcore {name}".strip(), description=description, allow_abbrev=False)

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the values by name; ends the process with code 2 for a wrong argument, and 0 for ``--help``."""
        _refuse_unknown_options(self, arguments)
        return vars(self.parse_args(arguments))

    @property
    def options(self) -> list[str]:
        """The names of the options, such as ``--devices``."""
        return [name for name in self._option_string_actions if name.startswith("--")]

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the command's options with their values, and all other words.

        ``FILE a=1 --devices 8 --bf16`` gives ``[--devices, 8]`` and ``[FILE, a=1, --bf16]``.
        """
        # argparse's nargs is 0 for an option without a value, such as --json.
        takes = {name: action.nargs != 0 for name, action in self._option_string_actions.items()}
        own: list[str] = []
        others: list[str] = []
        words = list(arguments)
        while words:
            word = words.pop(0)
            name, equals, _ = word.partition("=")
            if name not in takes:
                others.append(word)
                continue
            own.append(word)
            own += [words.pop(0)] if takes[name] and not equals and words else []
        return own, others

    def error(self, message: str) -> NoReturn:
        """Print one line instead of argparse's usage, which ``--help`` shows."""
        sys.exit(refused(f"{message} (see {self.prog} --help)", WRONG))


def _refuse_unknown_options(parser: CommandParser, arguments: Sequence[str]) -> None:
    """Reject a misspelt option before argparse, which reports missing options first and suggests no similar one."""
    known = parser.options
    for argument in arguments:
        if argument == "--":
            break
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            parser.error(unknown_name("option", name, known, "--help lists them"))
