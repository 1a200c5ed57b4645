# SPDX-License-Identifier: Apache-2.0
"""The folder that an export writes: it must be free, and it appears only when it is complete.

:class:`~lightning_mcore.interop.callback.SaveHFModel` may replace a folder that it wrote in an earlier run.
:func:`mark_own` lists the files that it wrote there, so that a folder with any other file is kept.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.manifest import saving
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, CONFIG_FILE
from lightning_mcore.parallel.consensus import run_on_rank0

OWN_FILES = ".lightning_mcore_export.json"
_SHOWN = 4


def require_free(out: str, replace: bool = False) -> str:
    """Return the folder to write, ``out`` or its link's target; ``replace`` allows a Hugging Face model."""
    out = os.path.realpath(out) if os.path.islink(out) else out
    names = os.listdir(out) if os.path.isdir(out) else []
    is_model = CONFIG_FILE in names or ADAPTER_CONFIG_FILE in names
    if (os.path.lexists(out) and not os.path.isdir(out)) or (names and not (replace and is_model)):
        raise ValueError(f"{out} {_taken_by(out)}; give a folder that is empty or does not exist yet")
    return out


def _taken_by(out: str) -> str:
    if not os.path.isdir(out):
        return "is a file"
    foreign = foreign_files(out)
    if not foreign:
        return "holds a model that SaveHFModel wrote"
    more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
    return f"holds other files ({', '.join(foreign[:_SHOWN])}{more})"


def mark_own(out: str) -> None:
    """List the files of a complete export, which a later run may then replace."""
    with open(os.path.join(out, OWN_FILES), "w", encoding="utf-8") as file:
        json.dump({"files": _files_below(out)}, file, indent=1)


def foreign_files(out: str) -> list[str]:
    """Return the files below a folder that :func:`mark_own` did not list there."""
    own: set[str] = {OWN_FILES}
    errors = (FileNotFoundError, ValueError, KeyError, TypeError)  # the list is missing or broken
    with contextlib.suppress(*errors), open(os.path.join(out, OWN_FILES), encoding="utf-8") as file:
        own |= {*json.load(file)["files"]}
    return [name for name in _files_below(out) if name not in own]


def is_own(out: str) -> bool:
    """Return whether a folder holds an export that :func:`mark_own` marked, and nothing else."""
    return os.path.isfile(os.path.join(out, OWN_FILES)) and not foreign_files(out)


def _files_below(out: str) -> list[str]:
    found = [os.path.join(folder, name) for folder, _, names in os.walk(out) for name in names]
    return sorted(os.path.relpath(path, out) for path in found)


@contextlib.contextmanager
def new_folder(out: str) -> Iterator[str]:
    """Yield a folder to write into; it appears at ``out`` at the end."""
    with saving(out):
        folder = atomic.begin(out)
    try:
        yield folder
        with saving(out):
            atomic.publish(out)
    except BaseException:
        atomic.abandon(out)
        raise


@contextlib.contextmanager
def shared_folder(out: str) -> Iterator[str]:
    """Yield one folder on all ranks, as :func:`new_folder`; a failure on one rank is raised on all."""
    # Only rank 0 creates, publishes or removes the folder; the others just write into it
    folder = run_on_rank0(saving(out)(partial(atomic.begin, out)))
    try:
        yield folder
        run_on_rank0(saving(out)(partial(atomic.publish, out)))
    except BaseException:
        if dist.get_rank() == 0:
            atomic.abandon(out)
        raise
