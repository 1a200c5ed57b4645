# SPDX-License-Identifier: Apache-2.0
"""A real Jupyter kernel, in which a test runs cells as a notebook would."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel

from tests.support.ranks import program_environment


def kernel_environment() -> dict[str, str]:
    """Return the variables of a kernel that imports this checkout; one that is told of pytest would not show all."""
    environment = program_environment()
    environment.pop("PYTEST_CURRENT_TEST", None)
    return {**environment, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def scaled(seconds: float) -> float:
    """Return a timeout for a slow or crowded machine."""
    return seconds * float(os.environ.get("RANKS_TIMEOUT_SCALE", "1"))


@dataclass
class Cell:
    """What a cell has printed, and the error that ended it."""

    text: str = ""
    error: str = ""


class Kernel:
    """A kernel and the connection to it."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self._client = client

    @property
    def ranks(self) -> list[psutil.Process]:
        """The ranks that the kernel has started and that have not ended."""
        children = psutil.Process(self.manager.provisioner.process.pid).children()
        return [child for child in children if "run_rank" in " ".join(child.cmdline())]

    def run(self, code: str, seconds: float, marker: str = "", at_marker: Callable[[], object] = lambda: None) -> Cell:
        """Run a cell; call a function once, when the cell has printed ``marker``."""
        cell = Cell()
        waiting = bool(marker)

        def hear(message: dict[str, Any]) -> None:
            nonlocal waiting
            cell.text += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
            if waiting and marker in cell.text:
                waiting = False
                at_marker()

        reply = self._client.execute_interactive(code, output_hook=hear, timeout=scaled(seconds))
        content = reply["content"]
        cell.error = f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""
        return cell


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel in a folder, and end it."""
    manager, client = start_new_kernel(kernel_name="python3", env=kernel_environment(), cwd=str(folder))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
