# SPDX-License-Identifier: Apache-2.0
"""Which modules Megatron's layers are built from: TransformerEngine's, or the torch backend's.

Megatron describes a model by a *spec*, a tree of classes. Its local spec, for machines without TransformerEngine, has a
norm that refuses sequence parallelism and a core attention that refuses context parallelism. :func:`gpt_block_spec`
takes that spec and puts :class:`TorchNorm` and :class:`~lightning_mcore.core_attention.TorchAttention` in their places;
every projection, expert and router stays Megatron's. Where TransformerEngine is chosen, its spec is returned as it is.

Weights are named in checkpoints as TransformerEngine names them, so that what one backend saved the other loads.

``MCoreGPT`` calls this, and so does any module that builds a Megatron ``GPTModel`` itself.
"""

import importlib.util
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
        _check_norm(config)
        self.config = config
        self.hidden_size = hidden_size
        self.eps = eps
        start = 0.0 if config.layernorm_zero_centered_gamma else 1.0
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
        weight, bias = self._weights()
        if self.config.layernorm_zero_centered_gamma:
            weight = weight + 1
        if bias is None:
            return functional.rms_norm(hidden_states, (self.hidden_size,), weight, self.eps)
        return functional.layer_norm(hidden_states, (self.hidden_size,), weight, bias, self.eps)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def extra_repr(self) -> str:
        """Describe the norm in ``print(model)``."""
        kind = "RMSNorm" if self.bias is None else "LayerNorm"
        return f"{kind}, {self.hidden_size}, eps={self.eps}"


class _LatentQueryNorm(TorchNorm):
    """The norm of the compressed queries of multi-latent attention.

    Without sequence parallelism every tensor-parallel rank sees the same tokens here, and has the whole gradient of the
    weights. ``finalize_model_grads`` takes the norm, by its name, for one that sees some heads only, and sums over the
    ranks: each of them contributes its share.
    """

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        ranks = self.config.tensor_model_parallel_size
        if ranks == 1 or self.config.sequence_parallel:
            return super()._weights()
        bias = self.bias if self.bias is None else _scale_gradient(self.bias, 1 / ranks)
        return _scale_gradient(self.weight, 1 / ranks), bias


class _ScaleGradient(torch.autograd.Function):
    """Passes a tensor on and scales its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


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
            _use_torch_modules(layer, config)
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
    if config.multi_latent_attention:
        _check_latent(config)
    if not HAVE_TE and config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules:
        raise ValueError(
            "recompute_modules with 'layernorm' needs TransformerEngine; choose from 'core_attn', 'mla_up_proj', "
            "'mlp', 'moe' and 'shared_experts'"
        )
    _check_norm(config)
    check_attention(config)


def _check_norm(config: TransformerConfig) -> None:
    if config.normalization not in _NORMS:
        raise ValueError(f"normalization={config.normalization!r} is unknown; choose {' or '.join(_NORMS)}")


def _check_latent(config: TransformerConfig) -> None:
    """Refuse multi-latent attention that the installed megatron-core cannot build from its local layers."""
    if multi_latent_attention.HAVE_TE and not HAVE_TE:  # 0.16 takes its stand-in for TransformerEngine for the real one
        raise ValueError(
            "multi_latent_attention=True needs TransformerEngine in megatron-core 0.16; install lightning-mcore[te], "
            "or a later megatron-core"
        )
    fuses_query_norm = importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config") is not None
    if config.qk_layernorm and config.q_lora_rank is None and fuses_query_norm:
        raise ValueError(
            "qk_layernorm=True with q_lora_rank=None needs TransformerEngine in this version of megatron-core; "
            "set q_lora_rank, or qk_layernorm=False"
        )


def _use_torch_modules(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Put our norms and core attention into Megatron's spec of a layer, in place; a second time changes nothing."""
    submodules = layer.submodules
    attention = submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    _replace_norm(submodules, "input_layernorm", TorchNorm)
    _replace_norm(submodules, "pre_mlp_layernorm", TorchNorm)
    if config.multi_latent_attention:
        # Megatron's spec names a norm of compressed queries even where queries are not compressed.
        _replace_norm(attention, "q_layernorm", IdentityOp if config.q_lora_rank is None else _LatentQueryNorm)
        _replace_norm(attention, "kv_layernorm", TorchNorm)
    else:
        _replace_norm(attention, "q_layernorm", TorchNorm)
        _replace_norm(attention, "k_layernorm", TorchNorm)
    submodules.sharded_state_dict_keys_map = _names_in_checkpoints(layer, config)


def _replace_norm(submodules: Any, name: str, norm: type[nn.Module]) -> None:
    if getattr(submodules, name) not in (None, IdentityOp, L2Norm):
        setattr(submodules, name, norm)


def _names_in_checkpoints(layer: ModuleSpec, config: TransformerConfig) -> dict[str, str]:
    """Return TransformerEngine's names for the norms that it fuses with the projection behind them, by prefix."""
    if config.multi_latent_attention:
        names = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    else:
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    mlp = layer.submodules.mlp  # a spec in 0.16, a partial constructor in 0.19
    if (mlp.module if isinstance(mlp, ModuleSpec) else mlp.func) is not MoELayer:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names
