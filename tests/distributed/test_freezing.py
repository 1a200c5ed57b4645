# SPDX-License-Identifier: Apache-2.0
"""A model that trains some of its weights: the steps of transformers, frozen weights bit for bit, no state for them."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy, Recipe
from lightning_mcore.arguments.llamafactory.run import read_run
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.hf import export_checkpoint, export_model
from lightning_mcore.planning.arguments import with_adapters
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.step import step_work
from tests.distributed.test_lora import GLOBAL_BATCH, LENGTH, Rows, losses_of_steps
from tests.support.factory_files import LLAMA3, write_run
from tests.support.hf_models import read_tensors, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.toy import Watch, make_trainer

pytestmark = pytest.mark.distributed

RATE = 0.1
WEIGHT = 1e-6  # of weights after four steps of SGD; measured: 6e-8
LOSS = 1e-5
PARTS = ["model.layers.3.mlp.", "model.layers.2.mlp.", "lm_head", "norm"]  # freeze_extra_modules: lm_head,norm
LAYOUTS = (
    Layout(tp=2, sp=True),
    Layout(pp=2, vp=2),
    Layout(pp=2),
    Layout(dp=2, overlap=True),
)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Counting(Watch):
    """Counts at the end the parameters that have gradients, those of the optimizer, and those that are trained."""

    def __init__(self, save: str | None) -> None:
        super().__init__()
        self.save = save

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        chunks: Any = trainer.strategy._chunks  # type: ignore[attr-defined]
        buffered = sum(
            len(buffer.params) for chunk in chunks.ddp for buffer in chunk.buffers + chunk.expert_parallel_buffers
        )
        self.counts = (buffered, sum(parameter.requires_grad for parameter in module.parameters()))
        if self.save is not None:
            trainer.save_checkpoint(self.save)


def train(
    folder: str,
    layout: Layout,
    parts: list[str],
    steps: int,
    hf: str | None = None,
    start: str | None = None,
    save: str | None = None,
    fields: dict[str, Any] | None = None,
    optimizer: Any = "sgd",
) -> dict[str, Any]:
    """Train some steps; return the losses, the work, and how many elements have gradients on this rank."""
    recipe = Recipe(optimizer=optimizer, learning_rate=RATE, min_learning_rate=RATE)
    module = MCoreGPT.from_pretrained(folder, seq_length=LENGTH, recipe=recipe, train_only=parts, transformer=fields)
    course = Counting(save)
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments, micro_batch_size=1),
        max_steps=steps,
        accumulate_grad_batches=GLOBAL_BATCH // layout.dp,
        callbacks=[course],
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=1), ckpt_path=start)
    if hf is not None:
        export_model(module, hf)
    return {
        "losses": course.seen.logged,
        "flops": module.flops_per_token(),
        "counts": course.counts,
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
    }


def steps_of_transformers(folder: str, parts: list[str], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of transformers with the same weights frozen, and all weights at the end."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": Recipe().weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=Recipe().sgd_momentum)
    losses = losses_of_steps(model, optimizer, steps)
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def wanted() -> tuple[list[float], dict[str, Tensor]]:
    """Four steps of transformers."""
    return steps_of_transformers(str(tiny_folder("llama")), PARTS, 4)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(moe=True, dp=2, ep=2)], ids=lambda layout: layout.id)
def test_the_experts_bias_of_a_frozen_router_stays(layout: Layout, tmp_path: Path) -> None:
    folder, rate = tiny_folder("deepseek_v3"), {"moe_router_bias_update_rate": 0.05}
    run_ranks(2, train, str(folder), layout, ["layers.3."], 2, hf=str(tmp_path / "hf"), fields=rate, timeout=120)
    base, found = dict(read_tensors(folder)), dict(read_tensors(tmp_path / "hf"))
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if "layers.3." in name}
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in changed


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_what_is_not_frozen_is_trained_as_by_transformers(
    layout: Layout, wanted: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    """On stages too that have nothing to train, and with recomputation."""
    losses, weights = wanted
    folder, out = str(tiny_folder("llama")), str(tmp_path / "out")
    fields = RECOMPUTED if layout.vp is None and layout.pp > 1 else None
    ranks = run_ranks(layout.world_size, train, folder, layout, PARTS, 4, hf=out, fields=fields)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=LOSS)
        assert rank["counts"][0] == rank["counts"][1]
    base, found = dict(read_tensors(folder)), dict(read_tensors(out))
    assert base.keys() == found.keys()
    for name, tensor in found.items():
        if any(part in name for part in PARTS):
            assert not torch.equal(tensor, base[name]), name
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=WEIGHT)
        else:
            assert torch.equal(tensor, base[name]), name


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(dp=2, overlap=True)], ids=lambda layout: layout.id)
def test_biases_of_frozen_weights_are_trained_as_by_transformers(layout: Layout, tmp_path: Path) -> None:
    folder, out, parts = str(tiny_folder("qwen2")), str(tmp_path / "out"), ["bias"]
    losses, weights = steps_of_transformers(folder, parts, 4)
    for rank in run_ranks(layout.world_size, train, folder, layout, parts, 4, hf=out):
        assert rank["losses"] == pytest.approx(losses, abs=LOSS)
    for name, tensor in read_tensors(out):
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=WEIGHT)


def test_a_run_with_frozen_weights_goes_on_on_any_layout_and_is_planned(tmp_path: Path) -> None:
    """Also with experts; the checkpoint is a whole model."""
    folder, parts = str(tiny_folder("qwen3_moe")), ["layers.3.", "lm_head"]
    layout = Layout(moe=True, dp=2, ep=2, distributed_optimizer=True)
    saved, out = str(tmp_path / "saved.ckpt"), str(tmp_path / "out")
    undisturbed = run_ranks(2, train, folder, layout, parts, 4, optimizer="adamw")
    run_ranks(2, train, folder, layout, parts, 2, save=saved, optimizer="adamw")
    resumed = run_ranks(2, train, folder, layout, parts, 4, start=saved, optimizer="adamw")
    for before, after in zip(undisturbed, resumed, strict=True):
        assert all(map(torch.equal, before["weights"], after["weights"]))
        assert before["losses"][2:] == after["losses"]
    for rank in run_ranks(2, train, folder, Layout(moe=True, pp=2), parts, 4, start=saved, optimizer="adamw"):
        assert rank["losses"] == pytest.approx(undisturbed[0]["losses"][2:], abs=LOSS)
    run_ranks(1, export_checkpoint, saved, out, open_group=False)
    base, found = dict(read_tensors(folder)), load_file(f"{out}/model.safetensors")
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    assert changed == {name for name in base if any(part in name for part in parts)}
    arguments = {**MCoreGPT.from_pretrained(folder, seq_length=LENGTH).hparams, "train_only": parts}
    fields = with_adapters(GPTFields.of(arguments), arguments)
    planned = step_work(Sizes(fields, ParallelLayout(), 1, GlobalBatch(1, 1, 1, 1, LENGTH), Formats.of({}, {})))
    assert undisturbed[0]["flops"] == planned.flops_per_token


def command(words: list[str]) -> int:
    """Run LLaMA-Factory's file on this rank."""
    from lightning_mcore.cli.llamafactory import run

    return run([*words, "disable_tqdm=true", "report_to=none", "--accelerator", "cpu"])


@pytest.mark.filterwarnings("ignore")
def test_the_file_that_freezes_runs(tmp_path: Path) -> None:
    keys = {**LLAMA3, "finetuning_type": "freeze", "freeze_trainable_layers": 1, "export_hf_on_finish": True}
    file = write_run(tmp_path, {**keys, "freeze_extra_modules": "lm_head", "max_steps": 2})
    assert read_run(file).settings().model["train_only"] == ["model.layers.3.", "lm_head"]
    assert run_ranks(2, command, [file, "pipeline_model_parallel_size=2"]) == [0, 0]
    base, found = dict(read_tensors(tmp_path / "model")), dict(read_tensors(tmp_path / "out"))
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name].to(tensor.dtype))}
    assert changed == {name for name in base if name.startswith(("model.layers.3.", "lm_head"))}
