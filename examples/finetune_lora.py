# SPDX-License-Identifier: Apache-2.0
"""Train LoRA adapters with tensor and sequence parallelism on two CPU processes, and write a PEFT folder.

Run it with ``make demo-lora`` or ``python examples/finetune_lora.py``. ``--model`` is a folder, or a model on the hub,
whose tokenizer has a chat template; its weights are frozen. Without it, the script creates a tiny random Llama and
trains its embedding and output layer as well. The data are the questions and answers of ``finetune_gpt.py``. At the
end, the two ranks write ``adapter_config.json`` and ``adapter_model.safetensors``, which ``peft`` and vLLM can load.
"""

import argparse
import os
import shutil
from pathlib import Path

import lightning.pytorch as pl

from finetune_hf import build_data, build_trainer, make_model
from lightning_mcore import LoRA, MCoreGPT, Recipe, SaveHFModel
from stdlib_dialogues import StdlibDialogues


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about a minute on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of the model to start from (default: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_lora"), help="folder for the files")
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (16)")
    parser.add_argument("--seq-length", type=int, default=256, help="tokens in a row (256)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a step, for each data-parallel rank (8)")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--max-bytes", type=int, default=2_000_000, help="how much of the library to read (2000000)")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, dialogues: StdlibDialogues) -> None:
    """Write the conversations and, if no model is given, a model; runs in one process before the others start."""
    dialogues.write()
    if options.model is None:
        make_model(options.output / "base", dialogues.tokenizer)
        shutil.rmtree(options.output / "adapter", ignore_errors=True)  # from an earlier run of this demo


def next_steps(base: str, adapter: Path) -> str:
    """Return a text that says how to use the adapter."""
    return f"""
adapter: {adapter} (adapter_config.json, adapter_model.safetensors)
next, one of:
  go on      MCoreGPT.from_pretrained("{base}", lora="{adapter}")
  merge      lightning-mcore import {base} {adapter}.ckpt --adapter {adapter}
             lightning-mcore export {adapter}.ckpt {adapter}-merged --merge
  PEFT       PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{adapter}")"""


def main() -> None:
    """Create a model if none is given, train adapters for it, and write them."""
    options = parse_arguments()
    pl.seed_everything(1, verbose=False)
    dialogues = StdlibDialogues(options.seq_length, max_bytes=options.max_bytes)
    if "LOCAL_RANK" not in os.environ:  # the first process, which starts the others
        prepare(options, dialogues)
    base, end = options.model or str(options.output / "base"), options.output / "adapter"

    module = MCoreGPT.from_pretrained(
        base,
        options.seq_length,
        recipe=Recipe(learning_rate=options.learning_rate, warmup_steps=options.max_steps // 10),
        lora=LoRA(
            r=options.rank,
            lora_alpha=2 * options.rank,
            modules_to_save=["embed_tokens", "lm_head"] if options.model is None else None,
        ),
    )
    trainer = build_trainer(options, SaveHFModel(str(end), adapter=True))
    trainer.fit(module, datamodule=build_data(options, dialogues, base))
    if trainer.is_global_zero:
        print(next_steps(base, end))


if __name__ == "__main__":
    main()
