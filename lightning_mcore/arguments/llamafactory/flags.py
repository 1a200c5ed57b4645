# SPDX-License-Identifier: Apache-2.0
"""The command-line words that LLaMA-Factory and ROLL accept: a file with changes to it, or flags alone.

::

    sft.yaml learning_rate=1e-5 --devices 8
    --model_name_or_path Qwen/Qwen3-0.6B --do_train --dataset identity --bf16 --learning_rate 1e-5

:func:`read_words` turns flags into the ``key=value`` texts that ``run.py`` and ``export.py`` read, so a flag and a
file's key mean the same. The rules are the same as for transformers' ``HfArgumentParser``, except that names cannot be
abbreviated.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from typing import Any, get_type_hints

from lightning_mcore.arguments.fields import take_words
from lightning_mcore.arguments.llamafactory.keys import LISTED, REFUSED, FactoryKeys
from lightning_mcore.arguments.ray import RayArguments
from lightning_mcore.config.text import unknown_name


def read_words(words: Sequence[str], others: Collection[str]) -> tuple[str | None, list[str]]:
    """Return the file, or None, and the changes to it, each ``key=value``.

    ``sft.yaml learning_rate=1e-5 --bf16 --no_neat_packing`` gives ``sft.yaml`` and ``learning_rate=1e-5``,
    ``bf16=true``, ``neat_packing=false``. ``others`` are the command's own options, to suggest for a misspelt one.
    Raises ValueError for an unknown option, a missing value, or a word that belongs to no option.
    """
    hints, file, changes = _hints(), None, []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            changes.append(_change(word, rest, hints, others))
        # A file's name may contain "=".
        elif "=" in word and not os.path.isfile(word):
            changes.append(word)
        elif file is None:
            file = word
        else:
            raise ValueError(f"{word!r} belongs to no option; give one FILE, and then key=value or --key value")
    return file, changes


def _change(word: str, rest: list[str], hints: dict[str, Any], others: Collection[str]) -> str:
    """Return a flag as ``key=value``, and remove the words of its value from ``rest``."""
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    negated = name.removeprefix("no_")
    if name not in hints and negated != name and hints.get(negated) is bool and not equals:
        return f"{negated}=false"
    if name not in hints:
        known = [*others, *(f"--{key}" for key in hints)]
        raise ValueError(unknown_name("option", word.partition("=")[0], known, LISTED))
    found = take_words(name, [value] if equals else rest, hints[name])
    # JSON is YAML, which the reader of changes expects.
    return f"{name}={json.dumps(found, ensure_ascii=False)}"


def _hints() -> dict[str, Any]:
    """Return the type of every key of a training file."""
    from lightning_mcore.arguments.training import Seq2SeqTrainingArguments

    refused = {name: Any if default is None else type(default) for name, (default, _) in REFUSED.items()}
    found: dict[str, Any] = dict(refused)
    for kind in (RayArguments, Seq2SeqTrainingArguments, FactoryKeys):
        hints = get_type_hints(kind)
        found |= {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    # A format in Megatron's arguments, a yes or no in LLaMA-Factory's
    found["fp8"] = found["fp8"] | bool
    return found
