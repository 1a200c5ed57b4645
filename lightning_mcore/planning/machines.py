# SPDX-License-Identifier: Apache-2.0
"""The speed and memory of devices: numbers from vendors' data sheets, and the shares that training reaches.

``plan`` estimates step times with them and compares memory with the device's. A real machine may differ (network cards,
power limits). An estimate ranks layouts; it does not replace a measurement.

Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (dense peaks, without sparsity; NVLink
in one direction); the network of the usual reference systems, one card for each device (HDR 200 Gb/s, NDR 400 Gb/s).
"""

import re
from dataclasses import dataclass

from lightning_mcore.config.text import unknown_name

COMPUTE_SHARE = {"bf16": 0.5, "fp8": 0.38, "fp32": 0.5}
"""Share of the peak that the matrix products of a layer reach; published runs of 8B to 70B models lie around it."""

NARROW = 512
"""The number of columns at which a matrix takes twice as long as its operations: time is work x (1 + 512 / columns). So
many small experts and high tensor parallelism reach a smaller share of the peak than wide dense layers."""

LINK_SHARE = 0.75
"""Share of a link's bandwidth that collectives reach."""


@dataclass(frozen=True)
class Machine:
    """One device and its links."""

    name: str  # the name in ``--device``
    memory: float  # memory in bytes
    peak: dict[str, float]  # operations per second by number format: ``bf16``, ``fp8``, ``fp32`` (TF32)
    nvlink: float  # bytes per second that it sends to devices of its node
    network: float  # bytes per second that it sends to other nodes
    capability: tuple[int, int]  # CUDA's compute capability

    def link(self, stride: int, size: int, devices_per_node: int) -> float:
        """Return the bandwidth of a group in bytes per second: NVLink's if the group lies within a node."""
        inside = stride * size <= devices_per_node and devices_per_node % (stride * size) == 0
        return (self.nvlink if inside else self.network) * LINK_SHARE

    def speed(self, number_format: str) -> float:
        """Return the operations per second that training reaches; an unsupported format counts as bf16."""
        chosen = number_format if number_format in self.peak else "bf16"
        return self.peak[chosen] * COMPUTE_SHARE[chosen]


MACHINES: dict[str, Machine] = {
    "a100": Machine("a100", 80e9, {"bf16": 312e12, "fp32": 156e12}, 300e9, 25e9, (8, 0)),
    "h100": Machine("h100", 80e9, {"bf16": 989e12, "fp8": 1979e12, "fp32": 495e12}, 450e9, 50e9, (9, 0)),
    "h200": Machine("h200", 141e9, {"bf16": 989e12, "fp8": 1979e12, "fp32": 495e12}, 450e9, 50e9, (9, 0)),
    "b200": Machine("b200", 180e9, {"bf16": 2250e12, "fp8": 4500e12, "fp32": 1125e12}, 900e9, 50e9, (10, 0)),
}

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "g": 1e9, "m": 1e6}

_LEAST_MEMORY = 1e6


def machine_named(name: str) -> Machine:
    """Return the machine with a name.

    Raises ValueError if the name is unknown.
    """
    if name.lower() not in MACHINES:
        raise ValueError(unknown_name("device", name, MACHINES))
    return MACHINES[name.lower()]


def parse_memory(text: str) -> float:
    """Return the number of bytes of a text such as ``80GB``, ``79.6GiB`` or a plain number.

    Raises ValueError if the text is not a size, or no device has this size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"memory={text!r} is not a size of memory; write it as '80GB' or '79.6GiB'")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size < _LEAST_MEMORY:
        raise ValueError(f"memory={text!r} is {size:.0f} bytes, which no device has; write it as '80GB' or '79.6GiB'")
    return size
