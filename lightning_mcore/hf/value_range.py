# SPDX-License-Identifier: Apache-2.0
"""A value too large for the type that it is written in would become infinite without a word; here it is refused.

Only float16 is narrow enough for this to happen to weights: its largest value is 65504, and bfloat16 has larger ones.
Export (``export_plan.py``, ``live_tensors.py``) and import ask before they convert.
"""

import torch
from torch import Tensor


def require_fits(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Refuse values that a type cannot hold. What is infinite already may stay so.

    Args:
        name: Of the tensor, for the message.
        values: It, or a part of it, in the type that it has now.
        dtype: The type that it shall have.

    Raises:
        ValueError: A finite value would become infinite.
    """
    if not values.numel() or torch.finfo(values.dtype).max <= torch.finfo(dtype).max:
        return
    ends = torch.stack(torch.aminmax(values))  # needs no memory; the rest is for few
    if ends.to(dtype).isfinite().all():
        return
    lost = values.isfinite() & ~values.to(dtype).isfinite()
    if lost.any():
        largest = values[lost].abs().max().item()
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} has values up to {largest:.6g}, and {kind} ends at {torch.finfo(dtype).max:.6g}; choose dtype"
            " bfloat16 or float32"
        )
