# SPDX-License-Identifier: Apache-2.0
"""Frozen linear layers whose weights are kept in 4 bits (NF4), for adapters on top: QLoRA.

A weight is stored as bitsandbytes stores each Hugging Face projection: in blocks of 64 values of a row, with one scale
("length") per block; double quantization keeps those in 8 bits, in blocks of 256. Each rank quantizes its own rows and
columns. A layer makes its weight when it runs, and again in backward; in between only the 4 bits are kept.
``hf/adapters.py`` calls :func:`quantize` for each layer.

Source: ``quantize_4bit`` and ``dequantize_4bit`` of bitsandbytes 0.50.2.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mcore.layers.autograd import made_again
from lightning_mcore.layers.lora import Projection, group_of

# A 4096 x 4096 weight has 8 MiB of codes and 1 MiB of lengths, 356 KiB with double quantization. bf16 takes 32 MiB.
_BLOCK = 64
_OF_LENGTHS = 256


def require_bitsandbytes() -> Any:
    """Return ``bitsandbytes.functional``; ModuleNotFoundError if it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModuleNotFoundError("quantization='nf4' needs bitsandbytes; pip install 'lightning-mcore[qlora]'")
    import bitsandbytes.functional

    return bitsandbytes.functional


@functools.cache
def _table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return levels on a device, one tensor for all layers: a copy in each pass would wait for the GPU."""
    return torch.tensor(levels, device=device)


class NF4Weight(nn.Module):
    """A weight, [rows, columns], in 4 bits on this rank.

    Every row belongs to one of ``projections``. ``split`` is the axis that the ranks of ``group`` share, None if each
    has the whole. ``is_double`` keeps block lengths in 8 bits.
    """

    codes: Tensor  # two values to a byte
    lengths: Tensor
    scales: Tensor  # one for 256 lengths of a projection
    offsets: Tensor  # mean lengths
    row: Tensor

    def __init__(
        self, weight: Tensor, projections: Sequence[Projection], group: Any, split: int | None, is_double: bool
    ) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        self.is_double = is_double
        codes, state = require_bitsandbytes().quantize_4bit(weight.contiguous(), blocksize=_BLOCK, quant_type="nf4")
        self.levels = tuple(state.code.tolist())
        self._keep("codes", codes)
        lengths = state.absmax.view(weight.shape[0], -1)
        if is_double:
            self._quantize_lengths(lengths, projections, None if split is None else group)
        else:
            self._keep("lengths", lengths)

    def _quantize_lengths(self, lengths: Tensor, projections: Sequence[Projection], group: Any) -> None:
        rows, blocks = lengths.shape
        kept = torch.empty(rows, blocks, dtype=torch.uint8, device=lengths.device)
        row = torch.empty(rows, 3, dtype=torch.int64)  # number of the projection, its first scale, first block
        scales: list[Tensor] = []
        offsets: list[Tensor] = []
        for number, projection in enumerate(projections):
            first = projection.column // _BLOCK
            columns = slice(first, first + blocks)
            # The mean and the blocks of 256 span the whole projection, so that weights do not depend on the layout.
            whole = lengths.new_zeros(projection.out_features, projection.in_features // _BLOCK)
            for own in projection.rows:
                whole[own.hf_start : own.hf_start + own.count, columns] = lengths[own.start : own.start + own.count]
            if group is not None:
                dist.all_reduce(whole, group=group)
            offset = whole.flatten().mean()
            centred = whole.flatten() - offset
            inner, state = require_bitsandbytes().quantize_blockwise(centred, blocksize=_OF_LENGTHS)
            self.inner_levels = tuple(state.code.tolist())
            for own in projection.rows:
                here = slice(own.start, own.start + own.count)
                kept[here] = inner.view_as(whole)[own.hf_start : own.hf_start + own.count, columns]
                row[here, 0], row[here, 1] = number, sum(map(len, scales))
                row[here, 2] = torch.arange(own.hf_start, own.hf_start + own.count) * whole.shape[1] + first
            scales.append(state.absmax)
            offsets.append(offset)
        self._keep("lengths", kept)
        self._keep("scales", torch.cat(scales))
        self._keep("offsets", torch.stack(offsets))
        self._keep("row", row.to(lengths.device))

    def _keep(self, name: str, values: Tensor) -> None:
        """Register a buffer as bytes, so that a change of the model's precision leaves it alone."""
        self.register_buffer(name, values.contiguous().view(torch.uint8), persistent=False)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, [rows, columns], in ``dtype``; None for the dtype that the weight had."""
        functional = require_bitsandbytes()
        blocks = self.shape[1] // _BLOCK
        if self.is_double:
            levels = _table(self.inner_levels, self.codes.device)
            row = self.row.view(torch.int64).view(-1, 3)
            scale = row[:, 1:2] + (row[:, 2:] + torch.arange(blocks, device=row.device)) // _OF_LENGTHS
            lengths = levels[self.lengths.long()] * self.scales.view(torch.float32)[scale]
            lengths = lengths + self.offsets.view(torch.float32)[row[:, :1]]
        else:
            lengths = self.lengths.view(torch.float32)
        state = functional.QuantState(
            absmax=lengths.flatten(),
            shape=self.shape,
            dtype=self.dtype,
            blocksize=_BLOCK,
            code=_table(self.levels, self.codes.device),
            quant_type="nf4",
        )
        weight: Tensor = functional.dequantize_4bit(self.codes, state)
        return weight if dtype is None else weight.to(dtype)


class _Quantized:
    """Put before a linear layer's class: its weight is made from 4 bits when it runs."""

    quantized: NF4Weight
    made: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The weight, made anew outside ``forward``."""
        return self.quantized.dense() if self.made is None else self.made

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with a weight that lives for this call only."""
        stored, dtype = self.quantized, inputs.dtype
        made = stored.dense(dtype)
        with made_again(made, lambda: stored.dense(dtype)):
            object.__setattr__(self, "made", made)
            try:
                return super().forward(inputs, *args, **kwargs)  # type: ignore[misc]
            finally:
                object.__setattr__(self, "made", None)


