# SPDX-License-Identifier: Apache-2.0
"""The modules that Megatron's layers are built from: TransformerEngine's, or the torch backend's.

Megatron describes a model by a *spec*, a tree of classes. Its local spec, for machines without TransformerEngine, has a
norm that rejects sequence parallelism and a core attention that rejects context parallelism. :func:`gpt_block_spec`
replaces them with :class:`TorchNorm` and :class:`~lightning_mcore.layers.core_attention.TorchAttention`; projections
and experts stay Megatron's. For TransformerEngine it returns Megatron's own spec. In both, experts get ``router.py``.

Checkpoints use TransformerEngine's weight names, so each backend loads what the other saved.

``MCoreGPT`` calls this file, and so does your own module if it builds a ``GPTChunk`` or Megatron's ``GPTModel``.
"""

import contextlib
import copy
import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from lightning_mcore.config.architecture import Architecture, Mixer, architecture_of, check_architecture
from lightning_mcore.config.rules.model import check_fields, check_without_transformer_engine
from lightning_mcore.layers.activations import xielu
from lightning_mcore.layers.core_attention import TorchAttention, completed
from lightning_mcore.layers.delta_net import GatedDeltaNet
from lightning_mcore.layers.indexer import with_indexer
from lightning_mcore.layers.kimi_delta import KimiDeltaAttention
from lightning_mcore.layers.latent_experts import latent_layer
from lightning_mcore.layers.mamba import Mamba2
from lightning_mcore.layers.norms import LatentNorm, LatentQueryNorm, TorchNorm, check_norm
from lightning_mcore.layers.rotation import RotatedAttention
from lightning_mcore.layers.router import ChoiceBiasRouter, ExactRouter
from lightning_mcore.layers.variants import (
    BiasedExpertOutput,
    NormAndAdd,
    OneQueryProjection,
    OutputAlone,
    ParallelLayer,
    VariantAttention,
    with_bias,
)
from lightning_mcore.parallel.stage_layers import check_uniform_recompute
from lightning_mcore.te_cpu.load import ONLY_ON_THE_CPU, is_prepared, untested_on_the_cpu

__all__ = ["TorchAttention", "TorchNorm", "TransformerImpl", "gpt_block_spec", "resolve_transformer_impl"]

TransformerImpl: TypeAlias = Literal["auto", "local", "transformer_engine"]

logger = logging.getLogger(__name__)

_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")

TESTED_TRANSFORMER_ENGINE: Mapping[str, str] = {"<0.17": ">=2.9,<2.12", ">=0.17": ">=2.14,<2.21"}
"""Tested versions of TransformerEngine for each version of megatron-core, as in the extra ``te`` of this package."""


