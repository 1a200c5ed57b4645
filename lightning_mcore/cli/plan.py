# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan``: show what a run will do on a number of devices, before anything runs.

::

    lightning-mcore plan run.yaml --devices 16
    lightning-mcore plan run.yaml --trainer.strategy.pipeline_model_parallel_size=4 --picture
    lightning-mcore plan run.yaml --devices 64 --suggest --memory 80GB
    lightning-mcore plan llama.yaml cutoff_len=8192 --devices 8 --json
    lightning-mcore plan --model_name_or_path models/qwen3 --stage sft --dataset identity ... --devices 8

The command builds one layer of each kind, without memory, and opens no process group. It lists every error that this
package finds, and the first one that Megatron's config finds; the exit code is then 2. For a file that cannot be
parsed, it shows only the first fault.
:func:`kind_of` recognises a file:

=====================  ====================================================================
kind of file           found by
=====================  ====================================================================
LightningCLI           the keys ``trainer``, ``model`` and ``data``
LLaMA-Factory          ``stage`` with ``dataset``, ``cutoff_len`` or ``finetuning_type``
Hugging Face style     the names of ``lightning_mcore.arguments`` (JSON or YAML)
=====================  ====================================================================

Words after the file (``key=value``, ``--key value``) change it, as they do when it runs. A line of flags without a file
is read as ``lightning-mcore llamafactory`` reads it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.documents import read_text, read_yaml
from lightning_mcore.arguments.llamafactory.rules import refuse_v1
from lightning_mcore.cli.command import DONE, TRAINING, WRONG, CommandParser, find_modules_here, run_command
from lightning_mcore.cli.lightning_file import TOP_KEYS, refuse_unknown_option, settings_of_lightning
from lightning_mcore.cli.quick_checks import require_settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import elastic_sizes
from lightning_mcore.config.run import RunSettings, number_of_devices
from lightning_mcore.config.text import counted, unknown_name
from lightning_mcore.hf.source import is_unknown_on_hub, seeing_name, sees_images
from lightning_mcore.planning.machines import MACHINES, Machine, machine_named, parse_memory
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.planning.report import report
from lightning_mcore.planning.suggest import Kind, suggest, suggestion_text

_BACKENDS = {"local": "local", "te": "transformer_engine"}
_DEVICES_OF_A_NODE = 8
_SILENT_SECONDS = 3.0


def run(arguments: Sequence[str]) -> int:
    """Run the command on the words after ``lightning-mcore plan``, and return the exit code."""
    find_modules_here()
    parser = _parser()
    own, words = parser.split(arguments)
    options = parser.read(own)
    return run_command(lambda: _plan(options, words, parser))


def add_run_options(parser: CommandParser) -> None:
    """Add the options that say which run it is, as :func:`read_run` reads them, and ``--json``."""
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="LightningCLI YAML, Hugging Face style arguments, or LLaMA-Factory's")
    add("--devices", type=int, metavar="N", help="devices in the whole run (default: the file's)")
    add("--nodes", type=int, metavar="M", help="number of nodes (default: the file's, or one per 8 devices)")
    add("--model", metavar="PATH_OR_NAME", help="Hugging Face model (default: the file's)")
    add("--seq-length", type=int, metavar="N", help="tokens per row (default: the file's)")
    add("--image-tokens", type=int, metavar="N", help="image tokens per row; adds the cost of the vision tower")
    add("--json", action="store_true", help="print everything as JSON")


def _parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        "Show a run before it starts: ranks, batch, layers and memory of each stage, communication, FLOPs, warnings "
        "and errors. key=value or --key value after FILE overrides a setting of the file. Without FILE, --key value "
        "sets a key of a LLaMA-Factory file. --config config.json is the config of a model that has only a name on a "
        "hub.",
    )
    add_run_options(parser)
    add = parser.add_argument
    add("--backend", choices=sorted(_BACKENDS), help="layers to plan for (default: the file's, te on GPUs)")
    add("--device", choices=sorted(MACHINES), help="device for times and memory (default: h100 if the run is on GPUs)")
    add("--memory", metavar="80GB", help="memory per device (default: that of --device)")
    add("--picture", action="store_true", help="draw the pipeline schedule")
    add("--suggest", action="store_true", help="list the layouts that fit, best first")
    return parser


