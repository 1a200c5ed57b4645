# SPDX-License-Identifier: Apache-2.0
"""The families of vision-language models: each is a text family with a vision tower.

Their configs are read flat: ``source.complete_config`` puts the keys of ``text_config`` next to ``vision_config``. The
language model has the text family's rules, with other prefixes of weight names. The tower's weights keep their
transformers names, after the prefix that the hub uses.
"""

import dataclasses
from typing import Any

from lightning_mcore.config.vision import VISION_FAMILIES, Vision, VisionFamily
from lightning_mcore.hf.config_rules import Config, ConfigRule, Derived, Fields, Only, Unused, refuse_unless
from lightning_mcore.hf.decoder_rules import ATTENTION_BIAS, weights_outside_layers
from lightning_mcore.hf.delta_net_families import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_STACKED, TEXT_ROPE, WITH_TOWERS
from lightning_mcore.hf.expert_rules import NORMALISED_ROUTER, SOFTMAX_ROUTER
from lightning_mcore.hf.families import QWEN2, QWEN3, QWEN3_MOE
from lightning_mcore.hf.family import IRRELEVANT, SEEING, Family
from lightning_mcore.hf.rope_rules import PARTIAL_ROPE, ROPE
from lightning_mcore.hf.weight_rules import Experts, Stack

_IDS = ("image_token_id", "video_token_id")
_DEEPSTACK = "deepstack_visual_indexes"


def _vision_rule(model_type: str, of_text: Derived) -> ConfigRule:
    """Return the rule for positions, the tower, and the image and video tokens; ``of_text`` is the one for text."""
    family = VISION_FAMILIES[model_type]

    def read(config: Config) -> dict[str, Any]:
        rope = dict(config.get("rope_parameters") or {})
        if rope.get("type") == "mrope":  # the old name of these positions; rope_type is a separate key
            del rope["type"]
        refuse_unless("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default",), _NOT_STRETCHED)
        # A token has three positions (time, height, width), which share the 64 rotary frequencies. mrope_section says
        # how many each gets: (16, 24, 24) one after the other in Qwen2-VL, (24, 20, 20) alternating in Qwen3-VL.
        interleaved = family.interleaved
        refuse_unless(
            "rope_parameters.mrope_interleaved", rope.pop("mrope_interleaved", interleaved), (interleaved,), _ONE_WAY
        )
        sections = rope.pop("mrope_section", None) or family.sections
        tower = {key: value for key, value in config["vision_config"].items() if key not in IRRELEVANT}
        if family.projector == VisionFamily.projector and tower.get(_DEEPSTACK):
            raise ValueError(
                f"vision_config.{_DEEPSTACK}={tower[_DEEPSTACK]} is not supported, because towers of this model type"
                " have one output; remove it"
            )
        ids = {name: config[name] for name in _IDS}
        vision = Vision(model_type, tower, **ids, sections=tuple(sections))
        return {**of_text.read({**config, "rope_parameters": rope}), "vision": vision.plain()}

    def write(fields: Fields) -> dict[str, Any]:
        if fields["vision"] is None:
            raise ValueError("it has no vision tower")
        vision = Vision.of(fields["vision"])
        if vision.model_type != model_type:
            raise ValueError(f"its vision tower belongs to the model type {vision.model_type!r}")
        rope = {**of_text.write(fields)["rope_parameters"], "mrope_section": list(vision.sections)}
        if vision.family.interleaved:
            rope["mrope_interleaved"] = True
        ids = {name: getattr(vision, name) for name in _IDS}
        return {"rope_parameters": rope, "vision_config": vision.config, **ids}

    return Derived(("rope_parameters", "vision_config", *_IDS), read, write)


_NOT_STRETCHED = "positions of images are not stretched"
_ONE_WAY = "models of this type always share channels out that way"


def _seeing(text: Family, model_type: str, architecture: str, prefix: str, tower: str) -> Family:
    """Return the family of a text family and a tower, whose weights' names begin with ``prefix`` and ``tower``."""
    is_partial = TEXT_ROPE in text.config
    rules = [rule for rule in text.config if rule not in (ROPE, TEXT_ROPE, SOFTMAX_ROUTER, ATTENTION_BIAS)]
    if ATTENTION_BIAS in text.config:
        rules.append(Only("attention_bias", False, "models with a vision tower have none here"))
    more = Unused(("vision_start_token_id", "vision_end_token_id", "vision_token_id", "text_config"))
    return dataclasses.replace(
        text,
        model_type=model_type,
        architecture=architecture,
        config=(*rules, _vision_rule(model_type, PARTIAL_ROPE if is_partial else ROPE), more),
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

QWEN3_5_VL = _seeing(QWEN3_5, "qwen3_5", "Qwen3_5ForConditionalGeneration", _LANGUAGE_MODEL, "model.visual.")

_OF_EXPERTS = ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _LANGUAGE_MODEL, "model.visual.")

# The hub has one tensor for all experts of a layer (the form written here), and transformers 5 writes one for each.
QWEN3_5_VL_MOE = dataclasses.replace(
    _seeing(QWEN3_5_MOE_STACKED, *_OF_EXPERTS), variants=(_seeing(QWEN3_5_MOE, *_OF_EXPERTS),)
)

VISION_LANGUAGE_FAMILIES = {
    family.model_type + SEEING * (family.model_type in WITH_TOWERS): family
    for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5_VL, QWEN3_5_VL_MOE)
}
"""The families by name: their ``model_type``, and ``SEEING`` where that is the name of the language model's family."""


def with_tower(name: str) -> str:
    """Return the name of the family that reads a model's vision tower too, from that which may not; else the same."""
    return name + SEEING if name + SEEING in VISION_LANGUAGE_FAMILIES else name
