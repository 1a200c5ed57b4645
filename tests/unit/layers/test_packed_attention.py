# SPDX-License-Identifier: Apache-2.0
"""The torch backend's attention over packed sequences on one rank: each sequence by itself, whatever the attention."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from lightning_mcore.layers import attention
from lightning_mcore.layers.attention import QueryRun, Reach, Softmax, attend, packed_runs
from lightning_mcore.layers.core_attention import TorchAttention, token_orders
from lightning_mcore.layers.packed_sequences import PackedSequences, packed_sequences
from tests.support.naive_attention import causal, naive_packed_attention, split_packed, unsplit_packed, window
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")  # Megatron's own default

HEADS = 4
EXACT = {"rtol": 0.0, "atol": 2e-14}  # double precision on both sides; measured: at most 5.4e-15 of values up to 10

# boundaries and real lengths: each divides into 8 slices for the ranks of context parallelism
PACKS: dict[str, tuple[list[int], list[int]]] = {
    "one-full": ([0, 32], [32]),
    "one-padded": ([0, 32], [19]),
    "ragged": ([0, 8, 32, 40, 56], [3, 24, 1, 13]),
    "empty-and-full": ([0, 16, 16, 24, 56], [0, 0, 8, 32]),
    "many-short": (list(range(0, 65, 8)), [1, 2, 3, 4, 5, 6, 7, 8]),
}


def tensors(
    tokens: int, groups: int = HEADS, d: int = 8, d_v: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a row, [t, heads or groups, width]."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, HEADS, d), (tokens, groups, d), (tokens, groups, d_v)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def build(mask_type: AttnMaskType = AttnMaskType.causal, d: int = 8, **fields: Any) -> TorchAttention:
    settings = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": HEADS, "attention_dropout": 0.0} | fields
    return TorchAttention(TransformerConfig(**settings), 1, mask_type, "self", softmax_scale=d**-0.5)


def described(offsets: list[int], lengths: list[int], rows: int = 1) -> PackedSequences:
    """Return the description of a batch whose rows are all alike."""
    real = torch.tensor([0, *lengths]).cumsum(0).expand(rows, -1).int()
    return packed_sequences(real, torch.tensor(offsets).expand(rows, -1).int(), offsets[-1])


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(actual, expected, **EXACT)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
    gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    for gradient, reference in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, reference, **EXACT)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut runs into blocks that a small test has several of."""
    attention._distance_mask.cache_clear()
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 5)
    monkeypatch.setattr(attention, "_SMALLEST_BLOCK", 2)
    yield
    attention._distance_mask.cache_clear()


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    "heads",
    [{}, {"groups": 2}, {"groups": 1, "d": 12, "d_v": 8}, {"d": 8, "d_v": 12}],
    ids=["plain", "grouped", "narrow-values", "wide-values"],
)
def test_each_packed_sequence_sees_itself_alone(pack: str, heads: dict[str, int]) -> None:
    offsets, lengths = PACKS[pack]
    inputs = tensors(offsets[-1], **heads)

    context = build(d=heads.get("d", 8))(*inputs, None, packed_seq_params=described(offsets, lengths))

    expected = naive_packed_attention(*inputs, causal(offsets[-1]), offsets, lengths)
    assert_same_with_gradients(context, expected, inputs)


