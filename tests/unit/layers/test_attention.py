# SPDX-License-Identifier: Apache-2.0
"""The torch backend's attention on one rank, against attention written out in full in double precision."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mcore.config.architecture import Architecture, set_architecture
from lightning_mcore.config.rules.model import check_attention
from lightning_mcore.layers import attention
from lightning_mcore.layers.attention import (
    Reach,
    Softmax,
    attend,
    packed_runs,
    positions_in,
    query_growth,
    sequence_runs,
    with_sinks,
)
from lightning_mcore.layers.core_attention import TorchAttention
from lightning_mcore.parallel.context import split_for_context_parallel, unsplit_from_context_parallel
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from tests.support.naive_attention import causal, chunks, naive_attention, split_packed, window
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")  # Megatron's own default

S, B = 24, 2  # tokens and sequences
EXACT = {"rtol": 0.0, "atol": 2e-14}  # double precision on both sides; measured: at most 5.4e-15 of values up to 10


def tensors(
    heads: int = 4, groups: int = 4, d: int = 8, d_v: int = 8, dtype: torch.dtype = torch.float64, length: int = S
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(length, B, heads, d), (length, B, groups, d), (length, B, groups, d_v)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def build(mask_type: AttnMaskType = AttnMaskType.causal, layer_number: int = 1, **fields: Any) -> TorchAttention:
    settings = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0} | fields
    return TorchAttention(TransformerConfig(**settings), layer_number, mask_type, "self")


def assert_same_with_gradients(actual: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(actual, expected, **EXACT)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
    gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    for gradient, reference in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, reference, **EXACT)


HEADS = {
    "plain": {},
    "grouped": {"groups": 2},
    "one-group": {"groups": 1},
    "narrow-values": {"d": 12, "d_v": 8},
    "wide-values": {"d": 8, "d_v": 12},
    "narrow-grouped": {"groups": 2, "d": 12, "d_v": 8},
}


@pytest.mark.parametrize("heads", HEADS)
def test_causal_attention(heads: str) -> None:
    inputs = tensors(**HEADS[heads])
    scale = inputs[0].size(-1) ** -0.5
    core = TorchAttention(build().config, 1, AttnMaskType.causal, "self", softmax_scale=scale)

    assert_same_with_gradients(core(*inputs, None), naive_attention(*inputs, causal(S)), inputs)


@pytest.mark.parametrize("back", [0, 1, 5, S - 1, 100])
def test_a_causal_window_sees_so_many_keys_back(back: int) -> None:
    inputs = tensors(groups=2)
    core = build(window_size=(back, 0))

    assert_same_with_gradients(core(*inputs, None), naive_attention(*inputs, window(S, back, 0)), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("back", [None, 0, 5])
@pytest.mark.parametrize("heads", ["grouped", "narrow-values", "wide-values"])
def test_a_sink_is_one_more_term_of_the_softmax_of_a_head(heads: str, back: int | None, masked: bool) -> None:
    inputs = tensors(**HEADS[heads])
    sides = None if back is None else (back, 0)
    with cpu_runtime():
        config = build(softmax_type="learnable", params_dtype=torch.float64, window_size=sides).config
        core = TorchAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3)
    assert isinstance(core.softmax_offset, torch.nn.Parameter)
    sinks = core.softmax_offset
    sinks.data += torch.tensor([-3.0, 0.0, 1.5, 4.0])
    hidden = torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(3)) < 0.3  # some queries see nothing
    seen = window(S, -1 if back is None else back, 0) & ~(hidden & masked)

    expected = naive_attention(*inputs, seen, 0.3, sinks)

    assert_same_with_gradients(core(*inputs, hidden if masked else None), expected, (*inputs, sinks))


def test_off_by_one_is_a_sink_of_zero() -> None:
    inputs = tensors()
    with cpu_runtime():
        core = build(softmax_type="off-by-one")

    expected = naive_attention(*inputs, causal(S), sinks=torch.zeros(4))

    assert_same_with_gradients(core(*inputs, None), expected, inputs)
    assert list(core.parameters()) == []


@pytest.mark.parametrize("sides", [(3, 2), (0, 4), (-1, 2), (5, -1), (-1, -1)])
def test_a_window_without_causality_sees_both_ways(sides: tuple[int, int]) -> None:
    inputs = tensors(groups=2)
    core = build(AttnMaskType.no_mask, window_size=sides)

    assert_same_with_gradients(core(*inputs, None), naive_attention(*inputs, window(S, *sides)), inputs)


def test_a_causal_window_without_a_side_ahead_looks_nowhere_ahead() -> None:
    inputs = tensors()

    actual = build(window_size=(5, -1))(*inputs, None)

    torch.testing.assert_close(actual, naive_attention(*inputs, window(S, 5, 0)), **EXACT)


@pytest.mark.parametrize(("every", "windowed"), [(None, [1, 2, 3, 4]), (2, [1, 3]), ([1, 0, 0, 1], [1, 4])])
def test_layers_that_skip_the_window_see_everything_before(every: Any, windowed: list[int]) -> None:
    inputs = tensors()
    full, narrow = naive_attention(*inputs, causal(S)), naive_attention(*inputs, window(S, 3, 0))

    for layer in range(1, 5):
        core = build(layer_number=layer, window_size=(3, 0), window_attn_skip_freq=every)
        torch.testing.assert_close(core(*inputs, None), narrow if layer in windowed else full, **EXACT)


@pytest.mark.parametrize("rows", ["one-mask", "mask-per-sequence", "mask-per-head"])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.arbitrary, AttnMaskType.padding])
def test_a_mask_hides_keys_besides_those_that_causality_hides(rows: str, mask_type: AttnMaskType) -> None:
    inputs = tensors(groups=2)
    shape = {"one-mask": (1, 1, S, S), "mask-per-sequence": (B, 1, 1, S), "mask-per-head": (B, 4, S, S)}[rows]
    masked = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    masked[..., 0] = False  # every query sees something
    seen = ~masked & causal(S) if mask_type is AttnMaskType.causal else ~masked

    assert_same_with_gradients(build(mask_type)(*inputs, masked), naive_attention(*inputs, seen), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layer", [1, 2])
def test_layers_with_rotary_positions_attend_within_chunks(layer: int, masked: bool) -> None:
    inputs = tensors(groups=2)
    config = build(no_rope_freq=2).config
    set_architecture(config, Architecture(attention_chunk=7))
    core = TorchAttention(config, layer, AttnMaskType.causal, "self")
    hidden = torch.rand(B, 1, 1, S, generator=torch.Generator().manual_seed(3)) < 0.3
    hidden[..., ::7] = False  # every query sees something
    seen = causal(S) if layer == 2 else chunks(S, 7)

    expected = naive_attention(*inputs, seen & ~(hidden & masked))

    assert_same_with_gradients(core(*inputs, hidden if masked else None), expected, inputs)


@pytest.mark.parametrize("layer", [1, 2])
def test_unweighted_norms_are_those_of_heads_in_layers_with_rotary_positions(layer: int) -> None:
    query, key, value = tensors(groups=2, dtype=torch.float32)
    config = build(no_rope_freq=2, layernorm_epsilon=0.1).config
    set_architecture(config, Architecture(head_norms="unweighted"))
    core = TorchAttention(config, layer, AttnMaskType.causal, "self")
    heads = (tensor.double() for tensor in (query, key))
    normalised = [x / (x.square().mean(dim=-1, keepdim=True) + 0.1).sqrt() if layer == 1 else x for x in heads]

    expected = naive_attention(*normalised, value, causal(S))

    torch.testing.assert_close(core(query, key, value, None).double(), expected, rtol=0, atol=1e-6)
    assert list(core.parameters()) == []


@pytest.mark.parametrize("layer", [1, 2])
def test_queries_may_grow_in_layers_without_rotary_positions_only(layer: int) -> None:
    query, key, value = tensors(groups=2)
    config = build(no_rope_freq=2).config
    growth = {"beta": 0.5, "original_max_position_embeddings": 5, "first_position": 1, "unrotated_only": True}
    set_architecture(config, Architecture(query_growth=growth))
    core = TorchAttention(config, layer, AttnMaskType.causal, "self")
    factors = 1 + 0.5 * torch.log(1 + torch.floor((torch.arange(S) + 1) / 5)).double() if layer == 2 else torch.ones(S)

    expected = naive_attention(query * factors[:, None, None, None], key, value, causal(S))

    torch.testing.assert_close(core(query, key, value, None), expected, rtol=0, atol=1e-6)


def test_a_mask_and_a_window_both_hide() -> None:
    inputs = tensors()
    masked = torch.zeros(1, 1, S, S, dtype=torch.bool)
    masked[..., 4] = True
    masked[..., 4, 4] = False

    actual = build(window_size=(2, 0))(*inputs, masked)

    torch.testing.assert_close(actual, naive_attention(*inputs, ~masked & window(S, 2, 0)), **EXACT)


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    inputs = tensors()
    masked = torch.zeros(1, 1, S, S, dtype=torch.bool)
    masked[..., 7, :] = True

    context = build()(*inputs, masked)
    gradients = torch.autograd.grad(context.sum(), inputs)

    assert torch.equal(context[7], torch.zeros_like(context[7]))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_grow_with_the_position_in_their_own_sequence(size: int) -> None:
    offsets = (0, 8, 32, 40)
    places = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(offsets)])
    whole = 1 + 0.5 * torch.log(1 + torch.floor(places / 5))
    for rank in range(size):
        runs = packed_runs(offsets, (8, 24, 8), rank, size)
        torch.testing.assert_close(
            query_growth(positions_in(runs, whole.device), 0.5, 5), split_packed(whole, offsets, rank, size, 0)
        )
    last = positions_in(sequence_runs(1, 11), whole.device)
    assert query_growth(last, 0.5, 5).tolist() == [pytest.approx(1 + 0.5 * math.log(3))]


def test_a_call_may_override_the_mask_type_as_decoding_does() -> None:
    query, key, value = tensors()

    last = build()(query[-1:], key, value, None, attn_mask_type=AttnMaskType.no_mask)
    tail = build()(query[-5:], key, value, None, attn_mask_type=AttnMaskType.causal_bottom_right)

    expected = naive_attention(query, key, value, causal(S))
    torch.testing.assert_close(last, expected[-1:], **EXACT)
    torch.testing.assert_close(tail, expected[-5:], **EXACT)


@pytest.mark.parametrize("length", [S, S - 3])
def test_the_last_queries_of_a_sequence_see_their_own_chunk(length: int) -> None:
    query, key, value = (tensor[:length] for tensor in tensors())
    config = build().config
    set_architecture(config, Architecture(attention_chunk=7))
    core = TorchAttention(config, 1, AttnMaskType.causal, "self")

    last = core(query[-1:], key, value, None, attn_mask_type=AttnMaskType.no_mask)
    tail = core(query[-9:], key, value, None, attn_mask_type=AttnMaskType.causal_bottom_right)

    expected = naive_attention(query, key, value, chunks(length, 7))
    torch.testing.assert_close(last, expected[-1:], **EXACT)
    torch.testing.assert_close(tail, expected[-9:], **EXACT)


def test_scores_are_scaled_by_the_head_size_unless_a_scale_is_given() -> None:
    inputs = tensors(d=12)
    config = build().config  # kv_channels is 8

    def run(**arguments: Any) -> Tensor:
        return TorchAttention(config, 1, AttnMaskType.causal, "self", **arguments)(*inputs, None)

    torch.testing.assert_close(run(k_channels=12), naive_attention(*inputs, causal(S)), **EXACT)
    torch.testing.assert_close(run(softmax_scale=0.3), naive_attention(*inputs, causal(S), 0.3), **EXACT)
    torch.testing.assert_close(run(), naive_attention(*inputs, causal(S), 8**-0.5), **EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)])
def test_lower_precision_stays_near_the_exact_result(dtype: torch.dtype, tolerance: float) -> None:
    """Measured: 3e-7 in fp32 and 7.4e-3 in bf16, whose steps are 8e-3 to 16e-3 wide for the largest values."""
    inputs = tensors(groups=2, dtype=dtype)

    for core, seen in ((build(), causal(S)), (build(window_size=(5, 0)), window(S, 5, 0))):
        context = core(*inputs, None)
        assert context.dtype is dtype
        torch.testing.assert_close(context.double(), naive_attention(*inputs, seen), rtol=0, atol=tolerance)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cut runs into blocks of a few queries, with a shorter one at the end."""
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 5)
    monkeypatch.setattr(attention, "_SMALLEST_BLOCK", 2)
    yield
    attention._distance_mask.cache_clear()


