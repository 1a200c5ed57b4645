# SPDX-License-Identifier: Apache-2.0
"""Forward passes of a model built with ``pipeline()``: validation, test and prediction steps, and calls between steps.

A step runs on the schedule, as in training (``pipeline_runner.py``), but each DataLoader batch runs alone. It is cut
into *parts* of ``micro_batch_size`` rows, and their outputs are joined. Ranks that share experts wait for each other in
every layer, so they must run the same number of parts; a rank with fewer repeats its last part and drops the output::

    micro_batch_size=2    rank 0, batch of 5 rows: parts of 2, 2, 1      rank 1, batch of 3 rows: parts of 2, 1, (1)

A Hugging Face model (``hf_model``) *takes whole batches*: it cuts sequences for context-parallel ranks itself, and may
be called several times in a step. Its steps run once on every stage, and each call of the model in them, or between
steps as in ``generate``, runs all stages (``PipelineEvaluation._call_model``). The last stage returns the output;
the Hugging Face model sends what it computes from it to the other stages.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_mcore.config.fp8 import check_microbatch
from lightning_mcore.parallel.attributes import attributes_set
from lightning_mcore.parallel.chunks import ModelChunks
from lightning_mcore.parallel.groups import from_last_stage, process_group
from lightning_mcore.parallel.pipeline import StageOutput
from lightning_mcore.strategy.checks import check_dispatched_shapes, fixed_dispatch
from lightning_mcore.strategy.module import MCoreModule, rows_of

if TYPE_CHECKING:
    from lightning_mcore.strategy.pipeline_runner import Microbatch, PipelineRunner
    from lightning_mcore.strategy.strategy import MCoreStrategy

_Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments


class PipelineEvaluation:
    """Runs evaluation steps and other calls of the model for the :class:`PipelineRunner` that owns it."""

    def __init__(
        self, runner: "PipelineRunner", strategy: "MCoreStrategy", module: pl.LightningModule, chunks: ModelChunks
    ) -> None:
        assert chunks.pipeline is not None
        self._runner = runner
        self._strategy = strategy
        self._module = module
        self._chunks = chunks
        self._pipeline = chunks.pipeline
        self._device = strategy.root_device
        if self._pipeline.takes_whole_batches:
            self._pipeline.call_outside_schedule = self._call_model

    # ---- steps

    def evaluate(self, step: str, args: tuple[Any, ...], shares_output: bool) -> Any:
        """Run a step forward only; return its output for the complete batch, on every rank of the pipeline.

        Returns None unless ``shares_output``, which says that some rank of the pipeline reads the output; all its ranks
        agree.
        """
        if self._pipeline.takes_whole_batches:
            return self._run_whole_batch(step, args)
        part_rows = self._agree_on_part_rows(args[0])
        parts = self._runner.cut(args[0], args[1:], part_rows)
        drops_repeated = step in ("validation_step", "test_step")
        rows_of_others = self._strategy.logs.rows_of_others if drops_repeated else 0
        num_parts = self._agree_on_num_parts(len(parts), part_rows, rows_of_others)
        padded = [*parts, *[parts[-1].as_padding()] * (num_parts - len(parts))]
        # Not over all ranks: data-parallel copies that share no experts may have unequal numbers of batches.
        check_dispatched_shapes(self._chunks.config, [part.shape for part in padded], process_group("experts"))
        with self._bf16_where_fp8_does_not_fit(parts):
            outputs, _ = self._runner.run_step(step, padded)
        return self._whole_output(step, parts, outputs[: len(parts)], part_rows) if shares_output else None

    def _agree_on_part_rows(self, batch: Any) -> int | None:
        """Return the rows of a part, None for the complete batch; collective over ranks that share experts."""
        micro_batch_size = self._strategy.micro_batch_size
        config = self._chunks.config
        group = process_group("experts")
        if fixed_dispatch(config) is None or group.size() == 1:
            return micro_batch_size
        # These dispatchers exchange the same number of tokens on all ranks. Batches of 3 rows on one rank and 2 on
        # another run as 3 parts of one row on both.
        rows = sum(1 for _ in self._runner.split_rows(batch, 1))
        most, minus_least = self._max_over([rows, -rows], group)
        return micro_batch_size if most == -minus_least else 1

    def _agree_on_num_parts(self, num_parts: int, part_rows: int | None, rows_of_others: int = 0) -> int:
        """Return the largest number of parts on any rank that shares experts, rounded up for the schedule.

        ``rows_of_others`` are the rows of the batch on ranks that drop no repeated samples; 0 if this rank drops none.
        Collective over the ranks that share experts, unless ``part_rows`` is None.
        """
        if part_rows is not None:
            # Other ranks run a batch of 5 rows as 3 parts of 2, so this rank does, even if it has dropped 3 rows: also
            # without experts, a step may communicate with other model copies.
            num_parts = max(num_parts, -(-rows_of_others // part_rows))
            group = process_group("experts")
            if group.size() > 1 and self._chunks.config.num_moe_experts:
                (num_parts,) = self._max_over([num_parts], group)
        return num_parts + -num_parts % self._runner.microbatch_multiple

    def _max_over(self, numbers: list[int], group: dist.ProcessGroup) -> list[int]:
        """Return the maximum of each number over the ranks of a group; collective."""
        largest = torch.tensor(numbers, device=self._device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return [int(number) for number in largest.tolist()]

    def _bf16_where_fp8_does_not_fit(self, parts: Sequence["Microbatch"]) -> AbstractContextManager[None]:
        """Turn FP8 off inside the ``with`` block if it cannot divide a part into blocks."""
        try:
            for part in parts:
                check_microbatch(self._strategy.precision_plugin.fp8, part.shape, self._strategy.layout)
        except ValueError:
            configs = [chunk.config for chunk in self._chunks.bare if hasattr(chunk, "config")]
            return attributes_set(configs, {"fp8": None, "fp4": None})
        return nullcontext()

    def _whole_output(
        self, step: str, parts: Sequence["Microbatch"], outputs: Sequence[Any], part_rows: int | None
    ) -> Any:
        """Return a step's output for a batch on every stage; ``outputs`` is empty on all stages but the last."""
        output: Any = outputs[0] if outputs else None
        if len(outputs) > 1:
            assert isinstance(self._module, MCoreModule)  # other modules' steps see complete batches
            assert part_rows is not None
            try:
                output = self._module.join_rows(outputs, _rows_of_parts(parts, part_rows))
            except ValueError as error:
                # Sent like an output, so that every stage raises it instead of waiting for the output.
                output = ValueError(
                    f"micro_batch_size={part_rows} splits batches, and for the parts {step} returned {error}"
                )
        if process_group("pp").size() > 1:
            output = from_last_stage(output, self._device)
        if isinstance(output, ValueError):
            raise output
        return output

    def _run_whole_batch(self, step: str, args: tuple[Any, ...]) -> Any:
        """Run a step once on every stage, for a model that takes whole batches; the last stage logs."""
        stages = process_group("pp")
        recorder = self._runner.recorder
        with recorder.recording(), recorder.microbatch(args[0], muted=stages.rank() < stages.size() - 1):
            output = getattr(self._module, step)(*args)
        recorder.finish(step, over_copies=False)
        return output

    # ---- calls of a model that takes whole batches

    def model_calls(self) -> AbstractContextManager[None]:
        """Let calls of the model outside a schedule run all stages inside the ``with`` block."""
        return attributes_set([self._pipeline], {"call_outside_schedule": self._call_model})

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the complete model, outside a schedule; return the output on the last stage, None on the others.

        Collective over the stages, and without gradients if there are several. Rows are cut into parts, as in steps.
        """
        parts: list[_Call] = [(args, kwargs)]
        part_rows = None
        if self._pipeline.cache is None and (self._pipeline.is_staged or not torch.is_grad_enabled()):
            rows, part_rows = len(args[0]), self._strategy.micro_batch_size
            step = part_rows or rows
            parts = [rows_of((args, kwargs), rows, start, start + step) for start in range(0, rows, step)]
        num_parts = self._agree_on_num_parts(len(parts), part_rows)
        calls = [*parts, *parts[-1:] * (num_parts - len(parts))]
        if self._pipeline.is_staged:
            with torch.no_grad():
                outputs = self._runner.run_schedule(self._call_chunk, calls)
        else:
            outputs = []
            for args, kwargs in calls:
                self._chunks.wait_for_uncalled(self._chunks.wrapped[0])
                outputs.append(self._chunks.wrapped[0](*args, **kwargs))
        outputs = outputs[: len(parts)]
        if len(outputs) > 1:
            return torch.cat(outputs)
        return outputs[0] if outputs else None

    def _call_chunk(self, call: _Call, chunk: nn.Module) -> Any:
        """Call a chunk, as the model does inside a step; raises StageOutput on all stages but the last."""
        args, kwargs = call
        self._chunks.wait_for_uncalled(chunk)
        output = chunk(*args, **kwargs)
        if not self._runner.is_last(chunk):
            raise StageOutput(output)
        return output


def _rows_of_parts(parts: Sequence["Microbatch"], part_rows: int) -> list[int]:
    """Return each part's rows from its share of them: with 0.4, 0.4 and 0.2, parts of 2 rows have 2, 2 and 1."""
    return [round(part_rows * part.weight / parts[0].weight) for part in parts]
