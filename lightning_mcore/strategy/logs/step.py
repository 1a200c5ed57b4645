# SPDX-License-Identifier: Apache-2.0
"""One object for all logging of steps, in training and evaluation, on any layout.

The strategy owns one :class:`StepLogger`; its parts are

* ``pipeline.py``: ``self.log`` in a step that runs as a pipeline;
* :class:`AuxiliaryLogs`: losses that Megatron's layers compute, of expert routers and of multi-token prediction;
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

from lightning_mcore.parallel.chunks import find_pipeline
from lightning_mcore.parallel.consensus import all_true
from lightning_mcore.parallel.groups import process_group, process_groups_are_open
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
import torch

from lightning_mcore.config.flops import moe_layers
from lightning_mcore.layers.multi_token import mtp_tracker, recorded_mtp_losses
from lightning_mcore.layers.router import recorded_values, router_tracker

_Axis = Literal["dp", "dp_cp"]


class StepLogger:
    """Logs steps; the strategy and the schedule call it before and after each one.

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
        """Whether any rank of the pipeline reads the output of a validation or test step; equal on all its ranks."""

    def setup(self, restores: contextlib.ExitStack) -> None:
        """Start a run, in which metrics reduce their state over the ranks that see different tokens.

        They still do so after the run, through a function, because a group cannot be pickled.

        Args:
            restores: Its callbacks restore the metrics after the run.
        """
        self._rows, self._names = RepeatedRows(), EvaluationNames()
        self._pipeline = self._auxiliary = None
        self.shares_outputs = True
        pipeline = find_pipeline(self._module)
        axis: _Axis = "dp" if pipeline is not None and pipeline.takes_whole_batches else "dp_cp"
        group = process_group(axis)
        if group.size() < dist.get_world_size():  # otherwise it is the default group
            for metric in self._module.modules():
                if isinstance(metric, Metric):
                    restores.callback(_give_back, metric, metric.process_group, partial(gather_over_data, axis=axis))
                    metric.process_group = group

    def setup_pipeline(self, config: TransformerConfig, takes_whole_batches: bool) -> None:
        """Prepare to log for a model built with ``pipeline()``.

        Args:
            config: The config of the model.
            takes_whole_batches: As for :class:`PipelineLogs`.
        """
        module, device = self._module, self._strategy.root_device
        self._pipeline = PipelineLogs(module, device, takes_whole_batches)
        self._auxiliary = AuxiliaryLogs(module, config, device)

    def teardown(self) -> None:
        """Drop what refers to the module and its metrics."""
        self._pipeline = self._auxiliary = None

    @property
    def pipeline(self) -> PipelineLogs:
        """The recorder of steps that the schedule runs."""
        assert self._pipeline is not None
        return self._pipeline

    @property
    def counter(self) -> PipelineLogs | None:
        """The recorder, which also counts the tokens of a step; None for a plain module."""
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
        """At the end of an epoch of a plain module, agree on names, because its ranks merge them there."""
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

    @property
    def counts(self) -> bool:
        """Whether the rows of the running step count; they do not where they are repeated to run as often as others."""
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
    """Gather a metric's state as torchmetrics does, but by default over the ranks that see different tokens.

    Over the whole world, the ranks of one model copy would count the same samples several times.

    Args:
        tensor: A state of the metric, of any shape and dtype.
        group: The group that the metric was given; None for the group of ``axis``, or for the world if the process
            groups are closed.
        axis: The axis of the ranks that see different tokens.

    Returns:
        The tensors of all ranks of the group, each with its own shape.
    """
    if group is None and process_groups_are_open():
        group = process_group(axis)
    gathered: list[Tensor] = gather_all_tensors(tensor, group)
    return gathered