REACHES = {
    "causal": (Reach(None, 0), causal(S)),
    "window": (Reach(4, 0), window(S, 4, 0)),
    "narrow-window": (Reach(1, 0), window(S, 1, 0)),
    "both-ways": (Reach(3, 2), window(S, 3, 2)),
    "back-only": (Reach(4, None), window(S, 4, -1)),
    "ahead-only": (Reach(None, 3), window(S, -1, 3)),
    "everything": (Reach(), torch.ones(S, S, dtype=torch.bool)),
    "chunks": (Reach(None, 0, 7), chunks(S, 7)),
    "one-chunk": (Reach(None, 0, 100), causal(S)),
    "window-in-chunks": (Reach(3, 0, 8), chunks(S, 8) & window(S, 3, 0)),
}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.usefixtures("small_blocks")
def test_runs_of_all_context_parallel_ranks_make_the_whole_attention(reach: str, size: int) -> None:
    inputs = tensors(groups=2)
    expected = naive_attention(*inputs, REACHES[reach][1])

    shares = [share_of_rank(inputs, rank, size, REACHES[reach][0]) for rank in range(size)]

    assert_same_with_gradients(unsplit_from_context_parallel(shares, dim=0), expected, inputs)


def share_of_rank(inputs: tuple[Tensor, ...], rank: int, size: int, reach: Reach) -> Tensor:
    """Return what a context-parallel rank computes from its queries and everybody's keys, [s / size, b, h * d_v]."""
    query, key, value = inputs
    mine = split_for_context_parallel(query, rank, size, dim=0)
    runs = sequence_runs(mine.size(0), key.size(0), rank, size)
    heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (mine, key, value)]
    context = attend(*heads_first, runs, reach, Softmax(query.size(-1) ** -0.5))
    return context.permute(2, 0, 1, 3).flatten(2)


