# SPDX-License-Identifier: Apache-2.0
"""How gradients and parameters travel between data-parallel ranks: one home for each setting.

Megatron keeps these settings in its ``DistributedDataParallelConfig``. The strategy offers the common ones as arguments
and takes the whole config for the rest; a setting given in both places with two values is refused.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig

_DEFAULTS = DistributedDataParallelConfig()


@dataclass(frozen=True)
class GradientSettings:
    """The strategy's arguments on gradients; None leaves a setting to ``ddp_config`` or Megatron's default.

    Args:
        use_distributed_optimizer: Shard the optimizer state over the data-parallel ranks.
        overlap_grad_reduce: Reduce gradients while backward still runs.
        overlap_param_gather: Gather the updated parameters while the next forward runs.
        ddp_config: Megatron's config for everything else.

    Raises:
        ValueError: Two values for one setting, or an overlap without what it needs.
    """

    use_distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    ddp_config: DistributedDataParallelConfig | None = field(default=None)

    def __post_init__(self) -> None:
        """Check the settings against each other."""
        if self.ddp_config is not None and not isinstance(self.ddp_config, DistributedDataParallelConfig):
            raise TypeError(
                f"ddp_config={self.ddp_config!r} is not a DistributedDataParallelConfig;"
                " make one from megatron.core.distributed"
            )
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, bool):
                raise TypeError(f"{name}={given!r} is not a bool; give True, False or None")
            self._check_one_value(name, given)
        resolved = self.resolve()
        missing = [n for n in ("use_distributed_optimizer", "overlap_grad_reduce") if not getattr(resolved, n)]
        if resolved.overlap_param_gather and missing:
            raise ValueError(f"overlap_param_gather=True needs {' and '.join(f'{name}=True' for name in missing)}")

    @property
    def distributed(self) -> bool:
        """Whether the optimizer state is sharded."""
        return bool(self.resolve().use_distributed_optimizer)

    def resolve(self, owned: Mapping[str, Any] | None = None) -> DistributedDataParallelConfig:
        """Return Megatron's config with the strategy's arguments and the precision filled in.

        Args:
            owned: The fields that the precision owns, as ``MCorePrecision.ddp_fields`` returns them.

        Raises:
            ValueError: ``ddp_config`` has another value for one of these.
        """
        config = self.ddp_config or _DEFAULTS
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, value in (owned or {}).items():
            given = getattr(config, name)
            if given != getattr(_DEFAULTS, name) and given != value:
                raise ValueError(
                    f"ddp_config.{name}={given} contradicts Trainer(precision=...), which means {name}={value}; "
                    "set it through the precision"
                )
            values[name] = value
        return dataclasses.replace(config, **values)

    def _check_one_value(self, name: str, given: bool | None) -> None:
        if self.ddp_config is None or given is None:
            return
        other = getattr(self.ddp_config, name)
        if other != getattr(_DEFAULTS, name) and other != given:
            raise ValueError(f"{name}={given} contradicts ddp_config.{name}={other}; set it in one place")
