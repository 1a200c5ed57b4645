# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning example runs as a newcomer runs it, packed and padded; its YAML is the run of the script."""

import re
from pathlib import Path

import pytest

import finetune_gpt
import run_report
from stdlib_dialogues import StdlibDialogues, exchanges, make_tokenizer
from tests.examples.test_examples import (
    EXAMPLES,
    PNG,
    build,
    run_on_ranks,
    settings_of_model,
    settings_of_trainer,
)

SMALL = (
    *("--max-steps=5", "--val-every=5", "--hidden-size=32", "--num-layers=2", "--seq-length=512"),
    *("--vocab-size=300", "--max-bytes=400000", "--batch-size=4", "--micro-batch-size=2", "--sample-tokens=6"),
    "--learning-rate=0.01",
)
SOURCE = '''
"""A module."""

class Shelf:
    """Holds books."""

    def add(self, book, *, top=False):
        """Put a book on it."""

    def __len__(self):
        return 0

def search(title: str):
    """Find a book.

    Returns its place.
    """
'''


@pytest.mark.slow
@pytest.mark.distributed
def test_finetune_gpt_packs_learns_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_on_ranks(capsys, 4, "finetune_gpt.py", *SMALL, folder=tmp_path)
    assert "MCoreStrategy: tp2 pp1 cp2 dp1 sp" in output
    packed = re.search(r"train data: packed ([\d,]+) of \1 samples, .* rows, (\d\d\.\d\d)% filled; split", output)
    assert packed is not None, output
    assert float(packed[2]) > 95
    report = re.search(r"batches filled to (\d+\.\d)%; ([\d,]+) tokens/s without padding, ([\d,]+) with it", output)
    assert report is not None, output
    assert float(report[1]) > 90
    folder = tmp_path / "outputs/finetune_gpt"
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert (folder / "sample.txt").read_text(encoding="utf-8").startswith(f"{finetune_gpt.QUESTION}\n\n")
    losses = dict(run_report.read_curve(folder / "metrics.csv", "train_loss"))
    assert list(losses) == [1, 2, 3, 4, 5]
    assert losses[5] < losses[1] - 0.2
    assert run_report.read_curve(folder / "metrics.csv", "val_loss")[-1][0] == 5


@pytest.mark.slow
@pytest.mark.distributed
def test_the_same_samples_padded_have_the_most_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--no-packing", "--devices=2", "--tp=1", "--cp=2", "--output=padded")
    output = run_on_ranks(capsys, 2, "finetune_gpt.py", *SMALL, *options, folder=tmp_path)
    assert re.search(r"train data: ([\d,]+) of \1 samples in [\d,]+ rows, not packed", output), output
    report = re.search(r"batches filled to (\d+\.\d)%", output)
    assert report is not None, output
    assert float(report[1]) < 80


def test_the_yaml_is_the_run_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(EXAMPLES / "configs/finetune_gpt.yaml", monkeypatch)
    options = finetune_gpt.parse_arguments([])
    data = finetune_gpt.build_data(options)
    names = ("seq_length", "batch_size", "vocab_size", "packing", "max_bytes", "prepared", "overlong", "cache_dir")
    assert {name: getattr(built.datamodule, name) for name in names} == {name: getattr(data, name) for name in names}
    assert settings_of_model(built.model) == settings_of_model(finetune_gpt.build_model(options))
    assert settings_of_trainer(built.trainer) == settings_of_trainer(finetune_gpt.build_trainer(options))
    assert built.config["seed_everything"] == options.seed


def test_docstrings_are_the_answers_to_questions_about_their_names() -> None:
    assert list(exchanges("library", SOURCE)) == [
        {"prompt": "What is the module library for?", "response": "A module."},
        {"prompt": "What does library.Shelf do?", "response": "Holds books."},
        {"prompt": "What does library.Shelf.add(self, book, *, top=False) do?", "response": "Put a book on it."},
        {"prompt": "What does library.search(title: str) do?", "response": "Find a book.\n\nReturns its place."},
    ]
    assert list(exchanges("cut", SOURCE[:-9])) == []


def test_a_question_is_encoded_as_it_is_trained_and_an_answer_ends(tmp_path: Path) -> None:
    data = StdlibDialogues(vocab_size=300, folder=str(tmp_path))
    make_tokenizer(iter(["some text"] * 9), 300).save_pretrained(data.prepared / "tokenizer")
    question = data.encode("What?")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    trained = data.tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    assert trained[: len(question)] == question
    assert data.decode([*trained, *question]) == "What?\n\nThat."
