# SPDX-License-Identifier: Apache-2.0
"""The families of models that see: each is a family of text with a tower in front.

Their configs are read flat: the keys of ``text_config`` stand beside ``vision_config`` (``source.complete_config``).
The language model's rules are those of the text family, with other prefixes of names. The tower's weights keep
transformers' names behind the hub's prefix.
"""

import dataclasses
from typing import Any

from lightning_mcore.config.vision import VISION_FAMILIES, Vision
from lightning_mcore.hf.config_rules import Config, ConfigRule, Derived, Fields, Only, Unused, refuse_unless
from lightning_mcore.hf.decoder_rules import ROPE
from lightning_mcore.hf.expert_rules import NORMALISED_ROUTER, SOFTMAX_ROUTER
from lightning_mcore.hf.families import QWEN2, QWEN3, QWEN3_MOE
from lightning_mcore.hf.family import IRRELEVANT, Family
from lightning_mcore.hf.weight_rules import Experts, Rename, Stack, Vocabulary, WeightRule

_IDS = ("image_token_id", "video_token_id")
_SECTIONS = {False: (16, 24, 24), True: (24, 20, 20)}  # transformers' defaults, by whether channels are interleaved


def _vision_rule(model_type: str) -> ConfigRule:
    """Return the rule of positions and of everything that the model sees with."""

    def read(config: Config) -> dict[str, Any]:
        rope = dict(config.get("rope_parameters") or {})
        if rope.get("type") == "mrope":  # the old name of these positions; the kind of stretching is beside it
            del rope["type"]
        refuse_unless("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default",), _NOT_STRETCHED)
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
            raise ValueError("it does not see")
        vision = Vision.of(fields["vision"])
        if vision.model_type != model_type:
            raise ValueError(f"it sees as models of type {vision.model_type!r} do")
        rope = {**ROPE.write(fields)["rope_parameters"], "mrope_section": list(vision.sections)}
        if vision.family.interleaved:
            rope["mrope_interleaved"] = True
        ids = {name: getattr(vision, name) for name in _IDS}
        return {"rope_parameters": rope, "vision_config": vision.config, **ids}

    return Derived(("rope_parameters", "vision_config", *_IDS), read, write)


_NOT_STRETCHED = "positions of images are not stretched"
_ONE_WAY = "models of this type always share channels out that way"


def _seeing(text: Family, model_type: str, architecture: str, prefix: str, tower: str) -> Family:
    """Return the family of a text family with a tower.

    Args:
        text: The family of the language model.
        model_type: As in ``config.json``.
        architecture: Name of the class in transformers.
        prefix: Of the names of the language model's weights, in the place of ``model.``.
        tower: Of the names of the tower's weights.
    """
    rules = (rule for rule in text.config if rule not in (ROPE, SOFTMAX_ROUTER))
    more = Unused(("vision_start_token_id", "vision_end_token_id", "vision_token_id", "text_config"))
    outside: tuple[WeightRule, ...] = (
        Vocabulary("embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight"),
        Rename("decoder.final_layernorm.weight", f"{prefix}norm.weight"),
        Vocabulary("output_layer.weight", "lm_head.weight"),
    )
    return dataclasses.replace(
        text,
        model_type=model_type,
        architecture=architecture,
        config=(*rules, _vision_rule(model_type), more),
        outside=outside,
        layer_prefix=f"{prefix}layers.{{layer}}.",
        tower=tower,
    )


_MODEL, _LANGUAGE_MODEL = "model.", "model.language_model."

QWEN2_VL = _seeing(QWEN2, "qwen2_vl", "Qwen2VLForConditionalGeneration", _MODEL, "visual.")
"""Qwen2-VL: Qwen2 behind a tower that sees whole frames."""

QWEN2_5_VL = _seeing(QWEN2, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _MODEL, "visual.")
"""Qwen2.5-VL: Qwen2 behind a tower with windows."""

QWEN3_VL = _seeing(QWEN3, "qwen3_vl", "Qwen3VLForConditionalGeneration", _LANGUAGE_MODEL, "model.visual.")
"""Qwen3-VL: Qwen3, with outputs from inside the tower after its first layers."""


def _stacked(transposed: bool) -> Family:
    """Return the family with experts, each projection of a layer as one tensor, as the hub or transformers has it."""
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

QWEN3_VL_MOE = dataclasses.replace(_stacked(transposed=True), variants=(_stacked(transposed=False),))
"""Qwen3-VL-MoE: the same with experts. The hub has their matrices transposed, and transformers 5 writes them as they
are; both are read, and the first, which every version of transformers reads, is written."""

OF_VISION = {family.model_type: family for family in (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)}
"""All of them, by the ``model_type`` of their ``config.json``."""
