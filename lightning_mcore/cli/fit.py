# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore fit``, ``validate``, ``test`` and ``predict``: a run from a YAML file, through LightningCLI.

``__init__.py`` calls :func:`run`. :class:`TrainingCLI` may be used like ``LightningCLI``, with two differences: an
``optimizer:`` in the file is created when the trainer asks for it, because a model that is split into stages has no
parameters before that; and ``config_errors.py`` explains errors in the file or the arguments. ``guard.py`` decides how
a command ends.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.weights import hyper_parameters_of, refuse_code
from lightning_mcore.cli import ray as on_ray
from lightning_mcore.cli.command import find_modules_here, refused
from lightning_mcore.cli.config_errors import explain, fp8_as_precision, on_one_line, overlooked_fault
from lightning_mcore.cli.guard import Beginning, guarded
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import ON_RAY, RaySettings
from lightning_mcore.config.run import class_and_arguments
from lightning_mcore.data.embedding.datamodule import MCoreEmbeddingData, MCoreRerankingData
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.images import MCoreVisionData
from lightning_mcore.data.preference.datamodule import MCorePreferenceData
from lightning_mcore.data.pretraining.datamodule import MCorePretrainingData
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.models.distillation import MCoreDistillation
from lightning_mcore.models.embedding import MCoreEmbedding
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.models.reranker import MCoreReranker
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.models.vision_distillation import MCoreVisionDistillation
from lightning_mcore.optimizer.muon import MuonWithAdamW
from lightning_mcore.strategy.fp8_monitor import FP8Monitor
from lightning_mcore.strategy.garbage import GarbageCollection
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.preemption import PreemptionCheckpoint
from lightning_mcore.strategy.progress import MCoreProgressBar
from lightning_mcore.strategy.run_report import RunReport
from lightning_mcore.strategy.strategy import MCoreStrategy

# Imported, so that jsonargparse finds a class by its short name: --model=MCoreGPT, --trainer.strategy=MCoreStrategy
SHORT_NAMES = (
    FP8Monitor,
    GarbageCollection,
    MCoreCheckpointIO,
    MCoreDistillation,
    MCoreEmbedding,
    MCoreEmbeddingData,
    MCoreFinetuningData,
    MCoreGPT,
    MCorePrecision,
    MCorePreference,
    MCorePreferenceData,
    MCorePretrainingData,
    MCoreProgressBar,
    MCoreReranker,
    MCoreRerankingData,
    MCoreStrategy,
    MCoreVisionData,
    MCoreVisionDistillation,
    MCoreVisionGPT,
    MuonWithAdamW,
    PreemptionCheckpoint,
    RunReport,
    SaveHFModel,
)
"""Classes that a file may name without their module."""

_NO_GPU = "No supported gpu backend found!"  # Lightning's whole message


