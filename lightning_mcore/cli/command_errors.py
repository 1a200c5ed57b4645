# SPDX-License-Identifier: Apache-2.0
"""How a command of ``lightning-mcore`` ends: its exit code, and one line for what was wrong.

Every command is run by :func:`carried_out`, so that wrong input is one sentence and never a traceback. Anything that is
not expected of a command keeps its traceback: it is a fault of ours.
"""

import sys
import traceback
from collections.abc import Callable

DONE = 0
FAILED = 1  # it could not be done, while it was being done
WRONG = 2  # wrong input, as argparse has it
INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT

EXPECTED = (OSError, ValueError, TypeError, RuntimeError, ImportError)
"""Errors whose text is for the user."""


def carried_out(command: Callable[[], int | None]) -> int:
    """Run a command, print what was wrong as one line, ``error: <sentence>``, and return the exit code.

    Args:
        command: What to do; returns its own exit code, or None where it is done. It leaves nothing behind when it
            fails.

    Returns:
        0 or what the command returned; 2 for an error with a sentence; 130 where Ctrl-C ended it.
    """
    try:
        code = command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except EXPECTED as error:
        return refused(error)
    return DONE if code is None else code


def refused(error: Exception | str, code: int = WRONG) -> int:
    """Print an error as one line, and return the exit code.

    Args:
        error: Whose text to print, or that text.
        code: The exit code.
    """
    print(f"error: {sentence(error)}", file=sys.stderr)
    return code


def sentence(error: Exception | str) -> str:
    """Return the text of an error as one line.

    Args:
        error: Whose text to return, or that text.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:  # without its number
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(text.split()) or type(error).__name__
    if isinstance(error, Exception) and is_of_transformer_engine(error):
        return (
            f"TransformerEngine is installed and cannot be imported: {text.rstrip('.')}; install its core for your CUDA"
            " (transformer-engine[core_cu13,pytorch]), or remove the package"
        )
    return text


def is_of_transformer_engine(error: Exception) -> bool:
    """Return whether an import of TransformerEngine, which megatron-core tries, has failed in a way of its own.

    Without its core it raises RuntimeError or OSError, which megatron-core does not expect.
    """
    if isinstance(error, ImportError) or not isinstance(error, RuntimeError | OSError):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    return any(str(frame.f_globals.get("__name__", "")).startswith("transformer_engine") for frame in frames)
