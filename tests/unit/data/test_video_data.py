# SPDX-License-Identifier: Apache-2.0
"""Conversations about videos: transformers' own frames, tokens and patches; what is cut, counted and refused."""

import json
import sys
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    LlavaOnevisionVideoProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    ViTImageProcessor,
)

from lightning_mcore.cli.fit import TrainingCLI
from lightning_mcore.config.vision import Vision
from lightning_mcore.data.finetuning.images import MCoreVisionData
from lightning_mcore.data.finetuning.processors import load_processor
from lightning_mcore.data.multimodal import with_vision
from tests.support.clips import frames_of, write_clip
from tests.support.factory_images import write_file
from tests.support.sentences import refuses
from tests.unit.data.test_vision_data import ANSWER, batches, data, processor

CLIP = (9, 24, 16)  # frames, width and height; 4 x 4 pixels are a patch, 8 frames a second
SIZE = {"shortest_edge": 64, "longest_edge": 1536}
ROW: dict[str, Any] = {
    "messages": [("user", "is <video> as <image>?"), ("assistant", "no")],
    "images": ["a.png"],
    "videos": ["a.mov"],
}


def video_processor(kind: str = "qwen2") -> Any:
    made = Qwen3VLVideoProcessor if kind == "qwen3" else Qwen2VLVideoProcessor
    return made(patch_size=4, size=SIZE, cap_pixels_per_frame=False)


