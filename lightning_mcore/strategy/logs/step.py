# SPDX-License-Identifier: Apache-2.0
"""One object for all logging of steps, in training and evaluation, on any layout.

The strategy owns one :class:`StepLogger`; its parts are

* ``pipeline.py``: ``self.log`` in a step that runs as a pipeline;
* * ``auxiliary.py``: losses that Megatron's layers compute;
* ``evaluation.py``: repeated samples that must not count, and names that only some ranks log.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.parallel.groups import process_group, process_groups_are_open
from lightning_mcore.strategy.logs.auxiliary import AuxiliaryLogs
from lightning_mcore.strategy.logs.evaluation import (
    EvaluationNames,
    RepeatedRows,
    agree_on_names,
    ends_the_epoch,
    reads_outputs,
    without_weight,
)
from lightning_mcore.strategy.logs.pipeline import PipelineLogs

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy


class StepLogger:
    """The calls of the strategy and the schedule around each step.

    Args:
        strategy: The strategy that owns it.
    """

    def __init__(self, strategy: "MCoreStrategy") -> None:
        self._strategy = strategy
        self._pipeline: PipelineLogs | None = None
        self._auxiliary: AuxiliaryLogs | None = None
        self._rows = RepeatedRows()
        self._names = EvaluationNames()
        self.shares_outputs = True
        """Whether any rank of the pipeline reads the output of a validation or test step; the same on all of them."""

    def setup(self, restores: contextlib.ExitStack) -> None:
        """Start a run; metrics reduce their state over the data- and context-parallel ranks.

        They still do so after the run, through a function that can be pickled, unlike a group.

        Args:
            restores: Restores the metrics after the run.
        """
        self._rows, self._names = RepeatedRows(), EvaluationNames()
        self._pipeline = self._auxiliary = None
        self.shares_outputs = True
        group = process_group("dp_cp")
        if group.size() < dist.get_world_size():  # otherwise it is the default group
            for metric in self._module.modules():
                if isinstance(metric, Metric):
                    restores.callback(_give_back, metric, metric.process_group)
                    metric.process_group = group

    def setup_pipeline(self, config: TransformerConfig) -> None:
        """Log for a model built with ``pipeline()``, which has this config."""
        module, device = self._module, self._strategy.root_device
        self._pipeline, self._auxiliary = PipelineLogs(module, device), AuxiliaryLogs(module, config, device)

    def teardown(self) -> None:
        """Release the module's metrics."""
        self._pipeline = self._auxiliary = None

    @property
    def pipeline(self) -> PipelineLogs:
        """The recorder of steps that the schedule runs."""
        assert self._pipeline is not None
        return self._pipeline

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    # ---- training

    @contextlib.contextmanager
    def layer_losses(self, num_microbatches: int) -> Iterator[None]:
        """Log the losses of layers over the microbatches that run inside the ``with`` block."""
        assert self._auxiliary is not None
        self._auxiliary.start()
        yield
        self._auxiliary.finish(num_microbatches)

    def end_plain_step(self) -> None:
        """Agree on names at the end of an epoch of a plain module, whose ranks merge them there."""
        if ends_the_epoch(self._module.trainer):
            agree_on_names(self._module)

    # ---- evaluation

    def start_evaluation(self) -> None:
        """Begin a run over the evaluation dataloaders; collective over the world."""
        trainer = self._module.trainer
        self._rows.start()
        loop = trainer._evaluation_loop
        self._names.start(loop.max_batches if loop._is_sequential else [], self._strategy.root_device)
        if self._strategy.layout.pipeline_model_parallel_size > 1:  # callbacks may differ from rank to rank
            self.shares_outputs = not all_true(not reads_outputs(trainer))

    def cut(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a validation or test batch without samples that the sampler repeats."""
        return self._rows.cut(batch, self._module.trainer._evaluation_loop._combined_loader, dataloader_idx)

    def evaluation_step(self) -> AbstractContextManager[None]:
        """Drop the logs of a step if all samples of its batch are repeated."""
        if self._rows.whole_batch:
            return without_weight(self._module, self._rows.only_batch)
        return contextlib.nullcontext()

    def end_evaluation_step(self) -> None:
        """After the last batch of a dataloader, agree on names."""
        self._names.end_of_batch(self._module, *self._rows.place)

    def end_evaluation(self) -> None:
        """Log later steps normally again."""
        self._rows.start()


def _give_back(metric: Metric, group: dist.ProcessGroup | None) -> None:
    metric.process_group = group
    if group is None and metric.dist_sync_fn is None:
        metric.dist_sync_fn = gather_over_data


def gather_over_data(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather a metric's state as torchmetrics does, without a group over the data- and context-parallel ranks.

    Over the world, the ranks of one model copy would count the same samples several times.

    Args:
        tensor: A state of the metric, of any shape and dtype.
        group: The group that the metric was given.

    Returns:
        The tensors of all ranks of the group, each with its own shape.
    """
    if group is None and process_groups_are_open():
        group = process_group("dp_cp")
    gathered: list[Tensor] = gather_all_tensors(tensor, group)
    return gathered
