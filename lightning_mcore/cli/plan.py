# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan``: show what a run will do on a number of devices, before anything runs.

::

    lightning-mcore plan run.yaml --devices 16
    lightning-mcore plan run.yaml --trainer.strategy.pipeline_model_parallel_size=4 --picture
    lightning-mcore plan run.yaml --devices 64 --suggest --memory 80GB
    lightning-mcore plan llama.yaml cutoff_len=8192 --devices 8 --json

The command reads every kind of file (``plan_files.py``), and asks the classes and Megatron's own config what they
refuse. It builds no model and opens no process group. If the run would be refused, the exit code is 2 and the errors
are listed: all that this package finds, and the first that Megatron's config finds. For a file that cannot be parsed,
only the first fault is shown.
"""

import json
import os
from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command import DONE, WRONG, CommandParser, run_command
from lightning_mcore.cli.plan_files import kind_of, model_of_files, read_document, settings_of_files
from lightning_mcore.config.run import RunSettings
from lightning_mcore.hf.source import is_unknown_on_hub
from lightning_mcore.planning.machines import MACHINES, Machine, machine_named, parse_memory
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.planning.report import report
from lightning_mcore.planning.suggest import suggest, suggestion_text

_BACKENDS = {"local": "local", "te": "transformer_engine"}
_DEVICES_OF_A_NODE = 8


def run(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code.

    Args:
        arguments: The words after ``lightning-mcore plan``.
    """
    parser = _parser()
    known, overrides = _split(parser, arguments)
    options = parser.read(known)
    return run_command(lambda: _plan(options, overrides))


def _parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        "Show what a run will be: ranks, batch, layers and memory of each stage, communication, FLOPs, warnings and "
        "errors. key=value or --key value after FILE changes the file. --config config.json gives the config of a "
        "model if the file has only its name on a hub.",
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="LightningCLI YAML, Hugging Face style arguments, or LLaMA-Factory's")
    add("--devices", type=int, metavar="N", help="devices of the whole run (default: those of the file)")
    add("--nodes", type=int, metavar="M", help="number of nodes (default: the file's, or one per 8 devices)")
    add("--model", metavar="PATH_OR_NAME", help="a Hugging Face model to plan for, instead of the file's")
    add("--seq-length", type=int, metavar="N", help="tokens of a row, instead of the file's")
    add("--backend", choices=sorted(_BACKENDS), help="layers to plan for (default: those of the file, te on GPUs)")
    add("--device", choices=sorted(MACHINES), help="device for times and memory (default: h100 if the run is on GPUs)")
    add("--memory", metavar="80GB", help="memory of a device, instead of that of --device")
    add("--json", action="store_true", help="print everything as JSON")
    add("--picture", action="store_true", help="draw the pipeline schedule")
    add("--suggest", action="store_true", help="list the layouts that fit, best first")
    return parser


def _split(parser: CommandParser, arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate the command's options and files from changes to a file: ``key=value``, ``--key value``, ``--key``."""
    takes = {name: action.nargs != 0 for name, action in parser._option_string_actions.items()}
    known: list[str] = []
    files: list[str] = []  # after all options, where argparse finds them
    overrides: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in takes:
            known.append(word)
            known += [words.pop(0)] if takes[name] and not equals and words else []
        elif word in ("--config", "-c"):
            continue
        elif name == "--config":
            files.append(value)
        elif name.startswith("--"):
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else "true"
            overrides.append((name[2:], value))
        elif equals and not os.path.isfile(word):
            overrides.append((name, value))
        else:
            files.append(word)
    return known + files, overrides


def _plan(options: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> int:
    files, folder = model_of_files(options["files"])
    if folder is not None and options["model"] is not None:
        raise ValueError(f"--model {options['model']} and the config.json in {folder} are two models; give one of them")
    settings = settings_of_files(files, overrides, folder or options["model"], options["seq_length"])
    devices, per_node = device_numbers(settings, options["devices"], options["nodes"])
    machine, memory = _machine(options, settings)
    backend = _BACKENDS[options["backend"]] if options["backend"] else None
    if options["suggest"]:
        assert machine is not None
        found = suggest(settings, devices, per_node, machine, memory, backend)
        shown = [layout.to_dict() for layout in found]
        kind = kind_of(read_document(files[0]), files[0])
        text = (
            json.dumps(shown, indent=2) if options["json"] else suggestion_text(found, machine, memory, devices, kind)
        )
        print(text)
        return DONE
    plan = make_plan(settings, devices, per_node, machine, memory, backend)
    if plan.fields is None and not options["json"]:
        _say_what_is_missing(settings)
    print(json.dumps(plan.to_dict(), indent=2) if options["json"] else report(plan, options["picture"]))
    return WRONG if plan.errors else DONE


def _say_what_is_missing(settings: RunSettings) -> None:
    """If the model is a name on the hub whose config is not here, say so first."""
    path = settings.model.get("path")
    if path is None:
        return
    if is_unknown_on_hub(path):
        print(
            f"{path} is a name on the Hugging Face hub whose config is not here, so nothing below includes the model; "
            "give its config.json with --config FILE"
        )


def device_numbers(settings: RunSettings, devices: int | None, nodes: int | None) -> tuple[int, int]:
    """Return the number of devices of the whole run and of one node.

    Args:
        settings: The run; ``trainer.devices`` and ``trainer.num_nodes`` are used if no number is given.
        devices: Devices of the whole run, from the command line.
        nodes: Number of nodes, from the command line.

    Raises:
        ValueError: The number of devices is unknown, or nodes do not divide it.
    """
    of_node, of_file = settings.trainer.get("devices"), settings.trainer.get("num_nodes")
    of_file = of_file if isinstance(of_file, int) and of_file > 0 else 1
    if isinstance(of_node, list):
        of_node = len(of_node)
    if isinstance(of_node, str) and of_node.isdigit():
        of_node = int(of_node)
    if devices is None:
        if not isinstance(of_node, int) or of_node < 1:
            raise ValueError(
                f"the number of devices is unknown: trainer.devices is {of_node!r}; give --devices N"
                if of_node is not None
                else "the number of devices is unknown; give --devices N"
            )
        total = of_node * (nodes or of_file)
        return total, of_node
    if devices < 1:
        raise ValueError(f"devices={devices} is too small; choose 1 or more")
    if nodes is None:
        same = isinstance(of_node, int) and of_node * of_file == devices
        per_node = of_node if same and isinstance(of_node, int) else min(devices, _DEVICES_OF_A_NODE)
        return devices, per_node
    if nodes < 1 or devices % nodes:
        raise ValueError(f"nodes={nodes} does not divide devices={devices}; give nodes of equal size")
    return devices, devices // nodes


def _machine(options: dict[str, Any], settings: RunSettings) -> tuple[Machine | None, float | None]:
    memory = parse_memory(options["memory"]) if options["memory"] else None
    name = options["device"]
    if name is None and settings.trainer.get("accelerator") == "cpu" and not options["suggest"]:
        return None, memory
    return machine_named(name or "h100"), memory
