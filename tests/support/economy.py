# SPDX-License-Identifier: Apache-2.0
"""What makes a process of the tests cheap; it is imported before torch, Lightning and megatron-core.

* The garbage collector is off while they are imported, which takes a quarter longer with it. Whoever imports this
  module switches it on again.
* Entry points are read once for each ``sys.path``. Every Trainer asks for them, and so does every Hugging Face model
  that is read; each time Python opens a file of each installed package.
* pyarrow's allocator starts no thread, so that ranks can be forks of a process that has imported it.
* ``os.fsync`` checks the file and does not wait for the disk: a test kills processes, and none cuts the power.
* megatron-core does not say in each process which packages are not installed.
* A process computes on one thread. Otherwise Lightning would give every process all cores as soon as a test trains in
  it, and threads that wait for work spin.
"""

import functools
import gc
import importlib.metadata
import os
import sys
import warnings
from typing import Any

gc.disable()
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
os.environ["OMP_NUM_THREADS"] = "1"
warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex (is|are) not installed", UserWarning)

_read = importlib.metadata.entry_points


@functools.cache
def _read_once(path: tuple[str, ...]) -> Any:
    return _read()


@functools.cache
def _select_once(path: tuple[str, ...], **selection: str) -> Any:
    return _read_once(path).select(**selection)


def _entry_points(**selection: str) -> Any:
    folders = [os.path.abspath(folder) for folder in sys.path if not folder.endswith("_vendor")]  # of setuptools
    return _select_once(tuple(dict.fromkeys(folders)), **selection)


importlib.metadata.entry_points = _entry_points
_entry_points()  # the ranks are forks of a process that has read them


def _fsync(file: Any) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())  # fails for a closed file, as the call itself does


os.fsync = _fsync
