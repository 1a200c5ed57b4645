# SPDX-License-Identifier: Apache-2.0
"""``MCoreVisionData``: conversations about images and videos, for ``MCoreVisionGPT``.

The text is read, tokenised once into a cache, and packed, like all conversations (``datamodule.py``). Before that, each
``<image>`` is replaced by the image's tokens. Their number follows from the image's size, which is in the header of its
file. Images are read and cut into patches when a batch is made, in the loader's workers. ``videos.py`` does the same
for each ``<video>``.

The cache has columns with each row's images and videos, each a path or the bytes of a file (``media.py``), and the
number of its tokens. :class:`ImageRows` adds both to any data module of conversations.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.value_checks import require_choice
from lightning_mcore.data.finetuning.chat import ChatTemplate
from lightning_mcore.data.finetuning.conversations import Format, LossOn, Message, Row
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.finetuning.media import Stored, UnusableFileError, called, loaded_image, opened_image, stored
from lightning_mcore.data.finetuning.processors import load_processor, require_processor
from lightning_mcore.data.finetuning.tokenized import Encoder, Reading, RowReader
from lightning_mcore.data.finetuning.videos import END, START, VIDEO_PAD, Videos
from lightning_mcore.data.packing.best_fit import Overlong, TokenSample
from lightning_mcore.data.packing.rows import PackedDataset, PackingMultiples, TokenizedSamples, build_row

MARKERS = {"image": "<image>", "video": "<video>"}
_IMAGE_PAD = "<|image_pad|>"
_IMAGES, _VIDEOS, _UNREADABLE = "images", "videos", "unreadable"  # columns of the cache

Files = tuple[list[Any], list[Any]]
"""The images and the videos of a row."""

Broken = Literal["error", "drop"]
"""What happens to a row with an image or a video that does not exist or cannot be read."""


@dataclass(frozen=True)
class ImageReading(Reading):
    """How rows with images and videos become tokens."""

    text: Reading = field(default_factory=Reading)  # reads and tokenises the rest of the row
    columns_seen: tuple[str | None, str | None] = ("images", "videos")  # of images and videos; None if there are none
    media_dir: str = ""
    tokens: tuple[int, int] = (-1, -1)  # ids that stand for a part of an image and of a video
    sizes: str = ""  # settings of both processors, as text for the cache's name
    broken: Broken = "error"
    # They decide how many tokens an image or a video takes. Not part of the cache's name: ``sizes`` is.
    processor: Any = field(default=None, repr=False, compare=False)
    videos: Any = field(default=None, repr=False, compare=False)

    def reader(self, columns: Iterable[str]) -> RowReader:
        """Return the reader of conversations, without their images."""
        return self.text.reader(columns)

    def encoder(self, tokenizer: Any) -> Encoder:
        """Return the encoder of conversations."""
        return self.text.encoder(tokenizer)

    def chosen(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of the rows to read out of ``rows``; None for all."""
        return self.text.chosen(rows)

    def with_partners(self, rows: Any) -> Any:
        """Return the rows with images and videos as they are stored, not decoded."""
        from datasets import Image, List, Video

        for column, kind in zip(self.columns_seen, (Image, Video), strict=True):
            found, kept = rows.features.get(column), kind(decode=False)
            for decoded, encoded in ((kind(), kept), (List(kind()), List(kept))):
                if found == decoded:
                    rows = rows.cast_column(column, encoded)
        return rows

    def features(self) -> dict[str, Any]:
        """Return the types of the columns of images and videos, and of the mark for unusable ones."""
        from datasets import List, Value

        file, count = {"path": Value("string"), "bytes": Value("binary")}, {"tokens": Value("int64")}
        numbers = {"taken": List(Value("int64")), "grid": List(Value("int64")), "seconds": Value("float64")}
        videos = List({**file, "frames": List(file), **numbers, **count})
        return {_IMAGES: List({**file, **count}), _VIDEOS: videos, _UNREADABLE: "bool"}

    def encoded(self, reader: RowReader, encoder: Encoder, row: Row, index: int, name: str) -> dict[str, Any]:
        """Return a row for the cache, whose media count in no loss; if one was cut, the row has no tokens."""
        row, given = _with_markers(row, self.columns_seen, name)
        messages = reader.messages(row, name)
        unreadable = False
        files: Files = ([], [])
        try:
            files = self._insert_tokens(messages, given, name) if messages else files
        except UnusableFileError:
            if self.broken == "error":
                raise
            unreadable, messages = True, []
        sample = encoder.encode(messages, index, name)
        # A template with ``longest`` may have cut the text: all tokens of all images and videos must still be there.
        seen = np.isin(sample.tokens, self.tokens)
        if not len(sample.tokens):
            files = ([], [])
        elif int(seen.sum()) < sum(file["tokens"] for file in itertools.chain(*files)):
            sample, seen = TokenSample(sample.tokens[:0], seen[:0], index), seen[:0]
        learnt = ~seen if sample.loss_mask is None else sample.loss_mask & ~seen
        of_text = self.columns(dataclasses.replace(sample, loss_mask=learnt))
        return {**of_text, _IMAGES: files[0], _VIDEOS: files[1], _UNREADABLE: unreadable}

    def _insert_tokens(self, messages: list[Message], given: Files, name: str) -> Files:
        """Replace the markers in messages by the tokens of images and videos; return these with their tokens."""
        texts = [message["content"] for message in messages]
        for (kind, marker), files in zip(MARKERS.items(), given, strict=True):
            count = sum(text.count(marker) for text in texts)
            if count != len(files):
                raise ValueError(
                    f"{name} has {count} {marker} in its text but {len(files)} {kind}s; use one for each {kind}"
                )
        for pad, marker in zip((_IMAGE_PAD, VIDEO_PAD), MARKERS.values(), strict=True):
            if any(pad in str(message) for message in messages):  # also in a thought or a call
                raise ValueError(f"{name} has {pad} in its text; write {marker} where it belongs")
        images = [self._with_tokens(stored(image, "an image", name), name) for image in given[0]]
        videos = [self.videos.planned(video, self.media_dir, name) for video in given[1]]
        found = images, [video for video, _ in videos]
        if self.broken == "drop":  # what cannot be decoded is found here, and not when a batch is made
            for image in images:
                loaded_image(image, self.media_dir, name)
            if videos:
                self.videos.patches(found[1], self.media_dir, name)
        of_images = iter([START + image["tokens"] * _IMAGE_PAD + END for image in images])
        # An image of 448 x 448 pixels with patches of 14 is 32 x 32 patches; merged 2 x 2, it has 256 tokens. So
        # "<image>" becomes START, 256 times <|image_pad|>, END.
        runs = {MARKERS["image"]: of_images, MARKERS["video"]: iter([text for _, text in videos])}
        for message, text in zip(messages, texts, strict=True):
            parts = re.split(f"({'|'.join(runs)})", text)
            message["content"] = "".join(next(runs[part]) if part in runs else part for part in parts)
        return found

    def _with_tokens(self, file: Stored, name: str) -> Stored:
        with opened_image(file, self.media_dir, name) as image:
            width, height = image.size
        try:
            patches: int = self.processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            what = called(file, self.media_dir)
            raise UnusableFileError(f"{what}, an image of {name}, cannot be used: {error}; remove the row") from error
        return {**file, "tokens": patches // int(self.processor.merge_size) ** 2}


def _with_markers(row: Row, columns: tuple[str | None, str | None], name: str) -> tuple[Row, Files]:
    """Return a row as text with markers, without its images and videos, and these images and videos."""
    images, videos = (_listed(row.get(column) if column is not None else None) for column in columns)
    row = {column: value for column, value in row.items() if column not in columns}
    messages = row.get("messages")
    if isinstance(messages, list) and any(_has_parts(message) for message in messages):
        for kind, files in (("images", images), ("videos", videos)):
            if files:
                raise ValueError(f"{name} has {kind} both in its messages and in a column; give them in only one place")
        row = {**row, "messages": [_joined(message, {"image": images, "video": videos}, name) for message in messages]}
    return row, (images, videos)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given] if given else []


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _joined(message: Any, files: dict[str, list[Any]], name: str) -> Any:
    """Return a message whose parts are joined; add its images and videos to the lists in ``files``."""
    if not _has_parts(message):
        return message
    text = ""
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image", "video", "text"):
            raise ValueError(
                f"{name} has {part!r:.80} in a message, which is not a text, an image or a video; fix or remove the row"
            )
        if kind != "text":
            files[kind].append(part.get(kind) or part.get("path"))
        text += MARKERS.get(kind) or part.get("text") or ""
    return {**message, "content": text}


