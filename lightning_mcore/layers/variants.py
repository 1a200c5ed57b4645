# SPDX-License-Identifier: Apache-2.0
"""Modules for the settings of ``config/architecture.py``, which megatron-core lacks.

``spec.gpt_block_spec`` puts them into Megatron's layers, and :func:`change_ends` into the ends of a model. None of them
knows a layout beyond its own tensor-parallel group, so pipelines, context parallelism, packed rows and recomputation
work as with Megatron's own modules.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.architecture import STRETCHES, Architecture, architecture_of
from lightning_mcore.layers.autograd import scale_gradient, sum_over_ranks
from lightning_mcore.layers.norms import TorchNorm
from lightning_mcore.layers.rotation import RotatedAttention


class NormAndAdd(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """Normalises and scales the output of attention or MLP, then adds it to the residual.

    It replaces Megatron's ``get_bias_dropout_add``, so it is called with two flags and returns a function.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        architecture = architecture_of(config)
        self.scale = architecture.residual_scale
        self.norm: TorchNorm | None = None
        if architecture.layer_norms in ("around", "after"):
            self.norm = TorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that adds; ``fused`` has no effect."""
        return functools.partial(self._add, training)

    def _add(
        self, training: bool, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        """Return the sum, [s / cp / tp, b, h] in the residual's dtype; / tp only with sequence parallelism."""
        output, bias = output_and_bias
        if bias is not None:
            output = output + bias
        if self.norm is not None:
            output = self.norm(output)
        if self.scale != 1.0:
            output = output * self.scale
        return residual + functional.dropout(output, dropout, training)


class ParallelLayer(TransformerLayer):  # type: ignore[misc]  # megatron-core has no type information
    """A layer whose attention and MLP read the same normalised input; both outputs are added to the residual.

    Megatron's halves run one after the other as ever, so recomputation and packed rows work. The first returns the
    output of attention alone (:class:`OutputAlone`), and the second starts from the layer's input again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pre_mlp_layernorm = _SameNorm(self.input_layernorm)

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        attended, context = super()._forward_attention(hidden_states, *args, **kwargs)
        return (attended, hidden_states), context  # which Megatron hands to _forward_mlp

    def _forward_mlp(self, hidden_states: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        attended, residual = hidden_states
        output: Tensor = super()._forward_mlp(residual, *args, **kwargs)
        return attended + output


class _SameNorm(nn.Module):
    """Another module's norm; its weight stays that module's alone."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = (norm,)  # in a tuple, torch does not register it a second time

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        normalised: Tensor = self.norm[0](hidden_states)
        return normalised


