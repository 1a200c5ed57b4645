# SPDX-License-Identifier: Apache-2.0
"""Faults of a command line that are found in a fraction of a second, before torch, Lightning and Megatron are imported.

These are a missing file and misspelt arguments of the trainer or of ``MCoreStrategy``, whose signatures are read from
the source. ``config_errors.py`` finds every fault and words these the same way. ``__init__.py`` calls
:func:`refuse_early`.
"""

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore.arguments import documents
from lightning_mcore.arguments.documents import read_text, read_yaml
from lightning_mcore.arguments.llamafactory.rules import TRAINING_FILE
from lightning_mcore.cli.command import TRAINING
from lightning_mcore.config.text import unknown_name

_FILES = (".yaml", ".yml", ".json")
_OURS = "MCoreStrategy"
_TRAINER = ("lightning", "pytorch/trainer/trainer.py", "Trainer")
_STRATEGY = ("lightning_mcore", "strategy/strategy.py", _OURS)


def refuse_early(command: str, words: Sequence[str]) -> None:
    """Raise ValueError or FileNotFoundError for a fault that needs no import."""
    if command in ("plan", "rehearse", "llamafactory"):
        file = words[0] if words else ""
        if file.endswith(_FILES) and not file.startswith("-") and "=" not in file:
            if command != "llamafactory":
                require_settings(file)
            else:
                documents.require_file(file, TRAINING_FILE)
    if command not in TRAINING:
        return
    strategy: Any = None
    for name, value in options(words):
        if name in ("-c", "--config"):
            strategy = _refuse_document(_document(value)) or strategy
        elif name == "--trainer.strategy":
            strategy = value
        elif name.startswith("--trainer."):
            _refuse_option(name, strategy)


def _document(value: str) -> dict[str, Any]:
    """Return the keys of a file, or none if only jsonargparse can judge it: YAML text, a URL, a repeated key."""
    if value.endswith(_FILES) and ":" not in value:
        require_file(value)
    try:
        return load(value)
    except ValueError:
        return {}


def _refuse_document(document: Mapping[str, Any]) -> Any:
    """Reject misspelt keys of the trainer and of our strategy; return the strategy, if there is one."""
    trainer = document.get("trainer")
    if not isinstance(trainer, Mapping):
        return None
    _refuse_keys("trainer", trainer, *_TRAINER)
    strategy = trainer.get("strategy")
    if not isinstance(strategy, Mapping):
        return strategy
    kind, arguments = strategy.get("class_path"), strategy.get("init_args")
    if _is_ours(kind) and isinstance(arguments, Mapping):
        _refuse_keys("trainer.strategy", arguments, *_STRATEGY)
    return kind


def _is_ours(strategy: Any) -> bool:
    return isinstance(strategy, str) and strategy.rpartition(".")[2] in ("mcore", _OURS)


def _refuse_keys(place: str, keys: Mapping[str, Any], package: str, file: str, kind: str) -> None:
    known = _arguments(package, file, kind)
    for key in keys:
        if known and key not in known:
            raise ValueError(unknown_name(f"key of {place}", str(key), known))


def _refuse_option(name: str, strategy: Any) -> None:
    """Reject a misspelt option of the trainer, or of our strategy."""
    # --trainer.callbacks+=X and --trainer.logger.save_dir=X name arguments of the trainer first.
    _, argument, *inner = [part for part in name.removesuffix("+").split(".") if part != "init_args"]
    known = _arguments(*_TRAINER)
    if known and argument not in known:
        raise ValueError(unknown_name("option", name, [f"--trainer.{each}" for each in known]))
    if argument == "strategy" and _is_ours(strategy) and inner[:1] not in ([], ["class_path"], ["help"]):
        _refuse_keys("trainer.strategy", dict.fromkeys(inner[:1]), *_STRATEGY)


@functools.cache
def _arguments(package: str, file: str, kind: str) -> list[str]:
    """Return the names of a constructor's arguments, from the source; empty if they cannot be told."""
    spec = importlib.util.find_spec(package)  # without importing it
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    path = next((path for folder in folders if (path := Path(folder, file)).is_file()), None)
    if path is None:
        return []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    return names[1:] if given.kwarg is None else []
    return []


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options and their values, written ``--name value`` or ``--name=value``."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            raise ValueError(f"{word!r} is not an option; give --name=value")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        yield name, value


def require_settings(path: str) -> None:
    """Raise FileNotFoundError if there is no such file to plan."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is not a file; give a YAML or JSON file with the settings of a run")


def require_file(path: str) -> None:
    """Raise ValueError if there is no such file."""
    if not os.path.isfile(path):
        raise ValueError(f"--config {path} is not a file; give the path of a YAML file")


def load(path: str) -> dict[str, Any]:
    """Return the keys of a YAML file; ValueError if there is no such file, or it holds something else."""
    require_file(path)
    content = read_yaml(read_text(path), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold keys; give a YAML file with trainer:, model: and data:")
    return content
