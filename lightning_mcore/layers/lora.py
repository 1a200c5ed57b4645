# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on Megatron's layers, exact under tensor, sequence and expert parallelism.

A linear layer has one adapter per Hugging Face projection that it holds (``linear_qkv`` has three), so every adapter
that PEFT wrote can be continued. The A of one layer run as one product; each B's product is added to its rows of the
output (``adapter_products.py``). The adapter of an embedding looks up columns of A; the shared experts' gate adds its
adapter to its weight.

How an adapter is split follows the weight of its layer (s tokens, h inputs, r rank):

===================  ======================  ==========================  ==========================================
the layer            A                       B                           what is sent
===================  ======================  ==========================  ==========================================
column parallel      whole                   its rows, as the weight     backward: A x is summed [s, r]; with
                                                                         sequence parallelism it is gathered
row parallel, and    its columns             whole                       forward: A x is summed [s, r]; with sequence
the embedding                                                            parallelism it is reduced and scattered
neither              whole                   whole                       nothing
experts' own group   as above                as above                    gradients of the whole ones, because the
                                                                         dispatcher sums outputs and inputs' gradients
===================  ======================  ==========================  ==========================================

Under sequence parallelism a whole A of a column-parallel layer, and a whole B of a row-parallel one, see some of the
tokens. ``sequence_parallel`` on the parameter makes Megatron's ``finalize_model_grads`` add their gradients up.

``adapted_layers.py`` puts adapters on layers. ``hf/adapters.py`` knows which rows belong to which projection;
``config/lora.py`` has the settings.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.lora import LoRA
from lightning_mcore.layers.adapter_products import Places, Run, add_products
from lightning_mcore.layers.host_values import version_of
from lightning_mcore.parallel.groups import generator_of, process_group


@dataclass(frozen=True)
class Rows:
    """Rows of a layer's weight on this rank that belong to one projection."""

    start: int  # among this rank's rows
    hf_start: int  # the same row in the whole projection
    count: int


@dataclass(frozen=True)
class Projection:
    """A Hugging Face projection in a layer of this rank; ``hf/adapters.py`` makes them."""

    name: str  # Hugging Face's module name
    rows: tuple[Rows, ...]  # on this rank; none if only other ranks have it
    out_features: int  # of the whole projection
    in_features: int
    column: int  # the first of its columns on this rank
    padding: int = 0  # rows on this rank, after its own, that pad the vocabulary
    is_embedding: bool = False  # its weight is an embedding's, transposed: columns are tokens
    is_cut_unevenly: bool = False  # a rank may hold other rows than its equal, consecutive share

    @property
    def in_order(self) -> list[Rows]:
        """Its rows on this rank, in projection order."""
        return sorted(self.rows, key=lambda rows: rows.hf_start)

    @property
    def first_row(self) -> int:
        """The first row of the projection on this rank; 0 if it has none."""
        return self.in_order[0].hf_start if self.rows else 0

    @property
    def runs(self) -> list[Rows]:
        """Its rows on this rank, as runs that are consecutive in the projection; ``start`` counts its own rows."""
        found: list[Rows] = []
        place = 0
        for rows in self.in_order:
            if found and found[-1].hf_start + found[-1].count == rows.hf_start:
                found[-1] = replace(found[-1], count=found[-1].count + rows.count)
            else:
                found.append(Rows(place, rows.hf_start, rows.count))
            place += rows.count
        return found

    @property
    def own_rows(self) -> int:
        """How many of its rows are on this rank."""
        return sum(rows.count for rows in self.rows)


