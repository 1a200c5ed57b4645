# SPDX-License-Identifier: Apache-2.0
"""What Megatron's layers are told of packed sequences: checked, on the host too, and cut for context parallelism."""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from lightning_mcore.layers.host_values import keep_on_host, rows_between
from lightning_mcore.layers.packed_sequences import (
    Boundaries,
    PackedSequences,
    all_real,
    boundaries_of,
    packed_sequences,
    split_packed_rows,
)
from lightning_mcore.parallel.context import sequence_of_tokens
from tests.support.naive_attention import split_packed
from tests.support.sentences import refuses

REAL = torch.tensor([[0, 5, 20, 23, 23], [0, 16, 30, 30, 30]], dtype=torch.int32)
PADDED = torch.tensor([[0, 8, 24, 32, 32], [0, 16, 32, 32, 32]], dtype=torch.int32)
ROW = 32


def changed(tensor: Tensor, row: int, index: int, value: int) -> Tensor:
    copy = tensor.clone()
    copy[row, index] = value
    return copy


def test_rows_become_one_row_without_entries_that_hold_nothing() -> None:
    packed = packed_sequences(REAL, PADDED, ROW)

    assert isinstance(packed, PackedSeqParams)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q_padded.tolist() == [0, 8, 24, 32, 48, 64]
    assert packed.cu_seqlens_q.tolist() == [0, 5, 20, 23, 39, 53]
    assert torch.equal(packed.cu_seqlens_kv, packed.cu_seqlens_q)
    assert torch.equal(packed.cu_seqlens_kv_padded, packed.cu_seqlens_q_padded)
    assert {packed.cu_seqlens_q.dtype, packed.cu_seqlens_q_padded.dtype} == {torch.int32}
    assert packed.boundaries == Boundaries((0, 8, 24, 32, 48, 64), (5, 15, 3, 16, 14))
    assert boundaries_of(packed) is packed.boundaries


def test_the_longest_sequence_is_counted_with_its_padding() -> None:
    packed = packed_sequences(torch.tensor([[0, 3, 5]]), torch.tensor([[0, 20, 32]]), ROW)

    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (20, 20)
    assert type(packed.max_seqlen_q) is int


def test_a_sequence_of_padding_alone_keeps_its_place() -> None:
    packed = packed_sequences(torch.tensor([[0, 0, 8]]), torch.tensor([[0, 24, 32]]), ROW)

    assert packed.boundaries == Boundaries((0, 24, 32), (0, 8))


@pytest.mark.parametrize("all_real_tokens", [True, False])
def test_transformer_engine_is_told_whether_there_is_padding(all_real_tokens: bool) -> None:
    packed = packed_sequences(PADDED if all_real_tokens else REAL, PADDED, ROW)

    known = "pad_between_seqs" in {field.name for field in dataclasses.fields(PackedSeqParams)}
    assert getattr(packed, "pad_between_seqs", None) == (None if not known else not all_real_tokens)


def test_transformer_engine_gets_one_tensor_of_boundaries() -> None:
    """With two, it has fused attention alone for rows with padding, and up to 2.17 waits for the GPU in each layer."""
    packed = packed_sequences(REAL, PADDED, ROW)
    moved = packed.on(torch.device("cpu"))

    assert moved.cu_seqlens_q.tolist() == packed.cu_seqlens_q_padded.tolist()
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(moved, name) is moved.cu_seqlens_q
    assert not getattr(moved, "pad_between_seqs", None)
    assert moved.boundaries == packed.boundaries


def test_fields_that_megatron_does_not_know_stay_with_us() -> None:
    ours = {field.name for field in dataclasses.fields(PackedSequences)}
    theirs = {field.name for field in dataclasses.fields(PackedSeqParams)}

    assert ours - theirs == {"boundaries"}


def test_for_code_that_knows_no_padding_all_tokens_are_real() -> None:
    packed = all_real(packed_sequences(REAL, PADDED, ROW))

    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_q_padded.tolist() == [0, 8, 24, 32, 48, 64]
    assert packed.boundaries == Boundaries((0, 8, 24, 32, 48, 64), (8, 16, 8, 16, 16))


def test_boundaries_made_by_others_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 9]), cu_seqlens_kv=torch.tensor([0, 3, 9])
    )
    first = boundaries_of(params)
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: pytest.fail("read again"))

    assert boundaries_of(params) is first
    assert first == Boundaries((0, 3, 9), (3, 6))


