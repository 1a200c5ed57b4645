# SPDX-License-Identifier: Apache-2.0
"""A family of Hugging Face models as data.

A :class:`Family` holds rules for config keys (``config_rules.py``), rules for weights (``weight_rules.py``) and the
prefixes of layers. It does not depend on how a model is split over ranks. megatron-core is imported only for the
defaults of its fields, not to read a config. ``registry.py`` finds families by name.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_mcore.config.architecture import ARCHITECTURE_DEFAULTS, moe_layers
from lightning_mcore.config.field_homes import DEFAULTS, MODULE_FIELDS
from lightning_mcore.config.flops import rotated_layers, windowed_layers
from lightning_mcore.config.positions import YARN_DEFAULTS
from lightning_mcore.hf.config_rules import ConfigRule, Same, shortened
from lightning_mcore.hf.weight_rules import Experts, Rename, Rows, Stack, WeightRule, renamed

_IRRELEVANT = """
    _attn_implementation_autoset _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype
    eos_token_id gradient_checkpointing id2label initializer_range is_encoder_decoder label2id
    max_position_embeddings model_type output_attentions output_hidden_states pad_token_id problem_type return_dict
    tokenizer_class torch_dtype transformers_version unsloth_fixed unsloth_version use_cache
"""

IRRELEVANT = frozenset(_IRRELEVANT.split())
"""Keys of any config that do not change what a model with given weights computes."""


SCORING = "+score"
"""Suffix of a family name for its reward models and classifiers."""
HIDDEN = "+hidden"
"""Suffix of a family name for its models without an output layer."""
SEEING = "+tower"
"""Suffix of a family name for its models with their vision tower, which without it are read as text models."""
SCORE = "score.weight"
VALUE_HEAD_FILE, VALUE_HEAD = "value_head.safetensors", "v_head.summary.weight"
"""Where LLaMA-Factory keeps a reward model's score layer, next to a language model."""


