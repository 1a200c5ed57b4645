# SPDX-License-Identifier: Apache-2.0
"""``MCoreVisionData``: conversations about images, for ``MCoreVisionGPT``.

The text is read, tokenised once into a cache, and packed, like all conversations (``datamodule.py``). Before that each
``<image>`` is replaced by the tokens of the image. Their number follows from the image's size, which is in the header
of its file. The images themselves are read and cut into patches when a batch is made, in the workers of the loader.

The cache has a column with the images of each row, each a path or the bytes of a file. :class:`ImageRows` adds images
to any data module of conversations.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.data.finetuning.chat import ChatTemplate
from lightning_mcore.data.finetuning.conversations import Format, LossOn, Message, Row
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading, RowReader
from lightning_mcore.data.packing.best_fit import Overlong, TokenSample
from lightning_mcore.data.packing.rows import PackedDataset, TokenizedSamples

MARKER = "<image>"
_VIDEO = "<video>"
_START, _IMAGE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_IMAGES, _UNREADABLE = "images", "unreadable"  # columns of the cache

Broken = Literal["error", "drop"]
"""What happens to a row with an image that is not there or cannot be read."""

Stored = dict[str, Any]
"""An image: its ``path`` within ``media_dir``, or the ``bytes`` of its file; the other is None."""


@dataclass(frozen=True)
class ImageReading(Reading):
    """How rows with images become tokens.

    Args:
        text: How the rest of the row is read and tokenised.
        column: The column of the images; None if the rows have none.
        media_dir: Folder of the images.
        image_token: Id of the token that stands for a part of an image.
        sizes: The settings of the image processor, as text for the name of the cache.
        broken: What happens to a row with an image that is not there or cannot be read: ``error`` or ``drop``.
        processor: The image processor, which decides how many tokens an image takes.
    """

    text: Reading = field(default_factory=Reading)
    column: str | None = "images"
    media_dir: str = ""
    image_token: int = -1
    sizes: str = ""
    broken: Broken = "error"
    processor: Any = field(default=None, repr=False, compare=False)

    def reader(self, columns: Iterable[str]) -> RowReader:
        """Return the reader of conversations, without their images."""
        return self.text.reader(columns)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder of conversations."""
        return self.text.encoder(tokenizer)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of the rows to read out of ``rows``; None for all of them."""
        return self.text.chosen(rows)

    def with_partners(self, rows: Any) -> Any:
        """Return the rows with images as they are stored, not decoded."""
        from datasets import Image, List

        found, stored = rows.features.get(self.column), Image(decode=False)
        for decoded, kept in ((Image(), stored), (List(Image()), List(stored))):
            if found == decoded:
                return rows.cast_column(self.column, kept)
        return rows

    def features(self) -> dict[str, Any]:
        """Return the types of the columns of images, and of rows with one that cannot be read."""
        from datasets import List, Value

        return {_IMAGES: List({"path": Value("string"), "bytes": Value("binary")}), _UNREADABLE: "bool"}

    def encoded(self, reader: RowReader, encoder: Encoder, row: Row, index: int, name: str) -> dict[str, Any]:
        """Return the cache's columns of a row; tokens of images never count in the loss.

        A row whose images were cut, wholly or in part, has its images but no tokens.
        """
        row, images = _with_markers(row, self.column, name)
        messages = reader.messages(row, name)
        unreadable = False
        try:
            count = self._insert_tokens(messages, images, name) if messages else 0
        except _BrokenImageError:
            if self.broken == "error":
                raise
            count, unreadable, messages, images = 0, True, [], []
        sample = encoder.encode(messages, index, name)
        seen = sample.tokens == self.image_token
        if not len(sample.tokens):
            images = []
        elif int(seen.sum()) < count:
            sample, seen = TokenSample(sample.tokens[:0], seen[:0], index), seen[:0]
        learnt = ~seen if sample.loss_mask is None else sample.loss_mask & ~seen
        of_text = self.columns(dataclasses.replace(sample, loss_mask=learnt))
        return {**of_text, _IMAGES: images, _UNREADABLE: unreadable}

    def _insert_tokens(self, messages: list[Message], images: list[Stored], name: str) -> int:
        """Replace the markers in messages by the tokens of images, and return how many these are."""
        texts = [message["content"] for message in messages]
        markers = sum(text.count(MARKER) for text in texts)
        if markers != len(images):
            raise ValueError(
                f"{name} has {markers} {MARKER} in its text and {len(images)} images; give one for each image"
            )
        if any(_VIDEO in text for text in texts):
            raise ValueError(f"{name} has {_VIDEO} in its text, and videos are not supported; leave the row out")
        if any(_IMAGE in text for text in texts):
            raise ValueError(f"{name} has {_IMAGE} in its text; write {MARKER} where an image belongs")
        counts = [self._count(image, name) for image in images]
        tokens = (_START + count * _IMAGE + _END for count in counts)
        for message, text in zip(messages, texts, strict=True):
            first, *others = text.split(MARKER)
            message["content"] = first + "".join(next(tokens) + other for other in others)
        return sum(counts)

    def _count(self, stored: Stored, name: str) -> int:
        """Return how many tokens an image takes."""
        with opened_image(stored, self.media_dir, name) as image:
            width, height = image.size
        try:
            patches: int = self.processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            what = _called(stored, self.media_dir)
            raise _BrokenImageError(
                f"{what}, an image of {name}, cannot be used: {error}; leave the row out"
            ) from error
        return patches // int(self.processor.merge_size) ** 2


class _BrokenImageError(ValueError):
    """An image is not there, or cannot be read or used."""


def opened_image(stored: Stored, media_dir: str, name: str) -> Any:
    """Open an image of a row; only its header is read.

    Args:
        stored: Its path or its bytes.
        media_dir: The folder that the path is relative to.
        name: What to call the row in an error.

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
        if stored["bytes"] is not None:
            return Image.open(BytesIO(stored["bytes"]))
        return Image.open(os.path.join(media_dir, stored["path"]))
    except (OSError, Image.DecompressionBombError) as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else "is not an image that can be read"
        raise _BrokenImageError(
            f"{_called(stored, media_dir)}, an image of {name}, {what}; give its path, relative to media_dir"
        ) from error


