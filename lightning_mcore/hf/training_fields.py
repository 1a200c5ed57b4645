# SPDX-License-Identifier: Apache-2.0
"""The fields of ``TransformerConfig`` that affect how a model is trained, but not what it computes.

An exported model may have been trained with any value of these fields: router losses, recomputation, fused kernels, the
precision of a softmax, the capacity of experts. A Hugging Face config cannot express them and need not. The config that
``family.py`` writes must express all other fields, or the export is refused.
"""

_LOSSES_AND_CHANCE = """
    attention_dropout calculate_per_token_loss cross_entropy_fusion_impl cross_entropy_loss_fusion
    embedding_init_method embedding_init_method_std hidden_dropout init_method init_method_std
    init_model_with_meta_device moe_aux_loss_coeff moe_expert_capacity_factor moe_expert_rank_capacity_factor
    moe_input_jitter_eps moe_pad_expert_input_to_capacity moe_router_bias_update_rate
    moe_router_quantile_balancing_ema moe_token_drop_policy moe_z_loss_coeff mtp_detach_heads mtp_grad_scale_func
    mtp_loss_scaling_factor moe_grad_scale_func output_layer_init_method perform_initialization qk_clip
    qk_clip_alpha qk_clip_threshold use_cpu_initialization
"""

_NUMBER_FORMATS_AND_ROUNDING = """
    activation_func_fp8_input_store apply_query_key_layer_scaling attention_softmax_in_fp32 batch_invariant_mode
    deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
    fp32_residual_connection fp4_quantizer_factory fp8_interval fp8_output_proj fp8_quantizer_factory
    moe_router_dtype moe_router_padding_for_fp8 moe_router_padding_for_quantization quant_recipe
"""

_KERNELS = """
    apply_rope_fusion attention_backend bias_activation_fusion bias_dropout_fusion flash_attention_version
    fused_residual_rmsnorm fused_single_qkv_rope gradient_accumulation_fusion kitchen_attention_backend
    masked_softmax_fusion mla_down_proj_fusion memory_efficient_layer_norm moe_grouped_gemm moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_fusion moe_single_grouped_bias moe_single_grouped_weight
    moe_use_legacy_grouped_gemm persist_layer_norm symmetric_ar_type transformer_impl
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
    gtp_weight_remat_size hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes
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
"""The names of these fields in all supported releases of megatron-core."""
