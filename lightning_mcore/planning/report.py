# SPDX-License-Identifier: Apache-2.0
"""A plan as text: tables with rich, readable at 100 columns, on a terminal and piped.

Values that are the same for all stages appear once; long pipelines show their first, fullest and last stages. Errors
come last, where they are seen first.
"""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from lightning_mcore.config.text import counted
from lightning_mcore.planning.communication import AxisVolume
from lightning_mcore.planning.grid import ranks_text
from lightning_mcore.planning.plan import Plan, StagePlan
from lightning_mcore.planning.rules import OWN
from lightning_mcore.planning.schedule import schedule_picture

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
GIB = 2**30
_MOST_ROWS = 16
_SHORTEST = 1e-3  # seconds; the time of a shorter step is not estimated
_LAYERS = {
    "local": "Megatron's layers in PyTorch",
    "transformer_engine": "TransformerEngine's layers",
    OWN: "its own layers",
}
_OF_EXPERTS = ("etp", "ep", "edp")
_GROUPS = ("tp", "cp", "dp", "pp", "dp_cp", "etp", "ep", "edp")


def report(plan: Plan, picture: bool = False) -> str:
    """Return the text of a plan.

    Raises ModuleNotFoundError without the package rich.
    """
    console = _console()
    with console.capture() as capture:
        _run(console, plan)
        _groups(console, plan)
        _stages(console, plan)
        _traffic(console, plan)
        _work(console, plan)
        if picture and plan.timeline is not None:
            _heading(console, "pipeline schedule")
            console.print(schedule_picture(plan.timeline, WIDTH), markup=False, highlight=False)
        for title, sentences in (
            ("assumed", plan.assumptions),
            ("warnings", plan.warnings),
            ("errors: the run would be refused", plan.errors),
        ):
            _sentences(console, title, sentences)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _console() -> "Console":
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'the tables of lightning-mcore plan need the package rich; pip install "lightning-mcore[cli]", or give'
            " --json",
            name="rich",
        ) from error
    return Console(width=WIDTH, no_color=True, highlight=False, emoji=False, force_terminal=False)


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one table, with the first column aligned left and the others right."""
    console = _console()
    with console.capture() as capture:
        _table(console, title, columns, rows)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _table(console: "Console", title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    _heading(console, title)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or column.startswith(" ") else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _heading(console: "Console", title: str) -> None:
    console.print(f"\n{title.upper()}", markup=False)


def _sentences(console: "Console", title: str, sentences: Sequence[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if not sentences:
        return
    _heading(console, title)
    for sentence in sentences:
        console.print(Padding(Text(f"- {sentence}"), (0, 0, 0, 2)))


def _run(console: "Console", plan: Plan) -> None:
    lines = [("devices", _devices(plan)), ("precision", f"{plan.precision}, {_LAYERS.get(plan.backend, plan.backend)}")]
    if plan.parameters is not None:
        total, active = plan.parameters.total, plan.parameters.active
        of_token = "" if total == active else f"; {count(active)} of them for one token"
        trained = "" if plan.parameters.trained == total else f"; {count(plan.parameters.trained)} trained"
        lines.append(("parameters", f"{count(total)}{of_token}{trained}"))
    if plan.layout is not None:
        fits = plan.grid is not None
        lines.append(("layout", plan.layout.describe(plan.devices) if fits else "does not fit (see errors)"))
    if plan.batch is not None:
        lines.append(("global batch", plan.batch.sentence))
    if plan.batch is not None and plan.batch.seq_length:
        lines.append(
            ("", f"{counted(plan.batch.rows, 'row')} x {plan.batch.seq_length:,} = {plan.batch.tokens:,} tokens a step")
        )
    if plan.timeline is not None and plan.timeline.num_stages > 1:
        kind = "1F1B" if plan.timeline.num_chunks == 1 else f"interleaved, {plan.timeline.num_chunks} chunks a stage"
        lines.append(("pipeline", f"{kind}; bubble {plan.timeline.bubble:.1%} of a step"))
    fullest = plan.fullest
    if fullest is not None:
        limit = f" of {size(plan.memory_limit)}" if plan.memory_limit is not None else ""
        without = " without activations" if plan.backend == OWN else ""
        lines.append(("memory", f"{size(fullest.memory.total)}{limit} on each rank of stage {fullest.stage}{without}"))
    _heading(console, "run")
    _lines(console, lines)


def _lines(console: "Console", lines: Sequence[tuple[str, str]]) -> None:
    for name, text in lines:
        parts = wrap(text, WIDTH - 16)
        console.print(f"  {name:<14}{parts[0]}", markup=False)
        for part in parts[1:]:
            console.print(f"  {'':<14}{part}", markup=False)


def _devices(plan: Plan) -> str:
    nodes = -(-plan.devices // plan.devices_per_node)
    kind = plan.machine.name.upper() if plan.machine is not None else plan.device_type
    where = f" on {nodes:,} nodes of {plan.devices_per_node}" if nodes > 1 else ""
    return f"{plan.devices:,} x {kind}{where}"


def _groups(console: "Console", plan: Plan) -> None:
    grid = plan.grid
    if grid is None:
        return
    rows = [
        [name, f"{grid.size(name):,}", f"{grid.world_size // grid.size(name):,}", ranks_text(grid.ranks(name, 0))]
        for name in _GROUPS
        if grid.size(name) > 1 and (name not in _OF_EXPERTS or (plan.fields and plan.fields.num_moe_experts))
    ]
    if rows:
        _table(console, "process groups", ["group", "ranks", "groups", " the group of rank 0"], rows)


def _stages(console: "Console", plan: Plan) -> None:
    if not plan.stages:
        return
    fullest = plan.fullest
    most = max(stage.memory.total for stage in plan.stages)
    unit, name = (GIB, "GiB") if most >= GIB else (2**20, "MiB")
    rows = []
    for stage in _shown(plan.stages):
        memory = stage.memory
        mark = " *" if stage is fullest and len(plan.stages) > 1 else ""
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
        rows.append(
            [
                f"{stage.stage}{mark}",
                _layers(stage),
                count(stage.parameters.total),
                *["-" if plan.backend == OWN and part == 0 else f"{part / unit:.2f}" for part in parts],
            ]
        )
    columns = ["stage", " layers", "parameters", "weights", "gradients", "optimizer", "activations", "total"]
    _table(console, f"one rank of each stage (memory in {name})", columns, rows)
    if any(stage.memory.host for stage in plan.stages):
        most = max(stage.memory.host for stage in plan.stages)
        console.print(f"  and up to {size(most)} of optimizer state in the memory of the host", markup=False)


def _shown(stages: Sequence[StagePlan]) -> list[StagePlan]:
    if len(stages) <= _MOST_ROWS:
        return list(stages)
    fullest = max(stages, key=lambda stage: stage.memory.total)
    picked = {0, 1, 2, fullest.stage, len(stages) - 2, len(stages) - 1}
    return [stage for stage in stages if stage.stage in picked]


def _layers(stage: StagePlan) -> str:
    texts = []
    for chunk in stage.chunks:
        parts = ["embedding"] if chunk.embedding else []
        if chunk.layers:
            first, last = chunk.layers[0], chunk.layers[-1]
            parts.append(str(first) if first == last else f"{first}-{last}")
        parts += [f"{chunk.mtp} MTP"] if chunk.mtp else []
        parts += ["output"] if chunk.output else []
        texts.append(" ".join(parts) or "none")
    if len(texts) > 4:
        texts = [*texts[:2], "...", texts[-1]]
    return ", ".join(texts)


def _traffic(console: "Console", plan: Plan) -> None:
    busiest: dict[str, tuple[AxisVolume, int]] = {}
    for stage in plan.stages:
        for volume in stage.traffic:
            if volume.axis not in busiest or volume.sent > busiest[volume.axis][0].sent:
                busiest[volume.axis] = (volume, stage.stage)
    if not busiest:
        return
    rows = [
        [v.axis, f"{v.group_size:,}", size(v.sent), "in each microbatch" if v.each_microbatch else "once", v.what]
        for v, _ in busiest.values()
    ]
    columns = ["axis", "ranks", "sent a step", " when", " what"]
    _table(console, "communication of one rank of the busiest stage", columns, rows)


def _work(console: "Console", plan: Plan) -> None:
    work = plan.work
    if work is None or plan.batch is None:
        return
    again = work.hardware_flops / work.model_flops - 1
    lines = [
        ("model", f"{flops(work.model_flops)} a step, {flops(work.flops_per_token)} a token"),
        ("one rank", f"{flops(max(work.hardware_flops_of_rank))} a step, on the stage that has most"),
    ]
    if work.tower_flops:
        lines.insert(1, ("vision tower", f"{flops(work.tower_flops)} of it, on the first stage"))
    if again > 0.001:
        lines.insert(1, ("recomputed", f"{again:.1%} on top: {flops(work.hardware_flops)} a step"))
    if plan.time is not None and plan.machine is not None and plan.time.total < _SHORTEST:
        lines.append(
            ("estimate", f"none on {plan.machine.name.upper()}: launching kernels takes longest in so small a step")
        )
    elif plan.time is not None and plan.machine is not None:
        time, tokens = plan.time, plan.batch.tokens
        lines.append(
            (
                "estimate",
                f"{seconds(time.total)} a step on {plan.machine.name.upper()}: compute {seconds(time.compute)},"
                f" communication {seconds(time.each_microbatch + time.once)}, bubble {seconds(time.bubble)}",
            )
        )
        rate = work.model_flops / time.total / plan.devices / 1e12
        lines.append(
            ("", f"about {float(f'{tokens / time.total:.2g}'):,.0f} tokens/s, {rate:.0f} TFLOP/s of each device")
        )
    _heading(console, "work")
    _lines(console, lines)


def seconds(number: float) -> str:
    """Return a time, such as ``15.86 s`` or ``42.1 ms``."""
    milliseconds = 1000 * number
    if milliseconds >= 999.5:
        return f"{number:.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms" if number else "0 s"


def count(number: float) -> str:
    """Return a number of parameters, such as ``8.03 B``."""
    return _in_units(number, 1000, ("K", "M", "B", "T"))


def size(number: float | None) -> str:
    """Return bytes, such as ``1.50 GiB``."""
    return "unknown" if number is None else _in_units(number, 1024, ("Ki", "Mi", "Gi", "Ti"), "B")


def flops(number: float) -> str:
    """Return operations, such as ``2.10 PFLOP``."""
    return _in_units(number, 1000, ("K", "M", "G", "T", "P", "E"), "FLOP")


def _in_units(number: float, step: int, prefixes: Sequence[str], unit: str = "") -> str:
    power = sum(number >= step**place for place in range(1, len(prefixes) + 1))
    if not power:
        return f"{number:.0f} {unit}".rstrip()
    return f"{number / step**power:,.2f} {prefixes[power - 1]}{unit}"
