# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks that watch a run on any layout, average its weights, or keep activations in host memory."""

from lightning_mcore.parallel.megatron_import import import_megatron

import_megatron()

from lightning_mcore.callbacks.first_step import TimeToFirstStep  # noqa: E402 - without megatron-core's hints
from lightning_mcore.callbacks.layer_statistics import LayerStatistics  # noqa: E402
from lightning_mcore.callbacks.log_layout import LogLayout  # noqa: E402
from lightning_mcore.callbacks.memory_snapshot import MemorySnapshot  # noqa: E402
from lightning_mcore.callbacks.profiler_trace import ProfilerTrace  # noqa: E402
from lightning_mcore.callbacks.spans import OpenTelemetryProfiler  # noqa: E402
from lightning_mcore.callbacks.stragglers import StragglerMonitor  # noqa: E402
from lightning_mcore.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging  # noqa: E402
from lightning_mcore.strategy.offload import OffloadActivations  # noqa: E402

__all__ = [
    "EMAWeightAveraging",
    "LayerStatistics",
    "LogLayout",
    "MemorySnapshot",
    "OffloadActivations",
    "OpenTelemetryProfiler",
    "ProfilerTrace",
    "StragglerMonitor",
    "TimeToFirstStep",
    "WeightAveraging",
]
