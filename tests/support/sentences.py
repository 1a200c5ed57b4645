# SPDX-License-Identifier: Apache-2.0
"""Every sentence that a test makes the package say, in one file that can be read as text: ``tests/sentences.txt``.

A test says which error it expects, and which name or value the sentence must contain::

    with refuses(ValueError, "micro_batch_size=0"):
        MCoreStrategy(micro_batch_size=0)

``sentences.txt`` has the whole sentence under the test's name::

    tests/unit/test_refusals.py

    test_a_wrong_setting_of_the_strategy
      [micro_batch_size=0]
        ValueError: micro_batch_size=0 is too small; choose 1 or more

After each test, what it provoked is compared with the file. ``make sentences`` writes the file; read the difference
before you commit it. Use ``pytest.raises`` for a sentence that quotes another package, because it depends
on the release, and for tables of names that share one sentence.
"""

import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = "tests/sentences.txt"
HEADER = "# What the tests make the package say. `make sentences` writes this file; read the difference.\n"
COLLECTED_IN = "SENTENCES_OF_THE_TEST"  # names a file; a rank inherits the environment of the test that started it
VERSION = re.compile(r"\b((?:megatron-core|torch|transformers|TransformerEngine|Python|lightning) )\d+(\.\w+)+(\+\w+)?")
QUOTED = re.compile(
    r"(Expecting |maximum recursion |Exceeds the limit |Unterminated string |'utf-8' codec |expected the node |"
    r"\w+\(\) got an unexpected |(?<=transformers cannot read it: )|(?<=refuses this model: )|"
    r"(?<=safetensors is damaged \())(\([^()]*\)|[^;()])*"
)
"""Words of other packages, which change with their releases."""
CHECKSUM = re.compile(r"\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{8,12}\b")

Sentences = dict[str, list[str]]
"""By test, as in ``tests/unit/test_x.py::test_y[tp=2]``."""


@contextlib.contextmanager
def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], *about: str) -> Iterator[Any]:
    """Expect an error, on a rank or here; its sentence must contain one of the names, or ``name=value``, given."""
    with pytest.raises(kind) as raised:
        yield raised
    text = f"{type(raised.value).__name__}: {raised.value}"
    if text.startswith("RanksFailedError"):
        text = text.partition(" failed first: ")[2].partition("\n")[0]
    says(text, *about)


def says(text: str, *about: str) -> None:
    """Take in a sentence that was printed, or that has come from a rank; it must contain one of the names given."""
    assert "\n" not in text, f"more than one line: {text}"
    assert 20 < len(text) < 1000, f"{len(text)} characters: {text}"
    assert not re.search(r"[^.]\.$", text), f"a full stop at the end: {text}"
    assert not about or any(name in text for name in about), f"none of {about} is in: {text}"
    with open(os.environ[COLLECTED_IN], "a", encoding="utf-8") as file:
        file.write(json.dumps(text) + "\n")


def without_places(text: str, base: str) -> str:
    """Replace what differs from run to run, or between releases: folders, versions, quotations and addresses."""
    text = re.sub(rf"{re.escape(base)}(/[\w.-]*\d+)?(?![\w.])", "<tmp>", text)
    text = text.replace(str(ROOT), "<repository>")  # which may itself lie in the folder for temporary files
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "<tmp>", text)
    text = re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on <host>", text)
    text = QUOTED.sub("<quoted>", VERSION.sub(r"\1<version>", text))
    return CHECKSUM.sub("<checksum>", re.sub("0x[0-9a-f]{6,}", "<address>", text))


def read(path: Path) -> Sentences:
    """Return the sentences of a file."""
    sentences, file, function, case = Sentences(), "", "", ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.endswith(".py"):
            file = line
        elif line.startswith("test_"):
            function, case = line, ""
        elif line.startswith("  ["):
            case = line[2:]
        elif line.startswith("    "):
            sentences.setdefault(f"{file}::{function}{case}", []).append(line[4:])
    return sentences


