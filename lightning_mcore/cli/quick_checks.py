# SPDX-License-Identifier: Apache-2.0
"""Faults of a command line that are found in a fraction of a second, before torch, Lightning and Megatron are imported.

These are a missing file and misspelt options or keys: of the command, of the trainer, and of this package's classes,
whose signatures are read from the source. ``config_errors.py`` finds every fault and words these the same way.
``__init__.py`` calls :func:`refuse_early`.
"""

import ast
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_mcore import HOMES
from lightning_mcore.arguments import documents
from lightning_mcore.arguments.documents import read_text, read_yaml
from lightning_mcore.arguments.llamafactory.rules import TRAINING_FILE
from lightning_mcore.cli.command import TRAINING
from lightning_mcore.config.field_homes import check_home, unknown_field
from lightning_mcore.config.text import unknown_name

_FILES = (".yaml", ".yml", ".json")
CONFIG = ("-c", "--config")
_HELP = ("-h", "--help")
_ROOTS = (
    *("ckpt_path", "data", "lr_scheduler", "model", "optimizer", "print_config", "ray", "seed_everything", "trainer"),
    "weights_only",
)
"""Names that the options of ``fit`` begin with, and the keys of its file."""

_MORE_ROOTS = {"validate": ("verbose",), "test": ("verbose",), "predict": ("return_predictions",)}
_TRANSFORMER_CONFIG = "core/transformer/transformer_config.py"
_CLASSES = ("trainer.strategy", "model", "data")  # options that name a class, whose arguments are options below


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
    roots = [*_ROOTS, *_MORE_ROOTS.get(command, ())]
    classes: dict[str, Any] = {}
    for name, value in options(words):
        place = name.removeprefix("--")
        if name in CONFIG:
            document = _document(value)
            _refuse_document(document, roots)
            trainer = document.get("trainer")
            given = {**document, "trainer.strategy": trainer.get("strategy") if isinstance(trainer, Mapping) else None}
            classes |= {place: _class_in(given[place]) for place in _CLASSES if given.get(place) is not None}
        elif place in _CLASSES:
            classes[place] = value
        elif name not in _HELP:
            _refuse_option(name, roots, classes)


def _document(value: str) -> dict[str, Any]:
    """Return the keys of a file, or none if only jsonargparse can judge it: YAML text, a URL, a repeated key."""
    if value.endswith(_FILES) and ":" not in value:
        require_file(value)
    try:
        return load(value)
    except ValueError:
        return {}


def _class_in(value: Any) -> Any:
    return value.get("class_path") if isinstance(value, Mapping) else value


def _refuse_document(document: Mapping[str, Any], roots: Sequence[str]) -> None:
    """Reject misspelt keys of a file, of its trainer, and of our classes."""
    for key, value in document.items():
        if str(key).partition(".")[0] not in roots:
            raise ValueError(unknown_name("key", str(key), roots))
        if key == "trainer" and isinstance(value, Mapping):
            _refuse_keys("trainer", value, _arguments_of_trainer())
        _refuse_in_classes(str(key), value)


def _refuse_in_classes(place: str, value: Any) -> None:
    """Reject misspelt arguments of our classes, at any depth."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_in_classes(f"{place}[{number}]", item)
    if isinstance(value, Mapping):
        arguments = value.get("init_args")
        known = _arguments_of_class(value.get("class_path"))
        if isinstance(arguments, Mapping):
            _refuse_keys(place, arguments, known)
            if "transformer" in known and isinstance(arguments.get("transformer"), Mapping):
                _refuse_fields(arguments["transformer"])
        for name, inner in value.items():
            _refuse_in_classes(place if name == "init_args" else f"{place}.{name}", inner)


def _refuse_keys(place: str, keys: Iterable[str], known: Sequence[str]) -> None:
    for key in keys:
        if known and key not in known:
            raise ValueError(unknown_name(f"key of {place}", str(key), known))


def _refuse_fields(transformer: Mapping[str, Any]) -> None:
    """Reject misspelt fields of Megatron's ``TransformerConfig``."""
    files = {"core/model_parallel_config.py": "ModelParallelConfig", _TRANSFORMER_CONFIG: "TransformerConfig"}
    fields = [name for file, kind in files.items() for name in _fields("megatron", file, kind)]
    latent = _fields("megatron", _TRANSFORMER_CONFIG, "MLATransformerConfig")
    known = [*fields, *latent] if transformer.get("multi_latent_attention") else fields
    for name in map(str, transformer) if fields else ():
        check_home(name)
        if name not in known:
            raise ValueError(unknown_field(name, known, latent, _release_of_megatron()))


def _release_of_megatron() -> str:
    try:
        return importlib.metadata.version("megatron-core").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _refuse_option(name: str, roots: Sequence[str], classes: Mapping[str, Any]) -> None:
    """Reject a misspelt option, such as ``--trainer.devises`` or ``--model.vocab_sise``."""
    # --trainer.callbacks+=X and --trainer.logger.save_dir=X name arguments of the trainer first.
    path = [part for part in name.removeprefix("--").removesuffix("+").split(".") if part != "init_args"]
    trainer = _arguments_of_trainer()
    known = ["config", *roots, *(f"trainer.{argument}" for argument in trainer)]
    is_known = path[0] in roots and (path[0] != "trainer" or len(path) < 2 or not trainer or path[1] in trainer)
    if not is_known and not path[0].startswith("print_"):  # jsonargparse adds --print_shtab if shtab is installed
        raise ValueError(unknown_name("option", name, [f"--{option}" for option in known], "--help lists them"))
    for place, kind in classes.items():
        depth = place.count(".") + 1
        inner = path[depth : depth + 1]
        if ".".join(path[:depth]) == place and inner not in ([], ["class_path"], ["dict_kwargs"], ["help"]):
            _refuse_keys(place, inner, _arguments_of_class(kind))


def _arguments_of_trainer() -> list[str]:
    return _arguments("lightning", "pytorch/trainer/trainer.py", "Trainer")


def _arguments_of_class(kind: Any) -> list[str]:
    """Return the names of the arguments of one of our classes; empty for another class."""
    package, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
    name = "MCoreStrategy" if name == "mcore" else name
    if name not in HOMES or package.partition(".")[0] not in ("", "lightning_mcore"):
        return []
    return _arguments("lightning_mcore", HOMES[name].replace(".", "/") + ".py", name)


def _arguments(package: str, file: str, kind: str) -> list[str]:
    """Return the names of a constructor's arguments, from the source; empty if they cannot be told."""
    for node in _body_of_class(package, file, kind):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = node.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            return names[1:] if given.kwarg is None else []
    return []


def _fields(package: str, file: str, kind: str) -> list[str]:
    """Return the names of a dataclass's own fields, from the source; empty if they cannot be told."""
    body = _body_of_class(package, file, kind)
    return [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


@functools.cache
def _body_of_class(package: str, file: str, kind: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec(package)  # without importing it
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    path = next((path for folder in folders if (path := Path(folder, file)).is_file()), None)
    module = ast.parse(path.read_text(encoding="utf-8")) if path is not None else ast.Module([], [])
    return next((node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind), [])


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options and their values, written ``--name value`` or ``--name=value``."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            meant = f"did you mean --config {word}?" if word.endswith(_FILES) else "give --name=value"
            raise ValueError(f"{word!r} is not an option; {meant}")
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
