# SPDX-License-Identifier: Apache-2.0
"""Which modules Megatron's layers are built from: TransformerEngine's, or the torch backend's.

Megatron describes a model by a *spec*, a tree of classes. Its local spec, for machines without TransformerEngine, has a
norm that refuses sequence parallelism and a core attention that refuses context parallelism. :func:`gpt_block_spec`
takes that spec and puts :class:`TorchNorm` and :class:`~lightning_mcore.core_attention.TorchAttention` in their places;
every projection, expert and router stays Megatron's. Where TransformerEngine is chosen, its spec is returned as it is.

Weights are named in checkpoints as TransformerEngine names them, so that what one backend saved the other loads.

``MCoreGPT`` calls this, and so does any module that builds a Megatron ``GPTModel`` itself.
"""

from typing import Any, Literal, TypeAlias

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.core_attention import TorchAttention, check_attention

__all__ = ["TorchAttention", "TorchNorm", "TransformerImpl", "gpt_block_spec", "resolve_transformer_impl"]

TransformerImpl: TypeAlias = Literal["auto", "local", "transformer_engine"]

# Fields that only TransformerEngine, or kernels that come with it, can honour, and the value that asks for nothing.
_NEEDS_TRANSFORMER_ENGINE: dict[str, Any] = {
    "experimental_attention_variant": None,
    "fp4": None,
    "fp8": None,
    "fused_residual_rmsnorm": False,
    "log_max_attention_logit": False,
    "memory_efficient_layer_norm": False,
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "qk_clip": False,
    "use_kitchen": False,
    "use_te_activation_func": False,
}
_NORMS = ("LayerNorm", "RMSNorm")


