# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray: a check of the trainer, checkpoints that are reported to Ray, a launch, and elastic sizes.

Ray Train places the workers, opens torch's process group and calls a function on each worker; that function makes a
``Trainer`` with ``MCoreStrategy`` as anywhere else::

    def train(config):
        options = {"plugins": [RayLightningEnvironment()], "callbacks": [RayReport()]}
        trainer = pl.Trainer(devices=2, strategy=MCoreStrategy(tensor_model_parallel_size=2), **options)
        prepare_trainer(trainer).fit(model, data, ckpt_path=checkpoint_to_resume())


    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()

:func:`launch` does this for the commands and for arguments in the style of Hugging Face; the function that it runs
gets the arguments of its trainer from :func:`worker_arguments`.

Only this file imports ``ray``, and nothing imports this file before a run on Ray is asked for.
"""

import codecs
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.config.ray import ON_RAY, RaySettings, check_room, largest_size
from lightning_mcore.config.value_checks import require_size
from lightning_mcore.strategy.checks import planned_world_size
from lightning_mcore.strategy.preemption import saving_synchronously
from lightning_mcore.strategy.strategy import MCoreStrategy

try:
    import ray
    import ray.train
    from pyarrow.fs import FileSystem, FileType, PyFileSystem
    from ray.train.lightning import RayLightningEnvironment
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.torch.config import _TorchBackend
    from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision
    from ray.train.v2.api.report_config import CheckpointUploadMode
    from ray.util.queue import Queue
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'a run on Ray needs the package {error.name}, which is not installed; pip install "lightning-mcore[ray]"'
    ) from error

CHECKPOINT = "checkpoint.ckpt"
"""Name of the checkpoint in each folder that is reported to Ray, as in Ray's own callback."""

_MARK = ".validate_storage_marker"  # a file that Ray writes into the folder of a run when it starts
_SMALL = {"include_dashboard": False, "object_store_memory": 100 * 2**20}  # bytes; a run stores nothing in it
_OF_A_NEW_CLUSTER = {"num_cpus", "num_gpus", "resources", "labels", "dashboard_host", "dashboard_port", *_SMALL}

_LOSS_IS_KNOWN = 30.0  # seconds after which Ray's health checks have noticed that a machine is lost
_LAST_WORDS = 5.0  # seconds to wait for rank 0's output; a child that outlives it may keep the pipe open


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Check a trainer in a Ray worker; replaces Ray's function of this name, which rejects ``MCoreStrategy``.

    Args:
        trainer: The trainer.

    Returns:
        The same trainer.

    Raises:
        TypeError: Its strategy is not ``MCoreStrategy``.
        ValueError: Its environment, devices or layout, or the process group, do not fit Ray's workers, or the workers
            do not share ``storage_path``.
    """
    strategy, context = trainer.strategy, ray.train.get_context()
    world, here = context.get_world_size(), context.get_local_world_size()
    if not isinstance(strategy, MCoreStrategy):
        raise TypeError(
            f"strategy={type(strategy).__name__} is not MCoreStrategy; give that, or use ray.train.lightning for Ray's"
            " own strategies"
        )
    environment = strategy.cluster_environment
    if not isinstance(environment, RayLightningEnvironment):
        raise ValueError(
            f"the trainer takes its ranks from {type(environment).__name__}, not from Ray; give it"
            " plugins=[RayLightningEnvironment()]"
        )
    if strategy.num_processes != here:
        raise ValueError(
            f"devices={strategy.num_processes} is not the number of Ray's workers on this machine, {here}; give"
            " devices=ray.train.get_context().get_local_world_size()"
        )
    if planned_world_size(strategy) != world:
        raise ValueError(
            f"num_nodes={trainer.num_nodes} times devices={here} is not the number of Ray's workers, {world}; give"
            f" num_nodes={world // here if world % here == 0 else 1}"
        )
    strategy.layout.validate_world(world)
    _check_device(strategy)
    _check_storage()
    tensor = strategy.layout.tensor_model_parallel_size
    if here % tensor and world > here:
        rank_zero_warn(
            f"Ray placed {here} workers on a machine, where tensor_model_parallel_size={tensor} does not divide them:"
            " some tensor-parallel groups cross machines, which is slow"
        )
    return trainer


def _check_device(strategy: MCoreStrategy) -> None:
    """Reject a device other than Ray's, and a process group that cannot serve it."""
    device, chosen = strategy.root_device, ray.train.torch.get_device()
    if device.type != chosen.type or (device.type == "cuda" and device != chosen):
        raise ValueError(
            f"the trainer uses {device} and Ray gave this worker {chosen}; give ScalingConfig(use_gpu="
            f"{device.type == 'cuda'}), or another accelerator to the trainer"
        )
    wanted = "nccl" if device.type == "cuda" else "gloo"
    backend = dist.get_backend_config() if dist.is_initialized() else f"{device.type}:{wanted}"
    if f"{device.type}:{wanted}" not in backend.replace(" ", "").split(","):
        raise ValueError(
            f"Ray opened the process group with {backend}, which has no {wanted} for {device.type}; give"
            " TorchConfig(backend='cpu:gloo,cuda:nccl'), or on a CPU 'gloo'"
        )


