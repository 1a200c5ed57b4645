# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, with a mask of the tokens that are learnt: under the tokenizer's template or a named one.

:class:`ChatEncoder` uses the tokenizer's own chat template, which turns a conversation into one text.
:class:`TemplateEncoder` uses a named template: LLaMA-Factory's templates for the text models that this package knows
are here as data, under the same names, so that a conversation becomes the same tokens. :class:`DocumentEncoder` is for
pretraining: a text, and the token that ends it. All three have the same interface; ``tokenized.py`` uses them.

By default the assistant's turns are learnt: their text and the token that ends them, so that the model also learns to
stop. Headers that a template writes before a turn are given at inference, so they are not learnt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mcore.config.text import unknown_name
from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.data.finetuning.conversations import (
    THOUGHTS,
    WRITTEN,
    LossOn,
    Message,
    require_tokenizer,
)
from lightning_mcore.data.packing.best_fit import TokenSample

_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = list[tuple[int, int]]


class ChatEncoder:
    """Tokenises conversations with the tokenizer's chat template; ``loss_on`` says which turns are learnt.

    There are two ways to find the turns in the text. A template may mark assistant turns with ``{% generation %}``. Any
    other template is rendered up to each turn: the turn begins where the text of the messages before it, with the
    generation prompt, ends; and it ends where the text of the messages up to it ends. Both texts must be beginnings of
    the full text. This raises ValueError for a template that writes earlier turns differently once more messages
    follow. Without a chat template only a single exchange can be written: the prompt, with the special tokens that the
    tokenizer puts before a text, the response, and the EOS token.
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
        if not self.has_template and tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a chat template nor an EOS token, so a response would have no end; set"
                " tokenizer.chat_template or tokenizer.eos_token"
            )
        if self.has_template and loss_on != "all" and not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not report token offsets in the text, which loss_on={loss_on!r}"
                " needs; use the fast tokenizer, or loss_on='all'"
            )
        added = tokenizer.added_tokens_decoder
        self._special = set(tokenizer.all_special_ids) | set(added)
        # </tool_call> and </think> may be the last token of a turn, but do not end it; </s> is special, and does.
        closing = {number for number, token in added.items() if str(token).startswith("</") and not token.special}
        self._ends = self._special - (closing - set(tokenizer.all_special_ids))

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation, called ``name`` in errors; empty without text to learn."""
        spoken = _answers(messages)
        turns = spoken[-1:] if self.loss_on == "last_assistant" else spoken
        turns = [turn for turn in turns if "weight" not in messages[turn]]
        if self.loss_on == "all" and any("weight" in message for message in messages):
            raise ValueError(f"{name} has a turn of weight 0, which loss_on='all' would learn; choose another loss_on")
        taught = range(len(messages)) if self.loss_on == "all" else turns
        if not any(says_something(messages[number]) for number in taught):
            return TokenSample(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_id)
        self._require_written(messages, taught, name)
        if not self.has_template:
            tokens, learnt = self._exchange(messages, name)
        else:
            tokens, learnt = self._conversation(messages, turns, name)
        learnt[:1] = False  # nothing predicts the first token
        return TokenSample(tokens, learnt, sample_id)

    def _require_written(self, messages: Sequence[Message], taught: Sequence[int], name: str) -> None:
        """Raise ValueError for tools, for calls, or for thoughts of learnt turns that the chat template leaves out."""
        found = [
            (turn, field)
            for turn, message in enumerate(messages)
            for field in WRITTEN
            if field in message and (turn in taught or field not in THOUGHTS)
        ]
        text = self._render(messages, name) if found and self.has_template else ""
        # No template says what it writes: what changes nothing when it is removed is not written. Earlier thoughts may
        # be missing, as under Qwen3's template, because they are not learnt.
        for turn, field in found:
            kept = {key: value for key, value in messages[turn].items() if key != field}
            if self.has_template and self._differs(text, messages, turn, kept, name):
                continue
            raise ValueError(
                f"{name} has {field!r} in message {turn}, which the chat template leaves out; use a template that"
                f" writes it, {WRITTEN[field]}"
            )

    def _differs(self, text: str, messages: Sequence[Message], turn: int, changed: Message, name: str) -> bool:
        """Return whether a conversation has another text than ``text``, or none, with this message changed."""
        try:
            return self._render([*messages[:turn], changed, *messages[turn + 1 :]], name) != text
        except ValueError:
            return True

    def _conversation(
        self, messages: Sequence[Message], turns: list[int], name: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask under a template; ``turns`` are learnt."""
        if self.loss_on == "all":
            tokens = self._tokenize(self._render(messages, name))
            ids = np.asarray(tokens["input_ids"], np.int32)
            return self._closed(ids, np.ones(len(ids), np.bool_), messages)
        if _MARKS_TURNS.search(self.tokenizer.get_chat_template(tools=messages[0].get("tools"))):
            return self._marked(messages, turns, name)
        text = self._render(messages, name)
        spans = self._spans(messages, turns, text, name)
        tokens = self._tokenize(text, return_offsets_mapping=True)
        places = np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2)
        ids, learnt = np.asarray(tokens["input_ids"], np.int32), np.zeros(len(places), np.bool_)
        # A token that overlaps the beginning of a turn is not learnt: part of it is given. With tokens at (0, 4),
        # (4, 9), (9, 12) and a turn at 5 to 12, only the last one is learnt.
        for start, stop in spans:
            where = np.flatnonzero((places[:, 0] >= start) & (places[:, 1] <= stop))
            if len(where):
                learnt[where[0] : self._end(ids, int(where[0]), int(where[-1]) + 1)] = True
        return self._closed(ids, learnt, messages)

    def _spans(self, messages: Sequence[Message], turns: list[int], text: str, name: str) -> Spans:
        """Return where each turn begins and ends in the text, in characters."""
        spans = []
        for turn in turns:
            if turn == 0:
                raise ValueError(
                    f"{name} begins with an assistant turn, and the chat template does not show where it starts; begin"
                    " with a system or user turn, or mark assistant turns in the template with {% generation %}"
                )
            # Under ChatML, ``before`` ends after "<|im_start|>assistant\n", ``after`` after "Yo<|im_end|>\n".
            before = self._render(messages[:turn], name, add_generation_prompt=True)
            after = text if turn + 1 == len(messages) else self._render(messages[: turn + 1], name)
            for part, count in ((before, turn), (after, turn + 1)):
                if not text.startswith(part):
                    last = "" if self.loss_on == "last_assistant" else "loss_on='last_assistant', "
                    raise ValueError(
                        f"the chat template writes the first {count} of the {len(messages)} messages of {name}"
                        f" differently when more follow, so assistant turns cannot be located; choose {last}"
                        "loss_on='all' or a named template (such as template='qwen3'), or mark the turns in the"
                        " template with {% generation %}"
                    )
            spans.append((len(before), len(after)))
        return spans

    def _marked(
        self, messages: Sequence[Message], turns: list[int], name: str
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask under a template that marks assistant turns."""
        encoded = self._apply(messages, name, return_dict=True, return_assistant_tokens_mask=True)
        ids = np.asarray(encoded["input_ids"], np.int32)
        learnt = np.asarray(encoded["assistant_masks"], np.bool_)
        # Beginning and end of each run: the mask 0 1 1 0 1 has the edges (1, 3) and (4, 5).
        edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False)).reshape(-1, 2)
        spoken = _answers(messages)
        if len(edges) != len(spoken):
            raise ValueError(
                f"the chat template marks {len(edges)} parts of {name}, which has {len(spoken)} assistant turns; put"
                " {% generation %} around the text and the end token of each turn, and around nothing else"
            )
        learnt[:] = False
        for turn, (start, stop) in zip(spoken, edges, strict=True):
            if turn in turns:
                learnt[start : self._end(ids, start, stop)] = True
        return self._closed(ids, learnt, messages)

    def _end(self, ids: NDArray[np.int32], start: int, stop: int) -> int:
        """Return where the learnt part of a turn at ``start`` to ``stop`` ends: after the token that ends the turn."""
        stop = start + self._through_end(ids[start:stop])
        if ids[stop - 1] not in self._ends and stop < len(ids) and ids[stop] in self._special:
            # Written after the turn, perhaps as the header of the next. GLM writes "<|assistant|>\nYes<|user|>\nBye":
            # "\nYes<|user|>" is learnt, because there the model stops.
            stop += 1
        return stop

    def _closed(
        self, ids: NDArray[np.int32], learnt: NDArray[np.bool_], messages: Sequence[Message]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return tokens and mask, with the EOS token after a last answer that has no end: it must be learnt."""
        end, is_answer = self.tokenizer.eos_token_id, messages[-1]["role"] == "assistant"
        if end is None or not is_answer or not learnt[-1:].any() or ids[self._through_end(ids) - 1] in self._ends:
            return ids, learnt
        return np.append(ids, np.int32(end)), np.append(learnt, True)

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
        # Some tokenizers end every text with EOS.
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
        tools = messages[0].get("tools")
        turns = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(turns, tools=tools, **options)
        except (self._refusal, TypeError) as error:  # TypeError: a template that joins texts got something else
            raise ValueError(f"the chat template rejects {name}: {error}; fix the row or the template") from error


def _answers(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the assistant's turns."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def says_something(message: Message) -> bool:
    """Return whether a message has a text, a call or a thought."""
    return bool(message["content"].strip()) or any(field in message for field in WRITTEN if field != "tools")


def _template_error() -> type[Exception]:
    """Return the exception that a template raises to reject a conversation."""
    try:
        from jinja2 import TemplateError
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a tokenizer with a chat template needs the package jinja2; install it: pip install jinja2"
        ) from None
    return TemplateError


BOS = "<bos>"
EOS = "<eos>"
"""Pieces that stand for the tokenizer's own tokens; a token that it does not have is left out."""

Pieces = tuple[str, ...]
TEXT = "{text}"


@dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written; LLaMA-Factory's templates have the same values.

    *Pieces* are tokenised one by one, so tokens always end at the edges of a turn. A piece is text, with ``{text}``
    where the text of the turn goes, or :data:`BOS` or :data:`EOS`.

    Args:
        name: Name of the template.
        user: Pieces of a user's turn, up to the beginning of the answer.
        answer: Pieces of an answer, all of them learnt, so that the model learns to end its turn.
        system: Pieces of the system text. What comes before the first turn belongs to the first prompt.
        prefix: Pieces at the very beginning.
        default_system: System text of a conversation that has none; empty for none.
        end_of_turn: Token that ends a turn, in place of the tokenizer's EOS; None keeps EOS.
        end_of_text: Token that ends a document in pretraining; None for ``end_of_turn`` or EOS.
        system_in_first_turn: Write the system text into the first user turn, before the user's text.
        one_eos: Answers have no end token; one EOS ends the whole conversation.
        thoughts: Answers begin with a thought, ``<think>...</think>``; an answer without one gets an empty thought.
        thinking: With ``thoughts``: True learns empty thoughts as part of the answer, None puts them into the prompt,
            and False also removes the thoughts from answers that have them.
        keeps_thoughts: With ``thoughts``, if only the last turn is learnt: earlier turns keep their thoughts.
    """

    name: str
    user: Pieces = (TEXT,)
    answer: Pieces = (TEXT, EOS)
    system: Pieces = (TEXT,)
    prefix: Pieces = ()
    default_system: str = ""
    end_of_turn: str | None = None
    end_of_text: str | None = None
    system_in_first_turn: bool = False
    one_eos: bool = False
    thoughts: bool = False
    thinking: bool | None = True
    keeps_thoughts: bool = False


def named_template(template: "str | ChatTemplate") -> ChatTemplate:
    """Return a template by name, or the template itself; raises ValueError for an unknown name."""
    if isinstance(template, ChatTemplate):
        return template
    if template not in TEMPLATES:
        names = ", ".join(sorted(TEMPLATES))
        raise ValueError(f"{unknown_name('chat template', template, TEMPLATES, 'choose one')} (there are {names})")
    return TEMPLATES[template]


_CHATML: dict[str, Any] = {
    "user": ("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",),
    "answer": ("{text}<|im_end|>\n",),
    "system": ("<|im_start|>system\n{text}<|im_end|>\n",),
}
_GLM4: dict[str, Any] = {
    "user": ("<|user|>\n{text}<|assistant|>",),
    "answer": ("\n{text}",),
    "system": ("<|system|>\n{text}",),
    "prefix": ("[gMASK]<sop>",),
}
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and"
    " polite answers to the user's questions."
)
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_DEEPSEEK3_USER = ("<\uff5cUser\uff5c>{text}<\uff5cAssistant\uff5c>",)  # bars of full width


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


_ALL = (
    ChatTemplate(
        "default",
        user=("Human: {text}", EOS, "\nAssistant:"),
        answer=(TEXT, EOS, "\n"),
        system=("System: {text}", EOS, "\n"),
    ),
    ChatTemplate("empty", answer=(TEXT,)),
    ChatTemplate(
        "alpaca",
        user=("### Instruction:\n{text}\n\n### Response:\n",),
        answer=(TEXT, EOS, "\n\n"),
        default_system=_ALPACA_SYSTEM,
    ),
    ChatTemplate("vicuna", user=("USER: {text} ASSISTANT:",), default_system=_VICUNA_SYSTEM),
    ChatTemplate("chatml", **_CHATML, end_of_turn="<|im_end|>"),
    ChatTemplate("qwen", **_CHATML, default_system=_QWEN_SYSTEM, end_of_turn="<|im_end|>"),
    ChatTemplate("qwen2_vl", **_CHATML, default_system="You are a helpful assistant.", end_of_turn="<|im_end|>"),
    ChatTemplate("qwen3_vl", **_CHATML, end_of_turn="<|im_end|>", thoughts=True),
    ChatTemplate("qwen3_vl_nothink", **_CHATML, end_of_turn="<|im_end|>"),
    ChatTemplate("qwen3", **_CHATML, end_of_turn="<|im_end|>", thoughts=True),
    ChatTemplate("qwen3_nothink", **_CHATML, end_of_turn="<|im_end|>"),
    ChatTemplate("qwen3_5", **_CHATML, end_of_turn="<|im_end|>", thoughts=True),
    ChatTemplate("qwen3_5_nothink", **_CHATML, end_of_turn="<|im_end|>"),
    ChatTemplate("qwen3_6", **_CHATML, end_of_turn="<|im_end|>", thoughts=True),
    ChatTemplate(
        "llama2",
        user=(BOS, "[INST] {text} [/INST]"),
        system=("<<SYS>>\n{text}\n<</SYS>>\n\n",),
        system_in_first_turn=True,
    ),
    ChatTemplate(
        "llama3",
        user=(_header("user") + "{text}<|eot_id|>" + _header("assistant"),),
        answer=("{text}<|eot_id|>",),
        system=(_header("system") + "{text}<|eot_id|>",),
        prefix=(BOS,),
        end_of_turn="<|eot_id|>",
        end_of_text="<|end_of_text|>",
    ),
    ChatTemplate(
        "mistral",
        user=("[INST] {text}[/INST]",),
        answer=(" {text}", EOS),
        system=("{text}\n\n",),
        prefix=(BOS,),
        system_in_first_turn=True,
    ),
    ChatTemplate(
        "ministral", user=("[INST]{text}[/INST]",), system=("{text}\n\n",), prefix=(BOS,), system_in_first_turn=True
    ),
    ChatTemplate(
        "mistral_small", user=("[INST]{text}[/INST]",), system=("[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]",), prefix=(BOS,)
    ),
    ChatTemplate("deepseek", user=("User: {text}\n\nAssistant:",), system=("{text}\n\n",), prefix=(BOS,)),
    ChatTemplate("deepseek3", user=_DEEPSEEK3_USER, prefix=(BOS,)),
    ChatTemplate("deepseekr1", user=_DEEPSEEK3_USER, prefix=(BOS,), thoughts=True),
    ChatTemplate("glm4", **_GLM4, one_eos=True),
    ChatTemplate("glm4_moe", **_GLM4, one_eos=True, thoughts=True),
)

TEMPLATES = {template.name: template for template in _ALL}
"""All templates by name."""


_THOUGHT = ("<think>\n", "\n</think>\n\n")
_THOUGHTS = re.compile(re.escape(_THOUGHT[0]) + "(.*?)" + re.escape(_THOUGHT[1]), re.DOTALL)

Exchange = tuple[list[int], list[int]]
"""Tokens of a prompt and of its answer."""


class TemplateEncoder:
    """Tokenises conversations with a :class:`ChatTemplate`; ``longest`` limits the tokens of a sample.

    A conversation is a system text, if there is one, and *exchanges*: a user turn and an answer. Each exchange becomes
    two lists of tokens, prompt and answer. With ``longest``, exchanges are cut as in LLaMA-Factory, so that a long
    prompt does not push out its answer; exchanges that no longer fit are left out.
    """

    def __init__(
        self, tokenizer: Any, template: ChatTemplate, loss_on: LossOn = "assistant", longest: int | None = None
    ) -> None:
        require_tokenizer(tokenizer)
        require_choice("loss_on", loss_on, LossOn)
        if template.one_eos and loss_on == "all":
            raise ValueError(
                f"the template {template.name!r} has a single EOS for all turns, so it does not support loss_on='all';"
                " choose another loss_on, or another template"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.loss_on = loss_on
        self.longest = longest
        self._eos = end_of_turn(tokenizer, template)

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation whose turns alternate; an empty sample without text to learn."""
        system, prompts, answers = self._turns(messages, name)
        taught = answers[-1:] if self.loss_on == "last_assistant" else answers
        if not any(text.strip() for text in taught + (prompts if self.loss_on == "all" else [])):
            return TokenSample(np.zeros(0, np.int32), np.zeros(0, np.bool_), sample_id)
        if self.template.one_eos and len(answers) > 1 and self.loss_on != "last_assistant":
            raise ValueError(
                f"{name} has {len(answers)} exchanges, but the template {self.template.name!r} ends only the last one;"
                " split them into separate rows, or remove template to use the tokenizer's own"
            )
        tokens, learnt = self._joined(self._exchanges(system, prompts, answers))
        learnt[:1] = [False]
        return TokenSample(np.asarray(tokens, np.int32), np.asarray(learnt, np.bool_), sample_id)

    def _turns(self, messages: Sequence[Message], name: str) -> tuple[str, list[str], list[str]]:
        """Return the system text, the prompts and the answers."""
        system = ""
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError(
                f"{name} has the turns {', '.join(roles)}, but the template {self.template.name!r} needs"
                " alternating user and assistant turns, after an optional system turn; fix or remove the row"
            )
        texts = [message["content"] for message in messages]
        return system or self.template.default_system, texts[::2], texts[1::2]

    def _exchanges(self, system: str, prompts: list[str], answers: list[str]) -> list[Exchange]:
        """Return the tokens of all exchanges, with thoughts added or removed as the template says."""
        template, last = self.template, len(answers) - 1
        # Earlier answers are then context only, which at inference has no thoughts.
        forgets = self.loss_on == "last_assistant" and not template.keeps_thoughts
        exchanges = []
        for turn, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if template.thoughts and (template.thinking is False or (forgets and turn < last)):
                answer = _THOUGHTS.sub("", answer).lstrip("\n")
            first = self._opening(system, prompt) if turn == 0 else self._tokens(template.user, prompt)
            second = self._tokens(template.answer, answer)
            thinks = any(mark.strip() in answer for mark in _THOUGHT)
            if template.thoughts and not thinks and (turn == last or not forgets):
                # The empty thought is learnt as part of the answer, or given as part of the prompt.
                empty = self._tokens(("".join(_THOUGHT),))
                first, second = (first, empty + second) if template.thinking else (first + empty, second)
            exchanges.append((first, second))
        return exchanges

    def _opening(self, system: str, prompt: str) -> list[int]:
        """Return the tokens of the first prompt, with prefix and system text."""
        template = self.template
        tokens = self._tokens(template.prefix)
        if system and template.system_in_first_turn:
            prompt = template.system[0].replace(TEXT, system, 1) + prompt
        elif system:
            tokens += self._tokens(template.system, system)
        return tokens + self._tokens(template.user, prompt)

    def _joined(self, exchanges: list[Exchange]) -> tuple[list[int], list[bool]]:
        """Return the exchanges as one list of tokens, cut to ``longest``, and the mask of what is learnt."""
        # If only the last answer is learnt, room is given from the last exchange backwards. A letter per token,
        # longest=6, exchanges "Hi" "Yo", "abc" "de": H abc de, with de learnt. From the first on: Hi Yo ab, with Yo.
        last_alone = self.loss_on == "last_assistant"
        tokens: list[int] = []
        learnt: list[bool] = []
        taken = 1 if self.template.one_eos else 0
        for turn, (prompt, answer) in enumerate(reversed(exchanges) if last_alone else exchanges):
            if self.longest is not None:
                if taken >= self.longest:
                    break
                first, second = kept_lengths(len(prompt), len(answer), self.longest - taken)
                prompt, answer = prompt[:first], answer[:second]
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
    """Tokenises documents for pretraining: perhaps BOS (``begins``), the text, and the token that ends it."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None, begins: bool = False) -> None:
        require_tokenizer(tokenizer)
        end_of_turn(tokenizer, template or ChatTemplate("the end of a document"))
        end = None if template is None else template.end_of_text or template.end_of_turn
        self.tokenizer = tokenizer
        self._start = tokenizer.bos_token if begins and getattr(tokenizer, "add_bos_token", False) else ""
        self._end = end or tokenizer.eos_token

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of the first message's text; an empty sample if it has none."""
        text = messages[0]["content"] if messages else ""
        ids = self.tokenizer(self._start + text + self._end, add_special_tokens=False)["input_ids"] if text else []
        learnt = np.ones(len(ids), np.bool_)
        learnt[:1] = False
        return TokenSample(np.asarray(ids, np.int32), learnt, sample_id)


def end_of_turn(tokenizer: Any, template: ChatTemplate) -> int | None:
    """Return the token that the template means by EOS; None if it needs none, ValueError if it is not there."""
    if template.end_of_turn is not None:
        ids = tokenizer(template.end_of_turn, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == getattr(tokenizer, "unk_token_id", None):
            raise ValueError(
                f"the template {template.name!r} ends turns with the token {template.end_of_turn!r}, which this"
                " tokenizer does not have; choose the template that the model was trained with, or remove template to"
                " use the tokenizer's own"
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


def kept_lengths(prompt: int, answer: int, room: int) -> tuple[int, int]:
    """Return how many of the first tokens of a prompt and of its answer are kept, together at most ``room``.

    Source: ``infer_seqlen`` in LLaMA-Factory (src/llamafactory/data/processor/processor_utils.py) has the same rule.
    """
    # With room for 512: a short answer stays whole, (900, 100) becomes (412, 100); else a short prompt does, (100, 900)
    # becomes (100, 412); else each keeps its share, (600, 400) becomes (308, 204).
    if 2 * answer < room:
        most = room
    elif 2 * prompt < room:
        most = room - prompt
    else:
        most = int(room * (answer / (prompt + answer)))
    kept = min(most, answer)
    return min(max(room - kept, 0), prompt), kept
