# SPDX-License-Identifier: Apache-2.0
"""Rules that say which parts of Megatron's tensors equal which parts of Hugging Face's.

No value is ever computed. A Megatron tensor is a Hugging Face tensor under another name, rows of several tensors
(queries, keys and values; gate and up), a stack of several (experts), or a transposed one. So each rule returns a list
of :class:`Block`: a rectangle of the Megatron tensor and the equal rectangle of a Hugging Face tensor. Import and
export use the same list. Rules know nothing about ranks: a rank that holds a rectangle takes the blocks within it
(:meth:`Block.within`).

Megatron's names are the names in checkpoints. Layer weights are named without their prefix
(``self_attention.linear_qkv.weight``, ``self_attn.q_proj.weight``). ``weight_map.py`` applies the rules to a model.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from lightning_mcore.config.architecture import mamba_units

# Sizes or indices of a tensor or rectangle, one per axis
Shape = tuple[int, ...]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """A rectangle of a Megatron tensor, and where its values are in a Hugging Face tensor.

    Args:
        hf: Name of the Hugging Face tensor.
        hf_start: Index of the rectangle's first value in the Hugging Face tensor.
        start: Index of its first value in the Megatron tensor, which may have extra leading axes (size 1 in the block).
        shape: Shape in the Megatron tensor.
        transposed: Whether the last two axes of the Hugging Face tensor are swapped.
        steps: Stride along each axis of the Hugging Face tensor; empty if all are 1.
    """

    hf: str
    hf_start: Shape
    start: Shape
    shape: Shape
    transposed: bool = False
    steps: Shape = ()

    @property
    def hf_shape(self) -> Shape:
        """Shape in the Hugging Face tensor."""
        # A block of an expert stack has shape (1, rows, columns) where the expert's own tensor has two axes
        inner = self.shape[len(self.shape) - len(self.hf_start) :]
        return _swapped(inner) if self.transposed else inner

    @property
    def hf_index(self) -> tuple[slice, ...]:
        """Index of the rectangle in the Hugging Face tensor."""
        return index_of(self.hf_start, self.hf_shape, self.steps)

    def within(self, start: Shape, shape: Shape) -> "Block | None":
        """Return the part of the block inside a rectangle of the Megatron tensor; None if they do not overlap."""
        # Gate and up of 3 rows each fill rows 0-2 and 3-5. A TP rank with rows 0-3 takes gate rows 0-2 and up row 0:
        # for the up block, first=(3, 0), last=(4, columns), and `moved` is (0, 0).
        first = tuple(map(max, self.start, start))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, start, shape, strict=True))
        if any(a >= b for a, b in zip(first, last, strict=True)):
            return None
        # How far the overlap begins inside the block, without the extra leading axes
        moved = tuple(a - b for a, b in zip(first, self.start, strict=True))[len(self.shape) - len(self.hf_start) :]
        moved = _swapped(moved) if self.transposed else moved
        steps = self.steps or (1,) * len(moved)
        hf_start = tuple(a + b * step for a, b, step in zip(self.hf_start, moved, steps, strict=True))
        return replace(
            self, hf_start=hf_start, start=first, shape=tuple(b - a for a, b in zip(first, last, strict=True))
        )


def index_of(start: Shape, shape: Shape, steps: Shape = ()) -> tuple[slice, ...]:
    """Return the index of a rectangle that begins at ``start``, with strides ``steps`` (all 1 if empty)."""
    steps = steps or (1,) * len(start)
    # The stop is one past the last value, whatever the stride
    return tuple(slice(a, a + (n - 1) * step + 1, step) for a, n, step in zip(start, shape, steps, strict=True))


def _row_after_row(parts: list[tuple[str, int, int]], shape: Shape) -> list[Block]:
    """Return the blocks of a Megatron tensor whose rows are parts of Hugging Face tensors, one after the other.

    A part is the name of a tensor, its first row there, and a number of rows. With q at rows 0-3 of ``q_proj`` and k at
    rows 0-1 of ``k_proj``, the parts are ``("q_proj", 0, 4), ("k_proj", 0, 2)``: Megatron's rows 0-3 and 4-5.
    """
    rest, row, found = shape[1:], 0, []
    zeros = (0,) * len(rest)
    for name, hf_row, rows in parts:
        found.append(Block(name, (hf_row, *zeros), (row, *zeros), (rows, *rest)))
        row += rows
    return found


def _swapped(axes: Shape) -> Shape:
    return (*axes[:-2], axes[-1], axes[-2])


@runtime_checkable
class WeightRule(Protocol):
    """The interface of a rule; your own class may implement it."""

    @property
    def megatron(self) -> str:
        """Name of the Megatron tensor."""
        ...

    @property
    def in_fp32(self) -> bool:
        """Whether the Hugging Face model keeps the tensor in fp32, whatever the dtype of its other weights."""
        ...

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return the blocks of the Megatron tensor.

        Args:
            shape: Shape of the whole tensor (of one layer, not of one rank).
            fields: The model's settings, by Megatron's names.
        """
        ...