def _check_storage() -> None:
    """Reject a storage path that is not the one of the process that started the run."""
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.get_file_info(f"{storage.experiment_fs_path}/{_MARK}").type == FileType.NotFound:
        raise _WorkerError(
            f"storage_path={storage.storage_fs_path} on the machine {socket.gethostname()} is not the folder of the"
            " machine that started the run; give a folder that all machines share, or a URL such as s3://bucket/runs"
        )


def checkpoint_to_resume() -> str | None:
    """Return the ``ckpt_path`` of the latest checkpoint that this run has reported to Ray; None if it has none."""
    found = ray.train.get_checkpoint()
    return None if found is None else f"{_url(found.filesystem, found.path)}/{CHECKPOINT}"


def _url(filesystem: FileSystem, path: str) -> str:
    """Return a path on a pyarrow filesystem as checkpoints take it: a path, or a URL for fsspec."""
    if filesystem.type_name in ("local", "subtree"):
        return path
    if isinstance(filesystem, PyFileSystem):
        return str(filesystem.handler.fs.unstrip_protocol(path))
    # "runs/gpt" on GcsFileSystem is "gs://runs/gpt".
    return f"{ {'gcs': 'gs'}.get(filesystem.type_name, filesystem.type_name) }://{path}"


class RayReport(pl.Callback):
    """Saves checkpoints where Ray keeps those of the run, and reports them with the metrics.

    All ranks write one checkpoint to one URL under ``RunConfig(storage_path=...)``, so nothing is copied and nothing
    stays behind on a machine. An asynchronous save (``async_save``) is reported once it is complete. Each
    report has the logged metrics, ``epoch`` and ``step``. A run that Ray restarts continues from
    :func:`checkpoint_to_resume`.

    When Ray announces that a machine will be taken away, a checkpoint is saved after the current optimizer step.

    Args:
        every_n_train_steps: Optimizer steps between two checkpoints; None for one at the end of each epoch. The last
            step of a run is always saved.
        watch_preemption: Ask Ray after each optimizer step whether a machine will be taken away; all workers wait for
            the answer, which takes milliseconds.

    Raises:
        ValueError: The number of steps is below 1.
    """

    def __init__(self, *, every_n_train_steps: int | None = None, watch_preemption: bool = True) -> None:
        super().__init__()
        if every_n_train_steps is not None:
            require_size("every_n_train_steps", every_n_train_steps)
        self.every_n_train_steps = every_n_train_steps
        self.watch_preemption = watch_preemption
        # A restarted run resumes from a saved step, which is not saved again.
        self._saved_step = 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # URLs of saves, and what to report once they are complete
        self._announced: Any = None  # by Ray: the loss of a machine

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Move this callback behind the others, so that the checkpoint includes their changes."""
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined] # a new list: Lightning is going through it

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the step that the run resumes from, because it is already saved."""
        self._saved_step, self._waiting, self._announced = trainer.global_step, [], None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Report saves that are complete, and save if it is time."""
        if trainer.fit_loop._should_accumulate():
            return
        self._report_whole(trainer)
        every, step = self.every_n_train_steps, trainer.global_step
        if self._is_preempted():
            with saving_synchronously(trainer):
                self._save(trainer)
        elif every is not None and step % every == 0 and step != self._saved_step:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, unless checkpoints are saved every few steps."""
        if self.every_n_train_steps is None:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last step, and report what is still being written."""
        if self._saved_step != trainer.global_step:
            self._save(trainer)
        if self._waiting:
            plugin = trainer.strategy.checkpoint_io
            assert isinstance(plugin, MCoreCheckpointIO)
            plugin.drain()
            self._report_whole(trainer)

    def _is_preempted(self) -> bool:
        """Whether Ray has announced the loss of a machine for the first time; collective over the workers."""
        if not self.watch_preemption:
            return False
        announced, self._announced = self._announced, ray.train.get_preemption_info()
        return self._announced is not None and self._announced != announced

    def _save(self, trainer: pl.Trainer) -> None:
        storage, step = ray.train.get_context().get_storage(), trainer.global_step
        folder = f"checkpoint_{trainer.current_epoch:04d}_{step:08d}"
        path = f"{storage.experiment_fs_path}/{folder}"
        url = f"{_url(storage.storage_filesystem, path)}/{CHECKPOINT}"
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.save_checkpoint(url)
        report = {
            "metrics": metrics | {"epoch": trainer.current_epoch, "step": step},
            "checkpoint": ray.train.Checkpoint(path, storage.storage_filesystem),
            "checkpoint_dir_name": folder,
            # The ranks have written it to its place already.
            "checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD,
        }
        self._saved_step = step
        self._waiting.append((url, report))
        self._report_whole(trainer)

    def _report_whole(self, trainer: pl.Trainer) -> None:
        """Report the saves that are complete, oldest first; all ranks agree on which are."""
        plugin = trainer.strategy.checkpoint_io
        while self._waiting:
            url, report = self._waiting[0]
            # Oldest first: Ray takes the last report for the newest checkpoint.
            if isinstance(plugin, MCoreCheckpointIO) and plugin.is_in_flight(url):
                return
            self._waiting.pop(0)
            ray.train.report(**report)


class ElasticTorchTrainer(TorchTrainer):  # type: ignore[misc]  # Ray has no types
    """A ``TorchTrainer`` whose number of workers follows the machines that are there, but is always admissible.

    Ray alone takes as many workers as there is room for. Here it takes the largest admissible number::

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
            raise ValueError(f"num_workers={scaling.num_workers} contains none of the admissible sizes {[*sizes]}")
        needs = {"CPU": scaling.num_cpus_per_worker, "GPU": scaling.num_gpus_per_worker}
        check_room(min(self._sizes), _machines(), needs | scaling.additional_resources_per_worker)

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
        # Room for 7 workers and sizes [2, 4, 8]: start 4.
        return largest_size(self._sizes, super()._count_possible_workers(there))


