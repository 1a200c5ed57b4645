# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's config means here: its ZeRO stage becomes Megatron's distributed optimizer.

Only the ZeRO stage is used. ``use_distributed_optimizer`` replaces stages 1 and 2; instead of stage 3, the parallel
sizes split weights that do not fit. Megatron chooses bucket sizes and similar details itself. Settings that would
change the run (offloading, a second optimizer, other batch sizes) raise.

``TrainingArguments`` and LLaMA-Factory's files read their ``deepspeed`` here.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mcore.config.text import json_object

_SHARED = {  # keys of DeepSpeed's config that may repeat a training argument, with that argument's name and default
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
}
_SHARDED = "use_distributed_optimizer: true, which shards the optimizer's state over the data-parallel ranks"
_STAGES = {
    0: "plain data parallelism, the same as without DeepSpeed",
    1: _SHARDED,
    2: f"{_SHARDED}; each of them keeps the buffer of its gradients whole",
    3: f"{_SHARDED}; stage 3 shards the weights too, which tensor_model_parallel_size and"
    " pipeline_model_parallel_size do here",
}


def name_of(given: str | dict[str, Any]) -> str:
    """Return the path of a config, or ``{...}`` for a dict."""
    return given if isinstance(given, str) else "{...}"


def _read(given: str | dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's config as a dict; FileNotFoundError or ValueError if its file cannot be read."""
    if not isinstance(given, str):
        return given
    if not os.path.isfile(given):
        raise FileNotFoundError(
            f"deepspeed: {given} is not a file; give the path of DeepSpeed's config, or leave it out and set"
            " use_distributed_optimizer: true"
        )
    return json_object(f"deepspeed: {given}", Path(given).read_bytes())


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _stage_of(config: Mapping[str, Any], name: str) -> int:
    stage = _part(config, "zero_optimization").get("stage", 0)
    if stage not in _STAGES or isinstance(stage, bool):
        raise ValueError(f"deepspeed: {name} has stage {stage!r} of zero_optimization; choose 0, 1, 2 or 3")
    return int(stage)


def deepspeed_note(given: str | dict[str, Any]) -> str:
    """Return a line that says what a config becomes."""
    stage = _stage_of(_read(given), name_of(given))
    return f"deepspeed: {name_of(given)} (ZeRO stage {stage}) becomes {_STAGES[stage]}"


def zero_stage(given: str | dict[str, Any], values: Mapping[str, Any]) -> int:
    """Return the ZeRO stage; ValueError for settings that contradict the run's arguments, ``values``."""
    config, name = _read(given), name_of(given)
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
    # AutoTP is DeepSpeed's tensor parallelism.
    if tensor not in (0, 1):
        raise ValueError(
            f"deepspeed: {name} has autotp_size {tensor}; leave it out, and set tensor_model_parallel_size: {tensor}"
        )
    for key in ("optimizer", "scheduler"):
        if config.get(key):
            raise ValueError(
                f"deepspeed: {name} has {'an' if key == 'optimizer' else 'a'} {key} of its own; leave it out there, and"
                " set learning_rate, optim and lr_scheduler_type in the training file"
            )
    # Each key maps to the value in DeepSpeed's config and the value in the training file; "auto" takes the latter.
    said: dict[str, tuple[Any, Any]] = {
        key: (config.get(key), values.get(own, default)) for key, (own, default) in _SHARED.items()
    }
    said |= {kind: (_part(config, kind).get("enabled"), bool(values.get(kind))) for kind in ("bf16", "fp16")}
    for key, (there, here) in said.items():
        if there not in (None, "auto", here):
            raise ValueError(
                f"deepspeed: {name} has {key}: {there}, and the training file says {here}; set it to 'auto' there"
            )
    return _stage_of(config, name)
