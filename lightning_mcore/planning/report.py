# SPDX-License-Identifier: Apache-2.0
"""A plan as text: tables with rich, readable at 100 columns, on a terminal and piped.

Values that are the same for all stages appear once; long pipelines show their first, fullest and last stages. Errors
come last, where they are seen first.
"""

from collections.abc import Iterator, Sequence
from textwrap import fill, wrap

from lightning_mcore.config.text import counted
from lightning_mcore.planning.communication import AxisVolume
from lightning_mcore.planning.grid import ranks_text
from lightning_mcore.planning.plan import GIB, Plan, StagePlan
from lightning_mcore.planning.rules import OWN
from lightning_mcore.planning.schedule import schedule_picture

__all__ = ["GIB", "report", "table_text"]

WIDTH = 100
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
    """Return the text of a plan; ModuleNotFoundError without the package rich."""
    lines = [*_heading("run"), *_lines(_run(plan)), *_groups(plan), *_stages(plan), *_traffic(plan), *_work(plan)]
    if picture and plan.timeline is not None:
        lines += [*_heading("pipeline schedule"), schedule_picture(plan.timeline, WIDTH)]
    sections = {"assumed": plan.assumptions, "warnings": plan.warnings}
    for title, sentences in {**sections, "errors: the run would be refused": plan.errors}.items():
        if sentences:
            lines += [*_heading(title), *(_indented(f"- {sentence}") for sentence in sentences)]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def _indented(text: str) -> str:
    return fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _heading(title: str) -> list[str]:
    return ["", title.upper()]


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one table; the first column and those whose names begin with a space are aligned left."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'the tables of lightning-mcore plan need the package rich; pip install "lightning-mcore[cli]", or give'
            " --json",
            name="rich",
        ) from error
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or column.startswith(" ") else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=WIDTH, no_color=True, highlight=False, emoji=False, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join([*_heading(title), *(line.rstrip() for line in capture.get().splitlines())])


