# SPDX-License-Identifier: Apache-2.0
"""The keys of a LLaMA-Factory training file that are not arguments of training or of Megatron.

A training file is one flat list of keys. The training and Megatron keys have the names of ``lightning_mcore.arguments``
and are passed on unchanged. The others fall into three groups:

- The fields of :class:`FactoryKeys` are supported.
- The keys in :data:`REFUSED` are not supported. With its default value such a key is accepted, because files often
  spell out defaults. Any other value raises with the reason, because ignoring it would change the run.
- Some supported keys mean something slightly different here. :func:`translated` returns the arguments that they
  become, and :func:`notes_of` returns a line for each, which ``lightning-mcore llamafactory`` prints before it trains
  and ``lightning-mcore plan`` prints with its assumptions.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mcore.arguments.deepspeed import deepspeed_note, name_of, zero_stage
from lightning_mcore.arguments.fields import option
from lightning_mcore.arguments.llamafactory.preference import PREFERENCE_STAGES, PreferenceKeys, preference_notes
from lightning_mcore.arguments.llamafactory.vision import VisionKeys
from lightning_mcore.config.text import split_names

Stage = Literal["pt", "sft", "rm", "ppo", "dpo", "kto"]
FinetuningType = Literal["lora", "oft", "freeze", "full"]
Attention = Literal["auto", "disabled", "sdpa", "fa2", "fa3"]
FP8Backend = Literal["auto", "te", "torchao", "msamp"]


@dataclass(frozen=True)
class FactoryKeys(VisionKeys, PreferenceKeys):
    """The supported keys that are not training or Megatron arguments; the defaults are LLaMA-Factory's."""

    model_name_or_path: str | None = option("A Hugging Face folder or name, or a checkpoint of this package.")
    trust_remote_code: bool = option("Has no effect: code that comes with a model is never run.", False)
    stage: Stage = option(
        "``pt`` trains on text, ``sft`` on conversations, ``dpo`` on pairs of answers, ``kto`` on tagged answers; "
        "``rm`` trains a reward model; ``ppo`` is not supported.",
        "sft",
    )
    finetuning_type: FinetuningType = option("``full``, ``freeze`` or ``lora``; ``oft`` is not supported.", "lora")
    freeze_trainable_layers: int = option(
        "With ``freeze``: how many of the last layers are trained, or of the first if negative.", 2
    )
    freeze_trainable_modules: str = option(
        "With ``freeze``: ``all``, or modules of those layers, separated by commas.", "all"
    )
    freeze_extra_modules: str | None = option("With ``freeze``: modules outside the layers that are also trained.")
    lora_rank: int = option("Rank of the adapters.", 8)
    lora_alpha: int | None = option(
        "The scale of the adapters is this divided by the rank; None or 0 for twice the rank."
    )
    lora_dropout: float = option("Dropout probability before the adapters.", 0.0)
    lora_target: str = option("``all``, or endings of projection names, separated by commas.", "all")
    use_rslora: bool = option("Divide ``lora_alpha`` by the square root of the rank instead of the rank.", False)
    use_dora: bool = option("Also train the length of each row of a weight (DoRA).", False)
    quantization_bit: int | None = option("4 keeps the frozen weights in 4 bits; None leaves them unchanged.")
    quantization_type: str = option("``nf4``; other types are not supported.", "nf4")
    double_quantization: bool = option("Whether the scales of the 4-bit blocks are also quantized.", True)
    additional_target: str | None = option("Endings of names of modules that are trained in full, separated by commas.")
    adapter_name_or_path: str | list[str] | None = option(
        "PEFT folders, separated by commas or as a list. Training continues the last one with its own settings; "
        "earlier ones are merged into the model."
    )
    adapter_folder: str | None = option("The folder inside each of them that contains the adapter.")
    create_new_adapter: bool = option("Merge all adapters of ``adapter_name_or_path``, and train a new one.", False)
    loraplus_lr_ratio: float | None = option("How many times as large B's learning rate is as A's (LoRA+).")
    loraplus_lr_embedding: float = option(
        "With ``loraplus_lr_ratio``: the learning rate of the embedding's adapters.", 1e-6
    )
    dataset: str | list[str] | None = option("Names in ``dataset_info.json``, separated by commas.")
    eval_dataset: str | list[str] | None = option("Likewise, for evaluation.")
    dataset_dir: str = option("The folder with ``dataset_info.json`` and the files.", "data")
    template: str | None = option("The name of a chat template; None for the tokenizer's own, or plain text.")
    cutoff_len: int = option("Tokens per row, and the largest number of tokens in a sample.", 2048)
    train_on_prompt: bool = option("Train on every token.", False)
    mask_history: bool = option("Train only on the last answer.", False)
    packing: bool | None = option(
        "Put several samples into a row. In stage ``pt`` a text sees the texts before it; in ``sft`` samples do not "
        "see each other. None means only in stage ``pt``."
    )
    neat_packing: bool = option(
        "The same as ``packing``, for stage ``sft``, whose samples never see each other here.", False
    )
    sequence_packing: bool = option("The same as ``packing``.", False)
    use_packed_sequences: bool = option("The same as ``packing``.", False)
    streaming: bool = option("Tokenise while training.", False)
    buffer_size: int = option("With ``streaming``, the number of samples from which the next one is drawn.", 16384)
    max_samples: int | None = option("Read only this many rows of each dataset, from the start.")
    val_size: float = option("Evaluate on this share of the training samples; above 1, on this number of samples.", 0.0)
    preprocessing_num_workers: int | None = option("Number of processes that tokenise.")
    preprocessing_batch_size: int = option(
        "In stage ``kto``, rows of a block in which examples are paired for the KL term; in other stages it has no "
        "effect, because each row is tokenised separately.",
        1000,
    )
    data_shared_file_system: bool = option(
        "Has no effect: one process on each machine tokenises, and the cache uses locks.", False
    )
    default_system: str | None = option("The system message of rows that have none.")
    enable_thinking: bool | None = option(
        "With a template that has thoughts: where empty ones are written; see ``ChatTemplate``.", True
    )
    preserve_thinking: bool = option("With a template that has thoughts: keep the thoughts of earlier turns.", False)
    cache_dir: str | None = option("Where ``datasets`` keeps rows and tokens.")
    overwrite_cache: bool = option(
        "Has no effect: the cache depends on files, tokenizer and settings, so it is never stale.", False
    )
    disable_shuffling: bool = option("Keep the order of the files.", False)
    warmup_ratio: float = option(
        "The same as ``warmup_steps`` below 1; the name in transformers before version 5.", 0.0
    )
    early_stopping_steps: int | None = option(
        "Number of evaluations without a better ``metric_for_best_model`` that ends the run."
    )
    plot_loss: bool = option("Save a plot of the losses in ``output_dir``.", False)
    overwrite_output_dir: bool = option("Start a new run in a folder that is not empty.", False)
    moe_aux_loss_coef: float | None = option("The same as ``moe_aux_loss_coeff``.")
    disable_gradient_checkpointing: bool = option(
        "Contradicts ``recompute_granularity``, and otherwise has no effect, because nothing is recomputed by default.",
        False,
    )
    fp8_backend: FP8Backend = option(
        "``auto`` or ``te``, which both mean TransformerEngine; the others are not supported.", "auto"
    )
    mixed_precision: str | None = option(
        "``bf16_mixed`` is ``bf16: true``, ``fp16_mixed`` is ``fp16: true``; None leaves the choice to those two keys."
    )
    export_hf_on_finish: bool = option("Write the model in Hugging Face form at the end.", True)
    masked_softmax_fusion: bool | None = option("A field of ``TransformerConfig``; None keeps its default.")
    deepspeed: str | dict[str, Any] | None = option("DeepSpeed's config, as a file or a dict; see :func:`translated`.")
    pure_bf16: bool = option("The same as ``bf16``.", False)
    flash_attn: Attention = option("Has no effect: Megatron's attention is used.", "auto")
    enable_liger_kernel: bool = option("Has no effect: Megatron's layers are used.", False)
    use_v1_kernels: bool = option("Has no effect: Megatron's layers are used.", False)
    include_num_input_tokens_seen: str | bool = option(
        "Has no effect: ``tokens_per_second`` is always logged. LLaMA-Factory's web page writes it into each file.",
        "no",
    )
    use_dft_loss: bool = option("Use the loss of Dynamic Fine-Tuning (``dft_loss.py``).", False)
    use_mca: bool = option("Has no effect: every run here uses Megatron.", False)
    use_megatron_bridge: bool = option(
        "Turn on Megatron-Bridge's defaults that differ: ``use_distributed_optimizer``, ``overlap_grad_reduce`` and "
        "``overlap_param_gather``.",
        False,
    )

    @property
    def lora(self) -> dict[str, Any] | str | None:
        """The adapters to train, as ``MCoreGPT.from_pretrained`` takes them; None for the whole model."""
        if self.finetuning_type != "lora":
            return None
        # "a,b" with adapter_folder: last merges a/last, and continues b/last with the settings in that folder.
        if self.adapters and not self.create_new_adapter:
            bits = {"quantization": self.quantization_type, "double_quantization": self.double_quantization}
            last = self.adapters[-1]
            return last if self.quantization_bit is None else {"path": last, **bits}
        more = self.additional_target
        return {
            "r": self.lora_rank,
            "lora_alpha": self.lora_alpha or 2 * self.lora_rank,
            "lora_dropout": self.lora_dropout,
            "target_modules": "all-linear" if self.lora_target == "all" else split_names(self.lora_target),
            "modules_to_save": None if more is None else split_names(more),
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "quantization": None if self.quantization_bit is None else self.quantization_type,
            "double_quantization": self.double_quantization,
        }

    @property
    def adapters(self) -> list[str]:
        """Folders of the adapters that the file names."""
        folder, names = self.adapter_folder, split_names(self.adapter_name_or_path or [])
        return names if folder is None else [os.path.join(name, folder) for name in names]

    @property
    def merged_adapters(self) -> list[str]:
        """Folders of the adapters to merge into the model before training."""
        return self.adapters if self.create_new_adapter else self.adapters[:-1]

    @property
    def learns_preferences(self) -> bool:
        """Whether the stage learns from pairs of answers, or from tagged ones."""
        return self.stage in PREFERENCE_STAGES

    @property
    def packs(self) -> bool:
        """Whether a row holds several samples or texts."""
        if self.neat_packing or self.sequence_packing or self.use_packed_sequences:
            return True
        return self.stage == "pt" if self.packing is None else self.packing


