# SPDX-License-Identifier: Apache-2.0
"""Give Megatron's layers adapters, freeze what is below them, merge them, and switch them off.

An adapted layer keeps its class's name, its names and its weights. It gets a child ``lora`` with its adapters
(``lora.py``), and a class put before its own that adds what they compute::

    linear_qkv.weight                  frozen
    linear_qkv.lora.q_proj.lora_A      trained; likewise lora_B, and k_proj and v_proj

``hf/adapters.py`` and ``own_adapters.py`` choose the layers.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.lora import NOT_MERGED, LoRA
from lightning_mcore.layers.direct_linear import is_plain, multiply
from lightning_mcore.layers.latent_experts import WholeLinear
from lightning_mcore.layers.lora import Adapters, Projection

ADAPTERS = "lora"
"""The name of a layer's child that holds its adapters."""

LINEAR: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear, WholeLinear)
if te.HAVE_TE:
    LINEAR += (te.TELinear, te.TELayerNormColumnParallelLinear)
ADAPTABLE: tuple[type, ...] = (*LINEAR, VocabParallelEmbedding, Router, SharedExpertMLP)


class _Adapted:
    """A class put before a layer's own; subclasses add the output of its adapters."""

    lora: Adapters

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded tensors of the layer and of its adapters."""
        inner = f"{prefix}{ADAPTERS}."
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        # The layer's own method may list adapters as if they were whole on every rank.
        own = {name: entry for name, entry in own.items() if not name.startswith(inner)}
        if not self.lora.experts_differ:
            return own | self.lora.sharded_state_dict(inner, sharded_offsets, metadata)
        # Expert 5 of 8 has index 5 of a first axis of 8 in one tensor for all. If the others' adapters have another
        # shape, or are not there, no such tensor exists. Its own is then called lora.5.up_proj.lora_A.
        *outer, (_, expert, _) = sharded_offsets
        adapters = self.lora.sharded_state_dict(inner, tuple(outer), metadata)
        for name, entry in adapters.items():
            adapters[name] = replace(entry, key=f"{inner}{expert}.{entry.key.removeprefix(inner)}")
        return own | adapters


class _AdaptedLinear(_Adapted):
    """Adds the adapters of a linear layer to what it returns."""

    is_plain: bool  # before it was adapted

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer and its adapters."""
        if self.is_plain and _is_frozen(self, inputs):
            output, bias = multiply(self, inputs, *args, **kwargs)
        else:
            output, bias = super().forward(inputs, *args, **kwargs)  # type: ignore[misc]
        if not self.lora.enabled:
            return output, bias
        # Without skip_bias_add the bias is already in the output.
        added = getattr(self, "bias", None) if bias is None else None
        if added is not None and added.numel() == 0:  # how TransformerEngine says that there is none
            added = None
        return self.lora.change(_normalised(self, inputs), output, self, added), bias


class _AdaptedEmbedding(_Adapted):
    """Adds the output of an embedding's adapter."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the embedding and its adapter."""
        output: Tensor = super().forward(tokens)  # type: ignore[misc]
        return output + self.lora.looked_up(tokens, self) if self.lora.enabled else output


def adapted_weight(layer: Any) -> nn.Parameter:
    """Return the frozen weight that a layer's adapters belong to."""
    weight: nn.Parameter = layer._parameters[layer.lora.parameter]
    return weight


def _is_frozen(layer: Any, inputs: Tensor) -> bool:
    """Return whether a layer may multiply by its weight without Megatron's function.

    That function keeps a trained weight's gradient in Megatron's buffer and, under autocast, the weight itself for
    backward instead of a copy in another dtype.
    """
    weight = layer._parameters.get("weight")  # a quantized layer has none
    return weight is not None and not weight.requires_grad and not torch.is_autocast_enabled(inputs.device.type)


def _changed_weight(layer: Any) -> Tensor:
    """Return the weight that shared experts read: their gate's frozen one, plus its adapter."""
    weight = adapted_weight(layer)
    adapters: Adapters = layer.lora
    return adapters.changed(weight) if adapters.enabled else weight