REACHES: dict[str, tuple[AttnMaskType, tuple[int, int]]] = {
    "narrow": (AttnMaskType.causal, (2, 0)),
    "wider-than-some": (AttnMaskType.causal, (6, 0)),
    "wider-than-all": (AttnMaskType.causal, (100, 0)),
    "both-ways": (AttnMaskType.no_mask, (3, 2)),
    "back-only": (AttnMaskType.no_mask, (4, -1)),
    "ahead-only": (AttnMaskType.no_mask, (-1, 3)),
    "everything": (AttnMaskType.no_mask, (-1, -1)),
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.usefixtures("small_blocks")
def test_windows_end_with_their_sequence(pack: str, reach: str) -> None:
    offsets, lengths = PACKS[pack]
    inputs = tensors(offsets[-1], groups=2)
    mask_type, sides = REACHES[reach]

    context = build(mask_type, window_size=sides)(*inputs, None, packed_seq_params=described(offsets, lengths))

    expected = naive_packed_attention(*inputs, window(offsets[-1], *sides), offsets, lengths)
    assert_same_with_gradients(context, expected, inputs)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("back", [None, 4])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.usefixtures("small_blocks")
def test_runs_of_all_context_parallel_ranks_make_the_whole_attention(
    pack: str, back: int | None, chunk: int | None, size: int
) -> None:
    offsets, lengths = PACKS[pack]
    inputs = tensors(offsets[-1], groups=2)

    shares = []
    for rank in range(size):
        mine = split_packed(inputs[0], offsets, rank, size, dim=0)
        heads_first = [tensor.transpose(0, 1)[None] for tensor in (mine, *inputs[1:])]
        runs = packed_runs(tuple(offsets), tuple(lengths), rank, size)
        context = attend(*heads_first, runs, Reach(back, 0, chunk), Softmax(8**-0.5))
        shares.append(context[0].transpose(0, 1).flatten(1))

    seen = causal(offsets[-1]) if back is None else window(offsets[-1], back, 0)
    if chunk is not None:
        places = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(offsets)]) // chunk
        seen &= places[:, None] == places[None]
    expected = naive_packed_attention(*inputs, seen, offsets, lengths)
    assert_same_with_gradients(unsplit_packed(shares, offsets, dim=0), expected, inputs)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    offsets, lengths = PACKS["ragged"]
    tokens = offsets[-1]
    inputs = tensors(2 * tokens)

    context = build()(*inputs, None, packed_seq_params=described(offsets, lengths, rows=2))

    rows = [[tensor[row * tokens : (row + 1) * tokens] for tensor in inputs] for row in range(2)]
    expected = torch.cat([naive_packed_attention(*row, causal(tokens), offsets, lengths) for row in rows])
    assert_same_with_gradients(context, expected, inputs)


