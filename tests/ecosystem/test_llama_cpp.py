# SPDX-License-Identifier: Apache-2.0
"""llama.cpp reads the folders that runs export: its logits are those of the model in training, on any layout.

It needs ``llama-cpp-python``, which pip compiles for several minutes, and ``LLAMA_CPP``, a checkout of llama.cpp with
its converter and what that imports (``gguf``, ``sentencepiece``), so it is not part of ``requirements.txt``.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.hf import SaveHFModel
from tests.support.hf_models import VOCAB_SIZE, save_tiny
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

CONVERTER = Path(os.environ.get("LLAMA_CPP", "")) / "convert_hf_to_gguf.py"
PROMPT, NEW = 6, 8  # tokens
TOLERANCE = 1e-4  # of logits between -3 and 3
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tp2": ("llama", TP2),
    "mistral-pp2": ("mistral", {"pipeline_model_parallel_size": 2}),
    "mixtral-ep2": ("mixtral", {"expert_model_parallel_size": 2}),
    "mixtral-tp2": ("mixtral", TP2),
}
TEXT = torch.randint(3, VOCAB_SIZE, (9, 17), generator=torch.Generator().manual_seed(3))


class Writing(MCoreGPT):
    """Continues a prompt at the end of training, greedily."""

    def on_train_end(self) -> None:
        self.written = self.generate(TEXT[8, :PROMPT].tolist(), NEW, temperature=0)


def train(runs: dict[str, tuple[str, str, dict[str, Any]]]) -> dict[str, list[int]]:
    """Train each model two steps on this rank, export it, and return what it writes after a prompt."""
    written = {}
    for name, (folder, out, layout) in runs.items():
        module: Any = Writing.from_pretrained(folder, seq_length=16)
        rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in TEXT[:8]]
        loader: Any = DataLoader(rows, batch_size=2)
        make_trainer(MCoreStrategy(**layout), max_steps=2, callbacks=[SaveHFModel(out)]).fit(module, loader)
        written[name] = module.written
    return written


def with_tokenizer(folder: Path) -> str:
    """Write a tiny SentencePiece tokenizer, without which the converter converts nothing."""
    import sentencepiece

    text = folder / "text.txt"
    text.write_text("\n".join(f"{chr(97 + i % 26)}{chr(97 + i % 7)} {i}" for i in range(500)))
    where = str(folder / "tokenizer")
    arguments = {"model_prefix": where, "vocab_size": VOCAB_SIZE, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), **arguments)
    return str(folder)


@pytest.mark.works_with(
    "llama_cpp_python",
    "Llama, Mistral and Mixtral, trained on TP, PP and EP and exported: transformers' logits",
)
def test_an_exported_folder_is_converted_and_writes_what_the_model_in_training_wrote(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP names no checkout of llama.cpp")
    from transformers import AutoModelForCausalLM

    # llama.cpp's converter drops Mistral's sliding window
    whole = {"llama": {}, "mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None}}
    folders = {kind: with_tokenizer(save_tiny(kind, tmp_path / kind, **keys)) for kind, keys in whole.items()}
    runs = {name: (folders[kind], str(tmp_path / name), layout) for name, (kind, layout) in LAYOUTS.items()}
    written = run_ranks(2, train, runs, timeout=300)[0]
    for name, (_, out, _) in runs.items():
        file = f"{out}/model.gguf"
        command = [sys.executable, str(CONVERTER), out, "--outtype", "f32", "--outfile", file]
        subprocess.run(command, check=True, capture_output=True)
        # In fp32 throughout: llama.cpp keeps keys and values in fp16 unless told otherwise.
        fp32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        engine = llama_cpp.Llama(file, n_ctx=64, logits_all=True, verbose=False, n_threads=1, **fp32)
        engine.eval(written[name])
        logits = torch.tensor(engine.scores[: PROMPT + NEW])
        expected = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(torch.tensor([written[name]])).logits
        torch.testing.assert_close(logits, expected[0].detach(), rtol=0, atol=TOLERANCE)
        assert logits.argmax(dim=-1)[PROMPT - 1 : -1].tolist() == written[name][PROMPT:]
