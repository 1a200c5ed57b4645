# SPDX-License-Identifier: Apache-2.0
"""The torch backend computes on a GPU what it computes on the CPU, and leaves nothing on the other device."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mcore import single_process
from tests.gpu.runs import DEVICE, FilledGPT, train_on
from tests.te.runs import LENGTH, Run
from tests.te.test_features import EXPERTS, LATENT

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAIN = Run(impl="local", steps=5)
RUNS = {
    "dense": PLAIN,
    "packed": replace(PLAIN, packed=True),
    "window": replace(PLAIN, transformer={"window_size": [31, 0]}),
    "packed-window": replace(PLAIN, packed=True, transformer={"window_size": [15, 0]}),
    # One step more, and starting weights that differ by a last bit change the loss by 5e-5 on the CPU alone: a token
    # goes to another expert.
    "experts": replace(PLAIN, transformer=EXPERTS, steps=2),
    "latent": replace(PLAIN, transformer=LATENT),
    "multi-token": replace(PLAIN, transformer={"mtp_num_layers": 1}),
    "recompute": replace(
        PLAIN,
        transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Multiply in fp32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", RUNS)
def test_it_computes_what_the_cpu_computes(case: str) -> None:
    ours, reference = train_on(DEVICE, RUNS[case]), train_on("cpu", RUNS[case])
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    assert ours.norms == pytest.approx(reference.norms, rel=1e-4)


class Skipped(pl.Callback):
    """Keeps how many steps were skipped."""

    count = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.count = trainer.optimizers[0].num_skipped_steps  # type: ignore[attr-defined]


def test_fp16_skips_the_steps_that_overflow() -> None:
    run = replace(PLAIN, precision="16-mixed", fp8={"initial_loss_scale": 2.0**40, "hysteresis": 1}, steps=40)
    seen = Skipped()
    losses = train_on(DEVICE, run, seen).losses
    assert 5 <= seen.count < 40
    assert losses[-1] < losses[0]


class Places(pl.Callback):
    """Keeps the names of parameters, buffers and optimizer state that are not where the model runs."""

    def __init__(self) -> None:
        self.elsewhere: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.elsewhere += [name for name, tensor in named if tensor.device.type != DEVICE]


@pytest.mark.parametrize("case", ["dense", "experts", "multi-token", "latent"])
def test_every_parameter_and_buffer_is_on_the_device(case: str) -> None:
    places = Places()
    train_on(DEVICE, replace(RUNS[case], steps=1), places)
    assert places.elsewhere == []


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_whole_model_is_built_and_called_on_the_device(tmp_path: Path) -> None:
    train_on(DEVICE, replace(PLAIN, steps=1, transformer=EXPERTS), Save(tmp_path / "model.ckpt"))
    with single_process():
        module = FilledGPT.load_from_checkpoint(tmp_path / "model.ckpt").to(DEVICE)
        tokens = torch.arange(LENGTH, device=DEVICE)[None]
        logits = module.model(tokens, tokens, attention_mask=None)
        assert logits.device.type == DEVICE
        assert {tensor.device.type for tensor in module.parameters()} == {DEVICE}


class Said(pl.Callback):
    """Continues a prompt when training has ended."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for temperature in (0.0, 1.0):
            self.tokens.append(pl_module.generate([5, 6, 7], 20, temperature=temperature, top_k=5, seed=1))


@pytest.mark.parametrize("case", ["dense", "latent"])
def test_it_generates_what_the_cpu_generates(case: str) -> None:
    on_device, on_cpu = Said(), Said()
    train_on(DEVICE, RUNS[case], on_device)
    train_on("cpu", RUNS[case], on_cpu)
    assert on_device.tokens == on_cpu.tokens
    assert len(on_cpu.tokens[0]) == 23


class Waits(pl.Callback):
    """Collects where the host waits for the GPU in the second step."""

    def __init__(self) -> None:
        self.caught: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step == 1 and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


KNOWN_WAITS = (
    "megatron/core/optimizer",
    "torch/nn/utils",
    "strategy/logs/pipeline",
    "lightning/fabric/utilities/apply_func",
    "tests/te/runs",
)
"""Parts of the paths that read a number once a step: its norm, its loss, what is logged and kept here."""


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_waits_only_where_a_number_of_the_whole_step_is_read(packed: bool) -> None:
    run = replace(PLAIN, steps=2, packed=packed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_on(DEVICE, run, Waits(), accumulate_grad_batches=4)
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    sites = [f"{warning.filename}:{warning.lineno}" for warning in waits]
    unknown = [site for site in sites if not any(part in site for part in KNOWN_WAITS)]
    assert not unknown, f"{unknown} among {sites}"
    assert len(sites) <= 5, sites  # of a step, not of its four microbatches


def test_two_runs_in_one_process_leave_no_memory_behind() -> None:
    train_on(DEVICE, PLAIN)
    first = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    train_on(DEVICE, PLAIN)
    assert (torch.cuda.memory_allocated() if DEVICE == "cuda" else 0) <= first + 2**20