class TorchNorm(nn.Module):
    """LayerNorm or RMSNorm, as the config says, that works under sequence parallelism.

    There each tensor-parallel rank normalises its own tokens, so the gradients of the weights are partial sums.
    ``sequence_parallel`` on a parameter asks Megatron's ``finalize_model_grads`` to add them up. The norms of queries
    and keys see some heads rather than some tokens; Megatron finds those by name, with or without sequence parallelism.

    Source: ``TENorm`` (megatron.core.extensions.transformer_engine, 0.16.1 and 0.19.2).

    Args:
        config: Reads ``normalization``, ``layernorm_zero_centered_gamma``, ``params_dtype`` and ``sequence_parallel``.
        hidden_size: Size of the last dimension.
        eps: Added to the variance.

    Raises:
        ValueError: ``normalization`` is neither LayerNorm nor RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        if config.normalization not in _NORMS:
            raise ValueError(f"normalization={config.normalization!r} is unknown; choose {' or '.join(_NORMS)}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered_gamma: bool = config.layernorm_zero_centered_gamma
        start = 0.0 if self.zero_centered_gamma else 1.0
        self.weight = nn.Parameter(torch.full((hidden_size,), start, dtype=config.params_dtype))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            hidden_states: [..., hidden_size].

        Returns:
            The same shape and dtype.
        """
        weight = self.weight + 1 if self.zero_centered_gamma else self.weight
        shape = (self.hidden_size,)
        if self.bias is None:
            return functional.rms_norm(hidden_states, shape, weight, self.eps)
        return functional.layer_norm(hidden_states, shape, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Describe the norm in ``print(model)``."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{kind}, {self.hidden_size}, eps={self.eps}"


class _LatentQueryNorm(TorchNorm):
    """The norm of the compressed queries of multi-latent attention.

    Without sequence parallelism every tensor-parallel rank has the same tokens here, and so the whole gradient of the
    weights. ``finalize_model_grads`` takes the norm, by its name, for one that sees some heads only, and sums over the
    ranks; each therefore contributes its share.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.share = 1.0 if config.sequence_parallel else 1.0 / config.tensor_model_parallel_size

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension, [..., hidden_size]."""
        if self.share == 1.0:
            return super().forward(hidden_states)
        names = {name: _ScaleGradient.apply(parameter, self.share) for name, parameter in self.named_parameters()}
        normalised: Tensor = torch.func.functional_call(super(), names, (hidden_states,))
        return normalised


def resolve_transformer_impl(choice: TransformerImpl, device_type: str) -> Literal["local", "transformer_engine"]:
    """Decide whose modules a model is built from.

    Args:
        choice: ``"auto"`` takes TransformerEngine where it is installed and the device is CUDA.
        device_type: ``torch.device.type`` of the device the model trains on.

    Returns:
        ``"local"`` for the torch backend, or ``"transformer_engine"``.

    Raises:
        ValueError: An unknown choice, or TransformerEngine on another device than CUDA.
        ModuleNotFoundError: TransformerEngine is asked for and not installed.
    """
    if choice == "auto":
        return "transformer_engine" if HAVE_TE and device_type == "cuda" else "local"
    if choice == "local":
        return "local"
    if choice != "transformer_engine":
        raise ValueError(f"transformer_impl={choice!r} is unknown; choose 'auto', 'local' or 'transformer_engine'")
    if device_type != "cuda":
        raise ValueError(
            f"transformer_impl='transformer_engine' needs a CUDA device and this run is on {device_type!r}; "
            "choose 'auto' or 'local'"
        )
    if not HAVE_TE:
        raise ModuleNotFoundError(
            "transformer_impl='transformer_engine' needs TransformerEngine, which is not installed; "
            "install lightning-mcore[te], or choose 'auto' or 'local'"
        )
    return "transformer_engine"


def gpt_block_spec(
    config: TransformerConfig,
    transformer_impl: Literal["local", "transformer_engine"],
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of one chunk, for ``GPTModel(transformer_layer_spec=...)``.

    Dense layers, experts and any mixture of both (``moe_layer_freq``), multi-latent attention, norms of queries and
    keys, uneven pipelines and ``pipeline_model_parallel_layout`` are as the config says.

    Args:
        config: The transformer's config; the layers of this pipeline rank follow from its pipeline fields.
        transformer_impl: Whose modules; :func:`resolve_transformer_impl` turns ``"auto"`` into one of these.
        vp_stage: Which of this rank's virtual stages; None without an interleaved pipeline.

    Raises:
        ValueError: The torch backend is chosen and the config asks for what only TransformerEngine has.
    """
    if transformer_impl == "local":
        _check_local(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_impl == "transformer_engine",
        qk_l2_norm=getattr(config, "qk_l2_norm", False),  # a field since 0.17
        vp_stage=vp_stage,
    )
    if transformer_impl == "local":
        block.layer_norm = TorchNorm
        for layer in block.layer_specs:
            _use_torch_modules(layer)
    return block


def _check_local(config: TransformerConfig) -> None:
    """Refuse what the torch backend cannot honour, before a module is built."""
    for field, nothing in _NEEDS_TRANSFORMER_ENGINE.items():
        value = getattr(config, field, nothing)  # not every version has every field
        if value != nothing:
            raise ValueError(
                f"{field}={value!r} needs TransformerEngine; choose {nothing!r}, "
                'or transformer_impl="transformer_engine" on CUDA'
            )
    check_attention(config)


def _use_torch_modules(layer: ModuleSpec) -> None:
    """Put our norm and core attention into Megatron's spec of a layer, in place; a second time changes nothing."""
    submodules = layer.submodules
    attention = submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    for owner, names in (
        (submodules, ("input_layernorm", "pre_mlp_layernorm")),
        (attention, ("q_layernorm", "k_layernorm", "kv_layernorm")),
    ):
        for name in names:
            if getattr(owner, name, None) not in (None, IdentityOp, L2Norm):
                setattr(owner, name, TorchNorm)
    submodules.sharded_state_dict_keys_map = _names_in_checkpoints(layer)


def _names_in_checkpoints(layer: ModuleSpec) -> dict[str, str]:
    """Return TransformerEngine's names for weights that it fuses with the projection behind them, by prefix."""
    mlp = layer.submodules.mlp
    is_moe = (mlp.module if isinstance(mlp, ModuleSpec) else mlp.func) is MoELayer
    is_latent = hasattr(layer.submodules.self_attention.submodules, "kv_layernorm")
    names = {}
    if is_latent:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not is_moe:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names
