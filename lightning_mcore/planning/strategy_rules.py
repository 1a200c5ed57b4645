# SPDX-License-Identifier: Apache-2.0
"""What ``MCoreStrategy`` and ``MCorePrecision`` refuse, worked out from plain data.

The checks that need no Megatron object are called as they are (layout, loss scale, FP8, ``optimizer/rules.py``,
``CommunicationOptions``). Those of ``strategy/gradients.py``, ``strategy/checks.py`` and ``strategy/overlap.py``
work on Megatron's configs; their rules stand here a second time, on dicts, over the same tables
(``config/field_homes.py``). A test holds both together.
"""

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_mcore.config.checks import require_size
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.field_homes import (
    DDP_NOT_AVAILABLE,
    FSDP,
    check_owned_by_precision,
    ddp_fields_of,
)
from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.fp16 import LossScaling
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.signatures import (
    DDP,
    OPTIMIZER,
    PRECISION,
    STRATEGY,
    Argument,
    choices_named,
    parameters,
)
from lightning_mcore.config.signatures import (
    dataclass_fields as fields_in_source,
)
from lightning_mcore.optimizer.rules import refused_of_config, refused_on_device
from lightning_mcore.planning.rule_book import RuleBook

_SHARED = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
_LAYOUT = tuple(field.name for field in dataclass_fields(ParallelLayout))
_NEEDS = {
    "num_distributed_optimizer_instances": "use_distributed_optimizer",
    "reduce_scatter_with_fp32_accumulation": "use_distributed_optimizer",
    "align_param_gather": "overlap_param_gather",
    "disable_symmetric_registration": "nccl_ub",
}


