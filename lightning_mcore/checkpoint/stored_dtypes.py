# SPDX-License-Identifier: Apache-2.0
"""The dtypes that a model is stored in: one for most weights, perhaps another one for a few.

A Hugging Face model in bf16 may have its router gates, or the decays of its delta nets, in fp32. Rounding them changes
what the model computes, so they keep their bits:

* ``lightning-mcore import`` writes each of Megatron's tensors in a dtype that holds all of its parts.
* A run in bf16 or fp16 keeps them in fp32 where a layer supports that (``hf/pretrained.py``, ``keep_wide``). Elsewhere,
  a value that would be rounded raises an error when it is read (:func:`require_kept`).
* A model remembers the dtypes in ``hf["stored"]``, and an export writes each tensor in its own
  (``interop/export_plan.py``).
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes of a model's tensors.

    For example, a bf16 model with all gates and one of two norms in fp32 has the ``others`` ``{"layers.*.gate":
    float32, "layers.0.norm": float32, "layers.1.norm": bfloat16}``.
    """

    most: torch.dtype  # of most values
    others: Mapping[str, torch.dtype] = field(default_factory=dict)  # by name; "*" is any layer or expert number

    @classmethod
    def of_tensors(cls, dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> "StoredDtypes":
        """Return the dtypes of the tensors in a folder, given dtype and shape of each."""
        count: Counter[torch.dtype] = Counter()
        alike: dict[str, set[torch.dtype]] = {}
        for name, dtype in dtypes.items():
            # Values, not tensors: many small fp32 norms do not make an fp32 model.
            count[dtype] += prod(shapes[name])
            alike.setdefault(_NUMBER.sub(".*", name), set()).add(dtype)
        most = max(count, key=lambda dtype: count[dtype], default=torch.float32)
        others = {}
        for name, dtype in dtypes.items():
            stem = _NUMBER.sub(".*", name)
            if dtype != most or len(alike[stem]) > 1:
                others[stem if len(alike[stem]) == 1 else name] = dtype
        return cls(most, others)

    @classmethod
    def recorded(cls, hf: Mapping[str, Any] | None) -> "StoredDtypes | None":
        """Return what ``MCoreGPT`` remembers of its source; None without a source, or from an older version."""
        plain = (hf or {}).get("stored")
        if plain is None:
            return None
        return cls(getattr(torch, plain["dtype"]), {n: getattr(torch, dtype) for n, dtype in plain["others"].items()})

    def plain(self) -> dict[str, Any]:
        """Return them as plain data, for :meth:`recorded`."""
        return {"dtype": _name(self.most), "others": {name: _name(dtype) for name, dtype in self.others.items()}}

    def of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.others.get(name) or self.others.get(_NUMBER.sub(".*", name)) or self.most

    def is_wide(self, dtype: torch.dtype) -> bool:
        """Return whether a dtype holds values that the dtype of most weights does not."""
        return torch.promote_types(dtype, self.most) != self.most


def holds(dtype: torch.dtype, values: Tensor) -> bool:
    """Return whether a dtype represents all values of a tensor exactly."""
    if torch.promote_types(values.dtype, dtype) == dtype:
        return True
    return bool((values.to(dtype).to(values.dtype) == values).all())


def widest(dtypes: Iterable[torch.dtype], least: torch.dtype) -> torch.dtype:
    """Return the smallest dtype that holds the values of all of these dtypes, and of ``least``."""
    return reduce(torch.promote_types, dtypes, least)


def require_kept(name: str, values: Tensor, dtype: torch.dtype, stored: StoredDtypes) -> None:
    """Raise ``ValueError`` if ``dtype`` would round values stored in a wider dtype than most of the weights."""
    if stored.is_wide(values.dtype) and not holds(dtype, values):
        kinds = [_name(each) for each in (values.dtype, stored.most, dtype)]
        raise ValueError(
            f"{name} is stored in {kinds[0]}, unlike most weights ({kinds[1]}), and {kinds[2]} would round it;"
            " train with precision='32-true', or round it with lightning-mcore import --dtype and train from that"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