NEW_ADAPTER_KEYS = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target"),
    *("use_rslora", "use_dora"),
)
"""Keys that describe a new adapter."""

FREEZE_KEYS = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
"""Keys that only ``finetuning_type: freeze`` uses."""

LORA_KEYS = (*NEW_ADAPTER_KEYS, "adapter_name_or_path", "adapter_folder", "create_new_adapter", "loraplus_lr_ratio")
"""Keys that only ``finetuning_type: lora`` uses."""

LISTED = (
    "leave it out: keys are LLaMA-Factory's, and the fields of transformers' Seq2SeqTrainingArguments and of our"
    " MegatronArguments (docs/reference/arguments.md)"
)
"""Where all keys are listed, as the end of an error."""

# Reasons in errors, as the end of a sentence that begins with the key and its value
_FULL = "belongs to a way of fine-tuning that is not available; choose finetuning_type: full, freeze or lora without it"
_PISSA = (
    "belongs to PiSSA, which changes the weights of the base, and is not available; LLaMA-Factory's"
    " scripts/pissa_init.py makes a base and an adapter that can be named here"
)
_PPO = "belongs to PPO, and the stages here are pt, sft, dpo, kto and rm"
_REFERENCE = "changes the weights of the reference; merge or convert them first, and give that folder as ref_model"
_VISION = "belongs to audio models, or to vision families that are not available"
_QUANTIZED = "belongs to weights quantised in another way than quantization_bit: 4 with nf4"
_FSDP = (
    "belongs to FSDP, and data parallelism is Megatron's here; fp8_param: true with use_distributed_optimizer: true"
    " gathers weights in FP8"
)
_OPTIMIZER = "belongs to an optimizer that is not available; choose optim: adamw_torch or sgd"
_GENERATION = "belongs to generating text, which a training run here does not do"
_EXPORT = "belongs to LLaMA-Factory's export; lightning-mcore export writes a checkpoint in Hugging Face form"
_ENGINE = "belongs to an inference engine, and this command trains"
_KT = "belongs to KTransformers; Megatron's layers are used"
_KERNELS = "replaces layers of transformers, and Megatron's are used"
_ASFT = "needs a second model in memory; use_dft_loss is its other part"
_EAFT = "weighs tokens by the entropy of their logits, and Megatron returns only the loss of each token"
_MUON = (
    "takes gate and up as separate matrices, and Megatron keeps them in one; Recipe(optimizer='muon') trains that"
    " matrix with Muon, in Python or from a LightningCLI file"
)
_SWANLAB = "belongs to SwanLab; choose report_to: tensorboard or wandb"
_TOKENS = "changes the vocabulary, which model_name_or_path defines; change tokenizer and model before the run"
_HUB = "asks for a model on a hub by more than its name; download it first, and give its folder as model_name_or_path"
_HYPER = "belongs to HyperParallel; the parallel sizes are tensor_model_parallel_size and so on"
_PROFILER = "belongs to a profiler that is not available; give the Trainer a profiler in Python"

