# SPDX-License-Identifier: Apache-2.0
"""A function in a thread of its own: a save that training does not wait for, or a call that may never return."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_NICENESS = 10  # of a thread that gives way to training; from -20 (runs first) to 19 (runs last)


class BackgroundTask(Future[T]):
    """The future of a function that starts at once in its own thread.

    :meth:`result` waits, and returns what the function returned or raises what it raised. The thread does not keep the
    process alive: unlike an executor's threads, it ends with the process even while it waits for a disk that hangs.
    With ``gives_way`` it yields the processor to the training threads (on Linux).
    """

    def __init__(self, name: str, function: Callable[[], T], gives_way: bool = False) -> None:
        super().__init__()
        self._thread = threading.Thread(target=self._run, args=(function, gives_way), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self.set_exception(error)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, for ``timeout`` seconds at most; errors are left to :meth:`result`."""
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout)

    def _run(self, function: Callable[[], T], gives_way: bool) -> None:
        if gives_way and sys.platform == "linux":  # elsewhere a priority belongs to the whole process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)
