# SPDX-License-Identifier: Apache-2.0
"""Keys of LLaMA-Factory that are carried out, as one dataclass; the keys of training and of Megatron are elsewhere.

A training file is one flat list of keys of five kinds there: of the model, the data, the fine-tuning, the generation
and the training. Those of training and of Megatron have the names of ``lightning_mcore.arguments`` and go there as they
are. The others that mean something here are the fields of :class:`FactoryKeys`; all that is left is refused, by
``refused_keys.py`` with a reason, or as unknown. ``run.py`` sorts them.
"""

from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["pt", "sft", "rm", "ppo", "dpo", "kto"]
FinetuningType = Literal["lora", "oft", "freeze", "full"]
Attention = Literal["auto", "disabled", "sdpa", "fa2", "fa3"]
FP8Backend = Literal["auto", "te", "torchao", "msamp"]


@dataclass(frozen=True)
class FactoryKeys:
    """What a training file says beyond training and Megatron; every default is LLaMA-Factory's own.

    Args:
        model_name_or_path: A Hugging Face folder or name, or a checkpoint of ours.
        trust_remote_code: Changes nothing here: no code of a model is run.
        stage: ``pt`` trains on text, ``sft`` on conversations; the others are refused.
        finetuning_type: ``full``; the others are refused, among them the default.
        dataset: Names in ``dataset_info.json``, with commas between them.
        eval_dataset: The same, to evaluate on.
        dataset_dir: The folder with ``dataset_info.json`` and the files.
        template: The name of a chat template; None: the tokenizer's own, or that of plain text.
        cutoff_len: Tokens of a row, and of a sample at most.
        train_on_prompt: Every token is learnt.
        mask_history: The last answer alone is learnt.
        packing: Several samples share a row, without seeing each other; None: in the stage ``pt`` alone.
        neat_packing: The same as ``packing`` here, where samples in a row never see each other.
        sequence_packing: The same.
        use_packed_sequences: The same.
        streaming: Tokenise while training.
        buffer_size: With ``streaming``, samples to draw the next one from.
        max_samples: Of each dataset, its first so many rows.
        val_size: Evaluate on this share of the training samples, or, above 1, on so many.
        preprocessing_num_workers: Processes that tokenise.
        preprocessing_batch_size: Changes nothing here: each row is tokenised by itself.
        data_shared_file_system: Changes nothing here: one process of each machine tokenises, and the cache locks.
        default_system: The system's text where a row has none.
        enable_thinking: For a template with thoughts.
        preserve_thinking: For a template with thoughts.
        cache_dir: Where ``datasets`` keeps rows and tokens.
        overwrite_cache: Changes nothing here: tokens are kept by files, tokenizer and settings, so never out of date.
        disable_shuffling: Rows come in the order of the files.
        warmup_ratio: The same as ``warmup_steps`` below 1; transformers before 5 has this name for it.
        early_stopping_steps: Evaluations without a better ``metric_for_best_model`` that end the run.
        plot_loss: Draw the losses into ``output_dir``.
        overwrite_output_dir: Start anew in a folder that is not empty.
        moe_aux_loss_coef: The same as ``moe_aux_loss_coeff``.
        disable_gradient_checkpointing: Contradicts ``recompute_granularity``; without that nothing is recomputed.
        fp8_backend: ``auto`` or ``te``; both are TransformerEngine, and the others are refused.
        mixed_precision: ``bf16_mixed`` is ``bf16: true``, ``fp16_mixed`` is ``fp16: true``; None: what those say.
        export_hf_on_finish: Write the model in Hugging Face form at the end.
        masked_softmax_fusion: A field of ``TransformerConfig``; None keeps its default.
        deepspeed: DeepSpeed's config, a file or the dict itself; see ``translated_keys.py``, also for the next four.
        pure_bf16: The same as ``bf16``.
        flash_attn: Megatron's attention is used.
        enable_liger_kernel: Megatron's layers are used.
        use_v1_kernels: The same.
        use_dft_loss: The loss of Dynamic Fine-Tuning, see ``dft_loss.py``.
        use_mca: This is such a run anyway.
        use_megatron_bridge: This is such a run anyway.
    """

    model_name_or_path: str | None = None
    trust_remote_code: bool = False
    stage: Stage = "sft"
    finetuning_type: FinetuningType = "lora"
    dataset: str | list[str] | None = None
    eval_dataset: str | list[str] | None = None
    dataset_dir: str = "data"
    template: str | None = None
    cutoff_len: int = 2048
    train_on_prompt: bool = False
    mask_history: bool = False
    packing: bool | None = None
    neat_packing: bool = False
    sequence_packing: bool = False
    use_packed_sequences: bool = False
    streaming: bool = False
    buffer_size: int = 16384
    max_samples: int | None = None
    val_size: float = 0.0
    preprocessing_num_workers: int | None = None
    preprocessing_batch_size: int = 1000
    data_shared_file_system: bool = False
    default_system: str | None = None
    enable_thinking: bool | None = True
    preserve_thinking: bool = False
    cache_dir: str | None = None
    overwrite_cache: bool = False
    disable_shuffling: bool = False
    warmup_ratio: float = 0.0
    early_stopping_steps: int | None = None
    plot_loss: bool = False
    overwrite_output_dir: bool = False
    moe_aux_loss_coef: float | None = None
    disable_gradient_checkpointing: bool = False
    fp8_backend: FP8Backend = "auto"
    mixed_precision: str | None = None
    export_hf_on_finish: bool = True
    masked_softmax_fusion: bool | None = None
    deepspeed: str | dict[str, Any] | None = None
    pure_bf16: bool = False
    flash_attn: Attention = "auto"
    enable_liger_kernel: bool = False
    use_v1_kernels: bool = False
    use_dft_loss: bool = False
    use_mca: bool = False
    use_megatron_bridge: bool = False

    @property
    def packs(self) -> bool:
        """Whether several samples, or texts, share a row."""
        if self.neat_packing or self.sequence_packing or self.use_packed_sequences:
            return True
        return self.stage == "pt" if self.packing is None else self.packing
