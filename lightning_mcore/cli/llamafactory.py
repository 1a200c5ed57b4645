# SPDX-License-Identifier: Apache-2.0
"""The command ``lightning-mcore llamafactory``: run an unchanged LLaMA-Factory or ROLL file, or line of flags.

::

    lightning-mcore llamafactory train examples/megatron/qwen3_moe_full.yaml output_dir=saves/mine --devices 8
    torchrun --nnodes 2 --nproc-per-node 8 ... -m lightning_mcore.cli llamafactory --model_name_or_path ... --do_train

The word ``train`` or ``export`` may stand first, as in ``llamafactory-cli``. All keys are checked before any slow
import. The run prints its layout and batch, saves checkpoints in ``output_dir`` and losses in ``trainer_log.jsonl``,
and writes the model in Hugging Face form, or the adapters in PEFT's, at the end. Ranks are started here, one for each
device, by ``torchrun``, or by Ray (``ray_num_workers``).
"""

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_mcore.arguments.megatron_rules import given_layout
from lightning_mcore.arguments.ray import RayArguments
from lightning_mcore.cli.command import DONE, CommandParser, run_command
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import ON_RAY

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_mcore.arguments.llamafactory.export import FactoryExport
    from lightning_mcore.arguments.llamafactory.output import LossRecord
    from lightning_mcore.arguments.llamafactory.run import FactoryRun
    from lightning_mcore.cli.guard import Beginning

# No release of LLaMA-Factory has these as keys.
_RAY_OPTIONS = ("ray_min_workers", "ray_max_failures", "ray_save_steps")
_OTHER_COMMANDS = ("api", "chat", "env", "eval", "help", "version", "webchat", "webui")  # commands of llamafactory-cli
_MOVE_SECONDS = 120.0  # time to rename and delete files


def run(arguments: Sequence[str]) -> int:
    """Run the command on the words after its name, and return the exit code."""
    parser = _parser()
    own, words = parser.split(arguments)
    options = parser.read(own)
    from lightning_mcore.arguments.llamafactory.export import FactoryExport

    read: list[FactoryRun | FactoryExport] = []
    code = run_command(lambda: read.append(_read(options, words, parser)))  # before any slow import
    if code != DONE:
        return code
    asked = read[0]
    if isinstance(asked, FactoryExport):
        return run_command(asked.write)
    if asked.ray.use_ray and ON_RAY not in os.environ:
        return _on_ray(asked, options, arguments)
    from lightning_mcore.arguments.llamafactory.rules import errors_in_file_keys
    from lightning_mcore.cli.guard import guarded

    return guarded(errors_in_file_keys()(lambda beginning: _train(asked, options, beginning)))


def _on_ray(asked: "FactoryRun", options: dict[str, Any], words: Sequence[str]) -> int:
    """Run the same command on Ray's workers, and return the exit code."""
    from lightning_mcore.arguments.llamafactory.rules import errors_in_file_keys
    from lightning_mcore.cli import ray as on_ray

    arguments = asked.arguments
    # Now, because starting Ray takes long, and its workers would all report the same error.
    code = run_command(errors_in_file_keys()(lambda: _check_checkpoint(arguments.ckpt_path)))
    if code != DONE:
        return code
    trainer = {
        "accelerator": "cpu" if arguments.use_cpu else options["accelerator"],
        "devices": options["devices"],
        "num_nodes": options["nodes"],
        "accumulate_grad_batches": arguments.gradient_accumulation_steps,
    }
    settings = asked.ray.ray_settings().with_storage_in(str(arguments.output_dir))
    return on_ray.run(__name__, words, settings, ParallelLayout(**given_layout(arguments)), trainer)


