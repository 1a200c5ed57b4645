# SPDX-License-Identifier: Apache-2.0
"""One split of a blend of indexed datasets, as Megatron's ``GPTDataset`` and ``BlendedDataset``.

Megatron cuts documents into samples and shuffles them once, into index files that all ranks map. Its
``BlendedMegatronDatasetBuilder`` puts barriers between rank 0, which writes those files, and the other ranks: if rank 0
fails, they wait until the process group times out. The dataset classes need no barriers. So in :func:`build` rank 0
builds, every rank learns whether that worked (``parallel/consensus.py``), and then all read. Megatron's
builder makes the same samples; a test compares both.

Megatron reads index files with ``numpy.load(allow_pickle=True)``, which runs whatever code the file contains. The two
subclasses here write the same files and read them without pickle. What is read of a .bin file that has checksums is
compared with them, block by block. ``datamodule.py`` is the only user.
"""

import copy
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import megatron.core
import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_mcore.config.value_checks import plain_values
from lightning_mcore.data.checked_files import CheckedBlocks, cached_folder, is_cached
from lightning_mcore.data.pretraining.index import Index, checksums_path, read_index
from lightning_mcore.parallel.consensus import run_on_all_ranks, run_on_rank0

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Blend:
    """Which datasets to read, and how much of each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None  # positive, per dataset; None reads each dataset once


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Return the fractions of all documents where each split begins and ends; None for an empty split.

    ``"969,30,1"`` becomes (0, 0.969), (0.969, 0.999), (0.999, 1). Raises ValueError unless ``split`` has one to three
    numbers.
    """
    parts = split.split(",")
    if len(parts) > len(SPLITS) or not all(re.fullmatch(r"\s*\d+(\.\d*)?\s*", part) for part in parts):
        raise ValueError(
            f"split={split!r} is not a list of shares for training, validation and test; give up to three numbers such"
            " as '969,30,1'"
        )
    shares = [float(part) for part in parts] + [0.0] * (len(SPLITS) - len(parts))
    if sum(shares) == 0:
        raise ValueError(f"split={split!r} has no positive share; give at least one")
    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(
        [share / sum(shares) for share in shares]
    )
    return matrix


def parse_paths(name: str, paths: object) -> Blend:
    """Return the blend that the argument ``name`` gives: a prefix, a list of them, or a dict with weights."""
    paths = [paths] if isinstance(paths, str) else plain_values(paths)
    if isinstance(paths, dict):
        bad = [key for key, weight in paths.items() if not _is_weight(weight)]
        if bad:
            raise ValueError(
                f"{name} gives {bad[0]} the weight {paths[bad[0]]!r}; give a positive number, or remove the dataset"
            )
        prefixes, weights = tuple(map(str, paths)), tuple(float(weight) for weight in paths.values())
    elif isinstance(paths, Sequence) and all(isinstance(path, str) for path in paths):
        prefixes, weights = tuple(paths), None
    else:
        raise TypeError(
            f"{name}={paths!r} is of type {type(paths).__name__}; give a prefix, a list of prefixes, or a dict of"
            " prefixes and weights"
        )
    if not prefixes:
        raise ValueError(f"{name} is empty; name the prefix of a dataset")
    if len(set(prefixes)) < len(prefixes):
        raise ValueError(f"{name} names a dataset twice; name it once, and give it a larger weight")
    return Blend(prefixes, weights)


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf


