# SPDX-License-Identifier: Apache-2.0
"""Run a step of a module over all training samples in order, before training.

``reference.py`` and ``stored_logits.py`` compute in this way what no epoch then needs to compute again.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from tqdm import tqdm

from lightning_mcore.data.appended import SILENT_SECONDS
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.strategy.module import MCoreModule

Batch = dict[str, Tensor]


def results_of_samples(
    module: MCoreModule,
    step: str,
    batch_of: Callable[[list[int], list[int]], Batch],
    samples: range,
    batch_size: int,
    what: str,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the first sample of each batch and the step's results for it, [samples, ...] on the host; collective.

    ``batch_of`` makes this rank's batch of ``batch_size`` samples; it gets their numbers and those of all ranks'.
    ``what`` names the results on the progress bar.
    """
    trainer = module.trainer
    rank, ranks = data_parallel_place(trainer)
    at_once = batch_size * ranks
    starts = tqdm(
        range(samples.start, samples.stop, at_once),
        desc=what,
        disable=not trainer.is_global_zero,
        delay=SILENT_SECONDS,
        leave=False,
    )
    # 5 samples on 2 data-parallel ranks with batches of 2: start 0 gives samples 0 1 to rank 0 and 2 3 to rank 1. Start
    # 4 gives sample 4 to both ranks, twice each, because ranks may share experts; only the first result is yielded.
    for start in starts:
        of_all = [min(start + number, samples.stop - 1) for number in range(at_once)]
        own = of_all[rank * batch_size : (rank + 1) * batch_size]
        batch = module.on_before_batch_transfer(batch_of(own, of_all), 0)
        found = module.run_forward(step, move_data_to_device(batch, module.device))
        gathered: Any = trainer.strategy.all_gather(found)
        yield start, gathered.reshape(at_once, -1)[: samples.stop - start].cpu()
