# SPDX-License-Identifier: Apache-2.0
"""The keys of a LLaMA-Factory file for a vision-language model: their limits, ``media_dir``, and the parts to freeze.

``images.py`` applies the limits; ``rules.py`` and ``run.py`` check the keys here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_mcore.arguments.fields import option
from lightning_mcore.config.vision import LANGUAGE_MODEL, PROJECTOR, TOWER


@dataclass(frozen=True)
class VisionKeys:
    """The keys for vision-language models; the defaults are LLaMA-Factory's."""

    media_dir: str | None = option("The folder of the images and videos; None for ``dataset_dir``.")
    image_max_pixels: int = option("A larger image is shrunk to this many pixels.", 768 * 768)
    image_min_pixels: int = option("A smaller image is enlarged to this many pixels.", 32 * 32)
    video_max_pixels: int = option("Larger video frames are shrunk to this many pixels.", 256 * 256)
    video_min_pixels: int = option("Smaller video frames are enlarged to this many pixels.", 16 * 16)
    video_fps: float = option("Frames to take from each second of a video.", 2.0)
    video_maxlen: int = option("The largest number of frames to take from a video.", 128)
    freeze_vision_tower: bool = option("Do not train the vision tower; with adapters, put none on it.", True)
    freeze_multi_modal_projector: bool = option("Do not train the projector behind the tower.", True)
    freeze_language_model: bool = option("Do not train the language model.", False)

    @property
    def frozen_parts(self) -> list[str]:
        """The parts that are not trained, as ``MCoreVisionGPT`` takes them."""
        parts = {
            TOWER: self.freeze_vision_tower,
            PROJECTOR: self.freeze_multi_modal_projector,
            LANGUAGE_MODEL: self.freeze_language_model,
        }
        return [part for part, is_frozen in parts.items() if is_frozen]


def check_vision(keys: VisionKeys, given: Mapping[str, Any], sees: bool, depends: bool = False) -> None:
    """Raise ValueError for keys that do not fit the kind of model, and limits that contradict each other."""
    if not sees:
        # A key at its default is allowed, because files often spell out defaults.
        for field in fields(VisionKeys):
            value = getattr(keys, field.name)
            if value != field.default:
                why = "no dataset has images or videos" if depends else "model_name_or_path is a text-only model"
                raise ValueError(f"{field.name}: {value!r} is for a vision-language model, and {why}; leave it out")
        return
    # The keys of a text run that a vision run cannot have, each with its only choice
    for name, value, choice in (
        ("stage", given.get("stage", "sft"), "sft"),
        ("streaming", given.get("streaming", False), False),
        ("use_dft_loss", given.get("use_dft_loss", False), False),
    ):
        if value != choice:
            raise ValueError(f"{name}: {value} is not supported for a vision-language model; choose {name}: {choice}")
    _check_limits(keys)
    _check_freezing(keys, given.get("finetuning_type", "lora"))


def _check_limits(keys: VisionKeys) -> None:
    for kind in ("image", "video"):
        least, most = (getattr(keys, f"{kind}_{end}_pixels") for end in ("min", "max"))
        if not 1 <= least <= most:
            raise ValueError(
                f"{kind}_min_pixels: {least} and {kind}_max_pixels: {most} do not make a range; choose 1 or more,"
                " and a maximum that is not below the minimum"
            )
    if keys.video_fps <= 0 or keys.video_maxlen < 1:
        raise ValueError(
            f"video_fps: {keys.video_fps} and video_maxlen: {keys.video_maxlen} leave no frame of a video; choose more"
            " than 0, and 1 or more"
        )


def _check_freezing(keys: VisionKeys, finetuning_type: str) -> None:
    if finetuning_type == "freeze":
        raise ValueError(
            "finetuning_type: freeze is not supported for a vision-language model; choose full with"
            " freeze_vision_tower, freeze_multi_modal_projector or freeze_language_model"
        )
    # Adapters go on the language model alone, whatever these keys say.
    if finetuning_type == "lora":
        for field in fields(VisionKeys):
            value = getattr(keys, field.name)
            if field.name.startswith("freeze_") and value != field.default:
                raise ValueError(
                    f"{field.name}: {value} contradicts finetuning_type: lora, which puts adapters on the language"
                    " model alone; leave it out, or choose full"
                )
    if len(keys.frozen_parts) == 3:
        raise ValueError(
            "freeze_language_model: True freezes everything, because freeze_vision_tower and"
            " freeze_multi_modal_projector are true by default; set one of the three to false"
        )


def vision_notes(keys: VisionKeys, train_on_prompt: bool) -> list[str]:
    """Return notes about what differs from LLaMA-Factory, for checked keys of a vision-language model."""
    notes = []
    if keys.freeze_vision_tower != keys.freeze_multi_modal_projector:
        notes.append(
            "freeze_vision_tower, freeze_multi_modal_projector: the projectors behind inner layers of Qwen3-VL's tower"
            " belong to the projector here, and to the tower in LLaMA-Factory"
        )
    if train_on_prompt:
        notes.append(
            "train_on_prompt: True is for the text; LLaMA-Factory also trains on the placeholders of images and videos"
        )
    return notes