@dataclass(frozen=True)
class _OneToOne:
    """A Megatron tensor that corresponds to one Hugging Face tensor."""

    megatron: str
    hf: str
    in_fp32: bool = False


@dataclass(frozen=True)
class Rename(_OneToOne):
    """The same tensor under another name.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        in_fp32: Whether the Hugging Face model keeps it in fp32.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block: the whole tensor."""
        origin = (0,) * len(shape)
        return [Block(self.hf, origin, origin, shape)]


@dataclass(frozen=True)
class Transpose(_OneToOne):
    """A matrix that Hugging Face keeps transposed, as in GPT-2.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block: the whole tensor."""
        return [Block(self.hf, (0, 0), (0, 0), shape, transposed=True)]


@dataclass(frozen=True)
class Stack(_OneToOne):
    """A stack of matrices, one per expert, that Hugging Face also keeps as one tensor.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        transposed: Whether Hugging Face's matrices are transposed.
    """

    transposed: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block: the whole stack."""
        return [Block(self.hf, (0, 0, 0), (0, 0, 0), shape, self.transposed)]


@dataclass(frozen=True)
class InterleavedStack(Stack):
    """A :class:`Stack` in which Hugging Face alternates the rows of each expert's gate and up projections (or biases).

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        transposed: Whether Hugging Face's matrices are transposed.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block for the gates and one for the up projections."""
        # Of 6 rows, gates are 0, 2, 4 and ups 1, 3, 5; transposed, they are columns, hence the stride on the last axis
        rows, rest = shape[1] // 2, shape[2:]
        zeros = (0,) * len(rest)
        steps = (1, *(1 for _ in rest), 2) if self.transposed else (1, 2, *(1 for _ in rest))
        found = []
        for number in (0, 1):
            hf_start = (0, *zeros, number) if self.transposed else (0, number, *zeros)
            half = (shape[0], rows, *rest)
            found.append(Block(self.hf, hf_start, (0, number * rows, *zeros), half, self.transposed, steps))
        return found


@dataclass(frozen=True)
class Vocabulary(_OneToOne):
    """A matrix with one row per token. Megatron pads it with zero rows at the end.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block: the rows without padding."""
        origin = (0,) * len(shape)
        return [Block(self.hf, origin, origin, (fields["vocab_size"], *shape[1:]))]


