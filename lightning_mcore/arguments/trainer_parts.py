# SPDX-License-Identifier: Apache-2.0
"""Callbacks and loggers that ``TrainingArguments`` ask for, as plain data: names of classes and their arguments.

``build.py`` makes them. Checkpoints lie in ``output_dir`` as ``checkpoint-<step>.ckpt``, as near to
transformers' names as Lightning's suffix allows.
"""

import os
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.mapping import steps_of
from lightning_mcore.arguments.training_rules import METRICS, text_of


def callback_settings(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of each callback, by the name of its class, in the order in which they are added.

    Args:
        arguments: ``TrainingArguments``.
    """
    callbacks: dict[str, dict[str, Any]] = {}
    if text_of(arguments.save_strategy) == "steps":
        every = steps_of(arguments, arguments.save_steps)
        callbacks["StepCheckpoint"] = {"every": every, "options": _model_checkpoint(arguments)}
    elif text_of(arguments.save_strategy) != "no":
        callbacks["ModelCheckpoint"] = _model_checkpoint(arguments)
    if text_of(arguments.eval_strategy) != "no":
        callbacks["StepEvaluation"] = {}
    if arguments.report_to and text_of(arguments.logging_strategy) != "no":
        callbacks["LearningRateMonitor"] = {"logging_interval": "step"}
    if arguments.save_hf_model:
        callbacks["SaveHFModel"] = {"every_checkpoint": True}
    if arguments.enable_jit_checkpoint:
        callbacks["PreemptionCheckpoint"] = {"dirpath": arguments.output_dir}
    return callbacks


def _model_checkpoint(arguments: Any) -> dict[str, Any]:
    strategy, limit = text_of(arguments.save_strategy), arguments.save_total_limit
    values: dict[str, Any] = {
        "dirpath": arguments.output_dir,
        "filename": "checkpoint-{step}",
        "auto_insert_metric_name": False,
        "save_weights_only": arguments.save_only_model,
        "save_last": None,
    }
    if strategy == "best":
        metric = METRICS[arguments.metric_for_best_model.removeprefix("eval_")]
        mode = "max" if arguments.greater_is_better else "min"
        return {**values, "monitor": metric, "mode": mode, "save_top_k": limit or 1}
    kept: dict[str, Any] = {"save_top_k": -1}
    if limit is not None:  # the newest: those with the greatest step
        kept = {"monitor": "step", "mode": "max", "save_top_k": limit}
    if strategy == "epoch":
        kept |= {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    return {**values, **kept}


def logger_settings(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of each logger, by its name in ``report_to``; none where nothing is to be logged.

    Args:
        arguments: ``TrainingArguments``.
    """
    if text_of(arguments.logging_strategy) == "no":
        return {}
    folder, name = arguments.output_dir, arguments.run_name
    made: dict[str, dict[str, Any]] = {
        "tensorboard": {"save_dir": folder, "name": name or "runs"},
        "csv": {"save_dir": folder, "name": name or "logs"},
        "mlflow": {"run_name": name, "save_dir": os.path.join(folder, "mlruns")},
        # transformers' Trainer lets the environment name the project, and falls back on this name
        "wandb": {"name": name, "save_dir": folder, "project": os.environ.get("WANDB_PROJECT", "huggingface")},
    }
    return {kind: made[kind] for kind in arguments.report_to}


def newest_checkpoint(folder: str) -> str:
    """Return the checkpoint of a folder that was written last.

    Args:
        folder: ``output_dir`` of a run.

    Raises:
        FileNotFoundError: There is none.
    """
    found = [path for path in Path(folder).glob("*.ckpt") if not path.name.startswith(".")]
    if not found:
        raise FileNotFoundError(
            f"resume_from_checkpoint='true' needs a checkpoint in output_dir={folder!r}, and there is none; give the"
            " path of one, or leave it out"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime))
