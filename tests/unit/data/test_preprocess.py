# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore preprocess``: the right tokens, the same bytes however they come about, whole or not at all."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from lightning_mcore.cli import main
from lightning_mcore.data.preprocess import unfinished
from lightning_mcore.data.preprocess.inputs import cut, find_inputs
from lightning_mcore.data.preprocess.pool import Workers
from lightning_mcore.data.preprocess.run import Options, ProgressLine, Summary, preprocess
from lightning_mcore.data.preprocess.unfinished import Progress, UnfinishedDataset
from lightning_mcore.data.preprocess.worker import read_separated
from lightning_mcore.data.pretraining.index import read_facts, read_index, token_type, write_index
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.sentences import refuses

pytestmark = pytest.mark.slow

EOD = "<|endoftext|>"
WORDS = ["Baum", "tree", "träumen", "木", "if x:\n    y()", "\n", "1234", "🌲🌳", " ", "\t", "don't", EOD]


def texts(count: int) -> list[str]:
    """Return documents of all lengths; every ninth is empty."""
    chooser = random.Random(7)
    return ["" if n % 9 == 4 else " ".join(chooser.choices(WORDS, k=1 + n % 40)) for n in range(count)]


DOCUMENTS = texts(80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a tokenizer and the documents in every format."""
    place = tmp_path_factory.mktemp("corpus")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    tokenizer.save(str(place / "tokenizer.json"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOD)
    wrapped.save_pretrained(place / "hugging")
    (place / "text").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (place / "text" / f"{number:03}.txt").write_bytes(text.encode())
    lines = [json.dumps({"id": number, "text": text}, ensure_ascii=False) for number, text in enumerate(DOCUMENTS)]
    (place / "docs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_parquet(place / "docs.parquet", {"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
    return place


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, path, **options)


def options(folder: Path, output: Path, source: str = "docs.jsonl", **changed: Any) -> Options:
    """Return a command of one worker."""
    given = {"tokenizer": str(folder / "hugging"), "workers": 1, **changed}
    return Options(inputs=[str(folder / source)], output=str(output), **given)


def files_of(prefix: Path) -> dict[str, bytes]:
    return {path.suffix: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.*") if path.is_file()}


def documents_of(prefix: Path) -> Iterator[list[int]]:
    dataset = IndexedDataset(str(prefix))
    for number in range(len(dataset)):
        yield dataset[number].tolist()


def expected(folder: Path, append_eod: bool = True) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "hugging")
    end = [tokenizer.eos_token_id] if append_eod else []
    return [tokenizer(text, add_special_tokens=False).input_ids + end for text in DOCUMENTS if text]


# ---- the tokens


@pytest.mark.parametrize("source", ["docs.jsonl", "docs.parquet", "text"])
def test_every_document_has_the_tokens_of_the_tokenizer(folder: Path, tmp_path: Path, source: str) -> None:
    summary = preprocess(options(folder, tmp_path / "out", source))
    assert list(documents_of(tmp_path / "out")) == expected(folder)
    empty = sum(not text for text in DOCUMENTS)
    assert (summary.documents, summary.empty) == (len(DOCUMENTS) - empty, empty)
    assert summary.tokens == sum(map(len, expected(folder)))
    assert summary.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert not (tmp_path / "out.unfinished").exists()


def test_a_bare_tokenizer_file_gives_the_same(folder: Path, tmp_path: Path) -> None:
    bare = options(folder, tmp_path / "bare", tokenizer=str(folder / "tokenizer.json"), eod_token=EOD)
    beside = options(folder, tmp_path / "beside", tokenizer=str(folder / "hugging" / "tokenizer.json"))
    wrapped = options(folder, tmp_path / "wrapped")
    for each in (bare, beside, wrapped):
        preprocess(each)
    for suffix in (".bin", ".idx"):
        contents = {Path(each.output + suffix).read_bytes() for each in (bare, beside, wrapped)}
        assert len(contents) == 1


def test_documents_end_with_nothing_on_request(folder: Path, tmp_path: Path) -> None:
    preprocess(options(folder, tmp_path / "out", append_eod=False))
    assert list(documents_of(tmp_path / "out")) == expected(folder, append_eod=False)
    assert read_facts(str(tmp_path / "out"))["eod_appended"] is False


def test_a_tokenizer_that_runs_in_python_works_too(folder: Path, tmp_path: Path) -> None:
    slow = ByT5Tokenizer()
    slow.save_pretrained(tmp_path / "byt5")
    preprocess(options(folder, tmp_path / "out", tokenizer=str(tmp_path / "byt5")))
    wanted = [[*slow(text, add_special_tokens=False).input_ids, slow.eos_token_id] for text in DOCUMENTS if text]
    assert list(documents_of(tmp_path / "out")) == wanted


# ---- the files


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 100_000])
def test_the_files_are_those_of_megatrons_builder(tmp_path: Path, vocab_size: int) -> None:
    dtype = token_type(vocab_size)
    assert dtype is DType.optimal_dtype(vocab_size)
    lengths = np.array([3, 1, 70_000, 5], dtype=np.int32)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for length in lengths:
        builder.add_item(torch.ones(int(length), dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_index(str(tmp_path / "ours.idx"), lengths, dtype)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    index = read_index(str(tmp_path / "theirs"))
    assert (index.dtype, index.lengths.tolist(), index.documents) == (dtype, lengths.tolist(), 4)


def test_an_index_of_many_documents_is_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.arange(1, 11, dtype=np.int32)
    write_index(str(tmp_path / "whole"), lengths, np.uint16)
    monkeypatch.setattr("lightning_mcore.data.pretraining.index._BLOCK", 3)
    write_index(str(tmp_path / "blocks"), lengths, np.uint16)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


def test_the_same_bytes_for_any_number_of_workers_and_size_of_pieces(folder: Path, tmp_path: Path) -> None:
    found = []
    for name, changed in {
        "one": {"workers": 1},
        "two": {"workers": 2, "piece_bytes": 300},
        "three": {"workers": 3, "piece_bytes": 1},
    }.items():
        preprocess(options(folder, tmp_path / name, **changed))
        found.append(files_of(tmp_path / name))
    assert sorted(found[0]) == [".bin", ".checksums", ".idx", ".json"]
    assert found[0] == found[1] == found[2]


def test_rows_of_one_large_row_group_are_shared_out(folder: Path, tmp_path: Path) -> None:
    many = [f"{number} {text}" for number, text in enumerate(texts(700))]
    write_parquet(tmp_path / "many.parquet", {"text": many}, row_group_size=10_000)
    files, _ = find_inputs([str(tmp_path / "many.parquet")])
    assert len(list(cut(files, None, "text", 100))) == 3
    preprocess(options(folder, tmp_path / "out", str(tmp_path / "many.parquet"), piece_bytes=100, append_eod=False))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert list(documents_of(tmp_path / "out")) == [tokenizer.encode(text).ids for text in many]


def test_a_row_group_is_not_read_once_for_each_of_thousands_of_pieces(tmp_path: Path) -> None:
    write_parquet(tmp_path / "many.parquet", {"text": [str(number) for number in range(2**16)]})
    files, _ = find_inputs([str(tmp_path / "many.parquet")])
    pieces = list(cut(files, None, "text", 1))
    assert len(pieces) == 64
    assert [(piece["first"], piece["rows"]) for piece in pieces] == [(first, 1024) for first in range(0, 2**16, 1024)]


@pytest.mark.parametrize("separator", ["\n\n", "<end>", "aba", "x"])
@pytest.mark.parametrize("size", [1, 5, 17, 1000])
def test_separators_split_as_python_does_wherever_a_piece_ends(tmp_path: Path, separator: str, size: int) -> None:
    chooser = random.Random(3)
    text = "".join(chooser.choices(["a", "b", "\n", "\n\n", "x", "ababa", "<end>", "ö"], k=200)) + "z"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    files, _ = find_inputs([str(tmp_path / "a.txt")])
    pieces = list(cut(files, separator, "text", size))
    found = [text for piece in pieces for text, _ in read_separated(piece, {"separator": separator})]
    assert found == text.split(separator)
    assert sum(piece["input_bytes"] for piece in pieces) == (tmp_path / "a.txt").stat().st_size


def test_a_byte_order_mark_and_a_last_line_without_an_end_are_no_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "tree"}\r\n\n{"text": "Baum"}')
    summary = preprocess(options(folder, tmp_path / "out", str(tmp_path / "a.jsonl"), append_eod=False))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert list(documents_of(tmp_path / "out")) == [tokenizer.encode(text).ids for text in ("tree", "Baum")]
    assert summary.empty == 1


def test_inputs_keep_their_order_and_those_of_folders_and_patterns_are_sorted(folder: Path, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md", "data.json", ".hidden.txt", "in.unfinished/x.txt", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("tree")
    files, left_out = find_inputs([str(tmp_path)])
    assert [file.path.removeprefix(f"{tmp_path}/") for file in files] == ["a.txt", "b.txt", "sub/d.txt"]
    assert left_out == 3
    files, _ = find_inputs([str(tmp_path / "b.txt"), str(tmp_path / "[ac].*")], "text")
    assert [Path(file.path).name for file in files] == ["b.txt", "a.txt", "c.md"]


# ---- interrupted


class Watch:
    """Writes down how far it has come."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def __call__(self, progress: Progress, total: int) -> None:
        self.seen.append(progress)

    @property
    def resumed(self) -> int:
        """How many pieces an earlier run had finished, if all of them come first."""
        return max((progress.pieces for progress in self.seen[1:2]), default=1) - 1


class Interruption(Watch):
    """Raises or kills when so many pieces are done."""

    def __init__(self, pieces: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.pieces = pieces
        self.error = error

    def __call__(self, progress: Progress, total: int) -> None:
        super().__call__(progress, total)
        if progress.pieces == self.pieces:
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> dict[str, bytes]:
    """Make the dataset without an interruption."""
    preprocess(options(folder, tmp_path / "whole"))
    return files_of(tmp_path / "whole")


def run_and_die(command: Options, pieces: int) -> None:
    """Rank function: run until so many pieces are done, and be killed."""
    preprocess(command, Interruption(pieces))


@pytest.mark.parametrize("died_at", [0, 1, 9])
def test_a_killed_command_goes_on_to_the_same_bytes(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], died_at: int
) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500, workers=2)
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(1, run_and_die, command, died_at, open_group=False)
    assert set(files_of(tmp_path / "out")) == set()
    watch = Watch()
    summary = preprocess(replace(command, workers=1), watch)
    # Pieces are finished in any order, so they are counted by those that were left: one call each after the first.
    files, _ = find_inputs(command.inputs)
    pieces = len(list(cut(files, command.separator, command.text_column, command.piece_bytes)))
    resumed = pieces - (len(watch.seen) - 1)
    assert resumed >= died_at  # the other worker may have finished one more
    assert summary.resumed == (resumed > 0)
    assert files_of(tmp_path / "out") == whole


