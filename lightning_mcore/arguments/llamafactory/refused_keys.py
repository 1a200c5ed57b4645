# SPDX-License-Identifier: Apache-2.0
"""Keys of LLaMA-Factory that this package does not carry out, each with its default there and the reason.

A key at its default asks for nothing, and passes: files often spell defaults out. With any other value it is refused
with its reason, because a run without it would be another one. Pure data; ``keys.py`` has the keys that are
carried out, and ``run.py`` goes through both. The test of this table holds it against the number of keys there.
"""

from typing import Any

_FULL = "belongs to fine-tuning of a part of the weights, and here all of them are trained (finetuning_type: full)"
_PREFERENCES = "belongs to learning from preferences or rewards, and the stages here are pt and sft"
_VISION = "belongs to models of images, video or sound, and those here read text"
_QUANTIZED = "belongs to quantised weights; numbers are chosen here with bf16, fp16 and fp8"
_OPTIMIZER = "belongs to an optimizer that is not there; choose optim: adamw_torch or sgd"
_GENERATION = "belongs to generating text, which a training run here does not do"
_EXPORT = "belongs to LLaMA-Factory's export; lightning-mcore export writes a checkpoint in Hugging Face form"
_ENGINE = "belongs to an inference engine, and this command trains"
_KT = "belongs to KTransformers; Megatron's layers are used"
_KERNELS = "replaces layers of transformers, and Megatron's are used"
_ASFT = "needs a second model, which the run would keep beside the one that it trains; use_dft_loss is its other part"
_EAFT = "weighs tokens with the entropy of their logits, and Megatron hands out the loss of a token alone"
_MUON = (
    "treats queries, keys and values as matrices of their own there, and Megatron keeps them in one; in Python,"
    " MuonWithAdamW trains that one, without tensor parallelism and the distributed optimizer"
)
_SWANLAB = "belongs to SwanLab; choose report_to: tensorboard or wandb"
_TOKENS = "changes the vocabulary, and the embedding has that of model_name_or_path; change tokenizer and model before"
_HUB = "asks for a model of a hub with more than its name; fetch it first, and give its folder as model_name_or_path"
_HYPER = "belongs to HyperParallel; the parallel sizes are tensor_model_parallel_size and its like"
_PROFILER = "belongs to a profiler that is not there; give the Trainer a profiler in Python"
_RAY = "belongs to a launch on Ray, which is not there; start the same command with torchrun"