def video_data(folder: Path, rows: list[dict[str, Any]], kind: str = "qwen2", **arguments: Any) -> MCoreVisionData:
    """Write rows, an image and a video, and return them as a data module."""
    write_clip(folder / "a.mov", *CLIP)
    given = {"packing": False, "seq_length": 300, "video_processor": video_processor(kind), **arguments}
    return data(folder, rows, **given)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_videos_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Its processor of all frames draws the same, and makes the same tokens, patches and seconds; with an image."""
    module = video_data(tmp_path, [ROW], kind, video_fps=6.0)
    [batch] = batches(module)
    whole = Qwen3VLProcessor if kind == "qwen3" else Qwen2_5_VLProcessor
    theirs = whole(processor(), module.tokenizer, video_processor(kind))
    metadata = {"total_num_frames": CLIP[0], "fps": 8.0}
    options = {"video_metadata": [metadata], "do_sample_frames": True, "fps": 6.0, "return_metadata": True}
    made, [text] = theirs._process_videos([frames_of(*CLIP)], **options)
    if kind == "qwen2":
        text = f"<|vision_start|>{text}<|vision_end|>"
        assert batch["second_per_grid_ts"].tolist() == pytest.approx(made["second_per_grid_ts"])
    else:
        assert text.startswith("<0.1 seconds><|vision_start|><|video_pad|>")
        assert "second_per_grid_ts" not in batch
    assert f"is {text} as <|vision_start|><|image_pad|>" in module.tokenizer.decode(batch["tokens"][0])
    assert torch.equal(batch["pixel_values_videos"], made["pixel_values_videos"])
    assert torch.equal(batch["video_grid_thw"], made["video_grid_thw"])
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert module.tokenizer.decode(batch["labels"][batch["loss_mask"] > 0]) == "no<|end|>"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_packed_rows_have_the_videos_of_their_samples_in_order(kind: str, tmp_path: Path) -> None:
    """The model takes them as they are."""
    write_clip(tmp_path / "b.mov", 4, 16, 16)
    rows = [ROW, {**ROW, "videos": ["b.mov"]}, {"messages": [("user", "?"), ANSWER], "images": [], "videos": []}]
    module = video_data(tmp_path, rows, kind, packing=True, seq_length=600)
    [batch] = batches(module)
    config = {"spatial_merge_size": 2, "in_channels": 3, "temporal_patch_size": 2, "patch_size": 4}
    family = {"qwen2": "qwen2_5_vl", "qwen3": "qwen3_vl"}[kind]
    settings = Vision(family, {**config, "tokens_per_second": 2}, *module._tokens, (2, 3, 3))
    found = with_vision(batch, settings)
    wanted = {0: [2, 4, 6], 1: [2, 4, 4]}
    samples = [sample for sample in batch["sample_ids"][0].tolist() if sample in wanted]
    assert batch["video_grid_thw"].tolist() == [wanted[sample] for sample in samples]
    assert len(found["patches"]) == 2 * 24 + 2 * (24 + 16)


def test_other_forms_of_a_video_are_those_of_its_file(tmp_path: Path) -> None:
    """Bytes, parts of messages, all its frames as images, and a container whose header does not count frames."""
    [wanted] = batches(video_data(tmp_path, [{**ROW, "images": ["a.png"]}], video_fps=8.0, video_maxlen=8))
    write_clip(tmp_path / "a.mkv", *CLIP, codec="ffv1")
    taken = [0, 1, 2, 3, 4, 5, 6, 7]  # of nine, eight at even distances
    for number, frame in enumerate(frames_of(*CLIP)):
        Image.fromarray(frame).save(tmp_path / f"frame{number}.png")
    parts = [
        *({"type": "text", "text": "is "}, {"type": "video", "video": "a.mov"}, {"type": "text", "text": " as "}),
        *({"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}),
    ]
    others = [
        {"messages": [("user", parts), ("assistant", "no")]},
        {**ROW, "videos": [[f"frame{number}.png" for number in taken]]},
        {**ROW, "videos": ["a.mkv"]},
    ]
    for other in others:
        [found] = batches(video_data(tmp_path, [other], video_fps=8.0, video_maxlen=8))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted if name != "second_per_grid_ts")
    videos = video_data(tmp_path, [ROW]).videos
    planned, _ = videos.planned((tmp_path / "a.mov").read_bytes(), "", "a row")
    assert planned["grid"] == videos.planned("a.mov", str(tmp_path), "a row")[0]["grid"]
    assert len(videos.patches([planned], "", "a row")["pixel_values_videos"]) == 2 * 24


@pytest.mark.parametrize(("kind", "length"), [("qwen2", 34), ("qwen3", 56)])
def test_a_sample_whose_cut_goes_through_a_video_is_left_out_and_counted(
    kind: str, length: int, tmp_path: Path
) -> None:
    """For Qwen3 also where the cut is between two frames; a video behind the cut is left out of its sample."""
    end = ("assistant", "a long answer that does not fit into the row at all" * 2)
    rows = [
        {"messages": [("user", "a question of 24 letters <video>"), end], "videos": ["a.mov"]},
        {"messages": [("user", "?"), end, ("user", "<video>"), end], "videos": ["a.mov"]},
        {"messages": [("user", "<video>"), end], "videos": ["b.mov"]},
    ]
    write_clip(tmp_path / "b.mov", 2, 8, 8)
    module = video_data(tmp_path, rows, kind, seq_length=length, overlong="cut")
    found = batches(module)
    statistics = module.statistics["train"]
    assert (statistics.through_image, statistics.cut, statistics.samples) == (1, 2, 3)
    assert [len(batch.get("video_grid_thw", [])) for batch in found] == [0, 1]


def refused(folder: Path, file: str) -> str:
    """Write a file that cannot be used, and return its path."""
    if file == "sound.wav":
        with wave.open(str(folder / file), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(bytes(800))
    elif file == "thin.mov":
        write_clip(folder / file, 4, 2, 900)
    elif file == "one.mov":
        write_clip(folder / file, 1, 16, 16)
    elif file == "unknown.mov":
        write_clip(folder / file, *CLIP)
        (folder / file).write_bytes((folder / file).read_bytes().replace(b"png ", b"zzzz"))
    elif file == "two.mjpeg":
        frames = [Image.new("RGB", size) for size in ((24, 16), (24, 16), (8, 8), (8, 8))]
        with (folder / file).open("wb") as two:
            for frame in frames:
                frame.save(two, "JPEG")
    elif file == "cut.mkv":
        write_clip(folder / file, *CLIP, codec="ffv1")
        (folder / file).write_bytes((folder / file).read_bytes()[:700])
    return file


@pytest.mark.parametrize(
    "video",
    [
        "b.mov",
        "rows.jsonl",
        "sound.wav",
        "thin.mov",
        "one.mov",
        "cut.mkv",
        "unknown.mov",
        "two.mjpeg",
        [],
        ["a.png", "b.png"],
        ["a.png"],
        ["a.png", "d.png"],
    ],
)
def test_a_video_that_cannot_be_used_is_named_or_its_row_counted(video: Any, tmp_path: Path) -> None:
    given = refused(tmp_path, video) if isinstance(video, str) else video
    rows = [{**ROW, "videos": [given]}, {**ROW, "videos": [["a.png"] * 2 if isinstance(given, list) else "a.mov"]}]
    with refuses(ValueError):
        batches(video_data(tmp_path, rows))
    module = video_data(tmp_path, rows, broken_images="drop")
    assert len(batches(module)) == 1
    assert module.statistics["train"].unreadable_image == 1


@pytest.mark.parametrize(("count", "hidden", "taken"), [(61, 0, 14), (24, 3, 10)])
def test_a_whole_video_is_not_called_damaged(count: int, hidden: int, taken: int, tmp_path: Path) -> None:
    """Where transformers draws one frame behind the last, and where the header counts frames that are never shown."""
    write_clip(tmp_path / "b.mov", count, 8, 8, hidden=hidden)
    module = video_data(tmp_path, [{**ROW, "videos": ["b.mov"]}], video_fps=2.0 if not hidden else 4.0)
    [batch] = batches(module)
    assert batch["video_grid_thw"].tolist() == [[taken // 2, 2, 2]]
    assert max(module.videos.planned("b.mov", str(tmp_path), "a row")[0]["taken"]) < count - hidden


def test_a_damaged_video_is_named_or_its_row_counted(tmp_path: Path) -> None:
    """Its header comes first and is whole, so its tokens are known."""
    write_clip(tmp_path / "b.mov", *CLIP, movflags="faststart")
    whole = (tmp_path / "b.mov").read_bytes()
    (tmp_path / "b.mov").write_bytes(whole[: 2 * len(whole) // 3])
    rows = [{**ROW, "videos": ["b.mov"]}, ROW]
    with refuses(ValueError, "mov, a video of this batch, cannot be"):
        batches(video_data(tmp_path, rows))
    module = video_data(tmp_path, rows, broken_images="drop")
    assert len(batches(module)) == 1
    assert module.statistics["train"].unreadable_image == 1


@pytest.mark.parametrize(
    ("frames", "size"),
    [
        (5, CLIP[1:]),
        (9, (40, 16)),
    ],
)
def test_a_video_that_became_another_is_named(frames: int, size: tuple[int, int], tmp_path: Path) -> None:
    module = video_data(tmp_path, [ROW])
    module.prepare_data()
    module.setup("fit")
    (tmp_path / "a.mov").unlink()
    write_clip(tmp_path / "a.mov", frames, *size)
    item: Any = module._opened("train")[0]
    with refuses(ValueError, "replace the file, or remove its row"):
        module._collate([item])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_file_of_lightning_has_the_settings_of_videos(family: str, tmp_path: Path) -> None:
    """Its model's folder has the processors and the tokenizer."""
    write_file(tmp_path, family, weights=True, videos=True)
    model, files = str(tmp_path / "model"), str(tmp_path / "data")
    settings = {"train_files": f"{files}/clips.json", "tokenizer": model, "seq_length": 800, "media_dir": files}
    settings |= {"template": "qwen2_vl", "packing": False, "cache_dir": str(tmp_path / "cache")}
    run = {
        "seed_everything": False,
        "trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
        "model": {"class_path": "lightning_mcore.MCoreVisionGPT.from_pretrained", "init_args": {"path": model}},
        "data": {
            "class_path": "lightning_mcore.MCoreVisionData",
            "init_args": {**settings, "video_fps": 4, "video_maxlen": 8},
        },
    }
    (tmp_path / "fit.yaml").write_text(json.dumps(run))
    module = TrainingCLI(args=["--config", str(tmp_path / "fit.yaml")], run=False).datamodule
    assert [batch["video_grid_thw"].tolist() for batch in batches(module)] == [[[4, 4, 6]], [[4, 2, 2]]]


