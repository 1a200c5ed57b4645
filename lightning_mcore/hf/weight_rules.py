# SPDX-License-Identifier: Apache-2.0
"""Rules for the equal parts of Megatron's tensors and Hugging Face's.

No values are computed between the two. A Megatron tensor is a Hugging Face tensor with another name, or rows of several
(queries, keys and values; gate and up), or a stack of several (experts), or a transposed one. So a rule returns a list
of :class:`Block`: a rectangle of Megatron's tensor and the equal rectangle of a Hugging Face tensor. The same list
serves both directions. Rules do not know how a tensor is split over ranks: a rank with a rectangle takes the blocks
within it.

Megatron's names are those in checkpoints. Names of weights of a layer are given without their prefix
(``self_attention.linear_qkv.weight``, ``self_attn.q_proj.weight``). ``weight_map.py`` applies rules to a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

Shape = tuple[int, ...]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """A rectangle of a Megatron tensor, and where its values are in a Hugging Face tensor.

    Args:
        hf: Name of the Hugging Face tensor.
        hf_start: The index at which the rectangle begins in it.
        start: The index at which it begins in Megatron's tensor, which may have more leading axes, of size 1 in the
            block.
        shape: Its shape in Megatron's tensor.
        transposed: Whether the last two axes of the Hugging Face tensor are swapped.
        steps: For each axis of the Hugging Face tensor, the distance between neighbouring values of the rectangle;
            empty if it is 1 everywhere.
    """

    hf: str
    hf_start: Shape
    start: Shape
    shape: Shape
    transposed: bool = False
    steps: Shape = ()

    @property
    def hf_shape(self) -> Shape:
        """Shape of the rectangle in the Hugging Face tensor."""
        inner = self.shape[len(self.shape) - len(self.hf_start) :]
        return _swapped(inner) if self.transposed else inner

    @property
    def hf_index(self) -> tuple[slice, ...]:
        """Index of the rectangle in the Hugging Face tensor."""
        return index_of(self.hf_start, self.hf_shape, self.steps)

    def within(self, start: Shape, shape: Shape) -> "Block | None":
        """Return the part of the block within a rectangle of Megatron's tensor; None if they do not overlap."""
        first = tuple(map(max, self.start, start))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, start, shape, strict=True))
        if any(a >= b for a, b in zip(first, last, strict=True)):
            return None
        moved = tuple(a - b for a, b in zip(first, self.start, strict=True))[len(self.shape) - len(self.hf_start) :]
        moved = _swapped(moved) if self.transposed else moved
        steps = self.steps or (1,) * len(moved)
        hf_start = tuple(a + b * step for a, b, step in zip(self.hf_start, moved, steps, strict=True))
        return replace(
            self, hf_start=hf_start, start=first, shape=tuple(b - a for a, b in zip(first, last, strict=True))
        )


def index_of(start: Shape, shape: Shape, steps: Shape = ()) -> tuple[slice, ...]:
    """Return the index of a rectangle that begins at ``start``; ``steps`` as in :class:`Block`."""
    steps = steps or (1,) * len(start)
    return tuple(slice(a, a + (n - 1) * step + 1, step) for a, n, step in zip(start, shape, steps, strict=True))


def _swapped(axes: Shape) -> Shape:
    return (*axes[:-2], axes[-1], axes[-2])


