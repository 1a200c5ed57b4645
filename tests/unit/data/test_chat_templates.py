# SPDX-License-Identifier: Apache-2.0
"""Templates by name: the text and the mask of LLaMA-Factory's own, piece by piece, cut as there."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_mcore.data.finetuning.chat import (
    BOS,
    TEMPLATES,
    TEXT,
    ChatTemplate,
    DocumentEncoder,
    TemplateEncoder,
    named_template,
)
from lightning_mcore.data.packing.best_fit import TokenSample
from tests.support.sentences import refuses

# What LLaMA-Factory (ff6d4d12) makes of the conversations below: stretches of text, and whether each is learnt.
EXPECTED: dict[str, Any] = json.loads(Path(__file__).with_name("chat_templates.json").read_text(encoding="utf-8"))
TALKS = {
    "one": ("What is it?", "It is the answer."),
    "system": ("Be brief.", "hello", "\n\nhello there"),
    "two": (" How are you?", "fine", "\n\nand the answer?", "### is 42"),
    "thought": ("2+2", "<think>\nadd\n</think>\n\n4", "3+3", "<think>\nadd too\n</think>\n\n6"),
}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|end_of_text|>", "<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>", "<think>", "</think>"),
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
)
PLAIN = ChatTemplate("plain", user=("Q{text}A",), answer=("{text}</s>",))


def tokenizer(merges: tuple[str, ...] = (), **special: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of the marks of all templates."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(merge[0], merge[1]) for merge in merges]
    vocabulary |= {merge: len(vocabulary) + number for number, merge in enumerate(merges)}
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=whole, **{"bos_token": "<s>", "eos_token": "</s>"} | special)


def talk(*texts: str) -> list[dict[str, str]]:
    """Return a conversation; of an odd number of texts the first is the system's."""
    system = [{"role": "system", "content": texts[0]}] if len(texts) % 2 else []
    turns = zip(("user", "assistant") * len(texts), texts[len(system) :], strict=False)
    return [*system, *({"role": role, "content": text} for role, text in turns)]


def stretches(sample: TokenSample) -> list[list[Any]]:
    """Return stretches of text, and whether each is learnt."""
    assert sample.loss_mask is not None
    pairs = zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True)
    found = [(learnt, [token for token, _ in group]) for learnt, group in groupby(pairs, key=lambda pair: pair[1])]
    return [[tokenizer().decode(tokens), learnt] for learnt, tokens in found]


def encode(template: ChatTemplate, *texts: str, **options: Any) -> list[list[Any]]:
    return stretches(TemplateEncoder(tokenizer(), template, **options).encode(talk(*texts), 0, "row 0"))


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in EXPECTED.items() for kind in kinds])
def test_each_template_writes_and_masks_as_in_llama_factory(name: str, kind: str) -> None:
    assert encode(TEMPLATES[name], *TALKS[kind]) == EXPECTED[name][kind]


def test_every_template_is_held_against_llama_factory() -> None:
    assert set(EXPECTED) == set(TEMPLATES)


def test_pieces_are_tokenised_by_themselves() -> None:
    merges = tokenizer(("Ax", "xy"))
    sample = TemplateEncoder(merges, PLAIN).encode(talk("q", "xy"), 0, "row 0")
    assert merges.convert_ids_to_tokens(sample.tokens.tolist()) == ["Q", "q", "A", "xy", "</s>"]


