# SPDX-License-Identifier: Apache-2.0
"""A launch on Ray, for the commands and for arguments in the style of Hugging Face.

:func:`launch` starts the workers and calls a function on each; that function gets the arguments of its trainer from
:func:`worker_arguments`.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.util.queue import Queue

from lightning_mcore.config.ray import ON_RAY, RaySettings
from lightning_mcore.ray.elastic import ElasticTorchTrainer, machines
from lightning_mcore.ray.output import printed_here, sent
from lightning_mcore.ray.prepare import WorkerError, check_storage
from lightning_mcore.ray.report import RayReport

_SMALL = {"include_dashboard": False, "object_store_memory": 100 * 2**20}  # bytes; a run stores nothing in it
_NEW_CLUSTER_OPTIONS = {"num_cpus", "num_gpus", "resources", "labels", "dashboard_host", "dashboard_port", *_SMALL}


@dataclass
class _Worker:
    """What a worker of :func:`launch` knows about the run."""

    settings: RaySettings
    sizes: Mapping[int, int]
    folder: str
    output: Queue


_worker: _Worker | None = None


def worker_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``Trainer``'s arguments for a worker: ``given`` with Ray's ranks, plugins and callbacks."""
    assert _worker is not None
    context, settings = ray.train.get_context(), _worker.settings
    world, here = context.get_world_size(), context.get_local_world_size()
    lists = {name: given.get(name) or [] for name in ("plugins", "callbacks")}
    plugins, callbacks = ([*value] if isinstance(value, list | tuple) else [value] for value in lists.values())
    if settings.saves_checkpoints:
        callbacks.append(RayReport(every_n_train_steps=settings.save_every_n_steps))
    elastic = {"accumulate_grad_batches": _worker.sizes[world]} if settings.min_workers < settings.max_workers else {}
    return {
        **given,
        "accelerator": ray.train.torch.get_device().type,
        "devices": here,
        # 3 workers here and 1 elsewhere do not multiply to 4; planned_world_size() then asks the environment.
        "num_nodes": world // here if world % here == 0 else 1,
        "plugins": [*plugins, RayLightningEnvironment()],
        "callbacks": callbacks,
        **elastic,
    }


