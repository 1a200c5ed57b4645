# SPDX-License-Identifier: Apache-2.0
"""Conversations about images: markers become tokens, images patches; what is cut, counted and refused."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_mcore.config.vision import Vision
from lightning_mcore.data.finetuning.images import MCoreVisionData
from lightning_mcore.data.multimodal import with_vision
from tests.support.chats import characters, write
from tests.support.sentences import refuses

SIZES = {"a.png": (24, 16), "b.png": (8, 8), "c.png": (16, 40)}  # width and height in pixels; 4 x 4 are a patch
ROWS: list[dict[str, Any]] = [
    {"messages": [("user", "what is <image>?"), ("assistant", "red")], "images": ["a.png"]},
    {"messages": [("user", "<image> or <image>"), ("assistant", "the first")], "images": ["b.png", "c.png"]},
    {"messages": [("user", "no image"), ("assistant", "none")], "images": []},
]


def seeing_tokenizer() -> Any:
    tokenizer = characters()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})


def data(folder: Path, rows: list[dict[str, Any]], **arguments: Any) -> MCoreVisionData:
    """Write rows and their images, and return them as a data module."""
    for number, (name, size) in enumerate(SIZES.items()):
        noise = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
        Image.fromarray(noise).save(folder / name)
    told = [{**row, "messages": [{"role": role, "content": text} for role, text in row["messages"]]} for row in rows]
    given = {"seq_length": 96, "batch_size": 1, "shuffle": False, "cache_dir": str(folder / "cache"), **arguments}
    file = write(folder / "rows.jsonl", told)
    return MCoreVisionData(file, seeing_tokenizer(), image_processor=processor(), media_dir=str(folder), **given)


def batches(module: MCoreVisionData, file: str | None = None) -> list[dict[str, torch.Tensor]]:
    """Return the batches of a data module; ``file`` takes the place of its rows."""
    module.train_files = file or module.train_files
    module.prepare_data()
    module.setup("fit")
    items = module._opened("train")
    return [module._collate([items[index]]) for index in range(len(items))]  # type: ignore[arg-type]


def test_each_marker_becomes_the_tokens_of_its_image(tmp_path: Path) -> None:
    """The patches are those of the processor, in order; no token of an image is learnt."""
    module = data(tmp_path, ROWS, packing=False)
    first, second, third = batches(module)
    token = module.image_token
    assert [int((batch["tokens"] == token).sum()) for batch in (first, second, third)] == [6, 11, 0]
    assert second["image_grid_thw"].tolist() == [[1, 2, 2], [1, 10, 4]]
    images = [Image.open(tmp_path / name) for name in ("b.png", "c.png")]
    assert torch.equal(second["pixel_values"], processor()(images=images, return_tensors="pt")["pixel_values"])
    assert "pixel_values" not in third
    learnt = first["labels"][first["loss_mask"] > 0]
    assert module.tokenizer.decode(learnt) == "red<|end|>"
    text = module.tokenizer.decode(first["tokens"][0])
    assert "what is <|vision_start|>" + 6 * "<|image_pad|>" + "<|vision_end|>?" in text


def test_packed_rows_have_the_images_of_their_samples_in_order(tmp_path: Path) -> None:
    """The model takes them as they are: each run of tokens has its image."""
    module = data(tmp_path, ROWS, seq_length=160)
    [batch] = batches(module)
    ids = {name: module.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = {"spatial_merge_size": 2, "in_channels": 3, "temporal_patch_size": 2, "patch_size": 4}
    found = with_vision(batch, Vision("qwen2_vl", config, ids["image_pad"], ids["video_pad"], (2, 3, 3)))
    samples = batch["sample_ids"][0].tolist()
    wanted = {0: [[1, 4, 6]], 1: [[1, 2, 2], [1, 10, 4]], 2: []}
    assert found["vision_grids"].tolist() == [grid for sample in samples for grid in wanted[sample]]
    assert sorted(samples) == [0, 1, 2]
    assert len(found["patches"]) == 4 * (6 + 1 + 10)


def test_images_in_parts_of_messages_are_those_of_markers(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": " what?"}]
    rows = [{"messages": [("user", parts), ("assistant", "red")]}]
    [batch] = batches(data(tmp_path, rows, packing=False))
    other = [{"messages": [("user", "<image> what?"), ("assistant", "red")], "images": ["a.png"]}]
    [same] = batches(data(tmp_path, other, packing=False))
    assert batch.keys() == same.keys()
    assert all(torch.equal(batch[name], same[name]) for name in batch)


def test_images_as_bytes_are_those_of_files(tmp_path: Path) -> None:
    """Also where parquet marks the column as images, which ``datasets`` would decode."""
    row = {"prompt": "<image> what?", "response": "red"}
    [wanted] = batches(data(tmp_path, [], packing=False), write(tmp_path / "a.jsonl", [{**row, "images": ["a.png"]}]))
    stored: list[Any] = [{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}]
    plain = Features(prompt=Value("string"), response=Value("string"))
    kinds = {"bytes": Value("binary"), "path": Value("string")}
    for number, kind in enumerate(([kinds], [ImageFeature(decode=False)], [ImageFeature()])):
        file = tmp_path / f"{number}.parquet"
        images = stored if number < 2 else [Image.open(BytesIO(stored[0]["bytes"]))]
        Dataset.from_list([{**row, "images": images}], Features(**plain, images=kind)).to_parquet(file)
        [found] = batches(data(tmp_path, [], packing=False), str(file))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_sample_whose_cut_goes_through_an_image_is_left_out_and_counted(tmp_path: Path) -> None:
    """A sample that is cut behind its first image keeps that one alone."""
    end = ("assistant", "a long answer that does not fit into the row at all")
    rows = [
        {"messages": [("user", "<image>"), end], "images": ["b.png"]},
        {"messages": [("user", "a question of 24 letters <image>"), end], "images": ["c.png"]},
        {"messages": [("user", "<image>"), ("assistant", "abc"), ("user", "<image>"), end], "images": ["b.png"] * 2},
    ]
    module = data(tmp_path, rows, packing=False, seq_length=32, overlong="cut")
    first, second = batches(module)
    statistics = module.statistics["train"]
    assert (statistics.through_image, statistics.cut, statistics.samples) == (1, 2, 3)
    assert "left out 1 whose cut goes through an image or a video" in str(statistics)
    for batch in (first, second):
        assert len(batch["image_grid_thw"]) == int((batch["tokens"] == module.image_token).sum())


ANSWER = ("assistant", "x")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("no marker", {"images": ["a.png"]}),
        ("<image>", {"images": []}),
        ("<image>", {"images": ["d.png"]}),
        ("<image>", {"images": ["rows.jsonl"]}),
        ("<image>", {"images": ["data:image/png;base64," + "A" * 9000]}),
        ("<|image_pad|>", {"images": []}),
        ("<|video_pad|>", {"images": []}),
    ],
)
def test_rows_and_images_that_do_not_belong_together_are_refused(
    text: str, more: dict[str, Any], tmp_path: Path
) -> None:
    with refuses(ValueError, *more):
        batches(data(tmp_path, [{"messages": [("user", text), ANSWER], **more}]))


def test_an_image_that_is_neither_a_path_nor_bytes_is_refused(tmp_path: Path) -> None:
    with refuses(TypeError, "has an image of type int; give its path"):
        batches(data(tmp_path, [{"messages": [("user", "<image>"), ANSWER], "images": [3]}]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG\r\n\x1a\n123",
        (2, 900),
        (20000, 20000),
    ],
)
def test_an_image_that_cannot_be_used_is_named_or_its_row_counted(
    content: bytes | tuple[int, int], tmp_path: Path
) -> None:
    """As is asked for; with many pixels, it might be an attack."""
    for broken in ("error", "drop"):
        module = data(tmp_path, [ROWS[0], ROWS[2]], packing=False, broken_images=broken)
        if isinstance(content, bytes):
            (tmp_path / "a.png").write_bytes(content)
        else:
            Image.new("1", content).save(tmp_path / "a.png")
        if broken == "error":
            with refuses(ValueError):
                batches(module)
    assert len(batches(module)) == 1
    statistics = module.statistics["train"]
    assert (statistics.samples, statistics.unreadable_image, statistics.through_image) == (2, 1, 0)
    assert "left out 1 with an image or a video that cannot be read" in str(statistics)


def test_markers_without_images_are_an_error_even_where_broken_images_are_dropped(tmp_path: Path) -> None:
    with refuses(ValueError, "has 1 <image> in its text but 0 images"):
        batches(data(tmp_path, [{**ROWS[0], "images": []}], broken_images="drop"))


@pytest.mark.parametrize("part", ["text", {"type": "audio", "audio": "a.wav"}, {"text": "x"}])
def test_parts_of_other_kinds_are_refused(part: Any, tmp_path: Path) -> None:
    with refuses(ValueError, "in a message, which is not a text, an"):
        batches(data(tmp_path, [{"messages": [("user", [part]), ANSWER]}]))


def test_a_damaged_image_is_named_or_its_row_counted(tmp_path: Path) -> None:
    """Its header is whole, so its tokens are known."""
    for broken in ("error", "drop"):
        module = data(tmp_path, [ROWS[0], ROWS[2]], packing=False, broken_images=broken)
        whole = (tmp_path / "a.png").read_bytes()
        (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
        if broken == "error":
            with refuses(ValueError, "replace the file, or remove its row"):
                batches(module)
    assert len(batches(module)) == 1
    assert module.statistics["train"].unreadable_image == 1


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with refuses(ValueError, "overlong='split'"):
        data(tmp_path, ROWS, overlong="split")
    with refuses(ValueError, "broken_images='skip'"):
        data(tmp_path, ROWS, broken_images="skip")
    contradictory = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 900, "longest_edge": 100})
    limits = MCoreVisionData(str(tmp_path / "rows.jsonl"), seeing_tokenizer(), 32, contradictory)
    with refuses(ValueError, "has a minimum of 900 pixels and a maximum"):
        _ = limits.image_processor
    with refuses(ValueError, "choose a larger seq_length or overl"):
        batches(data(tmp_path, ROWS, seq_length=4, packing=False))
    with refuses(ValueError, "image_processor is not given"):
        MCoreVisionData("rows.jsonl", seeing_tokenizer(), 32)
    for kind in ("image", "video"):
        given: dict[str, Any] = {"image_processor": processor(), f"{kind}_processor": 5}
        with refuses(TypeError, f"{kind}_processor is of type int; give a folder"):
            MCoreVisionData("rows.jsonl", seeing_tokenizer(), 32, **given)
    module = MCoreVisionData(str(tmp_path / "rows.jsonl"), characters(), 32, processor(), cache_dir=str(tmp_path))
    with refuses(ValueError, "the tokenizer has no token"):
        _ = module.image_token
