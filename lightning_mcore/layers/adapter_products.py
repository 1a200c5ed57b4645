# SPDX-License-Identifier: Apache-2.0
"""The products of several adapters' B, added to the output of the one layer that holds their projections.

A layer's rows belong to its projections in turn. One matrix with the B of all would be zero in most places, and rows in
another order than the B's would have to be moved. Here each product is added to its own rows of the output::

    linear_fc1   gate gate gate gate | up up up up        one part: 4 rows of gate, then 4 of up
    linear_qkv   q0 q1 k0 v0 | q2 q3 k1 v1                two equal parts: 2 rows of q, one of k, one of v in each
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of a layer that belong to one adapter, in each of ``Places.parts`` equal parts of its rows."""

    adapter: int
    start: int  # among the rows of a part
    first: int  # the same row among the adapter's
    count: int  # in a part


@dataclass(frozen=True)
class Places:
    """Where the rows of each adapter are in a layer of this rank; other rows have no adapter."""

    parts: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Sequence[Run], adapters: int, rows: int) -> "Places":
        """Return the places of all runs of a layer with this many rows, in as many equal parts as it has."""
        parts = max(1, len(runs) // adapters)
        length = rows // parts
        begin = [run for run in runs if run.start < length]
        repeated = {
            replace(run, start=run.start + part * length, first=run.first + part * run.count)
            for run in begin
            for part in range(parts)
        }
        is_repeated = parts * length == rows and repeated == set(runs)
        return cls(parts, tuple(begin)) if is_repeated else cls(1, tuple(runs))

    def rows_of(self, run: Run, b: Tensor) -> Tensor:
        """Return the rows of a B that belong to a run, [parts * count, r]."""
        return b[run.first : run.first + self.parts * run.count]


def add_products(output: Tensor, hidden: Tensor, all_b: Sequence[Tensor], places: Places) -> Tensor:
    """Return a layer's output with the products of its adapters added, [..., rows]; differentiable.

    ``hidden`` are A x of all adapters, [..., sum of r], in the output's dtype; ``all_b`` are [own rows and padding, r].
    The output may be changed in place.
    """
    if len(all_b) == 1 and places.runs == (Run(0, 0, 0, output.size(-1)),) and len(all_b[0]) == output.size(-1):
        rows = output.reshape(-1, output.size(-1))
        return torch.addmm(rows, hidden.reshape(-1, hidden.size(-1)), all_b[0].t()).view(output.shape)
    found: Tensor = _Sum.apply(output, hidden, places, *all_b)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, places: Places, *all_b: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, *all_b)
        ctx.places = places
        if output.is_contiguous() and not output._is_view() and not (output.is_leaf and output.requires_grad):
            ctx.mark_dirty(output)  # no layer needs its own output in backward, and a copy takes as long as a product
            found = output
        else:
            found = output.clone(memory_format=torch.contiguous_format)
        of_part = found.view(-1, places.parts, found.size(-1) // places.parts)
        all_hidden = _by_adapter(hidden, all_b)
        for run in places.runs:
            into, own = of_part[..., run.start : run.start + run.count], all_hidden[run.adapter]
            b = places.rows_of(run, all_b[run.adapter])
            if places.parts == 1:
                into[:, 0].addmm_(own, b.t())
            else:
                into.transpose(0, 1).baddbmm_(
                    own.expand(places.parts, -1, -1), b.view(places.parts, run.count, -1).transpose(1, 2)
                )
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the output, of hidden and of each B."""
        hidden, *all_b = ctx.saved_tensors
        places: Places = ctx.places
        all_hidden = _by_adapter(hidden, all_b)
        of_part = gradients[0].reshape(-1, places.parts, gradients[0].size(-1) // places.parts)
        of_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        into = _by_adapter(of_hidden, all_b)
        of_b = [torch.zeros_like(b) for b in all_b]
        for run in places.runs:
            own = of_part[..., run.start : run.start + run.count].flatten(1)  # copied if there are several parts
            into[run.adapter].addmm_(own, places.rows_of(run, all_b[run.adapter]))
            torch.mm(own.t(), all_hidden[run.adapter], out=places.rows_of(run, of_b[run.adapter]))
        needs = ctx.needs_input_grad
        return (
            gradients[0] if needs[0] else None,
            of_hidden if needs[1] else None,
            None,
            *(gradient if need else None for gradient, need in zip(of_b, needs[3:], strict=True)),
        )


def _by_adapter(hidden: Tensor, all_b: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split the A x of all adapters, [..., sum of r], into one view for each adapter, [tokens, r]."""
    return torch.split(hidden.reshape(-1, hidden.size(-1)), [b.size(1) for b in all_b], dim=1)
