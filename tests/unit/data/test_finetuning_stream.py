# SPDX-License-Identifier: Apache-2.0
"""A stream of files gives every sample once, and goes on from any batch with exactly what would have come next."""

import io
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mcore.data.finetuning import stream_reader
from lightning_mcore.data.finetuning.chat import ChatEncoder
from lightning_mcore.data.finetuning.conversations import ConversationReader
from lightning_mcore.data.finetuning.stream import StreamLoader
from lightning_mcore.data.finetuning.stream_reader import StreamSettings
from tests.support.chats import characters, exchanges, write
from tests.support.ranks import in_a_rank
from tests.support.sentences import refuses

pytestmark = pytest.mark.slow

COUNT = 61


def settings(folder: Path, suffix: str = "jsonl", **options: Any) -> StreamSettings:
    """Return the settings of a stream over three files of 61 exchanges."""
    rows = exchanges(COUNT)
    parts = {"a": rows[:20], "b": rows[20:21], "c": rows[21:]}
    chosen: dict[str, Any] = {
        "files": [write(folder / f"{name}.{suffix}", part) for name, part in parts.items()],
        "reader": ConversationReader(["prompt", "response"]),
        "encoder": ChatEncoder(characters()),
        "row_length": 64,
        "multiple": 1,
        "batch_size": 1,
        "packing": True,
        "overlong": "error",
        "shuffle_buffer": 8,
        "seed": 3,
    }
    chosen |= options
    if chosen.get("sources"):
        chosen["sources"] = {file: 7 - number for number, file in enumerate(chosen["files"])}
    return StreamSettings(**chosen)


def numbers(batches: list[Any]) -> list[int]:
    """Return the numbers of the samples in batches, in their order."""
    return [number for batch in batches for number in batch["sample_ids"].flatten().tolist() if number >= 0]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of a state, which must be plain."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
        for first, second in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_all_ranks_together_read_each_sample_once(tmp_path: Path, suffix: str, packing: bool) -> None:
    read_each_sample_once(settings(tmp_path, suffix, packing=packing), ((1, 0), (3, 0)) if packing else ((2, 0),))


def read_each_sample_once(of_stream: StreamSettings, places: tuple[tuple[int, int], ...]) -> None:
    for ranks, workers in places:
        shares = [numbers(list(StreamLoader(None, of_stream, rank, ranks, workers))) for rank in range(ranks)]
        assert sorted(chain.from_iterable(shares)) == list(range(COUNT)), (ranks, workers)
        assert max(map(len, shares)) - min(map(len, shares)) <= max(1, workers)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(tmp_path: Path) -> None:
    loader = StreamLoader(None, settings(tmp_path, packing=False))
    first = list(loader)
    assert equal(list(loader), first)
    loader.sampler.set_epoch(1)
    second = list(loader)
    assert numbers(second) != numbers(first)
    assert equal(list(StreamLoader(None, settings(tmp_path, packing=False))), first)
    assert not equal(list(StreamLoader(None, settings(tmp_path, packing=False, seed=4))), first)
    in_order = StreamLoader(None, settings(tmp_path, packing=False, shuffle_buffer=1, batch_size=7))
    assert numbers(list(in_order)) == list(range(COUNT - COUNT % 7))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_sample_has_the_source_of_its_file(tmp_path: Path, suffix: str) -> None:
    """With three readers in an order of files other than the given one; otherwise nothing in the batches changes."""
    asked, plain = (settings(tmp_path, suffix, sources=sources, batch_size=2) for sources in (True, None))
    assert asked.sources is not None
    for epoch in range(3):
        named: list[tuple[int, int]] = []
        for rank in range(3):
            loaders = [StreamLoader(None, each, rank, 3) for each in (asked, plain)]
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            with_sources, without = map(list, loaders)
            found = [batch.pop("source_ids") for batch in with_sources]
            assert equal(with_sources, without)
            for batch, sources in zip(without, found, strict=True):
                assert (sources == -1).equal(batch["sample_ids"] == -1)
                named += zip(batch["sample_ids"].flatten().tolist(), sources.flatten().tolist(), strict=True)
        # Files of 20, 1 and 40 rows, in the epoch's order; the rows are numbered through
        sizes = dict(zip(asked.files, (20, 1, 40), strict=True))
        order = stream_reader._in_order(asked, epoch)
        wanted = list(chain.from_iterable([asked.sources[file]] * sizes[file] for file in order))
        assert len(named) > 50
        assert all(wanted[sample] == source for sample, source in named if sample >= 0), epoch