class WholeNames(LightningArgumentParser):
    """Lightning's parser without argparse's abbreviations, also in parsers that it makes for class arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})


class TrainingCLI(LightningCLI):
    """``LightningCLI`` for ``MCoreStrategy``, with the same arguments, whose names cannot be abbreviated."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make the parser; Lightning calls this."""
        if self.parser_class is LightningArgumentParser:
            self.parser_class = WholeNames
        return super().init_parser(**kwargs)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the command line, or the words in ``args``, and explain errors in one sentence.

        Raises:
            ValueError: An argument is wrong, and the parser was told not to exit (``exit_on_error=False``).
        """
        # Lightning also accepts a dict or a namespace, which has no words to explain.
        if not isinstance(args, list | None):
            super().parse_arguments(parser, args)
            return
        given: list[str] = sys.argv[1:] if args is None else args
        command = given[0] if given else ""
        # Errors are explained with the command's own parser, which knows its options.
        asked = self._subcommand_parsers.get(command, parser) if hasattr(self, "_subcommand_parsers") else parser
        self.config = parse(parser, given, asked, given if asked is parser else given[1:])

    def _parse_ckpt_path(self) -> None:
        """Reject a checkpoint that names code, before its hyper-parameters become arguments of the model.

        Source: ``LightningCLI._parse_ckpt_path`` (Lightning 2.6), which imports the ``class_path`` in a checkpoint.
        """
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        _check_checkpoint(path)
        if path and Path(path).is_file():
            refuse_code(path, hyper_parameters_of(path, weights_only=True))
        super()._parse_ckpt_path()

    def before_instantiate_classes(self) -> None:
        """Replace the strategy's class name by its registered name; jsonargparse leaves a class name as text."""
        trainer = self._get(self.config, "trainer")
        if trainer["strategy"] == MCoreStrategy.__name__:
            trainer["strategy"] = "mcore"
        strategy, _ = class_and_arguments(trainer["strategy"])
        if strategy in ("mcore", MCoreStrategy.__name__) and (fault := fp8_as_precision(trainer["precision"])):
            raise ValueError(fault)

    def instantiate_classes(self) -> None:
        """Create model, data and trainer; ValueErrors of constructors lose jsonargparse's lists."""
        try:
            super().instantiate_classes()
        except MisconfigurationException as error:
            if str(error) != _NO_GPU:
                raise
            raise ValueError(
                "trainer.accelerator='gpu' is given, but torch finds no GPU on this machine; choose 'cpu' or 'auto'"
            ) from error
        except ValueError as error:
            if "\n" not in str(error):
                raise
            raise ValueError(on_one_line(str(error))) from error

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Make the model create the file's optimizer when the trainer asks for it.

        Source: ``LightningCLI`` (Lightning 2.6), which creates it at once, when the model has no parameters yet.
        """
        parser = self._parser(subcommand)
        if not self.auto_configure_optimizers or [*parser._optimizers] != ["optimizer"]:
            super()._add_configure_optimizers_method_to_model(subcommand)
            return
        optimizer, scheduler = (self._get(self.config_init, name) for name in ("optimizer", "lr_scheduler"))
        refuse_lone_scheduler(optimizer, scheduler)
        if not optimizer:
            return
        # The file's optimizer replaces the model's recipe, so a recipe in the file would have no effect.
        if isinstance(self.model, MCoreGPT):
            self.model.recipe.check_unused()
        build = self.configure_optimizers

        def configure_optimizers(module: pl.LightningModule) -> Any:
            made = instantiate_class(module.parameters(), optimizer)
            return build(module, made, instantiate_class(made, scheduler) if scheduler else None)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


class _OnRay(Exception):  # noqa: N818 - not an error: it leaves LightningCLI's constructor
    """A command whose ranks Ray starts."""

    def __init__(self, settings: RaySettings, trainer: Mapping[str, Any]) -> None:
        self.settings, self.trainer = settings, trainer


class CommandCLI(TrainingCLI):
    """``TrainingCLI`` with the options ``--ray.*`` of our own commands."""

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add the options of a launch on Ray."""
        super().add_core_arguments_to_parser(parser)
        parser.add_argument("--ray", type=RaySettings | None, default=None, help="Let Ray start the ranks.")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse the command line, and leave the constructor if Ray is to start the ranks."""
        self._command_line: list[str] = list(args)
        super().parse_arguments(parser, args)
        values = self.config[self.config["subcommand"]]
        given = values.pop("ray", None)  # the saved config must not have it: plain LightningCLI reads it too
        # An exception, because LightningCLI's constructor would go on to build the model in this process.
        if given is not None and ON_RAY not in os.environ:
            raise _OnRay(RaySettings(**given.as_dict()), values["trainer"].as_dict())

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Create the trainer; in a Ray worker, with Ray's ranks."""
        kwargs["callbacks"] = self._with_reports(kwargs.get("callbacks"))
        if ON_RAY not in os.environ:
            return super().instantiate_trainer(**kwargs)
        from lightning_mcore.ray import prepare_trainer
        from lightning_mcore.ray.launch import worker_arguments

        given = {**self._get(self.config_init, "trainer"), **kwargs}
        return prepare_trainer(super().instantiate_trainer(**worker_arguments(given)))

    def _with_reports(self, given: Any) -> list[pl.Callback]:
        """Return the callbacks of the file, and those that show progress and results unless the file has its own."""
        config = self._get(self.config_init, "trainer")
        given = given or config["callbacks"] or []
        callbacks: list[pl.Callback] = [*given] if isinstance(given, list) else [given]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if not has_bar and config["enable_progress_bar"] is not False and importlib.util.find_spec("rich"):
            callbacks.append(MCoreProgressBar())
        if not any(isinstance(callback, RunReport) for callback in callbacks):
            callbacks.append(RunReport())
        for callback in callbacks:
            if isinstance(callback, RunReport):
                callback.command = callback.command or ["lightning-mcore", *self._command_line]
        return callbacks

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Return the arguments of the trainer's function; a run that Ray has restarted resumes from its checkpoint."""
        arguments: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        if ON_RAY in os.environ and subcommand == "fit":
            from lightning_mcore.ray import checkpoint_to_resume

            arguments["ckpt_path"] = checkpoint_to_resume() or arguments.get("ckpt_path")
        return arguments


