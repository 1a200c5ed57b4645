# SPDX-License-Identifier: Apache-2.0
"""The list of phrases that ``make check`` refuses finds them, also across lines, and lets ordinary English pass."""

import pytest

from tests.wording import found_in, main


@pytest.mark.parametrize(
    "text",
    [
        "seq_length: See there.",
        "ValueError: As said.",
        "another front\ndoor",
        "what a file says of itself",
        "it fails, for it has no layers",
        "7 is no number",
        "these are no\nlayers",
        "options that are carried out",
        "mend it",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert [line for line, _, _ in found_in(f"first line\n{text}")] == [2]


@pytest.mark.parametrize(
    "text", ["there is no layer", "it is no longer used", "ask for it, for example", "for it", "amendment", "see below"]
)
def test_ordinary_english_passes(text: str) -> None:
    assert list(found_in(text)) == []


def test_the_checked_files_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
