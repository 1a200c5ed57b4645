# SPDX-License-Identifier: Apache-2.0
"""``MCoreVisionData``: conversations about images, for ``MCoreVisionGPT``.

The text is read, tokenised once into a cache, and packed, like all conversations (``datamodule.py``). Before that each
``<image>`` is replaced by the tokens of the image. Their number follows from the image's size, which is in the header
of its file. The images themselves are read and cut into patches when a batch is made, in the workers of the loader.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.data.finetuning.chat import ChatTemplate
from lightning_mcore.data.finetuning.conversations import Format, LossOn, Message, Row
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading, RowReader
from lightning_mcore.data.packing.best_fit import Overlong, TokenSample
from lightning_mcore.data.packing.rows import PackedDataset, TokenizedSamples

MARKER = "<image>"
_START, _IMAGE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_IMAGES = "images"  # column of the rows and the cache, and field of the first message


@dataclass(frozen=True)
class ImageReading(Reading):
    """How rows with images become conversations and tokens; ``Reading`` has the other fields.

    Args:
        media_dir: Folder of the images.
        image_token: Id of the token that stands for a part of an image.
        sizes: The settings of the image processor, as text for the name of the cache.
        processor: The image processor, which decides how many tokens an image takes.
    """

    media_dir: str = ""
    image_token: int = -1
    sizes: str = ""
    processor: Any = field(default=None, repr=False, compare=False)

    def reader(self, columns: Iterable[str]) -> RowReader:
        """Return the reader that turns rows with these columns into conversations."""
        columns = list(columns)
        return _Reader(super().reader(columns), self)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder that tokenises conversations."""
        return _Encoder(super().encoder(tokenizer), self.image_token)

    def columns(self, sample: Any) -> dict[str, Any]:
        """Return the cache's columns of an encoded row."""
        return {**super().columns(sample), _IMAGES: json.dumps(sample.images)}

    def features(self) -> dict[str, str]:
        """Return the types of the columns that this class adds."""
        return {_IMAGES: "string"}


@dataclass(frozen=True, slots=True, eq=False)
class SeeingSample(TokenSample):
    """A sample with images.

    Args:
        images: Paths of its images, in order.
    """

    images: tuple[str, ...] = ()


class _Reader:
    """Reads conversations, and replaces the markers of images by their tokens."""

    def __init__(self, inner: RowReader, reading: ImageReading) -> None:
        self._inner = inner
        self._reading = reading
        self.needed = inner.needed

    def messages(self, row: Row, name: str) -> list[Message]:
        """Return the conversation of a row; its first message has the paths of all images, as JSON."""
        if row.get("videos"):
            raise ValueError(f"{name} has videos, which are not read yet; leave the row out")
        row, images = _with_markers(row, name)
        messages = self._inner.messages(row, name)
        texts = [message["content"] for message in messages]
        markers = sum(text.count(MARKER) for text in texts)
        if markers != len(images):
            raise ValueError(
                f"{name} has {markers} {MARKER} in its text and {len(images)} images; give one for each image"
            )
        if any(_IMAGE in text for text in texts):
            raise ValueError(f"{name} has {_IMAGE} in its text; write {MARKER} where an image belongs")
        paths = [os.path.join(self._reading.media_dir, image) for image in images]
        tokens = (_START + self._count(path, name) * _IMAGE + _END for path in paths)
        for message, text in zip(messages, texts, strict=True):
            first, *others = text.split(MARKER)
            message["content"] = first + "".join(next(tokens) + other for other in others)
        return [{**message, _IMAGES: json.dumps(paths)} for message in messages[:1]] + messages[1:]

    def _count(self, path: str, name: str) -> int:
        """Return how many tokens an image takes."""
        with opened_image(path, name) as image:
            width, height = image.size
        processor = self._reading.processor
        try:
            patches: int = processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise ValueError(f"{path}, an image of {name}, cannot be used: {error}; leave the row out") from error
        return patches // int(processor.merge_size) ** 2