def train(arguments: Sequence[str], beginning: Beginning) -> None:
    """Run a command of LightningCLI and the words after it; ``beginning`` records when the run has begun."""
    # jsonargparse then raises instead of printing its usage and exiting.
    quiet = {"exit_on_error": False}
    CommandCLI(
        args=list(arguments),
        parser_kwargs={"prog": "lightning-mcore", **quiet, **{name: dict(quiet) for name in TrainingCLI.subcommands()}},
        save_config_kwargs={"overwrite": True},  # a second run into the same folder is common
        trainer_defaults={"callbacks": [beginning]},
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command (its name and the words after it) and return the exit code."""
    name = arguments[0]
    if importlib.util.find_spec("jsonargparse") is None:
        return refused(f'lightning-mcore {name} needs jsonargparse; pip install "lightning-mcore[cli]"')
    # Before the file is read: its class paths may name modules in the current folder.
    find_modules_here()
    try:
        return guarded(lambda beginning: train(arguments, beginning))
    except _OnRay as asked:
        settings = asked.settings.with_storage_in(str(asked.trainer["default_root_dir"] or ""))
        return on_ray.run(__name__, arguments, settings, _layout(asked.trainer["strategy"]), asked.trainer)


_KEYWORDS = ("last", "best", "hpc", "registry")  # Lightning finds these itself


def _check_checkpoint(path: Any) -> None:
    """Raise FileNotFoundError for a checkpoint that does not exist, before ranks are started."""
    if not isinstance(path, str) or path.partition(":")[0] in _KEYWORDS or "://" in path or os.path.exists(path):
        return
    raise FileNotFoundError(f"ckpt_path={path!r} does not exist; give the path of a checkpoint, or 'last'")


def _layout(strategy: Any) -> ParallelLayout:
    """Return the layout of a strategy in a file; workers reject strategies that are not ours."""
    _, arguments = class_and_arguments(strategy)
    return ParallelLayout(
        **{name: arguments[name] for name in ParallelLayout.__dataclass_fields__ if name in arguments}
    )


def parse(
    parser: Any, given: list[str], asked: Any, words: Sequence[str], documents: Sequence[Mapping[str, Any]] = ()
) -> Any:
    """Return a command line (``given``) as parsed by jsonargparse; ValueError, in one sentence, if it has an error.

    ``asked`` is the command's own parser, ``words`` are the words after the command, and ``documents`` are files that
    come before the words and were already read.
    """
    try:
        config = parser.parse_args(given)
    except argparse.ArgumentError as error:
        raise ValueError(explain(asked, words, str(error), documents)) from error
    parsed = config if asked is parser else config[given[0]]
    if fault := overlooked_fault(asked, words, parsed.as_dict(), documents):
        raise ValueError(fault)
    return config


def refuse_lone_scheduler(optimizer: Any, scheduler: Any) -> None:
    """Raise ValueError for an ``lr_scheduler:`` without an ``optimizer:``."""
    if scheduler and not optimizer:
        raise ValueError("lr_scheduler is given without optimizer, which it belongs to; give both, or neither")
