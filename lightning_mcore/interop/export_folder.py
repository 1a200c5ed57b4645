# SPDX-License-Identifier: Apache-2.0
"""The folder that an export writes: it must be free, and it appears only when it is complete."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from lightning_mcore.checkpoint import atomic
from lightning_mcore.checkpoint.manifest import saving
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, CONFIG_FILE
from lightning_mcore.parallel.consensus import run_on_rank0


def require_free(out: str, replace: bool = False) -> str:
    """Return the folder to write: ``out``, or the target of the link ``out``, which is kept.

    Raises ValueError if ``out`` is a file or a non-empty folder; with ``replace``, it may be a Hugging Face model.
    """
    out = os.path.realpath(out) if os.path.islink(out) else out
    names = os.listdir(out) if os.path.isdir(out) else []
    is_model = CONFIG_FILE in names or ADAPTER_CONFIG_FILE in names
    if (os.path.lexists(out) and not os.path.isdir(out)) or (names and not (replace and is_model)):
        what = "holds other files" if names else "is a file"
        raise ValueError(f"{out} {what}; give a folder that is empty or does not exist yet")
    return out


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
