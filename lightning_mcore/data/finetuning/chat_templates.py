# SPDX-License-Identifier: Apache-2.0
"""Chat templates by name: how the turns of a conversation are written around, for models that were trained that way.

Most tokenizers bring a chat template of their own, in Jinja, and ``chat.py`` goes by it. LLaMA-Factory goes by
templates of its own, which a training file names: ``template: llama3``. Those for text models of the families that this
package knows are here, as plain data and under the same names, so that a conversation becomes the same tokens.

A :class:`ChatTemplate` says what is written before and after the text of each turn, in *pieces*. Each piece is
tokenised by itself, which fixes where tokens end: at the edges of a turn, whatever the text in it begins with. A piece
is text, with ``{text}`` where that of the turn goes, or :data:`BOS` or :data:`EOS`. ``template_encoder.py`` makes
tokens of all this; ``MCoreFinetuningData(template=...)`` takes a name or a template.
"""

from dataclasses import dataclass
from typing import Any

from lightning_mcore.config.text import unknown_name

BOS = "<bos>"
EOS = "<eos>"
"""Pieces that stand for the tokenizer's own tokens; one that it does not have is left out."""

Pieces = tuple[str, ...]
TEXT = "{text}"


@dataclass(frozen=True)
class ChatTemplate:
    r"""How a conversation is written; every value has its meaning in LLaMA-Factory's templates too.

    Args:
        name: What it is called.
        user: Pieces of a user's turn, up to where the answer begins.
        answer: Pieces of an answer; all of them are learnt, so that the model learns to end its turn.
        system: Pieces of the system's text.
        prefix: Pieces at the very beginning.
        default_system: The system's text where a conversation has none; empty for none.
        end_of_turn: The token that ends a turn and takes the place of the tokenizer's EOS; None: that stays.
        end_of_text: What ends a document in pretraining; None for EOS, or what takes its place.
        system_in_first_turn: The system's text is written into the first user's turn, before the user's own.
        one_eos: Answers have no end of their own, and EOS stands once, at the end of the conversation.
        thoughts: Answers begin with a thought, ``<think>...</think>``; one without gets an empty one.
        thinking: With ``thoughts``: whether empty thoughts are learnt, as the beginning of an answer, or given with
            the prompt. False also takes the thoughts out of answers that have them.
        keeps_thoughts: With ``thoughts``, when the last turn alone is learnt: earlier ones keep their thoughts.
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
    """Return a template by its name, or the template itself.

    Raises:
        ValueError: There is none of this name.
    """
    if isinstance(template, ChatTemplate):
        return template
    if template not in TEMPLATES:
        names = ", ".join(sorted(TEMPLATES))
        raise ValueError(f"{unknown_name('chat template', template, TEMPLATES)} (there are {names})")
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
    ChatTemplate("qwen3", **_CHATML, end_of_turn="<|im_end|>", thoughts=True),
    ChatTemplate("qwen3_nothink", **_CHATML, end_of_turn="<|im_end|>"),
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
"""The templates that there are, by name."""
