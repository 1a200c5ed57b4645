# SPDX-License-Identifier: Apache-2.0
"""A LightningCLI file as :class:`RunSettings`, read without Lightning: trainer, model and data by their class paths.

``fit`` lets jsonargparse build the objects; ``plan`` needs only what was written. Misspelt keys name their nearest
neighbour here as well, from signatures that ``megatron_source.py`` reads.
"""

from collections.abc import Mapping
from typing import Any

from lightning_mcore.planning.megatron_source import Argument, Owner, parameters
from lightning_mcore.run_settings import RunSettings
from lightning_mcore.spelling import unknown_name

TOP_KEYS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "verbose")
TOP_KEYS_OF_OTHERS = ("return_predictions", "weights_only")
SUBCOMMANDS = ("fit", "validate", "test", "predict")

_DATA: dict[str, Owner] = {
    "MCorePretrainingData": ("lightning_mcore/data/pretraining_data.py", "MCorePretrainingData"),
    "MCoreFinetuningData": ("lightning_mcore/data/finetuning_data.py", "MCoreFinetuningData"),
}
_NOT_OF_THE_RUN = ("strategy", "precision", "plugins", "callbacks", "logger", "profiler")
_PACKS = "MCoreFinetuningData"


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
    trainer = _mapping("trainer", document.get("trainer") or {})
    strategy, of_strategy = _strategy(trainer)
    return RunSettings(
        strategy=strategy,
        precision=_precision(trainer, of_strategy),
        model=_model(document.get("model"), where),
        trainer={name: value for name, value in trainer.items() if name not in _NOT_OF_THE_RUN},
        data=_data(document.get("data")),
    )


def _strategy(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the arguments of ``MCoreStrategy``, and the precision plugin among them."""
    given = trainer.get("strategy", "auto")
    name, arguments = _class_and_arguments("trainer.strategy", given)
    if name not in ("MCoreStrategy", "mcore"):
        raise ValueError(
            f"trainer.strategy={name!r} is not MCoreStrategy, for which plan works; set class_path:"
            " lightning_mcore.MCoreStrategy"
        )
    plugin = arguments.pop("precision_plugin", None)
    for option in ("ddp_config", "optimizer_config", "communication"):
        if isinstance(arguments.get(option), Mapping):
            _, arguments[option] = _class_and_arguments(option, arguments[option])
    return arguments, plugin


def _precision(trainer: Mapping[str, Any], of_strategy: Any) -> dict[str, Any]:
    plugins = trainer.get("plugins") or []
    found = [of_strategy] if of_strategy is not None else []
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if _class_and_arguments("trainer.plugins", plugin)[0] == "MCorePrecision":
            found.append(plugin)
    name = trainer.get("precision")
    if not found:
        return {} if name is None else {"precision": _precision_name(name)}
    arguments = _class_and_arguments("MCorePrecision", found[0])[1]
    if name is not None and _precision_name(name) != arguments.get("precision", "32-true"):
        raise ValueError(
            f"trainer.precision={name!r} contradicts MCorePrecision({arguments.get('precision', '32-true')!r}) in"
            " plugins; set it in one place"
        )
    return arguments


def _precision_name(given: Any) -> str:
    """Return the long name of a precision, as Lightning reads it."""
    short = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true"}
    return short.get(str(given), str(given))


def _model(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    name, arguments = _class_and_arguments("model", given)
    gpt, pretrained = _gpt("__init__"), _gpt("from_pretrained")
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
    return arguments


def _data(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    name, arguments = _class_and_arguments("data", given)
    if name not in _DATA:
        return arguments
    known = parameters(_DATA[name])
    for key in arguments:
        if key not in known:
            raise ValueError(unknown_name(f"argument of {name}", key, known))
    defaults = {key: known[key].default for key in ("batch_size", "packing") if key in known}
    return {**{key: value for key, value in defaults.items() if value is not ...}, **arguments}


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


def _gpt(method: str) -> dict[str, Argument]:
    return parameters(("lightning_mcore/gpt.py", "MCoreGPT"), method)