class Adapter(nn.Module):
    """The parameters of one projection's adapter on this rank, in the dtype and on the device of ``weight``.

    ``lora_A`` is [r, columns], ``lora_B`` [own rows and padding, r], ``lora_magnitude_vector`` (DoRA) [own rows and
    padding]. A rank without rows of the projection still has all of A, because A's gradient is summed over the ranks;
    its B and magnitudes are empty.
    """

    def __init__(self, projection: Projection, columns: int, lora: LoRA, weight: Tensor) -> None:
        super().__init__()
        self.projection = projection
        self.scale = lora.scale(projection.name)
        rank = lora.rank(projection.name)
        rows = projection.own_rows + projection.padding
        if projection.is_embedding:  # as in PEFT
            self.lora_A = nn.Parameter(weight.new_zeros(rank, columns))
            self.lora_B = nn.Parameter(torch.randn(rows, rank, generator=generator_of(projection.name)).to(weight))
        else:
            # Drawn whole on every rank, so that A does not depend on the layout.
            whole = _initial_a(projection, rank, lora)[:, projection.column : projection.column + columns]
            self.lora_A = nn.Parameter(whole.to(weight).contiguous())
            self.lora_B = nn.Parameter(weight.new_zeros(rows, rank), requires_grad=rows > 0)
        self.lora_magnitude_vector: nn.Parameter | None = None
        if lora.use_dora:
            self.lora_magnitude_vector = nn.Parameter(weight.new_zeros(rows), requires_grad=rows > 0)

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A [r, columns], B [rows, r] and DoRA's magnitudes [rows]; Megatron gathers parameters at this call."""
        return self.lora_A, self.lora_B, self.lora_magnitude_vector


def _initial_a(projection: Projection, rank: int, lora: LoRA) -> Tensor:
    """Return the whole A, [r, in_features] fp32."""
    generator, whole = generator_of(projection.name), torch.empty(rank, projection.in_features)
    if lora.init_lora_weights == "gaussian":
        return whole.normal_(std=1 / rank, generator=generator)
    return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


