# SPDX-License-Identifier: Apache-2.0
"""Explain in one sentence why LightningCLI rejects a configuration.

jsonargparse decides what is accepted. Its own message is a page of usage and a list of the types that did not match. So
this file compares the configuration again with the signatures of the classes that it names, until it finds the fault: a
misspelt key, a wrong type or choice, a class that does not exist, or a missing argument. If it finds nothing, the
message is jsonargparse's, on one line. ``fit.py`` and ``lightning_file.py`` call it.
"""

import contextlib
import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning_mcore
from lightning_mcore.arguments.documents import read_yaml
from lightning_mcore.cli.quick_checks import CONFIG, load, options
from lightning_mcore.config.ray import RaySettings
from lightning_mcore.config.text import unknown_name
from lightning_mcore.config.value_checks import accepts, choices_of

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_CLASSES = ("model", "data", "optimizer", "lr_scheduler")


def explain(parser: Any, arguments: Sequence[str], message: str, documents: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return one sentence that explains why the arguments (the words of a command line) are rejected.

    ``message`` is the parser's own message. ``documents`` are files that come before the words and were already read.
    """
    try:
        fault = _fault_at_the_top(_read(parser, arguments, documents), _roots(parser))
    except ValueError as error:
        return str(error)
    return fault or on_one_line(message)


def overlooked_fault(
    parser: Any, arguments: Sequence[str], parsed: Mapping[str, Any], documents: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """Return a sentence for a fault that jsonargparse accepts, or None.

    Such faults are an unknown key with an empty mapping, and a null trainer or recipe. ``parsed`` is the configuration
    as plain data; :func:`explain` describes the other arguments.
    """
    if not isinstance(parsed.get("trainer", {}), Mapping):
        return _fault_in_call("trainer", parsed["trainer"], object)
    try:
        settings = _read(parser, arguments, documents)
    except ValueError:
        return None  # jsonargparse also accepts other ways to give a value, so this is not a fault
    fault = _dropped(settings, {**dict.fromkeys(_roots(parser)), **parsed}, "key")
    return fault or next((fault for root in parsed if (fault := _null_settings(root, parsed[root]))), None)


def _null_settings(path: str, given: Any) -> str | None:
    """Return a sentence for a dataclass that is null in the arguments of a class; None if there is no such fault."""
    if not isinstance(given, Mapping) or "class_path" not in given:
        return None
    for name, value in (given.get("init_args") or {}).items():
        kinds = _kinds(_hints(_find(path, str(given["class_path"]))).get(name, Any))
        if value is None and any(map(dataclasses.is_dataclass, kinds)) and type(None) not in kinds:
            return f"{path}.{name}=None is not a mapping; give its fields by name, or leave it out"
    return None


def _dropped(settings: Mapping[str, Any], parsed: Mapping[str, Any], what: str) -> str | None:
    """Return a sentence for a key that is not in the parsed configuration; None if there is no such fault."""
    arguments = parsed.get("init_args")
    known = {**parsed, **arguments} if isinstance(arguments, Mapping) else parsed
    for name, value in settings.items():
        # jsonargparse removes an unknown key silently only if its value holds nothing.
        if name not in known and name not in _CLASS_KEYS and _holds_nothing(value):
            return unknown_name(what, name, known)
        inner = known.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            below = what if name == "init_args" else f"key of {name}" if what == "key" else f"{what}.{name}"
            if fault := _dropped(value, inner, below):
                return fault
    return None


def _holds_nothing(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_holds_nothing, value.values()))


def _roots(parser: Any) -> list[str]:
    """Return the top-level keys of a parser: trainer, model, data, ..."""
    return [name.removeprefix("--").partition(".")[0] for name in parser._option_string_actions]


def _read(parser: Any, arguments: Sequence[str], documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return files and arguments as one tree of plain data; ValueError for an unknown option or a bad file."""
    settings: dict[str, Any] = {}
    for document in documents:
        _merge(settings, document)
    for name, value in options(arguments):
        if name in CONFIG:
            _merge(settings, load(value))
            continue
        # --trainer.callbacks+=X appends to a list, which is left to jsonargparse.
        path = name.removeprefix("--").removesuffix("+").split(".")
        if name not in parser._option_string_actions and not _is_below_a_class(path, parser):
            spelled = [each for each in parser._option_string_actions if each[:2] == "--" and each[-1] != "+"]
            raise ValueError(unknown_name("option", name, spelled, "--help lists them"))
        if not name.endswith("+"):
            _put(settings, path, _plain(value))
    return settings


def _is_below_a_class(path: list[str], parser: Any) -> bool:
    """Return whether an option names an argument of a class, such as ``--model.vocab_size``, or of a callback."""
    above = [".".join(path[:count]) for count in range(1, len(path))]
    return any(f"--{name}" in parser._option_string_actions for name in above if name != "trainer")


def _plain(value: str) -> Any:
    try:
        return read_yaml(value, value)
    except ValueError:
        return value


def _merge(settings: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping):
            inner = settings[name] = settings[name] if isinstance(settings.get(name), dict) else {}
            _merge(inner, value)
        else:
            settings[name] = value


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value at its place; an argument of a class goes into the ``init_args``."""
    # --model=MCoreGPT --model.vocab_size=8 becomes
    # {"model": {"class_path": "MCoreGPT", "init_args": {"vocab_size": 8}}}.
    place = settings
    for name in path[:-1]:
        if isinstance(place.get(name), str):
            place[name] = {"class_path": place[name]}
        place = place.setdefault(name, {}) if isinstance(place.get(name, {}), dict) else {}
        if "class_path" in place and "init_args" not in path and path[-1] not in _CLASS_KEYS:
            place = place.setdefault("init_args", {})
    place[path[-1]] = value


def _fault_at_the_top(settings: Mapping[str, Any], roots: Sequence[str]) -> str | None:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    kinds = {"model": LightningModule, "data": LightningDataModule, "optimizer": Optimizer, "lr_scheduler": LRScheduler}
    for name, value in settings.items():
        if name not in roots:
            return unknown_name("key", name, roots)
        fault = None
        if name == "trainer":
            fault = _fault_in_call(name, value, Trainer)
        elif name == "seed_everything":
            fault = _fault_in_value(name, value, bool | int | None)
        elif name == "ray":
            fault = _fault_in_value(name, value, RaySettings | None)
        elif name in _CLASSES and value is not None:
            fault = _fault_in_value(name, value, kinds[name])
        if fault:
            return fault
    return None if settings.get("model") else "model is not given; give its class, such as --model=MCoreGPT"


def _fault_in_call(path: str, given: Any, function: Any) -> str | None:
    """Return a sentence for a fault in the arguments of a class or function; None if there is no fault."""
    if not isinstance(given, Mapping):
        return f"{path}={given!r} is not a mapping; give its arguments by name"
    parameters = inspect.signature(function).parameters
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    # Without *args and **kwargs, whose names are not arguments
    known = [name for name, item in parameters.items() if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    hints = _hints(function)
    for name, value in given.items():
        if name not in known and not takes_any:
            return unknown_name(f"key of {path}", name, known)
        fault = _fault_in_value(f"{path}.{name}", value, hints.get(name, Any))
        if fault:
            return fault
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in given]
    # Not for optimizer and lr_scheduler: Lightning adds their first argument.
    if missing and isinstance(function, type) and not takes_any and path.partition(".")[0] not in _CLASSES[2:]:
        return f"{path} lacks {' and '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}"
    return None


def _fault_in_value(path: str, value: Any, hint: Any) -> str | None:
    if isinstance(value, list):
        # An item's own type is unknown, but a class in it, such as a callback, can be checked.
        faults = (_fault_in_value(f"{path}[{number}]", item, Any) for number, item in enumerate(value))
        found = next((fault for fault in faults if fault), None)
        if found:
            return found
    if isinstance(value, Mapping) and "class_path" in value:
        return _fault_in_class(path, value)
    kinds = _kinds(hint)
    dataclass = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    if isinstance(value, Mapping) and dataclass is not None:
        return _fault_in_call(path, value, dataclass)
    # A class is given as text or as class_path; jsonargparse checks other forms.
    if any(kind is Any or not _is_plain(kind) for kind in kinds) and str not in kinds:
        if isinstance(value, str) and path in _CLASSES:
            return _fault_in_class(path, {"class_path": value})
        return None
    if path == "trainer.precision" and (fault := fp8_as_precision(value)):
        return fault
    return None if accepts(hint, value) else f"{path}={value!r} does not fit; choose {choices_of(hint)}"


def fp8_as_precision(precision: Any) -> str | None:
    """Return a sentence that rejects FP8 as the name of ``trainer.precision``; None for other precisions."""
    if not isinstance(precision, str) or not precision.startswith(("fp8", "transformer-engine")):
        return None
    return (
        f"trainer.precision={precision!r} is not how FP8 is chosen here; leave it out, and set trainer.plugins:"
        " {class_path: MCorePrecision, init_args: {precision: bf16-mixed, fp8_recipe: delayed}}"
    )


def _fault_in_class(path: str, value: Mapping[str, Any]) -> str | None:
    for name in value:
        if name not in _CLASS_KEYS:
            return unknown_name(f"key of {path} next to class_path", name, _CLASS_KEYS)
    found = _find(path, str(value["class_path"]))
    if isinstance(found, str):
        return found
    return _fault_in_call(path, value.get("init_args") or {}, found)


def _find(path: str, class_path: str) -> Any:
    """Return a class or function by its path or short name; a sentence if it does not exist."""
    module, _, name = class_path.rpartition(".")
    if not module and name in lightning_mcore.__all__:  # imported or not
        return getattr(lightning_mcore, name)
    if not module:
        known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _subclasses()}
        found = {place: kind for place, kind in known.items() if kind.__name__ == name and "<locals>" not in place}
        if len(found) > 1:
            paths = " or ".join(sorted(found))
            return f"{path}: several classes are called {name!r}; give the path of one, such as {paths}"
        return next(
            iter(found.values()), f"{path}: {unknown_name('class', name, [k.__name__ for k in known.values()])}"
        )
    owner: Any = None
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        owner = importlib.import_module(module)
    if owner is None:  # a method of a class, such as lightning_mcore.MCoreGPT.from_pretrained
        above, _, class_name = module.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            owner = getattr(importlib.import_module(above), class_name)
    if owner is None:
        return f"{path}: module {module!r} of class_path {class_path!r} cannot be imported; give the path of a class"
    if not hasattr(owner, name):
        return f"{path}: {unknown_name(f'name in {module}', name, [key for key in dir(owner) if key[0] != '_'])}"
    return getattr(owner, name)


def _subclasses() -> Iterator[type]:
    """Yield the classes that have short names."""
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    left: list[type] = [Callback, LightningDataModule, LightningModule, Logger, LRScheduler, Optimizer, Strategy]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        yield kind


def _hints(function: Any) -> dict[str, Any]:
    constructor = "__init__"
    with contextlib.suppress(NameError, TypeError, AttributeError):
        return typing.get_type_hints(getattr(function, constructor) if isinstance(function, type) else function)
    return {}


def _kinds(hint: Any) -> list[Any]:
    """Return the types that a value may have."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [kind for argument in typing.get_args(hint) for kind in _kinds(argument)] if is_union else [hint]


def _is_plain(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return origin in (bool, int, float, str, list, tuple, dict, type(None), typing.Literal)


def on_one_line(message: str) -> str:
    """Return a jsonargparse message of several lines on one line, without its lists of types."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip(" -")]
    dull = ("Does not validate against", "Subtypes:", "Errors:", "Given value", "Expected a <class ")
    told = [line for line in lines if not line.startswith(dull)] or lines
    return " ".join(told).replace("Parser key ", "")
