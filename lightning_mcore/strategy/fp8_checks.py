# SPDX-License-Identifier: Apache-2.0
"""Reject FP8 that the module, the settings or the machine do not support.

FP8 is checked three times: when the strategy gets the module (:func:`check_fp8`), when the model is built
(:func:`check_chunks`), and before each run of the schedule, with the shape of its microbatches (``config/fp8.py``). The
checks take plain values, so they can be tested without a GPU.

Sources: ``get_fp8_recipe`` and ``get_fp8_align_size`` of megatron-core (0.16.1); ``check_fp8_support`` and similar
functions of TransformerEngine (2.x), and its "datatype and hardware support matrix".
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from packaging.version import Version
from torch import nn

from lightning_mcore.config.fp8 import FP8Settings, asked_for, check_layers, check_microbatch, check_model
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import fp8_device_faults
from lightning_mcore.layers.spec import installed_version
from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.strategy.module import MCoreModule
from lightning_mcore.te_cpu.load import ONLY_ON_THE_CPU, is_prepared, untested_on_the_cpu

# By recipe: the oldest TransformerEngine, GPU (compute capability) and CUDA. 8.9 is Ada, 9.0 Hopper, 10.0 Blackwell.
_TRANSFORMER_ENGINE = {"delayed": "1.0", "tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.1", "nvfp4": "2.8"}
_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
_NO_MXFP8_FROM = (12, 0)
_CUDA = {"blockwise": "12.9", "nvfp4": "12.8"}  # quantization.py and common/common.h (FP4_TYPE_SUPPORTED), to 2.20


def check_fp8(
    settings: FP8Settings,
    module: nn.Module,
    layout: ParallelLayout,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig | None,
    machine: "FP8Machine",
    micro_batch_size: int | None,
) -> None:
    """Reject FP8 that module, settings or machine do not support; do nothing without FP8."""
    if not settings.is_on:
        return
    if not isinstance(module, MCoreModule):
        raise ValueError(
            f"{asked_for(settings.recipe)} needs TransformerEngine's layers, but {type(module).__name__} does not"
            " build a Megatron model; derive it from MCoreModule, or remove fp8_recipe"
        )
    check_machine(settings, machine)
    check_optimizer(settings, ddp_config, optimizer_config)
    shape = module.model_shape()
    if shape is None:
        return
    check_model(settings, shape, layout.tensor_model_parallel_size, layout.expert_tensor_size)
    if shape.num_layers is not None:
        check_layers(settings, shape.num_layers, layout.pipeline_model_parallel_size)
    # Otherwise the schedule checks the shape, with the first batch.
    if shape.seq_length is not None and micro_batch_size is not None:
        check_microbatch(settings, (shape.seq_length, micro_batch_size), layout)


@dataclass(frozen=True)
class FP8Machine:
    """What the checks need to know about the machine."""

    type: str  # of the torch device
    capability: tuple[int, int] = (0, 0)  # compute capability of the GPU
    cuda: str = "0"  # of the torch build
    transformer_engine: str | None = None  # version, if installed
    on_the_cpu: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "FP8Machine":
        """Describe a device of this machine."""
        if is_prepared():
            return cls(device.type, transformer_engine=installed_version("transformer-engine"), on_the_cpu=True)
        if device.type != "cuda":
            return cls(device.type)
        version = None
        if importlib.util.find_spec("transformer_engine") is not None:
            version = installed_version("transformer-engine")
        return cls("cuda", torch.cuda.get_device_capability(device), torch.version.cuda or "0", version)


def check_machine(settings: FP8Settings, machine: FP8Machine) -> None:
    """Reject FP8 settings that the machine does not support; errors as in :func:`check_fp8`."""
    recipe, asked = settings.recipe, asked_for(settings.recipe)
    if machine.on_the_cpu:
        if machine.type == "cuda":
            raise ValueError(f"{asked} is not available: {ONLY_ON_THE_CPU}")
        return
    if machine.type != "cuda" and (untested := untested_on_the_cpu()) is not None:
        raise ValueError(untested)
    raise_first(fp8_device_faults(recipe, machine.type))
    if machine.transformer_engine is None:
        raise ModuleNotFoundError(
            f"{asked} needs TransformerEngine, which is not installed; install the extra [te], "
            f"or remove {asked.partition('=')[0]}"
        )
    least = _TRANSFORMER_ENGINE[recipe]
    # ".dev0", so that a development build of that release passes.
    if Version(machine.transformer_engine) < Version(f"{least}.dev0"):
        raise ValueError(
            f"{asked} needs TransformerEngine {least} or newer, but {machine.transformer_engine} is "
            "installed; update it, or choose another recipe"
        )
    have = ".".join(map(str, machine.capability))
    if machine.capability < _CAPABILITY[recipe]:
        need = ".".join(map(str, _CAPABILITY[recipe]))
        raise ValueError(
            f"{asked} needs a GPU of compute capability {need} or higher, but this one has {have}; "
            f"{_other_recipe(machine.capability)}"
        )
    if recipe == "mxfp8" and machine.capability >= _NO_MXFP8_FROM:
        raise ValueError(
            f"fp8_recipe='mxfp8' is not supported by TransformerEngine on GPUs of compute capability 12.0 and higher, "
            f"and this one has {have}; {_other_recipe(machine.capability)}"
        )
    if Version(machine.cuda) < Version(_CUDA.get(recipe, "0")):
        raise ValueError(
            f"{asked} needs CUDA {_CUDA[recipe]} or newer, but torch was built with CUDA {machine.cuda}; "
            "choose 'tensorwise', or install another build of torch"
        )


def check_versions(
    settings: FP8Settings, grouped: bool, megatron_core: str | None, transformer_engine: str | None
) -> None:
    """Raise ``ValueError`` for grouped FP8 experts that the installed versions cannot save.

    megatron-core 0.16 cannot read the state that TransformerEngine keeps for experts after 2.17.0. Source:
    ``TEGroupedLinear._decode_extra_state`` (megatron-core 0.16.1).
    """
    if not grouped or settings.recipe == "delayed" or megatron_core is None or transformer_engine is None:
        return
    if Version(megatron_core) < Version("0.17") and Version(transformer_engine) > Version("2.17.0"):
        raise ValueError(
            f"{asked_for(settings.recipe)} with moe_grouped_gemm=True cannot be saved with megatron-core"
            f" {megatron_core} and TransformerEngine {transformer_engine}; install TransformerEngine 2.17.0 or older,"
            " or set moe_grouped_gemm=False"
        )


def _other_recipe(capability: tuple[int, int]) -> str:
    return "choose 'tensorwise' or 'delayed'" if capability >= _CAPABILITY["tensorwise"] else "train in bf16"


def check_optimizer(
    settings: FP8Settings, ddp_config: DistributedDataParallelConfig, optimizer_config: OptimizerConfig | None = None
) -> None:
    """Raise ``ValueError`` for FP8 weights that the strategy's optimizer cannot keep."""
    offloads = optimizer_config is not None and bool(optimizer_config.optimizer_cpu_offload)
    settings.check_optimizer(ddp_config.use_distributed_optimizer, ddp_config.overlap_param_gather, offloads)


def check_chunks(settings: FP8Settings, chunks: Sequence[nn.Module]) -> None:
    """Raise ``ValueError`` on all ranks for FP8 in a model without TransformerEngine's layers; collective."""
    if not settings.is_on:
        return
    modules = (type(module) for chunk in chunks for module in chunk.modules())
    grouped = any(getattr(getattr(chunk, "config", None), "moe_grouped_gemm", False) for chunk in chunks)
    check_versions(settings, grouped, installed_version("megatron-core"), installed_version("transformer-engine"))
    found = any(parent.__module__.startswith("transformer_engine") for kind in modules for parent in kind.__mro__)
    # One stage may have only an embedding, so all ranks are asked.
    if all_true(not found):
        raise ValueError(
            f"{asked_for(settings.recipe)} needs TransformerEngine's layers, but the model has none; build it from"
            " Megatron's TransformerEngine spec, or remove fp8_recipe"
        )