def launch(
    settings: RaySettings,
    sizes: Mapping[int, int],
    function: Callable[..., Any],
    *arguments: Any,
    gpus: bool | None = None,
) -> Any:
    """Call a function on each of Ray's workers, and return rank 0's result.

    Joins the cluster that ``RAY_ADDRESS`` names or that runs on this machine; without one, starts Ray here for the run,
    without a dashboard and with a small object store. What rank 0 prints is printed here. ``sizes`` has the admissible
    numbers of workers with ``accumulate_grad_batches`` for each, as from ``elastic_sizes``. Every machine must be able
    to import the function. Without ``gpus``, each worker takes a GPU if the cluster has any.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "torchrun or srun started this process, and Ray would start the ranks again; use only one of them"
        )
    # Workers run in the folder of this process, and print to stdout instead of Ray's log.
    os.environ |= {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")  # there is room, but imports may be slow
    with _cluster(settings):
        gpus = any(machine.get("GPU") for machine in machines()) if gpus is None else gpus
        scaling = ray.train.ScalingConfig(
            num_workers=settings.num_workers if settings.min_workers < settings.max_workers else settings.max_workers,
            use_gpu=gpus,
            resources_per_worker=settings.resources_per_worker,
            placement_strategy=settings.placement_strategy,
        )
        with printed_here() as output:
            worker = _Worker(settings, dict(sizes), os.getcwd(), output)
            trainer = ElasticTorchTrainer(
                _call,
                sizes=sizes,
                train_loop_config={"worker": worker, "function": function, "arguments": arguments},
                torch_config=_RendezvousConfig(
                    "cpu:gloo,cuda:nccl" if gpus else "gloo", addr=settings.master_addr, port=settings.master_port
                ),
                scaling_config=scaling,
                run_config=ray.train.RunConfig(
                    name=settings.name,
                    storage_path=settings.storage_path,
                    failure_config=ray.train.FailureConfig(max_failures=settings.max_failures),
                    checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
                ),
            )
            try:
                return trainer.fit().return_value
            except ray.train.TrainingFailedError as error:
                refusals = [cause for cause in _causes(error) if isinstance(cause, WorkerError)]
                raise (ValueError(str(refusals[0])) if refusals else error) from None


def _causes(error: Any) -> list[Any]:
    """Return the exceptions of the workers or of the controller."""
    found = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None)]
    return [getattr(cause, "_base_exc", getattr(cause, "cause", cause)) for cause in found]


def _call(config: dict[str, Any]) -> Any:
    """Call the function in a worker, in the folder where the run was launched."""
    global _worker
    worker: _Worker = config["worker"]
    check_storage()
    if not os.path.isdir(worker.folder):
        raise WorkerError(
            f"the run was started in {worker.folder}, which does not exist on {socket.gethostname()}; start it in a"
            " folder that all machines share"
        )
    os.chdir(worker.folder)
    logging.getLogger().setLevel(logging.WARNING)  # as without Ray, which sets INFO
    _worker, os.environ[ON_RAY] = worker, "1"
    with sent(worker.output) if ray.train.get_context().get_world_rank() == 0 else contextlib.nullcontext():
        return config["function"](*config["arguments"])


@contextlib.contextmanager
def _cluster(settings: RaySettings) -> Iterator[None]:
    """Join a cluster, or start one for the duration of the run."""
    if ray.is_initialized():
        yield
        return
    given = {"log_to_driver": False, "logging_level": logging.WARNING, **settings.init_kwargs}  # type: ignore[dict-item]
    try:
        if "address" in given:
            ray.init(**given)
        elif _NEW_CLUSTER_OPTIONS & set(given):
            ray.init(address="local", **_SMALL | given)
        else:
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **given)
            except ConnectionError:
                ray.init(address="local", **_SMALL | given)
    except Exception as error:
        # Source: ``Node.__init__`` (Ray 2.60), which raises an Exception without a class of its own after 30 seconds
        if "timed out during startup" not in str(error):
            raise
        raise RuntimeError(
            f"Ray did not start on {socket.gethostname()} within its own time limit; run the command again when the"
            " machine is less busy"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@dataclass
class _RendezvousConfig(TorchConfig):  # type: ignore[misc]
    """Ray's config of the process group, with the address and port where the ranks meet."""

    addr: str | None = None
    port: int | None = None

    @property
    def backend_cls(self) -> type:
        """The class that opens the process group."""
        return _RendezvousBackend


class _RendezvousBackend(_TorchBackend):  # type: ignore[misc]
    """Opens the process group at a given address and port.

    Source: ``_TorchBackend.on_start`` (Ray 2.60), which asks the worker of rank 0 for its address and a free port.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Open the process group."""
        addr, port, ask = backend_config.addr, backend_config.port, worker_group.execute_single

        def execute_single(rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if addr is not None or port is not None:
                ask(rank, _check_address, addr, port)
            found = ask(rank, function, *args, **kwargs)
            return (addr or found[0], port or found[1])

        worker_group.execute_single = execute_single
        try:
            super().on_start(worker_group, backend_config)
        finally:
            del worker_group.execute_single


def _check_address(addr: str | None, port: int | None) -> None:
    """Reject another machine's address and a port that is in use, because the ranks would wait there."""
    try:
        socket.create_server((addr or "", port or 0)).close()
    except OSError as error:
        raise WorkerError(
            f"master_addr={addr} with master_port={port} cannot be used on {socket.gethostname()}, where rank 0 runs:"
            f" {error.strerror or error}; set an address of that machine and a free port, or remove both"
        ) from error