def test_a_batch_is_read_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or tolist(tensor))
    for name in ("item", "__int__", "__bool__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("read again"))

    packed = packed_sequences(REAL, PADDED, ROW, 2)
    boundaries_of(packed)
    split_packed_rows(PADDED.new_zeros(2, ROW), PADDED, 0, 2)
    sequence_of_tokens(PADDED, ROW, 2)

    assert len(reads) == 1


def test_numbers_kept_on_the_host_are_not_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = packed_sequences(REAL, PADDED, ROW)
    batch = {"cu_seqlens": REAL.clone(), "cu_seqlens_padded": PADDED.clone()}
    keep_on_host(batch, {"cu_seqlens": REAL, "cu_seqlens_padded": PADDED})
    second = {name: rows_between(tensor, 1, 2) for name, tensor in batch.items()}
    of_device, tolist = {id(tensor) for tensor in (*batch.values(), *second.values())}, Tensor.tolist
    monkeypatch.setattr(
        Tensor, "tolist", lambda tensor: pytest.fail("read") if id(tensor) in of_device else tolist(tensor)
    )
    for name in ("item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("read from the device"))

    assert packed_sequences(*batch.values(), ROW).boundaries == expected.boundaries
    assert packed_sequences(*second.values(), ROW).boundaries == Boundaries((0, 16, 32), (16, 14))


def test_a_tensor_that_was_changed_is_read_again() -> None:
    batch = {"cu_seqlens": REAL.clone(), "cu_seqlens_padded": PADDED.clone()}
    keep_on_host(batch, {"cu_seqlens": REAL, "cu_seqlens_padded": PADDED})
    batch["cu_seqlens"][0, 1] -= 1

    assert packed_sequences(*batch.values(), ROW).boundaries.lengths[:2] == (4, 16)


@pytest.mark.parametrize(
    ("real", "padded"),
    [
        (REAL[0], PADDED[0]),
        (REAL, PADDED[:1]),
        (REAL, changed(PADDED, 1, 0, 2)),
        (REAL, changed(PADDED, 0, 4, 31)),
        (REAL, changed(PADDED, 0, 2, 4)),
        (changed(REAL, 0, 1, 9), PADDED),
        (changed(REAL, 1, 2, 15), PADDED),
        (changed(REAL, 1, 0, 1), PADDED),
        (REAL, changed(PADDED, 0, 1, 10)),
    ],
)
def test_boundaries_that_do_not_fit_are_refused_with_their_row(real: Tensor, padded: Tensor) -> None:
    with refuses(ValueError):
        packed_sequences(real, padded, ROW, context_parallel_size=2)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cu_seqlens_q": torch.zeros(2, 2)},
        {"cu_seqlens_q": torch.tensor([0])},
        {"cu_seqlens_q": torch.tensor([1, 4])},
        {"cu_seqlens_q": torch.tensor([0, 5]), "cu_seqlens_q_padded": torch.tensor([0, 4])},
    ],
)
def test_boundaries_made_by_others_are_checked(fields: dict[str, Any]) -> None:
    fields = {**fields, **{name.replace("_q", "_kv"): tensor for name, tensor in fields.items()}}

    with refuses(ValueError):
        boundaries_of(PackedSeqParams(qkv_format="thd", **fields))


# ---- cut for context parallelism


def test_a_rank_holds_two_slices_of_every_sequence() -> None:
    shares = [split_packed_rows(torch.arange(24)[None], torch.tensor([[0, 8, 24]]), rank, 2) for rank in range(2)]

    assert shares[0].tolist() == [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]]
    assert shares[1].tolist() == [[2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, ROW), (2, ROW, 3)])
def test_rows_are_cut_as_the_one_row_that_they_become(shape: tuple[int, ...], size: int) -> None:
    rows = torch.randn(shape)
    offsets = packed_sequences(REAL, PADDED, ROW, size).boundaries.offsets

    for rank in range(size):
        mine = split_packed_rows(rows, PADDED, rank, size)
        expected = split_packed(rows.flatten(0, 1)[None], offsets, rank, size)
        assert mine.shape[:2] == (2, ROW // size)
        assert torch.equal(mine.flatten(0, 1)[None], expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_token_of_a_rank_knows_its_sequence(size: int) -> None:
    whole = torch.tensor([[0] * 8 + [1] * 16 + [2] * 8, [0] * 16 + [1] * 16])

    for rank in range(size):
        assert torch.equal(sequence_of_tokens(PADDED, ROW, size), split_packed_rows(whole, PADDED, rank, size))


@pytest.mark.parametrize("padded", [[0, 8, 20], [0, 8, 30], [4, 8, 24], [0, 16, 8]])
def test_rows_with_wrong_boundaries_are_cut_all_the_same_so_that_the_check_can_speak(padded: list[int]) -> None:
    for rank in range(2):
        assert split_packed_rows(torch.zeros(1, 24), torch.tensor([padded]), rank, 2).shape == (1, 12)
