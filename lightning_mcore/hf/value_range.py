# SPDX-License-Identifier: Apache-2.0
"""Weights that are no numbers to begin with, and those that would become infinite without a word, are refused here.

Only float16 is narrow enough for this to happen to weights: its largest value is 65504, and bfloat16 has larger ones.
Export (``export_plan.py``, ``live_tensors.py``) and import ask before they convert. What is read from a Hugging Face
model is finite; a model that was trained to infinity is exported as it is.
"""

import torch
from torch import Tensor


def require_finite(name: str, values: Tensor) -> None:
    """Refuse weights to start from that are infinite or not numbers: the file is damaged, or the model never worked.

    Args:
        name: Of the tensor, for the message.
        values: It, or a part of it.

    Raises:
        ValueError: A value is not finite.
    """
    if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():  # passes a NaN on, takes no memory
        raise ValueError(f"{name} has values that are not finite, with which nothing can be trained; download it again")


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
