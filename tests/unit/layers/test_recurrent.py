# SPDX-License-Identifier: Apache-2.0
"""Layers with a memory choose the kernels of other packages where these can run."""

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mcore.layers import delta_net, mamba, recurrent
from lightning_mcore.layers.recurrent import kernels_for

KERNELS = [mamba._KERNEL, *delta_net._KERNELS.values()]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    recurrent._installed.cache_clear()
    yield
    recurrent._installed.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[0])
def test_kernels_are_chosen_on_cuda_in_16_bits_where_they_are_installed(
    kernel: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = kernel[0], kernel[1:]
    for package in itertools.accumulate(path.split("."), lambda above, name: f"{above}.{name}"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name in names:
        setattr(sys.modules[path], name, object())
    on_cpu, on_cuda = torch.zeros(1), SimpleNamespace(device=torch.device("cuda"))
    given: Any = on_cuda
    monkeypatch.setattr(recurrent, "Tensor", SimpleNamespace)
    found = tuple(getattr(sys.modules[path], name) for name in names)
    assert kernels_for(given, torch.bfloat16, *kernel) == kernels_for(given, torch.float16, *kernel) == found
    assert kernels_for(given, torch.float32, *kernel) is None
    assert kernels_for(on_cpu, torch.bfloat16, *kernel) is None
    monkeypatch.setitem(sys.modules, path, None)  # as if it were not installed
    recurrent._installed.cache_clear()
    assert kernels_for(given, torch.bfloat16, *kernel) is None
