# SPDX-License-Identifier: Apache-2.0
"""Measure training speed: tokens per second of wall-clock time, without validation.

``models/speed.py`` and ``progress.py`` measure with :class:`StepClock`.
"""

import time
from collections.abc import Callable
from typing import Any


def model_copies(strategy: Any) -> int:
    """Return the number of model copies that read data in parallel under a Lightning strategy."""
    copies: int = getattr(strategy, "distributed_sampler_kwargs", {}).get("num_replicas", 1)
    return copies


class StepClock:
    """Measures tokens and wall-clock seconds from one optimizer step to the next, without validation.

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
        """Start measuring, or continue after :meth:`pause`; do nothing if the clock is running."""
        if self._since is None:
            self._since = self._now()

    def add(self, tokens: Any) -> None:
        """Count the tokens of a batch: a number, or a one-element tensor that is read only after the step."""
        self._tokens += tokens

    def pause(self) -> None:
        """Stop measuring until the next :meth:`start`."""
        if self._since is not None:
            self._elapsed += self._now() - self._since
            self._since = None

    def step(self, over_copies: Callable[[Any], Any] = float) -> float:
        """Return the tokens per second since the last step, and start measuring the next one.

        Args:
            over_copies: Turns this rank's count of tokens into the count that is divided by the time.
        """
        tokens = float(over_copies(self._tokens))
        self.pause()
        rate = tokens / max(self._elapsed, 1e-9)
        self._elapsed, self._tokens = 0.0, 0
        self.start()
        return rate
