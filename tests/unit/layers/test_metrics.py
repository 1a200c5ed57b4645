# SPDX-License-Identifier: Apache-2.0
"""Metrics of language models on one rank, against sums written out; on several ranks: tests/distributed."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.metrics import (
    MeanOfQueries,
    PackingEfficiency,
    PaddingShare,
    TokenAccuracy,
    TokenLoss,
    TokenPerplexity,
    TokensSeen,
)
from tests.support.sentences import refuses


def losses_and_masks() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 8), (1, 16), (3, 4)]
    return [
        (torch.rand(shape, generator=generator) * 5, (torch.rand(shape, generator=generator) < 0.3 * row).float())
        for row, shape in enumerate(shapes, 1)
    ]


def batches() -> dict[str, dict[str, Tensor]]:
    """Return two samples of 5 and 9 places, packed into a row of 24 and padded to rows of 12."""
    samples = [TokenSample(np.arange(1, 7), None, 0), TokenSample(np.arange(1, 11), None, 1)]
    return {
        "packed": collate_rows([build_row(samples, 24, 4), build_row(samples[:1], 24, 4)]),
        "padded": collate_padded(samples, row_length=12),
    }


@pytest.mark.parametrize("metric", [TokenLoss, TokenPerplexity])
def test_every_token_weighs_the_same_however_they_are_batched(metric: type[TokenLoss]) -> None:
    apart, at_once, means = metric(), metric(), metric()
    for losses, mask in losses_and_masks():
        apart.update(losses, mask)
        means.update((losses * mask).sum() / mask.sum(), mask.sum().int())
    flat = [torch.cat([values.flatten() for values in one]) for one in zip(*losses_and_masks(), strict=True)]
    at_once.update(*flat)

    mean = flat[0][flat[1] > 0].double().mean().item()
    expected = mean if metric is TokenLoss else math.exp(mean)
    for counted in (apart, at_once, means):
        assert counted.compute().item() == pytest.approx(expected, rel=1e-6)
        assert counted.compute().dtype == torch.float32


def test_a_mean_of_no_queries_is_zero_and_says_so() -> None:
    mean = MeanOfQueries()
    mean.update(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([True, True, False]))
    assert mean.compute() == 0.75
    mean.reset()
    mean.update(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    with pytest.warns(UserWarning, match="no query has a document with a relevance above 0"):
        assert mean.compute() == 0


def test_without_weights_every_loss_counts_once() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor([1.0, 2.0, 6.0]))
    assert metric.compute() == 3


def test_a_loss_that_does_not_count_may_be_anything() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1, 0, 0]))
    assert metric.compute() == 1


def test_no_tokens_have_no_mean() -> None:
    metric = TokenLoss()
    metric.update(torch.tensor([2.0]), torch.tensor([0.0]))
    assert metric.compute().isnan()


def test_losses_and_weights_of_different_shapes_are_refused() -> None:
    with refuses(ValueError, "weights of shape (3,)"):
        TokenLoss().update(torch.zeros(2, 3), torch.ones(3))


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to(torch.float16)])
@pytest.mark.parametrize("when", ["before", "between"])
def test_sums_stay_exact_in_a_module_of_low_precision(cast: Any, when: str) -> None:
    module = nn.Module()
    module.loss, module.seen = TokenLoss(), TokensSeen()
    if when == "before":
        cast(module)
    for step in range(3):
        module.loss.update(torch.full((3001,), 1.001))
        module.seen.update(100_001)
        if when == "between" and step == 1:
            cast(module)

    assert module.loss.tokens == 9003
    assert module.loss.compute().item() == pytest.approx(1.001, rel=1e-6)
    assert module.seen.compute() == 300_003
    module.loss.reset()
    assert module.loss.metric_state["loss"].dtype == torch.float64


def test_accuracy_counts_targets_and_never_predicts_padding_of_the_vocabulary() -> None:
    logits = torch.zeros(2, 3, 8)
    for row, place, token in [(0, 0, 1), (0, 1, 2), (0, 2, 4), (1, 0, 0), (1, 1, 3), (1, 2, 3)]:
        logits[row, place, token] = 1.0
    logits[..., 5:] = 9.0  # tokens that do not exist
    labels = torch.tensor([[1, 2, 3], [0, -100, 3]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    all_targets, masked = TokenAccuracy(5), TokenAccuracy(5)

    all_targets.update(logits, labels)
    masked.update(logits.view(1, 6, 8), labels, mask)  # packed rows are one for the model

    assert (all_targets.correct, all_targets.tokens) == (4, 5)
    assert (masked.correct, masked.tokens) == (3, 4)
    assert masked.compute() == 0.75


def test_accuracy_wants_a_label_for_each_position() -> None:
    with refuses(ValueError, "labels of shape (2, 2)"):
        TokenAccuracy(5).update(torch.zeros(2, 3, 8), torch.zeros(2, 2))


@pytest.mark.parametrize(("kind", "tokens", "places"), [("packed", 19, 48), ("padded", 14, 24)])
def test_padding_of_packed_and_of_padded_rows(kind: str, tokens: int, places: int) -> None:
    efficiency, share, seen = PackingEfficiency(), PaddingShare(), TokensSeen()
    for _ in range(3):
        for metric in (efficiency, share, seen):
            metric.update(batches()[kind])

    assert efficiency.compute().item() == pytest.approx(tokens / places)
    assert share.compute().item() == pytest.approx(1 - tokens / places)
    assert seen.compute() == 3 * tokens
    assert seen.compute().dtype == torch.int64


def test_padding_that_is_known_by_its_token() -> None:
    batch = {"tokens": torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]])}
    efficiency = PackingEfficiency(pad_token=0)
    efficiency.update(batch)
    assert efficiency.compute() == 5 / 8

    with refuses(ValueError, "a batch with tokens does not mark its"):
        PaddingShare().update(batch)


def test_tokens_are_counted_in_a_batch_without_padding_or_given_as_a_number() -> None:
    seen = TokensSeen()
    seen.update({"tokens": torch.zeros(2, 8, dtype=torch.int64)})
    seen.update(torch.tensor([1.0, 0.0, 1.0]))
    assert seen(3) == 16 + 2 + 3


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1001), (torch.float32, 2**24 + 3), (torch.bool, 1001)])
def test_the_tokens_of_a_mask_are_counted_exactly_in_any_dtype(dtype: torch.dtype, count: int) -> None:
    seen = TokensSeen()
    seen.update(torch.ones(1, dtype=dtype).expand(count))
    assert seen.compute() == count


def test_the_count_of_a_run_outlives_epochs_and_checkpoints() -> None:
    large = 2**40 + 1  # more than fp32 can hold
    first, second = nn.ModuleDict({"seen": TokensSeen()}), nn.ModuleDict({"seen": TokensSeen()})
    first["seen"].update(large)
    first["seen"].compute()
    first["seen"].reset()
    first["seen"].update(2)

    state = first.state_dict()
    second.load_state_dict(state)
    second["seen"].update(4)

    assert list(state) == ["seen.before"]
    assert first["seen"].compute() == large + 2
    assert second["seen"].compute() == large + 6
