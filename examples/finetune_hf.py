# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a Hugging Face model with tensor parallelism on two CPU processes, and save a Hugging Face model.

Run it with ``make demo-hf`` or ``python examples/finetune_hf.py``. ``--model`` is a folder or a model on the hub, whose
tokenizer has a chat template. Without it, the script creates a tiny random Llama. Each rank reads only its part of the
weights. The data are the questions and answers of ``finetune_gpt.py``. At the end, the two ranks write
``model.safetensors``, the config and the tokenizer, which ``transformers`` loads to answer a question.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_mcore import (
    MCoreFinetuningData,
    MCoreGPT,
    MCoreProgressBar,
    MCoreStrategy,
    Recipe,
    RunReport,
    SaveHFModel,
)
from stdlib_dialogues import StdlibDialogues

QUESTION = "What does shutil.copytree(src, dst, symlinks=False) do?"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults take about a minute on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of the model to start from (default: a tiny random one)")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune_hf"), help="folder for the files")
    parser.add_argument("--devices", type=int, default=2, help="ranks, one process each (2)")
    parser.add_argument("--tp", type=int, default=2, help="tensor_model_parallel_size (2)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline_model_parallel_size (1)")
    parser.add_argument("--seq-length", type=int, default=256, help="tokens in a row (256)")
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a step, for each data-parallel rank (8)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--max-bytes", type=int, default=5_000_000, help="how much of the library to read (5000000)")
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, dialogues: StdlibDialogues) -> None:
    """Write the conversations and, if no model is given, a model; runs in one process before the others start."""
    dialogues.write()
    if options.model is None:
        make_model(options.output / "start", dialogues.tokenizer)
        shutil.rmtree(options.output / "tuned", ignore_errors=True)  # of an earlier run; other models are kept


def make_model(folder: Path, tokenizer: Any) -> None:
    """Write a small Llama with random weights, using ``save_pretrained``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_data(options: argparse.Namespace, dialogues: StdlibDialogues, tokenizer: str) -> MCoreFinetuningData:
    """Build the data module with the tokenizer of a model."""
    return MCoreFinetuningData(
        train_files=dialogues.train_files,
        validation_files=dialogues.validation_files,
        tokenizer=tokenizer,
        seq_length=options.seq_length,
        batch_size=options.batch_size,
        overlong="split",
        cache_dir=dialogues.cache_dir,
    )


def build_trainer(options: argparse.Namespace, save: SaveHFModel) -> pl.Trainer:
    """Build the trainer; ``save`` writes the model or its adapters at the end."""
    return pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=MCoreStrategy(
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            sequence_parallel=options.tp > 1,
        ),
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        limit_val_batches=8,
        callbacks=[MCoreProgressBar(), RunReport(), save],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def answer(folder: Path) -> str:
    """Return the answer of a model that ``transformers`` has loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    turn = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    text: str = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def main() -> None:
    """Create a model if none is given, train it, and answer with it in ``transformers``."""
    options = parse_arguments()
    pl.seed_everything(1, verbose=False)
    dialogues = StdlibDialogues(options.seq_length, max_bytes=options.max_bytes)
    if "LOCAL_RANK" not in os.environ:  # the first process, which starts the others
        prepare(options, dialogues)
    start, end = options.model or str(options.output / "start"), options.output / "tuned"

    module = MCoreGPT.from_pretrained(
        start,
        options.seq_length,
        recipe=Recipe(learning_rate=options.learning_rate, warmup_steps=options.max_steps // 10),
    )
    trainer = build_trainer(options, SaveHFModel(str(end)))
    trainer.fit(module, datamodule=build_data(options, dialogues, start))
    if trainer.is_global_zero:
        print(f"\nmodel: {end}\n{QUESTION}", *(f"  | {line}" for line in answer(end).strip().splitlines()), sep="\n")


if __name__ == "__main__":
    main()
