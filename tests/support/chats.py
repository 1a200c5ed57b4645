# SPDX-License-Identifier: Apache-2.0
"""Tokenizers made on the spot, files of exchanges, and a stub of a trainer, for the tests of fine-tuning data."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
SPECIAL = [END, "<|user|>", "<|assistant|>", "<|system|>"]
APPENDING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Row = dict[str, Any]


def characters(template: str | None = APPENDING, merges: Iterable[str] = (), **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, for each merge (two letters), and for the marks of turns."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(merge[0], merge[1]) for merge in merges]
    vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(pairs)}
    whole = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(SPECIAL)
    special = special or {"eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=whole, chat_template=template, **special)


def stub_trainer(**module: Any) -> Any:
    """Return what a data module reads of a trainer in one process, whose module has these attributes."""
    return SimpleNamespace(
        lightning_module=SimpleNamespace(**module),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        local_rank=0,
        accumulate_grad_batches=1,
        distributed_sampler_kwargs=None,
        state=SimpleNamespace(fn=None),
    )


def exchanges(count: int, longest: int = 40, seed: int = 0) -> list[Row]:
    """Return questions that are all different, and answers of 1 to ``longest`` letters."""
    draw = random.Random(seed)
    return [{"prompt": f"q{number}", "response": "a" * draw.randint(1, longest)} for number in range(count)]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as jsonl, or as parquet where the name says so, and return the path."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