_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_SHARED_DISK_SECONDS = 30.0  # how long a network disk may take to show what another machine wrote

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class SplitRequest:
    """Everything that decides the samples of a split and their order; its digest names the cache folder."""

    blend: Blend
    split: int  # 0 training, 1 validation, 2 test
    share: tuple[float, float]  # where the split begins and ends in each dataset, as fractions of all documents
    samples: int | None  # number to draw; None takes each document once
    seq_length: int
    seed: int
    reset_position_ids: bool
    eod_mask_loss: bool
    eod: int | None


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The first samples of a split, in the form that MCoreModule takes. ``folder`` has its index files.

    A copy in another process, such as a DataLoader worker, opens the files again. If ``sources`` has a number for each
    dataset, a row also has the one of its dataset, ``source_ids`` [] int64.
    """

    def __init__(self, request: SplitRequest, folder: str, sources: Sequence[int] = ()) -> None:
        self._request = request
        self.sources = sources
        self._folder = folder
        self.dataset = _dataset(request, folder)
        self.samples = len(self.dataset) if request.samples is None else request.samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``tokens``, ``labels``, ``position_ids`` [s] int64 and ``loss_mask`` [s] fp32.

        Raises ValueError if the tokens have changed since they were written.
        """
        row = self.dataset[index]
        found = {key: row[key] for key in _KEYS}
        if self.sources:
            # Megatron's blend says which dataset a row is of; a single dataset has no blend
            found["source_ids"] = torch.tensor(self.sources[row.get("dataset_id", 0)])
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the request instead of the arrays in mapped files, which would be copied."""
        return type(self), (self._request, self._folder, self.sources)


def available(index: Index, share: tuple[float, float], seq_length: int) -> int:
    """Return the number of samples that the documents of a split contain, drawing each once."""
    # Source: ``_build_megatron_dataset_splits`` and ``_build_document_sample_shuffle_indices`` in
    # megatron.core.datasets (0.16.1). Samples share one token, hence the "- 1". For 1,000 documents of 100 tokens,
    # seq_length=2048 and "969,30,1", training has 96,900 tokens, 47 samples; validation 1 sample; test none.
    first, last = (round(part * float(len(index.lengths))) for part in share)
    return max(0, (index.tokens(first, last) - 1) // seq_length)


def require_samples(index: Index, request: SplitRequest) -> int:
    """Return :func:`available` samples; raise ValueError if there are none, over which Megatron would loop forever."""
    samples = available(index, request.share, request.seq_length)
    if samples == 0:
        first, last = (round(part * float(len(index.lengths))) for part in request.share)
        raise ValueError(
            f"the {SPLITS[request.split]} split of {index.prefix} has {index.tokens(first, last)} tokens in"
            f" {last - first} of its {index.documents} documents, but a sample of seq_length={request.seq_length} needs"
            f" {request.seq_length + 1}; give it more documents, a larger share in split, or a smaller seq_length"
        )
    return samples


def require_helpers() -> None:
    """Raise ModuleNotFoundError if megatron-core lacks its compiled part for this Python."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise ModuleNotFoundError(
            "megatron.core.datasets.helpers_cpp, the compiled part of megatron-core's datasets, is missing for this"
            " Python; install the wheel of megatron-core for it, or compile helpers.cpp in the same folder",
            name="megatron.core.datasets.helpers_cpp",
        )


def build(request: SplitRequest, cache_dir: str) -> Rows:
    """Return the samples of a split, in the order in which all ranks together read them; collective if connected.

    ``cache_dir`` holds Megatron's index files and must be visible to every machine.
    """
    folder = run_on_rank0(lambda: _prepare(request, os.path.abspath(cache_dir)))
    return run_on_all_ranks(lambda: _load(request, folder))


def _prepare(request: SplitRequest, cache_dir: str) -> str:
    """Write the index files on rank 0, unless they exist, and return their folder."""
    require_helpers()
    for prefix in request.blend.prefixes:
        require_samples(read_index(prefix), request)
    folder = os.path.join(cache_dir, _digest(request))

    def make(partial: str) -> None:
        clock = time.monotonic()
        count, seconds = len(_dataset(request, partial)), time.monotonic() - clock
        _log.info("built the index of %d samples for %s in %.1f s", count, SPLITS[request.split], seconds)

    cached_folder(folder, make, "the index files of the dataset")
    return folder


def _load(request: SplitRequest, folder: str) -> Rows:
    """Open the samples on this rank; wait for a network disk to show the folder."""
    deadline = time.monotonic() + _SHARED_DISK_SECONDS
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{folder}, which rank 0 wrote, does not exist on another machine; set cache_dir to a folder that all"
                " machines share"
            )
        time.sleep(0.2)
    rows = Rows(request, folder)
    held = len(rows.dataset)
    if request.samples is not None and held < request.samples:
        raise ValueError(
            f"the {SPLITS[request.split]} split has {held} rows of seq_length={request.seq_length}, fewer than the"
            f" {request.samples} requested; give the datasets weights, so that they are repeated, or request fewer"
        )
    return rows


def _digest(request: SplitRequest) -> str:
    # Megatron's own names lack sizes and times, so it would read a rebuilt dataset with the old one's index.
    files = []
    for prefix in request.blend.prefixes:
        for suffix in (".bin", ".idx"):
            status = os.stat(prefix + suffix)
            files.append([status.st_size, status.st_mtime_ns])
    what = [asdict(request), files, megatron.core.__version__]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _EndOfDocument:
    """The tokenizer of a GPTDataset, with all that it needs."""

    eod: int | None
    vocab_size: None = None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Return what becomes part of Megatron's index file names."""
        return {"eod": self.eod}