class Adapters(nn.ModuleDict):
    """The adapters of one layer.

    ``split`` is the weight's axis that is split over the ranks of ``group``: 0, 1, or None. An embedding's weight
    counts as transposed.
    """

    def __init__(
        self, layer: Any, projections: Sequence[Projection], lora: LoRA, split: int | None, experts_differ: bool
    ) -> None:
        parameter = "gate_weight" if isinstance(layer, SharedExpertMLP) else "weight"
        weight = layer._parameters[parameter]
        rows, columns = weight.shape[::-1] if isinstance(layer, VocabParallelEmbedding) else weight.shape
        super().__init__({p.name.rpartition(".")[2]: Adapter(p, columns, lora, weight) for p in projections})
        self.parameter = parameter
        self.enabled = True
        self.experts_differ = experts_differ  # in rank, or in having an adapter
        self.split = split
        self.group = group_of(layer) or process_group("tp")
        # TransformerEngine's layers of experts have no mode of parallelism. The token dispatcher sums their outputs and
        # input gradients, so change() sends nothing.
        of_experts = split is not None and getattr(layer, "parallel_mode", split) is None
        self.is_explicit = bool(getattr(layer, "explicit_expert_comm", of_experts))
        scatters = getattr(layer, "sequence_parallel", getattr(layer, "reduce_scatter_embeddings", False))
        self.is_sequence_parallel = bool(scatters) and not self.is_explicit and split is not None
        self.dropout = lora.lora_dropout
        self.sees_own_tokens = bool(getattr(weight, "sequence_parallel", False))
        self.uses_dora = lora.use_dora
        self._known: tuple[Any, Tensor] | None = None  # a state of the frozen weight, and its rows' squared lengths
        adapters: list[Adapter] = list(self.values())  # type: ignore[arg-type]
        self._adapters = adapters
        self._projections = {p.name.rpartition(".")[2]: p for p in projections}
        runs = _runs(adapters)
        order = _order(adapters, runs, rows)
        is_as_stacked = torch.equal(order, torch.arange(len(order)))
        self.order: Tensor | None
        self.register_buffer("order", None if is_as_stacked else order.to(weight.device), persistent=False)
        self._places, self._rows = Places.of(runs, len(adapters), rows), rows
        self._mark_parameters(weight)

    def _mark_parameters(self, weight: Tensor) -> None:
        """Set the attributes by which Megatron chooses the group that sums a gradient, and what counts in its norm."""
        whole_a, whole_b = self.split != 1, self.split != 0
        for name, parameter in self.named_parameters():
            is_whole = whole_a if name.endswith("lora_A") else whole_b
            sees_some_tokens = self.is_sequence_parallel and is_whole
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            parameter.sequence_parallel = (  # type: ignore[attr-defined]
                sees_some_tokens or getattr(weight, "sequence_parallel", False)
            )
            # The norm counts a whole one on tensor-parallel rank 0; parallel/chunks.py marks spread experts.
            split_along = -1 if is_whole else int(name.endswith("lora_A"))
            set_tensor_model_parallel_attributes(parameter, not is_whole, split_along, 1)

    def change(self, inputs: Tensor, output: Tensor, layer: Any, bias: Tensor | None) -> Tensor:
        """Return the layer's output with its adapters' added.

        ``inputs`` is what the layer multiplied by its weight: [s, b, h], for experts [tokens, h]. ``bias`` is what
        ``output`` already contains, None for none: DoRA's ratio applies to the output without it.
        """
        for adapter in self._adapters:
            adapter()  # overlap_param_gather gathers parameters at this call
        hidden = functional.linear(self._dropped(inputs), self._a())
        hidden = self._with_other_ranks(hidden) * self._scales(hidden)
        without = output if bias is None or not self.uses_dora else output - bias
        changed = self._added(without, hidden, bool(getattr(layer, "gather_output", False)))
        if not self.uses_dora:
            return changed
        changed = changed * self.ratio(layer.weight).to(output.dtype)
        return changed if bias is None else changed + bias

    def _added(self, output: Tensor, hidden: Tensor, is_gathered: bool) -> Tensor:
        """Return an output with the products of all B added; it has the rows of all ranks if it ``is_gathered``."""
        all_b = [self._summed(adapter.lora_B) if self.split == 1 else adapter.lora_B for adapter in self._adapters]
        if not is_gathered and output.dtype == hidden.dtype:
            return add_products(output, hidden, all_b, self._places)
        added = add_products(hidden.new_zeros(*hidden.shape[:-1], self._rows), hidden, all_b, self._places)
        if is_gathered:
            added = gather_from_tensor_model_parallel_region(added, group=self.group)
        return output + added

    def looked_up(self, tokens: Tensor, layer: Any) -> Tensor:
        """Return what an embedding's adapter adds to its output; ``tokens`` is [b, s] int64."""
        (adapter,) = self._adapters
        a, b, _ = adapter()
        if self.split is None:
            hidden = functional.embedding(tokens, a.t())
        else:
            own = (tokens >= layer.vocab_start_index) & (tokens < layer.vocab_end_index)
            hidden = functional.embedding((tokens - layer.vocab_start_index).where(own, 0), a.t()) * own[..., None]
        if layer.reduce_scatter_embeddings:
            hidden = hidden.transpose(0, 1).contiguous()
        return functional.linear(self._with_other_ranks(hidden) * adapter.scale, b)

    def changed(self, weight: Tensor) -> Tensor:
        """Return a gate's frozen weight, [1, columns], with its adapter added; differentiable by the adapter."""
        (adapter,) = self._adapters
        a, b, _ = adapter()
        changed: Tensor = weight + (b @ a) * adapter.scale
        return changed

    def _dropped(self, inputs: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return inputs
        # Ranks with the same inputs must drop the same ones; ranks with other tokens or columns draw their own mask.
        is_own = self.is_sequence_parallel or self.split == 1 or self.sees_own_tokens
        with get_cuda_rng_tracker().fork() if is_own else contextlib.nullcontext():
            return functional.dropout(inputs, self.dropout)

    def _with_other_ranks(self, hidden: Tensor) -> Tensor:
        """Return A x as this rank's B needs it, [s, b, r]; the module's table says what is sent."""
        if self.split is None or self.is_explicit or self.group.size() == 1:
            return hidden
        send: Any = {
            (0, False): copy_to_tensor_model_parallel_region,
            (0, True): partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True),
            (1, False): reduce_from_tensor_model_parallel_region,
            (1, True): reduce_scatter_to_sequence_parallel_region,
        }[self.split, self.is_sequence_parallel]
        brought: Tensor = send(hidden, group=self.group)
        return brought

    def _a(self) -> Tensor:
        """Return all projections' A, [sum of r, columns]; a single one uncopied, so that backward keeps no copy."""
        all_a: list[Tensor] = [adapter.lora_A for adapter in self._adapters]
        stacked = all_a[0] if len(all_a) == 1 else torch.cat(all_a)
        return self._summed(stacked) if self.split == 0 else stacked

    def _b(self) -> Tensor:
        """Return all projections' B as one matrix, [rows of this rank, sum of r]."""
        diagonal: Any = torch.block_diag
        all_b = [adapter.lora_B for adapter in self._adapters]
        stacked = self._in_rows(all_b[0] if len(all_b) == 1 else diagonal(*all_b))
        return self._summed(stacked) if self.split == 1 else stacked

    def _scales(self, like: Tensor) -> Tensor | float:
        """Return the factor of each column of the stacked B, [sum of r], or a float if all are equal."""
        scales = [(adapter.scale, adapter.lora_A.shape[0]) for adapter in self._adapters]
        if len({scale for scale, _ in scales}) == 1:
            return scales[0][0]
        return torch.cat([torch.full((rank,), scale, dtype=like.dtype, device=like.device) for scale, rank in scales])

    def _summed(self, parameters: Tensor) -> Tensor:
        """Sum the gradient over the experts' own tensor-parallel group, which Megatron does not do for adapters."""
        if self.is_explicit and self.group.size() > 1:
            send: Any = copy_to_tensor_model_parallel_region
            parameters = send(parameters, group=self.group)
        return parameters

    def _in_rows(self, stacked: Tensor) -> Tensor:
        """Move rows of the stacked projections to their places in the layer."""
        if self.order is None:
            return stacked
        padded = functional.pad(stacked, (0, 0, 0, 1) if stacked.dim() > 1 else (0, 1))
        return padded[self.order]

    def ratio(self, weight: Tensor) -> Tensor:
        """Return DoRA's factor for each row of ``W + scale * B A``, [rows of this rank] fp32, 1 without an adapter.

        Differentiable by the magnitudes; collective over the ranks that share W.
        """
        return self._magnitudes() / self._lengths(weight)

    @torch.no_grad()
    def merged(self, weight: Tensor, ratio: Tensor | None) -> Tensor:
        """Return the weight that does what W and its adapters do, computed in fp32, in W's dtype.

        An embedding's W is transposed. ``ratio`` is from :meth:`ratio`; None without DoRA.
        """
        added = self._in_rows(torch.cat([(x.lora_B.float() @ x.lora_A.float()) * x.scale for x in self._adapters]))
        whole = weight.float() + (added.t() if self._adapters[0].projection.is_embedding else added)
        return (whole if ratio is None else whole * ratio[:, None]).to(weight.dtype)

    def _magnitudes(self) -> Tensor:
        """Return the trained magnitude of each row on this rank, 1 without an adapter."""
        lengths = torch.cat([x.lora_magnitude_vector for x in self._adapters if x.lora_magnitude_vector is not None])
        return self._in_rows(lengths - 1) + 1  # rows without an adapter are padded with 0

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """Return the length of each row of ``W + scale * B A``, a constant for autograd; 1 without an adapter."""
        # With c = b A, row by row: |w + c|^2 = |w|^2 + 2 w.c + |c|^2, where w.c = (w A^T).b and |c|^2 = b (A A^T) b^T.
        own = self._squares(weight)
        weight, a, b = weight.float(), torch.cat([x.lora_A for x in self._adapters]).float(), self._b().float()
        b = b * self._scales(b)
        mixed, of_a = self._over_columns(weight @ a.t()), self._over_columns(a @ a.t())
        squares = own + 2 * (mixed * b).sum(1) + ((b @ of_a) * b).sum(1)
        if self.order is None:
            return squares.sqrt()
        absent = self.order.eq(sum(x.lora_B.shape[0] for x in self._adapters))
        return squares.sqrt().masked_fill(absent, 1.0)

    def _squares(self, weight: Tensor) -> Tensor:
        """Return the squared length of each row of W, computed again only if W has changed."""
        state = (weight.data_ptr(), version_of(weight), weight.dtype)
        if self._known is None or self._known[0] != state:
            with torch.inference_mode(False), torch.no_grad():  # training reads it after an evaluation
                self._known = state, self._over_columns(weight.detach().float().square().sum(1))
        return self._known[1]

    def _over_columns(self, part: Tensor) -> Tensor:
        """Sum in place over the ranks that have other columns of the weight."""
        if self.split == 1 and self.group.size() > 1:
            dist.all_reduce(part, group=self.group)
        return part

    @torch.no_grad()
    def start_magnitudes(self, weight: Tensor) -> None:
        """Set the magnitudes to the lengths of W's rows; collective over the ranks that share them."""
        lengths = self._lengths(weight)
        for adapter in self._adapters:
            assert adapter.lora_magnitude_vector is not None
            own = [lengths[rows.start : rows.start + rows.count] for rows in adapter.projection.in_order]
            adapter.lora_magnitude_vector[: adapter.projection.own_rows].copy_(torch.cat([lengths[:0], *own]))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters as sharded tensors of whole projections."""
        assert metadata is not None
        axes = {}
        for name, _ in self.named_parameters():
            axis = 1 if name.endswith("lora_A") else 0
            if self.split == axis and self.group.size() > 1:
                axes[name] = axis
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters()),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.split != 0:
            return found
        placed: dict[str, Any] = {}
        for name, entry in found.items():
            adapter, _, part = name.removeprefix(prefix).rpartition(".")
            projection = self._projections[adapter]
            if part == "lora_A" or not projection.is_cut_unevenly:
                placed[name] = entry
            elif len(projection.runs) > 1:
                placed[name] = _in_runs(entry, projection)
            elif projection.rows:
                placed[name] = _placed(entry, projection.out_features, projection.first_row)
        return placed


def _placed(entry: Any, rows: int, first: int) -> Any:
    """Return a sharded tensor that starts at row ``first`` of ``rows``."""
    axis = entry.prepend_axis_num
    shape, offset = list(entry.global_shape), list(entry.global_offset)
    if (shape[axis], offset[axis]) == (rows, first):
        return entry
    shape[axis], offset[axis] = rows, first
    return replace(entry, global_shape=tuple(shape), global_offset=tuple(offset), axis_fragmentations=None)


def _in_runs(entry: Any, projection: Projection) -> Any:
    """Return a sharded tensor as several, one for each run of consecutive rows in the whole projection."""

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
        found = []
        for run in projection.runs:
            part = data[run.start : run.start + run.count]
            own = replace(entry, key=key, replica_id=replica_id, data=part, dtype=part.dtype, local_shape=part.shape)
            own = replace(own, axis_fragmentations=None)
            found.append(_placed(own, projection.out_features, run.hf_start))
        return found

    return ShardedTensorFactory(entry.key, entry.data, build, torch.cat, entry.replica_id)


def group_of(layer: Any) -> Any:
    """Return the group that splits a layer's weight; TransformerEngine has another name for an expert's."""
    return getattr(layer, "_tp_group", None) or layer.tp_group


def _runs(adapters: Sequence[Adapter]) -> list[Run]:
    """Return where the rows of each adapter are among the layer's."""
    runs = []
    for index, adapter in enumerate(adapters):
        first = 0
        for own in adapter.projection.in_order:
            runs.append(Run(index, own.start, first, own.count))
            first += own.count
    return runs


def _order(adapters: Sequence[Adapter], runs: Sequence[Run], rows: int) -> Tensor:
    """Return for each row of the layer its row among all stacked B; one past the last if it has no adapter."""
    # 2 key heads, each with 2 query heads, of size 1: the layer's rows are q0 q1 k0 v0 q2 q3 k1 v1. Stacked, q k v are
    # q0 q1 q2 q3 k0 k1 v0 v1, so the order is 0 1 4 6 2 3 5 7.
    begins = [0, *accumulate(len(adapter.lora_B) for adapter in adapters)]
    order = torch.full((rows,), begins[-1], dtype=torch.int64)
    for run in runs:
        begin = begins[run.adapter] + run.first
        order[run.start : run.start + run.count] = torch.arange(begin, begin + run.count)
    return order
