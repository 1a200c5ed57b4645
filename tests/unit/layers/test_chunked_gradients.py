# SPDX-License-Identifier: Apache-2.0
"""Gradients of the output layer in bf16: chunks are summed in Megatron's fp32 buffer, not in bf16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mcore import LoRA, MCoreGPT, single_process

pytestmark = pytest.mark.filterwarnings("ignore")  # in this process warnings are errors, and Megatron has many

LENGTH, VOCABULARY, HIDDEN, CHUNK = 512, 128, 16, 8
SIZES = {
    **{"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": 32},
    **{"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False, "normalization": "RMSNorm"},
}
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "capped": {"architecture": {"logits_cap": 3.0}},
    "adapter": {"lora": LoRA(r=4, target_modules=["lm_head"])},
}


def _gradients(kind: str, size: int | None, dtype: torch.dtype, has_sums: bool, times: int = 1) -> dict[str, Tensor]:
    """Return the gradients of an output layer's trained parameters, with the same weights and inputs for all calls."""
    with single_process():
        module = MCoreGPT(VOCABULARY, LENGTH, SIZES, **KINDS[kind])
        module.configure_model()
        chunk: Any = module.model.chunks[0]
        chunk.loss_chunk_size = size
        generator = torch.Generator().manual_seed(1)
        weight = chunk.shared_embedding_or_output_weight() if kind == "tied" else None
        parameters = {"": weight} if kind == "tied" else dict(chunk.output_layer.named_parameters())
        for parameter in parameters.values():  # values that bf16 has, so that only the arithmetic differs
            values = torch.randn(parameter.shape, generator=generator).mul_(0.3).to(torch.bfloat16)
            parameter.data = values.to(dtype)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        if has_sums:
            _wrap_as_megatron(trained)
        hidden = torch.randn(LENGTH, 1, HIDDEN, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()
        labels = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
        loss = chunk.losses_of_hidden(hidden, labels, weight).sum()
        for _ in range(times):
            loss.backward(retain_graph=times > 1)
        if has_sums:
            return {name: parameter.main_grad for name, parameter in trained.items()}
        return {name: parameter.grad.float() for name, parameter in trained.items()}


def _wrap_as_megatron(parameters: dict[str, Any]) -> None:
    """Give parameters an fp32 ``main_grad``, and the hook of Megatron's DistributedDataParallel."""
    for parameter in parameters.values():
        parameter.main_grad = torch.zeros(parameter.shape)

        def hook(*_: Any, parameter: nn.Parameter = parameter) -> None:
            assert parameter.grad is not None  # as Megatron asserts with overlap_grad_reduce
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        parameter.node = node  # keeps it alive


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_in_bf16_round_their_gradients_hardly_more_than_one_product(kind: str) -> None:
    exact = _gradients(kind, None, torch.float32, False)
    whole = _gradients(kind, None, torch.bfloat16, True)
    chunks = _gradients(kind, CHUNK, torch.bfloat16, True)
    by_autograd = _gradients(kind, CHUNK, torch.bfloat16, False)  # 64 chunks, summed in bf16
    assert chunks.keys() == exact.keys()
    for name, wanted in exact.items():
        errors = [float((found[name] - wanted).norm() / wanted.norm()) for found in (whole, chunks, by_autograd)]
        assert errors[1] < 1.5 * errors[0], (name, errors)
        assert errors[1] < errors[2] / 2, (name, errors)


def test_a_second_backward_adds_the_same_again() -> None:
    once = _gradients("own", CHUNK, torch.bfloat16, True)["weight"]
    twice = _gradients("own", CHUNK, torch.bfloat16, True, times=2)["weight"]
    torch.testing.assert_close(twice, 2 * once)
