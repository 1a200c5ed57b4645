# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: the largest number of Ray workers that fits both the cluster and the layout."""

import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision

from lightning_mcore.config.ray import check_room, largest_size

_LOSS_IS_KNOWN = 30.0  # seconds after which Ray's health checks have noticed that a machine is lost


class ElasticTorchTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """A ``TorchTrainer`` that adapts its number of workers to the machines, and uses only admissible numbers.

    Ray alone starts as many workers as fit. This class starts the largest admissible number of them::

        sizes = elastic_sizes(ParallelLayout(tensor_model_parallel_size=2), least=2, most=8)
        ElasticTorchTrainer(train, sizes=sizes, scaling_config=ScalingConfig(num_workers=(2, 8))).fit()

    and ``train`` gives its trainer ``accumulate_grad_batches=sizes[ray.train.get_context().get_world_size()]``.

    Args:
        train_loop_per_worker: The function that each worker calls.
        sizes: The admissible numbers of workers, as ``elastic_sizes`` returns them.
        scaling_config: Ray's config of the workers.
        train_loop_config: The argument of the function.
        torch_config: Ray's config of the process group.
        run_config: Ray's config of storage and failures.

    Raises:
        ValueError: No admissible number lies in the range of ``num_workers``, or there is no room for the smallest.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        sizes: Collection[int],
        scaling_config: Any,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: Any = None,
        run_config: Any = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
        )
        scaling = self.scaling_config
        self._sizes = [size for size in sizes if scaling.min_workers <= size <= scaling.max_workers]
        if not self._sizes:
            raise ValueError(
                f"num_workers={scaling.num_workers} contains none of the possible sizes; include one of {[*sizes]}"
            )
        needs = {"CPU": scaling.num_cpus_per_worker, "GPU": scaling.num_gpus_per_worker}
        check_room(min(self._sizes), machines(), needs | scaling.additional_resources_per_worker)

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        if self.scaling_config.elasticity_enabled:
            options["scaling_policy"] = _AdmissibleSizes(self.scaling_config, self._sizes)
        return super()._initialize_and_run_controller(**options)


class _AdmissibleSizes(ElasticScalingPolicy):  # type: ignore[misc]
    """Ray's elastic policy with the admissible sizes only.

    Source: ``ElasticScalingPolicy._count_possible_workers`` (Ray 2.60), which rounds down to whole slices for TPUs.
    """

    def __init__(self, scaling_config: Any, sizes: Collection[int]) -> None:
        super().__init__(scaling_config)
        self._sizes = sizes
        self._may_start = 0.0  # by time.monotonic()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        # After a failure, wait until Ray has noticed a lost machine: a start that counts on it would wait for minutes.
        self._may_start = time.monotonic() + _LOSS_IS_KNOWN
        return super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)

    def make_decision_for_non_running_worker_group(self) -> Any:
        if time.monotonic() < self._may_start:
            return NoopDecision()
        return super().make_decision_for_non_running_worker_group()

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        there = {node: each for node, each in reserved_resources.items() if node in alive}
        return largest_size(self._sizes, super()._count_possible_workers(there))


def machines() -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster, by name."""
    if not ray.is_initialized():
        ray.init()
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
