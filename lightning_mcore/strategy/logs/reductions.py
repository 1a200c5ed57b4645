# SPDX-License-Identifier: Apache-2.0
"""The reductions of ``self.log(reduce_fx=...)``, by the names that all files of this package use."""

import math
from typing import Any, Literal

import torch

Reduction = Literal["mean", "sum", "min", "max"]

NEUTRAL: dict[Reduction, float] = {"min": math.inf, "max": -math.inf, "mean": 0.0, "sum": 0.0}
"""The value (of a mean, with weight zero) that changes no result, for a rank that has none."""

_NAMES: dict[Any, Reduction] = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.min: "min",
    min: "min",
    torch.max: "max",
    max: "max",
}


def reduction_name(reduce_fx: Any) -> Reduction | None:
    """Return whether the ``reduce_fx`` of ``self.log`` means mean, sum, min or max; None for anything else.

    Source: ``_Metadata`` in lightning/pytorch/trainer/connectors/logger_connector/result.py (2.6).
    """
    return _NAMES.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