class _Samples(GPTDataset):  # type: ignore[misc]
    """Megatron's samples of one dataset."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """Return the indexed dataset; it checks what it reads if there are checksums."""
        dataset = GPTDataset.build_low_level_dataset(dataset_path, config)
        checksums = checksums_path(dataset_path)
        if os.path.lexists(checksums):
            dataset.bin_reader = CheckedBlocks(f"{dataset_path}.bin", checksums, "bin")
        return dataset

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], ...]:
        names = ("document_index", "sample_index", "shuffle_index")
        return _stored(self, self.index_split.name, names, super()._build_document_sample_shuffle_indices)


class _Blended(BlendedDataset):  # type: ignore[misc]
    """Megatron's samples of several datasets."""

    config: Any

    def _build_indices(self) -> tuple[NDArray[Any], ...]:
        return _stored(self, self.split.name, ("dataset_index", "dataset_sample_index"), self._blend)

    def _blend(self) -> tuple[NDArray[Any], ...]:
        """Return the indices as Megatron makes them, without files."""
        # With a cache path, Megatron would ask for its rank, which needs a process group.
        config = self.config
        self.config = copy.copy(config)
        self.config.path_to_cache = None
        log = logging.getLogger(BlendedDataset.__module__)
        log.addFilter(_is_not_about_files)
        try:
            arrays: tuple[NDArray[Any], ...] = super()._build_indices()
        finally:
            log.removeFilter(_is_not_about_files)
            self.config = config
        return arrays


def _is_not_about_files(record: logging.LogRecord) -> bool:
    """Drop Megatron's message that it writes no files for a blend; they are written here."""
    return "path_to_cache is None" not in record.getMessage()


def _stored(
    dataset: Any, split: str, names: tuple[str, ...], build: Callable[[], tuple[NDArray[Any], ...]]
) -> tuple[NDArray[Any], ...]:
    """Return the arrays in a dataset's index files; or build them, and write those that Megatron does not."""
    # Source: ``_build_document_sample_shuffle_indices`` and ``_build_indices`` in megatron.core.datasets (0.16.1 and
    # 0.19.2), which name the files.
    folder = dataset.config.path_to_cache
    stem = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split}"
    paths = [os.path.join(folder, f"{stem}-{name}.npy") for name in names]
    if is_cached(folder):  # finished, so rank 0 has checked it
        try:
            return tuple(np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        except (ValueError, OSError) as error:
            raise ValueError(f"{folder} has changed since it was checked ({error}); run again") from None
    arrays = build()
    for path, array in zip(paths, arrays, strict=True):
        if not os.path.exists(path):
            np.save(path, array, allow_pickle=False)
    return arrays


def _dataset(request: SplitRequest, folder: str) -> Any:
    """Return Megatron's dataset; on rank 0 it writes missing index files."""
    # Source: ``BlendedMegatronDatasetBuilder._build_blended_dataset_splits`` (0.16.1 and 0.19.2), without its barriers.
    blend, split = request.blend, request.split
    config = _config(request, folder)
    sizes = [request.samples if number == split else 0 for number in range(len(SPLITS))]
    builder = BlendedMegatronDatasetBuilder(_Samples, sizes, lambda: True, config)

    def one(prefix: str, samples: int | None) -> Any:
        matrix = [request.share if number == split else None for number in range(len(SPLITS))]
        counts = [samples if number == split else 0 for number in range(len(SPLITS))]
        return builder._build_megatron_dataset_splits(prefix, matrix, counts, False)[split]

    if len(blend.prefixes) == 1:
        return one(blend.prefixes[0], request.samples)
    # Unweighted: each dataset once. The sizes of the parts serve as their weights.
    if blend.weights is None:
        parts = [one(prefix, None) for prefix in blend.prefixes]
        total = sum(len(part) for part in parts)
        size = None if request.samples is None else min(request.samples, total)
        return _Blended(parts, [len(part) for part in parts], size, config)
    assert request.samples is not None
    # Megatron draws half a percent more of each (its surplus): the blend may take a little more than a share.
    shares = [weight / math.fsum(blend.weights) for weight in blend.weights]
    targets = [math.ceil(request.samples * share) for share in shares]
    surplus = 1 + config.mid_level_dataset_surplus
    parts = [one(prefix, math.ceil(n * surplus)) for prefix, n in zip(blend.prefixes, targets, strict=True)]
    return _Blended(parts, shares, sum(targets), config)


def _config(request: SplitRequest, folder: str | None) -> GPTDatasetConfig:
    blends: list[Any] = [None] * len(SPLITS)
    weights = None if request.blend.weights is None or request.samples is None else list(request.blend.weights)
    blends[request.split] = (list(request.blend.prefixes), weights)
    return GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend_per_split=blends,
        path_to_cache=folder,
        tokenizer=_EndOfDocument(request.eod),
        reset_position_ids=request.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=False,
    )