def _called(stored: Stored, media_dir: str) -> str:
    """Return a name for an image in errors."""
    return os.path.join(media_dir, stored["path"]) if stored["path"] else f"one of {len(stored['bytes'])} bytes"


def _with_markers(row: Row, column: str | None, name: str) -> tuple[Row, list[Stored]]:
    """Return a row whose contents are text with markers, and its images."""
    if row.get("videos"):
        raise ValueError(f"{name} has videos, which are not supported; give images of their frames, or leave it out")
    given = (row.get(column) if column is not None else None) or []
    images = list(given) if isinstance(given, list | tuple) else [given]
    messages = row.get("messages")
    if isinstance(messages, list) and any(_has_parts(message) for message in messages):
        if images:
            raise ValueError(f"{name} has images both in its messages and in a column; give them in one of the two")
        row = {**row, "messages": [_joined(message, images, name) for message in messages]}
    return row, [_stored(image, name) for image in images]


def _stored(image: Any, name: str) -> Stored:
    """Return an image as its path or the bytes of its file."""
    if isinstance(image, str) and image:
        return {"path": image, "bytes": None}
    if isinstance(image, bytes):
        return {"path": None, "bytes": image}
    if isinstance(image, Mapping):
        path, content = image.get("path"), image.get("bytes")
        if (isinstance(content, bytes) and content) or (content is None and isinstance(path, str) and path):
            return {"path": path, "bytes": content}
    raise TypeError(f"{name} has an image of type {type(image).__name__}; give its path, or the bytes of its file")


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _joined(message: Any, images: list[Any], name: str) -> Any:
    """Return a message whose parts are joined, and add its images to a list."""
    if not _has_parts(message):
        return message
    text = ""
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image", "text"):
            raise ValueError(
                f"{name} has {part!r:.80} in a message, which is neither a text nor an image; leave the row out"
            )
        if kind == "image":
            images.append(part.get("image") or part.get("path"))
        text += MARKER if kind == "image" else part.get("text") or ""
    return {**message, "content": text}


@dataclass(frozen=True, slots=True, eq=False)
class SeeingSample(TokenSample):
    """A sample with images.

    Args:
        images: Its images, in order.
    """

    images: tuple[Stored, ...] = ()


