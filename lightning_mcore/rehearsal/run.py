# SPDX-License-Identifier: Apache-2.0
"""A rehearsal: a run's path on GPUs, played rank by rank on a machine without one.

::

    from lightning_mcore.rehearsal import rehearse


    def run():
        trainer = pl.Trainer(accelerator="gpu", devices=8, strategy=MCoreStrategy(tensor_model_parallel_size=2))
        return trainer, MyModule(), DataLoader(...)


    if __name__ == "__main__":
        print(rehearse(run))
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_mcore.planning.machines import machine_named
from lightning_mcore.rehearsal.processes import Failure, Job, run_jobs
from lightning_mcore.rehearsal.rank import Build, RankReport
from lightning_mcore.rehearsal.report import rehearsal_text


@dataclass(frozen=True)
class Rehearsal:
    """What chosen ranks of a run do.

    Args:
        world_size: Ranks of the run.
        layout: The parallel sizes, such as ``tp2 pp2 cp1 dp2``.
        ranks: The ranks that were played.
        seconds: How long the rehearsal took.
    """

    world_size: int
    layout: str
    ranks: tuple[RankReport, ...]
    seconds: float

    def __str__(self) -> str:
        return rehearsal_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)


def rehearse(
    build: Build,
    ranks: Sequence[int] | None = None,
    devices_per_node: int = 8,
    memory: float | None = None,
    progress: Callable[[int, str], None] | None = None,
    assume: Mapping[str, float] | None = None,
    device: str = "h100",
) -> Rehearsal:
    """Play ranks of a run on fake GPUs: two optimizer steps, a validation batch, and the state of a save.

    Args:
        build: Returns a Trainer with ``MCoreStrategy`` and ``accelerator="gpu"``, a module, and its data: a data
            module, or a tuple of loaders as in ``Trainer.fit``. It runs in processes of its own, so it must be
            importable; in a script, call ``rehearse`` under ``if __name__ == "__main__"``.
        ranks: The ranks to play; None for the first, middle and last pipeline stage.
        devices_per_node: GPUs that a node seems to have.
        memory: Bytes that a GPU seems to have; None for those of ``device``.
        progress: Called with a rank and what it begins.
        assume: What a line of the module reads from the GPU, by ``"file.py:line"``, or how many elements it selects;
            other lines read 1, and may not select.
        device: What GPU it seems to be: ``"a100"``, ``"h100"``, ``"h200"`` or ``"b200"``.

    Raises:
        ValueError: A setting of the run is wrong, a rank is outside the world, the data is too short, or a line of
            ``assume`` reads nothing.
        RuntimeError: There is no compiler, or the run does something that fake tensors cannot do.
    """
    begun = time.monotonic()
    machine = machine_named(device)
    machine = replace(machine, memory=machine.memory if memory is None else memory)
    job = Job(build, None if ranks is None else tuple(ranks), devices_per_node, machine, dict(assume or {}))
    [found] = run_jobs([job], progress or (lambda rank, what: None))
    if isinstance(found, Failure):
        kind = ValueError if found.is_wrong_input else RuntimeError
        error = kind(found.sentence)
        error.add_note(found.trace)
        raise error
    world = found.world
    return Rehearsal(world.size, world.layout.describe(world.size), found.ranks, time.monotonic() - begun)
