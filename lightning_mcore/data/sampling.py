# SPDX-License-Identifier: Apache-2.0
"""One sample order for every layout, and the DataLoaders that read in this order.

An epoch's order depends only on the seed and the epoch number. :class:`GlobalOrderSampler` deals it out in turns: of
``n`` data-parallel ranks, rank ``r`` reads samples ``r``, ``r + n``, ``r + 2 n`` and so on. What all ranks together
have read is therefore always a prefix of the order, whatever ``n`` is. So a run on another number of ranks with the
same global batch sees the same samples in every step, and a resumed run continues where the other one stopped
(``position.py``). The ranks of one model copy read the same samples.

Packed rows of one length differ in work, because attention costs the square of each document's length. Given the
*costs* of the samples, each turn of ``n`` is dealt so that the costs of the ranks even out within a step. What a step
reads stays the same, and so do prefixes of whole turns.

An epoch ends with the last full global batch. The log says how many samples are left over; each epoch's order leaves
out different ones. Lightning's own sampler repeats samples instead, to fill the last batch.

The data modules of this package build their loaders with :func:`training_loader` and :func:`evaluation_loader`; your
own data module may do the same.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_mcore.config.value_checks import require_size


class GlobalOrderSampler(DistributedSampler[Any]):
    """Deals out full global batches, in an order that does not depend on the number of ranks.

    ``global_batch_size`` counts the samples of all ranks in one optimizer step, ``of`` names the samples in messages,
    ``costs`` [samples] is the work of each, in any unit.
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
        costs: NDArray[np.float64] | None = None,
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
        self.costs = costs
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

    def order(self) -> Sequence[int] | NDArray[np.int64]:
        """Return this epoch's indices in the order in which all ranks together read them, turn by turn."""
        if not self.shuffle:
            return range(self.epoch_size)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        # Cut after permuting the whole dataset, so that each epoch leaves out different samples.
        permutation = torch.randperm(len(cast(Sized, self.dataset)), generator=generator)
        found: NDArray[np.int64] = permutation[: self.epoch_size].numpy()
        return found

    def evened_out(
        self, order: Sequence[int] | NDArray[np.int64], consumed: int = 0
    ) -> Sequence[int] | NDArray[np.int64]:
        """Return ``order`` with each turn rearranged so that, within a step, all ranks get samples of like cost.

        ``consumed`` samples were read before, perhaps by another number of ranks.
        """
        if self.costs is None or self.num_replicas == 1:
            return order
        begin = consumed % self.num_replicas
        read, rest = np.split(np.asarray(order), [begin])
        places = even_out(self.costs[rest], self.num_replicas, self.global_batch_size // self.num_replicas)
        return np.concatenate([read, rest[places]])

    def __iter__(self) -> Iterator[int]:
        return map(int, self.evened_out(self.order())[self.rank :: self.num_replicas])


def even_out(costs: NDArray[np.float64], ranks: int, turns: int) -> NDArray[np.int64]:
    """Return the order [n] in which samples of these costs [n] even out over ``ranks`` in each step of ``turns`` turns.

    Samples move within their turn only. The last turn may be short, and keeps its order.
    """
    # Costs 9 1 | 8 2 for 2 ranks and a step of 2 turns. As they are, the ranks get 9 + 8 and 1 + 2. The dearest sample
    # of a turn goes to the rank that has least so far: 9 1 | 2 8, so 9 + 2 and 1 + 8; the places are 0 1 3 2.
    whole = len(costs) // ranks * ranks
    steps = -(-whole // (turns * ranks))
    by_turn = np.zeros((steps, turns, ranks))
    by_turn.reshape(-1)[:whole] = costs[:whole]
    places = np.arange(by_turn.size).reshape(by_turn.shape)
    totals = np.zeros((steps, ranks))
    for turn in range(turns):
        dearest_first = np.argsort(-by_turn[:, turn], axis=1, kind="stable")
        given = np.empty_like(dearest_first)
        np.put_along_axis(given, np.argsort(totals, axis=1, kind="stable"), dearest_first, axis=1)
        totals += np.take_along_axis(by_turn[:, turn], given, axis=1)
        places[:, turn] = np.take_along_axis(places[:, turn], given, axis=1)
    return np.concatenate([places.reshape(-1)[:whole], np.arange(whole, len(costs))])


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
    costs: NDArray[np.float64] | None = None,
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
        costs: Work of each sample, [samples], in any unit. Ranks that share a step then get samples of like cost; which
            samples a step reads does not change. None if all cost the same.

    Raises:
        ValueError: The dataset is smaller than a global batch.
        TypeError: A size is not an int.
    """
    require_size("batch_size", batch_size)
    rank, ranks = data_parallel_place(trainer)
    accumulated = trainer.accumulate_grad_batches if trainer is not None else 1
    size = batch_size * ranks * accumulated
    sampler = GlobalOrderSampler(dataset, ranks, rank, size, shuffle, seed, of, costs)
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
    """Return a loader of all samples in dataset order; Lightning divides them among the ranks."""
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
