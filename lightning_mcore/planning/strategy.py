# SPDX-License-Identifier: Apache-2.0
"""The settings of ``MCoreStrategy`` and ``MCorePrecision`` in a plan: what stands, and what is wrong with the rest.

The rules are those of the classes (``config/rules/strategy.py``, ``optimizer/options.py``, the parts themselves). The
strategy is built as well, with what is right of its arguments, because its half of Megatron's config comes from it.
"""

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_mcore.arguments.build import make_strategy
from lightning_mcore.config.checks import require_size
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.field_homes import check_owned_by_precision, ddp_fields_of
from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import strategy as strategy_rules
from lightning_mcore.optimizer.rules import refused_of_config, refused_on_device
from lightning_mcore.planning.rule_book import RuleBook
from lightning_mcore.planning.signatures import Arguments, of_config, of_precision, of_strategy
from lightning_mcore.strategy.overlap import TensorParallelOverlap
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.strategy import MCoreStrategy

_LAYOUT = tuple(field.name for field in dataclass_fields(ParallelLayout))
_FP8 = tuple(field.name for field in dataclass_fields(FP8Settings))
_SIZES = ("num_distributed_optimizer_instances", "bucket_size")


class PlannedStrategy:
    """The settings of strategy and precision, checked against each other.

    Args:
        book: Where refusals go.
        strategy: Arguments of ``MCoreStrategy``.
        precision: Arguments of ``MCorePrecision``.
        device_type: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(
        self, book: RuleBook, strategy: Mapping[str, Any], precision: Mapping[str, Any], device_type: str
    ) -> None:
        self._book = book
        self._device: Any = SimpleNamespace(type=device_type)
        self.strategy = book.check_arguments("argument of MCoreStrategy", strategy, of_strategy())
        self.precision = book.check_arguments("argument of MCorePrecision", precision, of_precision())
        self.layout = book.attempt(lambda: ParallelLayout(**_given(self.strategy, _LAYOUT)))
        self.fp8 = book.attempt(lambda: FP8Settings(**_given(self.precision, _FP8)))
        self.ddp = self._options("ddp_config", of_config("ddp_config"))
        self.optimizer = self._options("optimizer_config", of_config("optimizer_config"))
        communication = self._options("communication", of_config("communication"))
        self.communication = book.attempt(lambda: CommunicationOptions(**communication))

    @property
    def precision_name(self) -> str:
        """The number format, such as ``"bf16-mixed"``."""
        return str(self.precision.get("precision") or "32-true")

    @property
    def overlap_p2p_comm(self) -> bool:
        """Whether stages send while computing, the default filled in."""
        given = self.strategy.get("overlap_p2p_comm")
        interleaved = self.layout is not None and self.layout.virtual_pipeline_model_parallel_size is not None
        return interleaved if given is None else bool(given)

    def resolved(self, name: str) -> Any:
        """Return one of the settings of gradients: the argument, else what ``ddp_config`` says, else the default."""
        return strategy_rules.resolved(self.strategy, self.ddp).get(name, of_config("ddp_config")[name].default)

    @property
    def distributed(self) -> bool:
        """Whether the optimizer is sharded."""
        return bool(self.resolved("use_distributed_optimizer"))

    def check(self, world_size: int) -> None:
        """Refuse what contradicts itself, the devices or their number; the model comes later."""
        book, device_type = self._book, self._device.type
        precision = book.attempt(lambda: MCorePrecision(**self.precision))
        if precision is not None and precision.fp8.is_on:
            settings = (self.distributed, bool(self.resolved("overlap_param_gather")))
            offloads = bool(self.optimizer.get("optimizer_cpu_offload"))
            book.collect(strategy_rules.fp8_device_faults(precision.fp8.recipe, device_type))
            book.attempt(lambda: precision.fp8.check_optimizer(*settings, offloads))
        sizes = {f"ddp_config.{name}": self.ddp[name] for name in _SIZES if name in self.ddp}
        sizes |= _given(self.strategy, ("micro_batch_size", "microbatch_group_size_per_vp_stage"))
        before = len(book.errors)
        for name, size in sizes.items():
            book.attempt(lambda name=name, size=size: require_size(name, size))  # type: ignore[misc]
        sized = len(book.errors) == before
        book.collect(strategy_rules.gradient_faults(self.strategy, self.ddp))
        owned = precision.ddp_fields() if precision is not None else ddp_fields_of(self.precision_name)
        book.attempt(lambda: check_owned_by_precision(self.ddp, owned))
        book.collect(refused_of_config(self.optimizer, self.distributed))
        book.collect(refused_on_device(self.optimizer, device_type, bool(owned["grad_reduce_in_fp32"])))
        layout = self.layout
        if layout is None:
            return
        self._check_overlaps(layout)
        if book.passes(lambda: layout.validate_world(world_size)) and sized:
            book.collect(strategy_rules.world_faults(self.ddp, layout, world_size, device_type))
        book.collect(strategy_rules.expert_faults(layout, device_type))

    def megatron_fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's config that strategy and precision own."""
        without_optimizer = {**self.strategy, "ddp_config": self.ddp or None, "optimizer_config": None}
        strategy = self._book.attempt(lambda: make_strategy(without_optimizer))
        if strategy is None:  # refused above
            strategy = MCoreStrategy(**(vars(self.layout) if self.layout is not None else {}))
        strategy.parallel_devices = [torch.device(self._device.type)]
        strategy.cluster_environment = LightningEnvironment()
        quiet = RuleBook()  # refused above
        strategy._precision_plugin = quiet.attempt(lambda: MCorePrecision(**self.precision))
        return strategy.megatron_fields()

    def _options(self, name: str, known: Arguments) -> dict[str, Any]:
        """Return the fields of a config that do not have their default."""
        given = self.strategy.get(name)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self._book.refuse(f"{name}={given!r} is not a mapping; give its fields by name")
            return {}
        inner = given.get("init_args", {}) if "class_path" in given else given
        right = self._book.check_arguments(f"field of {name}", inner, known)
        return {key: value for key, value in right.items() if value != known[key].default}

    def _check_overlaps(self, layout: ParallelLayout) -> None:
        book, given = self._book, self.strategy
        group = given.get("microbatch_group_size_per_vp_stage")
        if book.collect(strategy_rules.schedule_faults(given, self.ddp, layout)) and group is not None:
            book.attempt(lambda: layout.validate_microbatches(group, group))
        options, instances = self.communication, self.ddp.get("num_distributed_optimizer_instances", 1)
        if options is not None:
            book.attempt(lambda: options.check_layout(layout, self.overlap_p2p_comm, instances))
            book.attempt(lambda: options.check_device(self._device))
        enabled, path = bool(given.get("tp_comm_overlap")), given.get("tp_comm_overlap_cfg")
        overlap = book.attempt(lambda: TensorParallelOverlap(enabled, path, layout))
        if overlap is not None and self._device.type != "cuda":  # on GPUs the machine of the run is to say
            book.attempt(lambda: overlap.check_device(self._device))


def _given(arguments: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: arguments[name] for name in names if arguments.get(name) is not None}
