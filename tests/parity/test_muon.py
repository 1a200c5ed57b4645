# SPDX-License-Identifier: Apache-2.0
"""Training with Muon equals transformers trained with ``torch.optim.Muon`` and ``AdamW``, on every layout.

transformers keeps queries, keys, values and experts apart, as Muon takes them. It keeps gate and up apart too, which
Megatron's Muon takes as one matrix, so the reference joins them. Muon iterates in bf16 and raises what is small in a
gradient, and with it the rounding: with a noise of 1e-6 in its gradients, the reference itself differs by up to 3.4 %
of the distance that a tensor moved in three steps, and by more on some CPUs. So both sides iterate in fp64 here.
``tests/unit/optimizer/test_muon.py`` compares the iteration in bf16 with torch's.
"""

import contextlib
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import _muon

from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.interop.named_weights import named_weights
from tests.parity.hf_training import LENGTH, Watched, load_model, on_disk, text
from tests.support.hf_models import tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("muon")]

STEPS, RATE, CLIP = 3, 0.02, 0.5
SHARE = 1e-3  # of the distance that a tensor moved

LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}
RECIPE = Recipe(optimizer="muon", learning_rate=RATE, min_learning_rate=RATE, weight_decay=0.1)


class WithMuon(Watched):
    """Trains with its recipe, and keeps its weights under the names of the disk."""

    final: dict[str, Tensor]

    def configure_optimizers(self) -> Any:
        return MCoreGPT.configure_optimizers(self)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_end(self) -> None:
        self.final = dict(named_weights(self, adapter=self.lora is not None))


