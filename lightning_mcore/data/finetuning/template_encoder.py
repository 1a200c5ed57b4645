# SPDX-License-Identifier: Apache-2.0
r"""Conversations as tokens by a template of ``chat_templates.py``, and which of them are learnt.

A conversation is a system's text, if there is one, and *exchanges*: a user's turn and an answer. Each exchange becomes
two lists of tokens, the prompt and the answer, of which the second is learnt. What stands before the first turn is part
of the first prompt. :class:`TemplateEncoder` has the interface of ``chat_tokens.ChatEncoder``; ``tokenized.py``
makes one or the other.

With ``longest``, exchanges are cut as LLaMA-Factory cuts them, so that an answer to a prompt that is too long is not
lost: a short answer stays whole and the prompt is cut; a short prompt stays whole and the answer is cut; of two long
ones each keeps its share. Exchanges behind a full row are left out.

:class:`DocumentEncoder` does the same for pretraining: a text, and what ends it.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_mcore.data.finetuning.chat_templates import BOS, EOS, TEXT, ChatTemplate, Pieces
from lightning_mcore.data.finetuning.conversations import LossOn, Message, require_choice, require_tokenizer
from lightning_mcore.data.packing.best_fit import TokenSample

_THOUGHT = ("<think>\n", "\n</think>\n\n")
_THOUGHTS = re.compile(re.escape(_THOUGHT[0]) + "(.*?)" + re.escape(_THOUGHT[1]), re.DOTALL)

Exchange = tuple[list[int], list[int]]
"""Tokens of a prompt and of its answer."""


class TemplateEncoder:
    """Makes a sample of tokens of a conversation.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        template: How conversations are written.
        loss_on: What is learnt: the answers, the last of them, or every token.
        longest: Tokens that a sample may have; None: as many as it has.

    Raises:
        TypeError: It is no tokenizer of ``transformers``.
        ValueError: There is no such ``loss_on``, or the template needs a token that the tokenizer does not have.
    """

    def __init__(
        self, tokenizer: Any, template: ChatTemplate, loss_on: LossOn = "assistant", longest: int | None = None
    ) -> None:
        require_tokenizer(tokenizer)
        require_choice("loss_on", loss_on, LossOn)
        if template.one_eos and loss_on == "all":
            raise ValueError(
                f"the template {template.name!r} has one EOS for all turns, so that prompts cannot be learnt with it;"
                " choose another loss_on than 'all', or another template"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.loss_on = loss_on
        self.longest = longest
        self._eos = end_of_turn(tokenizer, template)

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation; none, where nothing is said that could be learnt.

        Args:
            messages: With ``role`` and ``content``: a system's, if there is one, then a user's and an assistant's in
                turn.
            sample_id: Number of the sample in its dataset.
            name: What to call it in an error, such as ``"row 3"``.

        Raises:
            ValueError: The turns are others than that.
        """
        system, prompts, answers = self._turns(messages, name)
        taught = answers[-1:] if self.loss_on == "last_assistant" else answers
        if not any(text.strip() for text in taught + (prompts if self.loss_on == "all" else [])):
            return TokenSample(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_id)
        if self.template.one_eos and len(answers) > 1:
            raise ValueError(
                f"{name} has {len(answers)} exchanges, and the template {self.template.name!r} ends none but the last;"
                " give conversations of one exchange, or leave template out and use the tokenizer's own"
            )
        tokens, learnt = self._joined(self._exchanges(system, prompts, answers))
        learnt[:1] = [False]
        return TokenSample(np.asarray(tokens, np.int32), np.asarray(learnt, np.bool_), sample_id)

    def _turns(self, messages: Sequence[Message], name: str) -> tuple[str, list[str], list[str]]:
        """Return the system's text, those of the user's turns, and those of the answers."""
        system = ""
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError(
                f"{name} has the turns {', '.join(roles)}, and the template {self.template.name!r} writes a user's and"
                " an assistant's in turn, behind a system's if there is one; mend the row or leave it out"
            )
        texts = [message["content"] for message in messages]
        return system or self.template.default_system, texts[::2], texts[1::2]

    def _exchanges(self, system: str, prompts: list[str], answers: list[str]) -> list[Exchange]:
        """Return the tokens of all exchanges; the thoughts of the template are put in or taken out."""
        template, last = self.template, len(answers) - 1
        forgets = self.loss_on == "last_assistant" and not template.keeps_thoughts
        exchanges = []
        for turn, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if template.thoughts and (template.thinking is False or (forgets and turn < last)):
                answer = _THOUGHTS.sub("", answer).lstrip("\n")
            first = self._opening(system, prompt) if turn == 0 else self._tokens(template.user, prompt)
            second = self._tokens(template.answer, answer)
            thinks = any(mark.strip() in answer for mark in _THOUGHT)
            if template.thoughts and not thinks and (turn == last or not forgets):
                empty = self._tokens(("".join(_THOUGHT),))
                first, second = (first, empty + second) if template.thinking else (first + empty, second)
            exchanges.append((first, second))
        return exchanges

    def _opening(self, system: str, prompt: str) -> list[int]:
        """Return the tokens of the first prompt, with what stands before it."""
        template = self.template
        tokens = self._tokens(template.prefix)
        if system and template.system_in_first_turn:
            prompt = template.system[0].replace(TEXT, system, 1) + prompt
        elif system:
            tokens += self._tokens(template.system, system)
        return tokens + self._tokens(template.user, prompt)

    def _joined(self, exchanges: list[Exchange]) -> tuple[list[int], list[bool]]:
        """Return the exchanges as one list of tokens, cut to fit, and which of them are learnt."""
        last_alone = self.loss_on == "last_assistant"
        tokens: list[int] = []
        learnt: list[bool] = []
        taken = 1 if self.template.one_eos else 0
        for turn, (prompt, answer) in enumerate(reversed(exchanges) if last_alone else exchanges):
            if self.longest is not None:
                if taken >= self.longest:
                    break
                prompt, answer = _cut(prompt, answer, self.longest - taken)
            taken += len(prompt) + len(answer)
            marks = [self.loss_on == "all"] * len(prompt) + [not (last_alone and turn)] * len(answer)
            both = prompt + answer
            tokens, learnt = (both + tokens, marks + learnt) if last_alone else (tokens + both, learnt + marks)
        if self.template.one_eos:
            tokens, learnt = [*tokens, self.tokenizer.eos_token_id], [*learnt, True]
        return tokens, learnt

    def _tokens(self, pieces: Pieces, text: str = "") -> list[int]:
        """Return the tokens of pieces, each tokenised by itself."""
        special = {BOS: self.tokenizer.bos_token_id, EOS: self._eos}
        tokens: list[int] = []
        for piece in pieces:
            if piece in special:
                tokens += [] if special[piece] is None else [special[piece]]
            else:
                written = piece.replace(TEXT, text, 1)
                tokens += self.tokenizer(written, add_special_tokens=False)["input_ids"] if written else []
        return tokens


