# SPDX-License-Identifier: Apache-2.0
"""Read LightningCLI files as :class:`RunSettings`: parsed as in ``lightning-mcore fit``, but not instantiated.

``plan.py`` calls :func:`settings_of_lightning`. Settings that equal their defaults are left out.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning.pytorch import Trainer

from lightning_mcore.cli.command import TRAINING
from lightning_mcore.cli.fit import CommandCLI, TrainingCLI, parse, refuse_lone_scheduler
from lightning_mcore.config.inherited_arguments import Arguments, arguments_of
from lightning_mcore.config.ray import RaySettings
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import precision_faults
from lightning_mcore.config.run import RunSettings, class_and_arguments, rows_of_pairs
from lightning_mcore.config.text import unknown_name
from lightning_mcore.hf.source import seeing_name, sees_images
from lightning_mcore.models.distillation import MCoreDistillation
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.models.vision_distillation import MCoreVisionDistillation
from lightning_mcore.planning.signatures import fields_of, of_model
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.strategy.strategy import MCoreStrategy

TOP_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "verbose", "ray")
# Keys of a file that only another command than fit has
_COMMAND_OF_KEY = {"verbose": "validate", "return_predictions": "predict"}
_NOT_IN_SETTINGS = ("strategy", "precision", "plugins", "callbacks", "logger", "profiler")
_DATA_SIZES = ("batch_size", "seq_length", "packing")
_LIGHTNING_PRECISIONS = ("MixedPrecision", "HalfPrecision")
_SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


_SEEING: dict[str, type[MCoreGPT]] = {kind.__name__: kind for kind in (MCoreVisionGPT, MCoreVisionDistillation)}


class _Reader(CommandCLI):
    """LightningCLI that only parses; the later steps do nothing."""

    def __init__(self, documents: Sequence[Mapping[str, Any]], words: list[str]) -> None:
        self._command = next((_COMMAND_OF_KEY[key] for key in _COMMAND_OF_KEY if key in documents[-1]), "fit")
        self._documents, self._words = documents, words
        # Files were already read, so jsonargparse gets them as JSON text.
        given = [*(f"--config={json.dumps(document)}" for document in documents), *words]
        quiet = {"exit_on_error": False}
        super().__init__(args=[self._command, *given], parser_kwargs={**quiet, self._command: dict(quiet)})

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the one command whose options the files may have."""
        return {self._command: TrainingCLI.subcommands()[self._command]}

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Parse; errors refer to the files."""
        self.config = parse(parser, args, self._subcommand_parsers[self._command], self._words, self._documents)

    @property
    def values(self) -> dict[str, Any]:
        """The parsed values, as plain data."""
        return cast("dict[str, Any]", self.config[self._command].as_dict())

    def _set_seed(self) -> None: ...

    def _parse_ckpt_path(self) -> None: ...

    def _add_instantiators(self) -> None: ...

    def before_instantiate_classes(self) -> None:
        """Do nothing."""

    def instantiate_classes(self) -> None:
        """Do nothing."""

    def _run_subcommand(self, subcommand: str) -> None: ...


def settings_of_lightning(
    documents: Sequence[Mapping[str, Any]],
    paths: Sequence[str],
    overrides: Sequence[tuple[str, str]],
    model: str | None = None,
) -> RunSettings:
    """Return the run that LightningCLI files describe.

    ``documents`` are the contents of the files, where a later one overrides an earlier one, and ``paths`` their names
    for errors. ``overrides`` are keys and values of changes, as text. ``model`` is a Hugging Face model to use instead
    of the file's. Raises ValueError if LightningCLI rejects a key or a value, or if the strategy or model is not ours.
    """
    flat = [_without_command(document) for document in documents]
    kept: dict[str, Any] = {}
    if model is not None:
        for document in flat:
            given = document.pop("model", None)
            arguments = given.get("init_args", given) if isinstance(given, Mapping) else {}
            # What the file says about the run rather than the model stays.
            kept |= {name: arguments[name] for name in ("seq_length", "recipe") if name in arguments}
        overrides = [(key, text) for key, text in overrides if key.partition(".")[0] != "model"]
        kind = "MCoreVisionGPT" if sees_images(model) else "MCoreGPT"
        pretrained = {"class_path": f"lightning_mcore.{kind}.from_pretrained", "init_args": {"path": model, **kept}}
        flat.append({"model": pretrained})
    elsewhere = _take_data_of_elsewhere(flat)
    values = _Reader(flat, [f"--{key}={text}" for key, text in overrides]).values
    trainer = _changed(values["trainer"], arguments_of(Trainer))
    strategy, plugin = _strategy(trainer)
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]  # a file may give one without a list
    offloading = [item for item in callbacks if item["class_path"].endswith(".OffloadActivations")]
    kept_on_device = "activations are counted as if OffloadActivations left them on the GPU; rehearse counts it"
    of_model = _with_optimizer(_model(values["model"], " and ".join(dict.fromkeys(paths))), values)
    return RunSettings(
        strategy=strategy,
        precision=_precision(trainer, plugin),
        model=of_model,
        trainer={name: value for name, value in trainer.items() if name not in _NOT_IN_SETTINGS}
        | ({"callbacks": offloading} if offloading else {}),
        data=rows_of_pairs(of_model, _data(values.get("data")) | elsewhere),
        notes=(kept_on_device,) if offloading else (),
        ray=None if values.get("ray") is None else RaySettings(**values["ray"]),
    )


def _take_data_of_elsewhere(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Remove data whose class is not on this machine, and return its sizes, the only part that is planned."""
    sizes: dict[str, Any] = {}
    for document in documents:
        data = document.get("data")
        path = data.get("class_path") if isinstance(data, Mapping) else None
        if isinstance(path, str) and "." in path and not _can_be_found(path.rpartition(".")[0]):
            arguments = document.pop("data").get("init_args") or {}
            sizes |= {name: arguments[name] for name in _DATA_SIZES if name in arguments}
    return sizes


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _without_command(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's content without the level of a command, such as ``fit:``."""
    for command in TRAINING:
        if isinstance(document.get(command), Mapping):
            return {**document[command], **{key: value for key, value in document.items() if key != command}}
    return dict(document)


def _changed(values: Mapping[str, Any], known: Arguments) -> dict[str, Any]:
    """Return the values that differ from their defaults."""
    return {name: value for name, value in values.items() if name not in known or value != known[name]}


def _strategy(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the arguments of ``MCoreStrategy``, and the precision plugin among them."""
    given = trainer.get("strategy", "auto")
    name, arguments = class_and_arguments(given)
    names = ("MCoreStrategy", "mcore") if isinstance(given, str) else ("MCoreStrategy",)
    # As text, Lightning accepts registered names but not paths.
    if name not in names or (isinstance(given, str) and "." in given):
        shown = given if isinstance(given, str) else name
        raise ValueError(
            f"trainer.strategy={shown!r} is not MCoreStrategy, the only strategy that plan supports; set class_path:"
            " lightning_mcore.MCoreStrategy"
        )
    arguments = _changed(arguments, arguments_of(MCoreStrategy))
    return arguments, arguments.pop("precision_plugin", None)


def _precision(trainer: Mapping[str, Any], of_its_strategy: Any) -> dict[str, Any]:
    """Return the arguments of ``MCorePrecision``, from the strategy, the plugins or the trainer."""
    plugins = trainer.get("plugins") or []
    found = [
        (name, arguments)
        for plugin in (plugins if isinstance(plugins, list) else [plugins])
        for name, arguments in [class_and_arguments(plugin)]
        if name in ("MCorePrecision", *_LIGHTNING_PRECISIONS)
    ]
    asked = trainer.get("precision")
    asked = None if asked is None else _SHORT_PRECISIONS.get(str(asked), str(asked))
    if asked is not None and found:
        raise ValueError(
            f"trainer.precision={asked!r} and {found[0][0]} in trainer.plugins both set the precision; keep one of them"
        )
    if of_its_strategy is not None:
        found = [class_and_arguments(of_its_strategy)]
    if not found:
        on_cpu = asked == "16-mixed" and trainer.get("accelerator") == "cpu"
        # As Lightning does: autocast on a CPU has no fp16.
        return {} if asked is None else {"precision": "bf16-mixed" if on_cpu else asked}
    name, arguments = found[0]
    if name != "MCorePrecision":
        return {"precision": arguments.get("precision")}
    raise_first(precision_faults(asked, arguments.get("precision", "32-true")))
    return _changed(arguments, arguments_of(MCorePrecision))


def _model(given: Any, where: str) -> dict[str, Any]:
    name, arguments = class_and_arguments(given)
    if arguments.get("recipe") is not None:
        _, recipe = class_and_arguments(arguments["recipe"])
        arguments["recipe"] = _changed(recipe, fields_of(Recipe)) or None
    elif name in ("MCoreGPT", "from_pretrained") and "recipe" in arguments:
        Recipe.of(arguments["recipe"])  # raises for None
    pretrained = "path" in arguments
    _check_kind(given, arguments)
    known = of_model(pretrained, sees=name in _SEEING)
    if name in ("MCoreGPT", "MCoreVisionGPT", "from_pretrained"):
        return {key: value for key, value in arguments.items() if key not in known or value != known[key]}
    if not {*arguments} & {*known} & {"vocab_size", "transformer", "path"}:
        raise ValueError(
            f"model of {where} is {name}, which plan does not know; give class_path: lightning_mcore.MCoreGPT, or a "
            "subclass with its arguments"
        )
    return _changed({key: value for key, value in arguments.items() if key in known}, known)


def _check_kind(given: Any, arguments: dict[str, Any]) -> None:
    """Reject a model that sees images in a class for text, and a text model in a class for images.

    A model that may be read either way gets the family with its tower in a class for images.
    """
    owner = str(given["class_path"]).split(".")[-2:-1] if isinstance(given, Mapping) and "class_path" in given else []
    path, family = arguments.get("path"), arguments.get("family")
    kinds: tuple[type[MCoreGPT], ...] = (MCoreGPT, MCoreDistillation, *_SEEING.values())
    kind = next((kind for kind in kinds if owner == [kind.__name__]), None)
    if not isinstance(path, str) or kind is None:
        return
    sees = sees_images(path, family)
    if sees is False and kind.takes_images and (seeing := seeing_name(path, family)) != family:
        arguments["family"] = seeing
    elif sees is not None and sees is not kind.takes_images:
        kind.check_kind(path, {"vision": None} if sees else {})


def _with_optimizer(model: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments with the file's optimizer, which replaces the model's own."""
    given = values.get("optimizer")
    refuse_lone_scheduler(given, values.get("lr_scheduler"))
    if given is None:
        return model
    Recipe.of(model.get("recipe") or {}).check_unused()
    name, arguments = class_and_arguments(given)
    # All others count as Adam, with two states per weight.
    if name != "SGD":
        return model
    return {**model, "recipe": {"optimizer": "sgd", "sgd_momentum": arguments.get("momentum") or 0.0}}


def _data(given: Any) -> dict[str, Any]:
    _, arguments = class_and_arguments(given if given is not None else {})
    return {name: arguments[name] for name in _DATA_SIZES if arguments.get(name) is not None}


def refuse_unknown_option(key: str, others: Sequence[str]) -> None:
    """Raise ValueError for a key after the files that neither LightningCLI nor the command (``others``) knows."""
    top = key.partition(".")[0]
    if top not in (*TOP_KEYS, *TRAINING):
        raise ValueError(unknown_name("option", top, TOP_KEYS if "." in key else (*TOP_KEYS, *others)))
