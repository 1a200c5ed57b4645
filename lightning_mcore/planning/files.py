# SPDX-License-Identifier: Apache-2.0
"""Which front door a file came through, and the run that it describes.

=====================  ====================================================================
front door             told by
=====================  ====================================================================
LightningCLI           the keys ``trainer``, ``model`` and ``data``
LLaMA-Factory          ``stage`` with ``dataset``, ``cutoff_len`` or ``finetuning_type``
Hugging Face style     the names of ``lightning_mcore.arguments`` (JSON or YAML)
=====================  ====================================================================

What stands behind the file (``key=value``, ``--key value``) changes it, as it does when it runs.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.text import unknown_name
from lightning_mcore.planning.cli_settings import SUBCOMMANDS, TOP_KEYS, arguments_of, settings_of_cli

Door = Literal["lightning", "llamafactory", "arguments"]

_OF_LLAMAFACTORY = {"stage", "dataset", "cutoff_len", "finetuning_type", "template", "dataset_dir", "neat_packing"}
_BESIDE_ARGUMENTS = ("model_name_or_path", "seq_length", "cutoff_len")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with ``1e-4`` as a number, as jsonargparse and transformers read it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*([eE][-+]?\d+)|\d[\d_]*\.[\d_]*|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|nan))$"),
    list("-+0123456789."),
)


def settings_of_files(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], model: str | None = None, seq_length: int | None = None
) -> RunSettings:
    """Return the run that files describe.

    Args:
        paths: The files; several of LightningCLI are merged, the later one counting.
        overrides: Key and value of what stands behind them, as text.
        model: A Hugging Face model to use instead of the file's.
        seq_length: Tokens of a row, instead of the file's.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: A part has the wrong kind.
        ValueError: A file is no YAML, is of no front door, or a key is unknown.
    """
    documents = [read_document(path) for path in paths]
    doors = {door_of(document, path) for document, path in zip(documents, paths, strict=True)}
    if len(doors) > 1:
        raise ValueError(f"{' and '.join(paths)} are of different front doors; give files of one")
    door = doors.pop()
    if door == "lightning":
        settings = _lightning(documents, paths, overrides, model)
    elif len(paths) > 1:
        raise ValueError(f"{' and '.join(paths)} are two files, which LightningCLI alone merges; give one")
    elif door == "llamafactory":
        from lightning_mcore.arguments.llamafactory.run import read_run

        texts = [f"{key}={value}" for key, value in overrides]
        texts += [f"model_name_or_path={model}"] if model is not None else []
        settings = read_run(paths[0], texts).settings()
    else:
        settings = _arguments(documents[0], paths[0], overrides, model)
    if seq_length is None:
        return settings
    changed = {**settings.model, "seq_length": seq_length}
    return replace(settings, model=changed, data={**settings.data, "seq_length": seq_length})


def model_of_files(paths: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the files of a run, and the folder of the model whose ``config.json`` is among the paths, if one is.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no YAML, two are configs of models, or one has another name than ``config.json``.
    """
    configs = [path for path in paths if path.endswith(".json") and "model_type" in read_document(path)]
    if not configs:
        return list(paths), None
    if len(configs) > 1 or Path(configs[0]).name != "config.json":
        raise ValueError(f"{' and '.join(configs)} should be one config.json of a Hugging Face model; give that one")
    runs = [path for path in paths if path not in configs]
    if not runs:
        raise ValueError(f"{configs[0]} says what a model is and nothing of a run; give the file of the run too")
    return runs, str(Path(configs[0]).parent)


def read_document(path: str) -> dict[str, Any]:
    """Return a YAML or JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is neither, or holds no keys.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a YAML or JSON file with the settings of a run")
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}; mend it") from error
    if not isinstance(document, dict) or not document:
        raise ValueError(f"{path} holds no keys; give a file with the settings of a run")
    return document


def door_of(document: Mapping[str, Any], path: str) -> Door:
    """Return which front door a file is of.

    Raises:
        ValueError: None of them.
    """
    keys = {str(key) for key in document}
    if {"trainer", "model", "data", *SUBCOMMANDS} & keys:
        return "lightning"
    if "stage" in keys or len(_OF_LLAMAFACTORY & keys) >= 2:
        return "llamafactory"
    known = argument_names()
    if keys & known:
        return "arguments"
    some = sorted(keys)[0]
    raise ValueError(f"{path} is of no front door: {unknown_name('key', some, {*known, *TOP_KEYS})}")


def argument_names() -> set[str]:
    """Return the names of Hugging Face style arguments; transformers' own are read from its source."""
    from lightning_mcore.config.signatures import dataclass_fields

    homes = (
        ("lightning_mcore/arguments/parallel.py", "DistributingParallelArguments"),
        ("lightning_mcore/arguments/megatron.py", "MegatronArguments"),
        ("transformers/training_args.py", "TrainingArguments"),
    )
    return {name for owner in homes for name in dataclass_fields(owner)} | {"model_name_or_path"}


