# SPDX-License-Identifier: Apache-2.0
"""The files that make a reranker's folder one that Sentence Transformers' ``CrossEncoder`` reads, without the weights.

``CrossEncoder(folder)`` formats a pair with the tokenizer's chat template: messages with the roles ``query`` and
``document``, and a ``system`` message for ``predict(..., prompt=...)``. The files follow Sentence Transformers 6.
"""

import json
import os
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.config.reranking import Reranker
from lightning_mcore.data.preprocess.tokenizer import auto_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_SCORE = "1_LogitScore"
_MODULES = "sentence_transformers.base.modules.transformer.Transformer"
_LOGITS = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
# A message's content is a text, or a list of parts
_CONTENT = """{%- macro said(role, otherwise) -%}
{%- set found = messages | selectattr("role", "equalto", role) | list -%}
{%- if not found -%}{{- otherwise -}}
{%- elif found[0].content is string -%}{{- found[0].content -}}
{%- else -%}{%- for part in found[0].content -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""


def chat_template(reranker: Reranker) -> str:
    """Return the template of a pair in Jinja."""
    # "Q: {query}" becomes {{- "Q: " -}}{{- said("query", "") -}}
    calls = {
        "{instruction}": f'said("system", {json.dumps(reranker.instruction, ensure_ascii=False)})',
        "{query}": 'said("query", "")',
        "{document}": 'said("document", "")',
    }
    pieces = (calls.get(piece, json.dumps(piece, ensure_ascii=False)) for piece in reranker.pieces if piece)
    return _CONTENT + "".join(f"{{{{- {piece} -}}}}" for piece in pieces)


def warn_of_template(path: str, reranker: Reranker) -> None:
    """Warn if a folder's model was trained with another template or instruction; only this package's folders say so."""
    file = os.path.join(path, TEMPLATE_FILE)
    if not os.path.isfile(file):
        return
    with open(file, encoding="utf-8") as stream:
        found = stream.read()
    if found.startswith(_CONTENT) and found != chat_template(reranker):
        rank_zero_warn(
            f"{path} was trained with another template or instruction than template={reranker.template!r} and"
            f" instruction={reranker.instruction!r}; {TEMPLATE_FILE} there has the earlier ones"
        )


def files_of_reranker(reranker: Reranker) -> dict[str, Any]:
    """Return the content of each file, by its path in the folder; the pair's score stays a logit's until sigmoid."""
    tokens, kinds = reranker.tokens, [("", _MODULES)]
    task, output = "sequence-classification", "scores"
    files: dict[str, Any] = {}
    if tokens is not None:
        task, output = "text-generation", "causal_logits"
        kinds.append((_SCORE, _LOGITS))
        second = tokens[1] if len(tokens) > 1 else None
        files = {f"{_SCORE}/config.json": {"true_token_id": tokens[0], "false_token_id": second}}
        files[f"{_SCORE}/config.json"]["module_input_name"] = output
    forward = {"method": "forward", "method_output_name": "logits"}
    return files | {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": kind} for index, (path, kind) in enumerate(kinds)
        ],
        "sentence_bert_config.json": {
            "transformer_task": task,
            "modality_config": {"text": forward, "message": {**forward, "format": "structured"}},
            "module_output_name": output,
        },
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "activation_fn": "torch.nn.modules.activation.Sigmoid",
            "prompts": {},
            "default_prompt_name": None,
        },
    }


def padding_of(reranker: Reranker, source: str | None) -> dict[str, Any]:
    """Return the config's padding token, behind which a score layer finds the last token; empty if it is not known."""
    if reranker.tokens is not None or source is None:
        return {}
    try:
        token = auto_tokenizer(source).pad_token_id
    except ValueError:
        return {}
    return {} if token is None else {"pad_token_id": token}
