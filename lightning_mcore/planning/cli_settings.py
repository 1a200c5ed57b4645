# SPDX-License-Identifier: Apache-2.0
"""A LightningCLI file as :class:`RunSettings`, read without Lightning: trainer, model and data by their class paths.

``fit`` lets jsonargparse build the objects; ``plan`` needs only what was written. Misspelt keys name their nearest
neighbour here as well, from signatures that ``config/signatures.py`` reads.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.signatures import (
    DDP,
    GPT,
    OPTIMIZER,
    PRECISION,
    RECIPE,
    STRATEGY,
    TRAINER,
    Argument,
    Owner,
    dataclass_fields,
    parameters,
    transformer_arguments,
)
from lightning_mcore.config.text import unknown_name
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.planning.quoted_values import unquoted

TOP_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "verbose")
TOP_KEYS_OF_OTHERS = ("return_predictions", "weights_only")
SUBCOMMANDS = ("fit", "validate", "test", "predict")

_DATA: dict[str, Owner] = {
    "MCorePretrainingData": ("lightning_mcore/data/pretraining/datamodule.py", "MCorePretrainingData"),
    "MCoreFinetuningData": ("lightning_mcore/data/finetuning/datamodule.py", "MCoreFinetuningData"),
}
_NOT_OF_THE_RUN = ("strategy", "precision", "plugins", "callbacks", "logger", "profiler")
_OURS = "lightning_mcore."
_SIZES = {name: Argument(int | None, None) for name in ("batch_size", "seq_length")}
_MOMENTUM = {"momentum": Argument(float, 0.0)}
_LIGHTNING_PRECISIONS = ("MixedPrecision", "HalfPrecision")
_SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def settings_of_cli(document: Mapping[str, Any], where: str) -> RunSettings:
    """Return the run that a LightningCLI file describes.

    Args:
        document: The file, merged with what stands behind it on the command line.
        where: Its name, for messages.

    Raises:
        TypeError: A part is not a mapping.
        ValueError: A key is unknown, or strategy or model are not ours.
    """
    for command in SUBCOMMANDS:
        if isinstance(document.get(command), Mapping):
            document = {**document[command], **{key: value for key, value in document.items() if key != command}}
    known = (*TOP_KEYS, *TOP_KEYS_OF_OTHERS)
    for key in document:
        if key not in known and key not in SUBCOMMANDS:
            raise ValueError(unknown_name(f"key of {where}", str(key), known))
    trainer = unquoted(_mapping("trainer", document.get("trainer") or {}), parameters(TRAINER))
    strategy, of_strategy = _strategy(trainer)
    return RunSettings(
        strategy=strategy,
        precision=_precision(trainer, of_strategy),
        model=_with_optimizer(_model(document.get("model"), where), document),
        trainer={name: value for name, value in trainer.items() if name not in _NOT_OF_THE_RUN},
        data=_data(document.get("data")),
    )


def _strategy(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the arguments of ``MCoreStrategy``, and the precision plugin among them."""
    given = trainer.get("strategy", "auto")
    name, arguments = _class_and_arguments("trainer.strategy", given)
    names = ("MCoreStrategy", "mcore") if isinstance(given, str) else ("MCoreStrategy",)
    if name not in names or (isinstance(given, str) and "." in given):  # as text Lightning knows names, no paths
        shown = given if isinstance(given, str) else name
        raise ValueError(
            f"trainer.strategy={shown!r} is not MCoreStrategy, for which plan works; set class_path:"
            " lightning_mcore.MCoreStrategy"
        )
    plugin = arguments.pop("precision_plugin", None)
    for option, owner in (("ddp_config", DDP), ("optimizer_config", OPTIMIZER), ("communication", None)):
        if isinstance(arguments.get(option), Mapping):
            _, inner = _class_and_arguments(option, arguments[option])
            arguments[option] = unquoted(inner, dataclass_fields(owner)) if owner is not None else inner
    return unquoted(arguments, parameters(STRATEGY)), plugin


def _precision(trainer: Mapping[str, Any], of_strategy: Any) -> dict[str, Any]:
    """Return the arguments of ``MCorePrecision``, from the strategy, the plugins or the trainer."""
    plugins = trainer.get("plugins") or []
    found = [
        (name, arguments)
        for plugin in (plugins if isinstance(plugins, list) else [plugins])
        for name, arguments in [_class_and_arguments("trainer.plugins", plugin)]
        if name in ("MCorePrecision", *_LIGHTNING_PRECISIONS)
    ]
    asked = trainer.get("precision")
    asked = None if asked is None else _SHORT_PRECISIONS.get(str(asked), str(asked))
    if asked is not None and found:
        raise ValueError(
            f"trainer.precision={asked!r} and {found[0][0]} in trainer.plugins both say the precision; set one of them"
        )
    if of_strategy is not None:
        found = [_class_and_arguments("precision_plugin", of_strategy)]
    if not found:
        on_cpu = asked == "16-mixed" and trainer.get("accelerator") == "cpu"
        return {} if asked is None else {"precision": "bf16-mixed" if on_cpu else asked}  # as Lightning does
    name, arguments = found[0]
    if name != "MCorePrecision":
        return {"precision": arguments.get("precision")}
    arguments = unquoted(arguments, parameters(PRECISION))
    if asked not in (None, "32-true", arguments.get("precision", "32-true")):
        raise ValueError(
            f"trainer.precision={asked!r} contradicts precision_plugin of MCoreStrategy, which has"
            f" {arguments.get('precision', '32-true')!r}; set it in one place"
        )
    return arguments


