# SPDX-License-Identifier: Apache-2.0
"""The argument parser of a command: wrong arguments are one sentence, and a misspelt option names its neighbour.

The commands of ``lightning-mcore`` that read their arguments with argparse use :class:`CommandParser`. It is light, so
that ``--help`` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_mcore.cli.command_errors import WRONG, refused
from lightning_mcore.config.text import unknown_name


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that ends with one line, ``error: <sentence>``, and exit code 2.

    Args:
        name: Of the command, such as ``"preprocess"``.
        description: What it does.
    """

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"lightning-mcore {name}".strip(), description=description, allow_abbrev=False)

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what the arguments say, by name.

        Args:
            arguments: What follows the name of the command.

        Raises:
            SystemExit: An argument is wrong (exit code 2), or help was asked for (exit code 0).
        """
        _refuse_unknown_options(self, arguments)
        return vars(self.parse_args(arguments))

    def error(self, message: str) -> NoReturn:
        """Print one line, and not the page of usage; ``--help`` shows that.

        Args:
            message: Of argparse.
        """
        sys.exit(refused(f"{message} (see {self.prog} --help)", WRONG))


def _refuse_unknown_options(parser: CommandParser, arguments: Sequence[str]) -> None:
    """Refuse a misspelt option before argparse does, which misses the required ones first and names no neighbour."""
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    for argument in arguments:
        if argument == "--":
            break
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in known:
            parser.error(unknown_name("option", name, known))
