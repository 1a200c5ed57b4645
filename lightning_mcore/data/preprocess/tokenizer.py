# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of ``lightning-mcore preprocess``, in the form that workers and dataset files need.

A tokenizer of the ``tokenizers`` package is one text, its ``tokenizer.json``, and every fast ``transformers`` tokenizer
wraps such a text. Workers get the text and need only ``tokenizers``, which gives the same ids as the wrapper. Only a
tokenizer that ``transformers`` runs in Python is loaded again by each worker. The fine-tuning data modules load their
tokenizers here too.
"""

import hashlib
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mcore.data.preprocess.worker import first_line

LARGEST_ID = 1 << 24  # for a larger table the tokenizers package may end the process


@dataclass(frozen=True)
class TokenizerFacts:
    """What the command needs to know about a tokenizer."""

    name: str
    json: str | None  # its tokenizer.json; None if transformers runs it in Python
    vocab_size: int  # largest id + 1
    eod: int | None
    digest: str


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a content digest of a transformers tokenizer, without its location and its chat template."""
    inside: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(inside, "to_str"):
        whole = json.loads(inside.to_str())
        parts = [json.dumps({**whole, "truncation": None, "padding": None}, sort_keys=True)]  # left from its last use
    else:
        parts = [json.dumps(tokenizer.get_vocab(), sort_keys=True)]
        files = (tokenizer.init_kwargs.get(name) for name in tokenizer.vocab_files_names)
        parts += [_digest(Path(file).read_bytes()) for file in files if isinstance(file, str) and os.path.isfile(file)]
    # Only flags and ints: strings include the folder it was loaded from.
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int)}
    settings = {name: value for name, value in settings.items() if name not in ("is_local", "local_files_only")}
    parts += [type(tokenizer).__name__, json.dumps(settings, sort_keys=True), str(tokenizer.special_tokens_map)]
    return _digest("\0".join(parts).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def load_tokenizer(name: str, eod_token: str | None = None) -> TokenizerFacts:
    """Load a ``tokenizer.json``, or a folder or name; ``eod_token`` None means its end of sequence."""
    if os.path.isfile(name):
        return _of_file(name, eod_token)
    try:
        loaded = auto_tokenizer(name)
    except ValueError as error:
        what = "folder" if os.path.isdir(name) else "tokenizer"
        raise FileNotFoundError(
            f"AutoTokenizer cannot read the {what} {name} ({error}); give a folder or name for transformers, or a"
            " tokenizer.json"
        ) from None
    inside: Any = getattr(loaded, "backend_tokenizer", None)
    text = inside.to_str() if hasattr(inside, "to_str") else None
    vocabulary = loaded.get_vocab()
    eod = loaded.eos_token_id if eod_token is None else _known(eod_token, vocabulary, name)
    digest = tokenizer_digest(loaded) if text is None else _digest(text.encode())
    # Not len(vocabulary): ids may have gaps, and the type of a token must hold the largest.
    return TokenizerFacts(name, text, 1 + max(vocabulary.values(), default=-1), eod, digest)


def auto_tokenizer(name: str) -> Any:
    """Return a transformers tokenizer without running its code; ValueError with the first line of the reason."""
    transformers: Any = importlib.import_module("transformers")
    try:
        _check_ids(Path(name, "tokenizer.json"))
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise anything
        lacking = "one of its files lacks " if isinstance(error, KeyError) else ""
        raise ValueError(lacking + first_line(error)) from error


def _of_file(name: str, eod_token: str | None) -> TokenizerFacts:
    try:
        kind: Any = importlib.import_module("tokenizers").Tokenizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"reading {name} needs the package tokenizers; pip install tokenizers", name="tokenizers"
        ) from None
    try:
        _check_ids(Path(name))
        loaded = kind.from_file(name)
    except Exception as error:
        raise ValueError(
            f"{name} is not a tokenizer.json ({first_line(error)}); give one, or a folder or name for transformers"
        ) from None
    vocabulary = loaded.get_vocab(with_added_tokens=True)
    eod_token = eod_token or _named_beside(name)
    eod = None if eod_token is None else _known(eod_token, vocabulary, name)
    text = loaded.to_str()
    return TokenizerFacts(name, text, 1 + max(vocabulary.values(), default=-1), eod, _digest(text.encode()))


def _check_ids(path: Path) -> None:
    """Raise ValueError for absurdly large token ids; an unreadable file is left to the tokenizers package."""
    try:
        content = json.loads(path.read_bytes())
        entries = [*content["model"]["vocab"].items(), *((t["content"], t["id"]) for t in content["added_tokens"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for token, number in entries:
        if isinstance(number, int) and number > LARGEST_ID:
            raise ValueError(
                f"{path.name} gives token {token!r:.100} the id {number}, above the limit of {LARGEST_ID};"
                " fix the file or use another tokenizer"
            )


def _known(token: str, vocabulary: dict[str, int], name: str) -> int:
    if token not in vocabulary:
        raise ValueError(
            f"--eod-token {token!r:.100} is not a token of {name}; choose one of its {len(vocabulary)} tokens"
        )
    return vocabulary[token]


def _named_beside(name: str) -> str | None:
    """Return the end-of-sequence token in the ``tokenizer_config.json`` next to a ``tokenizer.json``, if any."""
    try:
        config = json.loads(Path(name).with_name("tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
