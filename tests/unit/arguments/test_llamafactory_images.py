# SPDX-License-Identifier: Apache-2.0
"""Files of LLaMA-Factory for vision-language models: the batches of its own collator, limits of pixels, refusals."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import PIL
import pytest

from lightning_mcore.arguments.llamafactory.images import Limits
from lightning_mcore.arguments.llamafactory.run import FactoryRun, read_run
from lightning_mcore.arguments.llamafactory.vision import VisionKeys
from lightning_mcore.config.vision import Vision
from lightning_mcore.data.multimodal import with_vision
from lightning_mcore.hf.source import HFSource, seeing_name
from tests.support.factory_files import LLAMA3, write_run
from tests.support.factory_images import FILE, TEMPLATES, tokenizer, write_file
from tests.support.sentences import refuses

ROUNDING = 1e-9 if int(PIL.__version__.split(".")[0]) >= 13 else 5e-5
"""Pillow before 13 rounds a few resized pixels otherwise."""

EXPECTED: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))


def samples(run: FactoryRun) -> list[dict[str, Any]]:
    """Return each sample of a run as a batch, with positions."""
    module = run.data()
    module.prepare_data()
    module.setup("fit")
    items: Any = module._opened("train")
    source = HFSource.open(run.model_path, seeing_name(run.model_path, None), weights=False)
    vision = Vision.of(source.fields["vision"])
    return [with_vision(module._collate([items[index]]), vision) for index in range(len(items))]


@pytest.mark.parametrize("family", [*TEMPLATES, "qwen3_5"])
def test_batches_are_those_of_its_own_collator(family: str, tmp_path: Path) -> None:
    """Tokens, labels, positions and patches of each sample, in both forms of datasets, with images and with videos.

    Qwen3.5 has the processors and the positions of Qwen3-VL.
    """
    found = samples(read_run(write_file(tmp_path, family, videos=True)))
    wanted = EXPECTED["qwen3_vl" if family == "qwen3_5" else family]
    assert len(found) == len(wanted)
    for batch, row in zip(found, wanted, strict=True):
        places = len(row["ids"]) - 1
        assert batch["tokens"][0, :places].tolist() == row["ids"][:-1]
        labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
        assert labels[0, :places].tolist() == row["labels"][1:]
        assert batch["loss_mask"][0, places:].sum() == 0
        assert batch["rope_positions"][0, :places].t().tolist() == [axis[:-1] for axis in row["positions"]]
        grids = batch["vision_grids"].tolist() if "vision_grids" in batch else []
        assert grids == row["grids"]
        if grids:
            patches = batch["patches"].split([time * height * width for time, height, width in grids])
            assert [float(values.double().mean()) for values in patches] == pytest.approx(row["means"], abs=ROUNDING)


def test_qwen3_5_is_read_with_its_tower_if_a_dataset_has_images(tmp_path: Path) -> None:
    """And as a text model otherwise, for every stage of text."""
    file = write_file(tmp_path, "qwen3_5")
    seeing = read_run(file).settings().model
    assert (seeing["family"], seeing["freeze"]) == ("qwen3_5+tower", ["vision_tower", "multi_modal_projector"])
    texts = [{"instruction": "Say it.", "output": "It."}]
    (tmp_path / "data" / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"texts": {"file_name": "texts.json"}}))
    of_text = ["dataset=texts", *(f"{field.name}={field.default}" for field in fields(VisionKeys) if field.default)]
    for override in ("stage=sft", "use_dft_loss=true"):
        run = read_run(file, [*of_text, override])
        assert {"family", "freeze"}.isdisjoint(run.settings().model)
    with refuses(ValueError, "image_max_pixels: 9 is for"):
        read_run(file, [*of_text, "image_max_pixels=9"])


def test_images_lie_in_media_dir(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for name in ("large.png", "palette.png", "small.png", "thin.png", "wide.png"):
        (tmp_path / "data" / name).rename(tmp_path / "elsewhere" / name)
    assert len(samples(read_run(file, [f"media_dir={tmp_path}/elsewhere"]))) == 4
    with refuses(ValueError, "does not exist; give its path"):
        samples(read_run(file))


def test_a_sample_that_loses_part_of_an_image_is_left_out_and_counted(tmp_path: Path) -> None:
    """LLaMA-Factory cuts within exchanges, so the tokens behind an image may stay when the image is cut."""
    run = read_run(write_file(tmp_path), ["cutoff_len=120"])
    module = run.data()
    module.prepare_data()
    module.setup("fit")
    statistics = module.statistics["train"]
    assert (statistics.samples, statistics.through_image, statistics.packed) == (4, 2, 2)


def test_an_image_without_height_within_the_limits_is_refused() -> None:
    with refuses(ValueError, "within image_max_pixels, its shorter side"):
        Limits("image", 1000, 100).size(9000, 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["image_max_pixels=100"],
        ["video_min_pixels=0"],
        ["video_fps=0"],
        ["stage=dpo"],
        ["streaming=true", "max_steps=3"],
        ["use_dft_loss=true"],
        ["finetuning_type=freeze"],
        ["finetuning_type=lora", "freeze_vision_tower=false"],
        ["freeze_language_model=true"],
        ["crop_to_patches=true"],
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: list[str], tmp_path: Path) -> None:
    with refuses(ValueError):
        read_run(write_file(tmp_path), overrides)


def test_a_video_needs_its_marker(tmp_path: Path) -> None:
    file = write_file(tmp_path, videos=True, dataset="clips")
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "A"}], "images": []}
    (tmp_path / "data" / "clips.json").write_text(json.dumps([{**row, "videos": ["odd.mov"]}]), encoding="utf-8")
    with refuses(ValueError, "has 0 <video> in its text but 1 videos"):
        samples(read_run(file))


def test_keys_and_columns_of_images_need_a_model_of_images(tmp_path: Path) -> None:
    file = write_run(tmp_path, LLAMA3)
    with refuses(ValueError, "image_max_pixels: 9 is for a"):
        read_run(file, ["image_max_pixels=9"])


@pytest.mark.parametrize(
    ("overrides", "frozen"),
    [
        ([], ["vision_tower", "multi_modal_projector"]),
        (["freeze_vision_tower=false"], ["multi_modal_projector"]),
        (["freeze_multi_modal_projector=false", "freeze_language_model=true"], ["vision_tower", "language_model"]),
    ],
)
def test_parts_are_frozen(overrides: list[str], frozen: list[str], tmp_path: Path) -> None:
    run = read_run(write_file(tmp_path), overrides)
    assert run.settings().model["freeze"] == frozen
    assert len(run.notes) == ("vision_tower" not in frozen or "multi_modal_projector" not in frozen)


def test_a_prompt_is_trained_on_without_its_images(tmp_path: Path) -> None:
    """A note says so, because LLaMA-Factory trains on all tokens of the prompt."""
    run = read_run(write_file(tmp_path, dataset="alpaca"), ["train_on_prompt=true"])
    assert len(run.notes) == 1
    assert run.notes[0].startswith("train_on_prompt: True is for the text")
    [batch] = samples(run)
    learnt = batch["labels"][0][batch["loss_mask"][0] == 1].tolist()
    image, question = tokenizer().convert_tokens_to_ids(["<|image_pad|>", "?"])
    assert image in batch["tokens"][0]
    assert image not in learnt
    assert question in learnt


def test_adapters_are_on_the_language_model_alone(tmp_path: Path) -> None:
    """The tower is frozen without being named."""
    model = read_run(write_file(tmp_path), ["finetuning_type=lora", "lora_rank=4"]).settings().model
    assert model["lora"]["r"] == 4
    assert "freeze" not in model


def test_the_rotary_fusion_is_left_out_where_it_does_not_hold(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    rows = ["per_device_eval_batch_size=1", "apply_rope_fusion=true"]
    assert read_run(file, rows).settings().model["transformer"]["apply_rope_fusion"] is True
    settings = read_run(file, [*rows, "packing=true"]).settings()
    assert settings.model["transformer"]["apply_rope_fusion"] is False
    assert "apply_rope_fusion: True is for batches of one row" in settings.notes[-1]
