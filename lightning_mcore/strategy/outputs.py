# SPDX-License-Identifier: Apache-2.0
"""Join what an evaluation step returns for the parts of a batch into what it would return for the complete batch.

``MCoreStrategy(micro_batch_size=...)`` cuts evaluation batches, so that a step runs once for each part. Hooks and
``trainer.predict`` get one output per batch. ``pipeline_runner.py`` calls ``MCoreModule.join_rows``, which calls
:func:`join_outputs` unless the module replaces it.

For example, a batch of 5 rows in parts of 2, 2 and 1 rows: tensors of [2, s], [2, s] and [1, s] become [5, s], losses
of 1.0, 2.0 and 4.0 become (2 * 1.0 + 2 * 2.0 + 1 * 4.0) / 5 = 2.0, and counts of 3, 1 and 1 become 5.
"""

import copy
import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WAY_OUT = "return tensors with one row for each row of the batch, or override join_rows() in the module"


def join_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the output for a complete batch, from the outputs and row counts of its parts, in order.

    * Tensors and arrays are concatenated along dimension 0; packed rows that the step returns joined, [1, tokens, ...],
      along dimension 1.
    * A scalar with a fraction is averaged, weighted by rows; next to ``num_tokens``, ``loss`` is weighted by tokens.
    * Whole numbers are counts, and are added.
    * Dicts, tuples and dataclasses are joined entry by entry. A list with an entry for each row is concatenated, and so
      are lists of different lengths; other lists are joined entry by entry.
    * Anything else must be equal for all parts. ``ValueError`` if the outputs have no common form.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    names = sorted({type(output).__name__ for output in outputs})
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)}, which cannot be joined; {_WAY_OUT}")
    if isinstance(first, Tensor | np.ndarray):
        return _join_tensors(outputs, rows) if isinstance(first, Tensor) else _concatenated(np.concatenate, outputs, 0)
    if isinstance(first, Mapping):
        return _join_dicts(outputs, rows)
    if isinstance(first, list) and _is_of_rows(outputs, rows):
        return [entry for output in outputs for entry in output]
    if isinstance(first, list | tuple):
        return _join_entries(outputs, rows)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        return dataclasses.replace(
            first, **{name: join_outputs([getattr(output, name) for output in outputs], rows) for name in names}
        )
    # A bool is an Integral too, but a flag, not a count.
    if isinstance(first, bool) or not isinstance(first, numbers.Real):
        return _same(outputs)
    return sum(outputs) if isinstance(first, numbers.Integral) else _mean(outputs, rows)


def _join_tensors(outputs: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    first = outputs[0]
    if first.dim() == 0:
        if first.dtype == torch.bool:
            return torch.tensor(_same([bool(output) for output in outputs]), device=first.device)
        is_mean = first.is_floating_point() or first.is_complex()
        joined: Tensor = _mean(outputs, rows).to(first.dtype) if is_mean else torch.stack(list(outputs)).sum()
        return joined
    is_one_packed_row = first.dim() > 1 and first.shape[0] == 1 < rows[0]
    whole: Tensor = _concatenated(torch.cat, outputs, 1 if is_one_packed_row else 0)
    return whole


def _join_dicts(outputs: Sequence[Mapping[Any, Any]], rows: Sequence[int]) -> Any:
    keys = set(outputs[0])
    if any(set(output) != keys for output in outputs):
        different = sorted(str(key) for output in outputs for key in keys ^ set(output))
        raise ValueError(f"a dict with {different[0]!r} for some parts only; return the same keys for all rows")
    joined: Any = copy.copy(outputs[0])  # keeps the class
    for key in outputs[0]:
        values = [output[key] for output in outputs]
        if key == "num_tokens":
            joined[key] = sum(values)
        elif key == "loss" and "num_tokens" in keys:
            joined[key] = _mean(values, [output["num_tokens"] for output in outputs])
        else:
            joined[key] = join_outputs(values, rows)
    return joined


def _join_entries(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    if len({len(output) for output in outputs}) > 1:
        raise ValueError(f"tuples with {sorted({len(output) for output in outputs})} entries; {_WAY_OUT}")
    entries = [join_outputs(entry, rows) for entry in zip(*outputs, strict=True)]
    kind: Any = type(outputs[0])
    return kind(*entries) if hasattr(kind, "_fields") else kind(entries)  # a namedtuple takes them one by one


def _is_of_rows(outputs: Sequence[list[Any]], rows: Sequence[int]) -> bool:
    """Return whether lists have an entry for each row, or lengths that fit nothing else."""
    # Parts of 2 and 1 rows: ["a", "b"] and ["c"] have an entry for each row; [x, y] and [z, w] are two results of
    # each part. Parts of 2 and 2 rows are ambiguous, unless [x, y] are tensors of [2, s].
    lengths = [len(output) for output in outputs]
    if lengths != list(rows):
        return len(set(lengths)) > 1
    return not all(
        isinstance(entry, Tensor) and entry.dim() > 0 and len(entry) == count
        for output, count in zip(outputs, rows, strict=True)
        for entry in output
    )


def _mean(values: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the weighted mean of scalars; a value without weight does not count, even if it is nan."""
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in counted) / sum(weights) if counted else values[0]


def _concatenated(concatenate: Any, outputs: Sequence[Any], dim: int) -> Any:
    try:
        return concatenate(outputs, dim)
    except (RuntimeError, ValueError) as error:
        shapes = " and ".join(sorted({str(list(output.shape)) for output in outputs}))
        raise ValueError(f"tensors of shapes {shapes}, which cannot be concatenated; {_WAY_OUT}") from error


def _same(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if any(output is not first and output != first for output in outputs):
        raise ValueError(f"different objects of type {type(first).__name__}, which cannot be joined; {_WAY_OUT}")
    return first
