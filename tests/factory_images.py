# SPDX-License-Identifier: Apache-2.0
"""Writes what LLaMA-Factory makes of conversations with images, for ``tests/unit/test_llamafactory_images.py``.

It calls LLaMA-Factory's own converters, templates, plugins and collator on rows in the form of its ``mllm_demo``. Run
it in an environment of its own:

    pip install llamafactory==0.9.5
    python -m tests.factory_images
"""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.chats import characters
from tests.vision_models import CONFIGS, save_vision, vision_config

FILE = Path(__file__).parent / "unit" / "factory_images.json"

LIMITS = {"image_max_pixels": 128 * 128, "image_min_pixels": 32 * 32}
CUTOFF = 400
FAMILIES = {"qwen2_vl": "qwen2_vl", "qwen3_vl_nothink": "qwen3_vl"}
"""The family for each template."""
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
"""The entries of ``dataset_info.json``."""

KEYS: dict[str, Any] = {  # examples/megatron/qwen2_vl_full.yaml (ff6d4d12), with small values
    **LIMITS,
    "video_max_pixels": 16384,
    "do_train": True,
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "sharegpt,alpaca",
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
        patch_size=16 if family == "qwen3_vl" else 14, size={"shortest_edge": 3136, "longest_edge": 1003520}
    )


def token_ids(of: Any) -> dict[str, int]:
    """Return the ids of the tokens of images, as a config of a model has them."""
    names = ("vision_start", "vision_end", "image", "video")
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return {f"{name}_token_id": of.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}


def write_file(folder: Path, template: str = "qwen2_vl", weights: bool = False, **more: Any) -> str:
    """Write a training file, its datasets with images, and a model; return the file.

    Args:
        folder: Where; made if it is not there.
        template: Of the file; :data:`FAMILIES` has the family of the model.
        weights: Whether the model has weights.
        more: Keys of the file; ``model``, ``out``, ``data`` and ``cache`` become folders in this one.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    family, words = FAMILIES[template], tokenizer()
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
    for name, rows in ROWS.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    places = {"model_name_or_path": "model", "output_dir": "out", "dataset_dir": "data", "cache_dir": "cache"}
    values = {**KEYS, "template": template, **{key: str(folder / place) for key, place in places.items()}, **more}
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
    for name, kind in (("sharegpt", SharegptDatasetConverter), ("alpaca", AlpacaDatasetConverter)):
        entry = DatasetAttr("file", name)
        entry.join({**INFO[name], "formatting": name})
        for row in ROWS[name]:
            one = {key: [value] for key, value in kind(entry, arguments)(row).items()}
            made = encoder.preprocess_dataset(one)
            found.append({key: value[0] for key, value in made.items()})
    return found


def _collated(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a batch of LLaMA-Factory's collator, without padding."""
    from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
    from llamafactory.data.template import TEMPLATES
    from transformers import AutoModelForImageTextToText

    words, template = tokenizer(), TEMPLATES[name]
    template.fix_special_tokens(words)
    images = processor(FAMILIES[name])
    of_model: Any = SimpleNamespace(image_processor=images, video_processor=images, **LIMITS)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_config(FAMILIES[name], **token_ids(words)))
    collate = MultiModalDataCollatorForSeq2Seq(words, model, template=template, processor=of_model)
    rows = _rows(folder, template, words, of_model)
    counts = [len(row["images"] or []) for row in rows]
    batch = collate(rows)
    grids, first, found = batch["image_grid_thw"], 0, []
    patches = batch["pixel_values"].split(grids.prod(1).tolist())
    for row, count in enumerate(counts):
        there = batch["attention_mask"][row].bool()
        found.append(
            {
                "ids": batch["input_ids"][row][there].tolist(),
                "labels": batch["labels"][row][there].tolist(),
                "positions": batch["position_ids"][1:, row, there].tolist(),
                "grids": grids[first : first + count].tolist(),
                "means": [float(values.double().mean()) for values in patches[first : first + count]],
            }
        )
        first += count
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw_images(Path(made))
        FILE.write_text(json.dumps({name: _collated(Path(made), name) for name in FAMILIES}) + "\n", encoding="utf-8")