def test_settings_and_rows_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ValueError, "video_fps=0"):
        video_data(tmp_path, [ROW], video_fps=0)
    with refuses(ValueError, "video_maxlen=1"):
        video_data(tmp_path, [ROW], video_maxlen=1)
    with refuses(TypeError, "video_fps='2'"):
        video_data(tmp_path, [ROW], video_fps="2")
    with refuses(ValueError, "video_fps=nan"):
        video_data(tmp_path, [ROW], video_fps=float("nan"))
    with refuses(ValueError, "has 1 <video> in its text but 2 videos"):
        batches(video_data(tmp_path, [{**ROW, "videos": ["a.mov"] * 2}]))
    with refuses(ValueError, "video_processor is not given; give a"):
        batches(video_data(tmp_path, [ROW], video_processor=None))
    limits = Qwen2VLVideoProcessor(patch_size=4, size={"shortest_edge": 900, "longest_edge": 100})
    with refuses(ValueError, "the video processor has a minimum of 900"):
        batches(video_data(tmp_path, [ROW], video_processor=limits))
    for kind, other in (("video", LlavaOnevisionVideoProcessor()), ("image", ViTImageProcessor()), ("image", None)):
        with refuses(TypeError, f"{type(other).__name__} is not the {kind} processor of a Qwen-VL"):
            load_processor(other, kind)  # type: ignore[arg-type]
    for package in ("av", "torchvision"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with refuses(ModuleNotFoundError, "lightning-mcore[video]"):
                batches(video_data(tmp_path, [ROW]))
    module = video_data(tmp_path, [ROW])
    module.prepare_data()
    monkeypatch.setitem(sys.modules, "av", None)
    del module.videos.processor  # as in a process that finds the cache
    with refuses(ModuleNotFoundError, "videos need av"):
        module.setup("fit")
