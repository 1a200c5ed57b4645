# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens under the tokenizer's chat template, with a mask of the tokens that are learnt.

The tokenizer's *chat template* turns a conversation into text, which is tokenised as a whole, as the model will see it.
By default the assistant's turns are learnt: their text and the token that ends them, so that the model also learns to
stop. The headers that the template writes before a turn are given at inference, so they are not learnt.

There are two ways to find the turns in the text. A template may mark assistant turns with ``{% generation %}``. Any
other template is rendered up to each turn: the turn begins where the text of the messages before it, with the
generation prompt, ends; and it ends where the text of the messages up to it ends. Both texts must be beginnings of the
whole text. A template that writes earlier turns differently once more messages follow is refused. A token that overlaps
the beginning of a turn is not learnt.

Without a chat template only a single exchange can be written: the prompt, with the special tokens that the tokenizer
puts before a text, the response, and the EOS token. ``tokenized.py`` makes the :class:`ChatEncoder`.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.data.finetuning.conversations import LossOn, Message, require_tokenizer
from lightning_mcore.data.packing.best_fit import TokenSample

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = list[tuple[int, int]]


class ChatEncoder:
    """Tokenises conversations with the tokenizer's chat template.

    Args:
        tokenizer: A tokenizer of ``transformers``.
        loss_on: What is learnt: the assistant's turns, the last of these, or every token.

    Raises:
        TypeError: The tokenizer is not one of ``transformers``.
        ValueError: ``loss_on`` is unknown, the tokenizer has neither a chat template nor an EOS token, or it cannot
            tell the offsets of its tokens in the text.
        ModuleNotFoundError: The tokenizer has a chat template, and ``jinja2`` is not installed.
    """

    def __init__(self, tokenizer: Any, loss_on: LossOn = "assistant") -> None:
        require_tokenizer(tokenizer)
        require_choice("loss_on", loss_on, LossOn)
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        self.has_template = template is not None
        self._refusal = _template_error() if self.has_template else ValueError
        self._marks_turns = self.has_template and _MARKS_TURNS.search(template) is not None
        if not self.has_template and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a chat template nor an EOS token, so a response would have no end; set"
                " tokenizer.chat_template or tokenizer.eos_token"
            )
        if self.has_template and loss_on != "all" and not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not give the offsets of tokens in the text, which loss_on={loss_on!r}"
                " needs; use the fast tokenizer, or loss_on='all'"
            )
        self._special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation; an empty sample if it has no text to learn.

        Args:
            messages: Messages with ``role`` and ``content``.
            sample_id: Number of the sample in its dataset.
            name: What to call the conversation in an error, such as ``"row 3"``.

        Raises:
            ValueError: The template refuses the conversation, or does not show where turns begin and end.
        """
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        taught = range(len(messages)) if self.loss_on == "all" else spoken
        if not any(messages[number]["content"].strip() for number in taught):
            return TokenSample(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_id)
        if not self.has_template:
            tokens, learnt = self._exchange(messages, name)
        else:
            tokens, learnt = self._conversation(messages, spoken, name)
        learnt[:1] = False
        return TokenSample(tokens, learnt, sample_id)

    def _conversation(
        self, messages: Sequence[Message], spoken: list[int], name: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        if self.loss_on == "all":
            tokens = self._tokenize(self._render(messages, name))
            return np.asarray(tokens["input_ids"], np.int32), np.ones(len(tokens["input_ids"]), np.bool_)
        if self._marks_turns:
            return self._marked(messages, spoken, name)
        text = self._render(messages, name)
        spans = self._spans(messages, spoken[-1:] if self.loss_on == "last_assistant" else spoken, text, name)
        tokens = self._tokenize(text, return_offsets_mapping=True)
        places = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        ids, learnt = np.asarray(tokens["input_ids"], np.int32), np.zeros(len(places), np.bool_)
        for start, stop in spans:
            where = np.flatnonzero((places[:, 0] >= start) & (places[:, 1] <= stop))
            learnt[where[: self._through_end(ids[where])]] = True
        return ids, learnt

    def _spans(self, messages: Sequence[Message], turns: list[int], text: str, name: str) -> Spans:
        """Return where each turn begins and ends in the text, in characters."""
        spans = []
        for turn in turns:
            if turn == 0:
                raise ValueError(
                    f"{name} begins with an assistant turn, and the chat template does not show where it starts; begin"
                    " with a system or user turn, or mark assistant turns in the template with {% generation %}"
                )
            before = self._render(messages[:turn], name, add_generation_prompt=True)
            after = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], name)
            for part, count in ((before, turn), (after, turn + 1)):
                if not text.startswith(part):
                    raise ValueError(
                        f"the chat template writes the first {count} of the {len(messages)} messages of {name}"
                        " differently when more follow, so assistant turns cannot be located; mark them in the"
                        " template with {% generation %}, or choose loss_on='all'"
                    )
            spans.append((len(before), len(after)))
        return spans

    def _marked(
        self, messages: Sequence[Message], spoken: list[int], name: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask under a template that marks assistant turns."""
        encoded = self._apply(messages, name, return_dict=True, return_assistant_tokens_mask=True)
        ids = np.asarray(encoded["input_ids"], np.int32)
        learnt = np.asarray(encoded["assistant_masks"], np.bool_)
        edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False)).reshape(-1, 2)
        if len(edges) != len(spoken):
            raise ValueError(
                f"the chat template marks {len(edges)} parts of {name}, which has {len(spoken)} assistant turns; put"
                " {% generation %} around the text and the end token of each turn, and around nothing else"
            )
        learnt[:] = False
        for start, stop in edges[-1:] if self.loss_on == "last_assistant" else edges:
            stop = start + self._through_end(ids[start:stop])
            if stop < len(ids) and ids[stop - 1] not in self._special and ids[stop] in self._special:
                stop += 1  # the template writes the end token after the mark
            learnt[start:stop] = True
        return ids, learnt

    def _through_end(self, tokens: NDArray[np.int32]) -> int:
        """Return how many tokens of a turn are learnt: all but blank ones after its end token."""
        special = [place for place, token in enumerate(tokens.tolist()) if token in self._special]
        if not special or self.tokenizer.decode(tokens[special[-1] + 1 :].tolist()).strip():
            return len(tokens)
        return special[-1] + 1

    def _exchange(self, messages: Sequence[Message], name: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask of a prompt and its response, without a template."""
        if [message["role"] for message in messages] != ["user", "assistant"]:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{name} has the turns {roles}, but without a chat template only one prompt with one response is"
                " possible; set tokenizer.chat_template"
            )
        prompt, response = (message["content"] for message in messages)
        end = self.tokenizer.eos_token_id
        first = self._tokenize(prompt, add_special_tokens=True)["input_ids"]
        if first and first[-1] == end:
            first = first[:-1]
        second = [*self._tokenize(response)["input_ids"], end]
        learnt = np.ones(len(first) + len(second), np.bool_)
        if self.loss_on != "all":
            learnt[: len(first)] = False
        return np.asarray([*first, *second], np.int32), learnt

    def _tokenize(self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False) -> Any:
        more = {"return_offsets_mapping": True} if return_offsets_mapping else {}
        return self.tokenizer(text, add_special_tokens=add_special_tokens, **more)

    def _render(self, messages: Sequence[Message], name: str, add_generation_prompt: bool = False) -> str:
        text: str = self._apply(messages, name, tokenize=False, add_generation_prompt=add_generation_prompt)
        return text

    def _apply(self, messages: Sequence[Message], name: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options)
        except self._refusal as error:
            raise ValueError(f"the chat template refuses {name}: {error}; fix the row or the template") from error


def _template_error() -> type[Exception]:
    """Return the exception that a template raises to refuse a conversation."""
    try:
        from jinja2 import TemplateError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a tokenizer with a chat template needs the package jinja2; install it: pip install jinja2"
        ) from None
    return TemplateError