def test_ctrl_c_keeps_what_is_done(folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500)
    with pytest.raises(KeyboardInterrupt):
        preprocess(command, Interruption(5, KeyboardInterrupt()))
    watch = Watch()
    preprocess(command, watch)
    assert watch.resumed == 5
    assert files_of(tmp_path / "out") == whole


def test_a_full_disk_is_one_sentence_and_no_end(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source, prefix = str(folder / "docs.jsonl"), str(tmp_path / "out")
    arguments = ["preprocess", source, "--output", prefix, "--tokenizer", str(folder / "hugging"), "--workers", "1"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedDataset, "publish", full)
        assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said == (
        f"error: No space left on device; the finished work is kept in {prefix}.unfinished, and the same command"
        " resumes from there\n"
    )
    assert main(arguments) == 0
    assert "to train on it: MCorePretrainingData(" in capsys.readouterr().out
    assert files_of(tmp_path / "out") == whole


def test_a_worker_that_cannot_write_says_what_the_disk_said(folder: Path, tmp_path: Path) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500)

    def remove_folder(progress: Progress, total: int) -> None:
        if progress.pieces == 3:
            shutil.rmtree(f"{command.output}.unfinished")

    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        preprocess(command, remove_folder)


def test_of_several_broken_pieces_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n' * 40)
    pieces = list(cut(find_inputs([str(tmp_path / "a.jsonl")])[0], None, "text", 20))
    settings = {"tokenizer_json": None, "tokenizer": "none", "text_column": "text", "add_special_tokens": False}
    settings["tokenizer_json"] = Tokenizer(models.BPE()).to_str()
    for _ in range(3):
        with Workers(3, settings) as workers, refuses(ValueError, "a.jsonl, line 1 has a number"):
            list(workers.results(iter(pieces)))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_crash_while_files_get_their_names_is_made_up_for(
    folder: Path, tmp_path: Path, whole: dict[str, bytes], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = options(folder, tmp_path / "out", overwrite=True)
    for suffix in (".bin", ".idx"):
        Path(command.output + suffix).write_text("of the dataset before")
    names: list[str] = []
    real = os.replace

    def replace_or_crash(source: Any, target: Any) -> None:
        if str(target).startswith(command.output + ".") and ".unfinished" not in str(target):
            names.append(str(target))
            if len(names) == step:
                raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("lightning_mcore.data.preprocess.unfinished.os.replace", replace_or_crash)
        if step <= 4:
            with pytest.raises(KeyboardInterrupt):
                preprocess(command)
            assert not Path(command.output + ".idx").exists()
            preprocess(replace(command, overwrite=False))
        else:
            preprocess(command)
    assert files_of(tmp_path / "out") == whole
    assert names[-1].endswith(".idx")


def test_finished_pieces_that_are_damaged_are_made_again(folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500)
    with pytest.raises(KeyboardInterrupt):
        preprocess(command, Interruption(6, KeyboardInterrupt()))
    intact, cut_off, changed, emptied, zeros, _ = sorted(Path(f"{command.output}.unfinished").glob("*.piece"))
    cut_off.write_bytes(cut_off.read_bytes()[:-9])
    content = changed.read_bytes()
    changed.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    emptied.write_bytes(b"")
    zeros.write_bytes(bytes(zeros.stat().st_size))
    intact.with_name("x.piece.123").write_bytes(b"of a killed worker")
    watch = Watch()
    summary = preprocess(command, watch)
    assert sum(not progress.resumed_bytes for progress in watch.seen[1:]) <= 1 + 4
    assert summary.resumed
    assert files_of(tmp_path / "out") == whole


def test_a_damaged_description_of_unfinished_work_is_told(
    folder: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500)
    interrupted(command)
    Path(f"{command.output}.unfinished", "command").write_text("{")
    with refuses(ValueError, "command is damaged; start again with"):
        preprocess(command)
    assert not preprocess(replace(command, overwrite=True)).resumed
    assert files_of(tmp_path / "out") == whole


def test_a_worker_that_dies_takes_nothing_with_it(folder: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=200)

    def kill_worker(progress: Progress, total: int) -> None:
        if progress.pieces == 3:
            for child in psutil.Process().children():
                if "data/preprocess/worker.py" in " ".join(child.cmdline()):
                    child.kill()

    with refuses(RuntimeError, "a worker died with SIGKILL, perhaps"):
        preprocess(command, kill_worker)
    assert preprocess(command).resumed
    assert files_of(tmp_path / "out") == whole


def interrupted(command: Options) -> None:
    with pytest.raises(KeyboardInterrupt):
        preprocess(command, Interruption(3, KeyboardInterrupt()))


def test_only_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "docs.jsonl"
    source.write_bytes((folder / "docs.jsonl").read_bytes())
    command = options(folder, tmp_path / "out", str(source), piece_bytes=500)
    interrupted(command)
    with refuses(ValueError, "was started with end-of-document token 0"):
        preprocess(replace(command, append_eod=False))
    with refuses(ValueError, "was started with other inputs (1 files"):
        preprocess(replace(command, inputs=[str(folder / "text" / f"{name}.txt") for name in ("000", "001")]))
    os.utime(source)
    with refuses(ValueError, "was started with another content of"):
        preprocess(command)
    assert not preprocess(replace(command, overwrite=True)).resumed
    assert list(documents_of(tmp_path / "out")) == expected(folder)


def test_a_mended_file_costs_no_more_than_itself(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "docs.jsonl").read_bytes().splitlines(keepends=True)
    for name, part in {"a.jsonl": lines[:30], "b.jsonl": [], "c.jsonl": [*lines[30:], b"oops"]}.items():
        (tmp_path / name).write_bytes(b"".join(part))
    command = options(folder, tmp_path / "out", str(tmp_path / "*.jsonl"), piece_bytes=500)
    with refuses(ValueError, "c.jsonl, line 51 is not JSON"):
        preprocess(command)
    (tmp_path / "c.jsonl").write_bytes(b"".join(lines[30:40]))  # less than was tokenised of it before
    watch = Watch()
    assert preprocess(command, watch).resumed
    begun = next(progress for progress in reversed(watch.seen) if progress.resumed_bytes)
    assert begun.resumed_bytes == sum(len(text.encode()) for text in DOCUMENTS[:30])
    kept = sum(bool(text) for text in DOCUMENTS[:40])
    assert list(documents_of(tmp_path / "out")) == expected(folder)[:kept]
    assert (tmp_path / "out.bin").stat().st_size == 2 * sum(map(len, expected(folder)[:kept]))


def test_small_text_files_share_pieces_and_an_interruption_loses_none(folder: Path, tmp_path: Path) -> None:
    command = options(folder, tmp_path / "out", "text", piece_bytes=3000)
    with pytest.raises(KeyboardInterrupt):
        preprocess(command, Interruption(2, KeyboardInterrupt()))
    watch = Watch()
    preprocess(command, watch)
    assert watch.resumed == 2
    assert watch.seen[-1].pieces < watch.seen[-1].documents
    assert list(documents_of(tmp_path / "out")) == expected(folder)


def test_a_command_goes_on_that_names_its_files_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(KeyboardInterrupt):
        preprocess(options(folder, tmp_path / "out", piece_bytes=500), Interruption(2, KeyboardInterrupt()))
    assert preprocess(options(tmp_path / "link", tmp_path / "out", piece_bytes=500)).resumed
    assert list(documents_of(tmp_path / "out")) == expected(folder)


def test_what_another_command_replaced_is_never_taken_up_again(folder: Path, tmp_path: Path) -> None:
    command = options(folder, tmp_path / "out", piece_bytes=500)
    interrupted(command)
    run_other = replace(command, append_eod=False, overwrite=True)
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        run_ranks(1, run_and_die, run_other, 2, open_group=False)
    with refuses(ValueError, "was started with end-of-document token"):
        preprocess(command)
    assert not preprocess(replace(command, overwrite=True)).resumed
    assert list(documents_of(tmp_path / "out")) == expected(folder)


def test_a_finished_dataset_is_replaced_only_when_told(folder: Path, tmp_path: Path) -> None:
    command = options(folder, tmp_path / "out")
    preprocess(command)
    before = files_of(tmp_path / "out")
    other = replace(command, append_eod=False)
    with refuses(FileExistsError, "out.bin already exists; give another"):
        preprocess(other)
    assert files_of(tmp_path / "out") == before
    preprocess(replace(other, overwrite=True))
    assert list(documents_of(tmp_path / "out")) == expected(folder, append_eod=False)


def hold_and_try(prefix: str) -> str:
    """Rank function: rank 0 writes a dataset, and rank 1 tries to write the same."""
    if torch.distributed.get_rank() == 0:
        dataset = UnfinishedDataset(prefix, {}, overwrite=False)
        torch.distributed.barrier()
        torch.distributed.barrier()
        dataset.close()
        return ""
    torch.distributed.barrier()
    try:
        UnfinishedDataset(prefix, {}, overwrite=False)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return "it was let in"


def test_two_processes_do_not_write_one_dataset(tmp_path: Path) -> None:
    prefix = str(tmp_path / "out")
    said = run_ranks(2, hold_and_try, prefix)[1]
    assert said == f"{prefix} is being written by another process; wait for it, or give another --output"


def test_a_dataset_that_another_process_finished_just_before_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(descriptor: int) -> bool:
        (tmp_path / "out.bin").write_text("of the other process")
        (tmp_path / "out.unfinished" / "command").write_text('{"inputs": []}')
        return False

    monkeypatch.setattr(unfinished, "is_locked_elsewhere", finish)
    with refuses(FileExistsError, "out.bin already exists"):
        UnfinishedDataset(str(tmp_path / "out"), {"inputs": []}, overwrite=False)


def test_a_folder_that_another_process_deleted_before_the_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def delete_once(descriptor: int) -> bool:
        tries.append(descriptor)
        if len(tries) == 1:
            shutil.rmtree(tmp_path / "out.unfinished")
        return False

    monkeypatch.setattr(unfinished, "is_locked_elsewhere", delete_once)
    UnfinishedDataset(str(tmp_path / "out"), {"inputs": []}, overwrite=False).close()
    assert len(tries) == 2
    assert not (tmp_path / "out.unfinished").exists()


# ---- around it


def test_a_script_without_a_main_guard_runs_once(folder: Path, tmp_path: Path) -> None:
    command = options(folder, tmp_path / "out", workers=2, piece_bytes=500)
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning_mcore.data.preprocess.run import Options, preprocess\n"
        f"print(preprocess({command!r}).documents)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{len(expected(folder))}\n"


def test_progress_away_from_a_terminal_is_a_line_now_and_then(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([11.0, 15.0, 22.0, 23.0])  # the first progress comes after a slow start
    monkeypatch.setattr("lightning_mcore.data.preprocess.run.time.monotonic", lambda: next(clock))
    line = ProgressLine(sys.stdout)
    for share in range(4):
        counts = {"text_bytes": share * 22_000_000, "documents": share * 5, "tokens": share * 1000}
        line(Progress(input_bytes=share * 10, **counts), 40)
    line.close()
    assert capsys.readouterr().out == " 50%  10 documents, 2,000 tokens, 4.0 MB/s\n"


def test_the_summary_says_what_was_left_out_and_how_to_go_on() -> None:
    summary = Summary("data/c", 1234, 56789, 3, 2_500_000, 2, 300, 5.0, 500_000.0, False)
    assert str(summary) == (
        "data/c.bin and .idx: 1,234 documents, 3 empty ones left out; 2 files with other suffixes left out\n"
        "56,789 tokens of 2.5 MB of text, a vocabulary of 300; 0.50 MB/s in 5 s\n"
        'to train on it: MCorePretrainingData("data/c", seq_length=..., batch_size=...)'
    )
