# SPDX-License-Identifier: Apache-2.0
"""The files that make a Hugging Face model's folder one of Sentence Transformers, without weights and tokenizer.

``SentenceTransformer(folder)`` reads ``modules.json``: the model itself, pooling, and vectors of length 1. The files
have the form of releases 2 to 5, which later releases also read; :func:`check_vectors` reads both forms.
"""

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.config.embedding import Embedding, Pooling
from lightning_mcore.hf.files import read_json_value
from lightning_mcore.hf.source import is_hub_name

_POOLING = "1_Pooling"
_READING = "sentence_bert_config.json"
_NAMES: Mapping[Pooling, str] = {"last": "lasttoken", "mean": "mean"}
# How releases before 6 name the pooling; the first two have the values in _NAMES
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_TYPES = ("Transformer", "Pooling", "Normalize")


def files_of(embedding: Embedding, hidden_size: int, seq_length: int) -> dict[str, Any]:
    """Return the content of each file, by its path in the folder; texts are cut to ``seq_length`` tokens."""
    paths = ("", _POOLING, "2_Normalize")
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(zip(paths, _TYPES, strict=True))
        ],
        _READING: {"max_seq_length": seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": embedding.query_prompt, "document": embedding.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        f"{_POOLING}/config.json": {
            "word_embedding_dimension": hidden_size,
            **{flag: name == _NAMES[embedding.pooling] for flag, name in _FLAGS.items()},
            "include_prompt": True,
        },
        "2_Normalize/config.json": {},
    }


def check_vectors(path: str, embedding: Embedding) -> None:
    """Compare a Sentence Transformers folder, or one on the hub, with the settings of a model that starts from it.

    Raises ValueError if it makes its vectors in another way. Warns if its prompts would be dropped. Other models do not
    say how they make vectors.
    """
    for module in _content(path, "modules.json", []):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _TYPES:
            raise ValueError(
                f"{path} makes its vectors with a {kind} module, which would be lost; give a model whose modules.json"
                f" has only {', '.join(_TYPES)}"
            )
    _check_pooling(path, embedding)
    _check_reading(path)
    stored = _content(path, "config_sentence_transformers.json", {}).get("prompts") or {}
    given = {"query": embedding.query_prompt, "document": embedding.document_prompt}
    dropped = [name for name in given if stored.get(name)]
    if dropped and not any(given.values()):
        rank_zero_warn(
            f"{path} has prompts for {' and '.join(dropped)}, and Embedding has none, so texts are trained without"
            f" them; to keep them, set {' and '.join(f'{name}_prompt={stored[name]!r}' for name in dropped)}"
        )


def _check_pooling(path: str, embedding: Embedding) -> None:
    content = _content(path, f"{_POOLING}/config.json", None)
    if content is None:
        return
    pooling = embedding.pooling
    found = content.get("pooling_mode") or "+".join(name for flag, name in _FLAGS.items() if content.get(flag))
    if found != _NAMES[pooling]:
        fitting = next((known for known, name in _NAMES.items() if name == found), None)
        remedy = f"set Embedding(pooling={fitting!r})" if fitting else "give a model that pools by 'last' or 'mean'"
        raise ValueError(f"the vectors of {path} are pooled by {found!r}, and pooling={pooling!r} is set; {remedy}")
    if pooling == "mean" and content.get("include_prompt") is False and (given := _prompts(embedding)):
        raise ValueError(
            f"{path} leaves prompts out of the mean (include_prompt=false), and {given} would be part of it; leave the"
            " prompt out, or set include_prompt to true in 1_Pooling/config.json"
        )


def _check_reading(path: str) -> None:
    reading = _content(path, _READING, {})
    if "message" in reading.get("modality_config", {}):
        raise ValueError(
            f"{path} makes the vector of a text from a conversation that its chat template writes, and MCoreEmbedding"
            f" from the text alone; remove 'message' from modality_config in {_READING} to train on texts alone"
        )
    if reading.get("do_lower_case"):
        raise ValueError(
            f"{path} makes the vector of a text in lower case (do_lower_case=true), and MCoreEmbedding keeps capitals;"
            f" set do_lower_case to false in {_READING}, and write your texts in lower case"
        )


def _prompts(embedding: Embedding) -> str:
    names = ("query_prompt", "document_prompt")
    return " and ".join(f"{name}={getattr(embedding, name)!r}" for name in names if getattr(embedding, name))


def _content(path: str, name: str, otherwise: Any) -> Any:
    """Return the content of a file in a folder or a hub model; ``otherwise`` if there is no such file."""
    folder = path
    if is_hub_name(path):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            folder = str(hf_hub_download(path, name)).removesuffix(name)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
            return otherwise
    return read_json_value(folder, name) if os.path.isfile(os.path.join(folder, name)) else otherwise