# The keys of each reason, with LLaMA-Factory's defaults
_GROUPS: dict[str, dict[str, Any]] = {
    _FULL: {"module_dropout": 0.0, "oft_rank": 0, "oft_block_size": 32, "oft_target": "all", "use_llama_pro": False},
    _PISSA: {"pissa_init": False, "pissa_iter": 16, "pissa_convert": False},
    _PPO: {
        "ppo_buffer_size": 1,
        "ppo_epochs": 4,
        "ppo_score_norm": False,
        "ppo_target": 6.0,
        "ppo_whiten_rewards": False,
        "reward_model": None,
        "reward_model_adapters": None,
        "reward_model_quantization_bit": None,
        "reward_model_type": "lora",
    },
    _REFERENCE: {"ref_model_adapters": None, "ref_model_quantization_bit": None},
    _VISION: {
        "image_do_pan_and_scan": False,
        "crop_to_patches": False,
        "use_audio_in_video": False,
        "audio_sampling_rate": 16000,
    },
    _QUANTIZED: {
        "quantization_method": "bnb",
        "quantization_device_map": None,
        "upcast_layernorm": False,
        "upcast_lmhead_output": False,
    },
    _FSDP: {"fp8_enable_fsdp_float8_all_gather": False},
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
    _KERNELS: {"use_unsloth": False, "use_unsloth_gc": False, "shift_attn": False, "mixture_of_depths": None},
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
    "asks for a slow tokenizer, and these models have fast ones": {"use_fast_tokenizer": True},
    "splits special tokens, which templates consist of": {"split_special_tokens": False},
    "changes how transformers reads weights; here each rank reads its own parts of them": {"low_cpu_mem_usage": True},
    "is not supported; scale positions in rope_parameters of the model's config.json": {"rope_scaling": None},
    "changes how PyTorch recomputes; Megatron recomputes as recompute_granularity says": {"use_reentrant_gc": True},
    "starts from random weights; in Python, MCoreGPT(...) without from_pretrained does that": {
        "train_from_scratch": False
    },
    "interleaves datasets; here they are joined and shuffled (mix_strategy: concat)": {
        "mix_strategy": "concat",
        "interleave_probs": None,
    },
    "is where LLaMA-Factory keeps tokens; here cache_dir keeps them, by files, tokenizer and settings": {
        "tokenized_path": None
    },
    "calls tools, which the templates here do not support": {"tool_format": None},
    "counts padding in the loss, and padding is never trained on here": {"ignore_pad_token_for_loss": True},
    "reports each evaluation dataset separately; they are evaluated as one here": {"eval_on_each_dataset": False},
    "is always logged here, as val_accuracy": {"compute_accuracy": False},
    "is always logged here, as tokens_per_second": {"include_effective_tokens_per_second": False},
    "is a checkpoint of Megatron-Bridge; give model_name_or_path, a Hugging Face model or a checkpoint of ours": {
        "megatron_pretrained_checkpoint": None
    },
    "sets paths in Megatron-Bridge's own config; give fields of TransformerConfig in additional_configs": {
        "extra_config": None
    },
}

