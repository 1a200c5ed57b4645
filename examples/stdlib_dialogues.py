# SPDX-License-Identifier: Apache-2.0
"""Questions and answers that every machine has, from the docstrings of the Python standard library.

Each module, class and function with a docstring gives one conversation: its name and signature are the question, and
the docstring is the answer. Answers are three words to several pages long, so packing helps. :class:`StdlibDialogues`
writes the conversations as jsonl, together with a tokenizer that has a chat template. ``MCoreFinetuningData`` then
reads them like any other fine-tuning data.

Every tenth module is held out for validation.
"""

import ast
import inspect
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerFast

from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from stdlib_text import VAL_EVERY, read_sources, stdlib_folder, train_bpe

END = "<|end|>"
SPECIAL = [END, "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Exchange = dict[str, str]
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class StdlibDialogues(MCoreFinetuningData):
    """Questions about the standard library, answered by its docstrings.

    Args:
        seq_length: Tokens in a packed row; longer answers are split.
        batch_size: Rows per batch on each data-parallel rank.
        vocab_size: Vocabulary size of the byte-level BPE trained on the conversations.
        packing: Whether to put several conversations into a row; if not, each has its own row.
        max_bytes: Stop reading after this many bytes of source, in the order of the file names.
        folder: Folder for the files.
    """

    def __init__(
        self,
        seq_length: int = 512,
        batch_size: int = 8,
        vocab_size: int = 1024,
        packing: bool = True,
        max_bytes: int = 5_000_000,
        folder: str = "outputs/cache",
    ) -> None:
        python = ".".join(map(str, sys.version_info[:3]))
        self.prepared = Path(folder) / f"stdlib_dialogues-{python}-{vocab_size}-{max_bytes}"
        super().__init__(
            train_files=str(self.prepared / "train.jsonl"),
            validation_files=str(self.prepared / "validation.jsonl"),
            tokenizer=str(self.prepared / "tokenizer"),
            seq_length=seq_length,
            batch_size=batch_size,
            packing=packing,
            overlong="split",
            cache_dir=str(self.prepared / "datasets"),
        )
        self.max_bytes = max_bytes
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; also known before the tokenizer is trained."""
        return self._vocab_size

    def prepare_data(self) -> None:
        """Write the conversations and the tokenizer unless they exist, and tokenise."""
        self.write()
        super().prepare_data()

    def write(self) -> None:
        """Write the conversations and the tokenizer unless they exist."""
        if not self.prepared.exists():
            write_dialogues(self.prepared, self._vocab_size, self.max_bytes)

    def encode(self, question: str) -> list[int]:
        """Return the tokens of a question, up to where the answer begins."""
        turn = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the question and the answer, without anything after it."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        question, _, answer = text.partition("<|assistant|>")
        return f"{question.removeprefix('<|user|>').removesuffix(END)}\n\n{answer.partition(END)[0]}"


def write_dialogues(folder: Path, vocab_size: int, max_bytes: int) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``tokenizer``; other processes see the complete folder or none.

    Raises:
        ValueError: ``max_bytes`` leaves a split without a conversation.
    """
    modules = list(read_sources(Path(stdlib_folder()), max_bytes).items())
    found = list(filter(None, (list(exchanges(name.removesuffix(".py"), source)) for name, source in modules)))
    splits = {
        "validation": [row for rows in found[VAL_EVERY // 2 :: VAL_EVERY] for row in rows],
        "train": [row for number, rows in enumerate(found) if number % VAL_EVERY != VAL_EVERY // 2 for row in rows],
    }
    empty = [name for name, rows in splits.items() if not rows]
    if empty:
        raise ValueError(f"max_bytes={max_bytes} leaves no {empty[0]} exchange; choose more (the default is 5000000)")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    for name, rows in splits.items():
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        (partial / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = (text for row in splits["train"] for text in row.values())
    make_tokenizer(texts, vocab_size).save_pretrained(partial / "tokenizer")
    try:
        partial.rename(folder)
    except OSError:  # another run finished first
        shutil.rmtree(partial)
    rank_zero_info(f"data: {len(splits['train']):,} exchanges to train on, {len(splits['validation']):,} to validate")


def make_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE and give it a chat template."""
    bpe = train_bpe(texts, vocab_size - len(SPECIAL))
    bpe.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, chat_template=TEMPLATE)


def exchanges(module: str, source: str) -> Iterator[Exchange]:
    """Yield a question and its answer for everything in a module that has a docstring."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the last file, cut off by max_bytes
        return
    if text := ast.get_docstring(tree):
        yield {"prompt": f"What is the module {module} for?", "response": text}
    for name, node in documented(tree, module):
        if text := ast.get_docstring(node):
            yield {"prompt": f"What does {name}{signature(node)} do?", "response": text}


def documented(node: Any, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Yield classes and functions with their full names; methods follow their class."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield f"{prefix}.{child.name}", child
            yield from documented(child, f"{prefix}.{child.name}")


def signature(node: Documented) -> str:
    """Return the arguments of a function, or an empty string for a class."""
    return "" if isinstance(node, ast.ClassDef) else f"({inspect.cleandoc(ast.unparse(node.args))})"
