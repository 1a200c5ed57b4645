# SPDX-License-Identifier: Apache-2.0
"""The videos of conversations: which frames are sampled, how many tokens they need, and their patches.

A video is a file, which PyAV decodes, or a list of image files: frames that were sampled before. The model's own
transformers video processor chooses frames and their size, and makes the patches. When a row is tokenised, only the
header is read: the processor runs on frames without memory and so tells how many patches there will be. When a batch is
made, frames are decoded, and their patches are compared with that number.

In Qwen2-VL and Qwen2.5-VL a video is one run of tokens; Qwen2.5-VL's positions depend on the seconds between frames. In
Qwen3-VL each time step is a run of its own, after its time as text, as in transformers 4 and LLaMA-Factory;
transformers 5 leaves a second pair of marks around them, which the models did not see in training.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mcore.config.value_checks import require_number, require_size
from lightning_mcore.data.finetuning.media import (
    Stored,
    UnusableFileError,
    called,
    loaded_image,
    opened_image,
    source,
    stored,
)
from lightning_mcore.data.finetuning.processors import load_processor

START, VIDEO_PAD, END = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"


@dataclass(frozen=True)
class Header:
    """What the header of a video says."""

    frames: int
    rate: float  # frames per second
    width: int
    height: int
    seconds: float
    taken: bool = False  # these frames were sampled before, and all are used


@dataclass(frozen=True)
class Taken:
    """The frames that are sampled from a video."""

    frames: list[int]
    times: list[float]
    rate: float  # sampled frames per second


class Videos:
    """Reads the videos of rows for a model.

    ``given`` is the model's video processor, or its folder or name; None rejects videos. ``fps`` and ``maxlen`` are
    ``MCoreVisionData``'s ``video_fps`` and ``video_maxlen``.
    """

    def __init__(self, given: Any, fps: float = 2.0, maxlen: int | None = None) -> None:
        require_number("video_fps", fps)
        if maxlen is not None:
            require_size("video_maxlen", maxlen, at_least=2)
        self._given = given
        self.fps = fps
        self.maxlen = maxlen

    def to_json_string(self) -> str:
        """Return all settings as text; the video processor, which needs torchvision, is not loaded."""
        settings = self._given
        if isinstance(settings, str):
            from transformers.models.auto.video_processing_auto import get_video_processor_config

            try:
                settings = get_video_processor_config(settings) or None  # without one there cannot be videos
            except OSError:
                settings = None
        elif settings is not None:
            settings = settings.to_json_string()
        return json.dumps([settings, self.fps, self.maxlen])

    @cached_property
    def processor(self) -> Any:
        """The video processor, loaded at first use; it raises if none was given or a package is missing."""
        _require_packages()
        if self._given is None:
            raise ValueError("video_processor is not given; give a folder or name of a model, or a video processor")
        processor = load_processor(self._given, "video")
        if self.maxlen is not None:
            processor = copy(processor)  # the given object keeps its own limit
            processor.max_frames = self.maxlen
        return processor

    def planned(self, given: Any, media_dir: str, name: str) -> tuple[Stored, str]:
        """Return a video as the cache has it, and its text of tokens; only its header is read.

        ``given`` is what the row has: a path, bytes, or a list of images, each one of these. Raises UnusableFileError
        if a file does not exist or cannot be read or used, TypeError for anything else.
        """
        if isinstance(given, list):
            if not given:
                raise UnusableFileError(f"{name} has a video without frames; remove the row")
            frames = [stored(frame, "an image", name) for frame in given]
            video = {"path": None, "bytes": None, "frames": frames}
        else:
            video = {**stored(given, "a video", name), "frames": []}
        header = self._header(video, media_dir, name)
        patch_time = int(self.processor.temporal_patch_size)
        try:
            taken = self._taken(header)
            grid = self._grid(len(taken.frames), *self._size(header.width, header.height))
        except ValueError as error:
            raise UnusableFileError(
                f"{_called(video, media_dir)}, a video of {name}, cannot be used: {error}; remove the row"
            ) from error
        # 10 s at 30 frames per second, fps=2: 20 frames, 10 steps of 2. With 32 x 32 patches each, the grid is
        # [10, 32, 32]; merged 2 x 2, that is 10 * 16 * 16 = 2,560 tokens. Steps are 1.0 s apart (``seconds``).
        tokens = prod(grid) // int(self.processor.merge_size) ** 2
        planned = {**video, "taken": taken.frames, "grid": grid, "seconds": patch_time / taken.rate, "tokens": tokens}
        return planned, self._text(taken, grid, tokens)

    def patches(self, videos: list[Stored], media_dir: str, name: str) -> dict[str, Tensor]:
        """Return the patches of videos that :meth:`planned` returned, as their processor makes them.

        ``pixel_values_videos`` [patches, values of a patch], ``video_grid_thw`` [videos, 3] int64, and unless times are
        written as text, ``second_per_grid_ts`` [videos] float32. Raises UnusableFileError if a file is damaged or has
        changed.
        """
        made = self.processor(
            videos=[self._frames(video, media_dir, name) for video in videos],
            do_sample_frames=False,
            input_data_format="channels_last",
            return_tensors="pt",
        )
        # The tokens in the cache follow the header; another number of patches would shift every later video's.
        for video, grid in zip(videos, made["video_grid_thw"].tolist(), strict=True):
            if grid != video["grid"]:
                raise UnusableFileError(
                    f"{_called(video, media_dir)} has {grid} patches in time, height and width, but its header"
                    f" promised {video['grid']}; replace the file, or remove its row"
                )
        found = {name: made[name] for name in ("pixel_values_videos", "video_grid_thw")}
        if not self._writes_times:
            found["second_per_grid_ts"] = torch.tensor([video["seconds"] for video in videos])
        return found

    # ---- what a subclass may decide otherwise

    def _taken(self, header: Header) -> Taken:
        """Return the frames to sample, as transformers does; raise ValueError if there are too few."""
        least = int(self.processor.temporal_patch_size)
        if header.frames < least:
            raise ValueError(f"it has fewer than {least} frames")
        frames = list(range(header.frames))
        if not header.taken:
            from transformers.video_utils import VideoMetadata

            metadata = VideoMetadata(total_num_frames=header.frames, fps=header.rate)
            drawn = self.processor.sample_frames(metadata, fps=self.fps).tolist()
            frames = [number for number in drawn if number < header.frames]  # Qwen2's can be one too many, by rounding
        rate = len(frames) / header.frames * header.rate
        return Taken(frames, [number / header.rate for number in frames], rate)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in pixels that :meth:`_frame` gives a frame."""
        return width, height

    def _frame(self, image: Any) -> Any:
        """Return a frame in RGB, a Pillow image, before the video processor gets it."""
        return image.convert("RGB")

    @property
    def _writes_times(self) -> bool:
        """Whether the time of each step is written as text."""
        from transformers import Qwen3VLVideoProcessor

        return isinstance(self.processor, Qwen3VLVideoProcessor)

    def _text(self, taken: Taken, grid: list[int], tokens: int) -> str:
        if not self._writes_times:
            return START + tokens * VIDEO_PAD + END
        from transformers import Qwen3VLProcessor

        processor: Any = Qwen3VLProcessor
        times = processor._calculate_timestamps(None, [*taken.times], 1.0, int(self.processor.temporal_patch_size))
        step = START + tokens // grid[0] * VIDEO_PAD + END
        return "".join(f"<{time:.1f} seconds>{step}" for time in times)

    def _grid(self, frames: int, width: int, height: int) -> list[int]:
        """Return how many patches a video has in time, height and width."""
        empty = torch.empty(frames, 3, height, width, dtype=torch.uint8, device="meta")  # shapes only
        made = self.processor(
            videos=[empty],
            do_sample_frames=False,
            do_rescale=False,
            do_normalize=False,
            input_data_format="channels_first",
        )
        grid: list[int] = made["video_grid_thw"][0].tolist()
        return grid

    def _header(self, video: Stored, media_dir: str, name: str) -> Header:
        if video["frames"]:
            return self._header_of_frames(video["frames"], media_dir, name)
        with _opened(video, media_dir, name) as (container, stream):
            rate = float(stream.average_rate or 0)
            if not rate:
                raise UnusableFileError(
                    f"{called(video, media_dir)}, a video of {name}, has no frame rate; convert it to another"
                    " format, or remove the row"
                )
            seconds = float(stream.duration * stream.time_base) if stream.duration else 0.0
            # Some headers have no frame count (.mkv, .webm), and some count frames that an edit list hides, as after a
            # cut without re-encoding. Decoding the file counts them.
            frames = stream.frames
            if not frames or (seconds and abs(seconds * rate - frames) > 0.5):
                frames = sum(1 for _ in container.decode(stream))
            if not frames:
                raise _without_frames(video, media_dir, name)
            seconds = seconds or frames / rate
            return Header(frames, rate, stream.width, stream.height, seconds)

    def _header_of_frames(self, frames: list[Stored], media_dir: str, name: str) -> Header:
        sizes = set()
        for frame in frames:
            with opened_image(frame, media_dir, name) as image:
                sizes.add(image.size)
        if len(sizes) > 1:
            raise _of_sizes(sorted(sizes), f"a video of {name}")
        [(width, height)] = sizes
        return Header(len(frames), self.fps, width, height, len(frames) / self.fps, taken=True)

    def _frames(self, video: Stored, media_dir: str, name: str) -> Any:
        """Return the sampled frames of a video, [frames, height, width, 3] uint8."""
        if video["frames"]:
            images = [self._frame(loaded_image(frame, media_dir, name)) for frame in video["frames"]]
            found = dict(enumerate(images))
        else:
            found = self._decoded(video, media_dir, name)
        sizes = sorted({image.size for image in found.values()})
        if len(sizes) > 1:
            raise _of_sizes(sizes, f"{_called(video, media_dir)}, a video of {name},")
        return np.stack([np.asarray(found[number]) for number in video["taken"]])

    def _decoded(self, video: Stored, media_dir: str, name: str) -> dict[int, Any]:
        """Return the sampled frames of a file, by number."""
        wanted, number = set(video["taken"]), -1
        found = {}
        with _opened(video, media_dir, name) as (container, stream):
            # In order up to the last one needed: seeking would land on key frames.
            for number, frame in enumerate(itertools.islice(container.decode(stream), max(wanted) + 1)):
                if number in wanted:
                    found[number] = self._frame(frame.to_image())
        if len(found) < len(wanted):
            raise UnusableFileError(
                f"{called(video, media_dir)} is damaged: it ends after {number + 1} frames, but its header promised"
                f" more than {max(wanted)}; replace the file, or remove its row"
            )
        return found


