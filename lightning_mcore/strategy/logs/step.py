# SPDX-License-Identifier: Apache-2.0
"""One object for all logging of steps, in training and evaluation, on any layout.

The strategy owns one :class:`StepLogger`; its parts are

* ``pipeline.py``: ``self.log`` in a step that runs as a pipeline;
* ``auxiliary.py``: losses that Megatron's layers compute, of expert routers and of multi-token prediction;
* ``evaluation.py``: samples that repeat and must not count, and names that only some ranks log.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.chunks import find_pipeline
from lightning_mcore.parallel.consensus import any_true
from lightning_mcore.parallel.groups import process_group, process_groups_are_open
from lightning_mcore.strategy.logs.auxiliary import AuxiliaryLogs
from lightning_mcore.strategy.logs.evaluation import (
    EvaluationNames,
    RepeatedRows,
    agree_on_names,
    reads_outputs,
    without_weight,
)
from lightning_mcore.strategy.logs.pipeline import PipelineLogs

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_Axis = Literal["dp", "dp_cp"]


class StepLogger:
    """Logs steps; the strategy and the schedule call it before and after each one."""

    def __init__(self, strategy: "MCoreStrategy") -> None:
        self._strategy = strategy
        self._pipeline: PipelineLogs | None = None
        self._auxiliary: AuxiliaryLogs | None = None
        self._rows = RepeatedRows()
        self._names = EvaluationNames()
        self.shares_outputs = True
        """Whether any rank of the pipeline reads the output of a validation or test step; equal on all its ranks."""

    def setup(self, restores: contextlib.ExitStack) -> None:
        """Start a run, in which metrics reduce their state over the ranks that see different tokens.

        Closing ``restores`` replaces the group by a function that does the same, because a group cannot be pickled.
        """
        self._rows, self._names = RepeatedRows(), EvaluationNames()
        self._pipeline = self._auxiliary = None
        self.shares_outputs = True
        pipeline = find_pipeline(self._module)
        # With complete batches, all context-parallel ranks see the same samples, which must count once.
        axis: _Axis = "dp" if pipeline is not None and pipeline.takes_whole_batches else "dp_cp"
        group = process_group(axis)
        if group.size() < dist.get_world_size():  # otherwise it is the default group
            for metric in self._module.modules():
                if isinstance(metric, Metric):
                    restores.callback(_give_back, metric, metric.process_group, partial(gather_over_data, axis=axis))
                    metric.process_group = group

    def setup_pipeline(self, config: TransformerConfig, takes_whole_batches: bool) -> PipelineLogs:
        """Prepare to log for a model built with ``pipeline()``; return the recorder of its steps."""
        module, device = self._module, self._strategy.root_device
        self._auxiliary = AuxiliaryLogs(config, device)
        self._pipeline = recorder = PipelineLogs(module, device, takes_whole_batches)
        return recorder

    def teardown(self) -> None:
        """Drop what refers to the module and its metrics."""
        if self._pipeline is not None:
            self._pipeline.forget()
        self._pipeline = self._auxiliary = None

    @property
    def pipeline(self) -> PipelineLogs | None:
        """The recorder of steps that the schedule runs, which also counts their tokens; None for a plain module."""
        return self._pipeline

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    @contextlib.contextmanager
    def layer_losses(self, num_microbatches: int) -> Iterator[None]:
        """Log the losses of layers over the microbatches that run inside the ``with`` block."""
        assert self._auxiliary is not None
        assert self._pipeline is not None
        self._auxiliary.start()
        yield
        self._pipeline.log_after(self._auxiliary.finish(num_microbatches))

    def complete_training_step(self) -> None:
        """Log what the last step of a pipeline has left to log, after the optimizer step is on its way."""
        if self._pipeline is not None:
            self._pipeline.complete()

    def end_plain_step(self) -> None:
        """At the end of a plain module's epoch, agree on names, because its ranks merge them there."""
        if self._strategy.ends_epoch:
            agree_on_names(self._module)

    def start_evaluation(self) -> None:
        """Begin a run over the evaluation dataloaders; collective over the world."""
        trainer = self._module.trainer
        self._rows.start()
        loop = trainer._evaluation_loop
        self._names.start(loop, self._strategy.root_device)
        if self._strategy.layout.pipeline_model_parallel_size > 1:  # callbacks may differ from rank to rank
            self.shares_outputs = any_true(reads_outputs(trainer))

    def drop_repeated_rows(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a validation or test batch without samples that the sampler repeats."""
        loaders = self._module.trainer._evaluation_loop._combined_loader
        return self._rows.cut(batch, loaders, dataloader_idx, self._strategy.batches.counts)

    @property
    def counts(self) -> bool:
        """Whether the running step's rows count; they do not if they only run as often as on other ranks."""
        return not self._rows.whole_batch and (self._pipeline is None or not self._pipeline.is_muted)

    @property
    def rows_of_others(self) -> int:
        """Rows that the evaluation batch has on ranks without repeated samples; 0 if this rank's was not cut."""
        return self._rows.rows_before

    def evaluation_step(self) -> AbstractContextManager[None]:
        """Drop the logs of a step if all samples of its batch are repeated."""
        if self._rows.whole_batch:
            return without_weight(self._module, self._rows.only_batch)
        return contextlib.nullcontext()

    def repeated(self) -> AbstractContextManager[None]:
        """Return a context in which a step counts nothing, because it only runs for other ranks."""
        return attributes_set([self._rows], {"whole_batch": True})

    def end_evaluation_step(self) -> None:
        """After the last batch of a dataloader, agree on names."""
        self._names.end_of_batch(self._module, *self._rows.place)

    def end_evaluation(self) -> None:
        """Log later steps normally again."""
        self._rows.start()


def _give_back(metric: Metric, group: dist.ProcessGroup | None, gather: Callable[..., list[Tensor]]) -> None:
    metric.process_group = group
    if group is None and metric.dist_sync_fn is None:
        metric.dist_sync_fn = gather


def gather_over_data(tensor: Tensor, group: dist.ProcessGroup | None = None, axis: _Axis = "dp_cp") -> list[Tensor]:
    """Gather a metric's state as torchmetrics does, but over the ranks that see different tokens."""
    # Over the world, samples would count several times. With TP=2 and DP=2, ranks 0 and 2 gather two tensors, and so do
    # ranks 1 and 3.
    if group is None and process_groups_are_open():
        group = process_group(axis)
    gathered: list[Tensor] = gather_all_tensors(tensor, group)
    return gathered