def _with_bare_files(words: Sequence[str]) -> list[str]:
    """Return the words with ``--config FILE`` written as ``FILE``; ValueError if the file is missing."""
    bare, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in ("--config", "-c"):
            bare.append(word)
        elif equals:
            bare.append(value)
        elif rest:
            bare.append(rest.pop(0))
        else:
            raise ValueError(f"{word} needs a file; give --config FILE")
    return bare


def _files_and_changes(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the files, and the changes to them: ``key=value``, ``--key value`` or ``--key``."""
    files: list[str] = []
    changes: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            changes.append((name[2:], value))
        elif equals and not os.path.isfile(word):
            changes.append((name, value))
        else:
            files.append(word)
    return files, changes


def read_run(
    options: Mapping[str, Any], words: Sequence[str], parser: CommandParser
) -> tuple[RunSettings, Kind, int, int]:
    """Return a command line's run, its kind, and its number of devices in all and in a node."""
    words = _with_bare_files(words)
    named, changes = _files_and_changes(words)
    files, folder = model_of_files(named)
    if folder is not None and options["model"] is not None:
        raise ValueError(f"--model {options['model']} and the config.json in {folder} are two models; give one of them")
    if not files and not changes:
        raise ValueError(
            f"{named[0]} describes a model but no run; give the file of the run too"
            if named
            else "no FILE is given; give the file of a run, or the keys of LLaMA-Factory as flags: --key value"
        )
    model = folder or options["model"]
    if files:
        kind = kind_of(read_document(files[0]), files[0])
        settings = settings_of_files(files, changes, model, options["seq_length"], parser)
    else:
        kind = "llamafactory"
        flags = [word for word in words if word not in named]
        settings = settings_of_flags(flags, model, options["seq_length"], parser)
    if options["image_tokens"] is not None:
        # A class in a LightningCLI file, and the datasets of LLaMA-Factory's, say whether the tower is read
        says = kind == "llamafactory" or (kind == "lightning" and model is None)
        settings = replace(settings if says else _with_tower(settings), image_tokens=options["image_tokens"])
    return settings, kind, *device_numbers(settings, options["devices"], options["nodes"])


def _with_tower(settings: RunSettings) -> RunSettings:
    """Return a run whose Hugging Face model is read with its vision tower, if it may be read either way."""
    path, family = settings.model.get("path"), settings.model.get("family")
    if path is None or sees_images(path, family) is not False or (seeing := seeing_name(path, family)) == family:
        return settings
    return replace(settings, model={**settings.model, "family": seeing})


def _plan(options: dict[str, Any], words: Sequence[str], parser: CommandParser) -> int:
    settings, kind, devices, per_node = read_run(options, words, parser)
    settings, elastic_fault = _with_sizes(settings)
    machine, memory = _machine(options, settings)
    backend = _BACKENDS[options["backend"]] if options["backend"] else None
    if options["suggest"]:
        # _machine returns one whenever suggestions are asked for.
        assert machine is not None
        found = suggest(settings, devices, per_node, machine, memory, backend, progress=_progress())
        shown = [asdict(layout) for layout in found]
        text = (
            json.dumps(shown, indent=2) if options["json"] else suggestion_text(found, machine, memory, devices, kind)
        )
        print(text)
        return DONE
    plan = make_plan(settings, devices, per_node, machine, memory, backend)
    # make_plan may have found the same fault of the layout.
    plan = replace(plan, errors=tuple(dict.fromkeys([*plan.errors, *elastic_fault])))
    if plan.fields is None and not options["json"]:
        _say_what_is_missing(settings)
    print(json.dumps(plan.to_dict(), indent=2) if options["json"] else report(plan, options["picture"]))
    return WRONG if plan.errors else DONE


def _with_sizes(settings: RunSettings) -> tuple[RunSettings, list[str]]:
    """Return the settings with a note about the worker counts of an elastic run on Ray, and the fault of such a run."""
    ray = settings.ray
    if ray is None:
        return settings, []
    layout = {
        field.name: settings.strategy[field.name] for field in fields(ParallelLayout) if field.name in settings.strategy
    }
    accumulated = settings.trainer.get("accumulate_grad_batches") or 1
    try:
        sizes = elastic_sizes(ParallelLayout(**layout), ray.min_workers, ray.max_workers, accumulated)
    except (TypeError, ValueError) as error:
        return settings, [str(error)]
    shown = ", ".join(f"{size} (accumulate_grad_batches={batches})" for size, batches in sizes.items())
    note = f"workers that Ray starts, with the same global batch: {shown}"
    return replace(settings, notes=(*settings.notes, note)), []


def _say_what_is_missing(settings: RunSettings) -> None:
    """Print a line if the model is a name on the hub whose config is not here."""
    path = settings.model.get("path")
    if path is None:
        return
    if is_unknown_on_hub(path):
        print(
            f"{path} is a name on the Hugging Face hub whose config is not here, so nothing below includes the model; "
            "give its config.json with --config FILE"
        )


def device_numbers(settings: RunSettings, devices: int | None, nodes: int | None) -> tuple[int, int]:
    """Return the number of devices in the whole run and in one node.

    The command line's numbers come first, then Ray's workers, then ``trainer.devices`` and ``trainer.num_nodes``. With
    24 devices and no nodes given, a node has 8. Raises ValueError if the number of devices is unknown, or nodes do not
    divide it.
    """
    given, of_file = settings.trainer.get("devices"), settings.trainer.get("num_nodes")
    of_file = of_file if isinstance(of_file, int) and of_file > 0 else 1
    of_node = number_of_devices(given)
    if devices is None and settings.ray is not None:
        devices = settings.ray.max_workers
    if devices is None:
        if of_node is None or of_node < 1:
            raise ValueError(
                f"the number of devices is unknown: trainer.devices is {given!r}; give --devices N"
                if given is not None
                else "the number of devices is unknown; give --devices N"
            )
        total = of_node * (nodes or of_file)
        return total, of_node
    if devices < 1:
        raise ValueError(f"devices={devices} is too small; choose 1 or more")
    if nodes is None:
        same = of_node is not None and of_node * of_file == devices
        per_node = of_node if same and of_node is not None else min(devices, _DEVICES_OF_A_NODE)
        return devices, per_node
    if nodes < 1 or devices % nodes:
        raise ValueError(f"nodes={nodes} does not divide devices={devices}; give nodes of equal size")
    return devices, devices // nodes


def _progress() -> Callable[[int, int], None]:
    """Return what says every few seconds how far the search is."""
    begun = said = time.monotonic()

    def progress(tried: int, fitting: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SILENT_SECONDS:
            said = now
            print(f"{now - begun:5.0f} s  {counted(tried, 'layout')} tried, {fitting} fit", file=sys.stderr)

    return progress


def _machine(options: dict[str, Any], settings: RunSettings) -> tuple[Machine | None, float | None]:
    memory = parse_memory(options["memory"]) if options["memory"] else None
    name = options["device"]
    # A run on a CPU has no times and no device memory, but suggestions need both.
    if name is None and settings.trainer.get("accelerator") == "cpu" and not options["suggest"]:
        return None, memory
    return machine_named(name or "h100"), memory


# Two of these keys mark a LLaMA-Factory file that does not name its stage.
_LLAMAFACTORY_KEYS = {"stage", "dataset", "cutoff_len", "finetuning_type", "template", "dataset_dir", "neat_packing"}
_EXTRA_KEYS = ("model_name_or_path", "seq_length", "cutoff_len")


def settings_of_files(
    paths: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    model: str | None = None,
    seq_length: int | None = None,
    parser: CommandParser | None = None,
) -> RunSettings:
    """Return the run of files, of which later ones override; ``model`` and ``seq_length`` replace theirs."""
    documents = [read_document(path) for path in paths]
    kinds = {kind_of(document, path) for document, path in zip(documents, paths, strict=True)}
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(paths)} are files of different kinds; give files of one kind")
    kind = kinds.pop()
    if kind == "lightning":
        own = [option.removeprefix("--") for option in (parser or _parser()).options]
        for key, _ in overrides:
            refuse_unknown_option(key, own)
        settings = settings_of_lightning(documents, paths, overrides, model)
    elif len(paths) > 1:
        raise ValueError(f"{' and '.join(paths)} are several files, and only LightningCLI files are merged; give one")
    elif kind == "llamafactory":
        settings = _factory_settings(paths[0], [f"{key}={value}" for key, value in overrides], model)
    else:
        settings = _arguments(documents[0], overrides, model)
    return _with_length(settings, seq_length)


def settings_of_flags(
    words: Sequence[str],
    model: str | None = None,
    seq_length: int | None = None,
    parser: CommandParser | None = None,
) -> RunSettings:
    """Return the run of LLaMA-Factory flags; ``model`` and ``seq_length`` replace the flags' own."""
    from lightning_mcore.arguments.llamafactory.flags import read_words

    file, changes = read_words(words, (parser or _parser()).options)
    return _with_length(_factory_settings(file, changes, model), seq_length)


def _factory_settings(path: str | None, changes: list[str], model: str | None) -> RunSettings:
    """Return the run of a LLaMA-Factory file and its changes (``key=value``), or of the changes alone."""
    from lightning_mcore.arguments.llamafactory.run import read_run

    # Last, so that it replaces the file's and the command line's.
    run = read_run(path, [*changes, *([] if model is None else [f"model_name_or_path={model}"])])
    if model is None:  # --config may give a lone config.json, which comes without a tokenizer
        run.check_tokenizer()
    return run.settings()


def _with_length(settings: RunSettings, seq_length: int | None) -> RunSettings:
    if seq_length is None:
        return settings
    model, data = ({**given, "seq_length": seq_length} for given in (settings.model, settings.data))
    return replace(settings, model=model, data=data)


def model_of_files(paths: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the files of a run, and the folder of the model whose ``config.json`` is among the paths, or None."""
    configs = [path for path in paths if path.endswith(".json") and "model_type" in read_document(path)]
    if not configs:
        return list(paths), None
    if len(configs) > 1 or Path(configs[0]).name != "config.json":
        raise ValueError(f"{' and '.join(configs)} should be one config.json of a Hugging Face model; give that one")
    return [path for path in paths if path not in configs], str(Path(configs[0]).parent)


def read_document(path: str) -> dict[str, Any]:
    """Return the keys and values of a YAML or JSON file; ValueError if it holds none."""
    require_settings(path)
    document = read_yaml(read_text(path), path)
    if not isinstance(document, dict) or not document:
        raise ValueError(f"{path} holds no keys; give a file with the settings of a run")
    return document


def kind_of(document: Mapping[str, Any], path: str) -> Kind:
    """Return the kind of a file; ValueError if it is of no known kind."""
    refuse_v1(document, path)
    keys = {str(key) for key in document}
    if {"trainer", "model", "data", *TRAINING} & keys:
        return "lightning"
    if "stage" in keys or len(_LLAMAFACTORY_KEYS & keys) >= 2:
        return "llamafactory"
    if "actor_train" in keys:
        raise ValueError(
            f"{path} is a pipeline file of ROLL, which is not read; write a LightningCLI file, or a LLaMA-Factory file"
            " with stage: dpo, pref_beta and dpo_label_smoothing"
        )
    known = argument_names()
    if keys & known:
        return "arguments"
    some = sorted(keys)[0]
    raise ValueError(f"{path} is not the file of a run: {unknown_name('key', some, {*known, *TOP_KEYS})}")


def argument_names() -> set[str]:
    """Return the names of Hugging Face style arguments."""
    from lightning_mcore.arguments import RayArguments, Seq2SeqTrainingArguments

    named = {field.name for kind in (Seq2SeqTrainingArguments, RayArguments) for field in fields(kind)}
    return named | {"model_name_or_path"}


def _arguments(document: Mapping[str, Any], overrides: Sequence[tuple[str, str]], model: str | None) -> RunSettings:
    """Read a file of Hugging Face style arguments."""
    from lightning_mcore.arguments import RayArguments, Seq2SeqTrainingArguments, parse_arguments

    values = {**document, **{key.replace("-", "_"): read_yaml(text, f"{key}={text}") for key, text in overrides}}
    extra = {name: values.pop(name) for name in _EXTRA_KEYS if name in values}
    # Required when the run starts, but plan writes nothing there.
    values.setdefault("output_dir", "outputs")
    arguments, ray = parse_arguments(values, Seq2SeqTrainingArguments, RayArguments)
    name = model if model is not None else extra.get("model_name_or_path")
    settings: RunSettings = arguments.settings(name, seq_length=extra.get("seq_length", extra.get("cutoff_len")))
    return replace(settings, ray=ray.ray_settings() if ray.use_ray else None)
