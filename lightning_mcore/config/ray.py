# SPDX-License-Identifier: Apache-2.0
"""A launch on Ray as plain data, and the numbers of workers that a layout allows.

Ray starts, restarts and resizes the workers (``ray/launch.py``). This file computes what is known before: which
numbers of workers a run can have, and how many batches each number accumulates, so that a step always learns from the
same number of samples.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.text import json_object
from lightning_mcore.config.value_checks import choices, require_choice, require_size

ON_RAY = "LIGHTNING_MCORE_ON_RAY"
"""Environment variable that is set in the workers of a launch."""

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True)
class RaySettings:
    """How Ray Train starts a run.

    Args:
        num_workers: Ranks of the run; for an elastic run, a pair of the smallest and the largest number.
        resources_per_worker: What each worker takes, such as ``{"CPU": 4, "GPU": 1}``; None for one CPU, and one GPU if
            the run uses GPUs.
        storage_path: A folder that all machines share, or a URL, where Ray stores the run; None for a folder ``ray``
            among the run's own files.
        name: Name of the run in ``storage_path``; a run of the same name continues there. None for a new name.
        max_failures: How often the run restarts from its last checkpoint after a worker fails; -1 for no limit.
        save_every_n_steps: Optimizer steps between the checkpoints that a restarted run continues from; None for one at
            the end of each epoch, or for none at all if ``max_failures`` is 0 and the number of workers is fixed.
        placement_strategy: How Ray places the workers on machines; ``PACK`` fills one machine after the other.
        init_kwargs: Arguments of ``ray.init``, as a dict or as JSON text.
        master_addr: Address where the ranks meet, on the machine of rank 0; None for Ray's choice.
        master_port: Port at that address; None for a free one.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    num_workers: int | tuple[int, int]
    resources_per_worker: dict[str, float] | None = None
    storage_path: str | None = None
    name: str | None = None
    max_failures: int = 0
    save_every_n_steps: int | None = None
    placement_strategy: Placement = "PACK"
    init_kwargs: dict[str, Any] | str | None = field(default=None)
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for size in self.num_workers if isinstance(self.num_workers, tuple) else (self.num_workers,):
            require_size("num_workers", size)
        if isinstance(self.num_workers, tuple) and (len(self.num_workers) != 2 or self.min_workers > self.max_workers):
            raise ValueError(f"num_workers={self.num_workers} is not a range; give the least and the most workers")
        require_size("max_failures", self.max_failures, at_least=-1)
        if self.save_every_n_steps is not None:
            require_size("save_every_n_steps", self.save_every_n_steps)
        require_choice("placement_strategy", self.placement_strategy, Placement)
        if self.master_port is not None:
            require_size("master_port", self.master_port)
            if self.master_port > 65535:
                raise ValueError(f"master_port={self.master_port} is not a port; choose 1 to 65535")
        for name, amount in (self.resources_per_worker or {}).items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0:
                raise ValueError(f"resources_per_worker has {name}={amount!r}; give a number of 0 or more")
        object.__setattr__(self, "init_kwargs", read_init_kwargs("init_kwargs", self.init_kwargs))

    @property
    def min_workers(self) -> int:
        """The smallest number of workers."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the run saves checkpoints to continue from."""
        return self.max_failures != 0 or self.min_workers < self.max_workers or self.save_every_n_steps is not None

    def with_storage_in(self, folder: str) -> "RaySettings":
        """Return the settings with ``storage_path`` filled in; ``folder`` holds the run's own files."""
        path = os.path.join(folder, "ray") if self.storage_path is None else self.storage_path
        return replace(self, storage_path=path if "://" in path else os.path.abspath(path))


def read_init_kwargs(name: str, given: Any) -> dict[str, Any]:
    """Return the arguments of ``ray.init``, from a mapping or JSON text; None means no arguments."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    if not isinstance(given, str):
        raise TypeError(f"{name}={given!r} is of type {type(given).__name__}; give a dict or JSON text")
    return json_object(f"{name}={given!r:.500}", given)


def elastic_sizes(layout: ParallelLayout, least: int, most: int, accumulate_grad_batches: int = 1) -> dict[int, int]:
    """Return the numbers of workers that a run can have, and ``accumulate_grad_batches`` for each.

    A number is allowed if the layout divides it and if a step can learn from the same number of batches as with the
    largest number: with fewer copies of the model, each copy accumulates more batches.

    Args:
        layout: The parallel layout.
        least: The smallest number of workers.
        most: The largest number of workers.
        accumulate_grad_batches: Batches of an optimizer step on each data-parallel rank, with the largest allowed
            number of workers.

    Returns:
        ``accumulate_grad_batches`` by number of workers, ascending; never empty.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is too small, or no number in the range is allowed.
    """
    require_size("least", least)
    require_size("most", most, at_least=least)
    require_size("accumulate_grad_batches", accumulate_grad_batches)
    worlds = [world for world in range(least, most + 1) if _is_accepted(layout.validate_world, world)]
    if not worlds:
        given = f"num_workers={least}" if least == most else f"num_workers=({least}, {most})"
        # The smallest world that fits the layout; all others are multiples of it.
        unit = next(world for world in range(1, 2**31) if _is_accepted(layout.validate_world, world))
        near = [size for size in (least // unit * unit, (most // unit + 1) * unit) if size]
        what = "is not a" if least == most else "contains no"
        raise ValueError(
            f"{given} {what} multiple of {unit}, the ranks of {layout.describe(unit)}; choose {choices(near)}"
        )
    # TP=2, 2 to 8 workers, accumulation 2: 8 workers are 4 copies with 2 batches each, 8 in all. 4 workers accumulate
    # 4, and 2 workers 8. 6 workers are 3 copies, which cannot share 8 batches: {2: 8, 4: 4, 8: 2}.
    batches = accumulate_grad_batches * layout.data_parallel_size(worlds[-1])
    sizes = {}
    for world in worlds:
        accumulated, rest = divmod(batches, layout.data_parallel_size(world))
        if world == worlds[-1] or (rest == 0 and _is_accepted(layout.validate_microbatches, accumulated)):
            sizes[world] = accumulated
    return sizes


def _is_accepted(check: Callable[[int], None], number: int) -> bool:
    try:
        check(number)
    except ValueError:
        return False
    return True


def largest_size(sizes: Collection[int], available: int) -> int:
    """Return the largest allowed number of workers that there is room for; 0 if there is none."""
    return max((size for size in sizes if size <= available), default=0)


def room(machines: Collection[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """Return how many workers the machines have room for, by their resources.

    8 GPUs with 64 CPUs and 4 GPUs with 16 CPUs have room for 8 + 2 workers of ``{"CPU": 8, "GPU": 1}``.
    """
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    if not wanted:
        return 2**31  # workers without needs have room everywhere
    return sum(min(int(machine.get(name, 0) // amount) for name, amount in wanted.items()) for machine in machines)


def check_room(num_workers: int, machines: Collection[Mapping[str, float]], needs: Mapping[str, float]) -> None:
    """Raise ValueError for more workers than the machines have room for, because Ray would wait for more room."""
    found = room(machines, needs)
    if found < num_workers:
        each = ", ".join(f"{name} {amount:g}" for name, amount in needs.items() if amount)
        count = f"{len(machines)} machine{'' if len(machines) == 1 else 's'}"
        raise ValueError(
            f"num_workers={num_workers} is more than Ray has room for: {count} can hold {found} workers of {each};"
            " lower it, add machines, or change resources_per_worker"
        )
