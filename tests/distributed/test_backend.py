# SPDX-License-Identifier: Apache-2.0
"""Models of the torch backend's modules: on two ranks, one rank's loss and gradients, for every kind of layer.

The layouts of a plain GPT are in ``tests/parity``. These are the parts that need something of the backend: norms of
queries and keys, latent attention, windows, few query groups, dense and expert layers mixed.
"""

import functools
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import multi_latent_attention

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.context import split_for_context_parallel
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups, process_group
from tests.parity.global_tensors import Slice, assemble, fill_weights, gradient_slices, spread
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("backend")]  # they share runs

VOCAB_SIZE, S, B = 64, 16, 2
TOLERANCE = 1e-5  # of the largest gradient of each tensor, fp32; measured: at most 2.0e-6

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "calculate_per_token_loss": False,
}
LATENT = {
    "multi_latent_attention": True,
    "rope_type": "rope",
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
MODELS: dict[str, dict[str, Any]] = {
    "qk-norm": {"num_query_groups": 2, "qk_layernorm": True},
    "qk-layer-norm-zero-centred": {
        "normalization": "LayerNorm",
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
    },
    "one-query-group": {"num_query_groups": 1},
    "window": {"window_size": [5, 0], "window_attn_skip_freq": 2},
    "latent": {**LATENT, "qk_layernorm": True},
    "latent-layer-norm": {**LATENT, "qk_layernorm": True, "normalization": "LayerNorm"},
    "latent-without-norms": {**LATENT, "q_lora_rank": None},
    "latent-recomputed": {
        **LATENT,
        "qk_layernorm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj", "core_attn"],
    },
    "dense-and-experts": {**EXPERTS, "moe_layer_freq": [0, 1]},
    "latent-and-experts": {**LATENT, **EXPERTS, "qk_layernorm": True, "moe_layer_freq": [0, 1]},
}
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tensor_model_parallel_size=2),
    "tp2-sp": ParallelLayout(tensor_model_parallel_size=2, sequence_parallel=True),
    "cp2": ParallelLayout(context_parallel_size=2),
}

Result = tuple[float, list[Slice]]


def train_all(layout: ParallelLayout) -> dict[str, Result]:
    """Return, for each model that the layout takes, the loss and this rank's slices of the gradients."""
    with cpu_runtime(), mock.patch.object(multi_latent_attention, "HAVE_TE", False):  # for 0.16, see the backend
        open_process_groups(layout, seed=1, timeout=timedelta(seconds=60))
        try:
            return {name: _train(layout, fields) for name, fields in MODELS.items() if takes(layout, fields)}
        finally:
            close_process_groups()


def takes(layout: ParallelLayout, fields: dict[str, Any]) -> bool:
    """Experts under tensor parallelism need sequence parallelism."""
    return "num_moe_experts" not in fields or layout.tensor_model_parallel_size == 1 or layout.sequence_parallel


def _train(layout: ParallelLayout, fields: dict[str, Any]) -> Result:
    names = ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel")
    owned = {name: getattr(layout, name) for name in names}
    config = build_transformer_config(
        {**MODEL, **fields}, {**owned, "gradient_accumulation_fusion": False, "bias_dropout_fusion": False}
    )
    model = GPTModel(
        config,
        gpt_block_spec(config, "local"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=S,
        position_embedding_type="none" if config.multi_latent_attention else "rope",
    )
    fill_weights([model])
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    group = process_group("cp")
    text = torch.randint(0, VOCAB_SIZE, (B, S + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels, positions = (
        split_for_context_parallel(whole, group.rank(), group.size())
        for whole in (text[:, :-1], text[:, 1:], torch.arange(S).expand(B, -1))
    )
    loss = wrapped(tokens, positions, None, labels=labels).mean()
    loss.backward()
    finalize_model_grads([wrapped])
    return loss.item(), gradient_slices([wrapped])


@functools.cache
def results_of(layout: str) -> list[dict[str, Result]]:
    tp, cp = LAYOUTS[layout].tensor_model_parallel_size, LAYOUTS[layout].context_parallel_size
    return run_ranks(tp * cp, train_all, LAYOUTS[layout])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (model, layout)
        for layout in ("tp2", "tp2-sp", "cp2")
        for model in MODELS
        if takes(LAYOUTS[layout], MODELS[model])
    ],
)
def test_two_ranks_compute_the_loss_and_gradients_of_one(model: str, layout: str) -> None:
    [(loss, slices)] = [results[model] for results in results_of("one")]
    reference = assemble(slices)

    parts = [results[model] for results in results_of(layout)]

    assert sum(part[0] for part in parts) / len(parts) == pytest.approx(loss, rel=1e-6)
    worst = spread([piece for _, pieces in parts for piece in pieces], reference)
    assert max(worst.values()) <= TOLERANCE, worst
