# SPDX-License-Identifier: Apache-2.0
"""The core attention under context parallelism: ranks together compute what one rank computes, gradients included."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.core_attention import TorchAttention
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.context import split_for_context_parallel, unsplit_from_context_parallel
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups
from tests.support.naive_attention import naive_attention, window
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("attention")]  # they share runs

S, B, HEADS = 32, 2, 4
SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0])
TOLERANCE = 1e-6  # of the largest value, fp32 against double precision; measured: at most 5.9e-7

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"groups": 2},
    "narrow-values": {"d": 12, "d_v": 8},
    "window": {"groups": 2, "sides": (5, 0)},
    "window-over-several-slices": {"sides": (13, 0)},
    "everything": {"mask_type": AttnMaskType.no_mask, "sides": None, "groups": 1},
    "sinks": {"groups": 2, "sinks": True},
    "sinks-window": {"sides": (13, 0), "sinks": True},
    "window-both-ways": {"mask_type": AttnMaskType.no_mask, "sides": (6, 3)},
}


def draw(groups: int = HEADS, d: int = 8, d_v: int = 8, **_: Any) -> tuple[Tensor, ...]:
    """Return whole queries, keys, values and the gradient of the output, [s, b, heads or groups, width]."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(HEADS, d), (groups, d), (groups, d_v)]
    inputs = [torch.randn(S, B, *shape, generator=generator) for shape in shapes]
    return (*inputs, torch.randn(S, B, HEADS * d_v, generator=generator))


def build(
    layout: ParallelLayout,
    mask_type: AttnMaskType = AttnMaskType.causal,
    sides: tuple[int, int] | None = None,
    d: int = 8,
    groups: Any = None,
    d_v: Any = None,
    sinks: bool = False,
) -> TorchAttention:
    size = layout.context_parallel_size
    fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": HEADS, "window_size": sides}
    fields |= {"softmax_type": "learnable"} if sinks else {}
    config = build_transformer_config(fields, {"context_parallel_size": size})
    core = TorchAttention(config, 1, mask_type, "self", k_channels=d, softmax_scale=d**-0.5)
    if core.softmax_offset is not None:
        core.softmax_offset.data += SINKS
    return core


@contextmanager
def groups_of(layout: ParallelLayout) -> Iterator[None]:
    with cpu_runtime():
        open_process_groups(layout, seed=1, timeout=timedelta(seconds=60))
        try:
            yield
        finally:
            close_process_groups()


def attend_on_this_rank(size: int) -> dict[str, list[Tensor]]:
    """Return, for each case, this rank's output and its gradients of queries, keys and values."""
    layout = ParallelLayout(context_parallel_size=size)
    results = {}
    with groups_of(layout):
        rank = parallel_state.get_context_parallel_rank()
        for name, case in CASES.items():
            *inputs, weights = (split_for_context_parallel(tensor, rank, size, dim=0) for tensor in draw(**case))
            for tensor in inputs:
                tensor.requires_grad_()
            context = build(layout, **case)(*inputs, None)
            results[name] = [context.detach(), *torch.autograd.grad(context, inputs, weights)]
    return results


@functools.cache
def results_of_ranks(size: int) -> list[dict[str, list[Tensor]]]:
    return run_ranks(size, attend_on_this_rank, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_compute_the_attention_of_whole_sequences(case: str, size: int) -> None:
    *inputs, weights = draw(**CASES[case])
    for tensor in inputs:
        tensor.requires_grad_()
    back, ahead = CASES[case].get("sides") or (-1, -1)
    seen = window(S, back, 0 if CASES[case].get("mask_type") is None else ahead)
    expected = naive_attention(*inputs, seen, sinks=SINKS if CASES[case].get("sinks") else None)
    references = [expected, *torch.autograd.grad(expected, inputs, weights.double())]

    shares = [results[case] for results in results_of_ranks(size)]

    for parts, reference in zip(zip(*shares, strict=True), references, strict=True):
        whole = unsplit_from_context_parallel(parts, dim=0).double()
        assert (whole - reference).abs().max() <= TOLERANCE * reference.abs().max()


@on_ranks(2)
def test_a_mask_is_refused_where_a_rank_holds_only_parts_of_it() -> None:
    layout = ParallelLayout(context_parallel_size=2)
    with groups_of(layout):
        query, key, value, _ = draw()
        with refuses(ValueError, "context_parallel_size=2"):
            build(layout)(query, key, value, torch.zeros(1, 1, S, S, dtype=torch.bool))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@on_ranks(1)
def test_megatrons_own_attention_computes_the_same_and_drops_the_same_weights(dropout: float) -> None:
    with groups_of(ParallelLayout()):
        fields = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": HEADS, "attention_dropout": dropout}
        config = build_transformer_config({**fields, "num_query_groups": 2}, {})
        collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        results = []
        for attention in (DotProductAttention, TorchAttention):
            *inputs, weights = draw(groups=2)
            for tensor in inputs:
                tensor.requires_grad_()
            tracker = get_cuda_rng_tracker()
            tracker.reset()
            tracker.add("model-parallel-rng", 11)
            core = attention(config, 1, AttnMaskType.causal, "self", pg_collection=collection)
            context = core(*inputs, None, attn_mask_type=AttnMaskType.causal)
            gradients = torch.autograd.grad(context, inputs, weights)
            results.append([context.detach(), *gradients, tracker.get_states()["model-parallel-rng"]])
    megatron, ours = results
    assert torch.equal(ours.pop(), megatron.pop())  # the random streams
    for actual, reference in zip(ours, megatron, strict=True):
        assert (actual - reference).abs().max() <= TOLERANCE * reference.abs().max()
