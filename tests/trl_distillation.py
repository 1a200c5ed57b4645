# SPDX-License-Identifier: Apache-2.0
"""Writes what the distillation of TRL gives, for ``tests/unit/layers/test_distillation.py`` and the parity tests.

It calls the functions of TRL's trainers themselves, with an object in place of the trainer that has the attributes that
they read. Add TRL to the environment of the tests, in a folder of its own:

    pip install --no-deps --target /tmp/trl trl==1.16.0
    PYTHONPATH=/tmp/trl:. python -m tests.trl_distillation

The step on a student's own answers is that of ``GKDTrainer``: it writes greedy answers to the prompts of
``tests/parity/test_distillation.py`` with the same tiny models, and computes their loss and gradients in fp64.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DIVERGENCES = Path(__file__).parent / "unit" / "layers" / "trl_divergences.json"
ON_POLICY = Path(__file__).parent / "parity" / "trl_on_policy.json"
PADDING = 0  # token


def divergences(student: Tensor, teacher: Tensor) -> dict[str, Any]:
    """Return the divergences and gradients of each setting by the loss of ``GKDTrainer``."""
    from trl.experimental.gkd import GKDTrainer

    results = {}
    for beta, temperature in ((0.0, 1.0), (0.0, 2.0), (1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.1, 1.5)):
        given = {"beta": beta, "temperature": temperature}

        def losses(logits: Tensor, given: dict[str, float] = given) -> Tensor:
            found: Tensor = GKDTrainer.generalized_jsd_loss(logits, teacher, reduction="none", **given)
            return found.sum(-1)

        results[f"beta={beta}, temperature={temperature}"] = {"distillation": given, **_with_gradients(losses, student)}
    return results


def of_top_k(student: Tensor, teacher: Tensor) -> dict[str, Any]:
    """Return the divergences of the teacher's most likely tokens and the rest, and their gradients.

    Forward KL is the loss of ``ServerDistillationTrainer``. Its other losses compare one token, so those here put the
    same support, the teacher's, into its functions.
    """
    from trl.experimental.server_distillation import server_distillation_trainer as server

    kind = server.ServerDistillationTrainer
    results = {}
    for beta, temperature, k in ((0.0, 1.0, 3), (0.0, 2.0, 1), (1.0, 0.5, 2), (0.5, 1.0, 4), (0.1, 1.5, 3)):
        values, tokens = (teacher / temperature).log_softmax(-1).topk(k)

        def forward_kl(log_probs: Tensor, row: int, values: Tensor = values, tokens: Tensor = tokens) -> Tensor:
            """Return the trainer's mean over one token."""
            trainer = SimpleNamespace(loss_add_tail=True, _reduce_divergence_loss=kind._reduce_divergence_loss)
            given = {"topk_logprobs": values[None, row : row + 1], "topk_token_ids": tokens[None, row : row + 1]}
            found: Tensor = kind._compute_server_forward_kl_loss(
                trainer, given, log_probs[None, row : row + 1], torch.zeros(1, 1, dtype=torch.long)
            )
            return found

        def other(log_probs: Tensor, beta: float = beta, values: Tensor = values, tokens: Tensor = tokens) -> Tensor:
            valid = torch.ones_like(tokens, dtype=torch.bool)
            own, support = server._add_tail_bucket(log_probs.gather(-1, tokens), valid)
            taught, _ = server._add_tail_bucket(values, valid)
            found: Tensor = server._jsd_divergence(own, taught, beta, support).sum(-1)
            return found

        def losses(logits: Tensor, beta: float = beta, temperature: float = temperature, other: Any = other) -> Tensor:
            log_probs = (logits / temperature).log_softmax(-1)
            if beta:
                found: Tensor = other(log_probs)
                return found
            return torch.stack([forward_kl(log_probs, row) for row in range(len(logits))])

        given = {"beta": beta, "temperature": temperature, "top_k": k}
        name = ", ".join(f"{key}={value}" for key, value in given.items())
        results[name] = {"distillation": given, **_with_gradients(losses, student)}
    return results


def _with_gradients(losses_of: Callable[[Tensor], Tensor], student: Tensor) -> dict[str, Any]:
    logits = student.clone().requires_grad_()
    losses = losses_of(logits)
    (gradients,) = torch.autograd.grad(losses.sum(), logits)
    return {"losses": losses.tolist(), "gradients": gradients.tolist()}


def on_policy() -> dict[str, Any]:
    """Return the answers, the loss and products and norms of the gradients of ``GKDTrainer``'s step on own answers."""
    from transformers import GenerationConfig
    from trl.experimental.gkd import GKDTrainer

    from tests.parity import test_distillation as own
    from tests.support.hf_models import auto_model, tiny_folder

    student, teacher = (
        auto_model().from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
        for folder in (tiny_folder("qwen2"), own.teacher_of("qwen2"))
    )
    prompts = own.prompts()
    width = max(map(len, prompts))
    rows = torch.tensor([[PADDING] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    setting = GenerationConfig(
        max_new_tokens=own.OWN["max_new_tokens"],
        eos_token_id=own.OWN["stop_token"],
        pad_token_id=PADDING,
        do_sample=False,
    )
    names = ("input_ids", "attention_mask", "labels")
    given = {"prompts": rows, "prompt_attention_mask": mask}
    inputs = dict(zip(names, GKDTrainer.generate_on_policy_outputs(student, given, setting), strict=True))
    trainer = SimpleNamespace(
        teacher_model=teacher, beta=own.OWN["beta"], generalized_jsd_loss=GKDTrainer.generalized_jsd_loss
    )
    loss = GKDTrainer.compute_loss(trainer, student, inputs)
    loss.backward()
    written = [
        row[counts > 0].tolist() for row, counts in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    gradients = {name: parameter.grad for name, parameter in student.named_parameters()}
    found = {
        name: [float((gradient * direction(name, gradient.shape)).sum()), float(gradient.norm())]
        for name, gradient in gradients.items()
    }
    return {"rows": written, "loss": loss.item(), "gradients": found}


def direction(name: str, shape: torch.Size) -> Tensor:
    """Return a direction that depends on a parameter's name alone, fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)


def main() -> None:
    """Write the files."""
    import transformers
    import trl

    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    generator = torch.Generator().manual_seed(1)
    student, teacher = ((8 * torch.randn(5, 7, generator=generator)).round().double() / 4 for _ in range(2))
    found = {
        "versions": versions,
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "results": divergences(student, teacher),
        "of_top_k": of_top_k(student, teacher),
    }
    DIVERGENCES.write_text(json.dumps(found) + "\n", encoding="utf-8")
    ON_POLICY.write_text(json.dumps({"versions": versions, **on_policy()}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
