# SPDX-License-Identifier: Apache-2.0
"""How fast training goes: tokens per second of wall-clock time, with validation left out.

``models/speed.py`` and ``progress.py`` measure with :class:`StepClock`.
"""

import time
from collections.abc import Callable
from typing import Any


def model_copies(strategy: Any) -> int:
    """Return how many copies of the model read data at the same time under a Lightning strategy."""
    copies: int = getattr(strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
    return copies


class StepClock:
    """Measures tokens and wall-clock seconds from one optimizer step to the next, with validation left out.

    The owner calls :meth:`start` before each batch, :meth:`add` after it, :meth:`step` after each optimizer step and
    :meth:`pause` before validation.

    Args:
        now: Returns a time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since: float | None = None
        self._elapsed = 0.0
        self._tokens: Any = 0

    def start(self) -> None:
        """Begin to measure, or go on after :meth:`pause`; nothing happens where the clock runs already."""
        if self._since is None:
            self._since = self._now()

    def add(self, tokens: Any) -> None:
        """Count the tokens of a batch: a number, or a tensor that is not read before the step is over."""
        self._tokens += tokens

    def pause(self) -> None:
        """Stop measuring until the next :meth:`start`."""
        if self._since is not None:
            self._elapsed += self._now() - self._since
            self._since = None

    def step(self, over_copies: Callable[[Any], Any] = float) -> float:
        """Return the tokens per second since the last step, and measure the next one from here.

        Args:
            over_copies: Turns the tokens that this rank has counted into those to divide by the time.
        """
        tokens = float(over_copies(self._tokens))
        self.pause()
        rate = tokens / max(self._elapsed, 1e-9)
        self._elapsed, self._tokens = 0.0, 0
        self.start()
        return rate
