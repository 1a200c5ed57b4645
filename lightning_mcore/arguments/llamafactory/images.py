# SPDX-License-Identifier: Apache-2.0
"""The images of a LLaMA-Factory file: its limits of pixels before the model's image processor, and its data module."""

import json
import math
from collections.abc import Iterator
from typing import Any

from lightning_mcore.arguments.llamafactory.data import FactoryData, FactoryReading
from lightning_mcore.data.finetuning.images import ImageRows
from lightning_mcore.data.finetuning.tokenized import Reading

_LEAST_SIDE = 28  # in pixels
_LARGEST_RATIO, _NEW_RATIO = 200, 180  # of the sides


class FactoryImageProcessor:
    """A model's image processor behind the limits of a LLaMA-Factory file.

    An image is resized up to four times: to the largest number of pixels, to the smallest, to sides that are long
    enough, and to a ratio of sides that a processor accepts.

    Source: ``_preprocess_image`` of ``Qwen2VLPlugin`` in LLaMA-Factory 0.9.5 (src/llamafactory/data/mm_plugin.py) has
    the same order.

    Args:
        processor: The image processor of the model.
        most: A larger image is shrunk to this many pixels.
        least: A smaller image is enlarged to this many pixels.
    """

    def __init__(self, processor: Any, most: int, least: int) -> None:
        self._processor = processor
        self._most = most
        self._least = least
        self.merge_size = processor.merge_size

    def to_json_string(self) -> str:
        """Return all settings as text."""
        return json.dumps([self._processor.to_json_string(), self._most, self._least])

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Return into how many patches an image is cut.

        Args:
            height: In pixels.
            width: In pixels.

        Raises:
            ValueError: A side would have no pixel.
        """
        size = [(width, height), *self._within_limits(width, height)][-1]
        width, height = [size, *_with_legal_sides(*size)][-1]
        patches: int = self._processor.get_number_of_image_patches(height, width)
        return patches

    def __call__(self, images: list[Any], return_tensors: str) -> Any:
        """Return the patches of images, as the processor of the model does.

        Args:
            images: Pillow images.
            return_tensors: Kind of tensors, such as ``"pt"``.
        """
        return self._processor(images=[self._resized(image) for image in images], return_tensors=return_tensors)

    def _resized(self, image: Any) -> Any:
        for size in self._within_limits(*image.size):
            image = image.resize(size)
        image = image.convert("RGB")
        for size in _with_legal_sides(*image.size):
            image = image.resize(size)
        return image

    def _within_limits(self, width: int, height: int) -> Iterator[tuple[int, int]]:
        """Yield the sizes that an image gets one after the other, to have an allowed number of pixels."""
        for limit, is_outside in ((self._most, int.__gt__), (self._least, int.__lt__)):
            if is_outside(width * height, limit):
                factor = math.sqrt(limit / (width * height))
                width, height = int(width * factor), int(height * factor)
                if not width or not height:
                    raise ValueError("within image_max_pixels, its shorter side would have no pixel")
                yield width, height


def _with_legal_sides(width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes that an image gets one after the other, to have sides that a processor accepts."""
    if min(width, height) < _LEAST_SIDE:
        width, height = max(width, _LEAST_SIDE), max(height, _LEAST_SIDE)
        yield width, height
    if width / height > _LARGEST_RATIO:
        width = height * _NEW_RATIO
        yield width, height
    if height / width > _LARGEST_RATIO:
        height = width * _NEW_RATIO
        yield width, height


class FactoryVisionData(ImageRows, FactoryData):
    """The datasets of a training file for a model of images.

    Args:
        arguments: Those of :class:`FactoryData`.
        image_processor: The image processor, or the folder or name of the model.
        media_dir: The folder of the images.
        limits: ``image_max_pixels`` and ``image_min_pixels``.
        settings: More arguments of :class:`FactoryData`.
    """

    def __init__(
        self, *arguments: Any, image_processor: Any, media_dir: str, limits: tuple[int, int], **settings: Any
    ) -> None:
        self._given_processor = image_processor
        self._limits = limits
        self.media_dir = media_dir
        super().__init__(*arguments, **settings)

    def _load_processor(self) -> Any:
        return FactoryImageProcessor(super()._load_processor(), *self._limits)

    def _column(self, reading: Reading) -> str | None:
        assert isinstance(reading, FactoryReading)
        return reading.entry.columns.images
