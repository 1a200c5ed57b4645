# SPDX-License-Identifier: Apache-2.0
"""The files that make a Hugging Face model's folder one of Sentence Transformers, without weights and tokenizer.

``SentenceTransformer(folder)`` reads ``modules.json``: the model itself, pooling, and vectors of length 1. The files
have the form of releases 2 to 5, which later releases also read; :func:`check_pooling` reads both forms.
"""

import os
from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.embedding import Embedding, Pooling
from lightning_mcore.hf.files import read_json
from lightning_mcore.hf.source import is_hub_name

_POOLING = "1_Pooling"
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
        "sentence_bert_config.json": {"max_seq_length": seq_length, "do_lower_case": False},
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


def check_pooling(path: str, pooling: Pooling) -> None:
    """Raise ValueError if a Sentence Transformers folder, or one on the hub, pools otherwise.

    Other models do not say how.
    """
    folder = os.path.join(path, _POOLING)
    if is_hub_name(path):
        folder = os.path.dirname(_downloaded(path))
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return
    content = read_json(folder, "config.json")
    found = content.get("pooling_mode") or "+".join(name for flag, name in _FLAGS.items() if content.get(flag))
    if found == _NAMES[pooling]:
        return
    fitting = next((known for known, name in _NAMES.items() if name == found), None)
    remedy = f"set Embedding(pooling={fitting!r})" if fitting else "give a model that pools by 'last' or 'mean'"
    raise ValueError(f"the vectors of {path} are pooled by {found!r}, and pooling={pooling!r} is set; {remedy}")


def _downloaded(name: str) -> str:
    """Return the path of a hub model's description of its pooling; one that is not there if it has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(hf_hub_download(name, f"{_POOLING}/config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return os.path.join(name, _POOLING, "config.json")
