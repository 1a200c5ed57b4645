# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a conversation are learnt, against masks that are written by hand."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models

from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.datamodule import _numbered
from lightning_mcore.data.finetuning.tokenized import compare_sources
from lightning_mcore.data.packing.best_fit import TokenSample
from tests.support.chats import APPENDING, characters
from tests.support.sentences import refuses

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
TEXT = (
    "<|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>Hello you<|end|>\n"
    "<|user|>Bye<|end|>\n<|assistant|>So long<|end|>\n"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END_OUTSIDE = MARKED.replace("<|end|>\n{% endgeneration %}", "{% endgeneration %}<|end|>\n", 1)
FORGETS = (  # as templates do that leave out the thoughts of earlier turns
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS_NOTHING = APPENDING.replace("{% endfor %}", "{% generation %}{% endgeneration %}{% endfor %}")
REACHES_OVER = (
    "{% for m in messages %}{{ m['role'][0] }}: h{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: h{% endif %}"
)


def stretches(tokenizer: Any, sample: TokenSample) -> list[str]:
    """Return the text of each stretch of tokens that are learnt."""
    assert sample.loss_mask is not None
    parts: list[list[int]] = []
    before = False
    for token, learnt in zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True):
        if learnt and not before:
            parts.append([])
        if learnt:
            parts[-1].append(token)
        before = learnt
    return [tokenizer.decode(part) for part in parts]


def encode(tokenizer: Any, talk: list[dict[str, str]] = TALK, **options: Any) -> TokenSample:
    return ChatEncoder(tokenizer, **options).encode(talk, 5, "row 5")


@pytest.mark.parametrize("template", [APPENDING, MARKED, END_OUTSIDE], ids=["appending", "marked", "end-outside"])
@pytest.mark.parametrize("merges", [[], ["He", "lo", "yo", "So"]], ids=["letters", "merged"])
def test_the_answers_and_their_ends_are_learnt_and_nothing_else(template: str, merges: list[str]) -> None:
    tokenizer = characters(template, merges)
    sample = encode(tokenizer)
    assert tokenizer.decode(sample.tokens.tolist()) == TEXT
    assert stretches(tokenizer, sample) == ["Hello you<|end|>", "So long<|end|>"]
    assert sample.sample_id == 5
    assert stretches(tokenizer, encode(tokenizer, loss_on="last_assistant")) == ["So long<|end|>"]


def test_the_mask_is_aligned_with_the_tokens() -> None:
    sample = encode(characters(), TALK[1:3])
    assert sample.loss_mask is not None
    # <|user|> H i <|end|> \n <|assistant|> | H e l l o _ y o u <|end|> | \n
    assert sample.loss_mask.tolist() == [False] * 6 + [True] * 10 + [False]
    assert (sample.length, sample.num_targets) == (16, 10)


def test_every_token_is_learnt_if_told_so() -> None:
    tokenizer = characters(FORGETS)
    sample = encode(tokenizer, TALK[:2], loss_on="all")
    assert stretches(tokenizer, sample) == ["Be brief.<|end|><|user|>Hi<|end|>"]  # the first token follows none


def test_a_token_that_reaches_over_the_beginning_of_an_answer_is_not_learnt() -> None:
    tokenizer = characters(REACHES_OVER, ["hi"])
    sample = encode(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "igh"}])
    assert tokenizer.decode(sample.tokens.tolist()) == "u: hx\na: high\n<|end|>"  # the template ends no turn
    assert stretches(tokenizer, sample) == ["gh\n<|end|>"]


def test_answers_without_words_leave_nothing_to_learn() -> None:
    silent = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " \n"}]
    for talk in (silent, TALK[:2], []):
        sample = encode(characters(), talk)
        assert (len(sample.tokens), sample.num_targets) == (0, 0)


def test_without_a_template_a_response_follows_its_prompt_and_ends() -> None:
    tokenizer = characters(None)
    exchange = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    sample = encode(tokenizer, exchange)
    assert tokenizer.decode(sample.tokens.tolist()) == "HiHello<|end|>"
    assert stretches(tokenizer, sample) == ["Hello<|end|>"]
    assert stretches(tokenizer, encode(tokenizer, exchange, loss_on="all")) == ["iHello<|end|>"]


@pytest.mark.parametrize(
    ("template", "talk", "about"),
    [
        (
            FORGETS,
            TALK,
            "the first 3 of the 5 messages of row 5 differently when more follow, so assistant turns cannot be located;"
            " choose loss_on='last_assistant'",
        ),
        (APPENDING, TALK[2:], "row 5 begins with an assistant turn"),
        (MARKS_NOTHING, TALK, "the chat template marks 0 parts of row 5, which has 2 assistant turns"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "rejects row 5: roles must alternate"),
        (None, TALK, "row 5 has the turns system, user, assistant, user, assistant"),
    ],
    ids=["forgets", "begins", "marks-nothing", "refuses", "turns-without-template"],
)
def test_what_a_template_cannot_write_is_refused(template: str | None, talk: list[dict[str, str]], about: str) -> None:
    with refuses(ValueError, about):
        encode(characters(template), talk)


def test_what_is_no_fitting_tokenizer_is_refused() -> None:
    with refuses(TypeError, "tokenizer is of type Tokenizer; give a"):
        ChatEncoder(Tokenizer(models.BPE()))
    with refuses(ValueError, "neither a chat template nor an EOS token"):
        ChatEncoder(characters(None, pad_token="<|user|>"))
    with refuses(ValueError, "loss_on='user'"):
        ChatEncoder(characters(), "user")  # type: ignore[arg-type]


# ---- other data than in a checkpoint


def _described(*names: str) -> dict[str, Any]:
    """Describe datasets of one file each."""
    return _numbered([{"the files": [f"{name}.jsonl (1)"], "the tokenizer": "t"} for name in names])


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (_described("a"), _described("a", "b"), "the number of datasets, which was 1 and is now 2"),
        (_described("a", "b"), _described("a"), "the number of datasets, which was 2 and is now 1"),
        (_described("a", "b", "c"), _described("a", "b"), "the number of datasets, which was 3 and is now 2"),
        (
            _described("a", "b"),
            _described("a", "c"),
            "the files of dataset 1, which was b.jsonl (1) and is now c.jsonl (1)",
        ),
        (
            {**_described("a"), "the chat template": "x"},
            _described("a"),
            "the chat template, which was x and is now absent",
        ),
        (_described("a"), {**_described("a"), "more": "x"}, "more, which was absent and is now x"),
    ],
)
def test_nothing_that_is_missing_counts_as_equal(then: dict[str, Any], now: dict[str, Any], said: str) -> None:
    compare_sources(then, then, in_epoch=True)
    with refuses(ValueError, f"over different data, which differs in {said}"):
        compare_sources(then, now, in_epoch=True)
