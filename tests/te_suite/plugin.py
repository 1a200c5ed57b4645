# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs TransformerEngine's tests, which ask for a GPU, on the CPU."""

import contextlib
import importlib
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_mcore.parallel.cpu_runtime import cpu_runtime

SECONDS = 60  # of one test

_patches = contextlib.ExitStack()


class _Hopper:
    """The properties of a device of compute capability 9.0."""

    name = "cpu"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 0


def pytest_configure(config: pytest.Config) -> None:
    """Let CUDA mean the CPU until the end of the run."""
    _patches.enter_context(cpu_runtime())
    answers: dict[str, Any] = {
        "get_device_properties": lambda *args: _Hopper(),
        "get_device_capability": lambda *args: (9, 0),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args: True,
        "device": lambda *args: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        _patches.enter_context(mock.patch.object(torch.cuda, name, answer))
    _patches.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
    importlib.import_module("transformer_engine.pytorch")
    compiled = importlib.import_module("transformer_engine_torch")
    compiled.FP8TensorMeta = type("FP8TensorMeta", (), {})  # a compiled record, which only tests make
    torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End that."""
    _patches.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give up a test that takes too long."""

    def stop(*args: Any) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