@contextlib.contextmanager
def attention_environment_restored() -> Iterator[None]:
    """Restore at the end the environment variables that pass ``attention_backend`` from Megatron to TransformerEngine.

    Megatron sets them when it builds a model, and raises if they have other values. Source:
    ``LanguageModule._set_attention_backend`` (0.16.1 and 0.19.2).
    """
    before = {name: os.environ.get(name) for name in _ATTENTION_VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def set_attention_environment(chunk: nn.Module) -> None:
    """Set the environment variables for ``attention_backend`` again, for a model built in an earlier run."""
    if isinstance(chunk, LanguageModule):
        chunk._set_attention_backend()


def resolve_transformer_impl(choice: TransformerImpl, device_type: str) -> Literal["local", "transformer_engine"]:
    """Choose a model's modules; ``"auto"`` is TransformerEngine if it is installed and the device is CUDA."""
    if choice == "auto":
        if not HAVE_TE or device_type != "cuda" or is_prepared():
            return "local"
        _warn_of_versions()
        return "transformer_engine"
    if choice == "local":
        return "local"
    if choice != "transformer_engine":
        raise ValueError(f"transformer_impl={choice!r} is unknown; choose 'auto', 'local' or 'transformer_engine'")
    if is_prepared():
        if device_type == "cuda":
            raise ValueError(f"transformer_impl='transformer_engine' is not available: {ONLY_ON_THE_CPU}")
        return "transformer_engine"
    if device_type != "cuda":
        raise ValueError(
            untested_on_the_cpu()
            or f"transformer_impl='transformer_engine' needs a CUDA device but this run is on {device_type!r}; "
            "choose 'auto' or 'local', or install lightning-mcore[te-cpu], which runs it on the CPU"
        )
    if not HAVE_TE:
        raise ModuleNotFoundError(
            "transformer_impl='transformer_engine' needs TransformerEngine, which is not installed; "
            "install lightning-mcore[te], or choose 'auto' or 'local'"
        )
    _warn_of_versions()
    return "transformer_engine"


def installed_version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def untested_versions(megatron_core: str, transformer_engine: str) -> str | None:
    """Return a sentence if these two versions have not been tested together, else None."""
    for of_megatron, tested in TESTED_TRANSFORMER_ENGINE.items():
        if SpecifierSet(of_megatron).contains(Version(megatron_core).base_version):
            if SpecifierSet(tested).contains(Version(transformer_engine).base_version):
                return None
            return (
                f"TransformerEngine {transformer_engine} is untested with megatron-core {megatron_core}; install a"
                f" tested version ({tested}), as lightning-mcore[te] does"
            )
    return None


def _check_norm_of_experts(config: TransformerConfig) -> None:
    """Reject slices of experts that two releases leave out of the gradient norm: neither marks them as slices.

    Source: ``GroupedLinear.reset_parameters`` (TransformerEngine 2.13 to 2.20), ``TEGroupedLinear`` (megatron-core
    0.16.1 to 0.18.2); PR 5916 of Megatron-LM, in 0.19, marks them.
    """
    if not (config.num_moe_experts and config.moe_grouped_gemm and (config.expert_tensor_parallel_size or 1) > 1):
        return
    megatron_core, transformer_engine = installed_version("megatron-core"), installed_version("transformer-engine")
    if megatron_core is None or transformer_engine is None:
        return
    if Version(megatron_core) < Version("0.19") and Version(transformer_engine) >= Version("2.13"):
        raise ValueError(
            f"megatron-core {megatron_core} with TransformerEngine {transformer_engine} leaves experts out of the "
            f"gradient norm with expert_tensor_parallel_size={config.expert_tensor_parallel_size}; install "
            "megatron-core 0.19 or later, or set expert_tensor_parallel_size=1"
        )


@functools.cache
def _warn_of_versions() -> None:
    """Log the sentence of :func:`untested_versions`, once per process."""
    megatron_core, transformer_engine = installed_version("megatron-core"), installed_version("transformer-engine")
    if megatron_core is None or transformer_engine is None:
        return
    sentence = untested_versions(megatron_core, transformer_engine)
    if sentence is not None:
        logger.warning(sentence)


def gpt_block_spec(
    config: TransformerConfig,
    transformer_impl: Literal["local", "transformer_engine"],
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of one chunk, for ``GPTChunk(transformer_layer_spec=...)``.

    The config may ask for dense layers, experts and mixtures of both (``moe_layer_freq``), multi-latent attention,
    norms of queries and keys, uneven pipelines and ``pipeline_model_parallel_layout``.

    Args:
        config: The transformer's config; the layers of this pipeline rank follow from its pipeline fields.
        transformer_impl: Which modules to use; :func:`resolve_transformer_impl` turns ``"auto"`` into one of these.
        vp_stage: Virtual stage of this rank; None without an interleaved pipeline.

    Raises:
        ValueError: The config asks for something that these layers do not support.
    """
    check_backend(config, transformer_impl)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_impl == "transformer_engine",
        qk_l2_norm=getattr(config, "qk_l2_norm", False),  # a field since 0.17
        vp_stage=vp_stage,
    )
    if transformer_impl == "local":
        block.layer_norm = TorchNorm
    for layer in block.layer_specs:
        _use_our_modules(layer, config, transformer_impl)
    architecture = architecture_of(config)
    if architecture.has_memories:
        first = get_transformer_layer_offset(config, vp_stage)
        block.layer_specs = [
            _with_parts(layer, architecture.mixer(first + index), architecture.has_mlp(first + index))
            for index, layer in enumerate(block.layer_specs)
        ]
    if architecture.indexer is not None:
        first = get_transformer_layer_offset(config, vp_stage)
        numbers = range(first, first + len(block.layer_specs))
        block.layer_specs = [
            _with_indexer(layer, architecture.has_indexer(number))
            for number, layer in zip(numbers, block.layer_specs, strict=True)
        ]
    return block


def last_layer_spec(
    config: TransformerConfig, transformer_impl: Literal["local", "transformer_engine"]
) -> TransformerBlockSubmodules:
    """Return the whole model's last layer, on any stage, as a block of one layer; for multi-token prediction."""
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=transformer_impl == "transformer_engine",
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
    )
    last = layers[-1]
    _use_our_modules(last, config, transformer_impl)
    if architecture_of(config).indexer is not None:
        last = _with_indexer(last, has_indexer=True)
    return TransformerBlockSubmodules(layer_specs=[last])


def check_backend(
    config: TransformerConfig, transformer_impl: Literal["local", "transformer_engine"], device_type: str | None = None
) -> None:
    """Raise ValueError before a module is built if these layers would ignore a setting, or fail later."""
    for check in backend_checks(config, transformer_impl, device_type):
        check()
    if transformer_impl == "local" and not HAVE_TE:
        check_without_transformer_engine(config)


def backend_checks(
    config: TransformerConfig, transformer_impl: Literal["local", "transformer_engine"], device_type: str | None = None
) -> Iterator[Callable[[], None]]:
    """Yield the checks of :func:`check_backend` that do not depend on the packages of this machine."""
    yield partial(check_fields, config, transformer_impl, device_type)
    yield partial(check_uniform_recompute, config)
    yield partial(check_architecture, config, transformer_impl)
    yield partial(_check_activation, config)
    if transformer_impl == "transformer_engine":
        yield partial(_check_norm_of_experts, config)
        if device_type == "cuda":  # on the CPU, TransformerEngine's Python runs on our kernels
            yield partial(_check_context, config)
        return
    if config.multi_latent_attention:
        yield partial(_check_latent, config, device_type)
    yield partial(check_norm, config)


def _check_activation(config: TransformerConfig) -> None:
    """Reject layers that would not use the numbers that an activation learns."""
    if config.activation_func is xielu and (config.gated_linear_unit or config.num_moe_experts):
        raise ValueError(
            f"activation_func='xielu' does not work with gated_linear_unit={config.gated_linear_unit} and"
            f" num_moe_experts={config.num_moe_experts}; set gated_linear_unit=False and num_moe_experts=None, or"
            " choose another activation"
        )


def _check_context(config: TransformerConfig) -> None:
    """Reject numbers that TransformerEngine does not pass between context-parallel ranks."""
    if config.context_parallel_size > 1 and not (config.bf16 or config.fp16):
        raise ValueError(
            f"context_parallel_size={config.context_parallel_size} with TransformerEngine's attention needs bf16 or"
            " fp16, because its context-parallel kernels have no fp32; choose precision='bf16-mixed', or"
            " transformer_impl='local'"
        )


def _check_latent(config: TransformerConfig, device_type: str | None) -> None:
    """Reject multi-latent attention that the installed megatron-core cannot build from its local layers."""
    # 0.16 mistakes its stand-in for TransformerEngine for the real one. In a run that is corrected already; before the
    # run, a device type is given.
    if device_type is None and multi_latent_attention.HAVE_TE and not HAVE_TE:
        raise ValueError(
            "multi_latent_attention=True needs TransformerEngine in megatron-core 0.16; install lightning-mcore[te], "
            "or a later megatron-core"
        )


def _use_our_modules(
    layer: ModuleSpec, config: TransformerConfig, transformer_impl: Literal["local", "transformer_engine"]
) -> None:
    """Put our router, norms and core attention into Megatron's spec, in place; a second call changes nothing."""
    submodules = layer.submodules
    experts = _submodules_of_experts(submodules.mlp)
    architecture = architecture_of(config)
    if experts is not None and experts.router is TopKRouter:
        experts.router = ChoiceBiasRouter if architecture.softmax_choice_bias else ExactRouter
    if architecture.layer_norms != "before" or architecture.residual_scale != 1.0:
        submodules.self_attn_bda = submodules.mlp_bda = ModuleSpec(module=NormAndAdd, params={"config": config})
    if architecture.layer_norms == "parallel":
        layer.module = ParallelLayer
        submodules.self_attn_bda = ModuleSpec(module=OutputAlone, params={"config": config})
    if submodules.self_attention.module is SelfAttention:
        submodules.self_attention.module = _attention(config, architecture)
    attention = submodules.self_attention.submodules
    if transformer_impl == "transformer_engine":
        if attention.core_attention is TEDotProductAttention:
            attention.core_attention = completed(TEDotProductAttention)
        return
    attention.core_attention = TorchAttention
    before = IdentityOp if architecture.layer_norms == "after" else TorchNorm
    _replace_norm(submodules, "input_layernorm", before)
    _replace_norm(submodules, "pre_mlp_layernorm", IdentityOp if architecture.layer_norms == "parallel" else before)
    _add_biases(submodules, architecture, has_experts=experts is not None)
    if experts is not None and (config.add_bias_linear or architecture.expert_bias):
        projections = _submodules_of(experts.experts)
        projections.linear_fc1, projections.linear_fc2 = with_bias(projections.linear_fc1), BiasedExpertOutput
    if config.multi_latent_attention:
        _use_latent_modules(submodules.self_attention, is_one_projection=config.q_lora_rank is None)
    else:
        _replace_norm(attention, "q_layernorm", TorchNorm)
        _replace_norm(attention, "k_layernorm", TorchNorm)
    submodules.sharded_state_dict_keys_map = _names_in_checkpoints(layer, config)
    if experts is not None and config.moe_latent_size:
        submodules.mlp = latent_layer(experts)


def _attention(config: TransformerConfig, architecture: Architecture) -> type[RotatedAttention]:
    """Return the class in place of Megatron's attention."""
    splits_gates = config.attention_output_gate and config.num_query_groups < config.tensor_model_parallel_size
    if architecture.window_rotary_base is not None or architecture.head_norms == "all_heads" or splits_gates:
        return VariantAttention
    return RotatedAttention


def _use_latent_modules(attention: ModuleSpec, is_one_projection: bool) -> None:
    """Put our modules into multi-latent attention; queries may have one projection, without a latent and its norm."""
    _replace_norm(attention.submodules, "q_layernorm", IdentityOp if is_one_projection else LatentQueryNorm)
    _replace_norm(attention.submodules, "kv_layernorm", LatentNorm)
    if is_one_projection:
        attention.module = OneQueryProjection


_WITH_MEMORY = {"delta_net": GatedDeltaNet, "kimi_delta": KimiDeltaAttention, "mamba": Mamba2}


def _with_parts(layer: ModuleSpec, mixer: Mixer | None, has_mlp: bool) -> ModuleSpec:
    """Return a copy of a layer with other modules in place of attention, or of the MLP."""
    layer, submodules = copy.copy(layer), copy.copy(layer.submodules)
    if mixer is None:
        submodules.input_layernorm = submodules.self_attention = IdentityOp
        submodules.self_attn_bda = IdentityFuncOp
    elif mixer != "attention":
        submodules.self_attention = ModuleSpec(module=_WITH_MEMORY[mixer])
        names = submodules.sharded_state_dict_keys_map
        # Its input norm is a module of its own in checkpoints: it is not fused with linear_qkv.
        submodules.sharded_state_dict_keys_map = {old: new for old, new in names.items() if old != "input_layernorm."}
    if not has_mlp:
        submodules.pre_mlp_layernorm = submodules.mlp = IdentityOp
        submodules.mlp_bda = IdentityFuncOp
    layer.submodules = submodules
    return layer


def _with_indexer(layer: ModuleSpec, has_indexer: bool) -> ModuleSpec:
    """Return a copy of a layer whose attention has an indexer, or uses what an earlier layer's has selected."""
    layer, submodules = copy.copy(layer), copy.copy(layer.submodules)
    submodules.self_attention = copy.copy(submodules.self_attention)
    submodules.self_attention.module = with_indexer(submodules.self_attention.module, has_indexer)
    layer.submodules = submodules
    return layer


def _add_biases(submodules: Any, architecture: Architecture, has_experts: bool) -> None:
    if architecture.attention_output_bias:
        attention = submodules.self_attention.submodules
        attention.linear_proj = with_bias(attention.linear_proj)
    if architecture.mlp_bias and not has_experts:
        mlp = _submodules_of(submodules.mlp)
        mlp.linear_fc1, mlp.linear_fc2 = with_bias(mlp.linear_fc1), with_bias(mlp.linear_fc2)


def _replace_norm(submodules: Any, name: str, norm: type[nn.Module]) -> None:
    # Only where the config asks for a norm: Megatron puts IdentityOp where there is none, and L2Norm has no weight.
    if getattr(submodules, name) not in (None, IdentityOp, L2Norm):
        setattr(submodules, name, norm)


def _names_in_checkpoints(layer: ModuleSpec, config: TransformerConfig) -> dict[str, str]:
    """Return TransformerEngine's names for the norms that it fuses with the next projection, by prefix."""
    if config.multi_latent_attention:
        names = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    else:
        names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if _submodules_of_experts(layer.submodules.mlp) is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _submodules_of_experts(mlp: Any) -> MoESubmodules | None:
    """Return the submodules of a layer with experts; None for a dense layer."""
    if isinstance(mlp, type):  # without a spec, and with its submodules if they are those of latent_layer()
        found: MoESubmodules | None = getattr(mlp, "spec", None)
        return found
    made = mlp.module if isinstance(mlp, ModuleSpec) else mlp.func
    return _submodules_of(mlp) if made is MoELayer else None


def _submodules_of(spec: Any) -> Any:
    """Return the submodules in a spec of 0.16, or in a partial constructor, as in 0.19."""
    return spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
