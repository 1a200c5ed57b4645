# SPDX-License-Identifier: Apache-2.0
"""Build Lightning's objects from a run's settings: strategy, precision, trainer, model and data.

``TrainingArguments`` and the LLaMA-Factory command call these functions, which take plain data from ``mapping.py``. In
``arguments/``, only this file and parts of ``llamafactory/`` import Lightning.

:class:`StepCheckpoint` and :class:`StepEvaluation` save and evaluate at the same steps as transformers' Trainer: every
n steps, and after the last step. Lightning alone does so only at multiples of n, and it logs nothing from an evaluation
before the first step (``eval_on_start``), which it treats as a check of the code.
"""

import importlib.util
import inspect
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import Precision
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from lightning_mcore.arguments.mapping import callback_settings, logger_settings
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.config.communication import CommunicationOptions
from lightning_mcore.config.ray import ON_RAY
from lightning_mcore.config.run import RunSettings, class_and_arguments
from lightning_mcore.config.text import unknown_name
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.kinds import kind_of
from lightning_mcore.optimizer.rules import megatron_config_faults
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.preemption import PreemptionCheckpoint
from lightning_mcore.strategy.strategy import MCoreStrategy


class LimitedCheckpoint(ModelCheckpoint):
    """A ``ModelCheckpoint`` that keeps no more than ``save_top_k``, as transformers' Trainer does.

    Lightning never removes the checkpoint from which a run resumed, so each resume would leave one more.
    """

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        return previous != current and os.path.dirname(os.path.abspath(previous)) == os.path.abspath(str(self.dirpath))


class StepCheckpoint(LimitedCheckpoint):
    """A checkpoint callback that saves every n optimizer steps and after the last step.

    A run of 700 steps with ``save_steps=500`` leaves ``checkpoint-500.ckpt`` and ``checkpoint-700.ckpt``. ``options``
    are other arguments of ``ModelCheckpoint``.
    """

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        super().__init__(**options, every_n_train_steps=every)
        self._every = every

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the step that a run begins or resumes from as saved."""
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Save after every n-th step, and after the last."""
        # Not super(): at the last batch of an epoch, Lightning postpones a save that monitors a metric until the next
        # validation. With save_total_limit, the metric here is the step number, which is always up to date.
        due = trainer.global_step % self._every == 0 or is_last_step(trainer)
        # The second condition skips the other microbatches of an accumulation, which have the same step.
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


class StepEvaluation(Callback):
    """Evaluates after the last step of a run, and logs the metrics of an evaluation before the first one."""

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics at step 0; Lightning would drop them."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Stop the run after its last step, because Lightning validates before it stops."""
        if is_last_step(trainer):
            trainer.should_stop = True


def is_last_step(trainer: pl.Trainer) -> bool:
    """Return whether a run has taken all its optimizer steps; False for a run without an end."""
    return trainer.global_step >= trainer.estimated_stepping_batches


_CONFIGS = {
    "ddp_config": DistributedDataParallelConfig,
    "optimizer_config": OptimizerConfig,
    "communication": CommunicationOptions,
    "checkpoint_io": MCoreCheckpointIO,
}
_OWN_CALLBACKS = {
    kind.__name__: kind
    for kind in (LimitedCheckpoint, StepCheckpoint, StepEvaluation, SaveHFModel, PreemptionCheckpoint)
}
_LOGGERS = {"tensorboard": "TensorBoardLogger", "csv": "CSVLogger", "mlflow": "MLFlowLogger", "wandb": "WandbLogger"}
_LOGGING_PACKAGES = ("lightning_mcore", "lightning.pytorch", "transformers")


def make_strategy(settings: Mapping[str, Any]) -> MCoreStrategy:
    """Build the strategy from ``RunSettings.strategy``, with configs as dicts and ``timeout`` in seconds."""
    values = dict(settings)
    _check_optimizer(values)
    for name, config in _CONFIGS.items():
        if isinstance(values.get(name), Mapping):
            values[name] = _made(config, values[name])
    if isinstance(values.get("timeout"), int | float):
        values["timeout"] = timedelta(seconds=values["timeout"])
    return MCoreStrategy(**values)


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return an object of a class from its arguments in a YAML file; None if they name another class."""
    name, arguments = class_and_arguments(given)
    return kind(**arguments) if name in ("", kind.__name__) else None


def _check_optimizer(settings: Mapping[str, Any]) -> None:
    """Raise early for optimizer options that Megatron's config would reject later, with its own message."""
    config, ddp_config = settings.get("optimizer_config"), settings.get("ddp_config")
    if not isinstance(config, Mapping):
        return
    sharded = settings.get("use_distributed_optimizer")
    if sharded is None and isinstance(ddp_config, Mapping):
        sharded = ddp_config.get("use_distributed_optimizer")
    for sentence in megatron_config_faults(config, bool(sharded)):
        raise ValueError(sentence)
    aware = config.get("use_precision_aware_optimizer")
    if aware and importlib.util.find_spec("transformer_engine") is None:
        # mapping.py sets it together with the offload: blame the option that the user set.
        name = "optimizer_cpu_offload" if config.get("optimizer_cpu_offload") else "use_precision_aware_optimizer"
        raise ModuleNotFoundError(
            f"{name}=True needs TransformerEngine, whose optimizer Megatron's offload uses, and it is not installed; "
            "install it, or leave the option out"
        )


