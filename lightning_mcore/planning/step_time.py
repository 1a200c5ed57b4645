# SPDX-License-Identifier: Apache-2.0
"""How long a step may take on a machine: compute, the bubble, and communication that nothing hides.

time = (compute + communication of every microbatch) / (1 - bubble) + communication once a step that is not overlapped,
of the slowest stage. It is an estimate to rank layouts with: the shares of peak and bandwidth that training reaches are
the constants of ``machines.py``, and memory-bound layers and uneven experts are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_mcore.planning.communication import AxisVolume
from lightning_mcore.planning.machines import Machine

_BACKWARD_SHARE = 2 / 3


@dataclass(frozen=True)
class Overlaps:
    """What runs behind the computation.

    Args:
        gradients: ``overlap_grad_reduce``: behind the backward pass of the last microbatch.
        parameters: ``overlap_param_gather``: behind the forward pass of the first one.
        stages: ``overlap_p2p_comm``.
        tensor: ``tp_comm_overlap``; half of it is taken as hidden.
    """

    gradients: bool = False
    parameters: bool = False
    stages: bool = False
    tensor: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest stage.

    Args:
        compute: Matrix products, recomputation included.
        each_microbatch: Communication that comes with every microbatch.
        once: Communication of gradients and parameters that is not hidden.
        bubble: Waiting for other stages.
    """

    compute: float
    each_microbatch: float
    once: float
    bubble: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.compute + self.each_microbatch + self.once + self.bubble

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**vars(self), "total": self.total}


def step_time(
    flops_of_rank: Sequence[float],
    traffic_of_rank: Sequence[Sequence[AxisVolume]],
    num_microbatches: int,
    bubble: float,
    machine: Machine,
    number_format: str,
    devices_per_node: int,
    overlaps: Overlaps,
) -> StepTime:
    """Estimate the time of a step.

    Args:
        flops_of_rank: Operations of one rank of each stage, narrow matrices weighed (``slowed_flops_of_rank``).
        traffic_of_rank: What it sends, for each stage.
        num_microbatches: Microbatches of the step.
        bubble: Share of the time in which a stage waits.
        machine: The devices.
        number_format: ``"bf16"``, ``"fp8"`` or ``"fp32"``.
        devices_per_node: Devices that NVLink joins.
        overlaps: What is hidden.
    """
    of_stages = []
    for flops, volumes in zip(flops_of_rank, traffic_of_rank, strict=True):
        compute = flops / machine.speed(number_format)
        each = once = 0.0
        for volume in volumes:
            seconds = volume.sent / machine.link(volume.stride, volume.group_size, devices_per_node)
            if not volume.each_microbatch:
                once += seconds
            elif not (volume.axis == "pp" and overlaps.stages):
                each += seconds * (0.5 if volume.axis == "tp" and overlaps.tensor else 1.0)
        hidden = overlaps.gradients * _BACKWARD_SHARE + overlaps.parameters * (1 - _BACKWARD_SHARE)
        once = max(0.0, once - hidden * compute / num_microbatches)
        waiting = (compute + each) * bubble / (1 - bubble)
        of_stages.append(StepTime(compute, each, once, waiting))
    return max(of_stages, key=lambda stage: stage.total)
