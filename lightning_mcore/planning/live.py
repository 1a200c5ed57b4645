# SPDX-License-Identifier: Apache-2.0
"""A plan from Python objects: a Trainer with ``MCoreStrategy``, a module and its data.

::

    from lightning_mcore.planning.live import plan_of

    plan = plan_of(trainer, module, batch_size=4)

The objects are only read; nothing is run. A module that is not an ``MCoreGPT`` is planned from its chunks
(``chunks.py``).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_mcore.config.run import RunSettings, rows_of_pairs
from lightning_mcore.planning.chunks import plan_of_chunks
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
        module: An ``MCoreGPT``, or any LightningModule that builds its model with ``pipeline()`` in
            ``configure_model``: then activations, operations and traffic are not known.
        data: A data module with ``batch_size`` and, if it differs from the model's, ``seq_length``.
        batch_size: Rows of a DataLoader batch; replaces the data module's.
        machine: The machine for times and for the memory of a device.
        devices: Ranks of the whole run; None for the Trainer's.
        devices_per_node: Devices of a node; None for the Trainer's.
        image_tokens: Tokens of images in a row, to count the vision tower for them.

    Raises:
        TypeError: The strategy is not ``MCoreStrategy``.
        ValueError: There are no devices, or the module builds no model with ``pipeline()``.
        RuntimeError: The module is not an ``MCoreGPT``, and this process has process groups of a run.
    """
    settings = dataclasses.replace(settings_of(trainer, module, data, batch_size), image_tokens=image_tokens)
    of_node = devices_per_node or (trainer.num_devices if devices is None else min(8, devices))
    ranks = devices or trainer.num_devices * trainer.num_nodes
    if not is_gpt(module):
        return plan_of_chunks(trainer, module, settings, ranks, of_node, machine)
    return make_plan(settings, ranks, of_node, machine)


def settings_of(trainer: Any, module: Any, data: Any = None, batch_size: int | None = None) -> RunSettings:
    """Return the run of a Trainer and a module as plain data; arguments as in :func:`plan_of`."""
    strategy = trainer.strategy
    if not hasattr(strategy, "layout") or not hasattr(strategy, "gradients"):
        raise TypeError(f"{type(strategy).__name__} is not MCoreStrategy; give Trainer(strategy=MCoreStrategy(...))")
    model, plugin = _model(module) if is_gpt(module) else {}, strategy.precision_plugin
    names = ("batch_size", "seq_length", "packing")
    of_data = {} if model else {"seq_length": 0}
    of_data |= {name: value for name in names if (value := getattr(data, name, None)) is not None}
    of_data = rows_of_pairs(model, of_data) | ({} if batch_size is None else {"batch_size": batch_size})
    of_data.pop("packing", None)
    return RunSettings(
        strategy=_strategy(strategy),
        precision={"precision": plugin.precision, **_changed(plugin.fp8), **_changed(plugin._scaling)},
        model=model,
        trainer={
            "devices": trainer.num_devices,
            "num_nodes": trainer.num_nodes,
            "accelerator": "cpu" if strategy.root_device.type == "cpu" else "gpu",
            **{name: value for name in _OF_TRAINER if (value := getattr(trainer, name, None)) is not None},
        },
        data=of_data,
    )


def is_gpt(module: Any) -> bool:
    """Whether a module is an ``MCoreGPT``, by what it has."""
    return hasattr(module, "transformer") and "vocab_size" in getattr(module, "hparams", {})


def _strategy(strategy: Any) -> dict[str, Any]:
    gradients, overlap = strategy.gradients, strategy.tensor_overlap
    values = {
        **vars(strategy.layout),
        **{field.name: getattr(gradients, field.name) for field in dataclasses.fields(gradients)},
        "overlap_p2p_comm": strategy.overlap_p2p_comm,
        "microbatch_group_size_per_vp_stage": strategy.microbatch_group_size,
        "tp_comm_overlap": overlap.enabled,
        "tp_comm_overlap_cfg": overlap._config_path,
        "micro_batch_size": strategy.micro_batch_size,
        "ddp_config": _changed(gradients.ddp_config),
        "optimizer_config": _changed(strategy.optimizer_config),
        "communication": _changed(strategy.communication),
    }
    given = {name: value for name, value in values.items() if value not in (None, {}, False)}
    return {**given, "loss_chunk_size": strategy.loss_chunk_size}  # None is a choice


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
