# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore fit``, ``validate``, ``test`` and ``predict``: a run from a YAML file, through LightningCLI.

``cli.py`` calls :func:`run`. What is wrong before the run has begun (a file, a key, a value, a layout that does not
fit) is one sentence and exit code 2. An error in the middle of a run keeps its traceback; so does one in code of the
user's, whom a sentence without a place would not help.
"""

import importlib.util
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from lightning_mcore.command_errors import DONE, EXPECTED, INTERRUPTED, WRONG, refused, sentence

_NOT_THE_USERS = [
    str(Path(__file__).resolve().parent),
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
]
_OTHER_RANKS_WAIT = 5.0  # seconds; rank 0 says the same and ends them first, unless an error is theirs alone


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
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_mcore.training_cli import Beginning, train

    beginning = Beginning()
    try:
        train(arguments, beginning)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning has shut down the run
            return INTERRUPTED
        raise
    except (*EXPECTED, MisconfigurationException) as error:
        if beginning.is_over or _is_in_code_of_the_user(error):
            raise
        rank = getattr(rank_zero_only, "rank", 0)
        if rank == 0:
            beginning.end_other_ranks()
            return refused(error)
        time.sleep(_OTHER_RANKS_WAIT)
        print(f"error on rank {rank}: {sentence(error)}", file=sys.stderr)
        return WRONG
    return DONE


def _is_in_code_of_the_user(error: Exception) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(not file.startswith(("<", *_NOT_THE_USERS)) for file in files)
