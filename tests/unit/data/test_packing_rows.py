# SPDX-License-Identifier: Apache-2.0
"""Packed rows and batches of them, place by place; the same for the padded form and the packer of streams."""

import logging
import pickle
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.online import OnlinePacker
from lightning_mcore.data.packing.rows import TextBlocks, build_row, collate_padded, collate_rows, pack
from tests.support.sentences import refuses

VOCAB = 50
SEEDS = range(12)


def random_samples(seed: int, row_length: int, longest: int | None = None) -> list[TokenSample]:
    generator = np.random.default_rng(seed)
    samples = []
    for sample_id in range(int(generator.integers(1, 60))):
        length = int(generator.integers(2, (longest or row_length) + 2))
        mask = generator.random(length) < 0.5 if generator.random() < 0.7 else None
        if mask is not None:
            mask[-1] = True
        dtype = generator.choice([np.int64, np.int32, np.uint16])
        samples.append(TokenSample(generator.integers(1, VOCAB, length).astype(dtype), mask, 1000 + sample_id))
    return samples


def sub_sequences(row: dict[str, Tensor]) -> list[tuple[int, slice, slice]]:
    """Return sample id, places with tokens and all places of each sub-sequence, empty ones left out."""
    bounds, counts = row["cu_seqlens_padded"].tolist(), row["cu_seqlens"].diff().tolist()
    return [
        (sample_id, slice(start, start + count), slice(start, stop))
        for sample_id, start, stop, count in zip(
            row["sample_ids"].tolist(), bounds[:-1], bounds[1:], counts, strict=True
        )
        if stop > start
    ]


def assert_is_a_packed_row(row: dict[str, Tensor], row_length: int, multiple: int) -> None:
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in row.items()}
    n = len(row["sample_ids"])
    assert kinds == {
        "tokens": (torch.int64, (row_length,)),
        "labels": (torch.int64, (row_length,)),
        "loss_mask": (torch.float32, (row_length,)),
        "position_ids": (torch.int64, (row_length,)),
        "cu_seqlens": (torch.int32, (n + 1,)),
        "cu_seqlens_padded": (torch.int32, (n + 1,)),
        "sample_ids": (torch.int64, (n,)),
    }
    assert row["cu_seqlens"][0] == row["cu_seqlens_padded"][0] == 0
    assert row["cu_seqlens_padded"][-1] == row_length
    for _, real, whole in sub_sequences(row):
        assert whole.start <= real.stop <= whole.stop
        assert whole.start % multiple == 0
        assert whole.stop == row_length or whole.stop - real.stop < multiple
        assert row["position_ids"][whole].tolist() == list(range(whole.stop - whole.start))
        padding = slice(real.stop, whole.stop)
        for name in ("tokens", "labels", "loss_mask"):
            assert not row[name][padding].any()


def pairs(row: dict[str, Tensor]) -> Counter[tuple[int, int, int, int]]:
    """Return sample id, place in the sample, token and label of every place whose label counts."""
    found = Counter()
    for sample_id, real, _ in sub_sequences(row):
        values = zip(
            row["tokens"][real].tolist(), row["labels"][real].tolist(), row["loss_mask"][real].tolist(), strict=True
        )
        for place, (token, label, counts) in enumerate(values):
            assert counts in (0.0, 1.0)
            assert counts or label == 0
            if counts:
                found[sample_id, place, token, label] += 1
    return found


def expected_pairs(samples: list[TokenSample]) -> Counter[tuple[int, int, int, int]]:
    found = Counter()
    for sample in samples:
        for place in range(len(sample.tokens) - 1):
            if sample.loss_mask is None or sample.loss_mask[place + 1]:
                found[sample.sample_id, place, int(sample.tokens[place]), int(sample.tokens[place + 1])] += 1
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_target_is_once_in_the_rows_and_belongs_to_the_token_before_it(seed: int, multiple: int) -> None:
    samples = random_samples(seed, 32)

    rows = pack(samples, 32, multiple=multiple, vocab_size=VOCAB)

    for row in rows:
        assert_is_a_packed_row(row, 32, multiple)
    assert sum((pairs(row) for row in rows), Counter()) == expected_pairs(samples)
    held = [sample_id for row in rows for sample_id in row["sample_ids"].tolist()]
    assert sorted(held) == [sample.sample_id for sample in samples]