@dataclass(frozen=True)
class Rows:
    """Tensors of equally many rows, one after the other, such as an MLP's gate and up projections.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's names, in order.
    """

    megatron: str
    hf: tuple[str, ...]
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block per Hugging Face tensor."""
        return _row_after_row([(name, 0, shape[0] // len(self.hf)) for name in self.hf], shape)


@dataclass(frozen=True)
class QueryKeyValue:
    """Projections (or their biases) that Megatron stores as one: the queries, key and value of each group of heads.

    With 4 heads in 2 groups and 2 channels per head, Megatron's rows are

    - group 0: query rows 0-3, key rows 0-1, value rows 0-1 (Megatron's rows 0-7);
    - group 1: query rows 4-7, key rows 2-3, value rows 2-3 (Megatron's rows 8-15).

    So the second of two tensor-parallel ranks, which holds rows 8-15, reads only the second half of each.

    Args:
        megatron: Megatron's name.
        query: Hugging Face's name of the queries.
        key: Hugging Face's name of the keys.
        value: Hugging Face's name of the values.
    """

    megatron: str
    query: str
    key: str
    value: str
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return three blocks per group of heads."""
        groups, channels = fields["num_query_groups"], fields["kv_channels"]
        query_rows = fields["num_attention_heads"] // groups * channels
        parts = []
        for group in range(groups):
            for name, rows in ((self.query, query_rows), (self.key, channels), (self.value, channels)):
                parts.append((name, group * rows, rows))
        return _row_after_row(parts, shape)


@dataclass(frozen=True)
class GatedQueryKeyValue(QueryKeyValue):
    """:class:`QueryKeyValue` with output gates, which Megatron stores after all queries of their group.

    Args:
        megatron: Megatron's name.
        query: Hugging Face's name of the queries.
        key: Hugging Face's name of the keys.
        value: Hugging Face's name of the values.
        gate: Hugging Face's name of the gates; None if the query tensor has each head's gate after its query.
    """

    gate: str | None = None

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return two blocks per head and two per group of heads."""
        groups, channels = fields["num_query_groups"], fields["kv_channels"]
        heads = fields["num_attention_heads"] // groups
        parts = []
        for group in range(groups):
            own = range(group * heads, (group + 1) * heads)
            # Places count head-sized pieces of the query tensor, which holds q0 g0 q1 g1 ... With 2 heads per group,
            # Megatron's group 0 is q0 q1 g0 g1 k0 v0, which takes places 0, 2, 1, 3 of the query tensor.
            if self.gate is None:
                queries = [(self.query, 2 * head) for head in own]
                gates = [(name, place + 1) for name, place in queries]
            else:
                queries, gates = [(self.query, head) for head in own], [(self.gate, head) for head in own]
            for name, place in (*queries, *gates, (self.key, group), (self.value, group)):
                parts.append((name, place * channels, channels))
        return _row_after_row(parts, shape)


@dataclass(frozen=True)
class DeltaNetRows:
    """Rows of the heads of a gated delta net or of Kimi delta attention, which Megatron stores key head by key head.

    Args:
        megatron: Megatron's name.
        parts: What one key head has, in Megatron's order. Each part is the name of a Hugging Face tensor and what lies
            together there for each key head: ``"key"`` (the channels of a key), ``"value"`` (the channels of its
            values) and ``"head"`` (one row per value head). If several parts name the same tensor, each fills it for
            all heads before the next part begins.
    """

    megatron: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block per part of each key head."""
        # Parts key, key, value of one tensor, 2 key heads of 2 channels and 4 value heads of 3: Megatron's head 0 has
        # rows 0-1, 4-5 and 8-13, and head 1 has 2-3, 6-7 and 14-19.
        heads, rows_of = _rows_of_heads(fields)
        found = []
        for head in range(heads):
            starts = dict.fromkeys((name for name, _ in self.parts), 0)
            for name, kinds in self.parts:
                rows = sum(rows_of[kind] for kind in kinds)
                found.append((name, starts[name] + head * rows, rows))
                starts[name] += heads * rows
        return _row_after_row(found, shape)


def _rows_of_heads(fields: Fields) -> tuple[int, dict[str, int]]:
    """Return the number of key heads in a layer with a memory, and how many rows of each kind one has."""
    if (sizes := fields["kimi_delta"]) is not None:
        size = sizes["linear_head_dim"]
        return sizes["linear_num_heads"], {"key": size, "value": size, "head": 1}
    if (sizes := fields["delta_net"]) is None:  # the model has no such layer
        return 0, {}
    heads, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"] // sizes["linear_num_key_heads"]
    keys, channels = sizes["linear_key_head_dim"], values * sizes["linear_value_head_dim"]
    return heads, {"key": keys, "value": channels, "head": values}


@dataclass(frozen=True)
class MambaRows:
    """Rows of a Mamba 2 layer, which Megatron stores unit by unit, and Hugging Face part by part.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        parts: What the tensor consists of, in order: ``"value"`` (the channels of heads), ``"vector"`` (the rows of all
            groups' memories) and ``"head"`` (one row for each head).
    """

    megatron: str
    hf: str
    parts: tuple[str, ...]
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block per part of each unit."""
        # Parts value and head of 4 heads of 2 channels, in 2 units: Megatron's unit 0 has rows 0-3 and 8-9, and unit 1
        # has 4-7 and 10-11.
        sizes, units = fields["mamba"], mamba_units(fields["mamba"])
        heads = sizes["mamba_num_heads"]
        vectors = sizes["mamba_num_groups"] * sizes["mamba_state_dim"]
        rows_of = {
            "value": heads * sizes["mamba_head_dim"] // units,
            "vector": vectors // units,
            "head": heads // units,
        }
        rows = [rows_of[part] for part in self.parts]
        starts = [units * start for start in itertools.accumulate(rows, initial=0)]
        own = [(start, count) for start, count in zip(starts, rows, strict=False)]
        return _row_after_row(
            [(self.hf, start + unit * count, count) for unit in range(units) for start, count in own], shape
        )


@dataclass(frozen=True)
class JoinedQueryKeyValue:
    """:class:`QueryKeyValue` for Hugging Face models with one tensor: all queries, then all keys, then all values.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
    """

    megatron: str
    hf: str
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return three blocks per group of heads."""
        keys = fields["num_attention_heads"] * fields["kv_channels"]
        starts = {"query": 0, "key": keys, "value": keys + fields["num_query_groups"] * fields["kv_channels"]}
        return [
            replace(block, hf=self.hf, hf_start=(starts[block.hf] + block.hf_start[0], *block.hf_start[1:]))
            for block in QueryKeyValue(self.megatron, "query", "key", "value").blocks(shape, fields)
        ]


@dataclass(frozen=True)
class Experts:
    """A stack of tensors, one per expert.

    Args:
        each: The rule for one expert, with ``{expert}`` in Hugging Face's names.
    """

    each: WeightRule

    @property
    def megatron(self) -> str:
        """Name of the stack."""
        return self.each.megatron

    @property
    def in_fp32(self) -> bool:
        """Whether the Hugging Face model keeps it in fp32."""
        return self.each.in_fp32

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return the blocks of every expert."""
        return [
            replace(
                block,
                hf=block.hf.replace("{expert}", str(expert)),
                start=(expert, *block.start),
                shape=(1, *block.shape),
            )
            for block in self.each.blocks(shape[1:], fields)
            for expert in range(shape[0])
        ]


def renamed(rule: WeightRule, name: Callable[[str], str]) -> WeightRule:
    """Return a rule of this file with other Hugging Face names, each of them ``name`` of its own."""
    if isinstance(rule, Experts):
        return replace(rule, each=renamed(rule.each, name))
    if isinstance(rule, DeltaNetRows):
        return replace(rule, parts=tuple((name(hf), kinds) for hf, kinds in rule.parts))
    if isinstance(rule, Rows):
        return replace(rule, hf=tuple(map(name, rule.hf)))
    if isinstance(rule, QueryKeyValue):
        return replace(rule, query=name(rule.query), key=name(rule.key), value=name(rule.value))
    known: Any = rule
    moved: WeightRule = replace(known, hf=name(known.hf))
    return moved
