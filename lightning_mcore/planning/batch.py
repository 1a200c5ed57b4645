# SPDX-License-Identifier: Apache-2.0
"""The global batch of a run, and a sentence that shows how it is computed.

Rows of one optimizer step = rows of a microbatch x microbatches x data-parallel size. Expert parallelism does not lower
the data-parallel size, because experts are spread over ranks that read different data. Guides that divide by the
expert-parallel size are wrong for every megatron-core since 0.8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_mcore.config.value_checks import require_size


@dataclass(frozen=True)
class GlobalBatch:
    """The rows and tokens that one optimizer step reads.

    Args:
        micro_batch_size: Rows of a microbatch, one run through the model; the last of a DataLoader batch may be
            shorter.
        num_microbatches: Microbatches of a step on each data-parallel rank.
        data_parallel_size: Model copies that read different rows.
        rows: Rows of a step on all ranks together.
        seq_length: Tokens of a row.
        expert_model_parallel_size: Used only in the sentence.
    """

    micro_batch_size: int
    num_microbatches: int
    data_parallel_size: int
    rows: int
    seq_length: int
    expert_model_parallel_size: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.rows * self.seq_length

    @property
    def sentence(self) -> str:
        """How the batch is computed, such as ``micro batch 4 x 2 microbatches x data parallel 4 = 32 rows``."""
        product = self.micro_batch_size * self.num_microbatches * self.data_parallel_size
        many = "microbatch" if self.num_microbatches == 1 else "microbatches"
        shorter = "" if product == self.rows else " (the last microbatch of a DataLoader batch is shorter)"
        experts = "; experts do not lower dp" if self.expert_model_parallel_size > 1 else ""
        return (
            f"micro batch {self.micro_batch_size} x {self.num_microbatches} {many} x data parallel"
            f" {self.data_parallel_size} = {self.rows} rows{shorter}{experts}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        names = ("micro_batch_size", "num_microbatches", "data_parallel_size", "rows", "seq_length", "tokens")
        return {**{name: getattr(self, name) for name in names}, "sentence": self.sentence}


def global_batch(
    strategy: Mapping[str, Any], trainer: Mapping[str, Any], batch_size: int, seq_length: int, dp: int
) -> GlobalBatch:
    """Compute the batch of a step as the strategy will split it.

    Args:
        strategy: Arguments of ``MCoreStrategy``; ``micro_batch_size`` cuts a DataLoader batch.
        trainer: Arguments of ``Trainer``; ``accumulate_grad_batches`` is the number of DataLoader batches of a step.
        batch_size: Rows of a DataLoader batch on one data-parallel rank.
        seq_length: Tokens of a row.
        dp: Data-parallel size.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is below 1.
    """
    accumulated = trainer.get("accumulate_grad_batches", 1)
    micro = strategy.get("micro_batch_size")
    for name, size in {"batch_size": batch_size, "accumulate_grad_batches": accumulated}.items():
        require_size(name, size)
    if micro is None:
        micro = batch_size
    require_size("micro_batch_size", micro)
    micro = min(micro, batch_size)
    return GlobalBatch(
        micro_batch_size=micro,
        num_microbatches=accumulated * -(-batch_size // micro),
        data_parallel_size=dp,
        rows=batch_size * accumulated * dp,
        seq_length=seq_length,
        expert_model_parallel_size=strategy.get("expert_model_parallel_size") or 1,
    )