@pytest.mark.parametrize("seed", SEEDS)
def test_split_samples_keep_every_target_in_rows(seed: int) -> None:
    samples = random_samples(seed, 32, longest=150)

    rows = pack(samples, 32, multiple=2, overlong="split")

    found = Counter()
    for row in rows:
        assert_is_a_packed_row(row, 32, 2)
        for (sample_id, _, token, label), count in pairs(row).items():
            found[sample_id, token, label] += count
    expected = Counter()
    for (sample_id, _, token, label), count in expected_pairs(samples).items():
        expected[sample_id, token, label] += count
    assert found == expected


def test_a_row_written_out() -> None:
    samples = [
        TokenSample(np.array([5, 6, 7, 8]), np.array([True, False, True, True]), 3),
        TokenSample(np.array([9, 10, 11]), None, 4),
    ]

    row = build_row(samples, 12, multiple=4, pad_token=1)

    assert {name: value.tolist() for name, value in row.items()} == {
        "tokens": [5, 6, 7, 1, 9, 10, 1, 1, 1, 1, 1, 1],
        "labels": [0, 7, 8, 0, 10, 11, 0, 0, 0, 0, 0, 0],
        "loss_mask": [0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7],
        "cu_seqlens": [0, 3, 5],
        "cu_seqlens_padded": [0, 4, 12],
        "sample_ids": [3, 4],
    }


def test_a_batch_of_rows_has_empty_sub_sequences_at_the_end() -> None:
    samples = [TokenSample(np.arange(1, 4), None, number) for number in range(4)]
    rows = [build_row(samples[:1], 8), build_row(samples[1:], 8)]

    batch = collate_rows(rows)

    assert batch["cu_seqlens"].tolist() == [[0, 2, 2, 2], [0, 2, 4, 6]]
    assert batch["cu_seqlens_padded"].tolist() == [[0, 8, 8, 8], [0, 2, 4, 8]]
    assert batch["sample_ids"].tolist() == [[0, -1, -1], [1, 2, 3]]
    assert {batch[name].dtype for name in ("cu_seqlens", "cu_seqlens_padded")} == {torch.int32}
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(batch[name], torch.stack([row[name] for row in rows]))


@pytest.mark.parametrize("lengths", [[], [8, 16]])
def test_a_batch_takes_rows_of_one_length(lengths: list[int]) -> None:
    rows = [build_row([TokenSample(np.arange(3))], length) for length in lengths]
    with refuses(ValueError, "give rows of one length"):
        collate_rows(rows)


