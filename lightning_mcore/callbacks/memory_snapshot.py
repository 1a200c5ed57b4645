# SPDX-License-Identifier: Apache-2.0
"""A callback that writes a snapshot of CUDA memory for some steps of some ranks."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch

from lightning_mcore.callbacks.chosen_steps import ChosenSteps


class MemorySnapshot(ChosenSteps):
    """Records the CUDA allocator for some optimizer steps on some ranks, in the format of PyTorch's memory viewer.

    Each rank writes ``step<step>-rank<rank>-<coordinates>.pickle``; open it at https://pytorch.org/memory_viz. If an
    exception, such as running out of memory, ends one of these steps, the file is written too.

    Args:
        step: The first optimizer step to record; 0 is the first of a run.
        num_steps: Number of steps to record.
        ranks: The global ranks that record.
        folder: Folder for the files.
        max_entries: Allocations and frees to remember; older ones are dropped.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is too small.

    Examples:
        >>> from lightning_mcore.callbacks import MemorySnapshot
        >>> callback = MemorySnapshot(step=10, ranks=[0, 8])
    """

    def __init__(
        self,
        step: int,
        num_steps: int = 1,
        ranks: Sequence[int] = (0,),
        folder: str = "memory",
        max_entries: int = 100_000,
    ) -> None:
        super().__init__(step, num_steps, ranks, folder, ".pickle")
        self.max_entries = max_entries

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reject a run without CUDA, and ranks that it does not have.

        Raises:
            ValueError: There is nothing to record.
        """
        super().setup(trainer, pl_module, stage)
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ValueError(
                f'MemorySnapshot records the CUDA allocator, but the run is on {device}; choose accelerator="gpu", or'
                " remove it"
            )

    def begin(self) -> None:
        """Start recording."""
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries)

    def end(self, path: str) -> None:
        """Write the file and stop recording."""
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
