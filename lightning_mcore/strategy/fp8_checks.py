# SPDX-License-Identifier: Apache-2.0
"""What FP8 needs of the machine, of the strategy's settings and of the model's sizes; what lacks it is refused.

The checks are functions of plain values, so that they are tested without a GPU; those of sizes stand in
``config/fp8.py``. :func:`check_run` calls those that can be made when the strategy meets the module, before
anything is allocated; :func:`check_chunks` when the model is built; :func:`check_microbatch` before each run of the
schedule, with the shape of its microbatches.

Sources: ``get_fp8_recipe`` and ``get_fp8_align_size`` of megatron-core (0.16.1); ``check_fp8_support`` and its kin of
TransformerEngine (2.x), and its "datatype and hardware support matrix".
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from packaging.version import Version
from torch import nn

from lightning_mcore.config.fp8 import FP8Settings, check_layers, check_microbatch, check_model
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.spec import installed_version
from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.strategy.module import MCoreModule

__all__ = [
    "FP8Machine",
    "check_chunks",
    "check_layers",
    "check_machine",
    "check_microbatch",
    "check_model",
    "check_optimizer",
    "check_run",
    "check_versions",
]

_TRANSFORMER_ENGINE = {"delayed": "1.0", "tensorwise": "2.2", "blockwise": "2.3", "mxfp8": "2.1"}
_CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
_NO_MXFP8_FROM = (12, 0)
_BLOCKWISE_CUDA = "12.9"


def check_run(
    settings: FP8Settings,
    module: nn.Module,
    layout: ParallelLayout,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig | None,
    machine: "FP8Machine",
    micro_batch_size: int | None,
) -> None:
    """Refuse FP8 where module, settings or machine cannot do it; nothing happens without FP8.

    Args:
        settings: What was asked for.
        module: The user's module.
        layout: The strategy's layout.
        ddp_config: The strategy's settings of gradients and parameters.
        optimizer_config: The strategy's settings of Megatron's optimizer.
        machine: Where the model will be.
        micro_batch_size: Rows of a microbatch; None where the DataLoader says.

    Raises:
        ModuleNotFoundError: TransformerEngine is not installed.
        ValueError: Anything else that FP8 needs is missing.
    """
    if not settings.is_on:
        return
    if not isinstance(module, MCoreModule):
        raise ValueError(
            f"fp8_recipe={settings.recipe!r} reaches layers of TransformerEngine alone, and {type(module).__name__}"
            " builds no Megatron model; derive it from MCoreModule, or leave fp8_recipe out"
        )
    check_machine(settings, machine)
    check_optimizer(settings, ddp_config, optimizer_config)
    shape = module.model_shape()
    if shape is None:
        return
    check_model(settings, shape, layout.tensor_model_parallel_size, layout.expert_tensor_size)
    if shape.num_layers is not None:
        check_layers(settings, shape.num_layers, layout.pipeline_model_parallel_size)
    if shape.seq_length is not None and micro_batch_size is not None:
        check_microbatch(settings, (shape.seq_length, micro_batch_size), layout)


@dataclass(frozen=True)
class FP8Machine:
    """What the checks need to know of the machine.

    Args:
        type: Of the torch device.
        capability: Compute capability of the GPU.
        cuda: CUDA version that torch was built with.
        transformer_engine: Version of TransformerEngine; None where it is not installed.
    """

    type: str
    capability: tuple[int, int] = (0, 0)
    cuda: str = "0"
    transformer_engine: str | None = None

    @classmethod
    def of(cls, device: torch.device) -> "FP8Machine":
        """Look at a device of this machine."""
        if device.type != "cuda":
            return cls(device.type)
        version = None
        if importlib.util.find_spec("transformer_engine") is not None:
            version = installed_version("transformer-engine")
        return cls("cuda", torch.cuda.get_device_capability(device), torch.version.cuda or "0", version)


def check_machine(settings: FP8Settings, machine: FP8Machine) -> None:
    """Refuse what the machine cannot do.

    Raises:
        ModuleNotFoundError: TransformerEngine is not installed.
        ValueError: No CUDA device, or one that is too old or too new for the recipe, or software that is too old.
    """
    recipe = settings.recipe
    if machine.type != "cuda":
        raise ValueError(
            f"FP8 needs a CUDA device, and this run is on {machine.type!r}; leave fp8_recipe={recipe!r} out, "
            'or run with accelerator="gpu"'
        )
    if machine.transformer_engine is None:
        raise ModuleNotFoundError(
            f"fp8_recipe={recipe!r} needs TransformerEngine, which is not installed; install the extra [te], "
            "or leave fp8_recipe out"
        )
    least = _TRANSFORMER_ENGINE[recipe]
    if Version(machine.transformer_engine) < Version(f"{least}.dev0"):
        raise ValueError(
            f"fp8_recipe={recipe!r} needs TransformerEngine {least} or newer, and {machine.transformer_engine} is "
            "installed; update it, or choose another recipe"
        )
    have = ".".join(map(str, machine.capability))
    if machine.capability < _CAPABILITY[recipe]:
        need = ".".join(map(str, _CAPABILITY[recipe]))
        raise ValueError(
            f"fp8_recipe={recipe!r} needs a GPU of compute capability {need} or higher, and this one has {have}; "
            f"{_other_recipe(machine.capability)}"
        )
    if recipe == "mxfp8" and machine.capability >= _NO_MXFP8_FROM:
        raise ValueError(
            f"fp8_recipe='mxfp8' is not supported by TransformerEngine on GPUs of compute capability 12.0 and higher, "
            f"and this one has {have}; {_other_recipe(machine.capability)}"
        )
    if recipe == "blockwise" and Version(machine.cuda) < Version(_BLOCKWISE_CUDA):
        raise ValueError(
            f"fp8_recipe='blockwise' needs CUDA {_BLOCKWISE_CUDA} or newer, and torch was built with {machine.cuda}; "
            "choose 'tensorwise', or another build"
        )


def check_versions(
    settings: FP8Settings, grouped: bool, megatron_core: str | None, transformer_engine: str | None
) -> None:
    """Refuse experts in one product where the installed versions could not save them.

    Args:
        settings: What was asked for.
        grouped: ``moe_grouped_gemm`` of the model.
        megatron_core: Its version; None for unknown.
        transformer_engine: Likewise.

    Raises:
        ValueError: megatron-core 0.16 reads what TransformerEngine has kept for its experts only up to 2.17.0.

    Source: ``TEGroupedLinear._decode_extra_state`` (megatron-core 0.16.1).
    """
    if not grouped or settings.recipe == "delayed" or megatron_core is None or transformer_engine is None:
        return
    if Version(megatron_core) < Version("0.17") and Version(transformer_engine) > Version("2.17.0"):
        raise ValueError(
            f"fp8_recipe={settings.recipe!r} with moe_grouped_gemm=True cannot be saved with megatron-core"
            f" {megatron_core} and TransformerEngine {transformer_engine}; install TransformerEngine below 2.12, or set"
            " moe_grouped_gemm=False"
        )


def _other_recipe(capability: tuple[int, int]) -> str:
    return "choose 'tensorwise' or 'delayed'" if capability >= _CAPABILITY["tensorwise"] else "train in bf16"


def check_optimizer(
    settings: FP8Settings, ddp_config: DistributedDataParallelConfig, optimizer_config: OptimizerConfig | None = None
) -> None:
    """Refuse FP8 weights where the strategy's optimizer cannot keep them.

    Raises:
        ValueError: As ``FP8Settings.check_optimizer`` says.
    """
    offloads = optimizer_config is not None and bool(optimizer_config.optimizer_cpu_offload)
    settings.check_optimizer(ddp_config.use_distributed_optimizer, ddp_config.overlap_param_gather, offloads)


def check_chunks(settings: FP8Settings, chunks: Sequence[nn.Module]) -> None:
    """Refuse a model without layers of TransformerEngine, which FP8 would not reach; collective over the world.

    Args:
        settings: What was asked for; nothing happens without FP8.
        chunks: The chunks of this rank.

    Raises:
        ValueError: No rank has such a layer, or the installed versions cannot save the model; raised on every rank.
    """
    if not settings.is_on:
        return
    modules = (type(module) for chunk in chunks for module in chunk.modules())
    grouped = any(getattr(getattr(chunk, "config", None), "moe_grouped_gemm", False) for chunk in chunks)
    check_versions(settings, grouped, installed_version("megatron-core"), installed_version("transformer-engine"))
    found = any(parent.__module__.startswith("transformer_engine") for kind in modules for parent in kind.__mro__)
    if all_true(not found):
        raise ValueError(
            f"fp8_recipe={settings.recipe!r} reaches layers of TransformerEngine alone, and the model has none; build"
            " it from Megatron's TransformerEngine spec, or leave fp8_recipe out"
        )
