# SPDX-License-Identifier: Apache-2.0
"""The torch backend's norms, for ``spec.gpt_block_spec``; they differ in how gradients of their weights are summed."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from lightning_mcore.config.architecture import architecture_of
from lightning_mcore.layers.autograd import scale_gradient

_KINDS = ("LayerNorm", "RMSNorm")


class TorchNorm(nn.Module):
    """LayerNorm or RMSNorm, as ``normalization`` says, that works under sequence parallelism; ValueError for others.

    Source: ``TENorm`` (megatron.core.extensions.transformer_engine, 0.16.1 and 0.19.2).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        check_norm(config)
        self.config = config
        self.hidden_size = hidden_size
        self.eps = eps
        start = 0.0 if config.layernorm_zero_centered_gamma else 1.0
        self.weight = nn.Parameter(torch.full((hidden_size,), start, dtype=config.params_dtype))
        self.bias: nn.Parameter | None = None
        if config.normalization == "LayerNorm" and architecture_of(config).norm_bias:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank's gradients are partial sums: the mark makes Megatron's finalize_model_grads
        # add them up. Norms of queries and keys see some of the heads; Megatron finds those by name.
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension, and return the weights' dtype.

        The input has another dtype with ``fp32_residual_connection``.
        """
        weight, bias = self._weights()
        dtype, computed = weight.dtype, hidden_states.dtype
        if self.config.layernorm_zero_centered_gamma:
            weight = weight + 1
        if dtype != computed:
            weight, bias = weight.to(computed), bias if bias is None else bias.to(computed)
        if self.config.normalization == "RMSNorm":
            found = functional.rms_norm(hidden_states, (self.hidden_size,), weight, self.eps)
        else:
            found = functional.layer_norm(hidden_states, (self.hidden_size,), weight, bias, self.eps)
        return found if dtype == computed else found.to(dtype)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def extra_repr(self) -> str:
        """Describe the norm in ``print(model)``."""
        return f"{self.config.normalization}, {self.hidden_size}, eps={self.eps}"


class LatentNorm(TorchNorm):
    """A norm inside multi-latent attention, whose epsilon may differ from the other norms'."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, architecture_of(config).latent_epsilon or eps)


class LatentQueryNorm(LatentNorm):
    """The norm of multi-latent attention's compressed queries."""

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        # Without sequence parallelism every tensor-parallel rank has the whole gradient, but finalize_model_grads knows
        # the norm by its name and sums over the ranks. With TP=2 each rank therefore contributes half.
        ranks = self.config.tensor_model_parallel_size
        if ranks == 1 or self.config.sequence_parallel:
            return super()._weights()
        bias = self.bias if self.bias is None else scale_gradient(self.bias, 1 / ranks)
        return scale_gradient(self.weight, 1 / ranks), bias


class RotatedHeadNorm(TorchNorm):
    """The norm of queries or keys after their rotation, with the same weights for every head."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        # Gradients are partial sums over a rank's heads. Megatron averages them because of this mark, so _weights()
        # multiplies them by the number of ranks.
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        ranks = self.config.tensor_model_parallel_size
        bias = self.bias if self.bias is None else scale_gradient(self.bias, ranks)
        return scale_gradient(self.weight, ranks), bias


def unweighted_norm(heads: Tensor, eps: float) -> Tensor:
    """Divide each head by its root mean square, computed in fp32; the last dimension is a head's channels."""
    return functional.rms_norm(heads.float(), heads.shape[-1:], None, eps).to(heads.dtype)


def check_norm(config: TransformerConfig) -> None:
    """Raise ValueError if ``normalization`` is neither LayerNorm nor RMSNorm."""
    if config.normalization not in _KINDS:
        raise ValueError(f"normalization={config.normalization!r} is unknown; choose {' or '.join(_KINDS)}")
