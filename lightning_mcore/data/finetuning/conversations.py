# SPDX-License-Identifier: Apache-2.0
"""Rows of a fine-tuning dataset as conversations: a list of messages, each with a role and a text.

Datasets come in four forms, which their columns tell:

* ``prompt_response``: two columns, by default ``prompt`` and ``response``, each a text or, as TRL writes ``prompt`` and
  ``completion``, a list of messages; a prompt of messages has no answers;
* ``alpaca``: ``instruction``, ``output`` and, optionally, ``input``, which follows the instruction after a blank line,
  and ``history``, a list of pairs of texts: earlier instructions and their answers;
* ``sharegpt``: ``conversations``, a list of ``{"from": "human", "value": "..."}``;
* ``messages``: ``messages``, a list of ``{"role": "user", "content": "..."}`` as the OpenAI API has them.

In every form, a column ``system`` is the system text of rows without a system message. A null text counts as empty.
Rows without an answer are skipped and counted. With ``in_full``, a reader keeps tools, calls and separate thoughts for
a chat template to write, and ``weight`` 0 of turns that are not learnt. Otherwise these raise, because the texts alone
would teach something else. Other columns, and other fields of a message, are ignored. ``chat.py`` tokenises the
messages.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from lightning_mcore.config.value_checks import choices, require_choice

Format = Literal["auto", "prompt_response", "alpaca", "sharegpt", "messages"]
LossOn = Literal["assistant", "last_assistant", "all"]
Message = dict[str, Any]
"""A ``role``, a text as ``content`` and, for a chat template, fields of :data:`WRITTEN`; ``tools`` are in the first."""
Row = Mapping[str, Any]

_ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | _ROLES
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_THOUGHT = "write the thought into its text as the chat template does, or remove the field"
WRITTEN = {
    "tools": "write the tools and their calls into its texts, or remove the row",
    "tool_calls": "write the call into its text, or remove the row",
    **dict.fromkeys(THOUGHTS, _THOUGHT),
}
"""What only a chat template can write, and what to do where there is none."""
_OF_TOOLS = ("name", "tool_call_id")
_NO_TOOLS = ("", "[]", "{}", "null")


class ConversationReader:
    """Turns rows of one form into conversations; ``needed`` are the columns that each row must have.

    With ``in_full``, messages keep what only :class:`~lightning_mcore.data.finetuning.chat.ChatEncoder` understands.
    """

    def __init__(
        self,
        columns: Iterable[str],
        format: Format = "auto",
        prompt_column: str = "prompt",
        response_column: str = "response",
        in_full: bool = False,
    ) -> None:
        require_choice("format", format, Format)
        self.in_full = in_full
        self.prompt_column = prompt_column
        self.response_column = response_column
        present = list(columns)
        # In the order in which "auto" tries them.
        needed = {
            "prompt_response": (prompt_column, response_column),
            "messages": ("messages",),
            "sharegpt": ("conversations",),
            "alpaca": ("instruction", "output"),
        }
        if format == "auto":
            found = [name for name, wanted in needed.items() if set(wanted) <= set(present)]
            if not found and {"chosen", "rejected"} <= set(present):
                raise ValueError(
                    f"the columns {_listed(present)} hold preferences, but this data module reads single answers; use"
                    " MCorePreferenceData and MCorePreference, or name the columns of prompt and answer"
                )
            if not found:
                forms = "; ".join(f"{name}: {', '.join(wanted)}" for name, wanted in needed.items())
                raise ValueError(
                    f"the columns {_listed(present)} fit none of the formats ({forms}); rename columns, or name"
                    " yours with prompt_column and response_column"
                )
            format = found[0]  # type: ignore[assignment]
        missing = [name for name in needed[format] if name not in present]
        if missing:
            raise ValueError(
                f"format={format!r} needs the column {_listed(missing)}, but the data has {_listed(present)}; choose"
                " another format, or name the columns with prompt_column and response_column"
            )
        self.format: Format = format
        self.needed = needed[format]

    def messages(self, row: Row, name: str) -> list[Message]:
        """Return the messages of a row, called ``name`` in errors, each with ``role`` and ``content``."""
        missing = [column for column in self.needed if column not in row]
        if missing:
            raise ValueError(
                f"{name} has the columns {_listed(row)} but not {_listed(missing)}; use the same columns in all rows"
            )
        tools = _tools(row["tools"], name) if has_tools(row.get("tools")) else None
        if tools and not self.in_full:
            raise _only_a_template_writes("tools", name)
        for column in ("images", "videos"):
            if row.get(column):
                raise ValueError(
                    f"{name} has {column!r}, which would be ignored; train MCoreVisionGPT on MCoreVisionData, or remove"
                    " the column"
                )
        turns = self._turns(row, name)
        system = _text(row.get("system"), "system", name)
        if system and turns and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": system}, *turns]
        if tools and turns:
            turns[0]["tools"] = tools
        return turns

    def _turns(self, row: Row, name: str) -> list[Message]:
        """Return the messages of a row without the text in its column ``system``."""
        if self.format == "prompt_response":
            columns = self.prompt_column, self.response_column
            prompt, response = (
                _side(row[key], role, key, name, self.in_full)
                for key, role in zip(columns, ("user", "assistant"), strict=True)
            )
            if any(message["role"] == "assistant" for message in prompt):
                raise ValueError(
                    f"{self.prompt_column!r} of {name} has an answer, on which there would be a loss; put all messages"
                    " into one column 'messages', and choose loss_on='last_assistant'"
                )
            return prompt + response
        if self.format == "alpaca":
            instruction, more, output = (_text(row.get(key), key, name) for key in ("instruction", "input", "output"))
            last = _exchange(f"{instruction}\n\n{more}" if more else instruction, output)
            return [*earlier_exchanges(row.get("history"), "history", name), *last]
        if self.format == "sharegpt":
            return _conversation(row["conversations"], "from", "value", _SHAREGPT_ROLES, name, self.in_full)
        return _conversation(row["messages"], "role", "content", _ROLES, name, self.in_full)


def has_tools(value: Any) -> bool:
    """Return whether a value lists tools; it may also be the text of a list in JSON."""
    return bool(value) and not (isinstance(value, str) and value.strip() in _NO_TOOLS)


def require_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError or ValueError unless this is a ``transformers`` tokenizer that can write texts."""
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TypeError(
            f"tokenizer is of type {type(tokenizer).__name__}; give a tokenizer of transformers or the folder of one,"
            " and wrap a tokenizer of the tokenizers package in PreTrainedTokenizerFast(tokenizer_object=...)"
        )
    longest = getattr(tokenizer, "model_max_length", 0)
    if not isinstance(longest, Real):
        raise TypeError(
            f"the tokenizer's model_max_length is of type {type(longest).__name__}; set a number in its"
            " tokenizer_config.json"
        )
    # Looking up an unk_token that is not a token recurses without end.
    try:
        getattr(tokenizer, "all_special_ids", None)
    except RecursionError:
        raise ValueError(
            f"the tokenizer's unk_token {tokenizer.unk_token!r:.100} is not one of its tokens; set one of them, or"
            " null, in its tokenizer_config.json"
        ) from None


