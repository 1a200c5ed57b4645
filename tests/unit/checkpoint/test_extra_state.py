# SPDX-License-Identifier: Apache-2.0
"""The extra state of TransformerEngine's layers in a checkpoint runs no code."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore.checkpoint.extra_state import checked_extra_state
from tests.support.sentences import refuses

VARIABLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class EvilStorage(Evil):
    """Hidden in what a tensor's storage is read from."""

    def __reduce__(self) -> tuple[Any, ...]:
        content = self.path.with_name("storage")
        torch.save(Evil(self.path), content)
        return torch.storage._load_from_bytes, (content.read_bytes(),)


@pytest.mark.parametrize("kind", [Evil, EvilStorage])
@pytest.mark.parametrize("name", ["layer.linear_fc1._extra_state", "layer.experts.linear_fc1._extra_state3"])
def test_code_is_refused_and_not_run(kind: type[Evil], name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    state = {name: as_bytes({"recipe": kind(mark), "scale_fwd": torch.ones(3)})}
    with (
        refuses(ValueError, f"{name} of the checkpoint contains something"),
        checked_extra_state(state),
    ):
        pytest.fail("it was let through")
    assert not mark.exists()
    assert VARIABLE not in os.environ


def test_scales_are_let_through_while_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = {"scale_fwd": torch.rand(3), "amax_history_fwd": torch.rand(4, 3), "extra_fp8_variables": {"num_gemms": 1}}
    with checked_extra_state({"layer._extra_state": as_bytes(scales), "layer.weight": torch.ones(2)}):
        assert os.environ[VARIABLE] == "1"
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "0")
    with checked_extra_state({"layer._extra_state": torch.empty(0, dtype=torch.uint8)}):
        assert os.environ[VARIABLE] == "0"


def test_a_damaged_one_is_refused() -> None:
    cut = as_bytes({"scale_fwd": torch.rand(3)})[:-9]
    with refuses(ValueError, "contains something other"), checked_extra_state({"layer._extra_state": cut}):
        pass
