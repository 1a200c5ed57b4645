# SPDX-License-Identifier: Apache-2.0
"""What the layout and the precision of a run ask of the lengths of packed sequences.

Context parallelism cuts each sub-sequence of a row into two slices for each rank, so each is padded to a multiple of
that. Sequence parallelism and the FP8 recipes cut the tokens of a row as a whole, wherever sub-sequences begin: only
the row must be a multiple of theirs. Padding every sub-sequence to it as well would fill rows with padding.

The data modules ask :func:`packing_multiples` when the Trainer sets them up.
"""

import math
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_mcore.config.fp8 import FP8Settings
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.sizes import neighbours


class PackingMultiples(NamedTuple):
    """What lengths must be multiples of, in tokens.

    Attributes:
        sub_sequence: For each sub-sequence with its padding.
        row: For a whole row.
    """

    sub_sequence: int
    row: int

    def check_row(self, row_length: int) -> None:
        """Refuse a row that this run cannot cut.

        Args:
            row_length: Tokens of a row.

        Raises:
            ValueError: It is not a multiple of :attr:`row`.
        """
        if row_length % self.row:
            raise ValueError(
                f"seq_length={row_length} is not a multiple of {self.row}, which the layout and the precision of this"
                f" run ask of a row; choose {neighbours(row_length, self.row)}"
            )


def packing_multiples(trainer: pl.Trainer | None) -> PackingMultiples:
    """Return what a run asks of the lengths of packed sequences; 1 and 1 where nothing is split.

    Args:
        trainer: Of the run, with any strategy; None outside of one.
    """
    strategy: Any = getattr(trainer, "strategy", None)
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, ParallelLayout):
        return PackingMultiples(1, 1)
    cp = layout.context_parallel_size
    row = layout.sequence_multiple
    fp8 = getattr(strategy.precision_plugin, "fp8", None)
    if isinstance(fp8, FP8Settings) and fp8.is_on:
        ranks = cp * (layout.tensor_model_parallel_size if layout.sequence_parallel else 1)
        row = math.lcm(row, ranks * fp8.alignment)
    return PackingMultiples(2 * cp if cp > 1 else 1, row)
