# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks that watch a run on any layout and change nothing in it; import them from here."""

from lightning_mcore.parallel.megatron_import import import_megatron

import_megatron()

from lightning_mcore.callbacks.log_layout import LogLayout  # noqa: E402 - without megatron-core's hints
from lightning_mcore.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging  # noqa: E402

__all__ = ["EMAWeightAveraging", "LogLayout", "WeightAveraging"]