def _parser() -> CommandParser:
    parser = CommandParser(
        "llamafactory",
        "Run a training file of LLaMA-Factory (stage pt, sft, dpo, kto or rm), or the same keys as flags: --key value."
        " The word train or export may stand first.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="the training file, YAML or JSON")
    parser.add_argument(
        "changes",
        nargs="*",
        metavar="key=value",
        help="keys that replace the file's; values are YAML, and null removes a key; or --key value",
    )
    parser.add_argument(
        "--devices",
        type=int,
        help="ranks on each machine; default: torchrun's, NPROC_PER_NODE, all GPUs, or on a CPU as many as the layout"
        " needs",
    )
    parser.add_argument("--nodes", type=int, help="machines; default: torchrun's, NNODES, or 1")
    for name in _RAY_OPTIONS:
        option = next(field for field in dataclasses.fields(RayArguments) if field.name == name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=option.metadata["help"])
    parser.add_argument(
        "--accelerator", choices=["auto", "cpu", "cuda"], default="auto", help="the device; default: auto"
    )
    return parser


def _read(options: dict[str, Any], words: list[str], parser: CommandParser) -> "FactoryRun | FactoryExport":
    from lightning_mcore.arguments.llamafactory.export import read_export
    from lightning_mcore.arguments.llamafactory.flags import read_words
    from lightning_mcore.arguments.llamafactory.rules import errors_in_file_keys
    from lightning_mcore.arguments.llamafactory.run import FactoryRun, read_run

    file, changes = read_words(_without_command(words), parser.options)
    if file is None and not changes:
        raise ValueError("no FILE is given; give a training file of LLaMA-Factory, or its keys as flags: --key value")
    if options["accelerator"] == "cpu":
        changes.append("use_cpu=true")
    with errors_in_file_keys():
        read = read_export(file, changes) or read_run(file, changes)
    # Now, in the process that the user started; ranks would all report the same error.
    if isinstance(read, FactoryRun):
        read.check_tokenizer()
    of_ray = {name: options[name] for name in _RAY_OPTIONS if options[name] is not None}
    if not of_ray:
        return read
    if not isinstance(read, FactoryRun):
        name = next(iter(of_ray)).replace("_", "-")
        raise ValueError(f"--{name} is for training, and the file exports a model; leave it out")
    return dataclasses.replace(read, ray=dataclasses.replace(read.ray, **of_ray))


def _without_command(words: list[str]) -> list[str]:
    """Return the words after the command of ``llamafactory-cli``, if one stands first."""
    # A file may be called train.
    if not words or os.path.isfile(words[0]):
        return words
    if words[0] in _OTHER_COMMANDS:
        raise ValueError(
            f"llamafactory-cli {words[0]} is not available here; choose train, or export to merge adapters into a model"
        )
    return words[1:] if words[0] in ("train", "export") else words


def _train(asked: "FactoryRun", options: dict[str, Any], beginning: "Beginning") -> None:
    from lightning_mcore.arguments.llamafactory.output import LossRecord, move_in, unfinished
    from lightning_mcore.interop.callback import SaveHFModel

    arguments, folder = asked.arguments, str(asked.arguments.output_dir)
    record = LossRecord(folder, asked.keys.plot_loss)
    exports = asked.keys.export_hf_on_finish and bool(arguments.do_train)
    callbacks: list[Any] = [beginning, record, *_early_stopping(asked)]
    if exports:
        callbacks.append(SaveHFModel(unfinished(folder), adapter=asked.keys.lora is not None))
    trainer = _trainer(asked, options, callbacks)
    # Before looking for checkpoints: an interrupted move leaves a folder without config.json.
    _finish_moving(folder, trainer)
    resume = _resume(asked)
    model = asked.model()
    data = asked.data()
    _say(trainer, "\n".join([*asked.settings(asked.arguments.on_cpu).notes, batch_line(asked, trainer)]))
    if arguments.do_train:
        trainer.fit(model, datamodule=data, ckpt_path=resume)
        if exports and trainer.is_global_zero:
            move_in(folder)
    # Training has already evaluated, unless eval_strategy is no.
    if arguments.do_eval and not (arguments.do_train and record.evaluation):
        trainer.limit_val_batches = 1.0
        trainer.validate(model, datamodule=data, ckpt_path=None if arguments.do_train else resume, verbose=False)
    _say(trainer, _outcome(asked, record, exports))


def _finish_moving(folder: str, trainer: "pl.Trainer") -> None:
    """Finish moving the model of an interrupted earlier run; the other ranks wait for rank 0."""
    from lightning_mcore.arguments.llamafactory.output import is_waiting, move_in

    if trainer.is_global_zero:
        move_in(folder)
    deadline = time.monotonic() + _MOVE_SECONDS
    while is_waiting(folder):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"output_dir: rank 0 has not moved the model of an earlier run into {folder} within {_MOVE_SECONDS:.0f}"
                " s; give a folder on a disk that all machines share"
            )
        time.sleep(0.1)


def _resume(asked: "FactoryRun") -> str | None:
    """Return the checkpoint to resume from; without ``resume_from_checkpoint`` only training looks for one."""
    from lightning_mcore.arguments.llamafactory.output import where_to_resume

    arguments = asked.arguments
    if (restarted := asked.ray.checkpoint) is not None:
        return restarted
    folder = str(arguments.output_dir)
    given = arguments.ckpt_path
    if given is not None:
        _check_checkpoint(given)
        return given
    if not arguments.do_train:  # evaluate model_name_or_path itself
        return None
    found = where_to_resume(folder, asked.keys.overwrite_output_dir)
    # It can only be "false" here, which starts a new run, but not over a model in the folder (where_to_resume raises).
    return found if arguments.resume_from_checkpoint is None else None


def _check_checkpoint(given: str | None) -> None:
    if given is not None and not os.path.exists(given):
        raise FileNotFoundError(
            f"resume_from_checkpoint: {given!r} does not exist; give a checkpoint that does, or leave the key out"
            " to continue from the newest one in output_dir"
        )


