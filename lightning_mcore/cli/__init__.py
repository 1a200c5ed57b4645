# SPDX-License-Identifier: Apache-2.0
"""The command ``lightning-mcore``; ``python -m lightning_mcore.cli`` is the same.

::

    lightning-mcore fit --config run.yaml
    lightning-mcore plan run.yaml
    lightning-mcore preprocess 'corpus/*.jsonl' --output data/corpus --tokenizer gpt2
    lightning-mcore import models/llama start.ckpt
    lightning-mcore export runs/last.ckpt models/tuned

Each command is a module with a function ``run(arguments) -> exit code``. Only the module of the given command is
imported, because torch, Lightning and megatron-core take seconds. The exit code is 0 for success, 1 for an error while
the command ran, 2 for a wrong argument, and 130 for Ctrl-C. ``import`` and ``export`` return 2 for every error that
they expect, such as a folder that does not exist.
"""

import gc
import importlib
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from lightning_mcore.cli.command import DONE, TRAINING, WRONG, discard_unread_output, is_of_transformer_engine, refused
from lightning_mcore.config.text import unknown_name
from lightning_mcore.parallel.megatron_import import HINTS

__all__ = ["COMMANDS", "console", "main"]

COMMANDS = {
    "fit": ("lightning_mcore.cli.fit", "train a model from a YAML file (LightningCLI)"),
    "validate": ("lightning_mcore.cli.fit", "run the validation loop of a YAML file"),
    "test": ("lightning_mcore.cli.fit", "run the test loop of a YAML file"),
    "predict": ("lightning_mcore.cli.fit", "run the prediction loop of a YAML file"),
    "llamafactory": ("lightning_mcore.cli.llamafactory", "train from a LLaMA-Factory file"),
    "plan": ("lightning_mcore.cli.plan", "show what a run will do and need, without starting it"),
    "rehearse": (
        "lightning_mcore.cli.rehearse",
        "simulate ranks of a GPU run without a GPU: memory, collectives, waits",
    ),
    "preprocess": (
        "lightning_mcore.cli.preprocess",
        "convert text, jsonl or parquet files to Megatron's indexed datasets",
    ),
    "import": ("lightning_mcore.cli.hf", "convert a Hugging Face model to a sharded checkpoint"),
    "export": ("lightning_mcore.cli.hf", "convert a sharded checkpoint to a Hugging Face model"),
    "checkpoint": ("lightning_mcore.checkpoint.commands", "verify or inspect a checkpoint"),
}
"""For each command: its module, and what it does."""

ALL_OPTIONS = "--help-all"
_NAMED = ("lightning_mcore.cli.fit", "lightning_mcore.cli.hf")


def console() -> int:
    """Run the command line, as the installed script does, and return the exit code."""
    try:
        return main(sys.argv[1:])
    except BrokenPipeError:
        if not discard_unread_output():
            raise
        return DONE
    finally:
        discard_unread_output()


def main(arguments: Sequence[str]) -> int:
    """Run a command, whose words come after the name of the program, and return the exit code."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in ("-h", "--help", ""):
        print(overview())
        return DONE if name else WRONG
    if name == "--version":
        from lightning_mcore import __version__

        print(f"lightning-mcore {__version__}")
        return DONE
    if name not in COMMANDS:
        return refused(unknown_name("command", name, COMMANDS))
    if name in TRAINING and rest in (["-h"], ["--help"]):
        print(training_help(name))
        return DONE
    if rest == [ALL_OPTIONS]:
        rest = ["--help"]
    from lightning_mcore.cli.quick_checks import refuse_early  # not for --help, which answers at once

    try:
        refuse_early(name, rest)
    except (ValueError, OSError) as error:
        return refused(error)
    module = COMMANDS[name][0]
    try:
        with warnings.catch_warnings():  # so that a command's filters end with it
            warnings.filterwarnings("ignore", message=HINTS, category=UserWarning)
            code: int = _imported(module).run([name, *rest] if module in _NAMED else rest)
    except (RuntimeError, OSError) as error:
        # Importing megatron-core imports TransformerEngine, whose broken installations raise these.
        if not is_of_transformer_engine(error):
            raise
        return refused(error)
    return code


def _imported(name: str) -> ModuleType:
    """Import the module of a command, and let the garbage collector skip what it brought."""
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    # Half a million objects stay until the process ends; scanning them takes a third of a short command's time.
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()
    return module


def overview() -> str:
    """Return the text of ``--help``: one command per line."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning-mcore COMMAND ...",
            "",
            "Train models with Lightning and megatron-core; plan runs, and convert data and checkpoints.",
            "",
            *lines,
            "",
            "examples:",
            "  lightning-mcore plan run.yaml --devices 8       show what the run will do and need",
            "  lightning-mcore fit --config run.yaml           train",
            "  lightning-mcore export CHECKPOINT OUT           convert the trained model for transformers",
            "",
            "lightning-mcore COMMAND --help shows the options of a command.",
        ]
    )


_TRAINING_HELP = """\
usage: lightning-mcore {name} --config run.yaml [--option value ...]

{what}. Options override the file.

examples:
  lightning-mcore {name} --config run.yaml
  lightning-mcore {name} --config run.yaml --trainer.devices 8 --trainer.strategy.tensor_model_parallel_size 4
  lightning-mcore {name} --config run.yaml --ckpt_path CHECKPOINT

often used:
  --config FILE                                         YAML with trainer:, model: and data:
  --ckpt_path PATH                                      {checkpoint}
  --seed_everything N                                   seed of all random generators
  --trainer.devices N                                   ranks on each node
  --trainer.num_nodes N                                 nodes
  --trainer.accelerator cpu|gpu                         where the ranks run
  --trainer.precision bf16-mixed                        number format of computations
  --trainer.max_steps N                                 optimizer steps
  --trainer.accumulate_grad_batches N                   batches per optimizer step
  --trainer.strategy MCoreStrategy                      splits the model across ranks; its sizes:
  --trainer.strategy.tensor_model_parallel_size N       ranks that share each matrix
  --trainer.strategy.pipeline_model_parallel_size N     stages of consecutive layers
  --trainer.strategy.context_parallel_size N            ranks that share each row
  --trainer.default_root_dir FOLDER                     where logs and checkpoints go
  --print_config                                        print the whole configuration, and stop

lightning-mcore {name} --help-all              all options of Lightning's trainer
lightning-mcore {name} --model.help MCoreGPT   the options of a model; --data.help CLASS for a data module
lightning-mcore plan run.yaml               show what the run will do, and everything wrong with it
"""


def training_help(name: str) -> str:
    """Return the text of ``lightning-mcore fit --help``, which needs no import."""
    checkpoint = "continue from a checkpoint; 'last' finds it" if name == "fit" else "the checkpoint to load"
    what = COMMANDS[name][1]
    return _TRAINING_HELP.format(name=name, what=what[0].upper() + what[1:], checkpoint=checkpoint).rstrip()
