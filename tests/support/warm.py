# SPDX-License-Identifier: Apache-2.0
"""What the fork server does once, after its imports, so that the ranks, its forks, need not do it each.

* Lightning's loops run, without a step. Without a step, autograd starts no thread.
* Python asks all subclasses of an abstract class, once for each class of object that it meets, and remembers the
  answer: of Lightning's loops, and of which modules are metrics, of which there are a hundred classes.
* Regular expressions of warnings are compiled, and the files of modules are found, which jsonargparse asks for.
* On Linux, memory moves into huge pages. A fork copies the table of pages and its end frees it: 20 ms of 45.
"""

import ctypes
import inspect
import logging
import warnings
from pathlib import Path

import torch
from torch import nn
from torchmetrics import Metric

from lightning_mcore.parallel.known_warnings import ignore_known_warnings
from tests.support.toy import PlainNet, loader, make_trainer

_HUGE = 2**21  # bytes
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def _run_loops() -> None:
    torch.set_num_threads(1)
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    with warnings.catch_warnings():
        make_trainer({})
        trainer = make_trainer("auto", limit_train_batches=0)
        trainer.fit(PlainNet(), loader(4, 2), loader(4, 2))
        trainer.validate(PlainNet(), loader(4, 2), verbose=False)
        ignore_known_warnings()
    lightning.setLevel(level)


def _ask_for_metrics(kind: type[nn.Module]) -> None:
    for each in kind.__subclasses__():
        issubclass(each, Metric)
        _ask_for_metrics(each)


def _use_huge_pages() -> None:
    """Ask for huge pages where this process has data of its own; a kernel that has none leaves everything as it is."""
    maps = Path("/proc/self/maps")
    libc = ctypes.CDLL(None)
    for line in maps.read_text().splitlines() if maps.exists() else []:
        place, access, *_, name = (*line.split(maxsplit=5), "")[:6]  # 7f24c0000000-7f24d0000000 rw-p ... [heap]
        if access.startswith("rw") and name in ("", "[heap]"):
            start, end = (int(address, 16) for address in place.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE) if start < end else ():
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


_run_loops()
_ask_for_metrics(nn.Module)
inspect.stack()
_use_huge_pages()