def _lines(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Return names and texts side by side."""
    return [
        f"  {'' if place else name:<14}{part}"
        for name, text in lines
        for place, part in enumerate(wrap(text, WIDTH - 16))
    ]


def _run(plan: Plan) -> list[tuple[str, str]]:
    lines = [("devices", _devices(plan)), ("precision", f"{plan.precision}, {_LAYERS.get(plan.backend, plan.backend)}")]
    if plan.parameters is not None:
        total, active, trained = plan.parameters.total, plan.parameters.active, plan.parameters.trained
        of_token = "" if total == active else f"; {count(active)} of them for one token"
        of_adapters = "" if trained == total else f"; {count(trained)} trained"
        lines.append(("parameters", f"{count(total)}{of_token}{of_adapters}"))
    if plan.layout is not None:
        fits = plan.grid is not None
        lines.append(("layout", plan.layout.describe(plan.devices) if fits else "does not fit (see errors)"))
    batch, timeline, fullest = plan.batch, plan.timeline, plan.fullest
    if batch is not None:
        lines.append(("global batch", batch.sentence))
    if batch is not None and batch.seq_length:
        tokens = f"{counted(batch.rows, 'row')} x {batch.seq_length:,} = {batch.tokens:,} tokens a step"
        lines.append(("", tokens))
    if timeline is not None and timeline.num_stages > 1:
        kind = "1F1B" if timeline.num_chunks == 1 else f"interleaved, {timeline.num_chunks} chunks a stage"
        lines.append(("pipeline", f"{kind}; bubble {timeline.bubble:.1%} of a step"))
    if fullest is not None:
        limit = f" of {size(plan.memory_limit)}" if plan.memory_limit is not None else ""
        without = " without activations" if plan.backend == OWN else ""
        when = ", while it copies the weights at startup" if fullest.memory.setup > fullest.memory.step else ""
        where = f"on each rank of stage {fullest.stage}{without}{when}"
        lines.append(("memory", f"{size(fullest.memory.total)}{limit} {where}"))
    return lines


def _devices(plan: Plan) -> str:
    nodes = -(-plan.devices // plan.devices_per_node)
    kind = plan.machine.name.upper() if plan.machine is not None else plan.device_type
    where = f" on {nodes:,} nodes of {plan.devices_per_node}" if nodes > 1 else ""
    return f"{plan.devices:,} x {kind}{where}"


def _groups(plan: Plan) -> Iterator[str]:
    grid, has_experts = plan.grid, plan.fields is not None and plan.fields.num_moe_experts
    names = [name for name in _GROUPS if has_experts or name not in _OF_EXPERTS]
    sizes = {name: size for name in names if grid is not None and (size := grid.size(name)) > 1}
    if grid is not None and sizes:
        rows = [
            [name, f"{size:,}", f"{grid.world_size // size:,}", ranks_text(grid.ranks(name, 0))]
            for name, size in sizes.items()
        ]
        yield table_text("process groups", ["group", "ranks", "groups", " the group of rank 0"], rows)


def _stages(plan: Plan) -> Iterator[str]:
    fullest = plan.fullest
    if fullest is None:
        return
    unit, name = (GIB, "GiB") if fullest.memory.total >= GIB else (2**20, "MiB")
    rows = []
    for stage in _shown(plan.stages, fullest):
        memory = stage.memory
        parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)
        sizes = ["-" if plan.backend == OWN and part == 0 else f"{part / unit:.2f}" for part in parts]
        mark = " *" if stage is fullest and len(plan.stages) > 1 else ""
        rows.append([f"{stage.stage}{mark}", _layers(stage), count(stage.parameters.total), *sizes])
    columns = ["stage", " layers", "parameters", "weights", "gradients", "optimizer", "activations", "total"]
    yield table_text(f"one rank of each stage (memory in {name})", columns, rows)
    if on_host := max(stage.memory.host for stage in plan.stages):
        yield f"  and up to {size(on_host)} of optimizer state in the memory of the host"


def _shown(stages: Sequence[StagePlan], fullest: StagePlan) -> list[StagePlan]:
    picked = {0, 1, 2, fullest.stage, len(stages) - 2, len(stages) - 1}
    return [stage for stage in stages if len(stages) <= _MOST_ROWS or stage.stage in picked]


def _layers(stage: StagePlan) -> str:
    texts = []
    for chunk in stage.chunks:
        parts = ["embedding"] if chunk.embedding else []
        parts += ["-".join(map(str, dict.fromkeys((chunk.layers[0], chunk.layers[-1]))))] if chunk.layers else []
        parts += [f"{chunk.mtp} MTP"] if chunk.mtp else []
        parts += ["output"] if chunk.output else []
        texts.append(" ".join(parts) or "none")
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "...", texts[-1]])


def _traffic(plan: Plan) -> Iterator[str]:
    busiest: dict[str, AxisVolume] = {}
    for volume in (volume for stage in plan.stages for volume in stage.traffic):
        if volume.axis not in busiest or volume.sent > busiest[volume.axis].sent:
            busiest[volume.axis] = volume
    if busiest:
        rows = [
            [v.axis, f"{v.group_size:,}", size(v.sent), "in each microbatch" if v.each_microbatch else "once", v.what]
            for v in busiest.values()
        ]
        columns = ["axis", "ranks", "sent a step", " when", " what"]
        yield table_text("communication of one rank of the busiest stage", columns, rows)


def _work(plan: Plan) -> list[str]:
    work, time, batch = plan.work, plan.time, plan.batch
    if work is None or batch is None:
        return []
    again = work.hardware_flops / work.model_flops - 1
    lines = [("model", f"{flops(work.model_flops)} a step, {flops(work.flops_per_token)} a token")]
    if again > 0.001:
        lines.append(("recomputed", f"{again:.1%} on top: {flops(work.hardware_flops)} a step"))
    if work.tower_flops:
        lines.append(("vision tower", f"{flops(work.tower_flops)} of it, on the first stage"))
    lines.append(("one rank", f"{flops(max(work.hardware_flops_of_rank))} a step, on the stage that has most"))
    name = plan.machine.name.upper() if plan.machine is not None else ""
    if time is not None and time.total < _SHORTEST:
        lines.append(("estimate", f"none on {name}: launching kernels takes longest in so small a step"))
    elif time is not None:
        of_parts = (
            f"compute {seconds(time.compute)}, communication {seconds(time.each_microbatch + time.once)},"
            f" bubble {seconds(time.bubble)}"
        )
        rate = work.model_flops / time.total / plan.devices / 1e12
        tokens = f"{float(f'{batch.tokens / time.total:.2g}'):,.0f} tokens/s"
        lines.append(("estimate", f"{seconds(time.total)} a step on {name}: {of_parts}"))
        lines.append(("", f"about {tokens}, {rate:.0f} TFLOP/s of each device"))
    return [*_heading("work"), *_lines(lines)]


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