def make_precision(settings: Mapping[str, Any]) -> MCorePrecision:
    """Build the precision plugin from ``RunSettings.precision``."""
    return MCorePrecision(**settings)


def make_model(
    settings: Mapping[str, Any], transformer: Mapping[str, Any], kind: type[MCoreGPT] = MCoreGPT
) -> MCoreGPT:
    """Build the model at ``settings["path"]``; with ``preference``, ``embedding`` or ``reranker``, that kind of model.

    ``settings`` is ``RunSettings.model``; its ``transformer`` fields override the given ones. Errors are the same as
    for ``MCoreGPT.from_pretrained``.
    """
    kind = kind_of(settings, kind)
    return kind.from_pretrained(**{**settings, "transformer": {**transformer, **settings.get("transformer", {})}})


def make_data(settings: Mapping[str, Any], kind: type[MCoreFinetuningData]) -> MCoreFinetuningData:
    """Build the data module from ``RunSettings.data``, with files and tokenizer."""
    _check_names(f"argument of {kind.__name__}", settings, kind)
    return kind(**settings)


def make_trainer(arguments: Any, settings: RunSettings, overrides: Mapping[str, Any]) -> pl.Trainer:
    """Seed everything, and build the trainer; ``overrides`` replace arguments, or add ``callbacks`` and ``plugins``."""
    _check_names("argument of Trainer", overrides, pl.Trainer)
    if ON_RAY in os.environ:
        from lightning_mcore.ray.launch import worker_arguments

        overrides = worker_arguments(overrides)
    # Before the strategy and the model draw anything.
    seed_everything(arguments)
    _set_process(arguments)
    values: dict[str, Any] = dict(settings.trainer)
    if "strategy" not in overrides:
        values["strategy"] = make_strategy(settings.strategy)
    if "logger" not in overrides:
        values["logger"] = make_loggers(arguments) or False
    plugins = _as_list(overrides.get("plugins"))
    if "precision" not in overrides and not any(isinstance(plugin, Precision) for plugin in plugins):
        plugins.append(make_precision(settings.precision))
    callbacks = [*make_callbacks(arguments), *_as_list(overrides.get("callbacks"))]
    # Lightning's learning-rate monitor raises in a trainer without a logger.
    if not {**values, **overrides}["logger"]:
        callbacks = [callback for callback in callbacks if not isinstance(callback, LearningRateMonitor)]
    return pl.Trainer(**{**values, **overrides, "plugins": plugins, "callbacks": callbacks})


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def make_callbacks(arguments: Any) -> list[Callback]:
    """Build the callbacks that ``TrainingArguments`` asks for."""
    made = []
    for name, values in callback_settings(arguments).items():
        kind: Any = _OWN_CALLBACKS.get(name) or getattr(lightning_callbacks, name)
        made.append(kind(**values))
    return made


def make_loggers(arguments: Any) -> list[Logger]:
    """Build the loggers of ``report_to``; ModuleNotFoundError if the package of one is not installed."""
    made = []
    for name, values in logger_settings(arguments).items():
        try:
            made.append(getattr(lightning_loggers, _LOGGERS[name])(**values))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"report_to={name!r} needs a package that is not installed: {' '.join(str(error).split())};"
                " install it, or leave it out"
            ) from error
    return made


def seed_everything(arguments: Any) -> None:
    """Seed all random number generators, also in loader workers."""
    pl.seed_everything(arguments.seed, workers=True, verbose=False)


def _set_process(arguments: Any) -> None:
    """Set the options that belong to the process rather than the trainer: TF32 and the log level."""
    if arguments.tf32 is not None:
        torch.set_float32_matmul_precision("high" if arguments.tf32 else "highest")
    if arguments.log_level != "passive":
        for name in _LOGGING_PACKAGES:
            logging.getLogger(name).setLevel(arguments.log_level.upper())


def _check_names(what: str, given: Mapping[str, Any], owner: type) -> None:
    known = inspect.signature(owner).parameters
    for name in given:
        if name not in known:
            raise TypeError(unknown_name(what, name, known))
