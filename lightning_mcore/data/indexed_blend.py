# SPDX-License-Identifier: Apache-2.0
"""One split of a blend of indexed datasets, as Megatron's ``GPTDataset`` and ``BlendedDataset``.

Megatron cuts documents into samples and shuffles them once, into index files that all ranks then map. Its
``BlendedMegatronDatasetBuilder`` puts barriers between rank 0, which writes those files, and the others, which read
them; when rank 0 fails the others wait for it until the process group's timeout. Its classes need no barriers. Here
rank 0 builds, every rank hears how that went (``agreement.py``), and then all of them read. The samples are those of
the builder; a test compares both.

Index files stand in ``CACHE_DIR/<digest>``, which appears when they are whole. The digest covers the dataset's files,
too: Megatron's own names do not, so that a dataset that was made anew would meet the index of the old one.

``pretraining_data.py`` is the only user.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from lightning_mcore.agreement import decide, together
from lightning_mcore.atomic_directory import abandon, begin, publish
from lightning_mcore.data.indexed_files import Index, read_index
from lightning_mcore.data.indexed_shares import SPLITS, Blend

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_SHARED_DISK_SECONDS = 30.0  # that a network disk may take to show what another machine wrote

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class SplitRequest:
    """What decides the samples of a split and their order.

    Attributes:
        blend: The datasets.
        split: 0 for training, 1 for validation, 2 for test.
        share: Of each dataset's documents, from where to where.
        samples: Samples to draw; None takes the documents once.
        seq_length: Tokens of a sample.
        seed: Of the order.
        reset_position_ids: Positions begin anew after each end-of-document token.
        eod_mask_loss: Targets after it do not count.
        eod: That token.
    """

    blend: Blend
    split: int
    share: tuple[float, float]
    samples: int | None
    seq_length: int
    seed: int
    reset_position_ids: bool
    eod_mask_loss: bool
    eod: int | None


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The first samples of a dataset of Megatron's, as an MCoreModule takes them.

    Args:
        dataset: Megatron's.
        samples: How many count; Megatron may have built more.
    """

    def __init__(self, dataset: Any, samples: int | None) -> None:
        self.dataset = dataset
        self.samples = len(dataset) if samples is None else samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return tokens, labels, loss_mask and position_ids, each [s]."""
        row = self.dataset[index]
        return {key: row[key] for key in _KEYS}


def available(index: Index, share: tuple[float, float], seq_length: int) -> int:
    """Return how many samples a split of a dataset holds.

    Source: ``_build_megatron_dataset_splits`` and ``_build_document_sample_shuffle_indices`` in megatron.core.datasets
    (0.16.1).
    """
    first, last = (round(part * float(len(index.lengths))) for part in share)
    return max(0, (index.tokens(first, last) - 1) // seq_length)


def require_samples(index: Index, request: SplitRequest) -> int:
    """Return how many samples a split of a dataset holds.

    Raises:
        ValueError: It holds none, from which Megatron would make a row of samples without an end.
    """
    samples = available(index, request.share, request.seq_length)
    if samples == 0:
        first, last = (round(part * float(len(index.lengths))) for part in request.share)
        raise ValueError(
            f"the {SPLITS[request.split]} split of {index.prefix} has {index.tokens(first, last)} tokens in"
            f" {last - first} of its {index.documents} documents, and a sample of seq_length={request.seq_length} needs"
            f" {request.seq_length + 1}; give it more documents, a larger share in split, or a smaller seq_length"
        )
    return samples


def require_helpers() -> None:
    """Refuse a megatron-core whose compiled part does not fit this Python.

    Raises:
        ModuleNotFoundError: It is not there.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        raise ModuleNotFoundError(
            "megatron.core.datasets.helpers_cpp, the compiled part of megatron-core's datasets, is not there for this"
            " Python; install the wheel of megatron-core for it, or compile helpers.cpp, which lies beside it",
            name="megatron.core.datasets.helpers_cpp",
        )


def at_first_rank(function: Callable[[], T]) -> T:
    """Return on every rank what rank 0 finds, or raise on every rank what it raises; collective where ranks are."""
    return decide(function) if dist.is_initialized() else function()


def build(request: SplitRequest, cache_dir: str) -> Rows:
    """Return the samples of a split, in the order in which all ranks together read them; collective where ranks are.

    Args:
        request: What to build.
        cache_dir: Folder for Megatron's index files, which every machine sees.

    Raises:
        FileNotFoundError: A dataset is not there, or a machine does not see the folder.
        ValueError: A dataset is damaged or too small.
        OSError: The folder cannot be written.
    """
    folder = at_first_rank(lambda: _prepare(request, os.path.abspath(cache_dir)))
    return together(lambda: _load(request, folder))