def _normalised(layer: Any, inputs: Tensor) -> Tensor:
    """Return what a layer multiplies by its weight; some TransformerEngine layers begin with a fused norm."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return inputs
    weight = weight + 1 if layer.zero_centered_gamma else weight
    if layer.normalization == "RMSNorm":
        return functional.rms_norm(inputs, weight.shape, weight, layer.eps)
    return functional.layer_norm(inputs, weight.shape, weight, layer.layer_norm_bias, layer.eps)


def adapt(
    layer: Any, projections: Sequence[Projection], lora: LoRA, split: int | None, experts_differ: bool = False
) -> None:
    """Give a layer of ``ADAPTABLE`` adapters, in place. With DoRA collective over the ranks that share the layer.

    The layer has its weights and is not wrapped yet. ``split`` is as in :class:`Adapters`. ``experts_differ`` says that
    the layer is in an expert, and that experts of a layer have different adapters.
    """
    adapters = Adapters(layer, projections, lora, split, experts_differ)
    base: Any = type(layer)

    def gating(router: Any, inputs: Tensor) -> Tensor:
        logits: Tensor = base.gating(router, inputs)
        return router.lora.change(inputs, logits, router, None) if router.lora.enabled else logits

    bases: tuple[type, ...] = (base,)  # a router has a base without attributes, which allows no other before it
    own: dict[str, Any] = {}
    if isinstance(layer, Router):
        own = {"gating": gating}
    elif isinstance(layer, SharedExpertMLP):
        own = {adapters.parameter: property(_changed_weight)}
    else:
        bases = (_AdaptedEmbedding if isinstance(layer, VocabParallelEmbedding) else _AdaptedLinear, base)
        own = {"is_plain": is_plain(layer)}
    layer.__class__ = type(base.__name__, bases, own)
    layer.add_module(ADAPTERS, adapters)
    if lora.use_dora:
        adapters.start_magnitudes(layer.weight)


def freeze(chunk: nn.Module) -> None:
    """Freeze a chunk, but let gradients flow to its first layer."""
    chunk.requires_grad_(False)
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Let gradients flow to the first layer: recomputation drops a block's gradients if its input needs none."""
    return output if output.requires_grad or not module.training else output.requires_grad_()


def add_bias_apart(chunk: nn.Module) -> None:
    """Let linear layers with a frozen weight and a trained bias add the bias in a step of its own.

    The functions of Megatron and TransformerEngine for a product with a frozen weight give the bias no gradient.
    """
    for layer in chunk.modules():
        bias = layer._parameters.get("bias")
        if not isinstance(layer, LINEAR) or bias is None or not bias.requires_grad or layer.weight.requires_grad:
            continue
        made: Any = layer
        if getattr(made, "te_return_bias", getattr(made, "skip_bias_add", True)):
            continue  # its caller adds the bias, or a WholeLinear, which gives it a gradient
        if hasattr(made, "te_return_bias"):
            made.te_return_bias = made.return_bias = True
            made.apply_bias = made.gemm_bias_unfused_add = False
        made.skip_bias_add = True
        made.register_forward_hook(_add_bias)


def _add_bias(layer: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    product, bias = output
    return product + bias, None


def share_a(layer: Any) -> None:
    """Let all adapters of a layer share the first one's A; their ranks are equal."""
    first, *others = layer.lora.values()
    for other in others:
        other.lora_A = first.lora_A


def merging(layer: nn.Module) -> Callable[[], Tensor] | None:
    """Return a function that returns a layer's merged weight; None without adapters, or if they are switched off.

    With DoRA collective over the ranks that share the layer; the returned function is not. Raises ValueError for a
    quantized layer.
    """
    if hasattr(layer, "quantized"):
        raise ValueError(NOT_MERGED)
    adapters = layer._modules.get(ADAPTERS)
    if not isinstance(adapters, Adapters) or not adapters.enabled:
        return None
    weight = adapted_weight(layer)
    ratio = adapters.ratio(weight).detach() if adapters.uses_dora else None
    return partial(adapters.merged, weight.detach(), ratio)


def merge(layer: Any) -> None:
    """Merge a layer's adapters into its weight and remove them; collective as :func:`merging` is."""
    merged = merging(layer)
    assert merged is not None
    adapted_weight(layer).data.copy_(merged())
    layer.__class__ = type(layer).__bases__[-1]
    delattr(layer, ADAPTERS)


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Run the model without its adapters inside the ``with`` block, for example as a reference model.

    The results are the frozen weights' own, bit for bit. Modules that are trained in full stay as they are.

    Args:
        module: A module that holds adapters, wrapped or not.
    """
    found = [child for child in module.modules() if isinstance(child, Adapters)]
    before = [child.enabled for child in found]
    for child in found:
        child.enabled = False
    try:
        yield
    finally:
        for child, enabled in zip(found, before, strict=True):
            child.enabled = enabled
