# SPDX-License-Identifier: Apache-2.0
"""Arguments from the command line, from a YAML or JSON file, or from a dict, in one call.

transformers' ``HfArgumentParser`` reads them. For unknown names it reports a list of the leftovers; here the error is
one sentence with the nearest known name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.documents import read_file
from lightning_mcore.config.text import unknown_name


def parse_arguments(source: "Sequence[str] | str | Path | Mapping[str, Any]", *classes: type) -> tuple[Any, ...]:
    """Return an object of each class.

    Args:
        source: Words of a command line, a dict, or the path of a ``.yaml``, ``.yml`` or ``.json`` file. The words may
            be one such path.
        classes: Dataclasses; ``TrainingArguments`` if none is given.

    Raises:
        FileNotFoundError: There is no such file.
        SystemExit: Words of a command line are wrong; argparse has printed the reason.
        TypeError: A value has another type.
        ValueError: A name is unknown, a value is refused, or the file cannot be read.
    """
    from transformers import HfArgumentParser

    chosen: Any = classes or _default_classes()
    known = {field.name for kind in chosen for field in dataclasses.fields(kind) if field.init}
    if isinstance(source, Sequence) and not isinstance(source, str) and len(source) == 1 and _is_file_name(source[0]):
        source = source[0]
    if isinstance(source, str | Path):
        what, values = f"key of {source}", read_file(str(source), "a file of arguments")
    elif isinstance(source, Mapping):
        what, values = "argument", dict(source)
    else:
        parser = HfArgumentParser(chosen, allow_abbrev=False)
        *parsed, rest = parser.parse_args_into_dataclasses(
            list(source), return_remaining_strings=True, look_for_args_file=False
        )
        for word in rest:
            name = word.lstrip("-").partition("=")[0].replace("-", "_")
            raise ValueError(
                unknown_name("option", name, known) if word.startswith("-") else f"{word!r} belongs to no option"
            )
        return tuple(parsed)
    for name in values:
        if name not in known:
            raise ValueError(unknown_name(what, str(name), known))
    return tuple(HfArgumentParser(chosen).parse_dict(values))


def _default_classes() -> tuple[type, ...]:
    from lightning_mcore.arguments.training import TrainingArguments

    return (TrainingArguments,)


def _is_file_name(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml", ".json") and not word.startswith("-")