class WeightRule(Protocol):
    """The interface of a rule; your own class may implement it."""

    @property
    def megatron(self) -> str:
        """Name of the Megatron tensor."""
        ...

    @property
    def in_fp32(self) -> bool:
        """Whether the Hugging Face model keeps it in fp32, whatever the dtype of its other weights."""
        ...

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return the blocks of a Megatron tensor.

        Args:
            shape: Its shape.
            fields: Settings of the model, by Megatron's names.
        """
        ...


@dataclass(frozen=True)
class _OneToOne:
    """A Megatron tensor that corresponds to one Hugging Face tensor.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        in_fp32: Whether the Hugging Face model keeps it in fp32.
    """

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
        """Return one block, the whole tensor."""
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
        """Return one block, the whole tensor."""
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
        """Return one block, the whole stack."""
        return [Block(self.hf, (0, 0, 0), (0, 0, 0), shape, self.transposed)]


@dataclass(frozen=True)
class InterleavedStack(Stack):
    """The same with the gate and the up projection of each expert, or their biases, whose rows Hugging Face alternates.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
        transposed: Whether Hugging Face's matrices are transposed.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return a block for the gates and one for the up projections."""
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
    """A matrix with a row for each token; Megatron's has additional padding rows, which are zero.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
    """

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return one block, the rows without padding."""
        origin = (0,) * len(shape)
        return [Block(self.hf, origin, origin, (fields["vocab_size"], *shape[1:]))]


@dataclass(frozen=True)
class Rows:
    """Tensors with equally many rows, one after the other: the gate and the up projection of an MLP.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's names, in order.
    """

    megatron: str
    hf: tuple[str, ...]
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return a block for each of them."""
        rows, rest = shape[0] // len(self.hf), shape[1:]
        zeros = (0,) * len(rest)
        return [Block(name, (0, *zeros), (number * rows, *zeros), (rows, *rest)) for number, name in enumerate(self.hf)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Projections, or their biases, that Megatron stores as one: for each group of heads its queries, key and value.

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
        """Return three blocks for each group of heads."""
        groups, channels = fields["num_query_groups"], fields["kv_channels"]
        query_rows = fields["num_attention_heads"] // groups * channels
        rest, row, found = shape[1:], 0, []
        zeros = (0,) * len(rest)
        for group in range(groups):
            for name, rows in ((self.query, query_rows), (self.key, channels), (self.value, channels)):
                found.append(Block(name, (group * rows, *zeros), (row, *zeros), (rows, *rest)))
                row += rows
        return found


@dataclass(frozen=True)
class GatedQueryKeyValue(QueryKeyValue):
    """The same with output gates: Megatron has a group's gates after its queries, Hugging Face each after its query."""

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return two blocks for each head, and two for each group of heads."""
        groups, channels = fields["num_query_groups"], fields["kv_channels"]
        heads = fields["num_attention_heads"] // groups
        rest, row, found = shape[1:], 0, []
        zeros = (0,) * len(rest)
        for group in range(groups):
            queries = [(self.query, 2 * head) for head in range(group * heads, (group + 1) * heads)]
            gates = [(name, place + 1) for name, place in queries]
            for name, place in (*queries, *gates, (self.key, group), (self.value, group)):
                found.append(Block(name, (place * channels, *zeros), (row, *zeros), (channels, *rest)))
                row += channels
        return found


@dataclass(frozen=True)
class DeltaNetRows:
    """Rows for the heads of gated delta nets, which Megatron's tensor has in the order of key heads.

    Args:
        megatron: Megatron's name.
        parts: What a key head has, in order: the name of a Hugging Face tensor, and what lies together there for each
            head, of ``"key"`` (the channels of a key), ``"value"`` (those of its values) and ``"head"`` (a row for each
            value head). Parts of the same tensor follow one another in it, each for all heads.
    """

    megatron: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return a block for each part of each key head."""
        sizes = fields["delta_net"]
        heads, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"] // sizes["linear_num_key_heads"]
        rows_of = {
            "key": sizes["linear_key_head_dim"],
            "value": values * sizes["linear_value_head_dim"],
            "head": values,
        }
        rest, row, found = shape[1:], 0, []
        zeros = (0,) * len(rest)
        for head in range(heads):
            starts = dict.fromkeys((name for name, _ in self.parts), 0)
            for name, kinds in self.parts:
                rows = sum(rows_of[kind] for kind in kinds)
                found.append(Block(name, (starts[name] + head * rows, *zeros), (row, *zeros), (rows, *rest)))
                starts[name] += heads * rows
                row += rows
        return found


@dataclass(frozen=True)
class JoinedQueryKeyValue:
    """The same for a Hugging Face model that stores them as one, first all queries, then all keys, then all values.

    Args:
        megatron: Megatron's name.
        hf: Hugging Face's name.
    """

    megatron: str
    hf: str
    in_fp32: bool = False

    def blocks(self, shape: Shape, fields: Fields) -> list[Block]:
        """Return three blocks for each group of heads."""
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
        each: The rule of one expert, with ``{expert}`` in Hugging Face's names.
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