def earlier_exchanges(history: Any, column: str, name: str) -> list[Message]:
    """Return the exchanges before the last one, in Alpaca's form: a list of pairs of texts, or None."""
    if history is not None and not isinstance(history, list):
        raise TypeError(f"{column!r} of {name} is of type {type(history).__name__}; give a list of pairs of texts")
    turns: list[Message] = []
    for number, pair in enumerate(history or []):
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TypeError(
                f"exchange {number} in {column!r} of {name} is not a pair of texts; give a question and an answer"
            )
        turns += _exchange(*pair)
    return turns


def _exchange(prompt: str, response: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _side(value: Any, role: str, key: str, name: str, in_full: bool) -> list[Message]:
    """Return a prompt or a response as messages, which it may already be."""
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
        return _conversation(value, "role", "content", _ROLES, f"{key!r} of {name}", in_full)
    return [{"role": role, "content": _text(value, key, name)}]


def _conversation(
    turns: Any, role_key: str, text_key: str, roles: Mapping[str, str], name: str, in_full: bool
) -> list[Message]:
    if turns is None:
        return []
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise TypeError(f"{name} has no list of messages; give a list of objects with {role_key!r} and {text_key!r}")
    messages = []
    for number, turn in enumerate(turns):
        place = f"message {number} of {name}"
        if role_key not in turn or (text_key not in turn and not (in_full and turn.get("tool_calls"))):
            raise ValueError(
                f"{place} has the fields {_listed(turn)} but needs {role_key!r} and {text_key!r}; rename the fields or"
                " choose another format"
            )
        if turn[role_key] not in roles:
            raise ValueError(f"{place} has the role {turn[role_key]!r}; choose {choices(map(repr, roles))}")
        role = roles[turn[role_key]]
        text = _text(turn.get(text_key), text_key, place)
        messages.append({"role": role, "content": text, **_written(turn, role, place, in_full)})
    return messages


def _written(turn: Mapping[str, Any], role: str, place: str, in_full: bool) -> Message:
    """Return what a chat template writes of a turn besides its text."""
    if turn.get("function_call"):
        raise ValueError(f"{place} has 'function_call', which is not supported; write it as 'tool_calls'")
    calls = turn["tool_calls"] if has_tools(turn.get("tool_calls")) else None
    thoughts = {key: turn[key] for key in THOUGHTS if turn.get(key)}
    if (calls or thoughts) and not in_full:
        raise _only_a_template_writes("tool_calls" if calls else next(iter(thoughts)), place)
    written: Message = {key: _text(thought, key, place) for key, thought in thoughts.items()}
    if calls:
        written["tool_calls"] = _calls(calls, place)
    if role == "assistant" and turn.get("weight", 1) != 1 and turn["weight"] is not None:
        if turn["weight"] != 0:
            raise ValueError(f"{place} has weight {turn['weight']!r}; choose 0 or 1")
        if not in_full:
            raise ValueError(
                f"{place} has weight 0, which named templates do not support; remove the field, or split the"
                " conversation"
            )
        written["weight"] = 0
    if in_full and role == "tool":
        written |= {key: turn[key] for key in _OF_TOOLS if turn.get(key)}
    return written


def _only_a_template_writes(field: str, name: str) -> ValueError:
    return ValueError(f"{name} has {field!r}, which named templates cannot write; {WRITTEN[field]}")


def _tools(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the descriptions of tools, which may be a JSON string."""
    tools = _parsed(value) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(
            f"'tools' of {name} is not a list of objects or a JSON string of one; give the JSON schema of each tool"
        )
    return tools


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return calls with their arguments as objects, which templates and inference servers expect."""
    calls = _without_nulls(_parsed(value))
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TypeError(f"'tool_calls' of {place} is not a list of objects; give each call its function and arguments")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"'tool_calls' of {place} has a call without the name of a function; add it")
        # The OpenAI API gives a JSON string: '{"city": "Rome"}' becomes {"city": "Rome"}, and "" becomes {}.
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise ValueError(
                f"the arguments of the call of {function['name']!r} in {place} are {arguments!r:.100}; give an object"
                " or a JSON string of one"
            )
        function["arguments"] = arguments
    return calls


def _parsed(value: Any) -> Any:
    """Return what a JSON string stands for; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any) -> Any:
    """Return a copy of nested objects without fields that are null: parquet gives all rows the fields of each."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _text(value: Any, key: str, name: str) -> str:
    """Return a text, or the joined parts of one; null is empty."""
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        value = "".join(part.get("text") or "" for part in value)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{key!r} of {name} is of type {type(value).__name__}; give text, or a list of parts of text")
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
