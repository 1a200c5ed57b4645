# SPDX-License-Identifier: Apache-2.0
"""Compare a model's tokenizer with its teacher's, and with the tokenizer and template of its training data."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_mcore.hf.source import is_hub_name, local_folder, read_generation_config


def tokens_of(path: str | None) -> Mapping[str, int] | None:
    """Return the tokens in the tokenizer.json of a folder or hub name, with their ids; None without such a file."""
    if path is None or not (os.path.isdir(path) or is_hub_name(path)):
        return None
    file = os.path.join(local_folder(path), "tokenizer.json")
    if not os.path.isfile(file):
        return None
    with open(file, encoding="utf-8") as opened:
        content = json.load(opened)
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: pairs of a token and its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{added["content"]: added["id"] for added in content.get("added_tokens") or ()}}


def difference_from_model(path: str | None, trained: Mapping[str, int]) -> str | None:
    """Return a sentence if the data's tokenizer has tokens that the model's lacks, or that have another id there.

    ``path`` is the model's folder or hub name. Returns None if they agree, or if its tokenizer.json cannot be read.
    """
    try:
        own = tokens_of(path)
    except (OSError, ValueError, LookupError, TypeError):
        return None  # whatever needs the file reports it
    # Numbers 0 to 699 are the model's; data that writes "the" as 17, which is " of" there, trains " of" as "the"
    other = [token for token, number in trained.items() if own is not None and own.get(token) != number]
    if not other:
        return None
    first = min(other, key=trained.__getitem__)
    return (
        f"{len(other):,} of the {len(trained):,} tokens of the data's tokenizer are missing from the tokenizer of"
        f" {path} or have other numbers there, such as {first!r}; give the model's tokenizer, or copy"
        " your own into the exported folder, which gets the model's"
    )


def lost_in_export(path: str, tokenizer: Any, template: str, end: int | None) -> Iterator[str]:
    """Yield what an export of ``path`` will lack of the data's template; its turns end with the token ``end``."""
    if tokenizer.chat_template is None:
        yield (
            f"the data is written with the template {template!r}, but the exported folder gets the tokenizer of"
            f" {path}, which has no chat template; set chat_template there, so that other programs write prompts like"
            " the data"
        )
    if end is not None and end not in (tokenizer.eos_token_id, *_ends_of_text(path)):
        mark = tokenizer.convert_ids_to_tokens(end)
        yield (
            f"the template {template!r} ends turns with {mark!r}, but the exported folder gets the tokenizer of {path}"
            f" with eos_token={tokenizer.eos_token!r}, so other programs would not stop there; set eos_token in its"
            " tokenizer_config.json, and eos_token_id in its generation_config.json"
        )


def _ends_of_text(path: str) -> list[int]:
    """Return the tokens at which a model's generation config stops; none if it cannot be read."""
    try:
        ends: Any = (read_generation_config(local_folder(path, weights=False)) or {}).get("eos_token_id")
    except (OSError, ValueError):
        return []
    return ends if isinstance(ends, list) else [ends]
