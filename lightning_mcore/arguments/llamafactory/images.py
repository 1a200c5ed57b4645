# SPDX-License-Identifier: Apache-2.0
"""The images and videos of a LLaMA-Factory file: its limits before the model's processors, and its data module.

``vision.py`` has the keys, and ``run.py`` builds :class:`FactoryVisionData` from them.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mcore.arguments.llamafactory.data import FactoryData, FactoryReading
from lightning_mcore.data.finetuning.images import ImageRows
from lightning_mcore.data.finetuning.tokenized import Reading
from lightning_mcore.data.finetuning.videos import Header, Taken, Videos

_LEAST_SIDE = 28  # in pixels
# A longer image than 200:1 becomes 180:1, as in LLaMA-Factory.
_LARGEST_RATIO, _NEW_RATIO = 200, 180


@dataclass(frozen=True)
class Limits:
    """A LLaMA-Factory file's limits on pixels, which apply before the model's own processor.

    An image or frame is resized up to four times: to the largest number of pixels, to the smallest, to sides that are
    long enough, and to a ratio of sides that a processor accepts. Each step resamples the pixels again, so the steps
    cannot be merged into one.

    Source: ``_preprocess_image`` of ``Qwen2VLPlugin`` in LLaMA-Factory 0.9.5 (src/llamafactory/data/mm_plugin.py) has
    the same order.
    """

    kind: str
    most: int  # a larger image is shrunk to this many pixels
    least: int

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of an image after resizing; ValueError if a side would have no pixel.

        With at most 768 * 768 pixels, 1600 x 1200 becomes 886 x 665.
        """
        size = [(width, height), *self._within_limits(width, height)][-1]
        return [size, *_with_legal_sides(*size)][-1]

    def resized(self, image: Any) -> Any:
        """Return a Pillow image in RGB within the limits."""
        for size in self._within_limits(*image.size):
            image = image.resize(size)
        image = image.convert("RGB")
        for size in _with_legal_sides(*image.size):
            image = image.resize(size)
        return image

    def _within_limits(self, width: int, height: int) -> Iterator[tuple[int, int]]:
        """Yield the sizes that an image gets, one after the other, to have an allowed number of pixels."""
        for limit, is_outside in ((self.most, int.__gt__), (self.least, int.__lt__)):
            if is_outside(width * height, limit):
                # Both sides shrink alike: sqrt(589824 / 1920000) = 0.554 for the example of size().
                factor = math.sqrt(limit / (width * height))
                width, height = int(width * factor), int(height * factor)
                if not width or not height:
                    raise ValueError(f"within {self.kind}_max_pixels, its shorter side would have no pixels")
                yield width, height


def _with_legal_sides(width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes that an image gets, one after the other, to have sides that a processor accepts."""
    if min(width, height) < _LEAST_SIDE:
        width, height = max(width, _LEAST_SIDE), max(height, _LEAST_SIDE)
        yield width, height
    if width / height > _LARGEST_RATIO:
        width = height * _NEW_RATIO
        yield width, height
    if height / width > _LARGEST_RATIO:
        height = width * _NEW_RATIO
        yield width, height


class FactoryImageProcessor:
    """A model's image processor behind the limits of a LLaMA-Factory file."""

    def __init__(self, processor: Any, limits: Limits) -> None:
        self._processor = processor
        self._limits = limits
        self.merge_size = processor.merge_size

    def to_json_string(self) -> str:
        """Return all settings as text, which is part of the cache's name."""
        return json.dumps([self._processor.to_json_string(), self._limits.most, self._limits.least])

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Return into how many patches an image is cut; ValueError if a side would have no pixel."""
        width, height = self._limits.size(width, height)
        patches: int = self._processor.get_number_of_image_patches(height, width)
        return patches

    def __call__(self, images: list[Any], return_tensors: str) -> Any:
        """Return the patches of Pillow images, as the model's processor does."""
        return self._processor(images=list(map(self._limits.resized, images)), return_tensors=return_tensors)


class FactoryVideos(Videos):
    """Reads videos as LLaMA-Factory does: frames at even distances, an even number of them, within its limits.

    Unlike LLaMA-Factory, which takes the first ``video_maxlen`` frames of a file without a frame count in its header,
    whatever their rate, this class decodes such a file to count them. Source: ``_get_video_sample_indices`` and
    ``_regularize_videos`` of ``Qwen2VLPlugin`` in LLaMA-Factory 0.9.5.
    """

    def __init__(self, given: Any, fps: float, most_frames: int, limits: Limits) -> None:
        super().__init__(given, fps)
        self._most_frames = most_frames
        self._limits = limits

    def to_json_string(self) -> str:
        """Return all settings as text, which is part of the cache's name."""
        return json.dumps([super().to_json_string(), self._most_frames, self._limits.most, self._limits.least])

    def _taken(self, header: Header) -> Taken:
        # 2.5 seconds at 30 frames per second have 75 frames. At video_fps: 2 they give 5: 0, 18, 37, 55 and 74, and 74
        # again to make the number even, at a rate of 5 / 2.5 = 2 per second.
        count = header.frames
        if not header.taken:
            count = min(count, self._most_frames, max(1, math.floor(header.seconds * self.fps)))
        frames = np.linspace(0, header.frames - 1, count).astype(np.int32).tolist()
        times = [number / header.rate * self.fps / self.fps for number in frames]  # rounded as in LLaMA-Factory
        return Taken(frames + frames[-1:] * (count % 2), times, count / header.seconds)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        return self._limits.size(width, height)

    def _frame(self, image: Any) -> Any:
        return self._limits.resized(image)


class FactoryVisionData(ImageRows, FactoryData):
    """The datasets of a training file for a vision-language model; :class:`FactoryData` gets the other arguments."""

    def __init__(
        self, *arguments: Any, processor: Any, media_dir: str, limits: Limits, videos: FactoryVideos, **settings: Any
    ) -> None:
        self._given_processor = processor
        self._limits = limits
        self.videos = videos
        self.media_dir = media_dir
        super().__init__(*arguments, **settings)

    def _load_processor(self) -> Any:
        return FactoryImageProcessor(super()._load_processor(), self._limits)

    def _columns(self, reading: Reading) -> tuple[str | None, str | None]:
        assert isinstance(reading, FactoryReading)
        return reading.entry.columns.images, reading.entry.columns.videos
