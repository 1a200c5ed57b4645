# SPDX-License-Identifier: Apache-2.0
"""Writes what LLaMA-Factory makes of images and videos, for ``tests/unit/arguments/test_llamafactory_images.py``.

It calls LLaMA-Factory's own converters, templates, plugins and collator on rows in the form of its ``mllm_demo``. Run
it in an environment of its own:

    pip install llamafactory==0.9.5 av torchvision
    python -m tests.support.factory_images
"""

import copy
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.chats import characters
from tests.support.clips import frames_of, write_clip
from tests.support.vision_models import CONFIGS, save_vision, vision_config

FILE = Path(__file__).parents[1] / "unit" / "arguments" / "factory_images.json"

LIMITS = {"image_max_pixels": 128 * 128, "image_min_pixels": 32 * 32}
LIMITS_OF_VIDEOS = {"video_max_pixels": 16384, "video_min_pixels": 4096, "video_fps": 2.0, "video_maxlen": 6}
CUTOFF = 400
TEMPLATES = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink"}
"""The template of each family."""
SIZES = {  # width and height in pixels, and mode
    "large.png": (250, 180, "RGB"),
    "palette.png": (200, 150, "P"),
    "small.png": (20, 12, "RGBA"),
    "thin.png": (2, 6000, "L"),
    "wide.png": (300, 40, "RGB"),
}
ROWS: dict[str, list[dict[str, Any]]] = {  # the forms of mllm_demo.json, and of alpaca with images
    "sharegpt": [
        {
            "messages": [
                {"role": "user", "content": "<image>Who are they?"},
                {"role": "assistant", "content": "Two of a team."},
                {"role": "user", "content": "What are they doing?<image>"},
                {"role": "assistant", "content": "They celebrate."},
            ],
            "images": ["large.png", "small.png"],
        },
        {
            "messages": [
                {"role": "user", "content": "Which is wider, <image> or <image>?"},
                {"role": "assistant", "content": "The second."},
            ],
            "images": ["palette.png", "wide.png"],
        },
        {
            "messages": [{"role": "user", "content": "No image."}, {"role": "assistant", "content": "None."}],
            "images": [],
        },
    ],
    "alpaca": [{"instruction": "<image>", "input": "How tall?", "output": "Very.", "images": ["thin.png"]}],
}
CLIPS = {"odd.mov": (20, 160, 120), "long.mov": (41, 30, 36)}
"""Frames, width and height of videos of 8 frames a second: five frames are taken, and ten, of which six may be."""
ROWS_OF_VIDEOS: dict[str, list[dict[str, Any]]] = {
    "clips": [
        {
            "messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "Noise."}],
            "images": [],
            "videos": ["odd.mov"],
        },
        {
            "messages": [
                {"role": "user", "content": "<image>is not <video>, or?"},
                {"role": "assistant", "content": "It is not."},
            ],
            "images": ["wide.png"],
            "videos": ["long.mov"],
        },
    ],
    "frames": [
        {
            "messages": [{"role": "user", "content": "In <video>?"}, {"role": "assistant", "content": "Three."}],
            "videos": [["frame0.png", "frame1.png", "frame2.png"]],
        }
    ],
}
INFO: dict[str, dict[str, Any]] = {
    "sharegpt": {
        "file_name": "sharegpt.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "alpaca": {
        "file_name": "alpaca.json",
        "columns": {"prompt": "instruction", "query": "input", "response": "output", "images": "images"},
    },
}
INFO |= {
    name: {**INFO["sharegpt"], "file_name": f"{name}.json", "columns": {"messages": "messages", **columns}}
    for name, columns in (("clips", {"images": "images", "videos": "videos"}), ("frames", {"videos": "videos"}))
}
"""The entries of ``dataset_info.json``."""

KEYS: dict[str, Any] = {  # examples/megatron/qwen2_vl_full.yaml (ff6d4d12), with small values
    **LIMITS,
    **LIMITS_OF_VIDEOS,
    "do_train": True,
    "stage": "sft",
    "finetuning_type": "full",
    "preprocessing_num_workers": 2,
    "cutoff_len": CUTOFF,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 2e-3,
    "logging_steps": 1,
    "save_steps": 100,
    "lr_scheduler_type": "cosine",
    "bf16": True,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "use_distributed_optimizer": True,
}


def draw_videos(folder: Path) -> None:
    """Write the videos."""
    for name, sizes in CLIPS.items():
        write_clip(folder / name, *sizes)
    for number, frame in enumerate(frames_of(3, 90, 70)):
        Image.fromarray(frame).save(folder / f"frame{number}.png")


def draw_images(folder: Path) -> None:
    """Write the images."""
    for number, (name, (width, height, mode)) in enumerate(SIZES.items()):
        coarse = np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(coarse).resize((width, height)).convert(mode).save(folder / name)


def tokenizer() -> Any:
    """Return a tokenizer of bytes, with the marks of Qwen's templates."""
    found = characters(template=None)
    marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    found.add_special_tokens({"additional_special_tokens": marks, "pad_token": "<|end|>"})
    return found


def processor(family: str) -> Qwen2VLImageProcessorPil:
    """Return the image processor of a family: with its size of patches, and the hub's limits."""
    return Qwen2VLImageProcessorPil(
        patch_size=16 if family.startswith("qwen3") else 14, size={"shortest_edge": 3136, "longest_edge": 1003520}
    )


