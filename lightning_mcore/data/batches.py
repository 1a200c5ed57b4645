# SPDX-License-Identifier: Apache-2.0
"""Which part of the data a rank reads, and what a batch consists of, so that ranks can compare it.

The ranks of one model copy (tensor, context and pipeline parallel) read the same batches; model copies read different
ones. A dataset that shards itself must therefore use the data-parallel rank, which :func:`data_shard` returns, and not
the global rank. With TP=2 on 4 processes, global ranks 0 and 1 are shard 0 of 2, ranks 2 and 3 shard 1.

:func:`batch_facts` lists the leaves of a batch, each with a checksum. ``strategy/same_batches.py`` compares them.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import Tensor, nn

_ALL_BYTES = 2**24
_PIECE = 2**16
_DEPTH = 8
_SHORT = 60  # characters of a value that an error shows as it is

Fact = tuple[str, str]
"""Where a value is in a batch, and what it is."""


class DataShard(NamedTuple):
    """Which part of the data a process reads: part ``rank`` of ``size``."""

    rank: int
    size: int


def data_shard(trainer: pl.Trainer) -> DataShard:
    """Return this process's data-parallel rank and the number of such ranks, under any strategy.

    Call it where the dataset is made, for example in ``train_dataloader`` or ``setup``, and pass the numbers to the
    dataset: DataLoader workers do not know the trainer.

    Args:
        trainer: The trainer that will read the data.

    Examples:
        Two of four ranks share each model copy.

        >>> import lightning.pytorch as pl
        >>> from lightning_mcore import MCoreStrategy, data_shard
        >>> trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=MCoreStrategy(tensor_model_parallel_size=2))
        >>> data_shard(trainer)
        DataShard(rank=0, size=2)
    """
    # Strategies without the property run on one device.
    sampling: Mapping[str, int] = getattr(
        trainer.strategy, "distributed_sampler_kwargs", {"rank": 0, "num_replicas": 1}
    )
    return DataShard(sampling["rank"], sampling["num_replicas"])


def batch_facts(batch: Any) -> list[Fact]:
    """Return the leaves of a batch in order, each with dtype, shape and checksum, or with its value if that is short.

    The path ``[0]['tokens']`` of a tensor ``[2, 4]`` has the fact ``int64 [2, 4] 5f3a91c2``. Objects of unknown classes
    count by class and attributes.
    """
    return list(_walk(batch, "", ()))


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[Fact]:
    """Yield the facts below ``path``; ``above`` has the ids of the enclosing containers, to detect cycles."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        yield from _of_array(value, path, above)
    elif isinstance(value, str | bytes | int | float | complex | None):
        text = repr(value)
        yield path, text if len(text) <= _SHORT else f"{type(value).__name__} {_checksum(text.encode()):08x}"
    elif callable(getattr(value, "tobytes", None)):  # a PIL image, a memoryview
        yield path, f"{type(value).__name__} {_checksum(value.tobytes()):08x}"
    elif len(above) >= _DEPTH or id(value) in above or isinstance(value, nn.Module | type) or callable(value):
        yield path, type(value).__name__
    else:
        yield path, type(value).__name__
        yield from _below(value, path, (*above, id(value)))


def _below(value: Any, path: str, above: tuple[int, ...]) -> Iterator[Fact]:
    if isinstance(value, Set):  # the order of its elements differs between processes
        yield from sorted(fact for element in value for fact in _walk(element, f"{path}{{}}", above))
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _walk(element, f"{path}[{key!r}]", above)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            yield from _walk(element, f"{path}[{index}]", above)
    elif hasattr(value, "__dict__"):
        for name, element in vars(value).items():
            yield from _walk(element, f"{path}.{name}", above)


def _of_array(value: Any, path: str, above: tuple[int, ...]) -> Iterator[Fact]:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        yield from _walk(value.tolist(), path, above)
        return
    kind = f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested and not value.is_quantized:
        flat = value.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg().reshape(-1)
        yield path, f"{kind} {_checksum(flat.contiguous().view(torch.uint8).numpy()):08x}"
    elif isinstance(value, Tensor):
        yield path, kind
    else:
        yield path, f"{kind} {_checksum(np.ascontiguousarray(value).reshape(-1).view(np.uint8)):08x}"


def _checksum(data: Any) -> int:
    """Return a checksum of ``bytes`` or a uint8 array [n]; of large values, from evenly spread pieces only."""
    size = len(data)
    if size <= _ALL_BYTES:
        return crc32(data)
    # 256 pieces of 64 KiB; the first begins at byte 0, and the last ends with the last byte.
    pieces, checksum = _ALL_BYTES // _PIECE, 0
    for piece in range(pieces):
        first = (size - _PIECE) * piece // (pieces - 1)
        checksum = crc32(data[first : first + _PIECE], checksum)
    return checksum
