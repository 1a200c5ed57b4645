# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore llamafactory`` on ranks: the text models of LLaMA-Factory's Megatron examples, at tiny size."""

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_mcore.arguments.llamafactory.dft_loss import DFTModel
from lightning_mcore.cli.llamafactory import run
from lightning_mcore.hf import export_checkpoint
from lightning_mcore.models.recipe import Recipe
from tests.distributed.test_cli import lightning_mcore
from tests.parity.hf_training import LENGTH, text
from tests.support.factory_files import (
    LLAMA3,
    MERGE_LORA,
    PRETRAIN,
    QWEN3_LORA,
    QWEN3_MOE,
    TRAIN_LORA,
    losses,
    rows,
    write_run,
)
from tests.support.hf_models import tiny_folder
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer
from tests.unit.arguments.test_llamafactory_flags import as_flags

pytestmark = pytest.mark.distributed


def command(words: list[str]) -> int:
    """Run the command on this rank, and return its exit code."""
    warnings.filterwarnings("ignore")
    return run([*words, "disable_tqdm=true", "report_to=none", "--accelerator", "cpu"])


def run_all(world_size: int, *words: str) -> list[int]:
    codes: list[int] = run_ranks(world_size, command, list(words), timeout=240)
    return codes


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("stages", [2, 4])
def test_the_file_of_the_model_with_experts_runs(
    stages: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file has four stages; here as it is, without a GPU for its kernels."""
    file = write_run(tmp_path, QWEN3_MOE, "qwen3_moe")
    words = [] if stages == 4 else [f"pipeline_model_parallel_size={stages}"]
    assert run_all(2 * stages, "train", file, *words) == [0] * 2 * stages
    said = capfd.readouterr().out
    assert (
        "on a CPU, apply_rope_fusion, moe_grouped_gemm have no effect and are left out; the numbers are the s" in said
    )
    assert f"layout: tp1 pp{stages} cp1 dp2 ep2 etp1 edp1" in said
    assert "per_device_train_batch_size 1 * gradient_accumulation_steps 8 * data-parallel size 2 = 16 rows" in said
    found = [float(line.split()[1]) for line in losses(tmp_path)]
    assert len(found) == 4
    assert found[-1] < found[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.model_type == "qwen3_moe"


def test_a_line_of_flags_runs_without_the_switches_of_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The losses are those of the same keys without the switches; what changes numbers is refused."""
    file = write_run(tmp_path, QWEN3_MOE, "qwen3_moe")
    keys = {**yaml.safe_load(Path(file).read_text()), "max_steps": 2, "pipeline_model_parallel_size": 2}
    keys["gradient_accumulation_steps"] = 2
    del keys["num_train_epochs"]
    kernels = {
        "additional_configs": '{"moe_permute_fusion": true, "attention_backend": "flash"}',
        "ddp_backend": "nccl",
    }
    assert run_all(2, *as_flags({**keys, **kernels, "expert_model_parallel_size": 1}, False)) == [0, 0]
    note = (
        "on a CPU, apply_rope_fusion, moe_grouped_gemm, moe_permute_fusion, attention_backend, ddp_backend have no eff"
    )
    assert capfd.readouterr().out.count(note) == 1
    found = losses(tmp_path)
    without = {**keys, "apply_rope_fusion": False, "moe_grouped_gemm": False, "output_dir": str(tmp_path / "2" / "out")}
    assert run_all(2, *as_flags({**without, "expert_model_parallel_size": 1}, False)) == [0, 0]
    assert "on a CPU" not in capfd.readouterr().out
    assert losses(tmp_path / "2") == found
    assert run_all(2, file, "--fp8_recipe", "delayed", "pipeline_model_parallel_size=1") == [2, 2]
    assert "fp8" in capfd.readouterr().out


def test_the_file_of_the_dense_model_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run(tmp_path, LLAMA3)
    assert run_all(2, file, "plot_loss=true") == [0, 0]
    said = capfd.readouterr().out
    assert "layout: tp1 pp1 cp1 dp2" in said
    found = [float(line.split()[1]) for line in losses(tmp_path)]
    assert len(found) == 6
    assert found[-1] < 0.9 * found[0]
    assert (tmp_path / "out" / "training_loss.png").stat().st_size > 1000
    assert not (tmp_path / "out" / "config.json").exists()  # export_hf_on_finish: false


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_the_file_of_adapters_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its folder is PEFT's; another run goes on with it, merges it, and gives what transformers gives."""
    from peft import PeftModel

    layout = ("tensor_model_parallel_size=2", "sequence_parallel=true", "bf16=false")
    file = write_run(tmp_path, QWEN3_LORA, "qwen3")
    assert run_all(2, file, *layout) == [0, 0]
    assert "adapters in PEFT's form" in capfd.readouterr().out
    found = [float(line.split()[1]) for line in losses(tmp_path)]
    assert len(found) == 12
    assert sum(found[-3:]) < 0.9 * sum(found[:3])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    tokens = torch.arange(5, 25)[None]
    wanted = adapted(tokens).logits
    merged = str(tmp_path / "merged")
    run_ranks(1, export_checkpoint, str(tmp_path / "out" / "checkpoint-12.ckpt"), merged, open_group=False)
    exported = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(exported(tokens).logits, wanted, rtol=0, atol=1e-5)
    again = [f"adapter_name_or_path={tmp_path / 'out'}", f"output_dir={tmp_path / 'again'}", "max_steps=1"]
    without = {key: value for key, value in QWEN3_LORA.items() if key not in ("lora_rank", "lora_target")}
    file = write_run(tmp_path / "second", {**without, "learning_rate": 0.0, "plot_loss": False}, "qwen3")
    assert run_all(2, file, *layout, *again, f"model_name_or_path={tmp_path / 'model'}") == [0, 0]
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_the_files_of_preferences_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At first nothing tells the answers apart, because the model is its own reference; a run resumes exactly."""
    base = {**QWEN3_LORA, "bf16": False, "plot_loss": False, "max_steps": 3, "learning_rate": 1e-2, "save_steps": 2}

    def losses_of(name: str, ranks: int, *words: str, model: str | None = None, **more: Any) -> list[float]:
        keys = {**base, **TRAIN_LORA[f"qwen3_lora_{name.partition('-')[0]}"][0], **more}
        if keys["finetuning_type"] == "full":
            keys = {key: value for key, value in keys.items() if not key.startswith("lora_")}
        file = write_run(tmp_path / name, keys, model)
        assert run_all(ranks, file, f"model_name_or_path={tmp_path / 'dpo' / 'model'}", *words) == [0] * ranks, name
        return [float(line.split()[1]) for line in losses(tmp_path / name)]

    found = losses_of("dpo", 2, "tensor_model_parallel_size=2", "sequence_parallel=true", model="qwen3")
    assert found[0] == pytest.approx(math.log(2), abs=1e-6)
    assert found[-1] < found[0]
    said = capfd.readouterr().out
    assert "stage: dpo never has a second model in memory; the reference comes from its adapters switched off" in said
    assert "= 2 pairs of rows of at most 32 tokens" in said
    assert (tmp_path / "dpo" / "out" / "adapter_config.json").is_file()
    assert not list((tmp_path / "dpo" / "cache").rglob("reference-*.f64"))

    full: dict[str, Any] = {"finetuning_type": "full", "pref_loss": "ipo", "learning_rate": 1e-3}
    layout = ("pipeline_model_parallel_size=2", "eval_strategy=steps", "eval_steps=2", "val_size=4")
    found = losses_of("dpo-full", 2, *layout, **full)
    assert found[0] == pytest.approx(1 / (4 * 0.1**2), abs=1e-4)
    assert len(losses(tmp_path / "dpo-full", "eval_loss")) == 2
    for prefix in ("", "eval_"):
        names = [f"{prefix}{name}" for name in ("rewards/chosen", "rewards/accuracies", "logps/rejected")]
        assert [len(losses(tmp_path / "dpo-full", name)) for name in names] == [2 if prefix else 3] * 3
    assert len(list((tmp_path / "dpo-full" / "cache").rglob("reference-*.f64"))) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dpo-full" / "out").config.model_type == "qwen3"
    resumed = f"resume_from_checkpoint={tmp_path / 'dpo-full' / 'out' / 'checkpoint-2.ckpt'}"
    assert losses_of("dpo-full", 2, *layout, resumed, **full) == found

    assert losses_of("kto", 2)[0] == pytest.approx(0.5, abs=1e-6)
    found = losses_of("reward", 1)
    assert found[-1] < found[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_the_file_of_adapters_on_texts_runs_and_is_merged(tmp_path: Path) -> None:
    """The file that merges writes what PEFT computes, in the type of the model."""
    from peft import PeftModel

    file = write_run(tmp_path, {**QWEN3_LORA, **PRETRAIN, "max_steps": 3, "plot_loss": False}, "qwen3")
    assert run_all(2, file, "pipeline_model_parallel_size=2", "bf16=false") == [0, 0]
    places = {key: str(tmp_path / value) for key, value in MERGE_LORA.items() if value in ("model", "out", "merged")}
    merging = tmp_path / "merge.yaml"
    merging.write_text(yaml.safe_dump({**MERGE_LORA, **places}))
    assert run_ranks(1, command, [str(merging)], open_group=False) == [0]
    tokens = torch.arange(5, 25)[None]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    before = base(tokens).logits
    wanted = PeftModel.from_pretrained(base, tmp_path / "out").eval()(tokens).logits
    assert (wanted - before).abs().max() > 1e-3
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=0, atol=1e-5)


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    """Also evaluates, packs, saves, and writes the model beside the checkpoints."""
    keys = {**LLAMA3, "overwrite_output_dir": False, "export_hf_on_finish": True, "packing": True, "val_size": 6}
    more = ("save_steps=2", "eval_strategy=steps", "eval_steps=3", "tensor_model_parallel_size=2", "use_cpu=true")
    whole, halves = write_run(tmp_path / "whole", keys), write_run(tmp_path / "halves", keys)
    assert run_all(2, whole, *more, "max_steps=5") == [0, 0]
    assert run_all(2, halves, *more, "max_steps=3", "lr_scheduler_type=constant", "warmup_steps=0") == [0, 0]
    for folder in ("whole", "halves"):
        assert (tmp_path / folder / "out" / "checkpoint-2.ckpt").is_dir()
        assert (tmp_path / folder / "out" / "model.safetensors").is_file()
    first = losses(tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves" / "out" / "checkpoint-3.ckpt")  # of the last step
    with (tmp_path / "halves" / "out" / "trainer_log.jsonl").open("a") as log:
        log.write('{"current_st')  # as a process leaves it that ends while it writes
    assert run_all(2, halves, *more, "max_steps=5", "lr_scheduler_type=constant", "warmup_steps=0") == [0, 0]
    again = losses(tmp_path / "halves")
    assert [line.split()[0] for line in again] == ["1", "2", "3", "4", "5"]  # step 3 ran twice, and stands once
    assert again[: len(first)] == first
    assert [line.split()[0] for line in losses(tmp_path / "halves", "eval_loss")] == ["3", "5"]
    assert [line.split()[0] for line in losses(tmp_path / "whole", "eval_loss")] == ["3", "5"]


def shown_by_the_board(lines: list[str]) -> tuple[list[tuple[int, float]], str, float]:
    """Return what LLaMA-Factory's web page shows of a log, by its own rules: the curve, the label and the percentage.

    They are those of ``gen_loss_plot`` and ``get_trainer_info`` (LLaMA-Factory ff6d4d12), which fail on other keys.
    """
    log = [json.loads(line) for line in lines]
    curve = [(line["current_steps"], line["loss"]) for line in log if line.get("loss", None)]
    last = log[-1]
    steps, times = ("current_steps", "total_steps"), ("elapsed_time", "remaining_time")
    label = "{:d}/{:d}: {} < {}".format(*(last[name] for name in (*steps, *times)))
    return curve, label, last["percentage"]


def test_the_log_is_that_of_llamafactory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """20 samples on one rank, 4 of them to validate on and 4 in a step: 4 steps are an epoch."""
    keys = {**LLAMA3, "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 4, "logging_steps": 2}
    file = write_run(tmp_path, keys, data=rows(20))
    assert run_all(1, file, "val_size=0.2", "eval_strategy=epoch", "eval_on_start=true", "plot_loss=true") == [0]
    lines = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    curve, label, percentage = shown_by_the_board(lines)
    assert [step for step, _ in curve] == [2, 4, 6, 8]
    assert label.startswith("8/8: 0:00:")
    assert percentage == 100
    log = [json.loads(line) for line in lines]
    assert [(line["current_steps"], line["epoch"], line["percentage"]) for line in log] == [
        (0, 0, 0),  # the evaluation before the first step
        *((2, 0.5, 25), (4, 1, 50), (4, 1, 50)),  # the last is of the evaluation
        *((6, 1.5, 75), (8, 2, 100), (8, 2, 100)),
    ]
    assert ["eval_loss" in line for line in log] == [True, False, False, True, False, False, True]
    assert {name for line in log if "loss" in line for name in line} == {
        *("current_steps", "total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time")
    }
    # As in transformers, the rate of a line is the one that its step used: 2 steps of warm-up, then a cosine to step 8.
    rates = [line["lr"] for line in log if "loss" in line]
    cosine = [0.5 + 0.5 * math.cos(math.pi * step / 6) for step in (1, 3, 5)]
    assert rates == pytest.approx([5e-3 * share for share in (0.5, *cosine)])
    assert "losses: " in capfd.readouterr().out
    other = write_run(tmp_path / "other", {**keys, "logging_steps": 100}, data=rows(20))
    assert run_all(1, other, "plot_loss=true") == [0]
    assert not (tmp_path / "other" / "out" / "trainer_log.jsonl").exists()
    assert not (tmp_path / "other" / "out" / "training_loss.png").exists()
    said = capfd.readouterr().out
    assert "losses: " not in said
    assert "picture: " not in said


def test_texts_are_trained_on(tmp_path: Path) -> None:
    file = write_run(tmp_path, {**LLAMA3, "stage": "pt", "do_eval": True, "val_size": 0.3})
    assert run_all(1, file, "template=null") == [0]
    found = [float(line.split()[1]) for line in losses(tmp_path)]
    assert len(found) == 6
    assert found[-1] < found[0]
    assert len(losses(tmp_path, "eval_loss")) == 1


def test_an_evaluation_alone_is_of_the_model_that_the_file_names(tmp_path: Path) -> None:
    file = write_run(tmp_path, {**LLAMA3, "overwrite_output_dir": False, "export_hf_on_finish": True, "val_size": 6})
    alone = ("do_train=false", "do_eval=true")
    assert run_all(1, file, *alone) == [0]
    assert run_all(1, file, "max_steps=2", "warmup_steps=0") == [0]  # leaves a checkpoint and a model
    assert run_all(1, file, *alone) == [0]
    before, after = losses(tmp_path, "eval_loss")
    assert after == before


def test_a_stream_is_trained_on(tmp_path: Path) -> None:
    file = write_run(tmp_path, {**LLAMA3, "streaming": True, "buffer_size": 8}, data=rows(60))
    assert run_all(1, file) == [0]
    assert len(losses(tmp_path)) == 6


# The loss of use_dft_loss


def some_text() -> dict[str, Tensor]:
    """Return two rows; of the second, fewer labels count."""
    batch = text()
    batch["labels"][1, : LENGTH // 2] = -100
    return batch


def dft_step(folder: str, strategy: dict[str, Any]) -> dict[str, float]:
    """Validate, and train one step of both rows; return what was logged."""
    module = DFTModel.from_pretrained(folder, seq_length=LENGTH, recipe=Recipe(learning_rate=1e-3))
    rows: Any = [dict(zip(some_text(), row, strict=True)) for row in zip(*some_text().values(), strict=True)]
    trainer = make_trainer(strategy, max_steps=1, accumulate_grad_batches=1)
    [logged] = trainer.validate(module, DataLoader(rows, batch_size=1), verbose=False)
    copies = trainer.world_size // max(strategy.get("tensor_model_parallel_size", 1), 1)
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        copies //= strategy.get(name, 1)
    trainer = make_trainer(strategy, max_steps=1, accumulate_grad_batches=2 // copies)
    trainer.fit(module, DataLoader(rows, batch_size=1))
    found = {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "grad_norm")}
    return {**found, **{name: float(logged[name]) for name in ("val_loss", "val_perplexity")}}


@pytest.fixture(scope="module")
def dft_by_hand() -> dict[str, float]:
    """Return the same numbers by the formula, from the logits of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama, plain"), dtype=torch.float32)
    batch = some_text()
    logits = model(batch["tokens"]).logits.flatten(0, 1)
    entropies = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
    counts = batch["labels"].flatten() != -100
    chances = logits.softmax(-1).gather(1, batch["labels"].flatten().clamp(min=0)[:, None])[:, 0].detach()
    loss = (chances * entropies)[counts].sum() / counts.sum()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    perplexity = entropies[counts].mean().exp()
    assert loss < 0.5 * entropies[counts].mean()
    numbers = {"train_loss": loss, "grad_norm": norm, "val_loss": loss, "val_perplexity": perplexity}
    return {name: float(value.detach()) for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [
        pytest.param(1, {}, id="one", marks=pytest.mark.thorough),
        pytest.param(2, {"use_distributed_optimizer": True}, id="dp2", marks=pytest.mark.thorough),
        pytest.param(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="tp2"),
        pytest.param(2, {"context_parallel_size": 2}, id="cp2"),
        pytest.param(4, {"pipeline_model_parallel_size": 2}, id="pp2-dp2"),
    ],
)
def test_the_dft_loss_is_that_of_the_formula(
    dft_by_hand: dict[str, float], world_size: int, strategy: dict[str, Any]
) -> None:
    folder = str(tiny_folder("llama, plain"))
    for rank in run_ranks(world_size, dft_step, folder, strategy, timeout=120):
        assert rank == pytest.approx(dft_by_hand, rel=2e-5)


def test_a_file_with_deepspeed_and_dft_runs_and_says_how(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds_z3.json"
    config.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}', encoding="utf-8")
    without = {key: value for key, value in LLAMA3.items() if not key.startswith(("use_distributed", "overlap_"))}
    whole = write_run(tmp_path / "whole", {**without, "use_dft_loss": True, "max_steps": 2, "flash_attn": "fa2"})
    assert run_all(2, whole, f"deepspeed={config}") == [0, 0]
    said = capfd.readouterr().out
    assert f"deepspeed: {config} (ZeRO stage 3) becomes use_distributed_optimizer: true" in said
    assert "flash_attn: fa2 chooses among the attentions of transformers; Megatron's attention is used" in said
    other = write_run(tmp_path / "other", {**without, "max_steps": 2, "use_distributed_optimizer": True})
    assert run_all(2, other) == [0, 0]
    first, second = (float(losses(tmp_path / name)[0].split()[1]) for name in ("whole", "other"))
    assert 0 < first < 0.5 * second


@pytest.mark.thorough
@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    """As ``fit`` does in ``test_cli.py``."""
    file = write_run(tmp_path, LLAMA3)
    words = [file, "tensor_model_parallel_size=2", "max_steps=2", "disable_tqdm=true", "--accelerator", "cpu"]
    code, output, errors = lightning_mcore(tmp_path, "llamafactory", *words)  # the second rank is a program
    assert code == 0, errors[-2000:]
    assert "layout: tp2 pp1 cp1 dp1" in output
    assert len(losses(tmp_path)) == 2
