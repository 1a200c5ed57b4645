# SPDX-License-Identifier: Apache-2.0
"""Losses in chunks: their size, what backward repeats, what autograd keeps, and what acts on logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_mcore import LoRA, MCoreGPT, single_process
from lightning_mcore.config.loss_chunks import check_chunked_loss, tokens_of_chunk
from lightning_mcore.layers import chunked_loss
from lightning_mcore.layers.chunked_loss import Vocabulary, in_chunks
from lightning_mcore.parallel.groups import process_group
from tests.support.sentences import refuses

pytestmark = pytest.mark.filterwarnings("ignore")  # in this process warnings are errors, and Megatron has many

ROWS, LENGTH, VOCABULARY = 2, 16, 50  # padded to 128
SIZES = {
    **{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32, "normalization": "RMSNorm"},
    **{"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False},
}


@pytest.mark.parametrize(
    ("size", "tokens", "columns", "wanted"),
    [
        ("auto", 4096, 128_256, 1024),
        ("auto", 4096, 128_256 // 8, None),  # 2**25.97 logits
        ("auto", 512, 2**20, None),  # one chunk
        ("auto", 1100, 2**20, None),  # a chunk of 1024 has 93 % of the logits, and all would be computed again
        ("auto", 2048, 2**20, 1024),
        (256, 4096, 100, 256),
        (256, 256, 2**20, None),
        (None, 2**20, 2**20, None),
    ],
)
def test_a_chunk_has_as_many_tokens_as_asked_for(size: Any, tokens: int, columns: int, wanted: int | None) -> None:
    assert tokens_of_chunk(size, tokens, columns) == wanted


def test_without_gradients_chunks_are_always_small() -> None:
    assert tokens_of_chunk("auto", 4096, 128, has_gradients=False) == 1024
    assert tokens_of_chunk(None, 4096, 128, has_gradients=False) == 1024
    assert tokens_of_chunk(64, 4096, 128, has_gradients=False) == 64


def losses_and_gradients(
    build: Callable[[], MCoreGPT], size: int | None, repeated: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses of a fresh model, and the gradients of their weighted sum."""
    with single_process():
        module = build()
        chunk: Any = module.model.chunks[0]
        chunk.loss_chunk_size = size
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        torch.manual_seed(5)  # for dropout
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        losses, _ = module.token_losses({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        (losses * torch.rand(losses.shape, generator=generator)).sum().backward()
        named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return losses.detach(), named


def model(**arguments: Any) -> Callable[[], MCoreGPT]:
    """Return what builds a tiny model."""

    def build() -> MCoreGPT:
        module = MCoreGPT(VOCABULARY, LENGTH, SIZES, **arguments)
        module.configure_model()
        return module

    return build


MODELS = {
    "padded vocabulary": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "capped and divided logits": {"architecture": {"logits_cap": 2.0, "logits_divisor": 1.5}},
    "adapter on the output": {"lora": LoRA(r=4, target_modules=["lm_head", "q_proj"])},
}


@pytest.mark.parametrize("name", MODELS)
def test_chunks_have_the_losses_and_gradients_of_whole_logits(name: str) -> None:
    losses, gradients = losses_and_gradients(model(**MODELS[name]), None)
    for size in (1, 10, 32):
        found, others = losses_and_gradients(model(**MODELS[name]), size)
        torch.testing.assert_close(found, losses)
        assert others.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(others[key], gradient, msg=lambda text, key=key: f"{key}: {text}")


def test_backward_drops_what_forward_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    build = model(lora=LoRA(r=4, target_modules=["lm_head"], lora_dropout=0.5))
    losses, gradients = losses_and_gradients(build, 10)
    monkeypatch.setattr(chunked_loss, "checkpoint", lambda compute, *tensors, **_: compute(*tensors))
    wanted_losses, wanted = losses_and_gradients(build, 10)
    assert torch.equal(losses, wanted_losses)
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], gradient) for name, gradient in wanted.items())


def test_autograd_keeps_no_logits_and_the_losses_are_torchs() -> None:
    kept: list[int] = []
    matrix = torch.randn(VOCABULARY, 8, requires_grad=True)
    hidden = torch.randn(LENGTH, ROWS, 8, requires_grad=True)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH))
    with single_process(), saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        vocabulary = Vocabulary.of(VOCABULARY, VOCABULARY, process_group("tp"))
        (losses,) = in_chunks(lambda part: part @ matrix.t(), hidden, labels, 8, vocabulary)
        assert max(kept) <= hidden.numel()
        losses.square().sum().backward()
    found = hidden.grad
    hidden.grad = None
    logits = hidden @ matrix.t()
    whole = nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    whole.square().sum().backward()
    torch.testing.assert_close(losses, whole)
    assert found is not None
    assert hidden.grad is not None
    size = float(hidden.grad.abs().max())  # a gradient near 0 is a difference of large terms
    torch.testing.assert_close(found, hidden.grad, rtol=0, atol=1e-6 * size)


def test_small_losses_of_large_logits_keep_their_digits() -> None:
    hidden = torch.eye(8)[:, None]  # a position for each row of the matrix
    matrix = torch.randn(VOCABULARY, 8)
    labels = torch.randint(VOCABULARY, (1, 8))
    matrix[labels[0], torch.arange(8)] = 300.0
    matrix[0] += 285.0
    with single_process(), torch.no_grad():
        vocabulary = Vocabulary.of(VOCABULARY, VOCABULARY, process_group("tp"))
        (losses,) = in_chunks(lambda part: part @ matrix.t(), hidden, labels, 4, vocabulary)
    exact = nn.functional.cross_entropy(matrix.t().double(), labels[0], reduction="none")
    torch.testing.assert_close(losses[0].double(), exact, rtol=1e-3, atol=1e-7)
    assert (exact > 0).any()


def test_a_gradient_that_is_computed_later_is_refused() -> None:
    with refuses(ValueError, "loss_chunk_size=8 with defer_embedding_wgrad_compute=True"):
        check_chunked_loss(8, defers_gradient=True)
    check_chunked_loss(None, defers_gradient=True)


def test_auto_leaves_logits_whole_where_the_gradient_is_computed_later() -> None:
    check_chunked_loss("auto", defers_gradient=True)
    check_chunked_loss("auto", defers_gradient=False, is_ours=False)
    assert tokens_of_chunk("auto", 4096, 2**20, defers_gradient=True) is None
    assert tokens_of_chunk("auto", 4096, 2**20, has_gradients=False, defers_gradient=True) == 1024
