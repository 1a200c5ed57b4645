# SPDX-License-Identifier: Apache-2.0
"""Files of exchanges become rows: every sample once, packed or not; what is wrong with them has a file and a line."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.datamodule import MCoreFinetuningData
from lightning_mcore.data.packing.rows import PackingMultiples
from tests.support.chats import Row, characters, exchanges, stub_trainer, write
from tests.support.sentences import refuses

Samples = dict[int, tuple[list[int], list[int]]]


def data(folder: Path, files: Any, seq_length: int = 64, **options: Any) -> MCoreFinetuningData:
    """Return a data module that keeps its cache in ``folder``."""
    return MCoreFinetuningData(files, characters(), seq_length, cache_dir=str(folder / "cache"), **options)


def opened(folder: Path, files: Any, seq_length: int = 64, **options: Any) -> MCoreFinetuningData:
    """Return one that is set up, as Lightning does it."""
    module = data(folder, files, seq_length, **options)
    module.prepare_data()
    module.setup("fit")
    return module


def samples_of(loader: DataLoader[Any]) -> Samples:
    """Return inputs and targets of each sample that a loader gives, by number."""
    found: Samples = {}
    for batch in loader:
        for row in range(len(batch["tokens"])):
            found |= _of_row({name: values[row] for name, values in batch.items()})
    return found


def _of_row(row: dict[str, Tensor]) -> Samples:
    starts = row["cu_seqlens_padded"].tolist() if "cu_seqlens" in row else [0]
    lengths = row["cu_seqlens"].diff().tolist() if "cu_seqlens" in row else [int(row["lengths"])]
    found = {}
    for start, length, number in zip(starts, lengths, row["sample_ids"].reshape(-1).tolist(), strict=False):
        place = slice(start, start + length)
        labels = row["labels"][place].masked_fill(row["loss_mask"][place] == 0, -1)
        if number >= 0:
            assert row["position_ids"][place].tolist() == list(range(length))
            found[number] = (row["tokens"][place].tolist(), labels.tolist())
    return found


def expected(rows: list[Row]) -> Samples:
    """Return the same from the rows, without files and packing."""
    encoder, found = ChatEncoder(characters()), {}
    for number, row in enumerate(rows):
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        sample = encoder.encode(turns, number, "row")
        assert sample.loss_mask is not None
        labels = torch.tensor(sample.tokens[1:]).masked_fill(~torch.tensor(sample.loss_mask[1:]), -1)
        found[number] = (sample.tokens[:-1].tolist(), labels.tolist())
    return found


# Files


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_packed_or_not_each_sample_is_there_once(tmp_path: Path, suffix: str) -> None:
    rows = exchanges(40)
    write(tmp_path / f"data/a.{suffix}", rows[:15])
    write(tmp_path / f"data/b.{suffix}", rows[15:])
    for packing in (True, False):
        for workers in (0, 2):
            module = opened(tmp_path, str(tmp_path / "data"), packing=packing, num_workers=workers)
            loader = module.train_dataloader()
            assert samples_of(loader) == expected(rows), (packing, workers)
    statistics = opened(tmp_path, str(tmp_path / "data/*")).statistics["train"]
    assert statistics.packed == 40
    assert statistics.fill > 0.9


def test_tokens_are_kept_and_a_change_of_files_or_settings_makes_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.jsonl", exchanges(6))
    made = []
    encode = ChatEncoder.encode

    def counting(self: ChatEncoder, *arguments: Any) -> Any:
        made.append(arguments[1])
        return encode(self, *arguments)

    monkeypatch.setattr(ChatEncoder, "encode", counting)
    opened(tmp_path, file)
    assert made == list(range(6))
    opened(tmp_path, file, seq_length=128, packing=False)
    assert len(made) == 6
    opened(tmp_path, file, loss_on="all")
    assert len(made) == 12
    write(tmp_path / "a.jsonl", exchanges(7))
    assert len(opened(tmp_path, file).train_dataloader().dataset) > 0
    assert len(made) == 19


def test_a_share_is_held_out_for_validation(tmp_path: Path) -> None:
    rows = exchanges(40)
    module = opened(tmp_path, write(tmp_path / "a.jsonl", rows), validation_share=0.25)
    train, validation = samples_of(module.train_dataloader()), samples_of(module.val_dataloader())
    assert (len(train), len(validation)) == (30, 10)
    assert train | validation == expected(rows)
    again = opened(tmp_path, str(tmp_path / "a.jsonl"), validation_share=0.25)
    assert samples_of(again.val_dataloader()) == validation
    other = opened(tmp_path, str(tmp_path / "a.jsonl"), validation_share=0.25, seed=1)
    assert samples_of(other.val_dataloader()).keys() != validation.keys()


def test_a_share_is_split_as_datasets_splits_it(tmp_path: Path) -> None:
    """Rounded up: 10.4 samples are 11, and 0.4 are one."""
    file = write(tmp_path / "a.jsonl", exchanges(40))
    for share in (0.26, 0.01):
        module = opened(tmp_path, file, validation_share=share, seed=1)
        split = Dataset.from_dict({"row": range(40)}).train_test_split(share, seed=1)
        assert samples_of(module.train_dataloader()).keys() == set(split["train"]["row"])
        assert samples_of(module.val_dataloader()).keys() == set(split["test"]["row"])


def test_only_what_a_stage_needs_is_read(tmp_path: Path) -> None:
    rows = exchanges(8)
    files = {name: write(tmp_path / f"{name}.jsonl", rows) for name in ("validation", "test")}
    module = data(tmp_path, "nowhere.jsonl", validation_files=files["validation"], test_files=files["test"])
    module.setup("validate")
    module.setup("test")
    assert samples_of(module.val_dataloader()) == samples_of(module.test_dataloader()) == expected(rows)
    assert opened(tmp_path, files["test"]).val_dataloader() == []
    with refuses(RuntimeError, "the train data is not set up yet; call"):
        module.train_dataloader()


def test_another_layout_packs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = exchanges(20)
    module = opened(tmp_path, write(tmp_path / "a.jsonl", rows))
    assert any(start % 4 for start in starts(module))
    monkeypatch.setattr(
        "lightning_mcore.data.finetuning.datamodule.packing_multiples", lambda trainer: PackingMultiples(4, 8)
    )
    module.setup("fit")
    assert not any(start % 4 for start in starts(module))
    assert samples_of(module.train_dataloader()) == expected(rows)
    padded = opened(tmp_path, str(tmp_path / "a.jsonl"), packing=False, batch_size=3)
    assert {batch["tokens"].shape[1] % 8 for batch in padded.train_dataloader()} == {0}


def starts(module: MCoreFinetuningData) -> list[int]:
    """Return where sub-sequences begin in all rows of the training data."""
    return [start for batch in module.train_dataloader() for start in batch["cu_seqlens_padded"].flatten().tolist()]


# What becomes of samples


def test_what_teaches_nothing_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*exchanges(5), {"prompt": "q", "response": ""}, {"prompt": "q", "response": None}]
    module = opened(tmp_path, write(tmp_path / "a.jsonl", rows))
    assert samples_of(module.train_dataloader()) == expected(rows[:5])
    assert "left out 2 without an answer" in str(module.statistics["train"])


def test_a_piece_of_a_long_sample_is_read_without_the_others(tmp_path: Path) -> None:
    """Otherwise the time for a document would grow with the square of its length."""
    file = write(tmp_path / "a.jsonl", [{"prompt": "q", "response": "a" * 10**6}])
    for overlong in ("cut", "split"):
        rows: Any = opened(tmp_path, file, overlong=overlong, packing=False).train_dataloader().dataset
        tracemalloc.start()
        assert rows[len(rows) - 1].length > 0
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10**5, f"{peak} bytes"


def test_a_sample_that_is_longer_than_a_row_is_refused_cut_or_split(tmp_path: Path) -> None:
    rows = [
        *exchanges(3, longest=5),
        {"prompt": "long", "response": "abcdefgh" * 10},
        {"prompt": "p" * 99, "response": "x"},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    whole = expected(rows)
    module = data(tmp_path, file, 32)
    with refuses(ValueError, "take more than the 32 tokens of a row, the longest 105 (row 4)"):
        module.setup("fit")
    cut = opened(tmp_path, file, 32, overlong="cut")
    found = samples_of(cut.train_dataloader())
    assert found == {**{number: whole[number] for number in range(3)}, 3: tuple(part[:32] for part in whole[3])}
    assert "cut 1 that were longer than a row by" in str(cut.statistics["train"])
    assert "left out 1 without a target" in str(cut.statistics["train"])
    split = opened(tmp_path, file, 32, overlong="split", packing=False)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for batch in split.train_dataloader():
        for number, part in _of_row({name: values[0] for name, values in batch.items()}).items():
            pieces.setdefault(number, []).extend(zip(*part, strict=True))
    assert {number: sorted(pairs) for number, pairs in pieces.items() if number < 4} == {
        number: sorted(zip(*whole[number], strict=True)) for number in range(4)
    }
    assert "split 2 that were longer than a row into" in str(split.statistics["train"])


# Bad input


def refuse(about: str, folder: Path, files: Any, **options: Any) -> None:
    """Expect that a data module refuses files."""
    module = data(folder, files, **options)
    module.prepare_data()
    with refuses((ValueError, TypeError, FileNotFoundError), about):
        module.setup("fit")


def refuse_to_stream(about: str, folder: Path, files: Any) -> None:
    """Expect that a stream refuses files."""
    module = data(folder, files, streaming=True, shuffle_buffer=1)
    with refuses((ValueError, TypeError), about):
        read(module)


def test_a_broken_line_has_a_file_and_a_number(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.jsonl", exchanges(3))
    broken = tmp_path / "b.jsonl"
    for line, reason in {
        '{"prompt": "a", "response": }': "Expecting value at column 29",
        '{"prompt": "a", "response": "b"} {"prompt"': "Extra data at column 34",
        '["a", "b"]': "it holds list instead of named columns",
    }.items():
        broken.write_text('{"prompt": "a", "response": "b"}\n\n' + line + "\n")
        for check in (refuse, refuse_to_stream):
            check(f"b.jsonl is not a JSON object: {reason}; fix or delete it", tmp_path, [whole, str(broken)])


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter:DeprecationWarning")  # of datasets
def test_a_file_of_zeros_is_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "zeros.jsonl").write_bytes(bytes(1000))
    for check in (refuse, refuse_to_stream):
        check("zeros.jsonl is not a JSON object: ", tmp_path, [str(tmp_path / "zeros.jsonl")])


def read(module: MCoreFinetuningData) -> list[Any]:
    """Set a data module up and return its batches."""
    module.setup("fit")
    return list(module.train_dataloader())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    rows = exchanges(3)
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "a.parquet", rows)
    write(tmp_path / "other.jsonl", [{"question": "q", "response": "a"}])
    (tmp_path / "a.csv").write_text("prompt,response\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{\n}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ä", "response": "b"}\n'.encode("latin-1"))
    place = {name: str(tmp_path / name) for name in ("a.jsonl", "a.parquet", "a.csv", "other.jsonl", "empty.jsonl")}
    for about, files in (
        ("train_files='missing.jsonl' does not exist", "missing.jsonl"),
        ("train_files='missing/*.jsonl' does not exist", "missing/*.jsonl"),
        ("is a folder without jsonl or parquet files", str(tmp_path / "empty")),
        ("is the folder of a model; give jsonl or parquet files", str(tmp_path / "model")),
        ("a.csv'; give files that end with .jsonl, .json or .parquet", place["a.csv"]),
        ("mixes JSON and parquet files", [place["a.jsonl"], place["a.parquet"]]),
        ("a.jsonl' twice", [place["a.jsonl"], str(tmp_path / "a.json*")]),
        ("other.jsonl has the columns question, response but ", [place["a.jsonl"], place["other.jsonl"]]),
        ("empty.jsonl is empty", place["empty.jsonl"]),
        ("latin.jsonl is not a JSON object: it is not UTF-8 at byte 12", str(tmp_path / "latin.jsonl")),
        ("train_files is an empty list", []),
    ):
        refuse(about, tmp_path, files)
    with pytest.raises(ValueError, match=r"cut\.parquet is not a complete parquet file: "):  # and the reader's words
        data(tmp_path, str(tmp_path / "cut.parquet")).setup("fit")


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    talks = [{"messages": [{"role": "user", "content": "Hi"}]}, {"messages": [{"role": "bot", "content": "Hi"}]}]
    file = write(tmp_path / "talks.jsonl", talks)
    for check in (refuse, refuse_to_stream):
        check("talks.jsonl has the role 'bot'", tmp_path, file)
    silent = write(tmp_path / "silent.jsonl", [{"prompt": "q", "response": ""}])
    refuse("silent.jsonl' has nothing to learn (packed 0 of 1 samples", tmp_path, silent)
    short = write(tmp_path / "a.jsonl", exchanges(3))
    refuse("validation_share=0.9 of 3 samples leaves none to train on", tmp_path, short, validation_share=0.9)


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", exchanges(3))
    module = data(tmp_path, file)
    module.trainer = stub_trainer(vocab_size=258)
    with refuses(ValueError, "row 0 of train_files has the token 258"):
        module.setup("fit")
    module.streaming = True
    module.setup("fit")
    with refuses(ValueError, "has the token 258, outside the vocabulary"):
        list(module.train_dataloader())


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"validation_share": 1.0},
        {"validation_share": 0.1, "validation_files": "b"},
        {"validation_share": 0.1, "streaming": True},
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with refuses(ValueError, *options):
        data(tmp_path, "a.jsonl", **options)


def test_a_tokenizer_is_loaded_from_its_folder(tmp_path: Path) -> None:
    characters().save_pretrained(tmp_path / "tokenizer")
    module = MCoreFinetuningData("a.jsonl", str(tmp_path / "tokenizer"), 64)
    assert module.vocab_size == 260
    (tmp_path / "nothing").mkdir()
    with refuses(ValueError, "give the folder or name of a tokenizer"):
        MCoreFinetuningData("a.jsonl", str(tmp_path / "nothing"), 64).vocab_size  # noqa: B018