def test_the_padded_form_holds_a_sample_in_each_row() -> None:
    samples = [
        TokenSample(np.array([5, 6, 7]), np.array([True, False, True]), 3),
        TokenSample(np.arange(1, 7), None, 4),
    ]

    batch = collate_padded(samples, multiple=4)

    assert {name: value.tolist() for name, value in batch.items()} == {
        "tokens": [[5, 6, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]],
        "labels": [[0, 7, 0, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 0, 0, 0]],
        "loss_mask": [[0, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
        "position_ids": [list(range(8)), list(range(8))],
        "lengths": [2, 5],
        "sample_ids": [3, 4],
    }
    assert collate_padded(samples, row_length=12)["tokens"].shape == (2, 12)
    with refuses(ValueError, "row_length=4"):
        collate_padded(samples, row_length=4)


def test_a_block_is_as_long_as_the_others_if_a_document_has_only_its_end() -> None:
    documents = [[1, 2, 3], [9], [4, 5, 6, 7], [], [9], [9], [8] * 9]
    sizes = [max(len(tokens) - 1, 0) for tokens in documents]
    blocks = TextBlocks(Dataset.from_dict({"tokens": documents, "length": sizes}), np.arange(7), 4, "texts")
    assert [blocks[index].tokens.tolist() for index in range(3)] == [[1, 2, 3, 4, 5], [6, 7, 8, 8, 8], [8] * 5]


def test_a_block_of_a_huge_document_reads_only_its_own_tokens() -> None:
    documents = [[3, 4], [], list(range(300_000)), [5] * 7]
    sizes = [max(len(tokens) - 1, 0) for tokens in documents]
    tokenized = Dataset.from_dict({"tokens": documents, "length": sizes})
    chosen = np.array([0, 1, 2, 3, 0])
    blocks = TextBlocks(tokenized, chosen, 9, "a book")
    joined = np.concatenate([documents[row] for row in chosen])
    tracemalloc.start()
    found = [blocks[index].tokens for index in (0, 1, 15_000, len(blocks) - 1)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for index, tokens in zip((0, 1, 15_000, len(blocks) - 1), found, strict=True):
        assert tokens.tolist() == joined[10 * index : 10 * index + 10].tolist()
    assert most < 100_000  # bytes; the document has 2.4 million


@pytest.mark.parametrize(
    ("tokens", "mask", "token"),
    [([1, 50, 2], None, 50), ([1, 2, -3], None, -3), ([1, 2, 99], [1, 1, 0], 99)],
    ids=["above", "below", "masked"],
)
@pytest.mark.parametrize("form", ["pack", "padded", "online"])
def test_a_token_outside_the_vocabulary_is_refused(tokens: list[int], mask: Any, token: int, form: str) -> None:
    mask = None if mask is None else np.array(mask, np.bool_)
    samples = [TokenSample(np.array([1, 49])), TokenSample(np.array(tokens), mask, 12)]
    if mask is not None:
        samples[1].loss_mask[1] = True

    make = {
        "pack": lambda: pack(samples, 8, vocab_size=VOCAB),
        "padded": lambda: collate_padded(samples, vocab_size=VOCAB),
        "online": lambda: run_stream(OnlinePacker(8, vocab_size=VOCAB), samples),
    }[form]
    with refuses(ValueError, f"token {token}"):
        make()


def test_a_padding_token_outside_the_vocabulary_is_refused() -> None:
    with refuses(ValueError, "pad_token=50"):
        build_row([TokenSample(np.arange(3))], 8, vocab_size=VOCAB, pad_token=50)


def test_what_does_not_fit_into_one_row_is_refused() -> None:
    samples = [TokenSample(np.arange(6), sample_id=1), TokenSample(np.arange(4), sample_id=2)]
    with refuses(ValueError, "row_length=8"):
        build_row(samples, 8, multiple=4)
    with refuses(ValueError, "row_length=10"):
        build_row(samples[1:], 10, multiple=4)
    with refuses(ValueError, "no samples were given for a row"):
        build_row([], 8)
    with refuses(ValueError, "sample 9 has 1 tokens, so there is nothing"):
        build_row([samples[0], TokenSample(np.arange(1), sample_id=9)], 8)


def test_packing_says_in_the_log_what_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_mcore.data.packing.best_fit"):
        pack([[1, 2, 3], [4], list(range(20))], 8, overlong="cut", empty="drop")

    assert caplog.messages == [
        "packed 2 of 3 samples, 10 tokens, into 2 rows, 62.50% filled; cut 1 that were longer than a row by 11 tokens; "
        "left out 1 of fewer than two tokens"
    ]


def run_stream(packer: OnlinePacker, samples: list[TokenSample]) -> list[dict[str, Tensor]]:
    return [row for sample in samples for row in packer.add(sample)] + packer.flush()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("open_rows", [1, 3, 64])
def test_a_stream_loses_and_repeats_nothing(seed: int, open_rows: int) -> None:
    samples = random_samples(seed, 32, longest=70)
    packer = OnlinePacker(32, 2, open_rows, overlong="split")

    rows = run_stream(packer, samples)

    for row in rows:
        assert_is_a_packed_row(row, 32, 2)
    statistics = packer.statistics
    assert sum(sum(pairs(row).values()) for row in rows) == sum(expected_pairs(samples).values())
    assert (statistics.samples, statistics.packed, statistics.rows) == (len(samples), len(samples), len(rows))
    assert statistics.tokens == sum(int(row["cu_seqlens"][-1]) for row in rows)
    assert statistics.tokens + statistics.padding == 32 * len(rows)


def test_a_stream_holds_back_no_more_rows_than_told() -> None:
    packer = OnlinePacker(100, open_rows=5)
    generator = np.random.default_rng(0)
    added = given = 0
    for _ in range(500):
        length = int(generator.integers(1, 101))
        rows = packer.add(np.zeros(length + 1, np.int64))
        added += length
        given += sum(int(row["cu_seqlens"][-1]) for row in rows)
        assert added - given <= 5 * 100


def test_a_sample_goes_into_the_fullest_row_with_room_and_the_fullest_row_is_closed() -> None:
    packer = OnlinePacker(10, open_rows=2)
    lengths = [6, 7, 3, 5, 5, 9]
    closed = [[row["sample_ids"].tolist() for row in packer.add(np.zeros(length + 1, np.int64))] for length in lengths]

    # 7 fits into no row; 3 fills it; 5 opens a row; the second 5 fills that one; 9 opens a row beside the 6
    assert closed == [[], [], [[1, 2]], [], [[3, 4]], []]
    assert [row["sample_ids"].tolist() for row in packer.add(np.zeros(9, np.int64))] == [[5]]
    assert [row["sample_ids"].tolist() for row in packer.flush()] == [[6], [0]]


def test_a_small_buffer_fills_long_rows() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 4000).astype(int), 1, 8192)
    packer = OnlinePacker(8192, open_rows=32)
    for length in lengths.tolist():
        packer.add(np.zeros(length + 1, np.int64))

    assert packer.statistics.fill >= 0.99


@pytest.mark.parametrize("after", [0, 1, 7, 30])
def test_a_stream_goes_on_from_its_state_with_the_same_rows(after: int) -> None:
    samples = [item for seed in range(5) for item in random_samples(seed, 32, longest=70)]
    straight = OnlinePacker(32, 2, 4, overlong="split")
    first, second = OnlinePacker(32, 2, 4, overlong="split"), OnlinePacker(32, 2, 4, overlong="split")

    expected = run_stream(straight, samples)
    actual = [row for sample in samples[:after] for row in first.add(sample)]
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    actual += run_stream(second, samples[after:])

    assert len(actual) == len(expected)
    for row, other in zip(actual, expected, strict=True):
        assert all(torch.equal(row[name], other[name]) for name in other)
    assert second.statistics == straight.statistics


def test_a_stream_numbers_plain_tokens_on_after_a_resume() -> None:
    first, second = OnlinePacker(8), OnlinePacker(8)
    first.add([1, 2, 3])
    second.load_state_dict(first.state_dict())
    second.add([4, 5, 6])

    assert second.flush()[0]["sample_ids"].tolist() == [0, 1]


def test_a_stream_goes_on_with_its_own_settings_only() -> None:
    state = OnlinePacker(8, overlong="cut").state_dict()
    with refuses(ValueError, "row_length=16"):
        OnlinePacker(16, overlong="cut").load_state_dict(state)
    with refuses(ValueError, "overlong='split'"):
        OnlinePacker(8, overlong="split").load_state_dict(state)


def test_the_sizes_of_a_stream_are_checked() -> None:
    with refuses(ValueError, "row_length=10"):
        OnlinePacker(10, 4)
    with refuses(ValueError, "open_rows=0"):
        OnlinePacker(8, open_rows=0)
