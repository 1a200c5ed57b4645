# SPDX-License-Identifier: Apache-2.0
"""Arguments in the style of Hugging Face: dataclasses that transformers' ``HfArgumentParser`` reads.

::

    from lightning_mcore.arguments import TrainingArguments

    args = TrainingArguments(output_dir="run", tensor_model_parallel_size=2, use_distributed_optimizer=True, bf16=True)
    trainer = args.trainer(devices=8)
    trainer.fit(args.model("Qwen/Qwen3-0.6B"), args.data("train.jsonl", tokenizer="Qwen/Qwen3-0.6B", seq_length=2048))

The names are the same as in ROLL's ``mcore_adapter``, so its files work here.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mcore.arguments.dpo import DPOConfig
    from lightning_mcore.arguments.llamafactory.fp8 import Fp8Arguments
    from lightning_mcore.arguments.lora import LoraArguments
    from lightning_mcore.arguments.megatron import MegatronArguments
    from lightning_mcore.arguments.parallel import DistributingParallelArguments
    from lightning_mcore.arguments.parse import parse_arguments
    from lightning_mcore.arguments.ray import RayArguments
    from lightning_mcore.arguments.training import Seq2SeqTrainingArguments, TrainingArguments

# Each name is imported on first use: TrainingArguments imports transformers, which takes seconds. Lightning is imported
# even later, by the methods that build its objects.
_HOMES = {
    "DPOConfig": "dpo",
    "DistributingParallelArguments": "parallel",
    "Fp8Arguments": "llamafactory.fp8",
    "LoraArguments": "lora",
    "MegatronArguments": "megatron",
    "RayArguments": "ray",
    "Seq2SeqTrainingArguments": "training",
    "TrainingArguments": "training",
    "parse_arguments": "parse",
}

__all__ = [
    "DPOConfig",
    "DistributingParallelArguments",
    "Fp8Arguments",
    "LoraArguments",
    "MegatronArguments",
    "RayArguments",
    "Seq2SeqTrainingArguments",
    "TrainingArguments",
    "parse_arguments",
]


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of all classes, imported or not."""
    return __all__