def say_what_became_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lightning_mcore.data.finetuning.stream.rank_zero_info", said.append)
    list(StreamLoader(None, settings(tmp_path, packing=False, batch_size=7), num_workers=2))
    assert len(said) == 1
    assert said[0].startswith("epoch 0 of the stream: packed 61 of 61 samples")
    # 31 and 30 samples, of which each worker leaves out what fills no batch of 7
    assert said[0].endswith("; left out 5 rows, too few to give every rank a batch")


CASES: dict[str, tuple[int, dict[str, Any], range]] = {
    "packed": (0, {"batch_size": 2}, range(0, 99)),
    "padded": (0, {"packing": False}, range(0, 99, 7)),
    "split": (0, {"overlong": "split", "row_length": 16}, range(0, 99, 9)),
    "sources": (0, {"sources": True}, range(0, 99)),
    "parts": (0, {"parts": 2, "multiple": 4, "row_length": 32, "overlong": "split"}, range(0, 99, 4)),
    "workers": (2, {}, range(1, 99, 5)),
    "more-workers-than-batches": (2, {"row_length": 4096}, range(0, 4)),
}


@pytest.mark.parametrize("case", [case for case, (workers, _, _) in CASES.items() if workers == 0])
def test_a_stream_goes_on_from_any_batch(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on_from_any_batch(tmp_path, case, monkeypatch)


def go_on_from_any_batch(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "BATCHES_BETWEEN_STATES", 3)
    monkeypatch.setattr(stream_reader, "OPEN_ROWS", 2)
    workers, options, moments = CASES[case]
    of_stream = settings(tmp_path, **options)
    loader = StreamLoader(None, of_stream, 1, 2, workers)
    loader.sampler.set_epoch(2)
    whole: list[Any] = []
    states = {0: loader.state_dict()}
    for batch in loader:
        whole.append(batch)
        states[len(whole)] = through_a_file(loader.state_dict())
    asked = [moment for moment in moments if moment < len(whole)]
    assert len(asked) > 1 or len(whole) < 4
    for moment in asked:
        resumed = StreamLoader(None, of_stream, 1, 2, workers)
        resumed.load_state_dict(states[moment])
        assert moment == 0 or resumed.state_dict() is not None
        assert equal(list(resumed), whole[moment:]), moment
        if moment == asked[-1]:
            assert equal(list(resumed), whole), "the epoch after it is whole"
    if workers == 0 and len(whole) > 6:
        assert states[6]["readers"][0]["state"] is not None, "it went on from the beginning, not from a state"


def test_a_resumed_stream_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume_what_was_resumed(tmp_path, 0, monkeypatch)


def resume_what_was_resumed(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "BATCHES_BETWEEN_STATES", 2)
    monkeypatch.setattr(stream_reader, "OPEN_ROWS", 3)
    of_stream = settings(tmp_path)
    whole, read = list(StreamLoader(None, of_stream, num_workers=workers)), []
    state: dict[str, Any] | None = None
    while state is None or len(read) < len(whole):
        loader = StreamLoader(None, of_stream, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        for _, batch in zip(range(5), loader, strict=False):
            read.append(batch)
            state = loader.state_dict()
    assert equal(read, whole)


def test_a_state_may_be_of_batches_before_those_that_were_handed_out(tmp_path: Path) -> None:
    resume_before_what_was_handed_out(tmp_path, 0)


def resume_before_what_was_handed_out(tmp_path: Path, workers: int) -> None:
    of_stream = settings(tmp_path)
    loader = StreamLoader(None, of_stream, num_workers=workers)
    whole: list[Any] = []
    states: list[dict[str, Any]] = []
    for batch in loader:
        whole.append(batch)
        if len(whole) == 5:  # Lightning reads one batch ahead, and may accumulate batches
            running = loader._running
            assert running is not None
            states = [loader.state_dict() | {"batches": before, **running.state(before)} for before in (2, 3, 4)]
    for state in states:
        resumed = StreamLoader(None, of_stream, num_workers=workers)
        resumed.load_state_dict(state)
        assert equal(list(resumed), whole[state["batches"] :])


def take_turns_also_where_one_ends_long_before_the_other(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}", "response": "ab" * (60 if number % 2 else 2)} for number in range(8)]
    files = [write(tmp_path / "uneven.jsonl", rows)]
    of_stream = settings(tmp_path, files=files, packing=False, overlong="split", row_length=32, shuffle_buffer=1)
    loader = StreamLoader(None, of_stream, num_workers=2)
    whole, states = [], []
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    pieces = [1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7]  # of the worker with the long rows
    order = numbers(whole)
    assert order[:8] == [0, 1, 2, 1, 4, 1, 6, 1]
    assert [number for number in order if number % 2] == [1, 1, 1, *pieces]
    for moment in (3, 11):
        resumed = StreamLoader(None, of_stream, num_workers=2)
        resumed.load_state_dict(states[moment - 1])
        assert equal(list(resumed), whole[moment:])


def test_what_cannot_go_on_says_so(tmp_path: Path) -> None:
    loader = StreamLoader(None, settings(tmp_path), 0, 2, 0)
    next(iter(loader))
    state = loader.state_dict()
    refused = {
        "num_workers=0, but now num_workers=2": StreamLoader(None, settings(tmp_path), 0, 2, 2),
        "data_parallel_rank=0, but now data_parallel_rank=1": StreamLoader(None, settings(tmp_path), 1, 2, 0),
        "batch_size=1, but now batch_size=2": StreamLoader(None, settings(tmp_path, batch_size=2), 0, 2, 0),
        "seed=3, but now seed=4": StreamLoader(None, settings(tmp_path, seed=4), 0, 2, 0),
        "log_sources=False, but now log_sources=True": StreamLoader(None, settings(tmp_path, sources=True), 0, 2, 0),
        "hybrid_context_parallel=False, but now": StreamLoader(None, settings(tmp_path, parts=2), 0, 2, 0),
    }
    for change, other in refused.items():
        with refuses(ValueError, "the checkpoint was taken in the middle of") as raised:
            other.load_state_dict(state)
        assert change in str(raised.value)
    with refuses(RuntimeError, "1 batches of the stream were handed out"):
        loader._running.state(5)  # type: ignore[union-attr]


def test_files_of_the_same_size_with_other_rows_are_refused(tmp_path: Path) -> None:
    of_stream = settings(tmp_path)
    loader = StreamLoader(None, of_stream)
    next(iter(loader))
    state = loader.state_dict()
    file = Path(of_stream.files[-1])
    content = file.read_bytes()
    file.write_bytes(content.replace(b"q", b"p", 1))
    assert file.stat().st_size == len(content)
    with refuses(ValueError, "files="):
        StreamLoader(None, of_stream).load_state_dict(state)


def fail_with_the_words_of_the_row(tmp_path: Path, workers: int) -> None:
    of_stream = settings(tmp_path, row_length=24)
    with refuses(ValueError, "tokens, more"):
        list(StreamLoader(None, of_stream, num_workers=workers))


def test_a_row_that_fails_has_its_own_words(tmp_path: Path) -> None:
    fail_with_the_words_of_the_row(tmp_path, 0)


@pytest.mark.distributed
@in_a_rank
def test_with_workers_all_of_it_is_the_same(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        read_each_sample_once(settings(tmp_path, suffix), ((2, 2),))
    resume_before_what_was_handed_out(tmp_path, 2)
    take_turns_also_where_one_ends_long_before_the_other(tmp_path)
    fail_with_the_words_of_the_row(tmp_path, 2)
    for case in ("workers", "more-workers-than-batches"):
        with pytest.MonkeyPatch.context() as patch:
            go_on_from_any_batch(tmp_path, case, patch)
    with pytest.MonkeyPatch.context() as patch:
        resume_what_was_resumed(tmp_path, 2, patch)
        say_what_became_of_the_samples(tmp_path, patch)