def check_quantization(transformer_impl: str, base: str | None) -> None:
    """Reject 4-bit weights without bitsandbytes, Megatron's own layers, or a model to read (``base``)."""
    check_quantized_layers(transformer_impl)
    if base is None:
        raise ValueError("quantization='nf4' needs weights that are read from a model; use MCoreGPT.from_pretrained")
    require_bitsandbytes()


def check_quantized_layers(transformer_impl: str) -> None:
    """Raise ValueError for layers that cannot have 4-bit weights."""
    if transformer_impl != "local":
        raise ValueError("quantization='nf4' works on Megatron's own layers only; set transformer_impl='local'")


def check_blocks(columns: Mapping[str, int], tp: int, etp: int) -> None:
    """Raise ValueError if the rows of a weight do not hold whole blocks on a rank; ``columns`` is by weight name."""
    for name, whole in columns.items():
        if name.startswith("decoder.") and name.endswith(".weight") and ("linear_" in name or "_latent_proj" in name):
            is_split = name.endswith(("linear_proj.weight", "linear_out.weight", "linear_fc2.weight"))
            _require_blocks(name, whole // ((etp if ".experts.experts." in name else tp) if is_split else 1))


def _require_blocks(name: str, columns: int) -> None:
    if columns % _BLOCK:
        raise ValueError(
            f"{name} has {columns} columns on each rank, and quantization='nf4' keeps blocks of {_BLOCK}; choose a"
            " smaller tensor_model_parallel_size, or leave quantization out"
        )


def quantize(layer: Any, projections: Sequence[Projection], split: int | None, double_quantization: bool) -> None:
    """Keep a layer's weight, and not its adapters, in 4 bits, in place; collective over the ranks that share it."""
    _require_blocks(projections[0].name, layer.weight.shape[1])
    stored = NF4Weight(layer.weight.detach(), projections, group_of(layer), split, double_quantization)
    del layer.weight
    layer.__class__ = type(type(layer).__name__, (_Quantized, type(layer)), {})
    layer.add_module("quantized", stored)
