# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``flash-linear-attention``, which Triton interprets on a CPU: delta nets have the numbers of ours.

``make test-ecosystem`` sets ``TRITON_INTERPRET=1``, which Triton needs from the start. In bf16 the interpreter
multiplies the bits of numbers, so this is fp32.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_mcore.layers.delta_net import _KERNELS
from tests.unit.layers.test_delta_net import CASES, KINDS, through_memories

TOLERANCE = 2e-5  # of the largest number; measured: 7.5e-6


class Index(int):
    """A number of a loop, which compiled code may convert like a tensor and the interpreter takes from Python."""

    def to(self, dtype: Any) -> "Index":
        return self


def indices(*bounds: Any) -> Iterator[Index]:
    """Stand in for ``range`` in a kernel."""
    return (Index(index) for index in range(*(int(bound) for bound in bounds)))


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[int, tuple[Callable[..., Any], ...]]]:
    """The kernels as the package gives them; without a device to measure on, each takes its first setting."""
    with pytest.MonkeyPatch.context() as patch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it lacks, and of the missing device
            modules = {kind: importlib.import_module(module) for kind, (module, *_) in _KERNELS.items()}
        autotuner = sys.modules["triton.runtime.autotuner"].Autotuner
        patch.setattr(autotuner, "_bench", lambda self, *given, config, **more: [1.0, 1.0, 1.0])
        patch.setattr(autotuner, "do_bench", None)
        for name, module in list(sys.modules.items()):
            if name.startswith("fla.ops."):
                patch.setattr(module, "range", indices, raising=False)
        yield {kind: tuple(getattr(module, name) for name in _KERNELS[kind][1:]) for kind, module in modules.items()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about scores of later tokens, which are hidden
@pytest.mark.works_with(
    "fla-core", "its kernels for delta nets, interpreted on a CPU: same numbers and gradients as ours"
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.get)
def test_memories_by_kernels_are_those_in_torch(
    kind: int, case: str, kernels: dict[int, tuple[Callable[..., Any], ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted = (through_memories(used, kind, case, monkeypatch) for used in (kernels[kind], None))
    for ours, expected in zip(found, wanted, strict=True):
        largest = expected.abs().max()
        torch.testing.assert_close(ours / largest, expected / largest, atol=TOLERANCE, rtol=0)
