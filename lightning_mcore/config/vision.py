# SPDX-License-Identifier: Apache-2.0
"""Models that also see images and videos, as plain data: a row for each family, and the settings of one model.

A family has a vision tower and a projector (one class in transformers), a rule for which token embeddings their outputs
replace, and a rule for positions. In all families of this table, the outputs replace the embeddings of image and video
tokens, in order. The families differ in their transformers classes, and in how a head's channels are divided among a
token's three positions: time, height and width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Self

IMAGE, VIDEO = 1, 2
"""Kinds of tokens, as in transformers' ``mm_token_type_ids``; text is 0."""

TOWER, PROJECTOR, LANGUAGE_MODEL = PARTS = ("vision_tower", "multi_modal_projector", "language_model")
"""The parts of a model that can be frozen."""


@dataclass(frozen=True)
class VisionFamily:
    """What the models of a family have in common."""

    package: str  # the transformers module with its classes
    tower: str  # the class of its tower, projector included
    model: str  # the class whose get_rope_index gives positions
    # Whether the three positions alternate over the channels; otherwise each has a section of them.
    interleaved: bool = False
    # How names of the projector's weights begin within the tower
    projector: tuple[str, ...] = ("merger.",)
    sections: tuple[int, int, int] = (16, 24, 24)  # of a config that has none


_WITH_DEEPSTACK = ("merger.", "deepstack_merger_list.")

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        "transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VLModel"
    ),
    "qwen2_5_vl": VisionFamily(
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLModel",
    ),
    "qwen3_vl": VisionFamily(
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
        "Qwen3VLVisionModel",
        "Qwen3VLModel",
        interleaved=True,
        projector=_WITH_DEEPSTACK,
        sections=(24, 20, 20),
    ),
    "qwen3_vl_moe": VisionFamily(
        "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe",
        "Qwen3VLMoeVisionModel",
        "Qwen3VLMoeModel",
        interleaved=True,
        projector=_WITH_DEEPSTACK,
        sections=(24, 20, 20),
    ),
    "qwen3_5": VisionFamily(
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "Qwen3_5VisionModel",
        "Qwen3_5Model",
        interleaved=True,
        sections=(11, 11, 10),
    ),
    "qwen3_5_moe": VisionFamily(
        "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe",
        "Qwen3_5MoeVisionModel",
        "Qwen3_5MoeModel",
        interleaved=True,
        sections=(11, 11, 10),
    ),
}
"""The families, by their ``model_type``."""


_OF_IMAGES = (
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels"),
    *("image_token_id", "video_token_id"),
)


@dataclass(frozen=True)
class Vision:
    """The vision settings of one model; ValueError if the family is not in the table."""

    model_type: str
    config: dict[str, Any] = field(repr=False)  # vision_config of its Hugging Face config
    # Tokens whose embeddings the tower's outputs replace
    image_token_id: int
    video_token_id: int
    # Pairs of channels that rotate with time, height and width; they add up to half of a head's rotated channels.
    sections: tuple[int, int, int]

    def __post_init__(self) -> None:
        """Raise for an unknown family."""
        if self.model_type not in VISION_FAMILIES:
            raise ValueError(f"vision has model_type={self.model_type!r}; choose one of {', '.join(VISION_FAMILIES)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the settings from plain data, as :meth:`plain` returns it."""
        return cls(**{**settings, "sections": tuple(settings["sections"])})

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data, for a checkpoint."""
        return {**vars(self), "sections": list(self.sections)}

    @property
    def family(self) -> VisionFamily:
        """The family of the model."""
        return VISION_FAMILIES[self.model_type]

    def part_of(self, name: str) -> str:
        """Return the part that a tower weight belongs to, by its name in transformers' class."""
        return PROJECTOR if name.startswith(self.family.projector) else TOWER

    @property
    def deepstack(self) -> int:
        """How many of the language model's first layers add outputs of the tower's inner layers to theirs."""
        return len(self.config.get("deepstack_visual_indexes") or ())

    @staticmethod
    def check_first_stage(deepstack: int, layers: int, teacher: str | None = None) -> None:
        """Raise ValueError if the first pipeline stage, or its first chunk, has fewer layers than ``deepstack``.

        ``teacher`` is the path of the model if it is a teacher.
        """
        if layers < deepstack and teacher is not None:
            raise ValueError(
                f"the first pipeline stage has {layers} layers of the teacher {teacher}, and outputs of its vision"
                f" tower are added after the first {deepstack}; choose a smaller pipeline_model_parallel_size, or"
                " another teacher"
            )
        if layers < deepstack:
            raise ValueError(
                f"the first pipeline stage has {layers} layers, and outputs of the vision tower are added after the"
                f" first {deepstack}; give it more, for example with num_layers_in_first_pipeline_stage"
            )

    def check_teacher(self, path: str, teacher: "Vision") -> None:
        """Raise ValueError if a teacher of this model, which is at ``path``, cannot see the same patches."""
        own, taught = ({**vision.config, **vars(vision)} for vision in (self, teacher))
        for name in _OF_IMAGES:
            if own[name] != taught[name]:
                raise ValueError(
                    f"teacher={path!r} has {name}={taught[name]!r} and the student {own[name]!r}, so the two cannot see"
                    " the same images; give a teacher with the same value"
                )
        if self.family.interleaved is not teacher.family.interleaved:
            raise ValueError(
                f"teacher={path!r} is a {teacher.model_type} and the student a {self.model_type}, and only one of these"
                " types writes the times of video frames as text; give a teacher of the student's type"
            )

    def times_as(self, other: "Vision") -> bool:
        """Return whether the frames of videos have the same positions as in another model."""
        return all(vision.model_type != "qwen2_5_vl" for vision in (self, other)) or (
            self.model_type == other.model_type
            and self.config["tokens_per_second"] == other.config["tokens_per_second"]
        )

    @property
    def width(self) -> int:
        """Channels of a patch within the tower."""
        return int(self.config.get("embed_dim") or self.config["hidden_size"])

    @property
    def patches_of_token(self) -> int:
        """Patches that the projector joins into one token."""
        return int(self.config["spatial_merge_size"]) ** 2

    def tokens_of(self, grid: tuple[int, int, int]) -> int:
        """Return how many tokens an image or a video takes, from its grid of patches: time, height, width.

        With a ``spatial_merge_size`` of 2, an image of 16 x 24 patches, ``(1, 16, 24)``, takes 384 / 4 = 96 tokens.
        """
        return prod(grid) // self.patches_of_token

    def load_of(self, patches: int) -> int:
        """Return roughly how much the tower computes for one frame, in multiply-adds for each channel of a patch."""
        blocks = int(self.config["depth"])
        seeing_all = len(self.config.get("fullatt_block_indexes") or range(blocks))  # the other blocks have windows
        # 12 * width: query, key, value and output (4) and the MLP (8). 2 * patches: scores, and the sum of the values.
        return patches * (blocks * 12 * self.width + seeing_all * 2 * patches)
