# SPDX-License-Identifier: Apache-2.0
"""Which weights of a planned model have adapters, by the rules that put them on a model (``hf/adapters.py``)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mcore.config.lora import LoRA
from lightning_mcore.hf.adapters import adapted_model, projection_names
from lightning_mcore.hf.family import family_and_fields
from lightning_mcore.hf.peft_folder import read_lora
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import whole_shapes


def with_adapters(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the adapters that the arguments of ``MCoreGPT`` ask for.

    Args:
        fields: The model.
        model: The arguments; ``lora`` may be the folder of a PEFT adapter.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A setting is out of range, or a target matches nothing.
        TypeError: A setting has the wrong type.
    """
    given = model.get("lora")
    if given is None:
        return fields
    lora = read_lora(given) if isinstance(given, str) else LoRA.of(given)
    family, settings = family_and_fields(model)
    lora.check_targets(projection_names(family, settings))
    return replace(fields, adapters=adapted_model(whole_shapes(fields), family, settings, lora))
