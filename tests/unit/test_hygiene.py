# SPDX-License-Identifier: Apache-2.0
"""The rules of ``tests/conftest.py``, each seen to catch what it is there for."""

import os

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support import hygiene

pytest_plugins = ("pytester",)


def test_a_replaced_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hygiene.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.Tensor, "cuda", lambda self: self)
        assert hygiene.changes(before, hygiene.snapshot()) == ["Tensor.cuda", "torch.cuda.current_device"]
    assert hygiene.changes(before, hygiene.snapshot()) == []


def test_a_mode_left_open_is_named() -> None:
    before = hygiene.snapshot()
    with TorchFunctionMode():
        assert hygiene.changes(before, hygiene.snapshot()) == ["number of torch function modes"]
    assert hygiene.changes(before, hygiene.snapshot()) == []


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests under the rules of this project; each test says itself which variables are set."""
    for name in ("REQUIRE_GPU", "MIN_TESTS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest("from tests.conftest import *")
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU")
    return pytester


def test_a_test_that_leaves_torch_patched_fails(run: pytest.Pytester) -> None:
    original = torch.cuda.synchronize
    run.makepyfile("import torch\ndef test_patches():\n    torch.cuda.synchronize = lambda: None")
    try:
        result = run.runpytest_inprocess()
    finally:
        torch.cuda.synchronize = original
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*left these changed: torch.cuda.synchronize*"])


def test_the_environment_is_put_back(run: pytest.Pytester) -> None:
    run.makepyfile(
        """
        import os
        def test_first():
            os.environ["LEFT_BEHIND"] = "1"
        def test_second():
            assert "LEFT_BEHIND" not in os.environ
        """
    )
    run.runpytest_inprocess().assert_outcomes(passed=2)
    assert "LEFT_BEHIND" not in os.environ


@pytest.fixture
def without_gpu(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_on_gpu(): pass")
    return run


def test_a_gpu_test_skips_without_a_gpu(without_gpu: pytest.Pytester) -> None:
    result = without_gpu.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA GPU*"])


def test_a_skipped_gpu_test_fails_where_a_gpu_is_required(
    without_gpu: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUIRE_GPU", "1")
    result = without_gpu.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*REQUIRE_GPU=1*needs a CUDA GPU*"])


@pytest.mark.parametrize(("least", "code"), [("2", pytest.ExitCode.OK), ("3", pytest.ExitCode.TESTS_FAILED)])
@pytest.mark.parametrize("workers", [[], ["--numprocesses", "1"]], ids=["alone", "xdist"])
def test_a_suite_that_was_not_found_fails(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, least: str, code: pytest.ExitCode, workers: list[str]
) -> None:
    monkeypatch.setenv("MIN_TESTS", least)
    run.makeconftest("from tests.support.suite_size import *")
    run.makepyfile("def test_first(): pass\ndef test_second(): pass")
    assert run.runpytest_inprocess(*workers).ret == code
