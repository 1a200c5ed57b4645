# SPDX-License-Identifier: Apache-2.0
"""Rows of preference data as a prompt with two answers, and these as tokens.

The columns tell the form of a row:

* ``prompt``, ``chosen``, ``rejected``: texts, or lists of messages with ``role`` and ``content``. Without ``prompt``,
  the prompt is what both answers begin with.
* ``prompt``, ``completion``, ``label``: one answer, and whether it is desirable (KTO); texts or messages.
* ``conversations``, ``chosen``, ``rejected``: ShareGPT's form; the answers are messages with ``from`` and ``value``.
* ``instruction``, ``input``, ``chosen``, ``rejected``: Alpaca's form, with texts; optionally ``history``, a list of
  pairs of texts: earlier prompts and their answers.
* ``conversations`` or ``instruction``, ``input`` and ``output``, with ``kto_tag``: the same forms for KTO.

``system`` is the system text of a row that has no system message. If the tokenizer's chat template writes them, rows
may also have ``tools``, and their messages may have calls and separate thoughts, as in ``finetuning/conversations.py``.
Results of calls belong to the prompt, because an answer is one message.

``arguments/llamafactory`` reads forms whose columns a ``dataset_info.json`` names. :class:`PairReading` tokenises rows
in the pipeline of ``finetuning/tokenized.py``; only the answers are learnt.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.data.finetuning.chat import kept_lengths, says_something
from lightning_mcore.data.finetuning.conversations import ConversationReader, Message, Row
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading, columns_of
from lightning_mcore.data.packing.best_fit import TokenSample

PARTNER = "partner of "
"""Prefix of the columns that come from the row with the KL example."""

LEFT_OUT = (
    "",
    "whose turns are not those of user and assistant in turn, with one answer",
    "without an answer",
    "with equal answers",
    "that a cut leaves without an answer",
    "whose partner has no answer",
)
"""Why a row is left out; its number is in the cache, 0 for rows that are used."""
# Indices of LEFT_OUT.
_BROKEN, _UNANSWERED, _EQUAL, _CUT, _ALONE = range(1, 6)


_NOTHING: Message = {"role": "assistant", "content": ""}


class PreferenceRow(NamedTuple):
    """A prompt with two answers."""

    prompt: list[Message]  # the last message is the user's, or a tool's; empty if the row is broken
    chosen: Message  # the better answer; for KTO, the example's own
    rejected: Message  # the other answer; for KTO, another example's
    desirable: bool | None = None


def preference_row(
    chosen: Sequence[Message], rejected: Sequence[Message], desirable: bool | None = None
) -> PreferenceRow:
    """Return the row of two conversations that differ in their last message; for KTO, ``rejected`` is another row's."""
    prompt = list(chosen[:-1])
    roles = [message["role"] for message in chosen]
    # The initials of system, user, assistant and tool, such as "suatta" for two calls and an answer.
    broken = not re.fullmatch("s?(u(at+)*a)+", "".join(role[0] for role in roles))
    if desirable is None:  # for KTO the partner's prompt differs by design
        broken |= list(rejected[:-1]) != prompt or [message["role"] for message in rejected] != roles
    answers = [messages[-1] if messages else _NOTHING for messages in (chosen, rejected)]
    return PreferenceRow([] if broken else prompt, answers[0], answers[1], desirable)


def partner_of(row: Row) -> dict[str, Any]:
    """Return the row that has a row's KL example, under its own column names."""
    return {name.removeprefix(PARTNER): value for name, value in row.items() if name.startswith(PARTNER)}


