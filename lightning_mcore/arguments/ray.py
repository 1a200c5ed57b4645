# SPDX-License-Identifier: Apache-2.0
"""``RayArguments``: LLaMA-Factory's options for a launch on Ray, and our options for failures and elastic runs.

::

    def train(words):
        args, ray = parse_arguments(words, TrainingArguments, RayArguments)
        args.trainer().fit(args.model(...), args.data(...), ckpt_path=ray.checkpoint or args.ckpt_path)


    args, ray = parse_arguments(sys.argv[1:], TrainingArguments, RayArguments)
    ray.launch(args, train, sys.argv[1:])

Ray starts the workers if ``ray_num_workers`` is above 1 or the environment has ``USE_RAY=1``. In a worker,
``TrainingArguments.trainer`` takes devices and ranks from Ray. ``ray/launch.py`` launches.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_mcore.arguments.fields import check_types, option
from lightning_mcore.arguments.megatron_rules import given_layout
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import ON_RAY, Placement, RaySettings, elastic_sizes, read_init_kwargs

if TYPE_CHECKING:
    from lightning_mcore.arguments.training import TrainingArguments

_YES = {"1", "true", "y", "yes", "on"}


@dataclasses.dataclass
class RayArguments:
    """How Ray starts workers; each field's help text explains it.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range or not JSON, or has no effect without Ray's workers.
    """

    ray_num_workers: int = option("Workers that Ray starts, each a rank; 1 for a launch without Ray.", default=1)
    ray_init_kwargs: dict[str, Any] | str | None = option("Arguments of ray.init: a JSON object.")
    master_addr: str | None = option("Address at which the ranks meet, on the machine of rank 0.")
    master_port: str | None = option("Port at which the ranks meet.")
    ray_min_workers: int | None = option("Smallest number of workers of an elastic run. Default: ray_num_workers.")
    ray_max_failures: int = option("How often a run restarts after a worker has failed; -1 for no limit.", default=0)
    ray_save_steps: int | None = option("Steps between checkpoints for restarts. Default: one for each epoch.")
    ray_run_name: str | None = option("Name of the run; a run of the same name continues.")
    ray_storage_path: str | None = option("Shared folder or URL of Ray's files. Default: ray in the output folder.")
    resources_per_worker: dict[str, Any] | str | None = option(
        "Resources of each worker: a JSON object. Default: a GPU and a CPU."
    )
    placement_strategy: Placement = option("How Ray places workers on machines.", default="PACK")

    def __post_init__(self) -> None:
        """Check the values."""
        port: Any = self.master_port
        if isinstance(port, int) and not isinstance(port, bool):  # as YAML reads it
            self.master_port = str(port)
        self._check_types()
        self.ray_init_kwargs = read_init_kwargs("ray_init_kwargs", self.ray_init_kwargs)
        self.resources_per_worker = read_init_kwargs("resources_per_worker", self.resources_per_worker)
        if self.master_port is not None and not self.master_port.isdigit():
            raise ValueError(f"master_port={self.master_port!r} is not a port; choose 1 to 65535")
        if self.ray_num_workers < 1:
            raise ValueError(f"ray_num_workers={self.ray_num_workers} is too small; choose 1 or more")
        least = self.ray_min_workers
        if least is not None and not 1 <= least <= self.ray_num_workers:
            raise ValueError(
                f"ray_min_workers={least} is not between 1 and ray_num_workers={self.ray_num_workers}; choose 1 to"
                f" {self.ray_num_workers}"
            )
        self._check_unused()
        # RaySettings checks the other values.
        self.ray_settings()

    def _check_types(self) -> None:
        check_types(self)

    def _check_unused(self) -> None:
        """Raise for options without effect unless Ray is used; :meth:`environment` returns the address even then."""
        if self.use_ray:
            return
        for field in dataclasses.fields(RayArguments):
            value = getattr(self, field.name)
            if field.name not in ("master_addr", "master_port") and value and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no effect without Ray's workers; give ray_num_workers or USE_RAY=1, or"
                    " leave it out"
                )

    def refuse_address(self) -> None:
        """Raise ValueError for an address without Ray, for callers that do not use :meth:`environment`."""
        for name in ("master_addr", "master_port"):
            if getattr(self, name) is not None and not self.use_ray:
                raise ValueError(
                    f"{name}: {getattr(self, name)!r} has no effect without Ray's workers; give it to torchrun, or give"
                    " ray_num_workers"
                )

    @property
    def use_ray(self) -> bool:
        """Whether Ray starts the workers."""
        return self.ray_num_workers > 1 or os.environ.get("USE_RAY", "0").lower() in _YES

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint to resume from, in a worker that Ray has restarted; None anywhere else."""
        if ON_RAY not in os.environ:
            return None
        from lightning_mcore.ray import checkpoint_to_resume

        return checkpoint_to_resume()

    def ray_settings(self) -> RaySettings:
        """Return the launch as plain data."""
        least, most = self.ray_min_workers, self.ray_num_workers
        resources: Any = self.resources_per_worker
        return RaySettings(
            num_workers=most if least in (None, most) else (least, most),
            resources_per_worker=resources or None,
            storage_path=self.ray_storage_path,
            name=self.ray_run_name,
            max_failures=self.ray_max_failures,
            save_every_n_steps=self.ray_save_steps,
            placement_strategy=self.placement_strategy,
            init_kwargs=self.ray_init_kwargs,
            master_addr=self.master_addr,
            master_port=None if self.master_port is None else int(self.master_port),
        )

    def launch(self, arguments: "TrainingArguments", function: Callable[..., Any], *given: Any) -> Any:
        """Call a function on each of Ray's workers, or in this process if Ray does not start the workers.

        Args:
            arguments: The training arguments; ``gradient_accumulation_steps`` applies to the largest possible number of
                workers.
            function: The function, which each worker must be able to import.
            given: Its arguments.

        Returns:
            What it returned on rank 0.

        Raises:
            ModuleNotFoundError: Ray is not installed.
            ValueError: The layout does not divide the workers, or Ray has no room for them.
        """
        if not self.use_ray:
            return function(*given)
        settings, layout = self.ray_settings(), ParallelLayout(**given_layout(arguments))
        # Allowed numbers of workers, each with the accumulation that keeps the global batch: with 2 to 4 workers, no
        # model parallelism and an accumulation of 4, these are {2: 8, 4: 4}.
        sizes = elastic_sizes(layout, settings.min_workers, settings.max_workers, arguments.gradient_accumulation_steps)
        from lightning_mcore.ray.launch import launch

        settings = settings.with_storage_in(str(arguments.output_dir))
        return launch(settings, sizes, function, *given, gpus=False if arguments.use_cpu else None)

    def environment(self) -> dict[str, str]:
        """Return the address and port of rank 0's machine as environment variables of torch.distributed."""
        given = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
        return {name: value for name, value in given.items() if value is not None}