def write(path: Path, sentences: Sentences) -> None:
    """Write sentences, each test under its file and each case under its test, with ``x2`` before ``x10``."""
    lines, last = [HEADER], ("", "")
    for key in sorted(sentences, key=lambda key: re.sub(r"\d+", lambda number: number[0].zfill(9), key)):
        file, _, test = key.partition("::")
        function, bracket, case = test.partition("[")
        lines += [f"\n{file}\n"] if file != last[0] else []
        lines += [f"\n{function}\n"] if (file, function) != last else []
        lines += [*([f"  [{case}\n"] if bracket else []), *(f"    {sentence}\n" for sentence in sentences[key])]
        last = (file, function)
    path.write_text("".join(lines), encoding="utf-8")


def updated(old: Sentences, ran: Sentences, root: Path) -> Sentences:
    """Return the sentences after a run: those of each function that ran are replaced, those of missing ones go."""
    functions = {key.partition("[")[0] for key in ran}
    kept = {key: said for key, said in old.items() if key.partition("[")[0] not in functions and is_there(key, root)}
    return kept | {key: old[key] if set(old.get(key, [])) == set(said) else said for key, said in ran.items() if said}


def is_there(key: str, root: Path = ROOT) -> bool:
    """Whether a file has the function of a test."""
    path, _, test = key.partition("::")
    return (root / path).exists() and f"def {test.partition('[')[0]}(" in (root / path).read_text(encoding="utf-8")


class Plugin:
    """Collects the sentences of each test, and compares or writes them."""

    def __init__(self, root: Path = ROOT, updates: bool = os.environ.get("UPDATE_SENTENCES") == "1") -> None:
        self.root, self.updates = root, updates
        self.known, self.ran = read(root / GOLDEN), Sentences()

    def pytest_make_parametrize_id(self, val: object) -> str | None:
        """Name a case by the settings it gives, as in ``tensor_model_parallel_size=3``."""
        if isinstance(val, dict) and any(isinstance(value, set | frozenset) for value in val.values()):
            return None  # in another order in each process of xdist
        if isinstance(val, list) and val and all(isinstance(word, str) for word in val):
            text = ",".join(val)
        elif isinstance(val, dict) and val and not re.search(f"<|\n|{re.escape(str(self.root))}", repr(val)):
            text = ",".join(f"{name}={value}" for name, value in val.items())
        elif isinstance(val, str) and len(val) > 80:
            text = val
        else:
            return None
        return text.encode("unicode_escape").decode()[:80]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Compare what the test, or a rank of it, has said with the file."""
        with tempfile.TemporaryDirectory(prefix="sentences_") as folder:
            path = Path(folder) / "sentences"
            os.environ[COLLECTED_IN] = str(path)
            result = yield
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        base = str(item.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        said = list(dict.fromkeys(without_places(json.loads(line), base) for line in lines))
        file = os.path.relpath(item.path, self.root)  # a test of pytest itself runs files elsewhere
        expected = self.known.get(f"{file}::{item.name}", [])
        if self.updates:
            item.user_properties.append((f"{file}::{item.name}", said))  # type: ignore[arg-type]
        elif set(said) != set(expected):
            new = "".join(f"not in {GOLDEN}: {text}\n" for text in said if text not in expected)
            old = "".join(f"no longer said: {text}\n" for text in expected if text not in said)
            pytest.fail(f"{new}{old}If that is right, run: make sentences PYTEST_ARGS={file}", pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in the sentences of a test that passed, whichever process ran it."""
        if self.updates and report.when == "call" and report.passed:
            self.ran.update(report.user_properties)  # type: ignore[arg-type]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file in the process that has heard of all tests."""
        if self.updates and not hasattr(session.config, "workerinput"):
            write(self.root / GOLDEN, updated(self.known, self.ran, self.root))
