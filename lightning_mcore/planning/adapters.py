# SPDX-License-Identifier: Apache-2.0
"""What a planned model trains, by the rules of ``hf/adapters.py`` and ``hf/freezing.py``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mcore.config.lora import LoRA, check_train_only
from lightning_mcore.hf.adapters import adapted_model, projection_names
from lightning_mcore.hf.family import family_and_fields
from lightning_mcore.hf.freezing import check_trained, trained_model
from lightning_mcore.hf.peft_folder import read_lora
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import whole_shapes


def with_adapters(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the adapters or the frozen weights that the arguments of ``MCoreGPT`` ask for.

    Args:
        fields: The model.
        model: The arguments; ``lora`` may be the folder of a PEFT adapter.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: A setting is out of range, or a target matches nothing.
        TypeError: A setting has the wrong type.
    """
    given, train_only = model.get("lora"), model.get("train_only")
    if train_only is not None:
        check_train_only(train_only, given is not None)
        family, settings = family_and_fields(model)
        check_trained(family, settings, train_only)
        return replace(fields, adapters=trained_model(whole_shapes(fields), family, settings, train_only))
    if given is None:
        return fields
    lora = read_lora(given) if isinstance(given, str) else LoRA.of(given)
    family, settings = family_and_fields(model)
    lora.check_targets(projection_names(family, settings))
    return replace(fields, adapters=adapted_model(whole_shapes(fields), family, settings, lora))