def _lightning(
    documents: Sequence[Mapping[str, Any]],
    paths: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    model: str | None,
) -> RunSettings:
    merged: dict[str, Any] = {}
    for document in documents:
        merged = _merged(merged, _with_class(document), _WHOLE)
    for key, text in overrides:
        top = key.partition(".")[0]
        if top not in (*TOP_KEYS, *SUBCOMMANDS):
            known = TOP_KEYS if "." in key else (*TOP_KEYS, *_OPTIONS)
            raise ValueError(unknown_name("option", top, known))
        changed = _with_class(_nested(merged, key.split("."), _value(key, text)))
        merged = _merged(merged, changed, {*key.split(".")[-1:]} & {*_WHOLE})
    settings = settings_of_cli(merged, " and ".join(paths))
    if model is None:
        return settings
    kept = {name: settings.model[name] for name in ("seq_length", "recipe") if name in settings.model}
    return replace(settings, model={**kept, "path": model})


def _value(key: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{key}={text} is no YAML: {' '.join(str(error).split())}; mend it") from error


_WHOLE = ("transformer", "lr_scheduler_kwargs")
_OPTIONS = ("devices", "nodes", "model", "seq-length", "backend", "device", "memory", "json", "picture", "suggest")


def _with_class(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file in which data and model that are a name alone are a class path."""
    named = {key: document[key] for key in ("data", "model") if isinstance(document.get(key), str)}
    return {**document, **{key: {"class_path": name} for key, name in named.items()}}


def _merged(first: Any, second: Any, whole: Collection[str]) -> Any:
    """Return two mappings as one, the second counting; another class keeps those arguments that it has too.

    Args:
        first: What stood there.
        second: What comes behind it.
        whole: Names whose mapping takes the place of the first one's, as jsonargparse does with arguments of type dict.
    """
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return second
    of_first, of_second = (str(part.get("class_path", "")).rpartition(".")[2] for part in (first, second))
    if of_first and of_second and of_first != of_second:
        known = arguments_of(of_second)
        first = {"init_args": {k: v for k, v in (first.get("init_args") or {}).items() if known is None or k in known}}
    joined = dict(first)
    for key, value in second.items():
        joined[key] = _merged(first[key], value, whole) if key in first and key not in whole else value
    return joined


def _nested(document: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return ``{a: {b: value}}`` of ``a.b``; ``init_args`` may be left out, as with jsonargparse."""
    key, rest = keys[0], keys[1:]
    inner = document.get(key) if isinstance(document, Mapping) else None
    if not rest and key.endswith("+"):  # adds to a list
        before = document.get(key[:-1]) if isinstance(document, Mapping) else None
        added = value if isinstance(value, list) else [value]
        return {key[:-1]: [*(before if isinstance(before, list) else [before] if before else []), *added]}
    if not rest:
        return {key: value}
    if isinstance(inner, str) and rest[0] not in ("class_path", "init_args"):  # a class by its name
        return {key: {"class_path": inner, "init_args": _nested(None, rest, value)}}
    if isinstance(inner, Mapping) and "class_path" in inner and rest[0] not in ("class_path", "init_args"):
        return {key: {"init_args": _nested(inner.get("init_args"), rest, value)}}
    return {key: _nested(inner, rest, value)}


def _arguments(
    document: Mapping[str, Any], path: str, overrides: Sequence[tuple[str, str]], model: str | None
) -> RunSettings:
    """Read a file of Hugging Face style arguments."""
    from lightning_mcore.arguments import Seq2SeqTrainingArguments, parse_arguments

    values = {**document, **{key.replace("-", "_"): _value(key, text) for key, text in overrides}}
    beside = {name: values.pop(name) for name in _BESIDE_ARGUMENTS if name in values}
    values.setdefault("output_dir", "outputs")
    (arguments,) = parse_arguments(values, Seq2SeqTrainingArguments)
    name = model if model is not None else beside.get("model_name_or_path")
    settings: RunSettings = arguments.settings(name, seq_length=beside.get("seq_length", beside.get("cutoff_len")))
    return settings