_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class AuxiliaryLogs:
    """Logs the losses of Megatron's layers, one training step at a time.

    These losses never pass through ``training_step``. Megatron's layers add them up, layer by layer, in trackers of the
    process over the microbatches of a step. This class empties the trackers before a training step and reads them after
    it. It sums over ranks, averages over microbatches and data-parallel ranks, and logs through Lightning on every
    rank. For any model built with ``pipeline()`` it logs

    * ``load_balancing_loss``, ``seq_load_balancing_loss``, ``global_load_balancing_loss`` and ``z_loss``: the mean over
      the layers with experts, without the coefficients. With ``TransformerConfig(moe_per_layer_logging=True)`` also
      the value of each layer, as ``moe/z_loss_layer_0``, counted from 0 as Megatron does.
    * ``mtp_loss_1``, ``mtp_loss_2``, ...: the loss of the first, second, ... token after the next one: the mean over
      microbatches of the mean over the tokens of each. Under context parallelism, a plain ``GPTModel`` averages the
      means of the ranks; ``multi_token.MultiTokenGPT`` weights them by their tokens.

    Nothing is recorded in evaluation, and nothing is left for the next run.

    Source: ``track_moe_metrics`` (megatron.core.transformer.moe.moe_utils, 0.16.1), ``MoEMetricsTracker.report``
    (moe_logging.py, 0.19.2) and ``MTPLossLoggingHelper`` (multi_token_prediction.py, both).

    Args:
        module: The LightningModule that logs.
        config: The config of its model.
        device: The device on which the values are summed.
    """

    def __init__(self, module: pl.LightningModule, config: TransformerConfig, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._router_losses = router_losses(config)
        self._mtp_layers: int = config.mtp_num_layers or 0
        self._layers_with_experts = layers_with_experts(config)
        self._num_rows = config.num_layers + self._mtp_layers
        self._each_layer: bool = getattr(config, "moe_per_layer_logging", False)

    def start(self) -> None:
        """Empty the trackers, including values from another model's layers."""
        router_tracker().clear()
        mtp_tracker().clear()

    def finish(self, num_microbatches: int) -> None:
        """Log the losses of a step and empty the trackers; collective over all ranks.

        Args:
            num_microbatches: Number of microbatches since :meth:`start`.
        """
        if self._router_losses or self._mtp_layers:
            rows = self._reduced() / num_microbatches
            for index, name in enumerate(self._router_losses):
                self._log_router_loss(name, rows[index])
            for index in range(self._mtp_layers):
                self._module.log(f"mtp_loss_{index + 1}", rows[-1, index])
        self.start()

    def _log_router_loss(self, name: str, values: Tensor) -> None:
        layers = self._layers_with_experts
        self._module.log(name, values[layers].mean())
        if self._each_layer:
            for layer in layers:
                self._module.log(f"moe/{name}_layer_{layer}", values[layer])

    def _reduced(self) -> Tensor:
        """Return sums over microbatches, [losses, layers] fp32: router losses, then multi-token prediction."""
        rows = torch.zeros(len(self._router_losses) + 1, self._num_rows, device=self._device)
        tracker = router_tracker()
        for index, name in enumerate(self._router_losses):
            if name in tracker:
                rows[index] = recorded_values(tracker[name])
        values = recorded_mtp_losses()
        if values is not None:
            rows[-1, : self._mtp_layers] = values
        for axis in ("dp_cp", "model"):
            dist.all_reduce(rows, group=process_group(axis))
        names = (*self._router_losses, "")
        return rows / torch.stack([torch.full((1,), self._copies(name), device=self._device) for name in names])

    def _copies(self, name: str) -> float:
        """Return what the sum of a loss over all ranks is divided by.

        Each rank holds a part of a balancing loss, which is that of its model copy's microbatch or, if global, of the
        microbatches of all copies. Of another loss it holds the mean over its own tokens.
        """
        data_and_context = process_group("dp_cp").size()
        if name == "global_load_balancing_loss":
            return 1.0
        if name in _BALANCING.values():
            return data_and_context / process_group("cp").size()
        return float(data_and_context * process_group("tp").size())


def router_losses(config: TransformerConfig) -> list[str]:
    """Return the names of the losses that the routers of a model record."""
    if not config.num_moe_experts:
        return []
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, weights = [kinds], [weights]
    names = [_BALANCING[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _BALANCING and weight > 0]
    return [*names, "z_loss"] if config.moe_z_loss_coeff is not None else names


def layers_with_experts(config: TransformerConfig) -> list[int]:
    """Return the indices of the layers with experts, counted from 0; multi-token prediction comes last."""
    pattern = moe_layers(vars(config))
    pattern += [pattern[-1]] * (config.mtp_num_layers or 0)
    return [layer for layer, has_experts in enumerate(pattern) if has_experts]
