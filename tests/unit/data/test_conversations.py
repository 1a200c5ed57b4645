# SPDX-License-Identifier: Apache-2.0
"""Rows of every form become the same conversations; what does not fit is refused with its place."""

from typing import Any

import pytest

from lightning_mcore.data.finetuning.conversations import ConversationReader
from tests.support.sentences import refuses

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be kind"}
EARLIER = [("user", "1?"), ("assistant", "One"), ("user", "2?"), ("assistant", "Two")]
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "prompt_response": ({"prompt": "Hi", "response": "Hello", "extra": 3}, HELLO),
    "alpaca": ({"instruction": "Hi", "output": "Hello"}, HELLO),
    "alpaca-input": (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    "alpaca-empty-input": ({"instruction": "Hi", "input": "", "output": "Hello"}, HELLO),
    "alpaca-history": (
        {"instruction": "Hi", "output": "Hello", "system": "Be kind", "history": [["1?", "One"], ["2?", "Two"]]},
        [SYSTEM, *({"role": role, "content": text} for role, text in EARLIER), *HELLO],
    ),
    "alpaca-no-history": ({"instruction": "Hi", "output": "Hello", "system": None, "history": None}, HELLO),
    "prompt_response-system": ({"prompt": "Hi", "response": "Hello", "system": "Be kind"}, [SYSTEM, *HELLO]),
    "messages-system": ({"messages": HELLO, "system": "Be kind", "tools": "[]"}, [SYSTEM, *HELLO]),
    "messages-own-system": ({"messages": [SYSTEM, *HELLO], "system": "Be rude", "tools": None}, [SYSTEM, *HELLO]),
    "sharegpt-system-column": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be kind"},
        [SYSTEM, *HELLO],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 1}]},
        HELLO,
    ),
    "sharegpt-system": (
        {"conversations": [{"from": "system", "value": "Be kind"}, {"from": "user", "value": "Hi"}]},
        [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}],
    ),
    "messages": ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, HELLO),
    "messages-parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                {"role": "assistant", "content": "Hello", "tool_calls": None},
            ]
        },
        HELLO,
    ),
    "messages-null": ({"messages": None}, []),
    "prompt_response-messages": ({"prompt": [SYSTEM, HELLO[0]], "response": HELLO[1:]}, [SYSTEM, *HELLO]),
    "prompt_response-text-and-messages": ({"prompt": "Hi", "response": HELLO[1:]}, HELLO),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_becomes_a_conversation_and_its_form_is_told_from_the_columns(row: str) -> None:
    columns, expected = ROWS[row]
    assert ConversationReader(columns).messages(columns, "row 0") == expected
    named: Any = row.partition("-")[0]
    assert ConversationReader(columns, named).messages(columns, "row 0") == expected


def test_prompt_and_response_may_have_other_names_and_null_is_empty() -> None:
    reader = ConversationReader(["q", "a"], prompt_column="q", response_column="a")
    assert [turn["content"] for turn in reader.messages({"q": "Hi", "a": None}, "row 0")] == ["Hi", ""]


@pytest.mark.parametrize(
    ("columns", "format", "about"),
    [
        (["text", "id"], "auto", "the columns 'text', 'id' fit none of the formats"),
        (["instruction", "input"], "alpaca", "format='alpaca' needs the column 'output'"),
        (["prompt"], "chatml", "format='chatml'"),
    ],
)
def test_columns_that_fit_no_form_are_named(columns: list[str], format: Any, about: str) -> None:
    with refuses(ValueError, about):
        ConversationReader(columns, format)


@pytest.mark.parametrize(
    ("row", "kind", "about"),
    [
        ({"messages": [*HELLO, {"role": "bot", "content": "Hello"}]}, ValueError, "message 2 of row 7 has the role"),
        ({"conversations": [{"from": "robot", "value": "Hi"}]}, ValueError, "message 0 of row 7 has the role 'robot'"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, ValueError, "needs 'role' and 'content'"),
        ({"prompt": HELLO, "response": HELLO[1:]}, ValueError, "'prompt' of row 7 has an answer"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
            ValueError,
            "message 0 of row 7 has 'tool_calls'",
        ),
        ({"messages": HELLO, "tools": [{"name": "f"}]}, ValueError, "row 7 has 'tools', which named templates cannot"),
        ({"messages": HELLO, "images": ["a.png"]}, ValueError, "row 7 has 'images', which would be ignored"),
        ({"messages": HELLO, "videos": "a.mp4"}, ValueError, "row 7 has 'videos', which would be ignored"),
        (
            {"messages": [HELLO[0], {**HELLO[1], "reasoning_content": "A greeting"}]},
            ValueError,
            "message 1 of row 7 has 'reasoning_content'",
        ),
        ({"messages": [HELLO[0], {**HELLO[1], "weight": 0}]}, ValueError, "message 1 of row 7 has weight 0"),
        ({"instruction": "Hi", "output": "Hello", "history": "1?"}, TypeError, "'history' of row 7 is of type str"),
        ({"prompt": "Hi", "response": "Hello", "system": 3}, TypeError, "'system' of row 7 is of type int"),
        ({"messages": "Hi"}, TypeError, "row 7 has no list of messages"),
        ({"prompt": 3, "response": "Hello"}, TypeError, "'prompt' of row 7 is of type int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            TypeError,
            "'content' of message 0 of row 7 is of type list",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_place(
    row: dict[str, Any], kind: type[Exception], about: str
) -> None:
    with refuses(kind, about):
        ConversationReader(row).messages(row, "row 7")
