# SPDX-License-Identifier: Apache-2.0
"""``parse_arguments``: argument classes from command-line words, a file or a dict.

transformers' ``HfArgumentParser`` reads the words, so its rules apply, except that names cannot be abbreviated. It
rejects classes that share a field. Here each class gets the value, and ``Fp8Arguments``, whose ``fp8`` is a yes or no,
decides which FP8 format the others get.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from lightning_mcore.arguments.documents import read_file
from lightning_mcore.arguments.fields import take_words
from lightning_mcore.config.text import unknown_name

_LISTED = "leave it out, or look for it in docs/reference/arguments.md"


def parse_arguments(source: "Sequence[str] | str | Path | Mapping[str, Any]", *classes: type) -> tuple[Any, ...]:
    """Return an object of each class.

    Args:
        source: Command-line words, a dict, or the path of a ``.yaml``, ``.yml`` or ``.json`` file. The words may be one
            such path.
        classes: Dataclasses; ``TrainingArguments`` if none is given.

    Raises:
        FileNotFoundError: There is no such file.
        SystemExit: The command-line words are wrong; argparse has printed the reason.
        TypeError: A value has another type.
        ValueError: A name is unknown, a value is not allowed, or the file cannot be read.
    """
    if not classes:
        from lightning_mcore.arguments.training import TrainingArguments

        classes = (TrainingArguments,)
    chosen: Any = classes
    names = [field.name for kind in chosen for field in dataclasses.fields(kind) if field.init]
    if isinstance(source, Sequence) and not isinstance(source, str) and len(source) == 1 and _is_file_name(source[0]):
        source = source[0]
    if isinstance(source, str | Path):
        what, values = f"key of {source}", read_file(str(source), "a file of arguments")
    elif isinstance(source, Mapping):
        what, values = "argument", dict(source)
    # HfArgumentParser reads words, unless two classes share a name, which argparse rejects.
    elif len({*names}) == len(names):
        return _parsed(list(source), chosen, names)
    else:
        what, values = "option", _values(list(source), chosen)
    for name in values:
        if name not in names:
            raise ValueError(unknown_name(what, str(name), names, _LISTED))
    return _made(values, chosen)


def _parsed(words: list[str], classes: Any, names: list[str]) -> tuple[Any, ...]:
    """Return the objects that transformers' parser makes from words."""
    from transformers import HfArgumentParser

    # An abbreviation, such as --learn for --learning_rate, would change its meaning as soon as a second name begins so.
    parser = HfArgumentParser(classes, allow_abbrev=False)
    *parsed, rest = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    for word in rest:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        raise ValueError(
            unknown_name("option", name, names, _LISTED)
            if word.startswith("-")
            else f"{word!r} belongs to no option; write --name VALUE"
        )
    return tuple(parsed)


def _values(words: list[str], classes: Any) -> dict[str, Any]:
    """Return values by name for classes that share names; a shared name accepts what any of the classes accepts."""
    hints: dict[str, Any] = {}
    for kind in classes:
        for name, hint in get_type_hints(kind).items():
            hints[name] = hints[name] | hint if name in hints else hint
    values = {}
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--"):
            raise ValueError(f"{word!r} belongs to no option; write --name VALUE")
        if name not in hints:
            raise ValueError(unknown_name("option", name, hints, _LISTED))
        values[name] = take_words(name, [value] if equals else words, hints[name])
    return values


def _made(values: Mapping[str, Any], classes: Any) -> tuple[Any, ...]:
    """Return an object of each class, with the FP8 format that ``Fp8Arguments`` asks for in the others."""
    from lightning_mcore.arguments.llamafactory.fp8 import Fp8Arguments

    chooses = Fp8Arguments in classes and len(classes) > 1
    own = {name: value for name, value in values.items() if name in Fp8Arguments.__dataclass_fields__}
    others = dict(values)
    if chooses:
        others = {name: value for name, value in values.items() if name not in own}
        others = Fp8Arguments(**own).merged_into(others)
    made = []
    for kind in classes:
        given = values if kind is Fp8Arguments else others
        fields = {field.name for field in dataclasses.fields(kind) if field.init}
        made.append(kind(**{name: value for name, value in given.items() if name in fields}))
    return tuple(made)


def _is_file_name(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml", ".json") and not word.startswith("-")
