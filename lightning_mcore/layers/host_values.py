# SPDX-License-Identifier: Apache-2.0
"""Values of a batch that the host knows although the batch is on the device.

To read a value of a device tensor, the host waits until the device has done all its work, and then launches the next
kernel too late. Masks, boundaries of packed sequences and sizes of images decide what is computed, so the host needs
them in every microbatch. It had them before the strategy moved the batch: :func:`keep_on_host` notes them on the moved
tensors, :func:`rows_between` keeps the notes of parts, and :func:`host_values` reads them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEPT = "_values_on_the_host"


def keep_on_host(moved: Any, on_host: Any) -> None:
    """Note on each tensor of whole numbers in a batch, a mapping, which values were moved to the device."""
    if not isinstance(moved, Mapping) or not isinstance(on_host, Mapping):
        return
    for name, source in on_host.items():
        target = moved.get(name)
        if not isinstance(source, Tensor) or not isinstance(target, Tensor):
            continue
        if source.device.type == "cpu" and not (source.is_floating_point() or source.is_complex()):
            note_values(target, source.detach())


def note_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Note a tensor's values, which are on the host, and return the tensor."""
    setattr(tensor, _KEPT, (version_of(tensor), values))
    return tensor


def known_values(tensor: Tensor) -> Tensor | None:
    """Return the noted values, on the host, unless the tensor has changed since."""
    version, values = getattr(tensor, _KEPT, (None, None))
    return values if version == version_of(tensor) else None


def host_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the host; waits for the device if they are not noted."""
    known = known_values(tensor)
    return tensor.cpu() if known is None else known


def rows_between(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return rows ``start`` to ``stop - 1`` of a tensor, with their noted values."""
    rows, known = tensor[start:stop], known_values(tensor)
    return rows if known is None else note_values(rows, known[start:stop])


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device, without waiting for it; the copy has the values noted."""
    if device.type != values.device.type:
        return note_values(values.pin_memory().to(device, non_blocking=True), values)
    return note_values(values.to(device), values.detach())


def version_of(tensor: Tensor) -> int:
    """Return the counter of in-place changes of a tensor; tensors of inference mode do not have one."""
    return -1 if tensor.is_inference() else tensor._version
