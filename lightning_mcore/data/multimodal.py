# SPDX-License-Identifier: Apache-2.0
"""Compute token positions, and which tower output goes where, from tokens and the sizes of images and videos.

A batch with images or videos contains, besides tokens, what a transformers processor returns: ``pixel_values``
[patches, values of a patch] and ``image_grid_thw`` [images, 3], and for videos ``pixel_values_videos`` and
``video_grid_thw``, each in order of appearance, row by row. :func:`with_vision` turns it into what a model takes, on
the host and before the batch is split for context parallelism:

* ``rope_positions`` [b, s, 3] int64: time, height and width of each token, from transformers' ``get_rope_index``;
* ``vision_rows`` [b, s] int64: the row of the tower's output that replaces the token's embedding; -1 for text;
* ``patches`` [n, values of a patch] and ``vision_grids`` [images and videos, 3] int64: images, then videos.
"""

import importlib
import itertools
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_mcore.config.vision import IMAGE, VIDEO, Vision
from lightning_mcore.layers.inputs import is_packed, tokens_of

INPUTS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
"""Entries of a batch that a processor returns for images and videos."""
_NAMES = {IMAGE: "image", VIDEO: "video"}


def with_vision(batch: dict[str, Tensor], vision: Vision) -> dict[str, Tensor]:
    """Return a batch with ``rope_positions`` and ``vision_rows``; if it has them already, return it unchanged.

    ``batch`` is dense or packed and may contain the processor's entries. Raises TypeError if one of these is not a
    tensor, and ValueError if the image or video tokens do not match the images or videos.
    """
    if "rope_positions" in batch:
        return batch
    tokens = tokens_of(batch)
    _check_types(batch)
    kinds = IMAGE * (tokens == vision.image_token_id).long() + VIDEO * (tokens == vision.video_token_id).long()
    images, videos = batch.get("image_grid_thw"), batch.get("video_grid_thw")
    samples = list(_samples(batch))
    _check_runs(vision, [kinds[row, start:end].tolist() for row, start, end in samples], images, videos)
    found = {name: value for name, value in batch.items() if name not in INPUTS}
    found["rope_positions"] = _positions(vision, kinds, samples, images, videos, batch.get("second_per_grid_ts"))
    found["vision_rows"] = _rows(kinds)
    seen = {
        name: grids for name, grids in (("pixel_values", images), ("pixel_values_videos", videos)) if grids is not None
    }
    if seen:
        _check_patches(vision, batch, seen)
        found["vision_grids"] = torch.cat(list(seen.values()))
        found["patches"] = torch.cat([batch[name] for name in seen])
    return found


def _samples(batch: dict[str, Tensor]) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of each sequence; positions start again in each."""
    rows, length = batch["tokens"].shape
    for row in range(rows):
        ends = batch["cu_seqlens_padded"][row].tolist() if is_packed(batch) else [0, length]
        yield from ((row, start, end) for start, end in itertools.pairwise(ends) if end > start)


def _check_types(batch: dict[str, Any]) -> None:
    """Raise an error unless patches are a tensor, and grids an integer tensor of shape [images or videos, 3]."""
    for name in INPUTS[:4]:
        value = batch.get(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"a batch has {name} of type {type(value).__name__}; call this model's processor with"
                " return_tensors='pt', and pass its output unchanged"
            )
        if name.endswith("_grid_thw") and (value.shape[1:] != (3,) or value.is_floating_point()):
            raise ValueError(
                f"a batch has {name} of dtype {value.dtype} and shape {list(value.shape)}, and it must be integers of"
                " shape [n, 3]; pass the output of this model's processor unchanged, with no further dimension"
            )


def _check_runs(vision: Vision, samples: list[list[int]], images: Tensor | None, videos: Tensor | None) -> None:
    """Raise ValueError unless each run of image or video tokens has the length that its image or video needs."""
    # Two images side by side are told apart by the marks around each, which are text.
    runs = [(kind, len(list(run))) for sample in samples for kind, run in itertools.groupby(sample)]
    for kind, grids in ((IMAGE, images), (VIDEO, videos)):
        sizes = [] if grids is None else grids.tolist()
        if kind == VIDEO and vision.family.interleaved:  # each frame is a run of its own, after its time as text
            sizes = [[1, *size] for frames, *size in sizes for _ in range(frames)]
        wanted = [vision.tokens_of(size) for size in sizes]
        found = [length for each, length in runs if each == kind]
        if found != wanted:
            name = _NAMES[kind]
            raise ValueError(
                f"a batch has {len(found)} runs of {name} tokens, {found} long, but its {name}s need {len(wanted)},"
                f" {wanted} long; give each {name} its tokens, and do not cut a sequence inside one"
            )


def _check_patches(vision: Vision, batch: dict[str, Tensor], seen: dict[str, Tensor]) -> None:
    """Raise ValueError unless ``pixel_values`` has the number and size of patches that its grids imply."""
    sizes = [int(vision.config[name]) for name in ("in_channels", "temporal_patch_size", "patch_size", "patch_size")]
    for name, grids in seen.items():
        wanted = [int(grids.prod(1).sum()), prod(sizes)]
        found = list(batch[name].shape) if name in batch else None
        if found != wanted:
            raise ValueError(
                f"a batch has {name} of shape {found}, but its grids need {wanted}; pass the output of this model's"
                " processor unchanged"
            )


def _positions(
    vision: Vision,
    kinds: Tensor,
    samples: list[tuple[int, int, int]],
    images: Tensor | None,
    videos: Tensor | None,
    seconds: Tensor | None,
) -> Tensor:
    """Return the positions of all tokens, [b, s, 3] int64; each sequence counts from 0."""
    # get_rope_index takes one sequence per row, so packed sequences become padded rows. ``kinds`` serves as its
    # token types, and also as its tokens, whose values it ignores.
    parts = [kinds[row, start:end] for row, start, end in samples]
    padded = pad_sequence(parts, batch_first=True)
    is_there = pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    model: Any = getattr(importlib.import_module(vision.family.package), vision.family.model)
    bare = model.__new__(model)  # without weights: get_rope_index reads only the config
    bare.__dict__["config"] = SimpleNamespace(vision_config=SimpleNamespace(**vision.config))
    more = {} if seconds is None else {"second_per_grid_ts": seconds}
    found, _ = bare.get_rope_index(padded, padded, images, videos, attention_mask=is_there, **more)
    positions = kinds.new_zeros(*kinds.shape, 3)
    for index, (row, start, end) in enumerate(samples):
        # ``found`` is [3, samples, longest].
        positions[row, start:end] = found[:, index, : end - start].t()
    return positions


def _rows(kinds: Tensor) -> Tensor:
    """Return the row of the tower's output for each token, [b, s] int64, images before videos; -1 for text."""
    # Kinds [[0, 1, 1, 0, 2], [1, 0, 2, 2, 0]] (1 image, 2 video) have rows [[-1, 0, 1, -1, 3], [2, -1, 4, 5, -1]].
    rows, first = torch.full_like(kinds, -1), 0
    for kind in (IMAGE, VIDEO):
        places = kinds == kind
        count = int(places.sum())
        rows[places] = torch.arange(first, first + count)
        first += count
    return rows