@dataclass(frozen=True)
class Family:
    """The config and the weights of a family of models, as rules.

    Args:
        model_type: As in ``config.json``.
        architecture: Name of the class in transformers.
        config: The rules for its config keys.
        layer: The weights of a layer: Megatron's names after ``decoder.layers.<n>.``, Hugging Face's after
            ``layer_prefix``.
        outside: The weights outside layers, with their full names.
        multi_token: The weights that a multi-token prediction layer has in addition to ``layer``: Megatron's names
            after ``mtp.layers.<n>.``, Hugging Face's after the prefix of a layer after the last.
        repeated: Tensors of such a layer that repeat a tensor of the model, mapped to the name of that tensor.
        unread: Suffixes of tensor names that are not weights, and prefixes (ending with a dot) of names that
            transformers does not read either.
        layer_prefix: Prefix of Hugging Face's names of a layer's weights; ``{layer}`` is its number.
        optional: Tensors that a folder may lack; the model then keeps their initial values.
        more_config: Keys added to a written config, in addition to the rules' keys.
        config_class: The ``model_type`` whose transformers config class supplies the defaults, if transformers does not
            know ``model_type``.
        tower: Prefix of Hugging Face's names of a vision tower's weights; None without one.
        in_memory: Prefix of weight names in files, and the prefix that a transformers model in memory (and so an
            adapter) has instead; None if they are the same.
        moved_in_memory: Parts of layers' weight names in files, each with what such a model has instead, in this order.
        aliases: Keys in files that transformers, and the rules, call otherwise: each with that name.
        variants: Families that differ in the names or shapes of some weights on disk; the one that fits is read.
    """

    model_type: str
    architecture: str
    config: tuple[ConfigRule, ...] = field(repr=False)
    layer: tuple[WeightRule, ...] = field(repr=False)
    outside: tuple[WeightRule, ...] = field(repr=False)
    multi_token: tuple[WeightRule, ...] = field(default=(), repr=False)
    repeated: Mapping[str, str] = field(default_factory=dict, repr=False)
    unread: tuple[str, ...] = ("rotary_emb.inv_freq",)
    layer_prefix: str = "model.layers.{layer}."
    optional: tuple[str, ...] = ()
    more_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    config_class: str | None = None
    tower: str | None = None
    in_memory: tuple[str, str] | None = None
    moved_in_memory: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False)
    variants: tuple["Family", ...] = field(default=(), repr=False)

    def scoring(self) -> "Family":
        """Return the rules of this family's reward models, transformers' ``*ForSequenceClassification``.

        They also read a language model: its output layer is skipped, and the score layer starts from random values.
        """
        rules = (rule for rule in self.outside if rule.megatron != "output_layer.weight")
        return dataclasses.replace(
            self,
            architecture=self.architecture.replace("ForCausalLM", "ForSequenceClassification"),
            outside=(*rules, Rename("output_layer.weight", SCORE)),
            unread=(*self.unread, "lm_head.weight"),
            optional=(SCORE,),
            more_config={"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        )

    def without_head(self) -> "Family":
        """Return the rules of this family's models without an output layer, which also read a language model."""
        return dataclasses.replace(
            self,
            architecture=self.architecture.replace("ForCausalLM", "Model"),
            outside=tuple(rule for rule in self.outside if rule.megatron != "output_layer.weight"),
            unread=(*self.unread, "lm_head.weight"),
        )

    def in_adapters(self) -> "Family":
        """Return the rules with the names that adapters use, as in a transformers model in memory.

        If a family has one tensor for all experts of a layer, each expert's projections are named as in other families.
        """
        fc1, fc2 = (f"mlp.experts.experts.linear_{name}.weight" for name in ("fc1", "fc2"))
        prefix = "mlp.experts.{expert}."
        each: dict[str, WeightRule] = {
            fc1: Experts(Rows(fc1, (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"))),
            fc2: Experts(Rename(fc2, f"{prefix}down_proj.weight")),
        }
        # Only for plain stacks of both projections, under these names: type() excludes InterleavedStack
        stacks = {rule.megatron for rule in self.layer if type(rule) is Stack and rule.hf.startswith("mlp.")}
        layer = tuple(each.get(rule.megatron, rule) if stacks == each.keys() else rule for rule in self.layer)
        return dataclasses.replace(
            self,
            layer=tuple(renamed(rule, self._moved) for rule in layer) if self.moved_in_memory else layer,
            outside=tuple(renamed(rule, self.name_in_memory) for rule in self.outside)
            if self.in_memory
            else self.outside,
            layer_prefix=self.name_in_memory(self.layer_prefix),
        )

    def name_in_memory(self, name: str) -> str:
        """Return the name that a tensor in a file has in a transformers model in memory.

        Args:
            name: In the file.
        """
        old, new = self.in_memory or ("", "")
        return self._moved(new + name.removeprefix(old) if name.startswith(old) else name)

    def _moved(self, name: str) -> str:
        for old, new in self.moved_in_memory:
            name = name.replace(old, new)
        return name

    def in_our_words(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the names of keys that the rules have.

        Args:
            config: The content of ``config.json``.
        """
        return {self.aliases.get(key, key): value for key, value in config.items()}

    def in_words_of(self, content: Mapping[str, Any], message: str) -> str:
        """Return a message with the names of keys that a file has.

        Args:
            content: The content of ``config.json``.
            message: About the keys, with the rules' names.
        """
        for theirs, ours in self.aliases.items():
            message = re.sub(rf"\b{ours}\b", theirs, message) if theirs in content else message
        return message

    def in_words_of_files(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the names of keys that published files have.

        Args:
            config: A config with the rules' names.
        """
        names = {ours: theirs for theirs, ours in self.aliases.items()}
        return {names.get(key, key): value for key, value in config.items()}

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a config: the required ones and those that differ from a default.

        Args:
            config: The Hugging Face config, with all defaults.

        Raises:
            ValueError: A key is unknown, or its value is not supported.
        """
        fields: dict[str, Any] = {}
        for rule in self.config:
            try:
                fields |= rule.read(config)
            # A damaged config fails inside a rule in any of these ways; the user sees the keys at fault
            except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
                given = ", ".join(f"{key}={shortened(config.get(key))}" for key in rule.keys)
                raise ValueError(f"{given} does not have the type that transformers writes ({error})") from error
        for key in self.strange_keys(config):
            raise ValueError(
                f"{key}={shortened(config[key])} is not a known key of {self.model_type!r} configs and might change "
                "the numbers; remove it, or give a family that knows it"
            )
        return fields

    def strange_keys(self, config: Mapping[str, Any]) -> list[str]:
        """Return the keys of a Hugging Face config that have a value, and that no rule knows."""
        known = IRRELEVANT.union(*(rule.keys for rule in self.config))
        return [key for key, value in config.items() if key not in known and value is not None]

    def check_sizes(self, config: Mapping[str, Any]) -> None:
        """Reject impossible sizes before transformers uses them to complete the config.

        Args:
            config: The content of ``config.json``.

        Raises:
            ValueError: A size is out of range, or not a whole number.
        """
        for rule in self.config:
            if isinstance(rule, Same):
                rule.check(config)

    def multi_token_prefixes(self, num_layers: int, layers: int) -> list[str]:
        """Return the prefixes of Hugging Face's names of multi-token prediction layers.

        With ``num_layers=61`` and ``layers=1``, the prefix is ``model.layers.61.``.

        Args:
            num_layers: Number of ordinary layers, which come first.
            layers: Number of multi-token prediction layers.
        """
        return [self.layer_prefix.replace("{layer}", str(num_layers + number)) for number in range(layers)]

    def write_config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return exactly the keys of a config that is equivalent to ``fields``.

        Args:
            fields: All fields of a model, as :func:`complete_fields` returns them.

        Raises:
            ValueError: The config cannot express a field that changes the numbers.
        """
        config: dict[str, Any] = {}
        try:
            for rule in self.config:
                config |= rule.write(fields)
            # Rules that write nothing (_read_only) are checked only by reading the written keys back
            again = complete_fields(self.read_config(config))
        except ValueError as error:
            raise ValueError(f"the model is not one of {self.model_type!r}: {error}") from error
        self.check_same(again, fields)
        return config

    def check_same(self, again: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Check that a config describes the model.

        Args:
            again: All fields from the config.
            fields: All fields of the model.

        Raises:
            ValueError: A field that changes the numbers differs.
        """
        for name in differences(again, fields):
            fault = _inexpressible(name, again, fields)
            raise ValueError(f"the model is not one of {self.model_type!r}: {fault}; give another family")

    def misfits(self, fields: Mapping[str, Any]) -> list[str]:
        """Return a phrase for each rule and each field by which a model is not of this family; empty if it is."""
        config: dict[str, Any] = {}
        found = []
        for rule in self.config:
            try:
                config |= rule.write(fields)
            except ValueError as error:
                found.append(str(error))
            except (KeyError, TypeError):  # no such field, or None, in another kind of model
                found.append("it lacks settings of this family")
        try:
            again = complete_fields(self.read_config(config))
        except ValueError as error:
            return found or [str(error)]
        return found + [_inexpressible(name, again, fields) for name in differences(again, fields)]


def _inexpressible(name: str, again: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    return f"{name}={fields[name]!r} cannot be expressed in its config, which would mean {again[name]!r}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that change the numbers and differ between two models."""
    return [name for name, value in other.items() if name not in TRAINING_ONLY and one.get(name, value) != value]


def complete_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with all defaults and derived sizes, in a normal form, so that equal models have equal fields.

    ``num_query_groups=None`` becomes the number of heads, and with 4 layers ``moe_layer_freq=2`` becomes ``(True,
    False, True, False)``: each field with several spellings takes the one from :func:`_normal_form`.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    whole: dict[str, Any] = {
        item.name: item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        for item in dataclasses.fields(config_class)
    }
    whole |= {**MODULE_DEFAULTS, **ARCHITECTURE_DEFAULTS, **DEFAULTS, **fields}
    # In MCoreGPT's arguments, the architecture's fields are nested in a dict; rules see them flat
    whole |= whole.pop("architecture", None) or {}
    whole = {name: tuple(value) if isinstance(value, list) else value for name, value in whole.items()}
    # In this order: the size of an expert falls back to the size of a dense MLP, which is derived just before
    derived: dict[str, Callable[[], Any]] = {
        "num_query_groups": lambda: whole["num_attention_heads"],
        "kv_channels": lambda: whole["hidden_size"] // whole["num_attention_heads"],
        "ffn_hidden_size": lambda: 4 * whole["hidden_size"],
        "moe_ffn_hidden_size": lambda: whole["ffn_hidden_size"] if whole["num_moe_experts"] else None,
    }
    for name, value in derived.items():
        if whole[name] is None:
            whole[name] = value()
    return whole | _normal_form(whole)


def _normal_form(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with several equivalent spellings, each in its normal form."""
    activation = whole["activation_func"]
    said: dict[str, Any] = {
        "activation_func": activation.removeprefix("torch.nn.functional.")
        if isinstance(activation, str)
        else activation,
        "mtp_num_layers": whole["mtp_num_layers"] or None,
        "yarn": {**YARN_DEFAULTS, **whole["yarn"]} if whole["yarn"] is not None else None,
    }
    if whole["moe_router_topk_scaling_factor"] == 1.0:
        said["moe_router_topk_scaling_factor"] = None
    if whole["moe_router_load_balancing_type"] not in ("sinkhorn", "quantile_balancing"):  # which route tokens
        said["moe_router_load_balancing_type"] = "aux_loss"
    rotated = rotated_layers(whole)
    said["no_rope_freq"] = None if all(rotated) else tuple(not flag for flag in rotated)
    return said | _normal_windows(whole) | _normal_experts(whole)


def _normal_windows(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``window_attn_skip_freq`` as a tuple of flags, one for each layer; None if all have a window."""
    windowed = windowed_layers(whole)
    if whole["window_size"] is None or not any(windowed):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_attn_skip_freq": None if all(windowed) else tuple(windowed)}


def _normal_experts(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``moe_layer_freq`` as a tuple of flags, one for each layer; 1 if all have experts."""
    if not whole["num_moe_experts"]:
        return {"moe_layer_freq": 1}
    have_experts = moe_layers(whole)
    if all(have_experts):
        # Without a dense layer, ffn_hidden_size is not used, so any value of it means the same model
        return {"moe_layer_freq": 1, "ffn_hidden_size": whole["moe_ffn_hidden_size"]}
    return {"moe_layer_freq": tuple(have_experts)}


MODULE_DEFAULTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "seq_len_interpolation_factor": None,
    "yarn": None,
    "share_embeddings_and_output_weights": False,
    "vision": None,
}
"""``MCoreGPT`` settings that affect what a model computes, with their defaults."""


def split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split fields into the settings of the module and the fields of its ``transformer``."""
    module = {name: value for name, value in fields.items() if name in MODULE_FIELDS}
    architecture = {name: value for name, value in fields.items() if name in ARCHITECTURE_DEFAULTS}
    transformer = {name: value for name, value in fields.items() if name not in module.keys() | architecture.keys()}
    return {**module, **({"architecture": architecture} if architecture else {})}, transformer


_LOSSES_AND_CHANCE = """
    attention_dropout calculate_per_token_loss cross_entropy_fusion_impl cross_entropy_loss_fusion
    embedding_init_method embedding_init_method_std hidden_dropout init_method init_method_std
    init_model_with_meta_device moe_aux_loss_coeff moe_expert_capacity_factor moe_expert_rank_capacity_factor
    moe_input_jitter_eps moe_pad_expert_input_to_capacity moe_router_bias_update_rate
    moe_router_quantile_balancing_ema moe_token_drop_policy moe_z_loss_coeff mtp_detach_heads mtp_grad_scale_func
    mtp_hsm mtp_loss_scaling_factor moe_grad_scale_func output_layer_init_method perform_initialization qk_clip
    qk_clip_alpha qk_clip_threshold use_cpu_initialization
"""

_NUMBER_FORMATS_AND_ROUNDING = """
    activation_func_fp8_input_store apply_query_key_layer_scaling attention_softmax_in_fp32 batch_invariant_backend
    batch_invariant_mode deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
    fp32_residual_connection fp4_quantizer_factory fp8_interval fp8_output_proj fp8_quantizer_factory
    moe_combine_bwd_dtype moe_dispatch_fwd_dtype moe_router_dtype moe_router_padding_for_fp8
    moe_router_padding_for_quantization quant_recipe
"""

_KERNELS = """
    apply_rope_fusion attention_backend bias_activation_fusion bias_dropout_fusion flash_attention_version
    fused_residual_rmsnorm fused_single_qkv_rope gradient_accumulation_fusion kitchen_attention_backend
    masked_softmax_fusion mla_down_proj_fusion memory_efficient_layer_norm moe_grouped_gemm moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_fusion moe_single_grouped_bias moe_single_grouped_weight
    moe_use_grouped_tensor moe_use_legacy_grouped_gemm persist_layer_norm symmetric_ar_type transformer_impl
    use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_kitchen
    use_kitchen_attention use_te_activation_func use_te_rng_tracker use_transformer_engine_op_fuser
"""

_MEMORY = """
    activation_offload_fraction cache_mla_latents clone_scatter_output_in_embedding cpu_offloading
    cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
    cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks distribute_saved_activations fine_grained_activation_offloading
    fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size mlp_chunks_for_prefill
    mlp_chunks_for_training moe_layer_recompute moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
    num_microbatches_with_partial_activation_checkpoints offload_modules recompute_granularity recompute_method
    recompute_modules recompute_num_layers
"""

_RANKS_AND_COMMUNICATION = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split async_tensor_model_parallel_allreduce
    barrier_with_L1_time batch_p2p_sync cp_comm_type defer_embedding_wgrad_compute delay_wgrad_compute
    ep_overlap_early_attn_memory_release expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
    gtp_remat_opt_in_modules gtp_weight_remat_size hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes
    high_priority_a2a_comm_stream hybrid_context_parallel max_seqlen_per_dp_cp_rank moe_deepep_num_sms
    moe_enable_deepep moe_extended_tp moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape
    moe_ncclep_zero_copy moe_shared_expert_overlap moe_token_dispatcher_type mtp_standalone
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage nccl_all_reduce_for_prefill
    overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
    pipeline_model_parallel_comm_backend tensor_parallel_num_weight_shards tp_comm_atomic_ag tp_comm_atomic_rs
    tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    use_ring_exchange_p2p wgrad_deferral_limit
"""

_GRAPHS_LOGS_AND_INFERENCE = """
    config_logger_dir cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph flash_decode
    inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    inference_rng_tracker inference_sampling_seed log_max_attention_logit moe_enable_routing_replay
    moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging test_mode use_inference_optimized_layers
"""

TRAINING_ONLY = frozenset(
    " ".join(
        (
            _LOSSES_AND_CHANCE,
            _NUMBER_FORMATS_AND_ROUNDING,
            _KERNELS,
            _MEMORY,
            _RANKS_AND_COMMUNICATION,
            _GRAPHS_LOGS_AND_INFERENCE,
        )
    ).split()
)
"""Fields of ``TransformerConfig`` that affect how a model is trained, but not what it computes: router losses,
recomputation, fused kernels, the precision of a softmax, the capacity of experts. An exported model may have been
trained with any value of them, and a Hugging Face config cannot express them. The written config must express all
other fields; otherwise the export fails. The names come from all supported releases of megatron-core.
"""