def _model(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    name, arguments = _class_and_arguments("model", given)
    _check_our_class("model", given, ("MCoreGPT", "from_pretrained"))
    gpt, pretrained = parameters(GPT), parameters(GPT, "from_pretrained")
    if name == "from_pretrained" and "path" not in arguments:
        raise ValueError(f"model of {where} lacks path; give the folder or the name of a Hugging Face model")
    ours = name in ("MCoreGPT", "from_pretrained", "")
    alike = {*arguments} & ({*gpt} | {*pretrained}) & {"vocab_size", "transformer", "path"}
    if not ours and not alike:
        raise ValueError(
            f"model of {where} is {name}, of which plan knows nothing; give class_path: lightning_mcore.MCoreGPT, or a"
            " subclass with its arguments"
        )
    if not ours:  # a subclass has arguments of its own
        kept = pretrained if "path" in arguments else gpt
        arguments = {key: value for key, value in arguments.items() if key in kept}
    transformer = arguments.get("transformer")
    if isinstance(transformer, Mapping):
        latent = transformer.get("multi_latent_attention") in (True, "true")
        arguments = {**arguments, "transformer": unquoted(transformer, transformer_arguments(latent))}
    if arguments.get("recipe") is not None:
        _, recipe = _class_and_arguments("model.recipe", _mapping("model.recipe", arguments["recipe"]))
        arguments = {**arguments, "recipe": unquoted(recipe, dataclass_fields(RECIPE))}
    return unquoted(arguments, pretrained if "path" in arguments else gpt)


def _with_optimizer(model: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's arguments with the optimizer of the file, which takes the place of the model's own."""
    given = document.get("optimizer")
    if given is None:
        if document.get("lr_scheduler") is not None:
            raise ValueError("lr_scheduler is given without optimizer, which it belongs to; give both, or neither")
        return model
    Recipe.of(model.get("recipe") or {}).check_unused()
    name, arguments = _class_and_arguments("optimizer", given)
    if name != "SGD":
        return model
    momentum = unquoted(arguments, _MOMENTUM).get("momentum") or 0.0
    return {**model, "recipe": {"optimizer": "sgd", "sgd_momentum": momentum}}


def _data(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    name, arguments = _class_and_arguments("data", given)
    _check_our_class("data", given, _DATA)
    if name not in _DATA:
        return unquoted(arguments, _SIZES)
    known = parameters(_DATA[name])
    arguments = unquoted(arguments, known)
    for key in arguments:
        if key not in known:
            raise ValueError(unknown_name(f"argument of {name}", key, known))
    lacking = [key for key, argument in known.items() if argument.default is ... and key not in arguments]
    if lacking:
        raise ValueError(f"data lacks {' and '.join(lacking)}; give {'it' if len(lacking) == 1 else 'them'}")
    defaults = {key: known[key].default for key in ("batch_size", "packing") if key in known}
    return {**{key: value for key, value in defaults.items() if value is not ...}, **arguments}


def arguments_of(name: str) -> Collection[str] | None:
    """Return the names of a class's arguments; None for a class that is not ours."""
    owners = {"MCoreStrategy": STRATEGY, "MCoreGPT": GPT, "MCorePrecision": PRECISION, **_DATA}
    if name == "from_pretrained":
        return parameters(GPT, name)
    return parameters(owners[name]) if name in owners else None


def _class_and_arguments(where: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return the last part of a class path, and its arguments; a mapping without a class path is the arguments."""
    if isinstance(given, str):
        return given.rpartition(".")[2], {}
    given = _mapping(where, given)
    if "class_path" not in given:
        return "", dict(given)
    for key in given:
        if key not in ("class_path", "init_args", "dict_kwargs"):
            raise ValueError(unknown_name(f"key of {where}", str(key), ("class_path", "init_args", "dict_kwargs")))
    arguments = {**_mapping(where, given.get("init_args") or {}), **_mapping(where, given.get("dict_kwargs") or {})}
    return str(given["class_path"]).rpartition(".")[2], arguments


def _mapping(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}={given!r} is no mapping; write its keys below it")
    return given


def _check_our_class(where: str, given: Any, known: Collection[str]) -> None:
    """Refuse a class path into this package that does not end in one of the names."""
    path = str(given if isinstance(given, str) else given.get("class_path", ""))
    name = path.rpartition(".")[2]
    near = not path.count(".") and difflib.get_close_matches(name, known, n=1)
    if name not in known and (path.startswith(_OURS) or near):
        raise ValueError(unknown_name(f"class of {where}", name, known))