class StrategyRules:
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
        self._device = SimpleNamespace(type=device_type)
        self.strategy = book.check_arguments("argument of MCoreStrategy", strategy, parameters(STRATEGY))
        self.precision = book.check_arguments("argument of MCorePrecision", precision, parameters(PRECISION))
        self.layout = book.attempt(self._make_layout)
        self.fp8 = book.attempt(self._make_fp8)
        self.ddp = self._options("ddp_config", fields_in_source(DDP))
        self.optimizer = self._options("optimizer_config", fields_in_source(OPTIMIZER))
        self.communication = book.attempt(self._make_communication)

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
        if name in _SHARED and self.strategy.get(name) is not None:
            return self.strategy[name]
        if name in self.ddp:
            return self.ddp[name]
        known = fields_in_source(DDP)
        return known[name].default if name in known else None

    @property
    def distributed(self) -> bool:
        """Whether the optimizer is sharded."""
        return bool(self.resolved("use_distributed_optimizer"))

    @property
    def ddp_fields(self) -> dict[str, Any]:
        """The fields of ``ddp_config`` that the precision owns."""
        return {**ddp_fields_of(self.precision_name), **(self.fp8.ddp_fields() if self.fp8 is not None else {})}

    def check(self) -> None:
        """Refuse what needs neither the world nor the model."""
        self._check_precision()
        self._check_gradients()
        self._check_optimizer()
        self._check_overlaps()

    def check_world(self, world_size: int) -> None:
        """Refuse what the number of ranks or the device cannot do."""
        layout = self.layout
        if layout is None or not self._book.passes(lambda: layout.validate_world(world_size)):
            return
        instances = self.resolved("num_distributed_optimizer_instances") or 1
        replicas = layout.data_parallel_size(world_size) * layout.context_parallel_size
        edp = layout.expert_data_parallel_size(world_size)
        for name, size in (
            ("data-parallel times context-parallel size", replicas),
            ("expert data-parallel size", edp),
        ):
            if isinstance(instances, int) and instances > 0 and size % instances:
                self._book.refuse(
                    f"ddp_config.num_distributed_optimizer_instances={instances} does not divide the {name}, which is"
                    f" {size}; choose one of its divisors"
                )

    # ---- parts

    def _make_layout(self) -> ParallelLayout:
        given = {name: self.strategy[name] for name in _LAYOUT if self.strategy.get(name) is not None}
        return ParallelLayout(**given)

    def _make_fp8(self) -> FP8Settings:
        names = {field.name for field in dataclass_fields(FP8Settings)}
        return FP8Settings(**{name: value for name, value in self.precision.items() if name in names})

    def _make_communication(self) -> CommunicationOptions:
        given = self.strategy.get("communication")
        known = {field.name: Argument(Any, None) for field in dataclass_fields(CommunicationOptions)}
        return CommunicationOptions(**self._book.check_arguments("field of communication", given or {}, known))

    def _options(self, name: str, known: Mapping[str, Argument]) -> dict[str, Any]:
        given = self.strategy.get(name)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self._book.refuse(f"{name}={given!r} is no mapping; give its fields by name")
            return {}
        inner = given.get("init_args", {}) if "class_path" in given else given
        right = self._book.check_arguments(f"field of {name}", inner, known)
        return {key: value for key, value in right.items() if value != known[key].default}

    def _check_precision(self) -> None:
        name, refuse = self.precision_name, self._book.refuse
        allowed = choices_named("PrecisionName")
        if name not in allowed:
            refuse(f"precision={name!r} is not available under MCoreStrategy; choose one of {allowed}")
        self._book.attempt(self._make_scaling)
        if self.fp8 is not None and self.fp8.is_on:
            self._check_fp8(self.fp8)

    def _make_scaling(self) -> None:
        names = {field.name for field in dataclass_fields(LossScaling)}
        scaling = LossScaling(**{name: value for name, value in self.precision.items() if name in names})
        scaling.check_precision(self.precision_name)

    def _check_fp8(self, fp8: FP8Settings) -> None:
        refuse = self._book.refuse
        if not self.precision_name.startswith("bf16"):
            refuse(
                f"fp8_recipe={fp8.recipe!r} is not available with precision={self.precision_name!r};"
                ' use MCorePrecision("bf16-mixed", ...) or "bf16-true"'
            )
        if self._device.type != "cuda":
            refuse(
                f"FP8 needs a CUDA device, and this run is on {self._device.type!r}; leave fp8_recipe={fp8.recipe!r}"
                ' out, or run with accelerator="gpu"'
            )
        settings = (self.distributed, bool(self.resolved("overlap_param_gather")))
        offloads = bool(self.optimizer.get("optimizer_cpu_offload"))
        self._book.attempt(lambda: fp8.check_optimizer(*settings, offloads))

    def _check_gradients(self) -> None:
        refuse, ddp = self._book.refuse, self.ddp
        for name in _SHARED:
            given = self.strategy.get(name)
            if given is not None and name in ddp and ddp[name] != given:
                refuse(f"{name}={given} contradicts ddp_config.{name}={ddp[name]}; set it in one place")
        for name, value in ddp.items():
            reason = FSDP if "fsdp" in name else DDP_NOT_AVAILABLE.get(name)
            if reason is not None:
                refuse(f"ddp_config.{name}={value!r} is not available: {reason}; leave it out")
            elif name in _NEEDS and not self.resolved(_NEEDS[name]):
                refuse(f"ddp_config.{name}={value} needs {_NEEDS[name]}=True; set both")
        for name in ("num_distributed_optimizer_instances", "bucket_size"):
            if name in ddp:
                self._book.attempt(lambda name=name: require_size(f"ddp_config.{name}", ddp[name]))  # type: ignore[misc]
        self._check_reduction()
        missing = [name for name in _SHARED[:2] if not self.resolved(name)]
        if self.resolved("overlap_param_gather") and missing:
            refuse(f"overlap_param_gather=True needs {' and '.join(f'{name}=True' for name in missing)}")

        if self.strategy.get("align_grad_reduce") and not self.resolved("overlap_grad_reduce"):
            refuse("align_grad_reduce=True needs overlap_grad_reduce=True; set both, or neither")

    def _check_reduction(self) -> None:
        """Refuse ways to sum gradients that contradict each other, the precision or the device."""
        refuse, ddp = self._book.refuse, self.ddp
        if ddp.get("reduce_scatter_with_fp32_accumulation"):
            for name in ("average_in_collective", "num_distributed_optimizer_instances"):
                if name in ddp:
                    refuse(
                        f"ddp_config.{name}={ddp[name]} contradicts reduce_scatter_with_fp32_accumulation=True, which"
                        " sums over all data-parallel ranks; set one of them"
                    )
        owned = self.ddp_fields
        self._book.attempt(lambda: check_owned_by_precision(ddp, owned))
        if self._device.type != "cuda":
            for name in ("average_in_collective", "nccl_ub"):
                if ddp.get(name):
                    refuse(
                        f"ddp_config.{name}=True is an option of NCCL, but this run is on {self._device.type!r}, whose"
                        " groups are gloo; leave it out"
                    )

    def _check_optimizer(self) -> None:
        sums_in_fp32 = bool(self.ddp_fields["grad_reduce_in_fp32"])
        for sentence in (
            *refused_of_config(self.optimizer, self.distributed),
            *refused_on_device(self.optimizer, self._device.type, sums_in_fp32),
        ):
            self._book.refuse(sentence)

    def _check_overlaps(self) -> None:
        layout, book, strategy = self.layout, self._book, self.strategy
        if strategy.get("micro_batch_size") is not None:
            book.attempt(lambda: require_size("micro_batch_size", strategy["micro_batch_size"]))
        if layout is None:
            return
        interleaved = layout.virtual_pipeline_model_parallel_size is not None
        if strategy.get("overlap_p2p_comm") and not interleaved:
            book.refuse(
                "overlap_p2p_comm=True needs the interleaved schedule; set virtual_pipeline_model_parallel_size=2 or"
                " more"
            )
        group = strategy.get("microbatch_group_size_per_vp_stage")
        if group is not None and not interleaved:
            book.refuse(
                f"microbatch_group_size_per_vp_stage={group} needs the interleaved schedule; set"
                " virtual_pipeline_model_parallel_size=2 or more, or leave it None"
            )
        elif group is not None:
            book.attempt(lambda: layout.validate_microbatches(group, group))
        if strategy.get("align_grad_reduce") and layout.pipeline_model_parallel_size == 1:
            book.refuse(
                "align_grad_reduce=True acts between pipeline stages alone; set pipeline_model_parallel_size=2 or more,"
                " or leave it out"
            )
        if self.resolved("align_param_gather") and not interleaved:
            book.refuse(
                "ddp_config.align_param_gather=True acts in the interleaved schedule alone; set"
                " virtual_pipeline_model_parallel_size=2 or more, or leave it out"
            )
        if self.communication is not None:
            options, instances = self.communication, self.resolved("num_distributed_optimizer_instances") or 1
            book.attempt(lambda: options.check_layout(layout, self.overlap_p2p_comm, instances))
            book.attempt(lambda: options.check_device(self._device))  # type: ignore[arg-type]
        self._check_tensor_overlap(layout)

    def _check_tensor_overlap(self, layout: ParallelLayout) -> None:
        enabled, path = self.strategy.get("tp_comm_overlap"), self.strategy.get("tp_comm_overlap_cfg")
        if path is not None and not enabled:
            self._book.refuse(f"tp_comm_overlap_cfg={path!r} needs tp_comm_overlap=True; set both")
        if path is not None and not Path(path).is_file():
            self._book.refuse(f"tp_comm_overlap_cfg={path!r} is not a file; give the path of one in YAML")
        if enabled and not layout.sequence_parallel:
            self._book.refuse(
                "tp_comm_overlap=True needs sequence_parallel=True, and with it tensor_model_parallel_size of 2 or"
                " more; set both"
            )
        if enabled and self._device.type != "cuda":
            self._book.refuse(
                f"tp_comm_overlap=True needs CUDA and TransformerEngine, but this run is on {self._device.type!r};"
                " leave it out"
            )