def test_the_bias_for_fewer_queries_than_keys_ends_at_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch that CUDA's flash kernel takes, with the mask that torch makes of the same bias elsewhere."""
    monkeypatch.setattr(attention, "_flash_ends_at_the_last_key", lambda query, value: True)
    inputs = tensors(groups=2)

    shares = [share_of_rank(inputs, rank, 2, Reach(None, 0)) for rank in range(2)]

    assert_same_with_gradients(
        unsplit_from_context_parallel(shares, dim=0), naive_attention(*inputs, causal(S)), inputs
    )


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("rank", "size", "reach", "limit"),
    [
        (0, 1, Reach(None, 0), 4096 * 8),  # no mask at all: nothing is larger than the keys
        (0, 1, Reach(100, 0), 8 * 128 * 400),  # a few times block times window
        (1, 2, Reach(None, 0), 1024 * 5120),  # block times keys, and not the 2048 queries of this rank times keys
    ],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_sequences_need_no_mask_of_the_size_of_the_scores(
    rank: int, size: int, reach: Reach, limit: int, has_sinks: bool
) -> None:
    attention._distance_mask.cache_clear()
    length = 4096
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, length // n, 8, generator=generator) for n in (size, 1, 1))

    if has_sinks:
        query, limit = with_sinks(query, torch.zeros(1), 1.0), max(limit, 1024 * 5120)

    with LargestTensor() as largest:
        runs = sequence_runs(length // size, length, rank, size)
        attend(query, key, value, runs, reach, Softmax(1.0, has_sinks=has_sinks))

    assert largest.elements <= limit
    attention._distance_mask.cache_clear()


def test_a_mask_first_made_in_validation_serves_training() -> None:
    attention._distance_mask.cache_clear()
    inputs = tensors(groups=2)
    core = build(window_size=(3, 0))
    with torch.inference_mode():
        core(*inputs, None)

    torch.autograd.grad(core(*inputs, None).sum(), inputs)


@pytest.fixture
def tracker() -> Iterator[Any]:
    """Megatron's random number tracker on the CPU, with the state that tensor-parallel regions draw from."""
    with cpu_runtime():
        tracker = get_cuda_rng_tracker()
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        yield tracker
        tracker.reset()


def test_dropout_draws_from_the_tensor_parallel_stream(tracker: Any) -> None:
    inputs = tensors()
    core = build(attention_dropout=0.5)
    default, parallel = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()

    dropped = core(*inputs, None)

    assert torch.equal(torch.get_rng_state(), default)
    assert not torch.equal(tracker.get_states()["model-parallel-rng"], parallel)
    assert not torch.allclose(dropped, naive_attention(*inputs, causal(S)))
    assert not torch.allclose(dropped, core(*inputs, None))


def test_dropout_under_sequence_parallelism_draws_from_the_stream_of_its_surroundings(tracker: Any) -> None:
    inputs = tensors()
    core = build(attention_dropout=0.5, sequence_parallel=True, tensor_model_parallel_size=2)
    default, parallel = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"].clone()

    core(*inputs, None)

    assert not torch.equal(torch.get_rng_state(), default)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], parallel)


