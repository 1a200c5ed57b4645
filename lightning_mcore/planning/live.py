# SPDX-License-Identifier: Apache-2.0
"""A plan from Python objects: a Trainer with ``MCoreStrategy``, an ``MCoreGPT`` and its data.

::

    from lightning_mcore.planning.live import plan_of

    plan = plan_of(trainer, module, batch_size=4)

The objects are only read; nothing is run. This file does not import Lightning or Megatron, because the code that made
the objects has done so.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.run import RunSettings, rows_of_pairs
from lightning_mcore.planning.machines import Machine
from lightning_mcore.planning.plan import Plan, make_plan
from lightning_mcore.planning.signatures import of_model

_OF_TRAINER = ("accumulate_grad_batches", "max_steps", "max_epochs", "gradient_clip_val")


def plan_of(
    trainer: Any,
    module: Any,
    data: Any = None,
    batch_size: int | None = None,
    machine: Machine | None = None,
    devices: int | None = None,
    devices_per_node: int | None = None,
    image_tokens: int | None = None,
) -> Plan:
    """Plan the run of a Trainer and a module.

    Args:
        trainer: A Trainer whose strategy is ``MCoreStrategy``.
        module: An ``MCoreGPT``.
        data: A data module with ``batch_size`` and, if it differs from the model's, ``seq_length``.
        batch_size: Rows of a DataLoader batch; replaces the data module's.
        machine: The machine for times and for the memory of a device.
        devices: Ranks of the whole run; None for the Trainer's.
        devices_per_node: Devices of a node; None for the Trainer's.
        image_tokens: Tokens of images in a row, to count the vision tower for them.

    Raises:
        TypeError: The strategy is not ``MCoreStrategy``, or the module is not an ``MCoreGPT``.
        ValueError: There are no devices.
    """
    settings = dataclasses.replace(settings_of(trainer, module, data, batch_size), image_tokens=image_tokens)
    of_node = devices_per_node or (trainer.num_devices if devices is None else min(8, devices))
    return make_plan(settings, devices or trainer.num_devices * trainer.num_nodes, of_node, machine)


def settings_of(trainer: Any, module: Any, data: Any = None, batch_size: int | None = None) -> RunSettings:
    """Return the run of a Trainer and a module as plain data; arguments as in :func:`plan_of`."""
    strategy = trainer.strategy
    if not hasattr(strategy, "layout") or not hasattr(strategy, "gradients"):
        raise TypeError(f"{type(strategy).__name__} is not MCoreStrategy; give Trainer(strategy=MCoreStrategy(...))")
    if not hasattr(module, "transformer") or "vocab_size" not in getattr(module, "hparams", {}):
        raise TypeError(f"{type(module).__name__} is not an MCoreGPT, the only module whose sizes plan knows; give one")
    model = _model(module)
    names = ("batch_size", "seq_length", "packing")
    of_data = {name: value for name in names if (value := getattr(data, name, None)) is not None}
    of_data = rows_of_pairs(model, of_data) | ({} if batch_size is None else {"batch_size": batch_size})
    of_data.pop("packing", None)
    return RunSettings(
        strategy=_strategy(strategy),
        precision=_precision(strategy.precision_plugin),
        model=model,
        trainer={
            "devices": trainer.num_devices,
            "num_nodes": trainer.num_nodes,
            "accelerator": "cpu" if strategy.root_device.type == "cpu" else "gpu",
            **{name: value for name in _OF_TRAINER if (value := getattr(trainer, name, None)) is not None},
        },
        data=of_data,
    )


def _strategy(strategy: Any) -> dict[str, Any]:
    gradients, overlap = strategy.gradients, strategy.tensor_overlap
    values = {
        **vars(strategy.layout),
        "use_distributed_optimizer": gradients.use_distributed_optimizer,
        "overlap_grad_reduce": gradients.overlap_grad_reduce,
        "overlap_param_gather": gradients.overlap_param_gather,
        "overlap_p2p_comm": strategy.overlap_p2p_comm or None,
        "microbatch_group_size_per_vp_stage": strategy.microbatch_group_size,
        "tp_comm_overlap": overlap.enabled,
        "tp_comm_overlap_cfg": overlap._config_path,
        "micro_batch_size": strategy.micro_batch_size,
        "ddp_config": _changed(gradients.ddp_config),
        "optimizer_config": _changed(strategy.optimizer_config),
        "communication": _changed(strategy.communication),
    }
    return {name: value for name, value in values.items() if value not in (None, {}, False)}


def _precision(plugin: Any) -> dict[str, Any]:
    scaling = _changed(plugin._scaling) if plugin._scaling is not None else {}
    return {"precision": plugin.precision, **_changed(plugin.fp8), **scaling}


def _model(module: Any) -> dict[str, Any]:
    plain = {name: _plain(value) for name, value in dict(module.hparams).items()}
    if "vision" in plain:  # beside arguments of MCoreGPT, with their defaults
        plain = {name: value for name, value in plain.items() if name in of_model(sees=True)}
    return {**plain, "transformer": dict(module.transformer)}


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    if config is None:
        return {}
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default and not callable(value)
    }


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
