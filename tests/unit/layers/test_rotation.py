# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: bit for bit what Megatron's attention computes, with tables that layers share."""

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from lightning_mcore import MCoreGPT
from lightning_mcore.layers import rotation
from lightning_mcore.layers.packed_sequences import PackedSequences, packed_sequences
from lightning_mcore.layers.session import single_process

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HEADS, SIZE, TOKENS = 4, 8, 24
OFFSETS = (0, 8, 12, 24)  # two context-parallel ranks share each sequence in slices of 2, 1 and 3


def angles_of(length: int, channels: int, interleaved: bool) -> Tensor:
    frequencies = torch.outer(torch.arange(length), 0.7 ** torch.arange(channels // 2))
    pairs = (frequencies, frequencies)
    turns = torch.stack(pairs, -1).flatten(1) if interleaved else torch.cat(pairs, -1)
    return turns[:, None, None]


def packed() -> PackedSequences:
    offsets = torch.tensor([OFFSETS])
    return packed_sequences(offsets, offsets, TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [SIZE, SIZE // 2])
@pytest.mark.parametrize("form", ["dense", "packed", "places", "packed-cp"])
def test_heads_and_gradients_are_megatrons_bit_for_bit(
    form: str, channels: int, interleaved: bool, dtype: torch.dtype
) -> None:
    size = 2 if form == "packed-cp" else 1
    rank = size - 1
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    config: Any = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=interleaved, multi_latent_attention=False, mrope_section=None
    )
    rows = 2 if form == "dense" else 1
    angles = angles_of(12 if form.startswith("packed") else TOKENS, channels, interleaved)
    generator = torch.Generator().manual_seed(1)
    heads, weights = (torch.randn(TOKENS // size, rows, HEADS, SIZE, generator=generator).to(dtype) for _ in range(2))
    own, other = heads.clone().requires_grad_(), heads.clone().requires_grad_()
    layer: Any = SimpleNamespace(pg_collection=SimpleNamespace(cp=group), _scale=1.5, config=config)
    boundaries = None if form == "dense" else packed().boundaries
    cu_seqlens = None if form == "dense" else torch.tensor(OFFSETS, dtype=torch.int32)
    given = other if form == "dense" else other.squeeze(1)

    tables = rotation.RotatedAttention._tables(layer, own, angles, boundaries)
    rotated = rotation.rotate(own, tables, interleaved)
    expected = apply_rotary_pos_emb(given, angles, config, cu_seqlens, mscale=1.5, cp_group=group).view_as(rotated)

    assert torch.equal(rotated, expected)
    rotated.backward(weights)
    expected.backward(weights)
    assert own.grad is not None
    assert other.grad is not None
    assert torch.equal(own.grad, other.grad)
    with torch.no_grad():
        assert torch.equal(rotation.rotate(heads, tables, interleaved), expected)


TRANSFORMER = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": HEADS, "num_query_groups": 2}


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_layers_share_tables_and_compute_what_megatrons_attention_does(is_packed: bool) -> None:
    module = MCoreGPT(64, TOKENS, {**TRANSFORMER, "no_rope_freq": [0, 1, 0]})
    tokens = torch.arange(TOKENS)[None]
    more = {"packed_seq_params": packed()} if is_packed else {}
    with single_process():
        module.configure_model()
        chunk: Any = module.model.chunks[0]
        attentions = [layer.self_attention for layer in chunk.decoder.layers]

        def gradients() -> list[Tensor]:
            losses = chunk(tokens, tokens, None, labels=tokens, **more)
            return [losses, *torch.autograd.grad(losses.sum(), list(chunk.parameters()))]

        with torch.inference_mode():
            chunk(tokens, tokens, None, **more)
        with mock.patch.object(torch, "cos", wraps=torch.cos) as cosines:
            found = gradients()
            assert cosines.call_count == 0  # the tables of validation are those of training
            for attention in attentions:
                assert type(attention) is rotation.RotatedAttention
                attention.__class__ = SelfAttention
            expected = gradients()
            assert cosines.call_count >= 4  # of queries and of keys, in two layers; since 0.19 also of each sequence

    for value, other in zip(found, expected, strict=True):
        assert torch.equal(value, other)


def test_tables_of_packed_rows_end_with_their_microbatch() -> None:
    module = MCoreGPT(64, TOKENS, {**TRANSFORMER, "mtp_num_layers": 1})
    tokens = torch.arange(TOKENS)[None]
    real, padded = torch.tensor([[0, 5, 9, 20]]), torch.tensor([OFFSETS])  # multi-token prediction ignores padding
    made: list[weakref.ref[Tensor]] = []
    compute = rotation.Tables.of

    def watched(*args: Any) -> rotation.Tables:
        tables = compute(*args)
        made.append(weakref.ref(tables.cosines))
        return tables

    with single_process(), mock.patch.object(rotation.Tables, "of", watched), torch.no_grad():
        module.configure_model()
        chunk: Any = module.model.chunks[0]
        microbatch = packed_sequences(real, padded, TOKENS)
        for _ in range(2):
            chunk(tokens, tokens, None, labels=tokens, packed_seq_params=microbatch)
        assert len(made) == 1  # all layers and both passes share them
        assert made[0]() is not None
        del microbatch
        assert made[0]() is None


def test_layers_with_a_window_share_tables_of_their_own() -> None:
    windows = {"window_size": [4, 0], "window_attn_skip_freq": [1, 1, 0]}
    module = MCoreGPT(64, TOKENS, {**TRANSFORMER, **windows}, architecture={"window_rotary_base": 500.0})
    tokens = torch.arange(TOKENS)[None]
    with single_process(), mock.patch.object(torch, "cos", wraps=torch.cos) as cosines:
        module.configure_model()
        module.model.chunks[0](tokens, tokens, None)
    assert cosines.call_count == 2


def test_a_sequence_longer_than_max_seqlen_raises() -> None:
    module = MCoreGPT(64, TOKENS, TRANSFORMER)
    tokens = torch.arange(TOKENS)[None]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    params = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=8, max_seqlen_kv=8)
    with single_process():
        module.configure_model()
        with pytest.raises(ValueError, match="has a max_seqlen of 8, but its longest sequence has 12 tokens"):
            module.model.chunks[0](tokens, tokens, None, packed_seq_params=params)
