# SPDX-License-Identifier: Apache-2.0
"""Checks in a Ray worker: its trainer fits Ray's workers, and they share the storage."""

import socket

import lightning.pytorch as pl
import ray.train
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from pyarrow.fs import FileType
from ray.train.lightning import RayLightningEnvironment

from lightning_mcore.strategy.checks import planned_world_size
from lightning_mcore.strategy.strategy import MCoreStrategy

_MARK = ".validate_storage_marker"  # a file that Ray writes into the folder of a run when it starts


class WorkerError(ValueError):
    """Wrong settings that only a worker can see; a launch shows the message without a traceback."""


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
            f"strategy={type(strategy).__name__} is not an MCoreStrategy; use one, or use ray.train.lightning for Ray's"
            " own strategies"
        )
    environment = strategy.cluster_environment
    if not isinstance(environment, RayLightningEnvironment):
        raise ValueError(
            f"the trainer takes its ranks from {type(environment).__name__}, not from Ray; set"
            " plugins=[RayLightningEnvironment()]"
        )
    if strategy.num_processes != here:
        raise ValueError(
            f"devices={strategy.num_processes} does not match the {here} Ray workers on this machine; set"
            " devices=ray.train.get_context().get_local_world_size()"
        )
    if planned_world_size(strategy) != world:
        raise ValueError(
            f"num_nodes={trainer.num_nodes} times devices={here} does not match the {world} Ray workers; set"
            f" num_nodes={world // here if world % here == 0 else 1}"
        )
    strategy.layout.validate_world(world)
    _check_device(strategy)
    check_storage()
    tensor = strategy.layout.tensor_model_parallel_size
    if here % tensor and world > here:
        rank_zero_warn(
            f"Ray placed {here} workers on one machine, not a multiple of tensor_model_parallel_size={tensor};"
            " some tensor-parallel groups span machines, which is slow"
        )
    return trainer


def _check_device(strategy: MCoreStrategy) -> None:
    """Reject a device other than Ray's, and a process group that cannot serve it."""
    device, chosen = strategy.root_device, ray.train.torch.get_device()
    if device.type != chosen.type or (device.type == "cuda" and device != chosen):
        raise ValueError(
            f"the trainer uses {device}, but Ray assigned {chosen} to this worker; set ScalingConfig(use_gpu="
            f"{device.type == 'cuda'}), or another accelerator in the trainer"
        )
    wanted = "nccl" if device.type == "cuda" else "gloo"
    backend = dist.get_backend_config() if dist.is_initialized() else f"{device.type}:{wanted}"
    if f"{device.type}:{wanted}" not in backend.replace(" ", "").split(","):
        raise ValueError(
            f"Ray opened the process group with backend {backend}, which lacks {wanted} for {device.type}; set"
            " TorchConfig(backend='cpu:gloo,cuda:nccl'), or 'gloo' on a CPU"
        )


def check_storage() -> None:
    """Reject a storage path that differs from the folder of the process that started the run."""
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.get_file_info(f"{storage.experiment_fs_path}/{_MARK}").type == FileType.NotFound:
        raise WorkerError(
            f"storage_path={storage.storage_fs_path} on {socket.gethostname()} is not the folder of the machine"
            " that started the run; choose a folder that all machines share, or a URL such as s3://bucket/runs"
        )