def _early_stopping(asked: "FactoryRun") -> list[Any]:
    from lightning.pytorch.callbacks import EarlyStopping

    from lightning_mcore.arguments.training_rules import METRICS

    patience = asked.keys.early_stopping_steps
    if patience is None:
        return []
    metric = METRICS[(asked.arguments.metric_for_best_model or "loss").removeprefix("eval_")]
    mode = "max" if asked.arguments.greater_is_better else "min"
    return [EarlyStopping(metric, patience=patience, mode=mode)]


def _trainer(asked: "FactoryRun", options: dict[str, Any], callbacks: list[Any]) -> "pl.Trainer":
    """Return the trainer, with a rank for each device."""
    import torch

    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    devices, nodes, accelerator = options["devices"], options["nodes"], options["accelerator"]
    if asked.arguments.use_cpu:
        accelerator = "cpu"
    if here is not None and everywhere is not None:  # set by torchrun
        devices = devices or int(here)
        nodes = nodes or int(everywhere) // int(here)
    else:
        devices, nodes = devices or _of_environment("NPROC_PER_NODE"), nodes or _of_environment("NNODES")
    if devices is None:
        on_cpu = accelerator == "cpu" or not torch.cuda.is_available()
        # On a CPU, there are as many ranks as the layout needs.
        devices = smallest_world(asked) if on_cpu else -1
    overrides: dict[str, Any] = {"callbacks": callbacks, "accelerator": accelerator}
    if asked.keys.early_stopping_steps is None and not asked.evaluation and not asked.keys.val_size:
        overrides["limit_val_batches"] = 0
    if nodes is not None:
        overrides["num_nodes"] = nodes
    return asked.arguments.trainer(devices=devices, **overrides)


def _of_environment(name: str) -> int | None:
    """Return a number that LLaMA-Factory's launcher reads from the environment; its elastic ranks raise."""
    if os.environ.get("RDZV_ID"):
        raise ValueError(
            f"RDZV_ID={os.environ['RDZV_ID']} asks for elastic ranks of torchrun, which are not started here; start"
            " torchrun -m lightning_mcore.cli llamafactory yourself, or give ray_num_workers"
        )
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{name}={value} in the environment is not a number; give 1 or more, or unset it")
    return int(value)


def smallest_world(asked: "FactoryRun") -> int:
    """Return the smallest number of ranks that fits a file's layout."""
    layout = ParallelLayout(**given_layout(asked.arguments))
    dense = layout.tensor_model_parallel_size * layout.context_parallel_size
    experts = layout.expert_tensor_size * layout.expert_model_parallel_size
    # TP=2 and CP=1 with ETP=1 and EP=4 need lcm(2, 4) = 4 ranks for each pipeline stage.
    return math.lcm(dense, experts) * layout.pipeline_model_parallel_size


def batch_line(asked: "FactoryRun", trainer: "pl.Trainer") -> str:
    """Return two lines about a run: its layout and its effective batch.

    2 rows * 4 accumulated batches * 8 data-parallel ranks are an effective batch of 64 rows. Raises ValueError if the
    layout does not fit the ranks.
    """
    strategy: Any = trainer.strategy
    world = trainer.world_size
    copies = strategy.layout.data_parallel_size(world)
    rows, steps = asked.arguments.per_device_train_batch_size, trainer.accumulate_grad_batches
    what = "pairs of rows" if asked.keys.learns_preferences else "rows"
    why = " (tensor, pipeline and context parallel ranks share a row; expert parallel ranks do not)"
    return (
        f"layout: {strategy.layout.describe(world)}\n"
        f"effective batch: per_device_train_batch_size {rows} * gradient_accumulation_steps {steps} * data-parallel"
        f" size {copies} = {rows * steps * copies} {what} of at most {asked.keys.cutoff_len} tokens"
        f"{why if world > 1 else ''}"
    )


def _outcome(asked: "FactoryRun", record: "LossRecord", exports: bool) -> str:
    """Return the results of a run, as lines."""
    from lightning_mcore.arguments.llamafactory.output import LOG, PICTURE

    folder = str(asked.arguments.output_dir)
    lines = []
    for name, losses in (("training", record.training), ("evaluation", record.evaluation)):
        if losses:
            (first, before), (last, after) = losses[0], losses[-1]
            lines.append(f"{name} loss: {before:.4f} at step {first}, {after:.4f} at step {last}")
    if lines:
        lines.append(f"losses: {os.path.join(folder, LOG)}")
    if record.training and asked.keys.plot_loss:
        lines.append(f"picture: {os.path.join(folder, PICTURE)}")
    if exports:
        kind = "model in Hugging Face form" if asked.keys.lora is None else "adapters in PEFT's form"
        lines.append(f"{kind}: {folder}")
    return "\n".join(lines)


def _say(trainer: "pl.Trainer", text: str) -> None:
    if trainer.is_global_zero:
        print(text, flush=True)
