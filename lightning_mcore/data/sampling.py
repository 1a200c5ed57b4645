# SPDX-License-Identifier: Apache-2.0
"""One sample order for every layout, and the DataLoaders that read in this order.

An epoch's order depends only on the seed and the epoch number. :class:`GlobalOrderSampler` deals it out in turns: of
``n`` data-parallel ranks, rank ``r`` reads samples ``r``, ``r + n``, ``r + 2 n`` and so on. What all ranks together
have read is therefore always a prefix of the order, whatever ``n`` is. So a run on another number of ranks with the
same global batch sees the same samples in every step, and a resumed run continues where the other one stopped
(``position.py``). The ranks of one model copy read the same samples.

An epoch ends with the last full global batch. The log says how many samples are left over; each epoch's order leaves
out different ones. Lightning's own sampler repeats samples instead, to fill the last batch.

The data modules of this package build their loaders with :func:`training_loader` and :func:`evaluation_loader`; your
own data module may do the same.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_mcore.config.value_checks import require_size


class GlobalOrderSampler(DistributedSampler[Any]):
    """Deals out full global batches, in an order that does not depend on the number of ranks.

    ``global_batch_size`` counts the samples of all ranks in one optimizer step, ``of`` names the samples in messages.
    Raises ValueError if the dataset is smaller than a global batch, or if the number of ranks does not divide one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int,
        rank: int,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        of: str = "samples",
    ) -> None:
        require_size("global_batch_size", global_batch_size)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=True)
        if global_batch_size % num_replicas:
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be divided among {num_replicas} data-parallel ranks;"
                f" choose a multiple of {num_replicas}"
            )
        # 11 samples with a global batch of 4: an epoch has 8 of them. Without shuffling, rank 0 of 2 reads 0, 2, 4, 6
        # and rank 1 reads 1, 3, 5, 7; on one rank the order is 0 to 7. Samples 8 to 10 are left over.
        self.global_batch_size = global_batch_size
        self.epoch_size = len(cast(Sized, dataset)) // global_batch_size * global_batch_size
        if self.epoch_size == 0:
            raise ValueError(
                f"the dataset has {len(cast(Sized, dataset))} {of}, fewer than the {global_batch_size} of a global"
                " batch; give more data, or lower the batch size, accumulate_grad_batches or the number of ranks"
            )
        # Attributes of DistributedSampler, whose own values assume padding or dropping per rank.
        self.num_samples = self.epoch_size // num_replicas
        self.total_size = self.epoch_size

    @property
    def left_over(self) -> int:
        """Samples that an epoch leaves out."""
        return len(cast(Sized, self.dataset)) - self.epoch_size

    def order(self, rank: int = 0, ranks: int = 1) -> Sequence[int]:
        """Return this epoch's indices in the order in which all ranks together read them, or one rank's share."""
        if not self.shuffle:
            return range(rank, self.epoch_size, ranks)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        # Cut after permuting the whole dataset, so that each epoch leaves out different samples.
        permutation = torch.randperm(len(cast(Sized, self.dataset)), generator=generator)
        return permutation[rank : self.epoch_size : ranks].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.rank, self.num_replicas))


def training_loader(
    trainer: pl.Trainer | None,
    dataset: Dataset[Any],
    batch_size: int,
    *,
    seed: int = 1234,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool | None = None,
    of: str = "samples",
) -> DataLoader[Any]:
    """Return a training loader of full global batches, in the same order on every layout.

    Args:
        trainer: The trainer, for its ranks and ``accumulate_grad_batches``; None for one rank.
        dataset: The samples; it must have a length.
        batch_size: Samples in a batch on one data-parallel rank.
        seed: Seed of the order.
        shuffle: Draw a new order in each epoch; otherwise keep the dataset's order.
        collate_fn: Makes a batch from a list of samples.
        num_workers: Number of processes that load batches ahead.
        pin_memory: Copy batches into pinned memory, from which a GPU can read while it computes; None means yes if the
            trainer uses CUDA.
        of: What the dataset contains, for messages: samples, or rows.

    Raises:
        ValueError: The dataset is smaller than a global batch.
        TypeError: A size is not an int.
    """
    require_size("batch_size", batch_size)
    rank, ranks = data_parallel_place(trainer)
    accumulated = trainer.accumulate_grad_batches if trainer is not None else 1
    size = batch_size * ranks * accumulated
    sampler = GlobalOrderSampler(dataset, ranks, rank, size, shuffle, seed, of)
    if sampler.left_over:
        rank_zero_info(
            f"each epoch skips {sampler.left_over} of {sampler.left_over + sampler.epoch_size} {of}, which do not"
            f" fill a global batch of {size}"
        )
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=is_on_cuda(trainer) if pin_memory is None else pin_memory,
        drop_last=True,
        persistent_workers=num_workers > 0,
    )


def evaluation_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """Return a loader of all samples in dataset order; Lightning divides them among the ranks.

    Args:
        dataset: The samples.
        batch_size: Samples in a batch on one data-parallel rank.
        collate_fn: Makes a batch from a list of samples.
        num_workers: Number of processes that load batches ahead.
        pin_memory: Copy batches into pinned memory.

    Raises:
        ValueError: ``batch_size`` is below 1.
        TypeError: A size is not an int.
    """
    require_size("batch_size", batch_size)
    return DataLoader(
        dataset,
        batch_size,
        shuffle=False,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )


def is_on_cuda(trainer: pl.Trainer | None) -> bool:
    """Whether batches go to a CUDA device."""
    return trainer is not None and trainer.strategy.root_device.type == "cuda"


def data_parallel_place(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return this data-parallel rank and the number of such ranks; (0, 1) outside a run."""
    places = trainer.distributed_sampler_kwargs if trainer is not None else None
    return (places["rank"], places["num_replicas"]) if places else (0, 1)
