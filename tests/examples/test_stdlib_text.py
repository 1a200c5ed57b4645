# SPDX-License-Identifier: Apache-2.0
"""The examples' data: nothing overlaps, labels are the next tokens, text survives encoding."""

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoTokenizer

from stdlib_text import StdlibText, Windows, join_files, read_sources, stdlib_folder

TEXT = "def f(x):\n\treturn 'é ☃ 𝄞\0'  # \r\n"
SMALL = 120_000  # bytes: enough for ten files of any Python


class MakeData(Protocol):
    def __call__(self, **arguments: Any) -> StdlibText: ...


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    def make(**arguments: Any) -> StdlibText:
        data = StdlibText(**{"max_bytes": SMALL, "seq_length": 16, "cache_dir": str(tmp_path)} | arguments)
        data.prepare_data()
        data.setup()
        return data

    return make


def test_windows_do_not_overlap_and_labels_are_the_next_tokens() -> None:
    windows = Windows(torch.arange(10, 24, dtype=torch.int32), seq_length=4)
    batches = [windows[index] for index in range(len(windows))]
    assert [batch["tokens"].tolist() for batch in batches] == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21]]
    assert [batch["labels"].tolist() for batch in batches] == [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21, 22]]
    assert {tensor.dtype for batch in batches for tensor in batch.values()} == {torch.int64}


def test_the_last_window_needs_one_token_more_for_its_label() -> None:
    assert len(Windows(torch.arange(8), seq_length=4)) == 1
    assert len(Windows(torch.arange(9), seq_length=4)) == 2


def test_at_most_keeps_windows_from_the_whole_stream() -> None:
    windows = Windows(torch.arange(100), seq_length=4, at_most=3)
    assert windows.starts == [0, 32, 64]


@pytest.mark.parametrize("vocab_size", [256, 300], ids=["bytes", "bpe"])
def test_text_survives_encoding(make_data: MakeData, vocab_size: int) -> None:
    data = make_data(vocab_size=vocab_size)
    tokens = data.encode(TEXT)
    assert data.decode(tokens) == TEXT
    assert max(tokens) < vocab_size


@pytest.mark.parametrize("vocab_size", [256, 300], ids=["bytes", "bpe"])
def test_transformers_has_the_same_tokens(make_data: MakeData, vocab_size: int, tmp_path: Path) -> None:
    data = make_data(vocab_size=vocab_size)
    data.save_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer(TEXT)["input_ids"] == data.encode(TEXT)
    assert tokenizer.decode(data.encode(TEXT)) == TEXT
    assert len(tokenizer) == vocab_size


def test_bpe_uses_its_whole_vocabulary_and_shortens_text(make_data: MakeData) -> None:
    data = make_data(vocab_size=300)
    assert data.tokenizer.get_vocab_size() == data.vocab_size == 300
    assert len(data.train_windows.stream) < len(make_data(vocab_size=256).train_windows.stream)


def test_no_file_is_in_both_splits_and_none_is_lost(make_data: MakeData) -> None:
    data = make_data(vocab_size=256)
    assert data.train_files
    assert data.val_files
    assert not data.train_files.keys() & data.val_files.keys()
    everything = read_sources(Path(stdlib_folder()), SMALL)
    assert data.train_files | data.val_files == everything


def test_windows_hold_the_files_of_their_split(make_data: MakeData) -> None:
    data = make_data(vocab_size=256)
    assert data.decode(data.val_windows.stream.tolist()) == join_files(data.val_files)
    assert data.decode(data.train_windows.stream.tolist()) == join_files(data.train_files)


def test_no_more_than_max_bytes_are_read() -> None:
    files = read_sources(Path(stdlib_folder()), 10_000)
    assert 9_990 <= sum(len(text.encode()) for text in files.values()) <= 10_000  # a cut character may be left out


def test_another_rank_reads_what_the_first_one_wrote(make_data: MakeData, tmp_path: Path) -> None:
    first = make_data(vocab_size=300)
    other = StdlibText(vocab_size=300, max_bytes=SMALL, seq_length=16, cache_dir=str(tmp_path))
    other.setup()
    assert torch.equal(other.train_windows.stream, first.train_windows.stream)
    assert other.encode(TEXT) == first.encode(TEXT)


def test_a_second_run_does_not_tokenise_again(make_data: MakeData) -> None:
    data = make_data()
    written = data.cache_file.stat().st_mtime_ns
    again = make_data()
    assert again.cache_file.stat().st_mtime_ns == written
    assert make_data(vocab_size=300).cache_file != data.cache_file


def test_loaders_give_batches_of_whole_windows(make_data: MakeData) -> None:
    data = make_data(batch_size=8)
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == batch["labels"].shape == (8, 16)
    assert sum(len(batch["tokens"]) for batch in data.val_dataloader()) == len(data.val_windows)


def test_tokens_before_prepare_data_are_refused(tmp_path: Path) -> None:
    data = StdlibText(cache_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) before setup\(\)"):
        data.setup()
    with pytest.raises(RuntimeError, match="the tokenizer is not loaded yet"):
        data.encode("x")


def test_text_too_short_for_a_window_is_refused(make_data: MakeData) -> None:
    with pytest.raises(ValueError, match="max_bytes=2000 leaves no validation window of seq_length=16; choose"):
        make_data(max_bytes=2000)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("vocab_size", 255, "vocab_size=255 cannot hold the 256 bytes"),
        ("seq_length", 0, "seq_length=0 is not positive"),
        ("batch_size", -1, "batch_size=-1 is not positive"),
        ("max_val_windows", 0, "max_val_windows=0 is not positive"),
    ],
)
def test_sizes_that_cannot_be_are_refused(argument: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StdlibText(**{argument: value})
