# SPDX-License-Identifier: Apache-2.0
"""A profiler that reports a run to OpenTelemetry; Lightning tells only profilers when a save begins and ends."""

import importlib
from typing import Any

from lightning.pytorch.profilers import Profiler

from lightning_mcore.callbacks.chosen_steps import place_of

_SPANS = {"run_training_epoch": "epoch", "run_training_batch": "batch", "save_checkpoint": "save"}  # Lightning's, ours


class OpenTelemetryProfiler(Profiler):
    """Records OpenTelemetry spans for epochs, batches, validations and checkpoint saves, on every rank.

    Pass it to ``Trainer(profiler=...)``. Spans are named ``epoch``, ``batch``, ``validation`` and ``save``, and are
    nested as the parts of the run are. The attribute ``rank`` has the rank with its coordinates, and ``step`` the
    number of completed optimizer steps. Set up an exporter as in any program that uses ``opentelemetry-sdk``; without
    one, spans are dropped. A ``save`` span covers only the time for which training waits.

    Raises:
        ModuleNotFoundError: The package ``opentelemetry-api`` is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lightning_module: Any = None  # the trainer sets it
        self._open: list[tuple[str, Any, Any]] = []  # names, spans and tokens of the current context
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
            self._context: Any = importlib.import_module("opentelemetry.context")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "OpenTelemetryProfiler needs the package opentelemetry-api, which is not installed; pip install"
                " opentelemetry-sdk, or remove the profiler"
            ) from error
        self._tracer = self._trace.get_tracer("lightning_mcore")

    def start(self, action_name: str) -> None:
        """Begin the span of an action, if it has one."""
        if action_name in _SPANS:
            self._begin(_SPANS[action_name])
        elif action_name.startswith("[Strategy]") and action_name.endswith(".on_validation_start"):
            self._begin("validation")

    def stop(self, action_name: str) -> None:
        """End it."""
        if action_name in _SPANS:
            self._end(_SPANS[action_name])
        elif action_name.startswith("[Strategy]") and action_name.endswith(".on_validation_end"):
            self._end("validation")

    def teardown(self, stage: str | None) -> None:
        """End the spans that an exception has left open."""
        while self._open:
            self._end(self._open[-1][0])

    def _begin(self, name: str) -> None:
        trainer = self._lightning_module.trainer
        attributes = {"rank": place_of(trainer, trainer.global_rank), "step": trainer.global_step}
        span = self._tracer.start_span(name, attributes=attributes)
        self._open.append((name, span, self._context.attach(self._trace.set_span_in_context(span))))

    def _end(self, name: str) -> None:
        while any(name == opened for opened, *_ in self._open):  # with what an exception has left open inside
            opened, span, token = self._open.pop()
            self._context.detach(token)
            span.end()
            if opened == name:
                return
