# SPDX-License-Identifier: Apache-2.0
"""What a planned model trains, by the rules of ``hf/adapters.py`` and ``hf/freezing.py``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mcore.config.lora import check_train_only
from lightning_mcore.hf.adapters import adapted_model, check_held, projection_names
from lightning_mcore.hf.freezing import check_trained, trained_model
from lightning_mcore.hf.peft_folder import given_lora
from lightning_mcore.hf.registry import family_and_fields
from lightning_mcore.layers.quantized import check_blocks
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import whole_shapes


def with_adapters(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the adapters or the frozen weights that the arguments of ``MCoreGPT`` ask for.

    Raises FileNotFoundError for a PEFT folder that does not exist, ValueError or TypeError for a wrong setting.
    """
    given, train_only = model.get("lora"), model.get("train_only")
    if train_only is not None:
        check_train_only(train_only, given is not None)
        family, settings = family_and_fields(model)
        check_trained(family, settings, train_only)
        return replace(fields, adapters=trained_model(whole_shapes(fields), family, settings, train_only))
    if given is None:
        return fields
    lora, continued = given_lora(given)
    family, settings = family_and_fields(model)
    lora.check_targets(projection_names(family, settings), strict=continued is None)
    check_held(family, settings, lora)
    return replace(fields, adapters=adapted_model(whole_shapes(fields), family, settings, lora))


def check_adapters(fields: GPTFields, config: Any, model: Mapping[str, Any]) -> None:
    """Refuse adapters that Megatron's settings and the layout do not allow."""
    adapted = fields.adapters
    if adapted is None or adapted.lora is None:
        return
    tp, etp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1
    names = projection_names(*family_and_fields(model))
    adapted.lora.check_layers(config, names)
    adapted.lora.check_vocabulary(names, {**fields.transformer, **model}, fields.padded_vocab_size, tp)
    if adapted.lora.quantization:
        saved = {name for name, trained in adapted.of.items() if trained.is_saved}
        check_blocks({name: shape[-1] for name, shape in whole_shapes(fields).items() if name not in saved}, tp, etp)
