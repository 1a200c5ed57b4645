# SPDX-License-Identifier: Apache-2.0
"""The families of vision-language models: each is a text family with a vision tower.

Their configs are read flat: ``source.complete_config`` puts the keys of ``text_config`` next to ``vision_config``. The
language model has the text family's rules, with other prefixes of weight names. The tower's weights keep their
transformers names, after the prefix that the hub uses.
"""

import dataclasses
from typing import Any

from lightning_mcore.config.vision import VISION_FAMILIES, Vision
from lightning_mcore.hf.config_rules import Config, ConfigRule, Derived, Fields, Only, Unused, refuse_unless
from lightning_mcore.hf.decoder_rules import ATTENTION_BIAS, weights_outside_layers
from lightning_mcore.hf.expert_rules import NORMALISED_ROUTER, SOFTMAX_ROUTER
from lightning_mcore.hf.families import QWEN2, QWEN3, QWEN3_MOE
from lightning_mcore.hf.family import IRRELEVANT, Family
from lightning_mcore.hf.rope_rules import ROPE
from lightning_mcore.hf.weight_rules import Experts, Stack

_IDS = ("image_token_id", "video_token_id")
_SECTIONS = {False: (16, 24, 24), True: (24, 20, 20)}  # transformers' defaults, by whether channels are interleaved


def _vision_rule(model_type: str) -> ConfigRule:
    """Return the rule for positions, the tower, and the image and video tokens."""

    def read(config: Config) -> dict[str, Any]:
        rope = dict(config.get("rope_parameters") or {})
        if rope.get("type") == "mrope":  # the old name of these positions; rope_type is a separate key
            del rope["type"]
        refuse_unless("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default",), _NOT_STRETCHED)
        # A token has three positions (time, height, width), which share the 64 rotary frequencies. mrope_section says
        # how many each gets: (16, 24, 24) one after the other in Qwen2-VL, (24, 20, 20) alternating in Qwen3-VL.
        interleaved = VISION_FAMILIES[model_type].interleaved
        refuse_unless(
            "rope_parameters.mrope_interleaved", rope.pop("mrope_interleaved", interleaved), (interleaved,), _ONE_WAY
        )
        sections = rope.pop("mrope_section", None) or _SECTIONS[interleaved]
        tower = {key: value for key, value in config["vision_config"].items() if key not in IRRELEVANT}
        ids = {name: config[name] for name in _IDS}
        vision = Vision(model_type, tower, **ids, sections=tuple(sections))
        return {**ROPE.read({**config, "rope_parameters": rope}), "vision": vision.plain()}

    def write(fields: Fields) -> dict[str, Any]:
        if fields["vision"] is None:
            raise ValueError("it has no vision tower")
        vision = Vision.of(fields["vision"])
        if vision.model_type != model_type:
            raise ValueError(f"its vision tower belongs to the model type {vision.model_type!r}")
        rope = {**ROPE.write(fields)["rope_parameters"], "mrope_section": list(vision.sections)}
        if vision.family.interleaved:
            rope["mrope_interleaved"] = True
        ids = {name: getattr(vision, name) for name in _IDS}
        return {"rope_parameters": rope, "vision_config": vision.config, **ids}

    return Derived(("rope_parameters", "vision_config", *_IDS), read, write)


_NOT_STRETCHED = "positions of images are not stretched"
_ONE_WAY = "models of this type always share channels out that way"


def _seeing(text: Family, model_type: str, architecture: str, prefix: str, tower: str) -> Family:
    """Return the family of a text family and a tower.

    ``prefix`` starts the names of the language model's weights, instead of ``model.``; ``tower`` starts the tower's.
    """
    rules = [rule for rule in text.config if rule not in (ROPE, SOFTMAX_ROUTER, ATTENTION_BIAS)]
    if ATTENTION_BIAS in text.config:
        rules.append(Only("attention_bias", False, "models with a vision tower have none here"))
    more = Unused(("vision_start_token_id", "vision_end_token_id", "vision_token_id", "text_config"))
    return dataclasses.replace(
        text,
        model_type=model_type,
        architecture=architecture,
        config=(*rules, _vision_rule(model_type), more),
        outside=weights_outside_layers(prefix),
        layer_prefix=f"{prefix}layers.{{layer}}.",
        tower=tower,
        in_memory=None if prefix == _LANGUAGE_MODEL else (prefix, _LANGUAGE_MODEL),
    )


_MODEL, _LANGUAGE_MODEL = "model.", "model.language_model."

QWEN2_VL = _seeing(QWEN2, "qwen2_vl", "Qwen2VLForConditionalGeneration", _MODEL, "visual.")

QWEN2_5_VL = _seeing(QWEN2, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _MODEL, "visual.")

QWEN3_VL = _seeing(QWEN3, "qwen3_vl", "Qwen3VLForConditionalGeneration", _LANGUAGE_MODEL, "model.visual.")


def _stacked(transposed: bool) -> Family:
    """Return the family with experts; a layer has one tensor for each projection, transposed (the hub) or not."""
    experts = ("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")
    family = _seeing(
        dataclasses.replace(QWEN3_MOE, config=(*QWEN3_MOE.config, NORMALISED_ROUTER, _NORMALISED)),
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        _LANGUAGE_MODEL,
        "model.visual.",
    )
    layer = (
        *(rule for rule in family.layer if not isinstance(rule, Experts)),
        *(
            Stack(f"mlp.experts.experts.{ours}.weight", f"mlp.experts.{name}", transposed=transposed)
            for ours, name in experts
        ),
    )
    return dataclasses.replace(family, layer=layer)


_NORMALISED = Only("norm_topk_prob", True, "transformers always normalises them", is_written=False)

# Matrices are transposed on the hub (the form written here), but not in what transformers 5 writes; both are read.
QWEN3_VL_MOE = dataclasses.replace(_stacked(transposed=True), variants=(_stacked(transposed=False),))

VISION_LANGUAGE_FAMILIES = {family.model_type: family for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)}
