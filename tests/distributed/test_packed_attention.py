# SPDX-License-Identifier: Apache-2.0
"""Packed sequences under context parallelism: the core attention, and whole models, against sequences by themselves."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.positions import set_yarn
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.multi_token import gpt_mtp_block_spec
from lightning_mcore.layers.packed_sequences import packed_sequences, split_packed_rows
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.context import (
    packed_order,
)
from tests.distributed.test_attention import HEADS, SINKS, TOLERANCE, build, groups_of
from tests.support.naive_attention import naive_packed_attention, split_packed, unsplit_packed, window
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("packed attention")]  # they share runs

# boundaries and real lengths; in "short" all real tokens of the first sequence lie on rank 0
PACKS: dict[str, tuple[list[int], list[int]]] = {
    "ragged": ([0, 8, 32, 40, 56], [3, 24, 1, 13]),
    "short": ([0, 16, 24], [2, 8]),
    "one-token": ([0, 8], [1]),
}
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "grouped": {"groups": 2},
    "narrow-values": {"d": 12, "d_v": 8},
    "wide-values": {"d": 8, "d_v": 12},
    "window": {"groups": 2, "sides": (5, 0)},
    "sinks": {"groups": 2, "sinks": True},
    "sinks-window": {"sides": (5, 0), "sinks": True},
}


def draw(tokens: int, groups: int = HEADS, d: int = 8, d_v: int = 8, **_: Any) -> tuple[Tensor, ...]:
    """Return queries, keys, values of a whole row and the gradient of the output, [t, heads or groups, width]."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(tokens, *shape, generator=generator) for shape in [(HEADS, d), (groups, d), (groups, d_v)]]
    return (*inputs, torch.randn(tokens, HEADS * d_v, generator=generator))


def attend_on_this_rank(size: int, changed: slice | None = None) -> dict[tuple[str, str], list[Tensor]]:
    """Return, for each pack and case, this rank's output and its gradients of queries, keys and values."""
    layout = ParallelLayout(context_parallel_size=size)
    results = {}
    with groups_of(layout):
        rank = parallel_state.get_context_parallel_rank()
        for pack, (offsets, lengths) in PACKS.items():
            boundaries = torch.tensor([[0, *lengths]]).cumsum(1), torch.tensor([offsets])
            params = packed_sequences(*boundaries, offsets[-1], size)
            for name, case in CASES.items():
                whole = draw(offsets[-1], **case)
                if changed is not None:
                    for tensor in whole[:3]:
                        tensor[changed] = 1 - 3 * tensor[changed]
                *inputs, weights = (split_packed(t, offsets, rank, size, dim=0) for t in whole)
                for tensor in inputs:
                    tensor.requires_grad_()
                context = build(layout, **case)(*inputs, None, packed_seq_params=params)
                results[pack, name] = [context.detach(), *torch.autograd.grad(context, inputs, weights)]
    return results


@functools.cache
def results_of_ranks(size: int) -> list[dict[tuple[str, str], list[Tensor]]]:
    return run_ranks(size, attend_on_this_rank, size, timeout=120)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pack", PACKS)
def test_ranks_together_compute_the_attention_of_packed_sequences(pack: str, case: str, size: int) -> None:
    offsets, lengths = PACKS[pack]
    *inputs, weights = draw(offsets[-1], **CASES[case])
    for tensor in inputs:
        tensor.requires_grad_()
    back, _ = CASES[case].get("sides", (-1, 0))
    seen = window(offsets[-1], back, 0)
    sinks = SINKS if CASES[case].get("sinks") else None
    expected = naive_packed_attention(*inputs, seen, offsets, lengths, CASES[case].get("d", 8) ** -0.5, sinks)
    references = [expected, *torch.autograd.grad(expected, inputs, weights.double())]

    shares = [results[pack, case] for results in results_of_ranks(size)]

    for parts, reference in zip(zip(*shares, strict=True), references, strict=True):
        whole = unsplit_packed(parts, offsets, dim=0).double()
        assert (whole - reference).abs().max() <= TOLERANCE * max(1.0, reference.abs().max())  # of one token it is zero


def test_a_change_in_one_sequence_changes_no_bit_of_the_others_on_any_rank() -> None:
    offsets, _ = PACKS["ragged"]
    changed = slice(8, 32)

    before, after = results_of_ranks(2), run_ranks(2, attend_on_this_rank, 2, changed, timeout=120)

    for case in CASES:
        for parts, others in zip(
            zip(*(results["ragged", case] for results in before), strict=True),
            zip(*(results["ragged", case] for results in after), strict=True),
            strict=True,
        ):
            first, second = (unsplit_packed(tensors, offsets, 0) for tensors in (parts, others))
            assert torch.equal(first[:8], second[:8])
            assert torch.equal(first[32:], second[32:])
            assert not torch.equal(first[changed], second[changed])


# ---- whole models

VOCAB_SIZE = 64
ROWS: list[list[int]] = [[5, 16, 1], [13, 2, 7, 3], [30]]  # real lengths of the sequences in each row
ROW_LENGTH = 48
FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "calculate_per_token_loss": True,
}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 6} | {
    "qk_pos_emb_head_dim": 4,
    "num_query_groups": None,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
YARN = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}


@dataclass(frozen=True)
class Model:
    """A model as fields of its config and arguments of ``GPTChunk``."""

    fields: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)