@contextmanager
def _opened(video: Stored, media_dir: str, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a video file, and yield it and its stream of frames."""
    _require_packages()
    import av

    try:
        with av.open(source(video, media_dir, "a video", name)) as container:
            if not container.streams.video:
                raise _without_frames(video, media_dir, name)
            stream: Any = container.streams.video[0]
            if stream.codec_context is None:
                raise _unreadable(video, media_dir, name, "its codec is unknown")
            yield container, stream
    except av.FFmpegError as error:
        raise _unreadable(video, media_dir, name, error.strerror) from error


def _unreadable(video: Stored, media_dir: str, name: str, why: str) -> UnusableFileError:
    return UnusableFileError(
        f"{called(video, media_dir)}, a video of {name}, cannot be read: {why}; replace it, or remove the row"
    )


def _without_frames(video: Stored, media_dir: str, name: str) -> UnusableFileError:
    return UnusableFileError(f"{called(video, media_dir)}, a video of {name}, has no frames; remove the row")


def _require_packages() -> None:
    """Raise ModuleNotFoundError without the packages that decode and resize videos."""
    for package in ("av", "torchvision"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"videos need {package}, which is not installed; install lightning-mcore[video]")


def _called(video: Stored, media_dir: str) -> str:
    if not video["frames"]:
        return called(video, media_dir)
    return f"the list of images from {called(video['frames'][0], media_dir)} on"


def _of_sizes(sizes: list[tuple[int, int]], what: str) -> UnusableFileError:
    pixels = " and ".join(f"{width} x {height} pixels" for width, height in sizes[:2])
    return UnusableFileError(f"{what} has frames of different sizes, {pixels}; use one size")
