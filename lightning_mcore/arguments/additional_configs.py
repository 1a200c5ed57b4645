# SPDX-License-Identifier: Apache-2.0
"""``additional_configs``: fields of Megatron's ``TransformerConfig`` that have no argument of their own.

A dict, or the path of a JSON file with one. A name that Megatron does not have is refused with its nearest neighbour; a
name that is an argument too is taken over by the argument if that says nothing, and refused if it says something else.
What belongs to the strategy or to the precision goes there (``mapping.py``); what others fill in is refused here.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mcore.config.signatures import transformer_arguments
from lightning_mcore.config.text import unknown_name

_ELSEWHERE = {
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"), "it follows from bf16 and fp16"
    ),
    **dict.fromkeys(("bf16", "fp16"), "it is an argument of its own, beside additional_configs"),
    **dict.fromkeys(("fp4", "fp4_recipe", "fp4_param"), "FP4 is not supported yet"),
    **dict.fromkeys(
        ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        "the strategy fills it in while it runs the model",
    ),
    **dict.fromkeys(
        ("rotary_base", "rotary_percent", "rotary_scaling_factor"), "positions are those of the checkpoint's own config"
    ),
}


def load_additional_configs(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the dict that was given, as such, as JSON text or as the path of a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a JSON object.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    is_text = given.lstrip().startswith("{")
    if not is_text and not Path(given).is_file():
        raise FileNotFoundError(
            f"additional_configs={given!r} is not a file; give the path of a JSON file, or a JSON object"
        )
    text = given if is_text else Path(given).read_text(encoding="utf-8")
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"additional_configs={given!r} is not JSON: {error}; give an object of TransformerConfig's fields"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(
            f"additional_configs={given!r} holds a {type(loaded).__name__}; give an object of fields of"
            " TransformerConfig"
        )
    return loaded


def take_over(arguments: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Let fields that were left None take their values from ``additional_configs``.

    Args:
        arguments: A dataclass of arguments; its fields are set.
        extra: The additional configs.

    Returns:
        Those that are no fields of it.

    Raises:
        ValueError: A name is unknown or not to be set, or a field has another value.
    """
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    known = transformer_arguments(latent=True)
    rest = {}
    for name, value in extra.items():
        if name in fields and name != "additional_configs" and name in known:
            _take(arguments, name, value)
            continue
        if name not in known:
            raise ValueError(unknown_name("key of additional_configs", name, known))
        if name in _ELSEWHERE:
            raise ValueError(f"additional_configs has {name}={value!r}, but {_ELSEWHERE[name]}; remove it")
        rest[name] = value
    return rest


def _take(arguments: Any, name: str, value: Any) -> None:
    own = getattr(arguments, name)
    if name == "recompute_modules" and isinstance(value, list):
        value = ",".join(map(str, value))
    if own is None:
        setattr(arguments, name, value)
    elif own != value:
        raise ValueError(f"{name}={own!r} contradicts {name}={value!r} in additional_configs; set it in one place")
