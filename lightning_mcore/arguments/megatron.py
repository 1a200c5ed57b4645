# SPDX-License-Identifier: Apache-2.0
"""``MegatronArguments``: gradients, optimizer and checkpoints, with mcore_adapter's names.

The class extends ``DistributingParallelArguments``; ``TrainingArguments`` adds transformers' fields. ``mapping.py``
says where each field goes, and ``megatron_rules.py`` checks fields against each other. Help texts appear on the command
line and in docs/reference/arguments.md.
"""

import dataclasses
from typing import Literal

from lightning_mcore.arguments.fields import flag, option
from lightning_mcore.arguments.megatron_rules import check_megatron
from lightning_mcore.arguments.parallel import DistributingParallelArguments


@dataclasses.dataclass
class MegatronArguments(DistributingParallelArguments):
    """How gradients are reduced, which optimizer steps, and what is saved; each field's help text explains it.

    Raises:
        FileNotFoundError: ``additional_configs`` names a file that does not exist.
        TypeError: A value has another type.
        ValueError: A value is not available, contradicts another one, or needs one that is not set.
    """

    accumulate_allreduce_grads_in_fp32: bool = flag(
        "Sum gradients in fp32. bf16 and fp32 always do; with fp16 this flag decides.", default=False
    )
    use_distributed_optimizer: bool = flag("Shard the optimizer over the data-parallel ranks.", default=False)
    use_megatron_fsdp: bool = flag(
        "Shard what data_parallel_sharding_strategy says over the data-parallel ranks, by Megatron's FSDP.",
        default=False,
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = option(
        "With use_megatron_fsdp: optim_grads_params for optimizer, gradients and parameters, or optim_grads; for"
        " 'optim', set use_distributed_optimizer instead.",
        default="no_shard",
    )
    distrib_optim_fully_reshardable: bool = flag(
        "Checkpoints of the sharded optimizer load on every layout. They always do, with or without this flag.",
        default=False,
    )
    distrib_optim_fully_reshardable_mem_efficient: bool = flag(
        "Save them without gathering on GPUs. They are never gathered: each rank writes its shard.", default=False
    )
    overlap_grad_reduce: bool = flag("Reduce gradients while backward still runs.", default=False)
    delay_grad_reduce: bool = flag(
        "With overlap_grad_reduce and a pipeline: reduce on all stages at the same time (Megatron-LM's"
        " align-grad-reduce), instead of on each stage as soon as possible.",
        default=True,
    )
    overlap_param_gather: bool = flag(
        "Gather updated parameters while the next forward runs; needs use_distributed_optimizer and"
        " overlap_grad_reduce.",
        default=False,
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        "End the run at a NaN or an infinity in the gradients; one in the loss causes that too. With fp16 such a "
        "step is skipped instead.",
        default=True,
    )
    ddp_average_in_collective: bool = flag(
        "Average gradients in the collective; needs NCCL and calculate_per_token_loss=False.", default=False
    )
    ddp_bucket_size: int | None = option(
        "Parameters in a bucket of gradients; needs overlap_grad_reduce. Default: Megatron's."
    )
    optimizer: Literal["adam", "sgd"] = option("AdamW, or SGD with momentum 0.9, Megatron's default.", default="adam")
    optimizer_cpu_offload: bool = flag(
        "Keep optimizer state on the host; needs CUDA, TransformerEngine and the distributed optimizer.", default=False
    )
    optimizer_offload_fraction: float = option(
        "Share of the state that optimizer_cpu_offload moves (mcore_adapter: 0.0, which moves nothing).", default=1.0
    )
    save_hf_model: bool = flag("Also write the model in Hugging Face form with every checkpoint.", default=False)
    save_merged_model: bool = flag(
        "Save LoRA merged into the weights. Not available; `lightning-mcore export --merge` does it.", default=False
    )
    ckpt_format: Literal["torch_dist", "legacy"] = option(
        "Checkpoint format: torch_dist, which every layout can load. 'legacy', mcore_adapter's default, is not"
        " available.",
        default="torch_dist",
    )
    ckpt_d2h_non_blocking: bool = flag(
        "Copy checkpoints to pinned memory without blocking, and write them while training continues.", default=False
    )
    sequence_packing: bool = flag("Put several samples into a row.", default=False)
    compile_warmup: bool = flag("Warm up torch.compile. Not available.", default=False)

    def __post_init__(self) -> None:
        """Check every value, then the fields against each other."""
        super().__post_init__()
        check_megatron(self)