REFUSED: dict[str, tuple[Any, str]] = {
    key: (default, reason) for reason, keys in _GROUPS.items() for key, default in keys.items()
}
"""The unsupported keys: the default of each, and why any other value raises."""


def translated(keys: FactoryKeys, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training and Megatron arguments of a file, ``values``, with those that follow from other keys."""
    found = {**values, "bf16": True} if keys.pure_bf16 else dict(values)
    if keys.deepspeed is None or (stage := zero_stage(keys.deepspeed, found)) == 0:
        return found
    if found.get("use_distributed_optimizer") is False:
        raise ValueError(
            f"deepspeed: {name_of(keys.deepspeed)} is ZeRO stage {stage}, which shards the optimizer, and contradicts"
            " use_distributed_optimizer: False; leave one of them out"
        )
    return {**found, "use_distributed_optimizer": True}


def notes_of(keys: FactoryKeys) -> tuple[str, ...]:
    """Return a note for each key whose meaning differs slightly here."""
    notes = preference_notes(keys, keys.stage, keys.lora is not None) if keys.learns_preferences else []
    if keys.deepspeed is not None:
        notes.append(deepspeed_note(keys.deepspeed))
    if keys.pure_bf16:
        notes.append(
            "pure_bf16: True becomes bf16: true; Megatron's optimizer keeps an fp32 copy of each weight, 4"
            " bytes, which use_distributed_optimizer shards"
        )
    if keys.flash_attn != "auto":
        notes.append(
            f"flash_attn: {keys.flash_attn} chooses among the attentions of transformers; Megatron's attention is "
            "used, or TransformerEngine's on GPUs, which NVTE_FLASH_ATTN controls"
        )
    for name in ("enable_liger_kernel", "use_v1_kernels"):
        if getattr(keys, name):
            notes.append(f"{name}: True replaces transformers' layers by faster ones; Megatron's layers are used")
    if keys.include_num_input_tokens_seen not in (False, "no"):
        notes.append(
            f"include_num_input_tokens_seen: {keys.include_num_input_tokens_seen} has no effect; tokens_per_second is"
            " logged instead of a count"
        )
    return tuple(notes)