class OutputAlone(MegatronModule):  # type: ignore[misc]  # megatron-core has no type information
    """Returns the output of attention with its bias, in place of Megatron's ``get_bias_dropout_add``."""

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that leaves out the residual; ``fused`` has no effect."""

        def output(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            values, bias = output_and_bias
            return functional.dropout(values if bias is None else values + bias, dropout, training)

        return output


class _NormOfAllHeads(nn.Module):
    """RMSNorm over all heads together; each tensor-parallel rank has some of them, and its part of the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width = self.heads(config) * hidden_size
        self.size = hidden_size
        # With 2 key heads of 8 channels on 4 ranks, the first rank keeps channels 0 to 3 of the first head, the second
        # rank channels 4 to 7.
        self.copies = max(1, self.group.size() // self.heads(config))  # ranks that have the same head
        own = self.width // self.group.size()
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        """Return the whole model's number of heads."""
        raise NotImplementedError

    def forward(self, heads: Tensor) -> Tensor:
        """Return normalised queries or keys, [s / cp, b, heads / tp, d] or [t, heads / tp, d]; computed in fp32."""
        values = heads.float()
        squares = values.square().sum(dim=(-2, -1), keepdim=True) / self.copies
        if self.group.size() > 1:
            squares = sum_over_ranks(squares, self.group)
        normalised = (values * torch.rsqrt(squares / self.width + self.eps)).to(heads.dtype)
        return normalised * self._weight_of_own_heads().view(heads.shape[-2:]).to(heads.dtype)

    def _weight_of_own_heads(self) -> Tensor:
        """Return the weights of this rank's heads, [heads / tp * d], or [d] of a head that several ranks have."""
        if self.copies == 1:
            return self.weight
        gather: Any = gather_from_sequence_parallel_region
        whole: Tensor = gather(self.weight, tensor_parallel_output_grad=True, group=self.group)
        return whole.view(-1, self.size)[self.group.rank() // self.copies]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weight for a checkpoint; each tensor-parallel rank has a part of it."""
        own = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {"weight": 0}, sharded_offsets)
        return found


class NormOfAllQueries(_NormOfAllHeads):
    """RMSNorm over all query heads."""

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        """Return the whole model's number of heads."""
        return int(config.num_attention_heads)


class NormOfAllKeys(_NormOfAllHeads):
    """RMSNorm over all key heads."""

    @staticmethod
    def heads(config: TransformerConfig) -> int:
        """Return the whole model's number of heads."""
        return int(config.num_query_groups)


class VariantAttention(RotatedAttention):
    """Megatron's attention, plus three features.

    These are norms over all heads together, other positions in layers with a window, and output gates where
    tensor-parallel ranks share a group of heads.
    """

    def __init__(self, config: TransformerConfig, *args: Any, layer_number: int, **kwargs: Any) -> None:
        architecture = architecture_of(config)
        base = architecture.window_rotary_base
        own = base is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        if own:
            config = copy.copy(config)
            for name in [name for name in vars(config) if name.startswith("yarn_")]:
                delattr(config, name)  # otherwise Megatron scales every rotation by YaRN's factor
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        # Set after construction: Megatron's spec accepts such norms only with qk_layernorm, and then sums their
        # gradients as if all heads shared the weights.
        if architecture.head_norms == "all_heads":
            size = self.hidden_size_per_attention_head
            self.q_layernorm = NormOfAllQueries(config, size, config.layernorm_epsilon)
            self.k_layernorm = NormOfAllKeys(config, size, config.layernorm_epsilon)
        self.rotation: RotaryEmbedding | None = None
        if own:
            self.rotation = RotaryEmbedding(
                config.kv_channels,
                1.0,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=base,
                use_cpu_initialization=config.use_cpu_initialization,
            )

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return queries, keys, values and this rank's output gates."""
        found = super().get_query_key_value_tensors(*args, **kwargs)
        if not self.config.attention_output_gate or found[3].size(2) == found[0].size(2):
            return found
        query, key, value, gate = found
        # Megatron returns the gates of a whole group of heads, which several ranks share.
        parts = gate.chunk(gate.size(2) // query.size(2), dim=2)
        return query, key, value, parts[parallel_state.get_tensor_model_parallel_rank() % len(parts)]

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> Any:
        """Compute attention; ``rotary_pos_emb`` is [s / cp, 1, 1, d], for packed rows [t, 1, 1, d]."""
        if self.rotation is not None and rotary_pos_emb is not None:
            packed = kwargs.get("packed_seq_params") is not None
            ranks = 1 if packed else self.config.context_parallel_size
            rotary_pos_emb = self.rotation(rotary_pos_emb.size(0) * ranks, packed_seq=packed)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class OneQueryProjection(MLASelfAttention):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's latent attention with queries from one projection, without a norm before it.

    Later releases would take a projection with a fused norm there, which only TransformerEngine has.

    Source: ``MLASelfAttention`` and ``QKNormConfigResolver`` (megatron.core.transformer, 0.19.2).
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the classes of Megatron's spec by their names."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class BiasedExpertOutput(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no type information
    """An expert's output projection with a bias, without three faults of Megatron's.

    Source: ``RowParallelLinear`` (megatron.core.tensor_parallel.layers), ``MLP.forward`` (0.16.1 and 0.19.2).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})
        # Otherwise Megatron would sum the gradients over ranks that may have other experts.
        self.bias.sequence_parallel = False

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, [tokens, h], and the bias, [h], for inputs of [tokens, ffn / etp]."""
        output, bias = super().forward(inputs)
        ranks = self.tp_group.size()
        # Outputs are summed over the ranks. Megatron adds the bias in place, which autograd rejects for a view.
        return output.clone() if output._is_view() else output, scale_gradient(bias / ranks, ranks)


class StretchedRotation(RotaryEmbedding):  # type: ignore[misc]  # megatron-core has no type information
    """Megatron's rotary positions, stretched as ``Architecture.stretch`` says.

    A stretch that depends on a length uses the batch's length, or its longest packed sequence's. ``plain`` is the
    rotation without the stretch, ``base`` the base of its wavelengths.
    """

    def __init__(self, plain: RotaryEmbedding, base: float, stretch: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)  # not RotaryEmbedding's, which computes frequencies
        self.rotary_interleaved, self.cp_group = plain.rotary_interleaved, plain.cp_group
        self.seq_len_interpolation_factor = None
        self.inv_freq = plain.inv_freq
        self.base, self.stretch = base, stretch

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return angles in radians, [max_seq_len, channels / 2] fp32, from position ``offset`` on."""
        places = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        return torch.outer(places, self._frequencies(max_seq_len + offset))

    def _frequencies(self, length: int) -> Tensor:
        stretch, original = self.stretch, self.stretch["original_max_position_embeddings"]
        plain: Tensor = self.inv_freq
        if stretch["kind"] == "longrope":
            factors = stretch["long_factor" if length > original else "short_factor"]
            return plain / torch.tensor(factors, dtype=torch.float32, device=plain.device)
        if stretch["kind"] == "dynamic":
            size, factor = 2 * plain.numel(), float(stretch["factor"])
            grown: float = (factor * max(length, original) / original - (factor - 1)) ** (size / (size - 2))
            powers = torch.arange(0, size, 2, dtype=torch.float32, device=plain.device) / size
            return 1.0 / ((self.base * grown) ** powers)
        scaled: Tensor = self._apply_scaling(plain, *(stretch[key] for key in STRETCHES["llama3"]))
        return scaled


@functools.cache
def with_bias(linear: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of one of Megatron's linear layers that always has a bias."""

    class WithBias(linear):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})

    return WithBias