# ---- a launch


@dataclass
class _Worker:
    """What a worker of :func:`launch` knows about the run."""

    settings: RaySettings
    sizes: Mapping[int, int]
    folder: str
    output: Queue


_worker: _Worker | None = None


def worker_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Trainer`` for a worker of :func:`launch`.

    Arguments in ``given`` that depend on Ray's workers are replaced; ``plugins`` and ``callbacks`` are added to.
    """
    assert _worker is not None
    context, settings = ray.train.get_context(), _worker.settings
    world, here = context.get_world_size(), context.get_local_world_size()
    lists = {name: given.get(name) or [] for name in ("plugins", "callbacks")}
    plugins, callbacks = ([*value] if isinstance(value, list | tuple) else [value] for value in lists.values())
    if settings.goes_on:
        callbacks.append(RayReport(every_n_train_steps=settings.save_every_n_steps))
    elastic = {"accumulate_grad_batches": _worker.sizes[world]} if settings.least < settings.most else {}
    return {
        **given,
        "accelerator": ray.train.torch.get_device().type,
        "devices": here,
        # 8 workers, 4 of them here: devices=4, num_nodes=2. Unequal numbers, such as 3 and 1, have no such product;
        # planned_world_size() then asks the environment.
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

    Raises ``RuntimeError`` under torchrun or srun, ``ValueError`` if Ray has too little room or the machines share no
    folder, ``ray.train.WorkerGroupError`` if the function failed on a worker more often than ``max_failures``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("this process is a rank of torchrun or srun, and Ray would start the ranks again; use one")
    # workers run in the folder of this process, and print to stdout instead of Ray's log
    os.environ |= {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")  # there is room, but imports may be slow
    with _cluster(settings):
        gpus = any(machine.get("GPU") for machine in _machines()) if gpus is None else gpus
        scaling = ray.train.ScalingConfig(
            num_workers=settings.num_workers if settings.least < settings.most else settings.most,
            use_gpu=gpus,
            resources_per_worker=settings.resources_per_worker,
            placement_strategy=settings.placement_strategy,
        )
        with _printed() as output:
            worker = _Worker(settings, dict(sizes), os.getcwd(), output)
            trainer = ElasticTorchTrainer(
                _call,
                sizes=sizes,
                train_loop_config={"worker": worker, "function": function, "arguments": arguments},
                torch_config=_MeetingPlace(
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
                refusals = [cause for cause in _causes(error) if isinstance(cause, _WorkerError)]
                raise (ValueError(str(refusals[0])) if refusals else error) from None


class _WorkerError(ValueError):
    """Wrong settings that only a worker can see; a launch shows the message without a traceback."""


def _causes(error: Any) -> list[Any]:
    """Return the exceptions of the workers or of the controller."""
    found = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None)]
    return [getattr(cause, "_base_exc", getattr(cause, "cause", cause)) for cause in found]


def _call(config: dict[str, Any]) -> Any:
    """Call the function in a worker, in the folder where the run was launched."""
    global _worker
    worker: _Worker = config["worker"]
    _check_storage()
    if not os.path.isdir(worker.folder):
        raise _WorkerError(
            f"the run was started in {worker.folder}, which is not on the machine {socket.gethostname()}; start it in a"
            " folder that all machines share"
        )
    os.chdir(worker.folder)
    logging.getLogger().setLevel(logging.WARNING)  # as without Ray, which sets INFO
    _worker, os.environ[ON_RAY] = worker, "1"
    with _sent(worker.output) if ray.train.get_context().get_world_rank() == 0 else contextlib.nullcontext():
        return config["function"](*config["arguments"])


# ---- what rank 0 prints


@contextlib.contextmanager
def _printed() -> Iterator[Queue]:
    """Print here what rank 0 sends through a queue."""
    queue = Queue(actor_options={"num_cpus": 0})

    def show() -> None:
        streams = {1: sys.stdout, 2: sys.stderr}
        decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in streams}
        while (item := queue.get()) is not None:
            number, data = item
            streams[number].write(decoders[number].decode(data))
            streams[number].flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown()


@contextlib.contextmanager
def _sent(queue: Queue) -> Iterator[None]:
    """Send what this process and its children write to stdout and stderr through a queue."""

    def send(source: int, number: int) -> None:
        while data := os.read(source, 2**16):
            queue.put((number, data))
        os.close(source)

    own, threads = {}, []
    for number in (1, 2):
        # Descriptors, not sys.stdout: C++ code and child processes write there too. "own" keeps the originals.
        own[number] = os.dup(number)
        source, sink = os.pipe()
        os.dup2(sink, number)
        os.close(sink)
        threads.append(threading.Thread(target=send, args=(source, number), daemon=True))
        threads[-1].start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in own.items():
            os.dup2(original, number)
            os.close(original)
        for thread in threads:
            thread.join(_LAST_WORDS)


@contextlib.contextmanager
def _cluster(settings: RaySettings) -> Iterator[None]:
    """Join a cluster, or start one for the duration of the run."""
    if ray.is_initialized():
        yield
        return
    given = {"log_to_driver": False, "logging_level": logging.WARNING, **settings.init_kwargs}  # type: ignore[dict-item]
    if "address" in given:
        ray.init(**given)
    elif _OF_A_NEW_CLUSTER & set(given):
        ray.init(address="local", **_SMALL | given)
    else:
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), **given)
        except ConnectionError:
            ray.init(address="local", **_SMALL | given)
    try:
        yield
    finally:
        ray.shutdown()


def _machines() -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster, by name."""
    if not ray.is_initialized():
        ray.init()
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@dataclass
class _MeetingPlace(TorchConfig):  # type: ignore[misc]
    """Ray's config of the process group, with the address and port where the ranks meet."""

    addr: str | None = None
    port: int | None = None

    @property
    def backend_cls(self) -> type:
        """The class that opens the process group."""
        return _BackendAtPlace


class _BackendAtPlace(_TorchBackend):  # type: ignore[misc]
    """Opens the process group at a given address and port.

    Source: ``_TorchBackend.on_start`` (Ray 2.60), which asks the worker of rank 0 for its address and a free port.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Open the process group."""
        addr, port, ask = backend_config.addr, backend_config.port, worker_group.execute_single

        def execute_single(rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if addr is not None or port is not None:
                ask(rank, _check_place, addr, port)
            found = ask(rank, function, *args, **kwargs)
            return (addr or found[0], port or found[1])

        worker_group.execute_single = execute_single
        try:
            super().on_start(worker_group, backend_config)
        finally:
            del worker_group.execute_single


def _check_place(addr: str | None, port: int | None) -> None:
    """Reject another machine's address and a port that is in use, because the ranks would wait there."""
    try:
        socket.create_server((addr or "", port or 0)).close()
    except OSError as error:
        raise _WorkerError(
            f"master_addr={addr} with master_port={port} cannot be used on {socket.gethostname()}, where rank 0 runs:"
            f" {error.strerror or error}; give an address of that machine and a free port, or leave them out"
        ) from error
