# SPDX-License-Identifier: Apache-2.0
"""The examples run, with tiny settings, and say what they promise; every YAML is built.

They run on ranks that are there already, as ``torchrun`` has them: a process that imports everything itself takes
longer than what it is to show. The first one also runs as a newcomer runs it, in a process of its own.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from PIL import Image
from safetensors.torch import load_file

import cli
import describe_shapes
import finetune_hf
import finetune_lora
import pretrain_gpt
import run_report
from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.cli import plan
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import model_parameters
from tests.support.ranks import program_environment, run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))
PNG = b"\x89PNG\r\n\x1a\n"
SECONDS = 240.0  # a run takes 15 to 30 on two free cores


def run_example(script: str, *arguments: str, folder: Path) -> str:
    """Run a script of the examples in ``folder`` and return what it printed."""
    environment = program_environment() | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_on_ranks(
    capsys: pytest.CaptureFixture[str], world_size: int, script: str, *arguments: str, folder: Path
) -> str:
    """Run a script of the examples in ``folder`` on as many ranks, and return what they printed."""
    run_ranks(world_size, _run_script, script, arguments, str(folder), timeout=SECONDS, open_group=False)
    return capsys.readouterr().out


def _run_script(script: str, arguments: tuple[str, ...], folder: str) -> None:
    """Do what ``python script arguments`` does, on this rank."""
    path = EXAMPLES / script
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(path), run_name="__main__")


def the_files_of_a_run_are_there(folder: Path, steps: int) -> None:
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert (folder / "sample.txt").read_text(encoding="utf-8").startswith("import os\n\n\ndef ")
    trained = run_report.read_curve(folder / "metrics.csv", "train_loss")
    assert [step for step, _ in trained] == list(range(1, steps + 1))
    validated = run_report.read_curve(folder / "metrics.csv", "val_loss")
    assert validated[-1][0] == steps


SMALL = ["--hidden-size=32", "--num-layers=2", "--seq-length=32", "--vocab-size=256", "--max-bytes=120000"]
SMALL += ["--batch-size=8", "--micro-batch-size=4", "--learning-rate=0.02", "--sample-tokens=8"]


@pytest.mark.slow
@pytest.mark.distributed
def test_pretrain_gpt_shows_its_layout_learns_and_leaves_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_on_ranks(capsys, 4, "pretrain_gpt.py", "--max-steps=6", "--val-every=3", *SMALL, folder=tmp_path)
    assert "tp2 pp2 cp1 dp1 sp (4 ranks: tensor 2, pipeline 2, sequence parallel)" in output
    for rank, place in enumerate(["tp0.pp0.cp0.dp0", "tp1.pp0.cp0.dp0", "tp0.pp1.cp0.dp0", "tp1.pp1.cp0.dp0"]):
        assert f"rank {rank}  {place}" in output
    assert "step 6/6" in output
    assert " tok/s" in output
    assert re.search(r"\n6 steps, .* s, train_loss \S+ -> \S+, val_loss \S+\n", output)
    for name in ("loss.png", "sample.txt", "hf"):
        assert f"outputs/pretrain_gpt/{name}" in output
    assert "logs        outputs/pretrain_gpt\n" in output
    the_files_of_a_run_are_there(tmp_path / "outputs/pretrain_gpt", steps=6)
    losses = dict(run_report.read_curve(tmp_path / "outputs/pretrain_gpt/metrics.csv", "train_loss"))
    assert losses[6] < losses[1] - 0.3
    # the exported model goes on as the trained one; 16 is what the window leaves behind the prompt
    assert "most probable tokens: 16 of 16 are the same in transformers and here" in output


@pytest.mark.thorough
@pytest.mark.slow
def test_pretrain_gpt_is_a_program(tmp_path: Path) -> None:
    """As the scripts of ``test_launch.py``; ``tests/distributed/test_checkpoint_io.py`` starts the other ranks."""
    one_rank = ("--devices=1", "--tp=1", "--pp=1", "--max-steps=2")
    output = run_example("pretrain_gpt.py", *one_rank, *SMALL, folder=tmp_path)
    assert "MCoreStrategy: tp1 pp1" in output, output
    the_files_of_a_run_are_there(tmp_path / "outputs/pretrain_gpt", steps=2)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_yaml_runs_and_takes_another_layout_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_on_ranks(
        capsys,
        2,
        "cli.py",
        *("fit", f"--config={EXAMPLES / 'configs/pretrain_gpt.yaml'}", "--trainer.devices=2"),
        *("--trainer.strategy.tensor_model_parallel_size=1", "--trainer.strategy.sequence_parallel=false"),
        *("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.transformer.hidden_size=32"),
        *("--model.vocab_size=256", "--data.vocab_size=256", "--data.max_bytes=120000"),
        folder=tmp_path,
    )
    assert "MCoreStrategy: tp1 pp2" in output
    the_files_of_a_run_are_there(tmp_path / "outputs/pretrain_gpt", steps=2)


@pytest.mark.slow
@pytest.mark.distributed
def test_ddp_and_mcore_print_equal_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_on_ranks(capsys, 2, "ddp_and_mcore.py", "--max-steps=4", "--max-bytes=120000", folder=tmp_path)
    rows = re.findall(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+)$", output, flags=re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [1, 2, 3, 4]
    for _, ddp, mcore in rows:
        assert float(ddp) == pytest.approx(float(mcore), abs=1e-5)
    assert float(rows[-1][1]) < float(rows[0][1])


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plain_lightning_module_learns_under_mcore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_on_ranks(capsys, 2, "plain_lightning.py", "--max-steps=10", "--max-bytes=120000", folder=tmp_path)
    found = re.search(r"^val_loss (\d+\.\d+) after 10 steps under mcore$", output, flags=re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) < 4.5  # ln 256 = 5.55 is a guess


@pytest.mark.slow
@pytest.mark.distributed
def test_a_hugging_face_model_is_tuned_and_handed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--max-steps=4", "--max-bytes=400000", "--seq-length=64", "--batch-size=2", "--learning-rate=0.01")
    monkeypatch.chdir(tmp_path)
    options = finetune_hf.parse_arguments([*small])
    finetune_hf.prepare(options, finetune_hf.StdlibDialogues(options.seq_length, max_bytes=options.max_bytes))
    output = run_on_ranks(capsys, 2, "finetune_hf.py", *small, folder=tmp_path)
    assert "MCoreStrategy: tp2 pp1" in output
    assert f"model: outputs/finetune_hf/tuned\n{finetune_hf.QUESTION}\n" in output
    start, tuned = (tmp_path / "outputs/finetune_hf" / name for name in ("start", "tuned"))
    assert {path.name for path in tuned.iterdir()} >= {path.name for path in start.iterdir()}
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tuned))
    assert {name: tensor.shape for name, tensor in before.items()} == {name: t.shape for name, t in after.items()}
    assert all(not torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
def test_adapters_are_trained_and_peft_loads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    small = ("--max-steps=3", "--max-bytes=400000", "--seq-length=64", "--batch-size=2", "--rank=3")
    monkeypatch.chdir(tmp_path)
    options = finetune_lora.parse_arguments([*small])
    finetune_lora.prepare(options, finetune_lora.StdlibDialogues(options.seq_length, max_bytes=options.max_bytes))
    output = run_on_ranks(capsys, 2, "finetune_lora.py", *small, folder=tmp_path)
    assert "MCoreStrategy: tp2 pp1" in output
    assert "adapter: outputs/finetune_lora/adapter (adapter_config.json, adapter_model.safetensors)\nnext" in output
    base, adapter = (tmp_path / "outputs/finetune_lora" / name for name in ("base", "adapter"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert any(tensor.any() for name, tensor in model.named_parameters() if "lora_B" in name)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_student_learns_from_its_teacher_and_from_the_text_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--teacher-steps=6", "--max-steps=10", "--batch-size=2", "--rows=40")
    output = run_on_ranks(capsys, 2, "distill_gpt.py", *options, folder=tmp_path)
    for name in ("teacher", "student-alone", "student-taught"):
        assert re.search(rf"{name} +validation loss \d", output), output
    folder = tmp_path / "outputs/distill_gpt"
    assert (folder / "losses.png").read_bytes().startswith(PNG)
    apart = run_report.read_curve(folder / "student-taught/metrics.csv", "train_divergence")
    assert apart[-1][1] > 0


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_preference_is_learnt_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--first-steps=8", "--max-steps=2", "--batch-size=4")
    output = run_on_ranks(capsys, 2, "prefer_answers.py", *options, folder=tmp_path)
    assert re.search(r"before DPO: \d+ of 12 answers are polite", output), output
    assert re.search(r"after DPO: \d+ of 12 answers are polite", output), output
    folder = tmp_path / "outputs/prefer_answers"
    assert (folder / "margins.png").read_bytes().startswith(PNG)
    margins = [value for _, value in run_report.read_curve(folder / "dpo/metrics.csv", "rewards/margins")]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[1] > 0.001
    assert len(list((folder / "data").glob("reference-*.f64"))) == 1


@pytest.mark.thorough
@pytest.mark.distributed
def test_shapes_are_described_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("--images=24", "--max-steps=3", "--batch-size=4", "--workers=0")
    monkeypatch.chdir(tmp_path)
    describe_shapes.prepare(describe_shapes.parse_arguments([*small]))  # as the first process does
    output = run_on_ranks(capsys, 2, "describe_shapes.py", *small, folder=tmp_path)
    assert "MCoreStrategy: tp2 pp1" in output
    assert re.search(r"\d+ of 16 answers are right; the loss fell from", output), output
    folder = tmp_path / "outputs/describe_shapes"
    page = (folder / "samples.html").read_text(encoding="utf-8")
    assert page.count("<img src=") == 16
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    assert type(model).__name__ == "Qwen2VLForConditionalGeneration"


def test_no_pair_of_shapes_that_is_asked_about_is_learnt(tmp_path: Path) -> None:
    """The answers name what is drawn."""
    options = describe_shapes.parse_arguments(["--images=300", f"--output={tmp_path}"])
    describe_shapes.prepare(options)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = {describe_shapes.answer(*pair) for pair in describe_shapes.KEPT_BACK}
    assert not asked & {row["response"] for row in rows}
    left, right = describe_shapes.KEPT_BACK[0]
    with Image.open(tmp_path / "images/kept_back_0.png") as image:
        colours = {colour for _, colour in image.getcolors() or ()}
    named = {describe_shapes.COLOURS[kind.split()[0]] for kind in (left, right)}
    assert colours == named | {(255, 255, 255)}


def build(config: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> LightningCLI:
    monkeypatch.setattr(sys, "argv", ["cli.py", "--config", str(config), *more])
    return cli.make_cli(run=False)


def test_there_is_a_yaml_for_every_kind_of_run() -> None:
    names = {path.stem for path in CONFIGS}
    assert {"cpu_tiny", "llama3_8b_bf16", "llama3_8b_fp8", "llama3_8b_128k", "qwen3_30b_a3b"} <= names


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_yaml_builds(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer, strategy, model and data are made here, on the CPU; the layout meets the devices of the file."""
    trainer = yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]
    on_cpu = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1"]
    built = build(config, monkeypatch, *on_cpu)
    strategy = built.trainer.strategy
    assert isinstance(strategy, MCoreStrategy)
    strategy.layout.validate_world(trainer["devices"] * trainer.get("num_nodes", 1))
    assert isinstance(built.model, MCoreGPT)
    strategy.layout.validate_model(built.model.model_shape())
    split = built.datamodule.batch_size // strategy.micro_batch_size
    strategy.layout.validate_microbatches(
        split * trainer.get("accumulate_grad_batches", 1), strategy.microbatch_group_size
    )
    assert built.model.seq_length == built.datamodule.seq_length
    assert built.model.vocab_size == getattr(built.datamodule, "vocab_size", built.model.vocab_size)
    fused = {"moe_permute_fusion": False}  # which megatron-core imports from TransformerEngine at once
    fields = built.model.transformer | (fused if "moe_permute_fusion" in built.model.transformer else {})
    config_of_megatron = build_transformer_config(fields, strategy.megatron_fields())
    assert (config_of_megatron.fp8 is not None) == ("fp8" in config.stem)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_plan_accepts_every_yaml(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan.run([str(config)])
    assert code == 0, capsys.readouterr().out


SIZES = {  # parameters in all and for a token, in billions, as the models are known
    "llama3_8b_bf16": (8.03, 8.03),
    "llama3_8b_fp8": (8.03, 8.03),
    "llama3_8b_128k": (8.03, 8.03),
    "qwen3_30b_a3b": (30.5, 3.35),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_large_models_have_their_sizes_and_fit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the comments of these files promise, by ``plan``, which is tested against live runs elsewhere."""
    text = (EXAMPLES / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    fields = GPTFields.of(content["model"]["init_args"])
    count = model_parameters(fields)
    assert (count.total / 1e9, count.active / 1e9) == pytest.approx(SIZES[name], rel=2e-3)
    assert plan.run([str(EXAMPLES / "configs" / f"{name}.yaml"), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    memory = [stage["memory_bytes"]["total"] / 2**30 for stage in stages]
    assert max(memory) < 68  # GiB of the 74.5 that 80 GB are; the rest is for buffers of NCCL and fragments
    told = [int(number) for number in re.findall(r"(\d+) GiB", text)]
    assert memory == pytest.approx(told, rel=0.05)


def test_the_yaml_is_the_run_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(EXAMPLES / "configs/pretrain_gpt.yaml", monkeypatch)
    options = pretrain_gpt.parse_arguments([])
    assert settings_of_data(built.datamodule) == settings_of_data(pretrain_gpt.build_data(options))
    assert settings_of_model(built.model) == settings_of_model(pretrain_gpt.build_model(options))
    assert settings_of_trainer(built.trainer) == settings_of_trainer(pretrain_gpt.build_trainer(options))
    assert built.config["seed_everything"] == options.seed


def settings_of_data(data: object) -> dict[str, object]:
    names = ("seq_length", "batch_size", "vocab_size", "max_bytes", "max_val_windows", "cache_dir")
    return {name: getattr(data, name) for name in names}


def settings_of_model(model: MCoreGPT) -> dict[str, object]:
    # names with an underscore are what LightningCLI adds
    return {name: value for name, value in model.hparams.items() if not name.startswith("_")}


def settings_of_trainer(trainer: Trainer) -> dict[str, object]:
    assert isinstance(trainer.strategy, MCoreStrategy)
    names = ("max_steps", "max_epochs", "val_check_interval", "check_val_every_n_epoch", "gradient_clip_val")
    names += ("num_devices", "accumulate_grad_batches", "precision", "log_every_n_steps", "num_sanity_val_steps")
    ours = {"InTransformers", "MCoreProgressBar", "RunReport"}
    plain = {"folder", "prompt", "max_new_tokens", "temperature", "top_k", "_refresh_rate"}
    callbacks = [
        {"name": type(callback).__name__} | {name: value for name, value in vars(callback).items() if name in plain}
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if type(callback).__name__ in ours
    ]
    return {
        **{name: getattr(trainer, name) for name in names},
        "layout": trainer.strategy.layout,
        "micro_batch_size": trainer.strategy.micro_batch_size,
        "log_dir": Path(trainer.log_dir or ""),
        "callbacks": callbacks,
    }