def change_ends(chunk: Any, architecture: Architecture) -> None:
    """Scale the embedding and logits of a ``GPTChunk``, cap its logits, stretch and share its positions."""
    windows = [each for each in chunk.modules() if isinstance(each, VariantAttention) and each.rotation is not None]
    for attention in windows:
        attention.rotation = windows[0].rotation  # so that these layers share the cosines and sines of its angles
    if architecture.stretch is not None:
        chunk.rotary_pos_emb = StretchedRotation(chunk.rotary_pos_emb, chunk.rotary_base, architecture.stretch)
    if architecture.embedding_scale != 1.0 and hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(functools.partial(_scaled, architecture.embedding_scale))
    divisor, cap = architecture.logits_divisor, architecture.logits_cap
    if getattr(chunk.config, "use_mup", False):  # since 0.17; GPTModel applies it outside the layer
        divisor /= chunk.config.mup_output_mult
    if chunk.post_process and (divisor != 1.0 or cap is not None):
        chunk.output_layer.register_forward_hook(functools.partial(_logits, divisor, cap))


def _scaled(scale: float, module: nn.Module, inputs: Any, embedding: Tensor) -> Tensor:
    """Return an embedding, [s, b, h], times a factor that is first rounded to its dtype, as in transformers."""
    return embedding * torch.full((), scale, dtype=embedding.dtype, device=embedding.device)  # no copy, which waits


def _logits(divisor: float, cap: float | None, module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the output layer's logits, divided and capped, and its bias."""
    logits, bias = output
    logits = logits / divisor if divisor != 1.0 else logits
    return (logits if cap is None else capped(logits, cap)), bias


def capped(values: Tensor, cap: float) -> Tensor:
    """Return values limited smoothly to ``(-cap, cap)``: with cap 50, 10 becomes 9.87 and 1000 becomes 50."""
    return torch.tanh(values / cap) * cap