def test_an_empty_thought_is_learnt_or_given() -> None:
    thinking = TEMPLATES["qwen3"]
    learns = encode(thinking, "q", "a")
    assert learns[-1] == ["<think>\n\n</think>\n\na<|im_end|>\n", True]
    given = encode(replace(thinking, thinking=False), "q", "<think>\nwhy\n</think>\n\na")
    assert given[-1] == ["a<|im_end|>\n", True]
    assert given[0][0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_last_answer_alone_forgets_earlier_thoughts() -> None:
    texts = ("1", "<think>\na\n</think>\n\nb", "2", "c")
    forgets = encode(TEMPLATES["qwen3"], *texts, loss_on="last_assistant")
    assert "<think>\na" not in forgets[0][0]
    assert forgets[-1] == ["<think>\n\n</think>\n\nc<|im_end|>\n", True]
    keeps = encode(replace(TEMPLATES["qwen3"], keeps_thoughts=True), *texts, loss_on="last_assistant")
    assert "<think>\na\n</think>" in keeps[0][0]


@pytest.mark.parametrize(
    ("texts", "longest", "expected"),
    [
        (("qqqqqqqq", "aa"), 8, [["Qqqqq", False], ["aa</s>", True]]),  # a short answer stays whole
        (("q", "aaaaaaaa"), 8, [["QqA", False], ["aaaaa", True]]),  # a short prompt stays whole
        (("qqqqqqqq", "aaaaaaaaa"), 10, [["Qqqqq", False], ["aaaaa", True]]),  # each keeps its share
        (("q", "a", "q", "b"), 5, [["QqA", False], ["a</s>", True]]),  # a full row has no room for more
    ],
)
def test_long_conversations_are_cut_within_their_exchanges(
    texts: tuple[str, ...], longest: int, expected: list[list[Any]]
) -> None:
    assert encode(PLAIN, *texts, longest=longest) == expected


def test_the_last_exchange_comes_first_where_it_alone_is_learnt() -> None:
    found = encode(PLAIN, "1", "a", "2", "b", loss_on="last_assistant", longest=7)
    assert found == [["Q1Q2A", False], ["b</s>", True]]


def test_every_token_can_be_learnt() -> None:
    assert encode(PLAIN, "q", "a", loss_on="all") == [["Q", False], ["qAa</s>", True]]  # the first predicts nothing


def test_nothing_that_is_said_is_no_sample() -> None:
    encoder = TemplateEncoder(tokenizer(), PLAIN)
    assert not len(encoder.encode(talk("q", " \n"), 0, "row 0").tokens)
    assert not len(encoder.encode([], 0, "row 0").tokens)


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        (talk("q", "a")[:1], PLAIN),
        (talk("q", "a")[::-1], PLAIN),
        ([{"role": "tool", "content": "x"}], PLAIN),
        (talk("q", "a", "r", "b"), TEMPLATES["glm4"]),
    ],
)
def test_other_turns_are_refused(messages: Any, template: ChatTemplate) -> None:
    with refuses(ValueError):
        TemplateEncoder(tokenizer(), template).encode(messages, 3, "row 3")


def test_a_template_needs_its_tokens() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with refuses(ValueError, "'deepseek'"):
        TemplateEncoder(bare, TEMPLATES["deepseek"])
    other = tokenizer()
    template = replace(TEMPLATES["llama3"], end_of_turn="<|other|>")
    with refuses(ValueError, "'<|other|>'"):
        TemplateEncoder(other, template)
    with refuses(ValueError, "loss_on='all'"):
        TemplateEncoder(other, TEMPLATES["glm4"], "all")
    with refuses(TypeError, "tokenizer is of type int"):
        TemplateEncoder(3, PLAIN)


def test_a_token_that_a_tokenizer_does_not_have_is_left_out() -> None:
    no_bos = tokenizer(bos_token=None)
    template = ChatTemplate("t", prefix=(BOS, "!"), user=(TEXT,))
    sample = TemplateEncoder(no_bos, template).encode(talk("q", "a"), 0, "row 0")
    assert no_bos.decode(sample.tokens.tolist()) == "!qa</s>"


def test_an_unknown_template_names_those_that_there_are() -> None:
    with refuses(ValueError, "'lama3'"):
        named_template("lama3")


@pytest.mark.parametrize(("name", "end"), [(None, "</s>"), ("llama3", "<|end_of_text|>"), ("qwen", "<|im_end|>")])
def test_a_document_ends_as_its_template_says(name: str | None, end: str) -> None:
    encoder = DocumentEncoder(tokenizer(), None if name is None else TEMPLATES[name])
    sample = encoder.encode([{"role": "user", "content": "some text"}], 0, "row 0")
    assert stretches(sample) == [["s", False], [f"ome text{end}", True]]
    assert not len(encoder.encode([{"role": "user", "content": ""}], 0, "row 0").tokens)
