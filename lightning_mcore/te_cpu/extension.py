# SPDX-License-Identifier: Apache-2.0
"""The module ``transformer_engine_torch``, which TransformerEngine's Python code calls for all of its arithmetic.

Positions and names of arguments are those of the compiled module. A missing kernel raises when it is called, not when
it is looked up, because TransformerEngine names kernels that a run never uses. ``load.py`` puts the module in place.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from lightning_mcore.te_cpu import attention, experts, gemm, layers, quantize
from lightning_mcore.te_cpu.enums import enums

_SOURCES = {
    quantize: "quantize dequantize create_empty_quantized_tensor bgrad_quantize split_quantize multi_tensor_quantize"
    " fp8_transpose swap_first_dims compute_amax fused_amax_and_scale_update_after_reduction"
    " fp8_block_scaling_compute_partial_amax fp8_block_scaling_partial_cast mxfp8_scaling_compute_partial_amax"
    " mxfp8_scaling_partial_cast multi_tensor_compute_scale_and_scale_inv multi_tensor_compute_scale_inv_e8m0"
    " multi_tensor_scale",
    gemm: "generic_gemm te_general_grouped_gemm",
    layers: "rmsnorm_fwd rmsnorm_bwd rmsnorm_bwd_add layernorm_fwd layernorm_bwd fused_rope_forward fused_rope_backward"
    " fused_qkv_rope_forward fused_qkv_rope_backward",
    experts: "fused_multi_row_padding fused_multi_row_unpadding",
    attention: "get_fused_attn_backend fused_attn_fwd fused_attn_bwd convert_thd_to_bshd convert_bshd_to_thd"
    " thd_read_half_tensor thd_second_half_lse_correction thd_read_second_half_lse thd_out_correction"
    " thd_grad_correction thd_get_partitioned_indices",
}

# By what asks for them.
_ABSENT = {
    "user buffers": "CommOverlap CommOverlapHelper CommOverlapP2P bulk_overlap_ag_with_external_gemm"
    " ubuf_built_with_mpi device_supports_multicast get_stream_priority_range",
    "FlashAttention": "fa_prepare_fwd fa_prepare_bwd",
    "inference": "copy_to_kv_cache",
    "optimizers, for which Megatron gets torch's": "multi_tensor_adam multi_tensor_sgd"
    " multi_tensor_scale_tensor multi_tensor_l2norm multi_tensor_unscale_l2norm multi_tensor_adam_capturable"
    " multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_adam_param_remainder",
    "experts by index, of which Megatron asks for none": "moe_permute_fwd moe_permute_bwd moe_unpermute_fwd"
    " moe_unpermute_bwd",
    "moe_router_fusion": "fused_topk_with_score_function_fwd fused_topk_with_score_function_bwd"
    " fused_score_for_moe_aux_loss_fwd fused_score_for_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_bwd",
    "optimizers and experts of later releases": "cusolvermp_ctx_create cusolvermp_ctx_destroy newton_schulz ep_combine"
    " ep_combine_bwd ep_dispatch ep_dispatch_bwd ep_finalize ep_get_zero_copy ep_handle_mem_size ep_initialize"
    " ep_prepare ep_prepare_and_dispatch ep_zero_copy_supported splits_to_offsets fused_moe_aux_loss_fwd_graph_safe"
    " fused_topk_with_score_function_qb_fwd",
    "te.ops, and activations that only they have": "dropout_fwd dropout_bwd clamped_swiglu clamped_dswiglu",
    "ONNX": "LayerNorm layernorm gemm_inf fp8_quantize fp8_dequantize fp8_cs_quantize mxfp8_quantize mxfp8_dequantize",
    "weights in NVFP4, and grouped tensors of later releases": "bgrad_group_quantize group_quantize"
    " nvfp4_2d_multi_tensor_transpose nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_data_transpose"
    " nvfp4_multi_tensor_2d_partial_cast nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale"
    " multi_tensor_transpose_to_bhsd multi_tensor_swizzle_scales_for_gemm_unchecked_"
    " get_grouped_gemm_setup_workspace_size splits_to_offsets_multi te_general_grouped_gemm_for_discrete_in"
    " te_general_grouped_gemm_for_discrete_out te_general_grouped_gemm_for_grouped_tensor"
    " thd_copy_valid_tokens_from_per_split_to_rank_local thd_cp_rank_order_to_sequence_order"
    " thd_sequence_order_to_cp_rank_order",
}

around: Callable[..., Any] | None = None
"""If set: calls each kernel, as ``around(name, kernel, *args, **kwargs)``."""

ABSENT = frozenset(name for names in _ABSENT.values() for name in names.split())
"""Names that raise when they are called."""


def _versions() -> dict[str, Callable[[], int]]:
    # Any versions that TransformerEngine accepts: they only choose among GPU kernels.
    return {
        "get_cublasLt_version": lambda: 130000,
        "get_cudnn_version": lambda: 91200,
        "get_num_cublas_streams": lambda: 1,
    }


class Refused:
    """Takes the place of a missing kernel, or of a class and its members."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError."""
        if around is not None:
            return around(self._name, self._refuse, *args, **kwargs)
        return self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"TransformerEngine's kernel {self._name!r} is not available on the CPU; leave out what asks for it, or run"
            " on a CUDA device"
        )

    def __getattr__(self, name: str) -> Any:
        """Return a missing kernel of this name, because a class has members."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Refused(f"{self._name}.{name}")


def _kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called by :data:`around`, if that is set."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if around is None else around(name, function, *args, **kwargs)

    return call


def refusing_module(name: str, functions: dict[str, Callable[..., Any]]) -> types.ModuleType:
    """Return a module with these functions, in which every other name raises when it is called."""
    module = types.ModuleType(name)
    for key, function in functions.items():
        module.__dict__[key] = _kernel(key, function) if isinstance(function, types.FunctionType) else function

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Refused(attribute)

    module.__dict__["__getattr__"] = missing
    return module


def extension(version: str) -> types.ModuleType:
    """Return the module ``transformer_engine_torch`` for a release of TransformerEngine."""
    functions: dict[str, Any] = dict(enums(version)) | _versions() | layers.ACTIVATIONS | layers.SOFTMAX
    for source, names in _SOURCES.items():
        functions |= {name: getattr(source, name) for name in names.split()}
    return refusing_module("transformer_engine_torch", functions)