def train(
    folder: str,
    layout: Layout,
    strategy: dict[str, Any],
    save: str | None = None,
    resume: str | None = None,
    lora: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Train on this rank of a layout, or all but the last step, or that one; return the whole model's weights."""
    arguments = {**layout.strategy_arguments, **strategy} | ({"micro_batch_size": 1} if layout.dp == 1 else {})
    pl.seed_everything(1, verbose=False)  # for adapters
    module = WithMuon.from_pretrained(folder, seq_length=LENGTH, recipe=RECIPE, lora=lora)
    trainer = make_trainer(
        MCoreStrategy(**arguments),
        max_steps=STEPS - 1 if save else STEPS,
        use_distributed_sampler=False,
        gradient_clip_val=CLIP,
    )
    with iterating_in_fp64():
        trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.final


def iterating_in_fp64() -> Any:
    """Return a context in which Muon makes fp64 of what it makes bf16 of."""
    contexts = contextlib.ExitStack()
    contexts.enter_context(mock.patch.object(Tensor, "bfloat16", Tensor.double))
    contexts.enter_context(mock.patch.object(_muon, "torch", _InFP64()))  # from torch 2.15 on, it calls to()
    return contexts


class _InFP64:
    """torch, in which bfloat16 is fp64."""

    bfloat16 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


Parts = list[tuple[nn.Parameter, int | None]]  # one matrix: parameters below each other, or one expert's part of one


def matrices_of(model: nn.Module) -> list[Parts]:
    """Return the matrices inside the layers of a transformers model."""
    parameters = dict(model.named_parameters())
    found: list[Parts] = []
    for name, parameter in parameters.items():
        if parameter.dim() == 3:  # the experts of a layer
            found += [[(parameter, expert)] for expert in range(parameter.size(0))]
        elif "gate_proj" in name:
            found.append([(parameter, None), (parameters[name.replace("gate_proj", "up_proj")], None)])
        elif parameter.dim() == 2 and not any(part in name for part in ("up_proj", "embed", "lm_head")):
            found.append([(parameter, None)])
    return found


def joined(tensors: list[tuple[Tensor, int | None]]) -> Tensor:
    """Return the tensors, or parts of them, below each other."""
    return torch.cat([tensor if part is None else tensor[part] for tensor, part in tensors])


@functools.cache
def reference(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after training with transformers, under the names of the disk."""
    model, batch = load_model(name).train(), text()
    before = on_disk_values(name, model)
    matrices = matrices_of(model)
    own = {id(parameter) for parts in matrices for parameter, _ in parts}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    stepped = [nn.Parameter(joined([(parameter.data, part) for parameter, part in parts])) for parts in matrices]
    muon = torch.optim.Muon(stepped, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0})
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    for _ in range(STEPS):
        model.zero_grad()
        logits = model(batch["tokens"]).logits
        functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for matrix, parts in zip(stepped, matrices, strict=True):
            matrix.grad = joined([(parameter.grad, part) for parameter, part in parts])
        with iterating_in_fp64():
            muon.step()
        adamw.step()
        for matrix, parts in zip(stepped, matrices, strict=True):
            rows = matrix.data.chunk(len(parts))
            for (parameter, part), values in zip(parts, rows, strict=True):
                (parameter.data if part is None else parameter.data[part]).copy_(values)
    return before, on_disk_values(name, model)


def on_disk_values(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a transformers model under the names of the disk."""
    for parameter in model.parameters():
        parameter.grad = parameter.data.clone()
    return on_disk(name, dict(model.named_parameters()))


def share(name: str, difference: Tensor, moved: Tensor) -> float:
    """Return the norm of a difference as a share of the distance that the tensor moved."""
    if name.endswith("mlp.gate.weight"):
        # The rows of a router's gradient, one for each expert, add up to zero but for rounding, which Muon makes as
        # large as the rest. To add the same to every row changes no probability.
        difference = difference - difference.mean(dim=0)
    return float(difference.norm() / moved.norm())


ROWS = [
    *((layout, "qwen3", {}) for layout in (Layout(), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2))),
    *((layout, "qwen3", LAYER_WISE) for layout in (Layout(dp=2), Layout(cp=2), Layout(dp=2, tp=2, sp=True))),
    *((layout, "qwen3_moe", LAYER_WISE) for layout in (Layout(moe=True, dp=2, ep=2), Layout(moe=True, dp=2, pp=2))),
    (Layout(moe=True, tp=2, sp=True), "qwen3_moe", {}),
]


@pytest.mark.parametrize(
    ("layout", "name", "strategy"),
    [
        pytest.param(*row, id=f"{row[1]}-{row[0].id}{'-layer-wise' if row[2] else ''}", marks=marks)
        for row in ROWS
        for marks in [[] if row[0] in (Layout(tp=2, sp=True), Layout(moe=True, dp=2, ep=2)) else [pytest.mark.thorough]]
    ],
)
def test_training_with_muon_is_that_of_transformers_and_torch(
    layout: Layout, name: str, strategy: dict[str, Any]
) -> None:
    check(name, run_ranks(layout.world_size, train, str(tiny_folder(name)), layout, strategy, timeout=120))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Layout(dp=2), LAYER_WISE), (Layout(tp=2, sp=True), {})),
        pytest.param((Layout(tp=2, sp=True), {}), (Layout(dp=2, pp=2), LAYER_WISE), marks=pytest.mark.thorough),
    ],
    ids=["layer-wise-to-tp2", "tp2-to-pp2-layer-wise"],
)
def test_momentum_goes_to_another_layout(
    first: tuple[Layout, dict[str, Any]], second: tuple[Layout, dict[str, Any]], tmp_path: Path
) -> None:
    folder, path = str(tiny_folder("qwen3")), str(tmp_path / "muon.ckpt")
    run_ranks(first[0].world_size, train, folder, *first, path, timeout=120)
    check("qwen3", run_ranks(second[0].world_size, train, folder, *second, None, path, timeout=120))


def test_adapters_and_sinks_that_every_rank_holds_whole_are_not_gathered() -> None:
    lora = {"r": 4, "target_modules": "all-linear"}
    runs = {"qwen3": lora, "gpt_oss": None}  # the first has whole halves of adapters, the second sinks
    for name, adapters in runs.items():
        folder = str(tiny_folder(name))
        [expected] = run_ranks(1, train, folder, Layout(), {}, None, None, adapters, timeout=120)
        for ours in run_ranks(2, train, folder, Layout(tp=2, sp=True), {}, None, None, adapters, timeout=120):
            assert ours.keys() == expected.keys()
            for key, value in ours.items():
                assert float((value - expected[key]).norm() / expected[key].norm()) <= SHARE, (name, key)


def check(name: str, ranks: list[dict[str, Tensor]]) -> None:
    """Compare every rank's view of the whole model with the reference."""
    before, after = reference(name)
    for ours in ranks:
        assert ours.keys() == after.keys()
        apart = {key: share(key, ours[key] - after[key], after[key] - before[key]) for key in after}
        assert max(apart.values()) <= SHARE, {key: value for key, value in apart.items() if not value <= SHARE}
