# SPDX-License-Identifier: Apache-2.0
"""A function that runs in a thread, and whose result or error is fetched later.

The thread ends with the process, whatever it is doing: what it writes is put under its name by nobody then. (Threads of
``concurrent.futures`` would hold up the end of a process whose disk hangs.) ``save.py`` writes with it.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_PRIORITY = 10  # of -20, the highest, to 19


class BackgroundTask(Generic[T]):
    """Starts at once.

    Args:
        name: Of the thread, for debuggers.
        function: What to run.
        gives_way: Whether it leaves the processor to the threads of the training, where there are too few for all.
    """

    def __init__(self, name: str, function: Callable[[], T], gives_way: bool = False) -> None:
        self._function: Callable[[], T] | None = function
        self._gives_way = gives_way
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has returned or failed."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """Wait for the end and return the result.

        Raises:
            BaseException: What the function raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        assert self._function is not None
        if self._gives_way and sys.platform == "linux":  # where threads have priorities of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._function = None  # and what it holds: the memory of a copy may be used again