def _prepare(request: SplitRequest, cache_dir: str) -> str:
    """Write the index files, unless they are there, and return their folder."""
    require_helpers()
    for prefix in request.blend.prefixes:
        require_samples(read_index(prefix), request)
    folder = os.path.join(cache_dir, _digest(request))
    while not os.path.isdir(folder):
        try:
            partial = begin(folder)
        except RuntimeError as error:  # another run writes the same
            _log.info("waiting for the index files of another run: %s", error)
            time.sleep(1.0)
            continue
        except OSError as error:
            raise OSError(
                f"the index files of the dataset cannot be written to cache_dir={cache_dir!r} ({error.strerror}); give"
                " a folder that can be written and that every machine sees"
            ) from error
        try:
            clock = time.monotonic()
            count = len(_dataset(request, partial))
            publish(folder)
        except BaseException:
            abandon(folder)
            raise
        seconds = time.monotonic() - clock
        _log.info("built the index of %d samples for %s in %.1f s", count, SPLITS[request.split], seconds)
    return folder


def _load(request: SplitRequest, folder: str) -> Rows:
    deadline = time.monotonic() + _SHARED_DISK_SECONDS
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{folder}, which rank 0 wrote, is not seen on another machine; give a cache_dir on a disk that all"
                " machines share"
            )
        time.sleep(0.2)
    dataset = _dataset(request, folder)
    if request.samples is not None and len(dataset) < request.samples:
        raise ValueError(
            f"the {SPLITS[request.split]} split has {len(dataset)} rows of seq_length={request.seq_length}, fewer than"
            f" the {request.samples} that are asked for; give the datasets weights, so that they are repeated, or ask"
            " for fewer"
        )
    return Rows(dataset, request.samples)


def _digest(request: SplitRequest) -> str:
    files = []
    for prefix in request.blend.prefixes:
        for suffix in (".bin", ".idx"):
            status = os.stat(prefix + suffix)
            files.append([status.st_size, status.st_mtime_ns])
    what = [asdict(request), files, megatron.core.__version__]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _EndOfDocument:
    """All that a GPTDataset asks of a tokenizer."""

    eod: int | None
    vocab_size: None = None

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Return what goes into the names of Megatron's index files."""
        return {"eod": self.eod}


def _dataset(request: SplitRequest, folder: str) -> Any:
    """Return Megatron's dataset; on rank 0 it writes index files that are not there.

    Source: ``BlendedMegatronDatasetBuilder._build_blended_dataset_splits`` (0.16.1 and 0.19.2), without its barriers.
    """
    blend, split = request.blend, request.split
    config = _config(request, folder)
    sizes = [request.samples if number == split else 0 for number in range(len(SPLITS))]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)

    def one(prefix: str, samples: int | None) -> Any:
        matrix = [request.share if number == split else None for number in range(len(SPLITS))]
        counts = [samples if number == split else 0 for number in range(len(SPLITS))]
        return builder._build_megatron_dataset_splits(prefix, matrix, counts, False)[split]

    if len(blend.prefixes) == 1:
        return one(blend.prefixes[0], request.samples)
    if not dist.is_initialized():  # BlendedDataset of 0.16.1 would ask for its rank before it writes a file
        config = _config(request, None)
        logging.getLogger(BlendedDataset.__module__).addFilter(_not_about_files)
    if blend.weights is None:
        parts = [one(prefix, None) for prefix in blend.prefixes]
        total = sum(len(part) for part in parts)
        size = None if request.samples is None else min(request.samples, total)
        return BlendedDataset(parts, [len(part) for part in parts], size, config)
    assert request.samples is not None
    shares = [weight / math.fsum(blend.weights) for weight in blend.weights]
    targets = [math.ceil(request.samples * share) for share in shares]
    surplus = 1 + config.mid_level_dataset_surplus
    parts = [one(prefix, math.ceil(n * surplus)) for prefix, n in zip(blend.prefixes, targets, strict=True)]
    return BlendedDataset(parts, shares, sum(targets), config)


def _not_about_files(record: logging.LogRecord) -> bool:
    """Keep quiet that a blend in one process writes no file; it takes a second for 100 million samples."""
    return "path_to_cache is None" not in record.getMessage()


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