class _Samples(TokenizedSamples):
    """Samples with their images; a sample that would be cut inside an image is left out and counted."""

    _or_overlong = " or overlong='cut'"

    def __init__(self, tokenized: Any, *arguments: Any, image_token: int) -> None:
        self._image_token = image_token
        self._images = tokenized.select_columns([_IMAGES, _UNREADABLE])
        super().__init__(tokenized, *arguments)

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        [sample] = self._read([index])
        if self._images[index][_UNREADABLE]:
            self.statistics.samples += 1
            self.statistics.unreadable_image += 1
            return (np.zeros(0, np.int64),) * 3
        if self._is_cut_inside(sample) or (not len(sample.tokens) and self._images[index][_IMAGES]):
            self.statistics.samples += 1
            self.statistics.through_image += 1
            return (np.zeros(0, np.int64),) * 3
        return super()._pieces(index)

    def _is_cut_inside(self, sample: TokenSample) -> bool:
        """Return whether a row would end inside an image of a sample."""
        end = self._row_length
        return sample.length > end and bool((sample.tokens[end - 1 : end + 1] == self._image_token).all())

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[TokenSample]:
        """Return the samples at ``indices``, [n], with the images that are left after they were cut."""
        found = self._images[self._source[indices].tolist()][_IMAGES]
        return [self._with_images(*both) for both in zip(super().take(indices), found, strict=True)]

    def _with_images(self, sample: TokenSample, images: list[Stored]) -> SeeingSample:
        """Return a sample with the images whose tokens are among its inputs."""
        there = sum(is_image for is_image, _ in itertools.groupby(sample.tokens[:-1] == self._image_token))
        return SeeingSample(sample.tokens, sample.loss_mask, sample.sample_id, tuple(images[:there]))


class _Packed(PackedDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        samples = self._samples.take(self._rows[index])
        row: dict[str, Any] = super().__getitem__(index)
        return {**row, _IMAGES: [image for sample in samples for image in getattr(sample, _IMAGES)]}


class _Collate:
    """Makes a batch of rows or samples and the patches of their images; a class, so that it can be pickled."""

    def __init__(self, base: Callable[[list[Any]], dict[str, Tensor]], processor: Any, media_dir: str) -> None:
        self._base = base
        self._processor = processor
        self._media_dir = media_dir

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        images = [image for item in items for image in (item[_IMAGES] if isinstance(item, dict) else item.images)]
        batch = self._base(items)
        if not images:
            return batch
        made = self._processor(images=[self._read(image) for image in images], return_tensors="pt")
        return {**batch, **{name: torch.as_tensor(made[name]) for name in ("pixel_values", "image_grid_thw")}}

    def _read(self, stored: Stored) -> Any:
        with opened_image(stored, self._media_dir, "this batch") as image:
            try:
                image.load()
            except (OSError, SyntaxError, ValueError) as error:  # its header could be read
                what = _called(stored, self._media_dir)
                raise ValueError(f"{what} is damaged: {error}; replace it, or leave its row out") from error
            return image


class ImageRows(MCoreFinetuningData):
    """Adds images to a data module of conversations.

    Attributes:
        media_dir: The folder that paths of images are relative to.
        broken_images: What happens to a row with an image that is not there or cannot be read.
    """

    media_dir: str
    broken_images: Broken = "error"
    _given_processor: Any  # or the folder or name of a model

    @cached_property
    def image_processor(self) -> Any:
        """The image processor; loaded when it is first read."""
        return self._load_processor()

    def _load_processor(self) -> Any:
        processor = self._given_processor
        if isinstance(processor, str):
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(processor)  # type: ignore[no-untyped-call]
        least, most = (processor.size[name] for name in ("shortest_edge", "longest_edge"))
        if not 0 < least <= most:
            raise ValueError(
                f"the image processor has {least} pixels as the least and {most} as the most of an image; give a least"
                " number that is not above the most"
            )
        return processor

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

    def _column(self, reading: Reading) -> str | None:
        """Return the column of the images; None if the rows have none."""
        return "images"

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        seeing = ImageReading(
            text=reading,
            column=self._column(reading),
            media_dir=self.media_dir,
            image_token=self.image_token,
            sizes=self.image_processor.to_json_string(),
            broken=self.broken_images,
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
        return _Collate(super()._collate, self.image_processor, self.media_dir)


class MCoreVisionData(ImageRows):
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
        broken_images: For a row with an image that is not there, cannot be opened or cannot be used: ``error`` refuses
            it; ``drop`` leaves it out and counts it. Damage behind an image's header is found when a batch is made, and
            always an error.
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
        broken_images: Broken = "error",
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
        require_choice("broken_images", broken_images, Broken)
        self.broken_images = broken_images
