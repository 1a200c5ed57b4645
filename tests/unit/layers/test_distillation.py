# SPDX-License-Identifier: Apache-2.0
"""The divergence of a student's probabilities from a teacher's, and its gradient.

Against autograd in fp64, and against what TRL's GKD gave: ``tests/trl_distillation.py`` writes that file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mcore import single_process
from lightning_mcore.config.distillation import Distillation
from lightning_mcore.layers.chunked_loss import Vocabulary
from lightning_mcore.layers.distillation import Sums, _ChunkOfTopK, _Divergences
from lightning_mcore.parallel.groups import process_group
from tests.support.live_memory import LiveBytes

GIVEN = json.loads((Path(__file__).parent / "trl_divergences.json").read_text(encoding="utf-8"))


def divergences(student: Tensor, teacher: Tensor, real: int, **setting: Any) -> Tensor:
    """Return the divergence of each token, [s, b], from logits [s, b, v] of which ``real`` are no padding."""
    with single_process():
        given = Vocabulary.of(real, student.size(-1), process_group("tp")), Distillation("teacher", **setting)
        sums = Sums.of(student.detach(), teacher, *given)
        found: Tensor = _Divergences.apply(student, teacher, *given, *sums)  # type: ignore[no-untyped-call]
    return found


def of_top_k(student: Tensor, teacher: Tensor, real: int, **setting: Any) -> Tensor:
    """Return the divergence of each token as :func:`divergences`, of the teacher's most likely tokens and the rest."""
    with single_process():
        vocabulary = Vocabulary.of(real, student.size(-1), process_group("tp"))
        chunk = _ChunkOfTopK(
            lambda taught: taught,
            vocabulary,
            Distillation("teacher", **setting),
            lambda logits: logits,
            torch.zeros(student.shape[:2], dtype=torch.long),
            vocabulary,
            beside=teacher,
        )
        return chunk(student)[1]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ("results", "of_top_k") for name in GIVEN[kind]])
def test_divergences_and_gradients_are_those_of_trl(kind: str, name: str) -> None:
    wanted = GIVEN[kind][name]
    student, teacher = (torch.tensor(GIVEN[who])[:, None] for who in ("student", "teacher"))  # [tokens, 1, v]
    student.requires_grad_()
    function = divergences if kind == "results" else of_top_k
    found = function(student, teacher, student.size(-1), **wanted["distillation"])
    torch.testing.assert_close(found[:, 0], torch.tensor(wanted["losses"]), rtol=1e-6, atol=1e-6)
    found.sum().backward()
    assert student.grad is not None
    # In fp32, log-probabilities down to -30 have errors of 2e-6, also where the gradient is small
    exact = torch.tensor(wanted["gradients"])
    assert float((student.grad[:, 0] - exact).abs().max() / exact.abs().max()) < 1e-6


@pytest.mark.parametrize("setting", [{}, {"beta": 1.0}, {"beta": 0.4}, {"beta": 0.4, "temperature": 3.0}], ids=str)
def test_gradients_are_those_of_autograd_and_padding_has_none(setting: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (4 * torch.randn(6, 2, 40, generator=generator) for _ in range(2))
    student.requires_grad_()
    weights = torch.rand(6, 2, generator=generator)
    (divergences(student, teacher, 33, **setting) * weights).sum().backward()
    exact = student.detach()[..., :33].double().requires_grad_()
    beta, temperature = setting.get("beta", 0.0), setting.get("temperature", 1.0)
    p, q = ((values / temperature).softmax(-1) for values in (exact, teacher[..., :33].double()))
    m = (1 - beta) * p + beta * q
    parts = {0.0: q * (q / p).log(), 1.0: p * (p / q).log()}
    terms = parts.get(beta, beta * q * (q / m).log() + (1 - beta) * p * (p / m).log())
    (terms.sum(-1) * weights).sum().backward()
    assert student.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(student.grad[..., :33].double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert not student.grad[..., 33:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setting", [{}, {"beta": 1.0}, {"beta": 0.4}, {"top_k": 2}], ids=str)
def test_a_divergence_needs_as_many_copies_of_logits_as_plan_counts(
    setting: dict[str, Any], dtype: torch.dtype
) -> None:
    """Forward and backward; the gradient, in the logits' format, is the only other large tensor."""
    logits, taught = (torch.randn(64, 2, 1024).to(dtype) for _ in range(2))
    logits.requires_grad_()
    given = Distillation("teacher", **setting)
    one = 4 * logits.numel()  # bytes of a copy
    live = LiveBytes()
    with live:
        found = (
            of_top_k(logits, taught, 1024, **setting)
            if "top_k" in setting
            else divergences(logits, taught, 1024, **setting)
        )
        assert 0.7 < live.peak / one / given.copies_of_logits < 1.05
        live.peak = live.now
        found.sum().backward()
        assert live.peak / one < given.copies_of_logits * 1.05 + (dtype.itemsize / 4 if "top_k" in setting else 0)


def test_equal_models_do_not_diverge() -> None:
    logits = 10 * torch.randn(4, 1, 32)
    for beta in (0.0, 0.5, 1.0):
        assert float(divergences(logits, logits.clone(), 32, beta=beta).abs().max()) < 1e-6
