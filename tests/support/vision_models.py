# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family that sees, and batches of text with images and videos for them.

They are drawn as ``tests/support/hf_models.py`` draws those of text. An image is noise in the form in which a processor
hands it over: rows of patches, and its size in patches.
"""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.hf_models import DELTA_NET, draw_tensor, read_tensors, stacked_experts

VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 97, 98, 99, 100
VOCAB_SIZE = 101
PATCH_VALUES = 3 * 2 * 4 * 4

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
_STACKED: dict[str, Any] = {
    **_TOWER,
    "hidden_size": 24,
    "intermediate_size": 40,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1, 2],
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 3, 1], "mrope_interleaved": True}
_PARTIAL = {**_INTERLEAVED, "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.75}
_MIXED: dict[str, Any] = {**_TEXT, **DELTA_NET, "rope_parameters": _PARTIAL}
_SEPARATE = {name: value for name, value in _STACKED.items() if name != "deepstack_visual_indexes"}
_LESS_ONE = (
    *("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight"),
    "language_model.norm.weight",
)
_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_IDS,
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {**_TOWER, "embed_dim": 24, "hidden_size": 64, "mlp_ratio": 2},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        **_IDS,
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {
            **_TOWER,
            "hidden_size": 24,
            "intermediate_size": 40,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
    },
    "qwen3_vl": {
        **_IDS,
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _INTERLEAVED},
        "vision_config": _STACKED,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        **_IDS,
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "rope_parameters": _INTERLEAVED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "vision_config": _STACKED,
    },
    "qwen3_5": {**_IDS, "text_config": _MIXED, "vision_config": _SEPARATE, "tie_word_embeddings": True},
    "qwen3_5_moe": {
        **_IDS,
        "text_config": {
            **{name: value for name, value in _MIXED.items() if name != "intermediate_size"},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        "vision_config": _SEPARATE,
    },
}
"""A config of each family, by ``model_type``."""

IMAGES: list[list[tuple[int, int, int]]] = [[(1, 4, 6), (1, 2, 2)], [(1, 6, 4)]]
VIDEOS: list[list[tuple[int, int, int]]] = [[], [(3, 4, 2)]]
"""The sizes of the images and videos in each of two rows of text: time, height and width in patches."""


def vision_batch(
    family: str, length: int = 48, images: list[Any] | None = None, videos: list[Any] | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return rows of text with images and videos, as a processor and a collator make them; the rest is padding.

    Args:
        family: Its ``model_type``; Qwen3 writes the time of each frame of a video as text.
        length: Tokens of a row.
        images: Sizes of the images of each row; None for ``IMAGES``.
        videos: Sizes of the videos of each row; None for ``VIDEOS``.
        seed: Of tokens and patches.
    """
    draw = torch.Generator().manual_seed(seed)
    images, videos = IMAGES if images is None else images, VIDEOS if videos is None else videos
    rows = []
    for of_images, of_videos in zip(images, videos, strict=True):
        row = _words(draw, 3)
        for _, height, width in of_images:
            row += [VISION_START, *[IMAGE_TOKEN] * (height * width // 4), VISION_END, *_words(draw, 2)]
        for frames, height, width in of_videos:
            parts = [(1, frames)] * frames if family.startswith("qwen3") else [(frames, 1)]
            for count, _ in parts:
                row += [*_words(draw, 1), VISION_START, *[VIDEO_TOKEN] * (count * height * width // 4), VISION_END]
        rows.append(row + _words(draw, length - len(row)))
    tokens = torch.tensor(rows)
    labels = tokens.roll(-1, 1)
    labels[(labels >= VISION_START) | (torch.arange(length) == length - 1)] = -100
    batch = {"tokens": tokens, "labels": labels}
    for name, grids, pixels in (
        ("image_grid_thw", images, "pixel_values"),
        ("video_grid_thw", videos, "pixel_values_videos"),
    ):
        sizes = [size for row in grids for size in row]
        if sizes:
            batch[name] = torch.tensor(sizes)
            batch[pixels] = torch.randn(int(batch[name].prod(1).sum()), PATCH_VALUES, generator=draw)
    if family == "qwen2_5_vl" and "video_grid_thw" in batch:
        batch["second_per_grid_ts"] = torch.tensor([1.5] * len(batch["video_grid_thw"]))
    return batch


def _words(draw: torch.Generator, count: int) -> list[int]:
    found: list[int] = torch.randint(3, VISION_START, (max(count, 0),), generator=draw).tolist()
    return found


def vision_config(family: str, **overrides: Any) -> Any:
    """Return the config of a tiny model, as transformers has it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **copy.deepcopy({**CONFIGS[family], **overrides}))


def save_vision(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a tiny model as transformers would, with a file of a processor, and return its folder.

    Args:
        family: Its ``model_type``.
        folder: Where; made if it is not there.
        overrides: Keys to have instead of those in ``CONFIGS``.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForImageTextToText

    AutoModelForImageTextToText.from_config(vision_config(family, **overrides)).save_pretrained(folder)
    tensors = {name: draw_tensor(name, tensor) for name, tensor in read_tensors(folder)}
    if family.startswith("qwen3_5"):  # norms of its language model are stored less 1, but not those of delta nets
        tensors |= {name: tensors[name] - 1 for name in tensors if name.endswith(_LESS_ONE)}
    if family == "qwen3_5_moe":  # as on the hub; transformers writes a tensor for each expert
        tensors = stacked_experts(tensors)
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return folder


@functools.cache
def vision_folder(family: str) -> Path:
    """Return the folder of a tiny model of a family, made once for all tests."""
    return save_vision(family, Path(_root().name) / family)


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vision_models_")  # removed when this process ends


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return batches as one: rows, images and videos of each follow those of the one before."""
    names = {name for batch in batches for name in batch}
    return {name: torch.cat([batch[name] for batch in batches if name in batch]) for name in names}