_GROUPS: dict[str, dict[str, Any]] = {
    _FULL: {
        "adapter_name_or_path": None,
        "adapter_folder": None,
        "freeze_trainable_layers": 2,
        "freeze_trainable_modules": "all",
        "freeze_extra_modules": None,
        "additional_target": None,
        "lora_alpha": None,
        "lora_dropout": 0.0,
        "lora_rank": 8,
        "lora_target": "all",
        "loraplus_lr_ratio": None,
        "loraplus_lr_embedding": 1e-6,
        "use_rslora": False,
        "use_dora": False,
        "pissa_init": False,
        "pissa_iter": 16,
        "pissa_convert": False,
        "create_new_adapter": False,
        "module_dropout": 0.0,
        "oft_rank": 0,
        "oft_block_size": 32,
        "oft_target": "all",
        "use_llama_pro": False,
    },
    _PREFERENCES: {
        "pref_beta": 0.1,
        "pref_ftx": 0.0,
        "pref_bco_weight": 0.0,
        "pref_loss": "sigmoid",
        "dpo_label_smoothing": 0.0,
        "kto_chosen_weight": 1.0,
        "kto_rejected_weight": 1.0,
        "simpo_gamma": 0.5,
        "ppo_buffer_size": 1,
        "ppo_epochs": 4,
        "ppo_score_norm": False,
        "ppo_target": 6.0,
        "ppo_whiten_rewards": False,
        "ref_model": None,
        "ref_model_adapters": None,
        "ref_model_quantization_bit": None,
        "reward_model": None,
        "reward_model_adapters": None,
        "reward_model_quantization_bit": None,
        "reward_model_type": "lora",
        "ld_alpha": None,
    },
    _VISION: {
        "media_dir": None,
        "image_max_pixels": 768 * 768,
        "image_min_pixels": 32 * 32,
        "image_do_pan_and_scan": False,
        "crop_to_patches": False,
        "video_max_pixels": 256 * 256,
        "video_min_pixels": 16 * 16,
        "video_fps": 2.0,
        "video_maxlen": 128,
        "use_audio_in_video": False,
        "audio_sampling_rate": 16000,
        "freeze_vision_tower": True,
        "freeze_multi_modal_projector": True,
        "freeze_language_model": False,
    },
    _QUANTIZED: {
        "quantization_method": "bnb",
        "quantization_bit": None,
        "quantization_type": "nf4",
        "double_quantization": True,
        "quantization_device_map": None,
        "upcast_layernorm": False,
        "upcast_lmhead_output": False,
        "fp8_enable_fsdp_float8_all_gather": False,
    },
    _OPTIMIZER: {
        "use_galore": False,
        "galore_target": "all",
        "galore_rank": 16,
        "galore_update_interval": 200,
        "galore_scale": 2.0,
        "galore_proj_type": "std",
        "galore_layerwise": False,
        "use_apollo": False,
        "apollo_target": "all",
        "apollo_rank": 16,
        "apollo_update_interval": 200,
        "apollo_scale": 32.0,
        "apollo_proj": "random",
        "apollo_proj_type": "std",
        "apollo_scale_type": "channel",
        "apollo_layerwise": False,
        "apollo_scale_front": False,
        "use_badam": False,
        "badam_mode": "layer",
        "badam_start_block": None,
        "badam_switch_mode": "ascending",
        "badam_switch_interval": 50,
        "badam_update_ratio": 0.05,
        "badam_mask_mode": "adjacent",
        "badam_verbose": 0,
        "use_adam_mini": False,
    },
    _GENERATION: {
        "do_sample": True,
        "temperature": 0.95,
        "top_p": 0.7,
        "top_k": 50,
        "num_beams": 1,
        "max_length": 1024,
        "max_new_tokens": 1024,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "eval_num_beams": None,
        "use_kv_cache": True,
        "infer_dtype": "auto",
        "offload_folder": "offload",
    },
    _EXPORT: {
        "export_dir": None,
        "export_size": 5,
        "export_device": "cpu",
        "export_quantization_bit": None,
        "export_quantization_dataset": None,
        "export_quantization_nsamples": 128,
        "export_quantization_maxlen": 1024,
        "export_legacy_format": False,
        "export_hub_model_id": None,
    },
    _ENGINE: {
        "infer_backend": "huggingface",
        "vllm_maxlen": 4096,
        "vllm_gpu_util": 0.7,
        "vllm_enforce_eager": False,
        "vllm_max_lora_rank": 32,
        "vllm_config": None,
        "sglang_maxlen": 4096,
        "sglang_mem_fraction": 0.7,
        "sglang_tp_size": -1,
        "sglang_config": None,
        "sglang_lora_backend": "triton",
    },
    _KT: {
        "use_kt": False,
        "kt_cpu_activation": None,
        "kt_weight_path": None,
        "kt_non_expert_weight_path": None,
        "kt_expert_checkpoint_path": None,
        "kt_use_lora_experts": None,
        "kt_lora_expert_num": None,
        "kt_lora_expert_intermediate_size": None,
        "kt_config": None,
    },
    _KERNELS: {
        "use_unsloth": False,
        "use_unsloth_gc": False,
        "shift_attn": False,
        "mixture_of_depths": None,
    },
    _ASFT: {"use_asft_loss": False, "asft_alpha": 0.1},
    _EAFT: {"use_eaft_loss": False, "eaft_alpha": 1.0},
    _MUON: {"use_muon": False},
    _SWANLAB: {
        "use_swanlab": False,
        "swanlab_project": "llamafactory",
        "swanlab_workspace": None,
        "swanlab_run_name": None,
        "swanlab_mode": "cloud",
        "swanlab_api_key": None,
        "swanlab_logdir": None,
        "swanlab_lark_webhook_url": None,
        "swanlab_lark_secret": None,
    },
    _TOKENS: {
        "resize_vocab": False,
        "add_tokens": None,
        "add_special_tokens": None,
        "new_special_tokens_config": None,
        "init_special_tokens": "noise_init",
    },
    _HUB: {"model_revision": "main", "hf_hub_token": None, "ms_hub_token": None, "om_hub_token": None},
    _HYPER: {"use_hyper_parallel": False, "hyper_parallel_args": None, "hyper_parallel_cp_size": 1},
    _PROFILER: {
        "enable_torch_profiler": False,
        "profiler_output_dir": None,
        "profiler_wait_steps": 1,
        "profiler_warmup_steps": 1,
        "profiler_active_steps": 1,
        "profiler_repeat": 1,
        "profiler_record_shapes": True,
        "profiler_profile_memory": True,
        "profiler_with_stack": True,
        "profile_modules": None,
        "print_param_status": False,
    },
    _RAY: {"ray_num_workers": 1, "ray_init_kwargs": None, "master_addr": None, "master_port": None},
    "asks for a slow tokenizer, and transformers has fast ones for these models": {"use_fast_tokenizer": True},
    "splits special tokens, and templates are made of them": {"split_special_tokens": False},
    "is how transformers reads weights; here each rank reads its own rectangles of them": {"low_cpu_mem_usage": True},
    "is not there; stretch positions in rope_parameters of the model's config.json": {"rope_scaling": None},
    "is how PyTorch recomputes; Megatron recomputes by recompute_granularity": {"use_reentrant_gc": True},
    "starts from random weights; in Python, MCoreGPT(...) without from_pretrained does that": {
        "train_from_scratch": False
    },
    "mixes datasets in turns; they are read one after another here, and shuffled (mix_strategy: concat)": {
        "mix_strategy": "concat",
        "interleave_probs": None,
    },
    "is where LLaMA-Factory keeps tokens; here they are kept in cache_dir, by files, tokenizer and settings": {
        "tokenized_path": None
    },
    "calls tools, which the templates here do not write": {"tool_format": None},
    "counts padding in the loss, and padding is never learnt here": {"ignore_pad_token_for_loss": True},
    "reports each evaluation dataset by itself; they are evaluated as one here": {"eval_on_each_dataset": False},
    "is always logged here, as val_accuracy; leave it out": {"compute_accuracy": False},
    "is always logged here, as tokens_per_second; leave it out": {"include_effective_tokens_per_second": False},
    "is a checkpoint of Megatron-Bridge; give model_name_or_path, a Hugging Face model or a checkpoint of ours": {
        "megatron_pretrained_checkpoint": None
    },
    "holds paths of Megatron-Bridge's own config; give fields of TransformerConfig in additional_configs": {
        "extra_config": None
    },
}

REFUSED: dict[str, tuple[Any, str]] = {
    key: (default, reason) for reason, keys in _GROUPS.items() for key, default in keys.items()
}
"""Each key that is not carried out: its default, and why it is refused with any other value."""