@dataclass(frozen=True, slots=True, eq=False)
class SeeingSample(TokenSample):
    """A sample with images and videos, in order."""

    images: tuple[Stored, ...] = ()
    videos: tuple[Stored, ...] = ()


class _Samples(TokenizedSamples):
    """Samples with images and videos; one that would be cut inside one of these is left out and counted."""

    _or_overlong = " or overlong='cut'"

    def __init__(self, tokenized: Any, *arguments: Any, tokens: tuple[int, int], videos: Videos) -> None:
        from pyarrow import compute

        self._tokens = tokens
        self._seen = tokenized.select_columns([_IMAGES, _VIDEOS, _UNREADABLE])
        if compute.max(compute.list_value_length(tokenized.data.column(_VIDEOS))).as_py():
            _ = videos.processor  # loaded once, before there are workers; raises if a package is missing
        super().__init__(tokenized, *arguments)

    def _pieces(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        sample, seen = self._read(index), self._seen[index]
        if seen[_UNREADABLE]:
            self.statistics.samples += 1
            self.statistics.unreadable_image += 1
            return (np.zeros(0, np.int64),) * 3
        # ``lost``: ``encoded`` dropped the tokens of a row with a cut image.
        inputs = sample.tokens[: self._row_length] if sample.length > self._row_length else sample.tokens
        lost = not len(inputs) and (seen[_IMAGES] or seen[_VIDEOS])
        if lost or None in self._whole(inputs, seen):
            self.statistics.samples += 1
            self.statistics.through_image += 1
            return (np.zeros(0, np.int64),) * 3
        return super()._pieces(index)

    def _whole(self, tokens: NDArray[np.int64], seen: Mapping[str, Any]) -> list[int | None]:
        """Return how many images and how many videos are in tokens; None if the last one is incomplete."""
        found: list[int | None] = []
        for column, token in zip((_IMAGES, _VIDEOS), self._tokens, strict=True):
            ends = [0, *itertools.accumulate(file["tokens"] for file in seen[column])]
            count = int((tokens == token).sum())
            found.append(ends.index(count) if count in ends else None)
        return found

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> list[TokenSample]:
        """Return the samples at ``indices`` [n], with the images and videos that are left after they were cut."""
        rows = self._seen[self._source[indices].tolist()]
        found: list[TokenSample] = []
        for sample, images, videos in zip(super().take(indices), rows[_IMAGES], rows[_VIDEOS], strict=True):
            # Those whose tokens are among the inputs, which are all tokens but the last.
            counts = self._whole(sample.tokens[:-1], {_IMAGES: images, _VIDEOS: videos})
            seen = tuple(images[: counts[0]]), tuple(videos[: counts[1]])
            found.append(SeeingSample(sample.tokens, sample.loss_mask, sample.sample_id, sample.teacher_top_k, *seen))
        return found


class _Packed(PackedDataset):
    def _build(self, samples: NDArray[np.int64], length: int, multiple: int) -> dict[str, Any]:
        read = self.samples.take(samples)
        files = {name: [file for sample in read for file in getattr(sample, name)] for name in (_IMAGES, _VIDEOS)}
        return {**build_row(read, length, multiple), **files}


class _Collate:
    """Makes a batch of rows or samples and their patches; a class, so that it can be pickled for workers."""

    def __init__(
        self, base: Callable[[list[Any]], dict[str, Tensor]], processor: Any, videos: Videos, media_dir: str
    ) -> None:
        self._base = base
        self._processor = processor
        self._videos = videos
        self._media_dir = media_dir

    def __call__(self, items: list[Any]) -> dict[str, Tensor]:
        # In order of appearance, row by row, as ``multimodal.py`` expects.
        images, videos = (
            [file for item in items for file in (item[name] if isinstance(item, dict) else getattr(item, name))]
            for name in (_IMAGES, _VIDEOS)
        )
        batch = self._base(items)
        if images:
            read = [loaded_image(image, self._media_dir, "this batch") for image in images]
            made = self._processor(images=read, return_tensors="pt")
            batch |= {name: torch.as_tensor(made[name]) for name in ("pixel_values", "image_grid_thw")}
        if videos:
            batch |= self._videos.patches(videos, self._media_dir, "this batch")
        return batch


class ImageRows(MCoreFinetuningData):
    """Adds images and videos to a data module of conversations; their paths are relative to ``media_dir``."""

    media_dir: str
    broken_images: Broken = "error"
    videos: Videos
    _given_processor: Any

    @cached_property
    def image_processor(self) -> Any:
        """The image processor, loaded at the first access."""
        return self._load_processor()

    def _load_processor(self) -> Any:
        return load_processor(self._given_processor, "image")

    @property
    def image_token(self) -> int:
        """Id of the token that stands for part of an image; ValueError if the tokenizer has none."""
        return self._tokens[0]

    @cached_property
    def _tokens(self) -> tuple[int, int]:
        """Ids of the tokens that stand for part of an image and of a video."""
        vocabulary = self.tokenizer.get_vocab()
        missing = [token for token in (START, _IMAGE_PAD, VIDEO_PAD, END) if token not in vocabulary]
        if missing:
            raise ValueError(f"the tokenizer has no token {missing[0]}; give the tokenizer of a vision-language model")
        return int(vocabulary[_IMAGE_PAD]), int(vocabulary[VIDEO_PAD])

    def _columns(self, reading: Reading) -> tuple[str | None, str | None]:
        """Return the columns of the images and of the videos; None if the rows have none."""
        return _IMAGES, _VIDEOS

    def _tokenized_files(self, files: list[str], name: str, reading: Reading) -> Any:
        seeing = ImageReading(
            text=reading,
            columns_seen=self._columns(reading),
            media_dir=self.media_dir,
            tokens=self._tokens,
            sizes=json.dumps([self.image_processor.to_json_string(), self.videos.to_json_string()]),
            broken=self.broken_images,
            processor=self.image_processor,
            videos=self.videos,
        )
        return super()._tokenized_files(files, name, seeing)

    def _samples(self, tokenized: Any, indices: NDArray[np.int64], name: str) -> Any:
        arguments = tokenized, indices, self.seq_length, self.overlong, name
        return _Samples(*arguments, tokens=self._tokens, videos=self.videos)

    def _packed(self, samples: Any, multiples: PackingMultiples) -> PackedDataset:
        return _Packed(samples, self.seq_length, multiples)

    @property
    def _collate(self) -> Callable[[list[Any]], Any]:
        return self._with_patches(super()._collate)

    def padded(self, samples: list[TokenSample], multiple: int, row_length: int) -> dict[str, Tensor]:
        """Return samples as a padded batch, as :func:`collate_padded` does, with their patches."""
        return self._with_patches(partial(super().padded, multiple=multiple, row_length=row_length))(samples)

    def _with_patches(self, collate: Callable[[list[Any]], dict[str, Tensor]]) -> "_Collate":
        return _Collate(collate, self.image_processor, self.videos, self.media_dir)


@inherit_help(MCoreFinetuningData)
class MCoreVisionData(ImageRows):
    """Conversations about images and videos from jsonl or parquet files, for ``MCoreVisionGPT``.

    A row has a conversation in one of the forms of :class:`~lightning_mcore.MCoreFinetuningData`. Its text has
    ``<image>`` for each image, whose paths are in the column ``images``, and ``<video>`` for each video, which are in
    the column ``videos``: paths of files, or lists of image paths. In the form ``messages``, the content of a message
    may also be a list of ``{"type": "text", "text": ...}``, ``{"type": "image", "image": path}`` and
    ``{"type": "video", "video": path}``. Videos need ``lightning-mcore[video]``. Arguments that are not explained here
    are those of :class:`~lightning_mcore.MCoreFinetuningData`.

    Args:
        tokenizer: Folder or name of a model, or its tokenizer.
        seq_length: Places in a row, in tokens, image and video tokens included.
        image_processor: Folder or name of a model, or its image processor; None takes it from ``tokenizer``.
        video_processor: Folder or name of a model, or its video processor; None takes it from ``image_processor``,
            if this is a folder or name.
        media_dir: Folder that paths of images and videos are relative to.
        broken_images: For a row with an image or a video that does not exist or cannot be read or used: ``error``
            raises, ``drop`` leaves it out and counts it. ``error`` reads headers when rows are tokenised, and finds
            damage beyond them when a batch is made; ``drop`` decodes everything when rows are tokenised.
        video_fps: Frames sampled per second of video; a list of images is taken to have this rate.
        video_maxlen: Most frames sampled per video; None for the video processor's own limit.
        loss_on: What to learn: the turns of the ``assistant``, only the ``last_assistant`` turn, or ``all`` tokens;
            never image and video tokens.
        overlong: For a sample longer than a row: ``error`` raises; ``cut`` keeps its beginning with the images and
            videos in it, and leaves out and counts a sample that would be cut inside one of them.
        num_workers: Number of processes per rank that read images and videos and load batches ahead.

    Raises:
        ValueError: A setting is out of range, or two contradict each other.
        TypeError: A setting has the wrong type.

    Examples:
        >>> from lightning_mcore import MCoreVisionData
        >>> data = MCoreVisionData("chats.jsonl", "Qwen/Qwen2.5-VL-3B-Instruct", seq_length=4096, media_dir="images")
    """

    def __init__(
        self,
        train_files: str | list[str],
        tokenizer: Any,
        seq_length: int,
        image_processor: Any = None,
        video_processor: Any = None,
        media_dir: str = "",
        broken_images: Broken = "error",
        video_fps: float = 2.0,
        video_maxlen: int | None = None,
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
        log_sources: bool = False,
    ) -> None:
        arguments = passed_on(
            locals(), "image_processor", "video_processor", "media_dir", "broken_images", "video_fps", "video_maxlen"
        )
        if overlong == "split":
            raise ValueError("overlong='split' would separate images from their text; choose 'error' or 'cut'")
        if image_processor is None and not isinstance(tokenizer, str):
            raise ValueError("image_processor is not given; give a folder or name of a model, or an image processor")
        require_processor("image", image_processor)
        require_processor("video", video_processor)
        super().__init__(**arguments)
        self._given_processor = tokenizer if image_processor is None else image_processor
        if video_processor is None and isinstance(self._given_processor, str):
            video_processor = self._given_processor
        self.videos = Videos(video_processor, video_fps, video_maxlen)
        self.media_dir = media_dir
        require_choice("broken_images", broken_images, Broken)
        self.broken_images = broken_images