def test_dropout_keeps_the_expectation_and_drops_its_share(tracker: Any) -> None:
    query, key, _ = tensors(length=256)
    value = torch.ones(256, B, 4, 8, dtype=torch.float64)

    context = build(attention_dropout=0.25)(query, key, value, None)

    first = context[0].view(B, 4, 8)[..., 0]  # the first query has one key: dropped, or scaled up
    assert set(first.flatten().tolist()) <= {0.0, 1 / 0.75}
    assert context.mean().item() == pytest.approx(1.0, abs=0.02)  # measured: 0.9998


def test_nothing_is_dropped_in_evaluation(tracker: Any) -> None:
    inputs = tensors()
    core = build(attention_dropout=0.5).eval()

    torch.testing.assert_close(core(*inputs, None), naive_attention(*inputs, causal(S)), **EXACT)


def test_an_argument_takes_the_place_of_the_configs_dropout(tracker: Any) -> None:
    inputs = tensors()
    core = TorchAttention(build(attention_dropout=0.5).config, 1, AttnMaskType.causal, "self", attention_dropout=0.0)

    torch.testing.assert_close(core(*inputs, None), naive_attention(*inputs, causal(S)), **EXACT)


@pytest.mark.parametrize(
    "fields",
    [
        {"softmax_type": "sink"},
        {"window_size": (8, 4)},
        {"window_size": (-2, 0)},
    ],
)
def test_attention_that_the_backend_lacks_is_refused_when_it_is_built(fields: dict[str, Any]) -> None:
    with refuses(ValueError, *fields):
        build(**fields)


def test_a_window_may_look_ahead_where_attention_is_not_causal() -> None:
    check_attention(build().config, is_causal=False)
    build(AttnMaskType.no_mask, window_size=(8, 4))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"packed_seq_params": PackedSeqParams()}, ValueError),
        ({"attention_bias": torch.zeros(1)}, ValueError),
        ({"attention_mask": torch.zeros(1, 1, S, S)}, ValueError),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *arguments):
        build()(*tensors(), **{"attention_mask": None, **arguments})


def test_causal_attention_over_more_keys_than_queries_is_refused() -> None:
    query, key, value = tensors()

    with refuses(ValueError, f"4 queries and {S} keys"):
        build()(query[:4], key, value, None)


class _Operators(TorchDispatchMode):
    """Counts the operators that run inside the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_gradients_of_an_unpacked_batch_are_not_copied() -> None:
    query, key, value = tensors()
    context = build()(query, key, value, None)

    with _Operators() as operators:
        context.sum().backward()

    assert not {"cat", "slice_backward"} & set(operators.names)
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in operators.names
