# SPDX-License-Identifier: Apache-2.0
"""Find the kind of a file, and read the run that it describes.

=====================  ====================================================================
kind                   found by
=====================  ====================================================================
LightningCLI           the keys ``trainer``, ``model`` and ``data``
LLaMA-Factory          ``stage`` with ``dataset``, ``cutoff_len`` or ``finetuning_type``
Hugging Face style     the names of ``lightning_mcore.arguments`` (JSON or YAML)
=====================  ====================================================================

Words after the file (``key=value``, ``--key value``) change it, as they do when it runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.documents import read_text, read_yaml
from lightning_mcore.cli.lightning_file import COMMANDS, TOP_KEYS, refuse_unknown_option, settings_of_lightning
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.text import unknown_name
from lightning_mcore.planning.suggest import Kind

_OF_LLAMAFACTORY = {"stage", "dataset", "cutoff_len", "finetuning_type", "template", "dataset_dir", "neat_packing"}
_BESIDE_ARGUMENTS = ("model_name_or_path", "seq_length", "cutoff_len")
_OPTIONS = ("devices", "nodes", "model", "seq-length", "backend", "device", "memory", "json", "picture", "suggest")


def settings_of_files(
    paths: Sequence[str], overrides: Sequence[tuple[str, str]], model: str | None = None, seq_length: int | None = None
) -> RunSettings:
    """Return the run that files describe.

    Args:
        paths: The files; several LightningCLI files are merged, and a later one overrides an earlier one.
        overrides: Key and value of each change after the files, as text.
        model: A Hugging Face model to use instead of the file's.
        seq_length: Tokens of a row, instead of the file's.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: A part has the wrong kind.
        ValueError: A file is not YAML or does not describe a run, or a key is unknown.
    """
    documents = [read_document(path) for path in paths]
    kinds = {kind_of(document, path) for document, path in zip(documents, paths, strict=True)}
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(paths)} are files of different kinds; give files of one kind")
    kind = kinds.pop()
    if kind == "lightning":
        for key, _ in overrides:
            refuse_unknown_option(key, _OPTIONS)
        settings = settings_of_lightning(documents, paths, overrides, model)
    elif len(paths) > 1:
        raise ValueError(f"{' and '.join(paths)} are several files, and only LightningCLI files are merged; give one")
    elif kind == "llamafactory":
        from lightning_mcore.arguments.llamafactory.run import read_run

        texts = [f"{key}={value}" for key, value in overrides]
        texts += [f"model_name_or_path={model}"] if model is not None else []
        settings = read_run(paths[0], texts).settings()
    else:
        settings = _arguments(documents[0], overrides, model)
    if seq_length is None:
        return settings
    changed = {**settings.model, "seq_length": seq_length}
    return replace(settings, model=changed, data={**settings.data, "seq_length": seq_length})


def model_of_files(paths: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the files of a run, and the folder of the model whose ``config.json`` is among the paths, or None.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is not YAML, two are configs of models, or one has another name than ``config.json``.
    """
    configs = [path for path in paths if path.endswith(".json") and "model_type" in read_document(path)]
    if not configs:
        return list(paths), None
    if len(configs) > 1 or Path(configs[0]).name != "config.json":
        raise ValueError(f"{' and '.join(configs)} should be one config.json of a Hugging Face model; give that one")
    runs = [path for path in paths if path not in configs]
    if not runs:
        raise ValueError(f"{configs[0]} describes a model but no run; give the file of the run too")
    return runs, str(Path(configs[0]).parent)


def read_document(path: str) -> dict[str, Any]:
    """Return a YAML or JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is neither YAML nor JSON, or holds no keys.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a file; give a YAML or JSON file with the settings of a run")
    document = read_yaml(read_text(path), path)
    if not isinstance(document, dict) or not document:
        raise ValueError(f"{path} holds no keys; give a file with the settings of a run")
    return document


def kind_of(document: Mapping[str, Any], path: str) -> Kind:
    """Return the kind of a file.

    Raises:
        ValueError: The file is of no known kind.
    """
    keys = {str(key) for key in document}
    if {"trainer", "model", "data", *COMMANDS} & keys:
        return "lightning"
    if "stage" in keys or len(_OF_LLAMAFACTORY & keys) >= 2:
        return "llamafactory"
    known = argument_names()
    if keys & known:
        return "arguments"
    some = sorted(keys)[0]
    raise ValueError(f"{path} is not the file of a run: {unknown_name('key', some, {*known, *TOP_KEYS})}")


def argument_names() -> set[str]:
    """Return the names of Hugging Face style arguments."""
    from lightning_mcore.arguments import Seq2SeqTrainingArguments

    return {field.name for field in fields(Seq2SeqTrainingArguments)} | {"model_name_or_path"}


def _arguments(document: Mapping[str, Any], overrides: Sequence[tuple[str, str]], model: str | None) -> RunSettings:
    """Read a file of Hugging Face style arguments."""
    from lightning_mcore.arguments import Seq2SeqTrainingArguments, parse_arguments

    values = {**document, **{key.replace("-", "_"): read_yaml(text, f"{key}={text}") for key, text in overrides}}
    beside = {name: values.pop(name) for name in _BESIDE_ARGUMENTS if name in values}
    values.setdefault("output_dir", "outputs")
    (arguments,) = parse_arguments(values, Seq2SeqTrainingArguments)
    name = model if model is not None else beside.get("model_name_or_path")
    settings: RunSettings = arguments.settings(name, seq_length=beside.get("seq_length", beside.get("cutoff_len")))
    return settings
