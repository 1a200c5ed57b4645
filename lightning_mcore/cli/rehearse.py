# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore rehearse``: play ranks of a run on fake GPUs, on a machine without one.

::

    lightning-mcore rehearse run.yaml --devices 16
    lightning-mcore rehearse run.yaml --devices 1024 --rank 512 --json
    lightning-mcore rehearse llama.yaml cutoff_len=8192 --devices 8

Files are the same as for ``lightning-mcore plan``, and words after them change them in the same way. Model, strategy
and optimizer are the real ones; rows of tokens are made up. Each rank's memory is shown next to ``plan``'s figure.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from lightning_mcore.cli.command import DONE, CommandParser, find_modules_here, run_command
from lightning_mcore.cli.plan import add_run_options, read_run
from lightning_mcore.planning.machines import MACHINES, machine_named, parse_memory
from lightning_mcore.planning.model import backend_of
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.rehearsal import rehearse
from lightning_mcore.rehearsal.report import rehearsal_text
from lightning_mcore.rehearsal.settings import build_of, layers_of

_LOCAL = (
    "assumed, here and in the column plan: the torch backend, which transformer_impl='auto' takes where"
    " TransformerEngine is not installed. The command plan assumes TransformerEngine's layers, which need other memory;"
    " to rehearse those, install lightning-mcore[te-cpu]"
)


def run(arguments: Sequence[str]) -> int:
    """Run the command on the words after ``lightning-mcore rehearse``, and return the exit code."""
    find_modules_here()
    parser = _parser()
    own, words = parser.split(arguments)
    options = parser.read(own)
    return run_command(lambda: _rehearse(options, words, parser))


def _parser() -> CommandParser:
    parser = CommandParser(
        "rehearse",
        "Simulate ranks of a GPU run without a GPU: two optimizer steps, a validation batch and the state of a save."
        " The model is real, but its tensors have no values. Shows peak memory and what uses it, collectives, and where"
        " a step waits for the GPU. key=value or --key value after FILE overrides a setting of the file.",
    )
    add_run_options(parser)
    add = parser.add_argument
    add("--rank", type=int, metavar="R", help="rank to simulate (default: one in the first, middle and last stage)")
    add("--device", choices=sorted(MACHINES), default="h100", help="device to simulate (default: h100)")
    add("--memory", metavar="80GB", help="memory per device (default: that of --device)")
    add(
        "--assume",
        action="append",
        default=[],
        metavar="FILE:LINE=VALUE",
        help="value that a line reads from the GPU, or the number of elements it selects (default: 1); repeatable",
    )
    return parser


def assumed_values(given: Sequence[str]) -> dict[str, float]:
    """Return what lines read, by ``file:line``, from words such as ``net.py:12=0.5`` or ``net.py:12=False``."""
    values = {}
    for word in given:
        place, _, value = word.rpartition("=")
        file, _, line = place.rpartition(":")
        try:
            number = {"true": 1.0, "false": 0.0}.get(value.lower())
            values[place] = float(value) if number is None else number
        except ValueError:
            file = ""
        if not file or not line.isdigit():
            raise ValueError(f"--assume {word} is not FILE:LINE=VALUE; give a number for a line, such as net.py:12=0.5")
    return values


def _rehearse(options: dict[str, Any], words: Sequence[str], parser: CommandParser) -> int:
    begun = time.monotonic()
    settings, _, devices, per_node = read_run(options, words, parser)
    machine = machine_named(options["device"])
    memory = parse_memory(options["memory"]) if options["memory"] else machine.memory

    def progress(rank: int, what: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  rank {rank}: {what}", file=sys.stderr)

    assume = assumed_values(options["assume"])
    (build, layout), layers = build_of(settings, devices, per_node), layers_of(settings.model)
    if options["rank"] is not None:
        layout.coordinates(options["rank"], devices)  # raises for a rank outside the world
    ranks = None if options["rank"] is None else [options["rank"]]
    plan = make_plan(settings, devices, per_node, machine, memory, layers)
    depth = layout.pipeline_model_parallel_size * (2 if layout.is_interleaved else 1)
    if plan.batch is not None and plan.batch.num_microbatches > 4 * depth:
        print(
            f"plays {plan.batch.num_microbatches} microbatches a step; with {depth}, by a smaller"
            " accumulate_grad_batches, the peak memory is the same and the rehearsal shorter",
            file=sys.stderr,
        )
    found = rehearse(build, ranks, per_node, memory, progress, assume, options["device"])
    planned = {stage.stage: stage.memory.total for stage in plan.stages}
    if options["json"]:
        shown = {**found.to_dict(), "planned_bytes": {str(stage): total for stage, total in planned.items()}}
        print(json.dumps(shown, indent=2))
    else:
        is_local = layers == "local" and backend_of(settings.model, "cuda") != "local"
        print(rehearsal_text(found, planned, _LOCAL if is_local else ""))
    return DONE