class PreferenceReader:
    """Turns rows with the ``needed`` columns into prompts with two answers; ``tag`` marks desirable ones, if any.

    ``in_full`` is as in :class:`~lightning_mcore.data.finetuning.conversations.ConversationReader`.
    """

    def __init__(self, columns: Iterable[str], in_full: bool = False) -> None:
        present = list(columns)
        answers = ("chosen", "rejected")
        # The first form that fits counts, so the more specific ones come first.
        forms: list[tuple[str, ...]] = [
            ("conversations", *answers),
            ("instruction", *answers),
            answers,
            ("prompt", "completion", "label"),
            ("conversations", "kto_tag"),
            ("instruction", "output", "kto_tag"),
        ]
        found = [form for form in forms if set(form) <= set(present)]
        if not found:
            raise ValueError(
                f"the columns {', '.join(map(repr, present)) or 'none'} contain no preferences; rename them to one of"
                f" {'; '.join(', '.join(form) for form in forms)}"
            )
        self.needed = found[0]
        self.tag = next((name for name in ("label", "kto_tag") if name in self.needed), None)
        self._has_prompt = "prompt" in present
        kind: Any = {"conversations": "sharegpt", "instruction": "alpaca"}.get(self.needed[0], "messages")
        # Each answer is read as the end of an ordinary conversation; ``_answered`` makes the added columns.
        self._single = ConversationReader([*present, "output", "messages"], kind, in_full=in_full)
        self._kind: str = kind

    def messages(self, row: Row, name: str) -> PreferenceRow:
        """Return the prompt and the answers of a row, which with a :attr:`tag` includes its partner's columns."""
        if self.tag is None:
            return preference_row(self._answered(row, "chosen", name), self._answered(row, "rejected", name))
        answer = "completion" if self.tag == "label" else None
        partner = self._answered(partner_of(row), answer, name)
        return preference_row(self._answered(row, answer, name), partner, require_tag(row, self.tag, name))

    def _answered(self, row: Row, answer: str | None, name: str) -> list[Message]:
        """Return the conversation that ends with one of the answers."""
        if self._kind == "alpaca":
            return self._single.messages(row if answer is None else {**row, "output": row[answer]}, name)
        if answer is None:
            return self._single.messages(row, name)
        if self._kind == "sharegpt":
            turns = [*_turns(row, "conversations", "", name), *_answer(row, answer, "", name)]
            return self._single.messages({**row, "conversations": turns}, name)
        if not self._has_prompt and isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
            # "Q: 2+2? A: 4" and "Q: 2+2? A: 5" share "Q: 2+2? A:", so the answers are " 4" and " 5".
            prompt = _shared_beginning(row["chosen"], row["rejected"])
            row = {**row, "prompt": prompt, answer: row[answer][len(prompt) :]}
        if "prompt" in row:
            turns = [*_turns(row, "prompt", "user", name), *_answer(row, answer, "assistant", name)]
        else:
            turns = _turns(row, answer, "assistant", name)
        return self._single.messages({**row, "messages": turns}, name)


def _turns(row: Row, column: str, role: str, name: str) -> list[Any]:
    """Return the messages of a column with a text (as one message of ``role``), a message, or a list of messages."""
    value = row[column]
    if role and (value is None or isinstance(value, str)):
        return [{"role": role, "content": value or ""}]
    if value is None or isinstance(value, Mapping):
        return [] if value is None else [value]
    if not isinstance(value, list):
        raise TypeError(f"{column!r} of {name} is of type {type(value).__name__}; give text, or a list of messages")
    return value


def _answer(row: Row, column: str, role: str, name: str) -> list[Any]:
    """Return the messages of a column that contains an answer alone; ValueError if it has results of tools."""
    turns = _turns(row, column, role, name)
    if any(isinstance(turn, Mapping) and "tool" in (turn.get("role"), turn.get("from")) for turn in turns):
        raise ValueError(
            f"{column!r} of {name} has the result of a call, but an answer is a single message; move all messages but"
            " the last one to the prompt"
        )
    return turns


def _shared_beginning(first: str, second: str) -> str:
    """Return the common beginning of two texts, without a final space: tokenizers join it to the next word."""
    length = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:length].removesuffix(" ")


def require_tag(row: Row, tag: str, name: str) -> bool:
    """Return whether an example is desirable; raise TypeError unless the value is a bool."""
    value = row[tag]
    if not isinstance(value, bool):
        raise TypeError(f"{tag!r} of {name} is {value!r}; give true for a desirable answer, or false")
    return value


class EncodedPair(NamedTuple):
    """The two sequences of a row as tokens."""

    samples: tuple[TokenSample, TokenSample]  # chosen, rejected; both empty if the row is left out
    desirable: bool | None
    left_out: int  # index in LEFT_OUT, 0 if the row is used