MODELS: dict[str, Model] = {
    "grouped": Model({}),
    "interleaved": Model({"rotary_interleaved": True}, {"rotary_percent": 0.5}),
    "yarn": Model({}, {"position_embedding_type": "yarn"}),
    "learned": Model({}, {"position_embedding_type": "learned_absolute"}),
    "window": Model({"window_size": (6, 0), "window_attn_skip_freq": 2}),
    "latent": Model(LATENT),
    "latent-rope": Model({**LATENT, "rope_type": "rope", "q_lora_rank": None}),
    "recomputed": Model(FULL),
    "attention-recomputed": Model(PARTS),
    "sinks": Model({"softmax_type": "learnable", "window_size": (6, 0), "window_attn_skip_freq": 2}),
    "latent-recomputed": Model({**LATENT, **PARTS}),
    "ahead": Model({"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}),
    "ahead-recomputed": Model({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5, **FULL}),
}
ON_FOUR_RANKS = ("grouped", "window", "latent-rope", "attention-recomputed", "ahead")


def models_on(size: int) -> list[str]:
    """Return the models that run on so many context-parallel ranks."""
    return [name for name in MODELS if size < 4 or name in ON_FOUR_RANKS]


def samples() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the tokens, labels and loss mask of each sequence."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for length in (length for row in ROWS for length in row):
        text = torch.randint(1, VOCAB_SIZE, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) < 0.8).float()
        found.append((text[:-1], text[1:], mask))
    return found


def padded_batch() -> dict[str, Tensor]:
    """Return every sequence in a row of its own, [n, longest]."""
    longest = max(len(tokens) for tokens, _, _ in samples())
    rows = [[torch.nn.functional.pad(part, (0, longest - len(part))) for part in sample] for sample in samples()]
    tokens, labels, mask = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return {"tokens": tokens, "labels": labels, "mask": mask, "positions": torch.arange(longest).expand_as(tokens)}


def packed_batch(multiple: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the same sequences in rows, [b, s], with real and padded boundaries, [b, n + 1]."""
    entries, left = max(map(len, ROWS)), samples()
    real, padded = torch.zeros(2, len(ROWS), entries + 1, dtype=torch.int32)
    names = ("tokens", "labels", "mask", "positions")
    batch = {name: torch.zeros(len(ROWS), ROW_LENGTH, dtype=torch.long) for name in names}
    batch["mask"] = batch["mask"].float()
    for row, lengths in enumerate(ROWS):
        for index in range(entries):
            length = lengths[index] if index < len(lengths) else 0
            start = int(padded[row, index])
            space = -(-length // multiple) * multiple if index < len(lengths) - 1 else ROW_LENGTH - start
            real[row, index + 1], padded[row, index + 1] = real[row, index] + length, start + space
            batch["positions"][row, start : start + space] = torch.arange(space)
            if length > 0:
                for name, part in zip(names, left.pop(0), strict=False):
                    batch[name][row, start : start + length] = part
    return batch, real, padded


def build_model(model: Model, size: int) -> GPTChunk:
    config = build_transformer_config({**FIELDS, **model.fields}, {"context_parallel_size": size})
    if "yarn" in model.arguments.values():
        set_yarn(config, YARN)
    built = GPTChunk(
        config,
        gpt_block_spec(config, "local"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=ROW_LENGTH,
        mtp_block_spec=gpt_mtp_block_spec(config, "local"),
        **{"position_embedding_type": "rope", **model.arguments},
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return built


def run(model: GPTChunk, batch: dict[str, Tensor], params: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token and the gradients of their masked sum."""
    extra = {"loss_mask": batch["mask"]} if model.config.mtp_num_layers else {}
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], packed_seq_params=params, **extra)
    model.zero_grad()
    (losses * batch["mask"]).sum().backward()
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def losses_and_gradients(size: int, packed: bool) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return what this rank computes for each model."""
    results = {}
    with groups_of(ParallelLayout(context_parallel_size=size)):
        rank = parallel_state.get_context_parallel_rank()
        for name, description in MODELS.items():
            if name not in models_on(size):
                continue
            model = build_model(description, size)
            if not packed:
                results[name] = run(model, padded_batch())
                continue
            batch, real, padded = packed_batch(multiple=1 if size == 1 else 2 * size)
            params = packed_sequences(real, padded, ROW_LENGTH, size)
            mine = {key: split_packed_rows(rows, padded, rank, size).reshape(1, -1) for key, rows in batch.items()}
            results[name] = run(model, mine, params)
    return results


@functools.cache
def packed_results(size: int) -> list[dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    return run_ranks(size, losses_and_gradients, size, True, timeout=180)


@functools.cache
def padded_results() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    (results,) = run_ranks(1, losses_and_gradients, 1, False, timeout=180)
    return results


@pytest.mark.parametrize(("name", "size"), [(name, size) for size in (1, 2, 4) for name in models_on(size)])
def test_a_packed_batch_has_the_losses_and_gradients_of_its_sequences_in_rows_of_their_own(
    name: str, size: int
) -> None:
    losses, gradients = padded_results()[name]
    shares = [results[name] for results in packed_results(size)]
    _, real, padded = packed_batch(multiple=1 if size == 1 else 2 * size)
    params = packed_sequences(real, padded, ROW_LENGTH, size)

    boundaries = params.boundaries
    order = packed_order(torch.tensor(boundaries.offsets), len(ROWS) * ROW_LENGTH, size)
    row = torch.cat([mine for mine, _ in shares], 1)[0, order]
    assert len(boundaries.lengths) == len(losses)
    for start, length, alone in zip(boundaries.offsets, boundaries.lengths, losses, strict=False):
        torch.testing.assert_close(row[start : start + length], alone[:length], rtol=1e-6, atol=1e-6)
    for key, reference in gradients.items():
        total = sum(share[1][key] for share in shares)
        assert (total - reference).abs().max() <= 2e-6 * reference.abs().max(), key  # measured: at most 9.2e-7
