# SPDX-License-Identifier: Apache-2.0
"""A callback that logs a run's layout and plan, next to the module's hyper-parameters."""

from typing import Any

import lightning.pytorch as pl

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.planning.live import is_gpt, plan_of
from lightning_mcore.planning.plan import Plan
from lightning_mcore.strategy.strategy import MCoreStrategy


class LogLayout(pl.Callback):
    """Logs the parallel sizes, and what ``plan`` says about the run, once, as hyper-parameters.

    Every logger of the trainer gets two groups of hyper-parameters when ``fit`` begins. ``layout`` has the sizes of
    :class:`ParallelLayout`, the data-parallel size and the number of ranks. ``plan`` has the precision, the number of
    parameters, and per step the rows, tokens, microbatches, FLOPs and pipeline bubble, and the memory of the fullest
    rank in bytes. A plan needs an ``MCoreGPT`` under ``MCoreStrategy``, and the ``batch_size`` of a DataLoader or data
    module; what is unknown is not logged. Only rank 0 logs, as for any hyper-parameter.

    Args:
        plan: Whether to log the plan too.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from lightning_mcore.callbacks import LogLayout
        >>> trainer = pl.Trainer(strategy="mcore", callbacks=[LogLayout()])
    """

    def __init__(self, plan: bool = True) -> None:
        self.plan = plan

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log, before Lightning logs the module's hyper-parameters."""
        if stage != "fit" or not trainer.loggers or not trainer.is_global_zero:
            return
        strategy, world_size = trainer.strategy, trainer.world_size
        layout = strategy.layout if isinstance(strategy, MCoreStrategy) else ParallelLayout()
        data_parallel_size = layout.data_parallel_size(world_size)
        values: dict[str, Any] = {
            "layout": {**vars(layout), "data_parallel_size": data_parallel_size, "world_size": world_size}
        }
        if self.plan and isinstance(strategy, MCoreStrategy) and is_gpt(pl_module):
            data = trainer.fit_loop._data_source.instance  # a DataLoader, a data module or the module
            values["plan"] = _summary(plan_of(trainer, pl_module, data))
        for logger in trainer.loggers:
            # With the module's, because TensorBoard shows only the first that a run logs.
            logger.log_hyperparams({**_own(trainer, pl_module), **values})


def _own(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """Return what Lightning is about to log: the hyper-parameters of the module and the data module."""
    values: dict[str, Any] = {}
    for owner in (module, getattr(trainer, "datamodule", None)):
        if trainer.enable_autolog_hparams and getattr(owner, "_log_hyperparams", False):
            values |= owner.hparams_initial  # type: ignore[union-attr]
    return {name: value for name, value in values.items() if name != "_class_path"}  # LightningCLI's


def _summary(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan that are known."""
    values: dict[str, Any] = {"precision": plan.precision}
    if plan.parameters is not None:
        values["parameters"] = plan.parameters.total
    if plan.batch is not None and not plan.batch.is_assumed and plan.fullest is not None:
        assert plan.timeline is not None
        assert plan.work is not None
        values |= {
            "rows_per_step": plan.batch.rows,
            "tokens_per_step": plan.batch.tokens,
            "num_microbatches": plan.batch.num_microbatches,
            "model_flops_per_step": plan.work.model_flops,
            "pipeline_bubble": plan.timeline.bubble,
            "memory_bytes": plan.fullest.memory.total,
        }
    return values