class DocumentEncoder:
    """Makes a sample of tokens of a text, for pretraining: all of it is learnt, and what ends it.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        template: Says what ends a text; None: the tokenizer's EOS.
        begins: Whether BOS stands before each text, where the tokenizer itself writes one.

    Raises:
        TypeError: It is no tokenizer of ``transformers``.
        ValueError: It has no such token.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None, begins: bool = False) -> None:
        require_tokenizer(tokenizer)
        end_of_turn(tokenizer, template or ChatTemplate("the end of a document"))
        end = None if template is None else template.end_of_text or template.end_of_turn
        self.tokenizer = tokenizer
        self._start = tokenizer.bos_token if begins and getattr(tokenizer, "add_bos_token", False) else ""
        self._end = end or tokenizer.eos_token

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of the first message's text; none, where it is empty.

        Args:
            messages: One message with ``content``.
            sample_id: Number of the document in its dataset.
            name: What to call it in an error.
        """
        text = messages[0]["content"] if messages else ""
        ids = self.tokenizer(self._start + text + self._end, add_special_tokens=False)["input_ids"] if text else []
        learnt = np.ones(len(ids), np.bool_)
        learnt[:1] = False
        return TokenSample(np.asarray(ids, np.int32), learnt, sample_id)


def end_of_turn(tokenizer: Any, template: ChatTemplate) -> int | None:
    """Return the token that a template means by EOS; None where it needs none.

    Raises:
        ValueError: It needs one that the tokenizer does not have.
    """
    if template.end_of_turn is not None:
        ids = tokenizer(template.end_of_turn, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f"the template {template.name!r} ends turns with the token {template.end_of_turn!r}, which this"
                " tokenizer does not have; choose the template that the model was made with, or none to go by the"
                " tokenizer's own"
            )
        token: int = ids[0]
        return token
    needs = template.one_eos or EOS in (*template.answer, *template.user, *template.system)
    if needs and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the template {template.name!r} needs an EOS token, and the tokenizer has none; set tokenizer.eos_token,"
            " or choose another template"
        )
    eos: int | None = tokenizer.eos_token_id
    return eos


def _cut(prompt: list[int], answer: list[int], room: int) -> Exchange:
    """Return an exchange that takes ``room`` tokens at most."""
    if 2 * len(answer) < room:
        most = room
    elif 2 * len(prompt) < room:
        most = room - len(prompt)
    else:
        most = int(room * (len(answer) / (len(prompt) + len(answer))))
    kept = min(most, len(answer))
    return prompt[: max(room - kept, 0)], answer[:kept]
