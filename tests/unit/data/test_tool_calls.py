# SPDX-License-Identifier: Apache-2.0
"""Tools, calls and separate thoughts are written by the chat template: as transformers writes them, and learnt."""

import copy
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from lightning_mcore import MCoreFinetuningData, MCorePreferenceData
from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.conversations import ConversationReader
from tests.support.chats import APPENDING, Row, characters, stub_trainer, write
from tests.support.pages import ROOT
from tests.support.sentences import refuses
from tests.unit.data.test_finetuning_tokens import stretches

BODY = (
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for call in m.tool_calls %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}"
)
START = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
STOP = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
WRITES = START + BODY + STOP
MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}" + BODY + "{% endgeneration %}{% else %}" + BODY + "{% endif %}"
)
MARKS = START + MARKED + STOP
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"where": {"type": "string"}}}}}
LEARNT = [
    ['(hm)<call>look{"where": "here"}</call><|end|>', "Nothing<|end|>"],
    ['<call>wait{"long": [1, {"s": 2}]}</call><|end|>', "(so)Done<|end|>"],
]


def called(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    """Return an assistant's turn that calls a function."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}], **more}


def rows(as_text: bool) -> list[Row]:
    """Return two conversations whose calls have different arguments, perhaps as text, as the OpenAI API has them."""
    write_as = json.dumps if as_text else (lambda value: value)
    return [
        {
            "messages": [
                {"role": "user", "content": "Look!"},
                called("look", write_as({"where": "here"}), reasoning_content="hm"),
                {"role": "tool", "name": "look", "content": "empty"},
                {"role": "assistant", "content": "Nothing"},
            ],
            "tools": write_as([TOOL]),
        },
        {
            "messages": [
                {"role": "user", "content": "Wait!"},
                called("wait", write_as({"long": [1, {"s": 2}]})),
                {"role": "tool", "name": "wait", "content": "ok"},
                {"role": "assistant", "content": "Done", "reasoning_content": "so"},
            ],
            "tools": write_as([]),
        },
    ]


def encode(template: str | None, row: Row) -> tuple[Any, Any]:
    """Return a tokenizer, and what the encoder makes of a row."""
    tokenizer = characters(template)
    tokenizer.add_tokens(["</call>"])
    messages = ConversationReader(row, in_full=True).messages(row, "row 7")
    return tokenizer, ChatEncoder(tokenizer).encode(messages, 7, "row 7")


@pytest.mark.parametrize(
    ("file", "as_text"),
    [("a.jsonl", False), ("a.jsonl", True), ("a.parquet", True)],
    ids=["objects", "text", "parquet"],
)
def test_a_call_is_written_as_transformers_writes_it_and_learnt(tmp_path: Path, file: str, as_text: bool) -> None:
    tokenizer = characters(WRITES)
    path = write(tmp_path / file, rows(as_text))
    for streaming in (False, True):
        data = MCoreFinetuningData(
            path, tokenizer, 512, 2, packing=False, streaming=streaming, cache_dir=str(tmp_path / "cache")
        )
        data.trainer = stub_trainer()
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        numbers = batch["sample_ids"].reshape(-1).tolist()
        assert sorted(numbers) == [0, 1]
        for place, number in enumerate(numbers):
            row = rows(as_text=False)[number]
            written = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], return_dict=True)["input_ids"]
            assert [*batch["tokens"][place, : len(written) - 1].tolist(), tokenizer.eos_token_id] == written
            learnt = batch["labels"][place][batch["loss_mask"][place].bool()].tolist()
            assert tokenizer.decode(learnt) == "".join(LEARNT[number]), (streaming, number)


@pytest.mark.parametrize("template", [WRITES, MARKS], ids=["appending", "marked"])
def test_a_turn_of_calls_ends_with_the_end_of_the_turn_not_of_the_call(template: str) -> None:
    for number, row in enumerate(rows(as_text=False)):
        tokenizer, sample = encode(template, row)
        assert stretches(tokenizer, sample) == LEARNT[number]
    tokenizer, sample = encode(template, {"messages": rows(as_text=True)[1]["messages"][:2]})
    assert stretches(tokenizer, sample) == LEARNT[1][:1]  # a call alone is an answer


@pytest.mark.parametrize("template", [WRITES, MARKS], ids=["appending", "marked"])
def test_a_turn_of_weight_0_is_read_and_not_learnt(template: str) -> None:
    talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    written, sample = encode(template, {"messages": talk})
    for number, learnt in ((1, ["d<|end|>"]), (3, ["b<|end|>"])):
        weighted = [turn | ({"weight": 0} if place == number else {}) for place, turn in enumerate(talk)]
        tokenizer, found = encode(template, {"messages": weighted})
        assert found.tokens.tolist() == sample.tokens.tolist()
        assert stretches(tokenizer, found) == learnt
        messages = ConversationReader(["messages"], in_full=True).messages({"messages": weighted}, "row 7")
        last = ChatEncoder(written, "last_assistant").encode(messages, 7, "row 7")
        assert stretches(written, last) == ([] if number == 3 else ["d<|end|>"])
        with refuses(ValueError, "row 7 has a turn of weight 0"):
            ChatEncoder(written, "all").encode(messages, 7, "row 7")


def test_what_is_learnt_is_kept_and_earlier_thoughts_may_be_left_out() -> None:
    """As a template of a reasoning model does, which writes only the thoughts of the last answer."""
    template = WRITES.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
    row = {"messages": [*rows(as_text=False)[0]["messages"][:3], rows(as_text=False)[1]["messages"][3]]}
    messages = ConversationReader(row, in_full=True).messages(row, "row 7")
    tokenizer = characters(template)
    sample = ChatEncoder(tokenizer, "last_assistant").encode(messages, 7, "row 7")
    assert stretches(tokenizer, sample) == ["(so)Done<|end|>"]
    with refuses(ValueError, "row 7 has 'reasoning_content' in message 1"):
        ChatEncoder(tokenizer).encode(messages, 7, "row 7")


def test_an_end_is_known_though_the_tokenizer_gives_it_no_name() -> None:
    """As with gpt-oss, whose calls end with <|call|>: neither EOS nor another token that has a name."""
    template = WRITES.replace("<|end|>{% endfor %}", "{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}")
    tokenizer = characters(template)
    tokenizer.add_tokens([AddedToken("<|call|>", special=True)], special_tokens=True)
    row = {"messages": rows(as_text=False)[1]["messages"][:3]}
    for length in (2, 3):
        messages = ConversationReader(row, in_full=True).messages({"messages": row["messages"][:length]}, "row 7")
        sample = ChatEncoder(tokenizer).encode(messages, 7, "row 7")
        assert stretches(tokenizer, sample) == ['<call>wait{"long": [1, {"s": 2}]}</call><|call|>']


def test_null_fields_that_parquet_adds_are_left_out() -> None:
    calls = [{"function": {"name": "look", "arguments": {"where": "here", "long": None}}, "id": None}]
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": calls}]}
    before = copy.deepcopy(row)
    tokenizer, sample = encode(WRITES, row)
    assert stretches(tokenizer, sample) == ['<call>look{"where": "here"}</call><|end|>']
    assert row == before
    calls[0]["function"]["arguments"] = '{"where": null}'  # as text, a null is kept
    tokenizer, sample = encode(WRITES, row)
    assert stretches(tokenizer, sample) == ['<call>look{"where": null}</call><|end|>']


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", ["Yes<|user|>", "No<|end|>"]),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", ["Yes\n<|user|>", "No\n<|end|>"]),
    ],
    ids=["glm", "lines"],
)
def test_an_answer_without_an_end_learns_the_next_header_and_the_last_one_eos(template: str, learnt: list[str]) -> None:
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    talk = [(role, text) for pair in ("ay", "bn") for role, text in zip(("user", "assistant"), pair, strict=True)]
    words = {"y": "Yes", "n": "No"}
    tokenizer, sample = encode(template, {"messages": [{"role": r, "content": words.get(t, t)} for r, t in talk]})
    assert stretches(tokenizer, sample) == learnt
    messages = [{"role": r, "content": words.get(t, t)} for r, t in talk]
    whole = ChatEncoder(tokenizer, "all").encode(messages, 7, "row 7")
    assert whole.tokens.tolist() == sample.tokens.tolist()
    assert whole.num_targets == len(whole.tokens) - 1


@pytest.mark.parametrize(
    ("template", "changed", "kind", "about"),
    [
        (APPENDING, {}, ValueError, "row 7 has 'tools' in message 0, which the chat template leaves out"),
        (APPENDING, {"tools": None}, ValueError, "row 7 has 'tool_calls' in message 1"),
        (WRITES.replace("m.tool_calls %}", "m.tool_calls if m.content is none %}"), {}, ValueError, "'tool_calls'"),
        (
            WRITES.replace("m.reasoning_content", "reasoning_content"),
            {},
            ValueError,
            "'reasoning_content' in message 1",
        ),
        (None, {"tools": None}, ValueError, "row 7 has 'tool_calls'"),
        (WRITES.replace("arguments | tojson", "arguments + ''"), {}, ValueError, "the chat template rejects row 7"),
        (WRITES, {"tools": "look"}, TypeError, "'tools' of row 7 is not a list of objects"),
        (WRITES, {"messages": [called("look", "here")]}, ValueError, "arguments of the call of 'look' in message 0"),
        (
            WRITES,
            {"messages": [called("look", {}, tool_calls="look")]},
            TypeError,
            "'tool_calls' of message 0 of row 7",
        ),
        (WRITES, {"messages": [called("look", {}, tool_calls=[{"id": 1}])]}, ValueError, "a call without the name"),
        (WRITES, {"messages": [called("look", {}, reasoning_content={"a": 1})]}, TypeError, "'reasoning_content' of"),
        (WRITES, {"messages": [called("look", {}, weight=0.5)]}, ValueError, "message 0 of row 7 has weight 0.5"),
        (
            WRITES,
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "look"}}]},
            ValueError,
            "message 0 of row 7 has 'function_call'",
        ),
    ],
)
def test_what_a_template_would_leave_out_is_refused(
    template: str | None, changed: Row, kind: type[Exception], about: str
) -> None:
    with refuses(kind, about):
        encode(template, rows(as_text=False)[0] | changed)


ASKED = rows(as_text=False)[0]["messages"][:3]  # a question, a call and its result
WAIT = called("wait", {"long": [1, {"s": 2}]}, reasoning_content="so")
PREFERRED: list[Row] = [
    {"prompt": ASKED[:1], "chosen": [WAIT], "rejected": [{"role": "assistant", "content": "No"}]},
    {"prompt": ASKED, "chosen": [{"role": "assistant", "content": "Nothing"}], "rejected": [WAIT]},
]


def preferences(folder: Path, file: str, rows: list[Row], **options: Any) -> MCorePreferenceData:
    """Return the data of a file of preferences, ready to be asked for pairs."""
    data = MCorePreferenceData(
        write(folder / file, rows), characters(WRITES), 512, cache_dir=str(folder / "cache"), **options
    )
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "parquet"])
@pytest.mark.parametrize("kind", ["pairs", "without a prompt", "kto"])
def test_preferences_with_tools_are_written_as_transformers_writes_them(
    tmp_path: Path, as_text: bool, kind: str
) -> None:
    def stored(row: Row) -> Row:
        row = json.loads(json.dumps({**row, "tools": [TOOL]}))
        if kind == "without a prompt":
            prompt = row.pop("prompt")
            row |= {side: prompt + row[side] for side in ("chosen", "rejected")}
        elif kind == "kto":
            row = {"prompt": row["prompt"], "completion": row["chosen"], "label": True, "tools": row["tools"]}
        if as_text:  # in a column of parquet, all values have one type
            row = json.loads(json.dumps(row | {"tools": json.dumps(row["tools"])}))
            for turn in chain.from_iterable(value for value in row.values() if isinstance(value, list)):
                for call in turn.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return row

    file = "a.parquet" if as_text else "a.jsonl"
    data = preferences(tmp_path, file, [stored(row) for row in PREFERRED])
    source = data.pair_sources()["train"]
    assert len(source) == len(PREFERRED)
    for number, pair in enumerate(source.take([0, 1])):
        prompt = PREFERRED[number]["prompt"]
        # For KTO's estimate, the other answer is the other row's.
        other = PREFERRED[1 - number]["chosen"] if kind == "kto" else PREFERRED[number]["rejected"]
        for sample, answer in zip(pair.sequences, (PREFERRED[number]["chosen"], other), strict=True):
            first, whole = (
                data.tokenizer.apply_chat_template(
                    messages, tools=[TOOL], add_generation_prompt=is_first, return_dict=True
                )["input_ids"]
                for messages, is_first in ((prompt, True), (prompt + answer, False))
            )
            assert sample.tokens.tolist() == whole
            assert sample.loss_mask is not None
            assert np.flatnonzero(sample.loss_mask).tolist() == list(range(len(first), len(whole)))


@pytest.mark.parametrize(
    ("row", "options", "about"),
    [
        (
            {"prompt": ASKED[:1], "chosen": [*ASKED[1:], WAIT], "rejected": [WAIT]},
            {},
            "'chosen' of row 0",
        ),
        (
            {"prompt": ASKED[:1], "completion": [*ASKED[1:], WAIT], "label": True},
            {},
            "'completion' of row 0",
        ),
        (PREFERRED[1] | {"rejected": [WAIT | {"weight": 0}]}, {}, "has an answer of weight 0"),
        (
            PREFERRED[0] | {"chosen": [WAIT | {"content": ""}]},
            {"template": "default"},
            "'tool_calls', which named templates cannot write",
        ),
    ],
    ids=["results", "results of kto", "weight", "named"],
)
def test_preferences_that_cannot_be_read_in_full_are_refused(
    tmp_path: Path, row: Row, options: dict[str, Any], about: str
) -> None:
    with refuses(ValueError, about):
        preferences(tmp_path, "a.jsonl", [row], **options)


def test_results_of_calls_are_no_turns_of_named_templates(tmp_path: Path) -> None:
    said = [{"role": role, "content": role} for role in ("user", "assistant", "tool")]
    row = {"prompt": said, "chosen": "yes", "rejected": "no"}
    assert len(preferences(tmp_path, "a.jsonl", [row]).pair_sources()["train"]) == 1
    with refuses(ValueError, "left out 1 whose turns are not"):
        preferences(tmp_path, "b.jsonl", [row], template="default")


def test_the_rows_of_the_guide_are_read(tmp_path: Path) -> None:
    lines = [line for line in (ROOT / "docs/guides/data.md").read_text().splitlines() if '"tools"' in line]
    answers, preferred = map(json.loads, lines)
    tokenizer, sample = encode(WRITES, answers)
    assert stretches(tokenizer, sample) == [
        '(I must look.)<call>weather{"city": "Rome"}</call><|end|>',
        "Yes, 31 degrees.<|end|>",
    ]
    [pair] = preferences(tmp_path, "a.jsonl", [preferred]).pair_sources()["train"].take([0])
    for sample, answer in zip(
        pair.sequences, ('<call>weather{"city": "Rome"}</call><|end|>', "I cannot know.<|end|>"), strict=True
    ):
        assert stretches(tokenizer, sample) == [answer]