def video_processor(family: str) -> Any:
    """Return the video processor of a family; that of Qwen3-VL counts the pixels of all frames."""
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    size = {"shortest_edge": 4096, "longest_edge": 65536}
    return Qwen3VLVideoProcessor(size=size) if family.startswith("qwen3") else Qwen2VLVideoProcessor(size=size)


def token_ids(of: Any) -> dict[str, int]:
    """Return the ids of the tokens of images, as a config of a model has them."""
    names = ("vision_start", "vision_end", "image", "video")
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return {f"{name}_token_id": of.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}


def write_file(folder: Path, family: str = "qwen2_vl", weights: bool = False, videos: bool = False, **more: Any) -> str:
    """Write a training file, its datasets with images, and a model; return the file.

    Args:
        folder: Where; made if it is not there.
        family: Of the model; :data:`TEMPLATES` has the template of the file, for Qwen3.5 that of Qwen3-VL.
        weights: Whether the model has weights.
        videos: Whether the datasets with videos are added.
        more: Keys of the file; ``model``, ``out``, ``data`` and ``cache`` become folders in this one.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    ids = token_ids(words)
    text = {**CONFIGS[family]["text_config"], "vocab_size": len(words), "max_position_embeddings": 2 * CUTOFF}
    tower = {**CONFIGS[family]["vision_config"], "patch_size": processor(family).patch_size}
    overrides = {"text_config": text, "vision_config": tower, **ids}
    if weights:
        save_vision(family, folder / "model", **overrides)
    else:
        config = vision_config(family, **overrides)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"]
        config.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    processor(family).save_pretrained(folder / "model")
    draw_images(folder / "data")
    rows_of = dict(ROWS)
    if videos:
        draw_videos(folder / "data")
        video_processor(family).save_pretrained(folder / "model")
        rows_of |= ROWS_OF_VIDEOS
    for name, rows in rows_of.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    places = {"model_name_or_path": "model", "output_dir": "out", "dataset_dir": "data", "cache_dir": "cache"}
    folders = {key: str(folder / place) for key, place in places.items()}
    values = {
        **KEYS,
        "dataset": ",".join(rows_of),
        "template": TEMPLATES.get(family, TEMPLATES["qwen3_vl"]),
        **folders,
        **more,
    }
    (folder / "run.yaml").write_text(json.dumps(values), encoding="utf-8")
    return str(folder / "run.yaml")


def _rows(folder: Path, template: Any, words: Any, of_model: Any) -> list[dict[str, Any]]:
    """Return the rows as LLaMA-Factory tokenises them."""
    from llamafactory.data.converter import AlpacaDatasetConverter, SharegptDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor

    arguments: Any = SimpleNamespace(
        cutoff_len=CUTOFF, train_on_prompt=False, mask_history=False, media_dir=str(folder)
    )
    encoder = SupervisedDatasetProcessor(template, words, of_model, arguments)
    found = []
    for name, rows in (ROWS | ROWS_OF_VIDEOS).items():
        kind = AlpacaDatasetConverter if name == "alpaca" else SharegptDatasetConverter
        entry = DatasetAttr("file", name)
        entry.join({**INFO[name], "formatting": "alpaca" if name == "alpaca" else "sharegpt"})
        for row in rows:
            one = {key: [value] for key, value in kind(entry, arguments)(copy.deepcopy(row)).items()}
            made = encoder.preprocess_dataset(one)
            found.append({key: value[0] for key, value in made.items()})
    return found


def _processor(family: str, words: Any) -> Any:
    """Return the processor of a family, with the limits that LLaMA-Factory keeps there."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor

    kinds = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
    found = kinds[family](processor(family), words, video_processor(family))
    for name, value in (LIMITS | LIMITS_OF_VIDEOS).items():
        setattr(found, name, value)
    return found


def _collated(folder: Path, family: str) -> list[dict[str, Any]]:
    """Return the rows of a batch of LLaMA-Factory's collator, without padding."""
    from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
    from llamafactory.data.template import TEMPLATES as OF_FACTORY
    from transformers import AutoModelForImageTextToText

    words, template = tokenizer(), OF_FACTORY[TEMPLATES[family]]
    template.fix_special_tokens(words)
    of_model = _processor(family, words)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(family, **token_ids(words)))
    collate = MultiModalDataCollatorForSeq2Seq(words, model, template=template, processor=of_model)
    rows = _rows(folder, template, words, of_model)
    counts = [[len(row[name] or []) for name in ("images", "videos")] for row in rows]
    batch = collate(rows)
    seen = []
    for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grids = batch[f"{name}_grid_thw"]
        patches = batch[pixels].split(grids.prod(1).tolist())
        means = [float(values.double().mean()) for values in patches]
        seen.append(list(zip(grids.tolist(), means, strict=True)))
    found = []
    for row, numbers in enumerate(counts):
        there = batch["attention_mask"][row].bool()
        here = [seen[kind].pop(0) for kind, number in enumerate(numbers) for _ in range(number)]
        found.append(
            {
                "ids": batch["input_ids"][row][there].tolist(),
                "labels": batch["labels"][row][there].tolist(),
                "positions": batch["position_ids"][-3:, row, there].tolist(),
                "grids": [grid for grid, _ in here],
                "means": [mean for _, mean in here],
            }
        )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw_images(Path(made))
        draw_videos(Path(made))
        FILE.write_text(json.dumps({name: _collated(Path(made), name) for name in TEMPLATES}) + "\n", encoding="utf-8")
