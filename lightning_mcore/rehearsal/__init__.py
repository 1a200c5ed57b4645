# SPDX-License-Identifier: Apache-2.0
"""A run's path on GPUs, played rank by rank on a machine without one.

``rehearse(build)`` starts processes (``processes.py``) in which CUDA tensors are fake (``device.py``,
``fake_cuda.cpp``) and everything that a rank does is counted (``counts.py``).
"""

from lightning_mcore.rehearsal.rank import RankReport
from lightning_mcore.rehearsal.run import Rehearsal, rehearse

__all__ = ["RankReport", "Rehearsal", "rehearse"]
