# SPDX-License-Identifier: Apache-2.0
"""Batches of a language model as the model takes them, and the means of its losses; no process group is open."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_mcore import MCoreModule
from lightning_mcore.config.rules.model import check_normalization
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import collate_padded, collate_rows, pack
from lightning_mcore.layers.inputs import (
    ModelInputs,
    check_places,
    check_vocabulary,
    microbatch_shape,
    num_tokens,
    split_packed_batch,
)
from lightning_mcore.layers.losses import sample_mean, token_mean
from tests.support.sentences import refuses

Batch = dict[str, Tensor]
SAMPLES = [list(range(1, 7)), list(range(20, 24)), list(range(40, 51))]  # 5, 3 and 10 places


def packed() -> Batch:
    """Return two rows of 16 places that hold the three samples."""
    return collate_rows(pack(SAMPLES, 16, multiple=4))


def padded() -> Batch:
    """Return the three samples in a row of their own each."""
    return collate_padded([TokenSample(np.array(tokens), None, number) for number, tokens in enumerate(SAMPLES)])


def test_rows_of_a_packed_batch_become_one_sequence_with_its_boundaries() -> None:
    batch = packed()
    inputs = ModelInputs.of(batch)
    assert microbatch_shape(batch) == (32, 1)
    assert inputs.tokens.shape == (1, 32)
    assert inputs.packed is not None
    assert inputs.packed.boundaries.offsets[-1] == 32
    assert sorted(inputs.packed.boundaries.lengths) == [3, 5, 10]
    assert inputs.padding is not None
    assert int((~inputs.padding).sum()) == num_tokens(batch) == 18
    for sample in inputs.samples.unique():
        own = (inputs.samples == sample) & ~inputs.padding
        assert torch.equal(inputs.position_ids[own], torch.arange(int(own.sum())))


def test_context_parallel_ranks_share_out_tokens_targets_and_padding() -> None:
    batch = packed()
    whole = ModelInputs.of(batch)
    seen = []
    for rank in range(2):
        share = split_packed_batch(batch, rank, 2)
        assert share["tokens"].shape == (2, 8)
        assert torch.equal(share["cu_seqlens"], batch["cu_seqlens"])
        inputs = ModelInputs.of(share, rank, 2)
        rows = zip(inputs.tokens[0], inputs.position_ids[0], inputs.samples[0], inputs.padding[0], strict=True)
        seen += [tuple(int(value) for value in row) for row in rows]
    rows = zip(whole.tokens[0], whole.position_ids[0], whole.samples[0], whole.padding[0], strict=True)
    assert sorted(seen) == sorted(tuple(int(value) for value in row) for row in rows)


def test_a_dense_share_knows_the_positions_that_its_tokens_had() -> None:
    batch = {"tokens": torch.arange(8)[None], "labels": torch.arange(1, 9)[None]}
    inputs = ModelInputs.of({name: tensor[:, [2, 3, 4, 5]] for name, tensor in batch.items()}, 1, 2)
    assert inputs.position_ids.tolist() == [[2, 3, 4, 5]]


def test_labels_of_minus_100_count_for_nothing() -> None:
    labels = torch.tensor([[3, -100, 4, -100]])
    inputs = ModelInputs.of({"tokens": torch.zeros_like(labels), "labels": labels, "loss_mask": torch.ones(1, 4)})
    assert inputs.loss_mask.tolist() == [[1, 0, 1, 0]]
    assert inputs.labels.tolist() == [[3, 0, 4, 0]]


def test_padding_of_a_dense_batch_is_known_from_its_lengths() -> None:
    batch = padded()
    inputs = ModelInputs.of(batch)
    assert (~inputs.padding).sum(1).tolist() == [5, 3, 10]
    assert num_tokens(batch) == 18


@pytest.mark.parametrize("batch", [packed(), padded()], ids=["packed", "padded"])
def test_means_over_tokens_and_over_samples_are_those_of_plain_arithmetic(batch: Batch) -> None:
    inputs = ModelInputs.of(batch)
    losses = inputs.labels.float() ** 2
    mean, weight = token_mean(losses, inputs.loss_mask)
    squares = [[float(label) ** 2 for label in tokens[1:]] for tokens in SAMPLES]
    assert weight == 18
    assert mean.item() == pytest.approx(sum(map(sum, squares)) / 18)
    mean, weight = sample_mean(losses, inputs, None)
    assert weight == 3
    assert mean.item() == pytest.approx(sum(sum(values) / len(values) for values in squares) / 3)


def test_a_batch_without_targets_has_a_loss_of_zero_and_no_weight() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    inputs = ModelInputs.of({"tokens": tokens, "labels": tokens - 100})
    for mean, weight in (token_mean(torch.ones(1, 4), inputs.loss_mask), sample_mean(torch.ones(1, 4), inputs, None)):
        assert (mean.item(), weight.item()) == (0, 0)


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": [[1, 10]]},
        {"tokens": [[1], [-1]]},
        {"tokens": [[1]], "labels": [[50]]},
    ],
)
def test_tokens_and_labels_outside_the_vocabulary_are_refused(batch: Any) -> None:
    with refuses(ValueError, *batch):
        check_vocabulary({name: torch.tensor(ids) for name, ids in batch.items()}, 10)


@pytest.mark.parametrize(
    ("batch", "error", "word"),
    [
        ({"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)}, ValueError, "input_ids"),
        ((torch.zeros(1, 4), torch.zeros(1, 4)), TypeError, "tuple"),
        ({"tokens": torch.zeros(4)}, ValueError, "tokens"),
    ],
    ids=["other names", "a tuple", "no rows"],
)
def test_batches_without_rows_of_tokens_are_refused(batch: Any, error: type[Exception], word: str) -> None:
    """By the count of tokens, which comes first, by the layers, and where stages learn the shape of a microbatch."""
    for read in (num_tokens, ModelInputs.of, microbatch_shape):
        with refuses(error, word):
            read(batch)


def test_labels_without_a_target_are_inside_the_vocabulary() -> None:
    check_vocabulary({"tokens": torch.tensor([[1, 9]]), "labels": torch.tensor([[-100, 0]])}, 10)


def config(**fields: Any) -> Any:
    """Return what is read of the config of a model."""
    plain = dict.fromkeys(("num_moe_experts", "moe_z_loss_coeff", "mtp_num_layers"))
    plain |= {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "aux_loss", "calculate_per_token_loss": True}
    return SimpleNamespace(**{**plain, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_moe_experts": 2, "moe_aux_loss_coeff": 0.1},
        {"num_moe_experts": 2, "moe_z_loss_coeff": 0.1},
        {"mtp_num_layers": 1},
    ],
)
def test_a_mean_over_samples_is_refused_beside_losses_that_are_weighed_by_tokens(fields: Any) -> None:
    with refuses(ValueError, *fields):
        check_normalization("samples", config(**fields))
    check_normalization("tokens", config(**fields))
    check_normalization("samples", config(**{**fields, "calculate_per_token_loss": False}))


def test_an_unknown_mean_is_refused() -> None:
    with refuses(ValueError, "'words'"):
        check_normalization("words", config())  # type: ignore[arg-type]


def test_a_fraction_of_a_mask_lets_a_token_weigh_less() -> None:
    mask = torch.tensor([[1.0, 0.5, 0.0, 0.5]])
    mean, weight = token_mean(torch.ones(1, 4), mask)
    assert (mean.item(), weight.item()) == (pytest.approx(2 / 3), 3)


@pytest.mark.parametrize("missing", ["cu_seqlens", "cu_seqlens_padded"])
def test_one_kind_of_boundaries_without_the_other_is_refused(missing: str) -> None:
    batch = {name: tensor for name, tensor in packed().items() if name != missing}
    with refuses(ValueError, f"a packed batch lacks {missing}; give both"):
        ModelInputs.of(batch)


def test_a_packed_row_that_context_parallel_ranks_cannot_cut_is_refused() -> None:
    with refuses(ValueError, "a packed row of 16 tokens does not divide"):
        split_packed_batch(packed(), 0, 3)


def test_sequences_without_learned_positions_are_refused() -> None:
    check_places(packed(), 16)
    with refuses(ValueError, "seq_length=15"):
        check_places(packed(), 15)
    with refuses(ValueError, "seq_length=9"):
        check_places(padded(), 9)


def test_a_forward_step_without_a_model_says_where_to_build_it() -> None:
    with refuses(RuntimeError, "has no model to run; without a trainer, call configure_model"):
        MCoreModule().forward_step({"tokens": torch.zeros(1, 2), "labels": torch.zeros(1, 2)})