@pytest.mark.parametrize("fields", [{}, {"window_size": (5, 0)}], ids=["causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_in_one_sequence_changes_no_bit_of_the_others(fields: dict[str, Any], dtype: torch.dtype) -> None:
    offsets, lengths = PACKS["ragged"]
    changed, others = slice(8, 32), [slice(0, 8), slice(32, 56)]
    first = tensors(offsets[-1], groups=2, dtype=dtype)
    second = tuple(tensor.detach().clone() for tensor in first)
    for tensor in second:
        tensor[changed] = -3 * tensor[changed] + 1
        tensor.requires_grad_()
    core = build(**fields)
    weights = torch.randn(offsets[-1], 32, generator=torch.Generator().manual_seed(2)).to(dtype)

    results = []
    for inputs in (first, second):
        context = core(*inputs, None, packed_seq_params=described(offsets, lengths))
        results.append([context, *torch.autograd.grad(context, inputs, weights)])

    for before, after in zip(*results, strict=True):
        assert all(torch.equal(before[other], after[other]) for other in others)
        assert not torch.equal(before[changed], after[changed])


def test_padding_neither_sees_nor_is_seen_whatever_it_holds() -> None:
    offsets, lengths = PACKS["ragged"]
    inputs = tensors(offsets[-1])
    clean = build()(*inputs, None, packed_seq_params=described(offsets, lengths))
    padding = torch.tensor([not any(o <= t < o + n for o, n in zip(offsets, lengths, strict=False)) for t in range(56)])
    dirty = [tensor.detach().masked_fill(padding[:, None, None], float("nan")).requires_grad_() for tensor in inputs]

    context = build()(*dirty, None, packed_seq_params=described(offsets, lengths))
    gradients = torch.autograd.grad(context.sum(), dirty)

    assert torch.equal(context, clean)
    assert not context[padding].any()
    assert all(not gradient[padding].any() and gradient.isfinite().all() for gradient in gradients)


def test_queries_that_are_all_padding_still_have_gradients() -> None:
    inputs = tensors(8)

    context = build()(*inputs, None, packed_seq_params=described([0, 8], [0]))

    assert not context.any()
    assert not torch.autograd.grad(context.sum(), inputs[0])[0].any()


def test_nothing_is_dropped_in_evaluation_and_something_in_training() -> None:
    offsets, lengths = PACKS["ragged"]
    inputs = tensors(offsets[-1])
    core = build(attention_dropout=0.5, sequence_parallel=True, tensor_model_parallel_size=2)  # draws from torch's own
    params = described(offsets, lengths)

    torch.manual_seed(3)
    dropped = core(*inputs, None, packed_seq_params=params)
    torch.manual_seed(3)
    again = core(*inputs, None, packed_seq_params=params)
    whole = core.eval()(*inputs, None, packed_seq_params=params)

    assert torch.equal(dropped, again)
    assert not torch.equal(dropped, whole)
    torch.testing.assert_close(whole, naive_packed_attention(*inputs, causal(56), offsets, lengths), **EXACT)


@pytest.mark.parametrize("device_fields", ["both", "padded-only", "real-only"])
def test_a_description_made_by_hand_is_taken(device_fields: str) -> None:
    offsets, lengths = PACKS["ragged"]
    if device_fields != "both":
        lengths = [8, 24, 8, 16]
    padded, real = torch.tensor(offsets).int(), torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams(qkv_format="thd")
    if device_fields != "padded-only":
        params.cu_seqlens_q, params.cu_seqlens_kv = real, real.clone()
    if device_fields != "real-only":
        params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = padded, padded.clone()
    inputs = tensors(offsets[-1])

    context = build()(*inputs, None, packed_seq_params=params)

    torch.testing.assert_close(context, naive_packed_attention(*inputs, causal(56), offsets, lengths), **EXACT)


def test_runs_cover_the_queries_in_order_and_padding_has_no_keys() -> None:
    runs = packed_runs((0, 8, 16), (3, 8), rank=0, size=2)

    assert runs == [
        QueryRun(range(0, 2), 0, range(0, 3)),
        QueryRun(range(2, 4), 6, range(0)),
        QueryRun(range(4, 6), 8, range(8, 16)),
        QueryRun(range(6, 8), 14, range(8, 16)),
    ]


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({"qkv_format": "sbhd"}, {}),
        ({}, {"attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool)}),
        ({"local_cp_size": 1}, {}),
        ({"cu_seqlens_kv": torch.tensor([0, 4, 8])}, {}),
        ({"cu_seqlens_q_padded": torch.tensor([0, 4, 6])}, {}),
    ],
)
def test_packed_sequences_that_cannot_be_honoured_are_refused(
    changes: dict[str, Any], arguments: dict[str, Any]
) -> None:
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 8]), cu_seqlens_kv=torch.tensor([0, 3, 8])
    )
    for name, value in changes.items():
        setattr(params, name, value)

    with refuses(ValueError):
        build()(*tensors(8), **{"attention_mask": None, **arguments}, packed_seq_params=params)


def test_a_row_of_another_length_is_refused() -> None:
    with refuses(ValueError, "row of 24"):
        build()(*tensors(24), None, packed_seq_params=described([0, 32], [32]))


def test_a_row_with_a_dimension_too_many_is_refused() -> None:
    with refuses(ValueError, "shape [8, 1, 4, 8]; give [tokens, heads"):
        build()(*(tensor[:, None] for tensor in tensors(8)), None, packed_seq_params=described([0, 8], [8]))


def test_the_orders_of_rows_that_are_done_are_not_kept() -> None:
    device = torch.device("cpu")
    made = [weakref.ref(token_orders((0, 8 * n), 2, device)[0]) for n in range(1, 9)]

    assert sum(order() is not None for order in made) <= 2
    assert token_orders((0, 64), 2, device) is token_orders((0, 64), 2, device)
