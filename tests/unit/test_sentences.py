# SPDX-License-Identifier: Apache-2.0
"""What tests make the package say is compared with one file, and written there on request."""

import re
import sys

import pytest

from tests.support import sentences

pytest_plugins = ["pytester"]

MODULE = """
import pytest
from tests.support.sentences import refuses, says

@pytest.mark.parametrize("given", [{"size": 0}, {"size": 10}])
def test_sizes(given):
    with refuses(ValueError, *given):
        raise ValueError(f"size={given['size']} is too small; choose 1 or more")

def test_folder(tmp_path):
    says(f"{tmp_path}/a.ckpt is damaged; megatron-core 0.16.1 wrote it")
"""
WRITTEN = """
test_it.py

test_folder
    <tmp>/a.ckpt is damaged; megatron-core <version> wrote it

test_sizes
  [size=0]
    ValueError: size=0 is too small; choose 1 or more
  [size=10]
    ValueError: size=10 is too small; choose 1 or more
"""


class Inner:
    """A folder with one test module and a file of sentences of its own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester, self.golden = pytester, pytester.path / sentences.GOLDEN
        self.golden.parent.mkdir()

    def run(self, source: str, update: bool = False) -> str:
        """Run a module, and return what pytest has printed."""
        (self.pytester.path / "test_it.py").write_text(source, encoding="utf-8")
        result = self.pytester.inline_run(
            "-p", "no:cacheprovider", plugins=[sentences.Plugin(self.pytester.path, update)]
        )
        reports = result.getreports("pytest_runtest_logreport")
        return "\n".join(str(report.longrepr) for report in reports if report.failed)  # type: ignore[union-attr]


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Inner:
    # A compiled module of the same size and second as the source that replaced it would be taken for the new one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Inner(pytester)


def test_a_run_with_update_writes_what_was_said_and_later_runs_compare(inner: Inner) -> None:
    assert "not in tests/sentences.txt: ValueError: size=0 is too small" in inner.run(MODULE)
    assert inner.run(MODULE, update=True) == ""
    assert inner.golden.read_text() == sentences.HEADER + WRITTEN
    assert inner.run(MODULE) == ""
    assert inner.run(MODULE.replace('"size": 10', '"size": 11')).count("size=11 is too small") == 1


def test_a_sentence_that_changed_is_shown_with_the_old_one_and_the_command(inner: Inner) -> None:
    inner.run(MODULE, update=True)
    shown = inner.run(MODULE.replace("choose 1", "choose 2"))
    assert "not in tests/sentences.txt: ValueError: size=0 is too small; choose 2 or more" in shown
    assert "no longer said: ValueError: size=0 is too small; choose 1 or more" in shown
    assert "make sentences PYTEST_ARGS=test_it.py" in shown
    assert "no longer said" in inner.run(re.sub("    says.*", "    pass", MODULE))


def test_an_update_forgets_cases_and_tests_that_are_gone(inner: Inner) -> None:
    inner.run(MODULE, update=True)
    inner.run(MODULE.replace("test_folder", "test_path").replace(', {"size": 10}', ""), update=True)
    assert list(sentences.read(inner.golden)) == ["test_it.py::test_path", "test_it.py::test_sizes[size=0]"]


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        ("choose 1 or more", r"choose\n1 or more", "more than one line"),
        ("choose 1 or more", "choose 1 or more.", "a full stop at the end"),
        ("size={given['size']} is", "it is", "none of ('size',) is in"),
        ("raise ValueError(f", "print(f", "DID NOT RAISE"),
    ],
)
def test_what_is_no_sentence_about_the_setting_fails(inner: Inner, old: str, new: str, shown: str) -> None:
    assert shown in inner.run(MODULE.replace(old, new), update=True)


def test_the_file_has_no_test_that_is_gone() -> None:
    known = sentences.read(sentences.ROOT / sentences.GOLDEN)
    assert [key for key in known if not sentences.is_there(key)] == []
    assert len(known) > 500
