# SPDX-License-Identifier: Apache-2.0
"""The README keeps its promises: its code runs, its files exist, and its example stands near the top."""

import re
from pathlib import Path

import pytest
import torch

from tests.chats import characters, exchanges, write
from tests.examples.test_examples import run_on_ranks
from tests.hf_models import save_tiny

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)

_TRAIN_NET = """

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        text = (torch.arange(17) * (index + 1)) % 256
        return {"tokens": text[:-1], "labels": text[1:]}


if __name__ == "__main__":
    import sys

    from lightning_mcore import MCoreStrategy

    strategy = MCoreStrategy(pipeline_model_parallel_size=2) if sys.argv[1] == "mcore" else sys.argv[1]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, max_steps=4,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(Tokens(), batch_size=2))
    print("trained to", float(trainer.callback_metrics["train_loss"]), "in", trainer.global_step, "steps")
"""

_FINETUNE = """

if __name__ == "__main__":
    from tests.chats import characters

    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    finetune("chats.jsonl", characters(), shape, seq_length=64, accelerator="cpu")
"""


_FINETUNE_HF = """

if __name__ == "__main__":
    finetune_hf("model", "chats.jsonl", seq_length=64, accelerator="cpu")
"""

_ARGUMENTS = """

if __name__ == "__main__":
    layout = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "--use_cpu"]
    recipe = ["--gradient_accumulation_steps", "2", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none"]
    batch = ["--output_dir", "runs", "--per_device_train_batch_size", "2"]
    train([*layout, *recipe, *batch], "model", "chats.jsonl", devices=2)
"""


def test_the_first_example_is_complete_within_forty_lines() -> None:
    lines = TEXT.splitlines()
    start = lines.index("```python")
    assert start + 1 + len(BLOCKS[0].splitlines()) < 40
    assert "trainer.fit(" in BLOCKS[0]


@pytest.mark.slow
def test_the_first_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[0])
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "tp2 pp2" in output
    assert "`max_steps=20` reached" in output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mcore", "ddp", "auto"])
def test_the_users_own_model_runs_under_every_strategy(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "net.py"
    script.write_text(BLOCKS[1] + _TRAIN_NET)
    output = run_on_ranks(capsys, 1 if strategy == "auto" else 2, str(script), strategy, folder=tmp_path)
    loss = float(re.findall(r"trained to (\S+) in 4 steps", output)[0])
    assert 0 < loss < 6  # ln 256 = 5.5 before any step


@pytest.mark.slow
def test_the_example_of_packed_fine_tuning_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "finetune.py"
    script.write_text(BLOCKS[3] + _FINETUNE)
    write(tmp_path / "chats.jsonl", exchanges(60))
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "train data: packed 54 of 54 samples" in output
    assert "`max_epochs=1` reached" in output


@pytest.mark.slow
def test_the_example_of_arguments_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[2] + _ARGUMENTS)
    write(tmp_path / "chats.jsonl", exchanges(60))
    tokenizer = characters()
    save_tiny("llama", tmp_path / "model", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.save_pretrained(tmp_path / "model")
    output = run_on_ranks(capsys, 2, str(script), folder=tmp_path)
    assert "tp2 pp1" in output
    assert "`max_steps=3` reached" in output


@pytest.mark.slow
def test_the_example_of_a_hugging_face_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    script = tmp_path / "finetune.py"
    script.write_text(BLOCKS[5] + _FINETUNE_HF)
    write(tmp_path / "chats.jsonl", exchanges(60))
    tokenizer = characters()
    save_tiny("llama", tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    output = run_on_ranks(capsys, 4, str(script), folder=tmp_path)
    assert "`max_epochs=1` reached" in output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned").dtype == torch.bfloat16


def test_the_family_on_this_page_is_the_one_that_is_tested() -> None:
    example = (README.parent / "examples/own_family.py").read_text()
    assert example.endswith(BLOCKS[6])
    assert len(BLOCKS[6].splitlines()) <= 30


def test_every_file_that_the_readme_names_exists() -> None:
    root = README.parent
    named = set(re.findall(r"`((?:lightning_mcore|tests|examples|benchmarks)/[\w./]*)`", TEXT))
    assert named
    assert [name for name in sorted(named) if not (root / name).exists()] == []
