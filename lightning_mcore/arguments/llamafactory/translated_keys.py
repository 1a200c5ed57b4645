# SPDX-License-Identifier: Apache-2.0
"""Keys of LLaMA-Factory that Megatron carries out in its own way, and the line that tells the user so.

:func:`translated` returns the arguments that such keys become, :func:`notes_of` a line for each of them, which
``lightning-mcore llamafactory`` prints before it trains and ``lightning-mcore plan`` under what it assumes.

Of DeepSpeed's config the stage of ZeRO counts. Megatron has the sharded optimizer, ``use_distributed_optimizer``, for
what stages 1 and 2 save; weights that do not fit are split by the parallel sizes instead of stage 3. Buckets and the
like are its own. What would make another run (offloading, a second optimizer, other batch sizes) is refused.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from lightning_mcore.arguments.llamafactory.keys import FactoryKeys

_SAME = {  # numbers that DeepSpeed's config may repeat, and their defaults in a training file
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
}
_SHARDED = "use_distributed_optimizer: true, which shards the optimizer's state over the data-parallel ranks"
_STAGES = {
    0: "plain data parallelism, as without it",
    1: _SHARDED,
    2: f"{_SHARDED}; each of them keeps the buffer of its gradients whole",
    3: f"{_SHARDED}; stage 3 shards the weights too, which tensor_model_parallel_size and"
    " pipeline_model_parallel_size do here",
}


def translated(keys: FactoryKeys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of training and of Megatron, with those that such keys become.

    Args:
        keys: Those that mean something here.
        values: Arguments of training and of Megatron that the file gives, by name.

    Raises:
        FileNotFoundError: DeepSpeed's config is not there.
        ValueError: It asks for what is not carried out, or it contradicts the file.
    """
    found = {**values, "bf16": True} if keys.pure_bf16 else dict(values)
    if keys.deepspeed is None or (stage := _stage(keys.deepspeed, found)) == 0:
        return found
    if found.get("use_distributed_optimizer") is False:
        raise ValueError(
            f"deepspeed: {_name(keys.deepspeed)} is stage {stage} of ZeRO, which shards the optimizer, and contradicts"
            " use_distributed_optimizer: False; leave one of them out"
        )
    return {**found, "use_distributed_optimizer": True}


def notes_of(keys: FactoryKeys) -> tuple[str, ...]:
    """Return a line for each key that is carried out in another way than there."""
    notes = []
    if keys.deepspeed is not None:
        stage = _stage_of(_read(keys.deepspeed), _name(keys.deepspeed))
        notes.append(f"deepspeed: {_name(keys.deepspeed)} (ZeRO stage {stage}) is carried out as {_STAGES[stage]}")
    if keys.pure_bf16:
        notes.append(
            "pure_bf16: True is carried out as bf16: true; Megatron's optimizer keeps an fp32 copy of each weight, 4"
            " bytes, which use_distributed_optimizer shards"
        )
    if keys.flash_attn != "auto":
        notes.append(
            f"flash_attn: {keys.flash_attn} chooses among the attentions of transformers; Megatron's is used, on GPUs"
            " TransformerEngine's, which chooses for itself or by NVTE_FLASH_ATTN"
        )
    for name in ("enable_liger_kernel", "use_v1_kernels"):
        if getattr(keys, name):
            notes.append(f"{name}: True replaces layers of transformers by faster ones; Megatron's layers are used")
    return tuple(notes)


def _name(given: str | dict[str, Any]) -> str:
    return given if isinstance(given, str) else "{...}"


def _read(given: str | dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's config; ``given`` is itself, or the path of a file."""
    if not isinstance(given, str):
        return given
    if not os.path.isfile(given):
        raise FileNotFoundError(
            f"deepspeed: {given} is not a file; give the path of DeepSpeed's config, or leave it out and set"
            " use_distributed_optimizer: true"
        )
    try:
        with open(given, encoding="utf-8") as file:
            config = json.load(file)
    except ValueError as error:
        raise ValueError(f"deepspeed: {given} is not JSON ({error}); mend it, or leave it out") from error
    if not isinstance(config, dict):
        raise ValueError(f"deepspeed: {given} holds a {type(config).__name__}, not an object; give DeepSpeed's config")
    return config


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _stage_of(config: Mapping[str, Any], name: str) -> int:
    stage = _part(config, "zero_optimization").get("stage", 0)
    if stage not in _STAGES or isinstance(stage, bool):
        raise ValueError(f"deepspeed: {name} has stage {stage!r} of zero_optimization; choose 0, 1, 2 or 3")
    return int(stage)


def _stage(given: str | dict[str, Any], values: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO, after everything else has been found to be as in the training file."""
    config, name = _read(given), _name(given)
    zero = _part(config, "zero_optimization")
    next_steps = {
        "offload_optimizer": "leave deepspeed out, and set use_distributed_optimizer: true and optimizer_cpu_offload:"
        " true",
        "offload_param": "leave it out; tensor_model_parallel_size and pipeline_model_parallel_size split the weights",
    }
    for key, next_step in next_steps.items():
        if _part(zero, key).get("device", "none") not in (None, "none"):
            raise ValueError(f"deepspeed: {name} asks for {key}; {next_step}")
    tensor = _part(config, "tensor_parallel").get("autotp_size", 0)
    if tensor not in (0, 1):
        raise ValueError(
            f"deepspeed: {name} has autotp_size {tensor}; leave it out, and set tensor_model_parallel_size: {tensor}"
        )
    for key in ("optimizer", "scheduler"):
        if config.get(key):
            raise ValueError(
                f"deepspeed: {name} has {'an' if key == 'optimizer' else 'a'} {key} of its own; leave it out there, and"
                " say it by learning_rate, optim and lr_scheduler_type in the training file"
            )
    said: dict[str, tuple[Any, Any]] = {
        key: (config.get(key), values.get(own, default)) for key, (own, default) in _SAME.items()
    }
    said |= {kind: (_part(config, kind).get("enabled"), bool(values.get(kind))) for kind in ("bf16", "fp16")}
    for key, (there, here) in said.items():
        if there not in (None, "auto", here):
            raise ValueError(
                f"deepspeed: {name} has {key}: {there}, and the training file says {here}; set it to 'auto' there"
            )
    return _stage_of(config, name)