class PairEncoder:
    """Tokenises a prompt with two answers; with ``one_prompt``, both have the tokens of the chosen one's prompt."""

    def __init__(self, encoder: Encoder, one_prompt: bool, most: int | None) -> None:
        self._encoder = encoder
        self._one_prompt = one_prompt
        self._most = most

    def encode(self, row: PreferenceRow, sample_id: int, name: str) -> EncodedPair:
        """Return the sequences of a row; raises ValueError if the template rejects it. Errors call it ``name``."""
        reason, parts = self._parts(row, sample_id, name)
        nothing = TokenSample(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_id)
        if reason:
            return EncodedPair((nothing, nothing), row.desirable, reason)
        samples = []
        for prompt, answer in parts:
            # All tokens from the answer on; never the first token, which nothing predicts.
            learnt = np.arange(len(prompt) + len(answer)) >= max(len(prompt), 1)
            samples.append(TokenSample(np.concatenate([prompt, answer]), learnt, sample_id))
        return EncodedPair((samples[0], samples[1]), row.desirable, 0)

    def _parts(self, row: PreferenceRow, sample_id: int, name: str) -> tuple[int, list[list[NDArray[np.int32]]]]:
        """Return why a row is left out, or 0, and the tokens of prompt and answer of both sequences."""
        # A named template has no turns of tools.
        if not row.prompt or (self._one_prompt and any(message["role"] == "tool" for message in row.prompt)):
            return _BROKEN, []
        is_pair = row.desirable is None
        if any("weight" in message for message in (row.chosen, row.rejected)):
            raise ValueError(f"{name} has an answer of weight 0, but all answers are learnt; remove the field")
        if not says_something(row.chosen) or (is_pair and not says_something(row.rejected)):
            return _UNANSWERED, []
        if not says_something(row.rejected):
            return _ALONE, []
        if is_pair and row.chosen == row.rejected:
            return _EQUAL, []
        parts = []
        for answer in (row.chosen, row.rejected):
            sample = self._encoder.encode([*row.prompt, answer], sample_id, name)
            assert sample.loss_mask is not None
            # The mask marks the answer; what follows it, such as a line break, is dropped.
            learnt = np.flatnonzero(sample.loss_mask)
            if not learnt.size:
                return _UNANSWERED, []
            first, last = learnt[[0, -1]]
            parts.append([sample.tokens[:first], sample.tokens[first : last + 1]])
        if self._one_prompt and is_pair:
            parts[1][0] = parts[0][0]
        self._cut(parts, is_pair)
        if any(len(answer) <= (0 if len(prompt) else 1) for prompt, answer in parts):
            return _CUT, []
        return (_EQUAL if is_pair and np.array_equal(parts[0][1], parts[1][1]) else 0), parts

    def _cut(self, parts: list[list[NDArray[np.int32]]], is_pair: bool) -> None:
        if self._most is None:
            return
        # A pair is cut by its longer answer, so that both keep the same prompt.
        longest = max(len(answer) for _, answer in parts)
        for part in parts:
            prompt, answer = kept_lengths(len(part[0]), longest if is_pair else len(part[1]), self._most)
            part[:] = part[0][:prompt], part[1][:answer]


@dataclass(frozen=True)
class PairReading(Reading):
    """How rows become pairs of tokens; ``longest`` of :class:`Reading` has no use here."""

    most: int | None = None  # tokens of a sequence, longer ones are cut; None for no limit
    block: int = 1000  # rows within which KTO pairs prompts with other rows' answers

    def reader(self, columns: Iterable[str]) -> Any:
        """Return the reader of rows with these columns."""
        return PreferenceReader(columns, in_full=self.template is None)  # a named template writes texts alone

    def encoder(self, tokenizer: Any) -> Any:
        """Return the encoder of pairs."""
        return PairEncoder(super().encoder(tokenizer), self.template is not None, self.most)

    def with_partners(self, rows: Any) -> Any:
        """Return the rows; for KTO, with the columns of the row that has the KL example."""
        if self.reader(rows.column_names).tag is None or not len(rows):
            return rows
        from datasets import concatenate_datasets

        # For the KL term, a prompt takes the previous row's answer, and the first of a block the last row's, as in
        # LLaMA-Factory. Five rows in blocks of 3 have the partners 2 0 1 4 3.
        order = np.arange(len(rows))
        starts = order // self.block * self.block
        ends = np.minimum(starts + self.block, len(rows))
        partners = rows.select(np.where(order == starts, ends - 1, order - 1).tolist())
        renamed = partners.rename_columns({name: PARTNER + name for name in rows.column_names})
        return concatenate_datasets([rows, renamed], axis=1)

    def columns(self, sample: EncodedPair) -> dict[str, Any]:
        """Return the columns of a pair: its sequences end to end, and in ``second`` where the second one begins.

        ``desirable`` is -1 without a tag, and ``left_out`` an index in :data:`LEFT_OUT`.
        """
        chosen, rejected = sample.samples
        both = TokenSample(
            np.concatenate([chosen.tokens, rejected.tokens]),
            np.concatenate([np.asarray(chosen.loss_mask, np.bool_), np.asarray(rejected.loss_mask, np.bool_)]),
        )
        return {
            **columns_of(both),
            "length": chosen.length + rejected.length,
            "second": len(chosen.tokens),
            "desirable": -1 if sample.desirable is None else int(sample.desirable),
            "left_out": sample.left_out,
        }

    def features(self) -> dict[str, str]:
        """Return the types of a pair's additional columns."""
        return dict.fromkeys(("second", "desirable", "left_out"), "int64")