def opened_image(path: str, name: str) -> Any:
    """Open an image of a row; only its header is read.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
        ValueError: The file does not exist, or is not an image.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "images need Pillow, which is not installed; install lightning-mcore[vision]"
        ) from error
    try:
        return Image.open(path)
    except OSError as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else "is not an image that can be read"
        raise ValueError(f"{path}, an image of {name}, {what}; give its path, relative to media_dir") from error


def _with_markers(row: Row, name: str) -> tuple[Row, list[str]]:
    """Return a row whose contents are text with markers, and the paths of its images."""
    given = row.get(_IMAGES) or []
    images = [given] if isinstance(given, str) else list(given)
    messages = row.get("messages")
    if isinstance(messages, list) and any(_has_parts(message) for message in messages):
        if images:
            raise ValueError(f"{name} has images both in its messages and in a column; give them in one of the two")
        row = {**row, "messages": [_joined(message, images) for message in messages]}
    if not all(isinstance(image, str) for image in images):
        raise TypeError(f"{name} has images that are not paths; give the path of each image as text")
    return row, images


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _joined(message: Any, images: list[str]) -> Any:
    """Return a message whose parts are joined, and add its images to a list."""
    if not _has_parts(message):
        return message
    text = ""
    for part in message["content"]:
        if part.get("type") == "image":
            images.append(part.get("image") or part.get("path"))
            text += MARKER
        else:
            text += part.get("text") or ""
    return {**message, "content": text}


class _Encoder:
    """Tokenises conversations with images; the tokens of an image never count in the loss."""

    def __init__(self, inner: Encoder, image_token: int) -> None:
        self._inner = inner
        self._image_token = image_token

    def encode(self, messages: Sequence[Message], sample_id: int, name: str) -> TokenSample:
        """Return the tokens of a conversation, and the paths of its images."""
        images = json.loads(messages[0].get(_IMAGES, "[]")) if messages else []
        plain = [{key: value for key, value in message.items() if key != _IMAGES} for message in messages]
        sample = self._inner.encode(plain, sample_id, name)
        if not len(sample.tokens):
            images = []
        seen = sample.tokens == self._image_token
        learnt = ~seen if sample.loss_mask is None else sample.loss_mask & ~seen
        return SeeingSample(sample.tokens, learnt, sample.sample_id, tuple(images))


class _Samples(TokenizedSamples):
    """Samples with their images; a sample that would be cut inside an image is left out and counted."""

    def __init__(self, *arguments: Any, image_token: int) -> None:
        self._image_token = image_token
        super().__init__(*arguments)

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        [sample] = self._read([index])
        if sample.length > self._row_length:
            before, after = sample.tokens[self._row_length - 1 : self._row_length + 1]
            if before == after == self._image_token:
                self.statistics.samples += 1
                self.statistics.through_image += 1
                return (np.zeros(0, np.int64),) * 3
        return super()._pieces(index)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[TokenSample]:
        """Return the samples at ``indices``, [n], with the images that are left after they were cut."""
        found = self._tokenized[self._source[indices].tolist()][_IMAGES]
        return [
            self._with_images(sample, json.loads(str(paths)))
            for sample, paths in zip(super().take(indices), found, strict=True)
        ]

    def _with_images(self, sample: TokenSample, paths: list[str]) -> SeeingSample:
        """Return a sample with the images whose tokens are among its inputs."""
        there = sum(is_image for is_image, _ in itertools.groupby(sample.tokens[:-1] == self._image_token))
        return SeeingSample(sample.tokens, sample.loss_mask, sample.sample_id, tuple(paths[:there]))


class _Packed(PackedDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        samples = self._samples.take(self._rows[index])
        row: dict[str, Any] = super().__getitem__(index)
        return {**row, _IMAGES: [path for sample in samples for path in getattr(sample, _IMAGES)]}


class _Collate:
    """Makes a batch of rows or samples and the patches of their images; a class, so that it can be pickled."""

    def __init__(self, base: Callable[[list[Any]], dict[str, Tensor]], processor: Any) -> None:
        self._base = base
        self._processor = processor

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        paths = [path for item in items for path in (item[_IMAGES] if isinstance(item, dict) else item.images)]
        batch = self._base(items)
        if not paths:
            return batch
        made = self._processor(images=[_pixels(path) for path in paths], return_tensors="pt")
        return {**batch, **{name: torch.as_tensor(made[name]) for name in ("pixel_values", "image_grid_thw")}}


def _pixels(path: str) -> Any:
    """Return the image at a path, in RGB."""
    with opened_image(path, "this batch") as image:
        try:
            return image.convert("RGB")
        except OSError as error:  # its header could be read
            raise ValueError(f"{path} is damaged: {error}; replace it, or leave its row out") from error


class MCoreVisionData(MCoreFinetuningData):
    """Conversations about images from jsonl or parquet files, for ``MCoreVisionGPT``.

    A row has a conversation in one of the forms of :class:`~lightning_mcore.MCoreFinetuningData`, with ``<image>`` in
    the text for each image, and the paths of the images in the column ``images``. In the form ``messages``, the content
    of a message may also be a list of ``{"type": "text", "text": ...}`` and
    ``{"type": "image", "image": path}``.

    Args:
        train_files: As in :class:`~lightning_mcore.MCoreFinetuningData`, which explains the other arguments further.
        tokenizer: A folder or name of a model, or its tokenizer.
        seq_length: Tokens of a row, including those of images.
        image_processor: A folder or name of a model, or its image processor; None for that of ``tokenizer``.
        media_dir: The folder that paths of images are relative to.
        batch_size: Rows in a batch of one data-parallel rank.
        validation_files: Files to validate on.
        test_files: Files to test on.
        validation_share: Instead of ``validation_files``, the share of the training samples to validate on.
        format: The form of a row.
        prompt_column: Column of the prompt, for ``prompt_response``.
        response_column: Column of the response, for ``prompt_response``.
        loss_on: Which tokens count in the loss; those of images never do.
        template: How turns are written; None for the tokenizer's own template.
        packing: Put several samples into a row.
        overlong: For a sample longer than a row: ``error`` refuses it; ``cut`` keeps its beginning and the images in
            it, and leaves out and counts a sample that would be cut inside an image.
        shuffle: Draw a new order of the rows in each epoch.
        seed: Seed of the order and of ``validation_share``.
        num_workers: Number of processes of each rank that read images and load batches in advance.
        num_proc: Number of processes that tokenise in ``prepare_data``.
        cache_dir: Folder for the cache of tokens.
        eval_batch_size: Rows of one data-parallel rank in a batch of validation and testing.
        pad_to_seq_length: Without packing, pad every row to ``seq_length``.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.
    """

    def __init__(
        self,
        train_files: str | list[str],
        tokenizer: Any,
        seq_length: int,
        image_processor: Any = None,
        media_dir: str = "",
        batch_size: int = 1,
        validation_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        validation_share: float = 0.0,
        format: Format = "auto",
        prompt_column: str = "prompt",
        response_column: str = "response",
        loss_on: LossOn = "assistant",
        template: str | ChatTemplate | None = None,
        packing: bool = True,
        overlong: Overlong = "error",
        shuffle: bool = True,
        seed: int = 1234,
        num_workers: int = 0,
        num_proc: int = 1,
        cache_dir: str | None = None,
        eval_batch_size: int | None = None,
        pad_to_seq_length: bool = False,
    ) -> None:
        if overlong == "split":
            raise ValueError("overlong='split' would separate images from their text; choose 'error' or 'cut'")
        if image_processor is None and not isinstance(tokenizer, str):
            raise ValueError("image_processor is not given; give a folder or name of a model, or an image processor")
        super().__init__(
            train_files=train_files,
            tokenizer=tokenizer,
            seq_length=seq_length,
            batch_size=batch_size,
            validation_files=validation_files,
            test_files=test_files,
            validation_share=validation_share,
            format=format,
            prompt_column=prompt_column,
            response_column=response_column,
            loss_on=loss_on,
            template=template,
            packing=packing,
            overlong=overlong,
            shuffle=shuffle,
            seed=seed,
            num_workers=num_workers,
            num_proc=num_proc,
            cache_dir=cache_dir,
            eval_batch_size=eval_batch_size,
            pad_to_seq_length=pad_to_seq_length,
        )
        self._given_processor = tokenizer if image_processor is None else image_processor
        self.media_dir = media_dir

    @cached_property
    def image_processor(self) -> Any:
        """The image processor; loaded when it is first read."""
        if not isinstance(self._given_processor, str):
            return self._given_processor
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._given_processor)  # type: ignore[no-untyped-call]

    @cached_property
    def image_token(self) -> int:
        """Id of the token that stands for a part of an image.

        Raises:
            ValueError: The tokenizer has no such token.
        """
        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in (_START, _IMAGE, _END) if token not in vocabulary]
        if missing:
            raise ValueError(f"the tokenizer has no token {missing[0]}; give the tokenizer of a vision-language model")
        return int(vocabulary[_IMAGE])

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        known = {each.name: getattr(reading, each.name) for each in dataclasses.fields(reading)}
        seeing = ImageReading(
            **known,
            media_dir=self.media_dir,
            image_token=self.image_token,
            sizes=self.image_processor.to_json_string(),
            processor=self.image_processor,
        )
        return super()._tokenized_files(files, name, seeing)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> Any:
        arguments = tokenized, indices, self.seq_length, self.overlong, name
        return _Samples(*arguments, image_token=self.image_token)

    def _packed(self, samples: Any, multiple: int) -> PackedDataset:
        return _Packed(samples, self.seq_length, multiple)

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        return _Collate(super()._collate, self.image_processor)
