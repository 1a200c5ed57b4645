# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore fit``, ``validate``, ``test`` and ``predict``: a run from a YAML file, through LightningCLI.

``__init__.py`` calls :func:`run`. ``training_cli.py`` is the command line itself, ``guard.py`` says how it ends;
both import Lightning, so they are imported when it is sure that they can be.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

from lightning_mcore.cli.command_errors import refused


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The name of the command, and what follows it.
    """
    name = arguments[0]
    if importlib.util.find_spec("jsonargparse") is None:
        return refused(f'lightning-mcore {name} needs jsonargparse; pip install "lightning-mcore[cli]"')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # class_path finds a module of this folder, as with python -m
    from lightning_mcore.cli.guard import guarded
    from lightning_mcore.cli.training_cli import train

    return guarded(lambda beginning: train(arguments, beginning))
