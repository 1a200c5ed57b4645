# SPDX-License-Identifier: Apache-2.0
"""Rows that pad the vocabulary stand for no token: they change no loss and no gradient, and learn nothing."""

import zlib
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_mcore import MCoreGPT
from lightning_mcore.hf.pretrained import pieces_of_module
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

VOCAB_SIZE, LARGEST = 101, 128
TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


class Filled(MCoreGPT):
    """Has the same weights whatever the padding; the rows of that are large enough to dominate a softmax."""

    def configure_model(self) -> None:
        super().configure_model()
        pieces = pieces_of_module(self)
        for piece in pieces.own:
            generator = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
            rows, *widths = pieces.shapes[piece.name]
            is_padded = piece.name in ("embedding.word_embeddings.weight", "output_layer.weight")
            whole = 0.1 * torch.randn(LARGEST if is_padded else rows, *widths, generator=generator)
            if is_padded:
                whole[VOCAB_SIZE:] = 3.0
            piece.data.copy_(whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {
            name: parameter.main_grad.clone() for name, parameter in self.named_parameters() if "layers" not in name
        }


def one_step(layout: dict[str, Any], multiple: int, transformer: dict[str, Any]) -> dict[str, Any]:
    """Take a step and return its loss, its gradient norm, and this rank's gradients of embedding and output layer."""
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    module = Filled(VOCAB_SIZE, 16, {**TRANSFORMER, **transformer}, make_vocab_size_divisible_by=multiple)
    trainer = make_trainer(layout, max_steps=1)
    text = torch.arange(4 * 17).view(4, 17) * 7 % VOCAB_SIZE
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in text]
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    logged = {name: trainer.callback_metrics[name].item() for name in ("train_loss", "grad_norm")}
    return {**logged, "gradients": module.gradients}


@pytest.mark.parametrize("transformer", [{}, {"mtp_num_layers": 1}], ids=["plain", "multi-token"])
def test_padding_of_the_vocabulary_changes_no_loss_and_no_gradient(transformer: dict[str, Any]) -> None:
    [exact] = run_ranks(1, one_step, {}, 1, transformer, timeout=120)
    [padded] = run_ranks(1, one_step, {}, LARGEST, transformer, timeout=120)
    halves = run_ranks(2, one_step, {"tensor_model_parallel_size": 2}, LARGEST, transformer, timeout=120)
    for result in (padded, *halves):
        assert result["train_loss"] == pytest.approx(exact["train_loss"], rel=1e-6)
        assert result["grad_norm"] == pytest.approx(exact["grad_norm"], rel=1e-5)
    names = [name for name in padded["gradients"] if "word_embeddings" in name or "output_layer" in name]
    assert names
    for name in names:
        gradient: Tensor = padded["gradients"][name]
        assert torch.count_nonzero(gradient[VOCAB_SIZE:]) == 0
        torch.testing.assert_close(gradient[:VOCAB_SIZE], exact["gradients"][name], rtol=0, atol=1e-6)
        torch.testing.assert_close(torch.cat([half["gradients"][name] for half in halves]), gradient, rtol=0, atol=1e-6)
