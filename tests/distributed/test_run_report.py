# SPDX-License-Identifier: Apache-2.0
"""The report of a run: each rank's part of the model, the loss, the last checkpoint, and commands that work."""

import contextlib
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_mcore import LoRA, MCoreGPT, MCoreStrategy, RunReport, add_lora, hf_model
from lightning_mcore.cli import main
from lightning_mcore.parallel.chunks import count_parameters
from lightning_mcore.strategy import run_report
from lightning_mcore.strategy.checkpointing import last_checkpoint
from tests.support.hf_models import save_tiny, tiny_folder
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
EXPERTS = {**SHAPE, "num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_token_dispatcher_type": "alltoall"}
LAYOUTS = {
    "tp2-pp2": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, SHAPE),
    "ep2-tp2": (
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
        {**EXPERTS, "add_bias_linear": False},
    ),
}


class Text(pl.LightningDataModule):
    """Rows of one letter."""

    def train_dataloader(self) -> Any:
        rows = [torch.full((9,), 97 + index % 3) for index in range(8)]
        return torch.utils.data.DataLoader([{"tokens": row[:-1], "labels": row[1:]} for row in rows], batch_size=2)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class Counted(pl.Callback):
    """Keeps the number of parameters of the whole model."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.count = count_parameters(strategy.chunks, strategy.layout)


TIED = "tied-pp2"
LAYOUTS[TIED] = ({"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, SHAPE)


def run(layout: dict[str, Any], shape: dict[str, Any], folder: str | None, tied: bool = False) -> int:
    """Train two steps; return the number of parameters."""
    counted = Counted()
    reported: list[Any] = []
    options: dict[str, Any] = {"enable_checkpointing": False}
    if folder is not None:
        reported = [RunReport(folder, prompt="a", max_new_tokens=3)]
        options = {"enable_checkpointing": True, "default_root_dir": folder}
    trainer = make_trainer(layout, callbacks=[counted, *reported], max_steps=2, **options)
    model = MCoreGPT(vocab_size=128, seq_length=8, transformer=shape, share_embeddings_and_output_weights=tied)
    trainer.fit(model, Text())
    return counted.count


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_size_of_the_whole_model_is_that_of_one_rank(name: str) -> None:
    layout, shape = LAYOUTS[name]
    counts = run_ranks(4, run, layout, shape, None, name == TIED, timeout=120)
    assert counts == run_ranks(1, run, {}, shape, None, name == TIED, timeout=120) * 4


class Table(ModelSummary):
    """Keeps Lightning's table of the model as a text, on every rank."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.text = str(self._summary(trainer, pl_module))


class Adapted(MCoreGPT):
    """Trains adapters, of which each rank has the whole A or the whole B."""

    def configure_model(self) -> None:
        super().configure_model()
        add_lora(self.model, LoRA(r=4, target_modules=["linear_qkv", "linear_fc2"]))


def table_of(layout: dict[str, Any], shape: dict[str, Any], kind: type[MCoreGPT] = MCoreGPT) -> tuple[str, int]:
    """Train a step; return the table, and the number of this rank's parameters."""
    table = Table(max_depth=2)
    model = kind(vocab_size=128, seq_length=8, transformer=shape)
    trainer = make_trainer(layout, callbacks=[table], max_steps=1)
    trainer.fit(model, Text())
    return table.text, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", [pytest.param(MCoreGPT, marks=pytest.mark.thorough), Adapted])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != TIED])
def test_lightnings_table_counts_the_whole_model_and_this_ranks_part(name: str, kind: type[MCoreGPT]) -> None:
    layout, shape = LAYOUTS[name]
    [(of_one_rank, whole)] = run_ranks(1, table_of, {}, shape, kind, timeout=120)
    assert "Params per Device" not in of_one_rank
    for text, own in run_ranks(4, table_of, layout, shape, kind, timeout=120):
        assert "| Params | Params per Device |" in re.sub(" +", " ", text)
        [row] = re.findall(r"^.*\bPipeline\b.*$", text, re.MULTILINE)
        assert re.findall(r"[\d.]+ [KM]", row) == [get_human_readable_count(whole), get_human_readable_count(own)]
        for kind in ("Trainable params", "Total params", "params size"):
            lines = [re.findall(rf"^.*{kind}.*$", each, re.MULTILINE) for each in (of_one_rank, text)]
            assert len(lines[0]) == 1
            assert lines[0] == lines[1]


def test_a_run_ends_with_its_loss_its_checkpoint_and_the_next_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout, shape = LAYOUTS["tp2-pp2"]
    run_ranks(4, run, layout, shape, str(tmp_path), timeout=120)
    output = capfd.readouterr().out
    assert re.findall(r"^  rank \d  (\S+)  \S+ parameters$", output, re.MULTILINE) == [
        f"tp{tp}.pp{pp}.cp0.dp0" for pp in range(2) for tp in range(2)
    ]
    assert re.search(r"^2 steps, \d+ s, train_loss \S+ -> \S+$", output, re.MULTILINE)
    [path] = re.findall(r"^checkpoint  (.+)$", output, re.MULTILINE)
    assert Path(path).is_dir()
    assert f'continue    trainer.fit(..., ckpt_path="{path}")\n' in output
    assert f"export      lightning-mcore export {shlex.quote(path)} OUT\n" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("a")


BOTH = ["adapter", "merged"]


def fit_adapters(base: str, folder: str, lora: dict[str, Any]) -> None:
    """Train adapters for two steps and report."""
    os.chdir(folder)
    splits = {} if "quantization" in lora else {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer = make_trainer(splits, callbacks=[RunReport()], max_steps=2, enable_checkpointing=True)
    trainer.fit(MCoreGPT.from_pretrained(base, seq_length=8, lora=lora), Text())


@pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning")  # of Megatron
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "lora", "written"),
    [
        ("llama", {"r": 2, "target_modules": ["q_proj"]}, BOTH),
        ("wide", {"r": 2, "target_modules": ["q_proj"], "quantization": "nf4"}, ["adapter"]),
        ("qwen3_moe", {"r": 2, "target_modules": ["gate_proj", "up_proj"], "alpha_pattern": {"up_proj": 3}}, BOTH),
    ],
    ids=["dense", "quantized", "experts that differ"],
)
def test_the_export_commands_of_a_run_with_adapters_work(
    family: str, lora: dict[str, Any], written: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384}  # a block of 64 columns for each rank
    base = str(save_tiny("llama", tmp_path / "wide", **sizes) if family == "wide" else tiny_folder(family))
    run_ranks(2, fit_adapters, base, str(tmp_path), lora, timeout=120)
    told = re.findall(r"^(adapter|merged|export) +lightning-mcore (export .*)$", capfd.readouterr().out, re.MULTILINE)
    assert [name for name, _ in told] == written
    assert ("--experts each" in told[0][1]) == (family == "qwen3_moe")
    for name, command in told:
        words = [str(tmp_path / name) if word in ("OUT", name.upper()) else word for word in shlex.split(command)]
        with contextlib.chdir(tmp_path):
            assert main(words) == 0
        model = AutoModelForCausalLM.from_pretrained(base if name == "adapter" else tmp_path / name)
        if name == "adapter" and family == "qwen3_moe":  # PEFT with transformers 5 reads only stacked experts
            assert any("experts.0." in key for key in load_file(tmp_path / name / "adapter_model.safetensors"))
        elif name == "adapter":
            PeftModel.from_pretrained(model, tmp_path / name)


def fit_without_a_checkpoint(folder: str, monitor: str) -> None:
    """Train a step with a checkpoint callback that saves later, or never sees its metric."""
    os.chdir(folder)
    trainer = make_trainer(
        MCoreStrategy(),
        callbacks=[RunReport(), ModelCheckpoint(monitor=monitor, every_n_train_steps=100)],
        max_steps=1,
        limit_val_batches=0,
        enable_checkpointing=True,
    )
    trainer.fit(MCoreGPT(vocab_size=128, seq_length=8, transformer=SHAPE), Text())


@pytest.mark.parametrize(
    ("monitor", "told"), [("val_loss", "none: val_loss was never logged"), ("train_loss", "none was saved")]
)
def test_a_run_that_saved_nothing_says_why(
    monitor: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, fit_without_a_checkpoint, str(tmp_path), monitor, timeout=120)
    output = capfd.readouterr().out
    assert re.search(r"^1 step, \d+ s, ", output, re.MULTILINE)
    assert f"\ncheckpoint  {told}\n" in output


class HFText(Text):
    """The same rows as transformers' models take them."""

    def train_dataloader(self) -> Any:
        rows = [torch.full((8,), 60 + index % 3) for index in range(8)]
        return torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)


def fit_hf_module(base: str, folder: str) -> None:
    """Train a module of ``hf_model`` for two steps and report."""
    os.chdir(folder)
    trainer = make_trainer(
        MCoreStrategy(tensor_model_parallel_size=2), callbacks=[RunReport()], max_steps=2, enable_checkpointing=True
    )
    trainer.fit(FineTuning(base), HFText())


def test_the_export_command_of_a_module_around_a_hugging_face_model_works(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, fit_hf_module, str(tiny_folder("llama")), str(tmp_path), timeout=120)
    [command] = re.findall(r"^export +lightning-mcore (export .*)$", capfd.readouterr().out, re.MULTILINE)
    with contextlib.chdir(tmp_path):
        assert main([str(tmp_path / "hf") if word == "OUT" else word for word in shlex.split(command)]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


class FineTuning(pl.LightningModule):
    """A module of the user's around a Hugging Face model."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        self.model = hf_model(self, self.path)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-5)


class Descending(pl.LightningModule):
    """Logs as loss of a step what is left of seven."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", 7.0 - self.global_step)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
def test_the_last_loss_is_that_of_the_last_step_also_of_a_thinned_curve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_report, "_POINTS", 4)
    report = RunReport()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", max_steps=6, callbacks=[report], **quiet)
    trainer.fit(Descending(), torch.utils.data.DataLoader(torch.zeros(6, 1)))
    assert re.search(r"^6 steps, \d+ s, train_loss 7 -> 2$", capsys.readouterr().out, re.MULTILINE)
    assert [step for step, _ in report._curve] == [1, 3, 5, 6]


def test_the_last_checkpoint_is_complete_and_its_path_starts_here_if_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    callback = pl.callbacks.ModelCheckpoint()
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[callback])
    for path, shown in (
        (str(tmp_path / "last.ckpt"), str(tmp_path / "last.ckpt")),
        (str(here / "last.ckpt"), "last.ckpt"),
        ("s3://bucket/last.ckpt", "s3://bucket/last.ckpt"),
    ):
        callback._last_checkpoint_saved, callback.best_model_path = path, str(here / "not_yet.ckpt")
        assert last_checkpoint(trainer) == (shown if "://" in path else None)
        Path(path).touch() if "://" not in path else None
        assert last_checkpoint(trainer) == shown


def test_a_prompt_that_nothing_encodes_is_refused() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match=r"needs a data module with encode and decode, and a model with generate"):
        RunReport(prompt="a").setup(trainer, pl.LightningModule(), "fit")


def test_the_command_to_continue_names_the_new_checkpoint_and_a_later_end(tmp_path: Path) -> None:
    command = ["lightning-mcore", "fit", "--ckpt_path", "old", "--config=a.yaml", "--trainer.max_steps=2"]
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False)
    told = RunReport(command=command)._continue("new path", trainer)
    assert told == "lightning-mcore fit --config=a.yaml --trainer.max_steps 4 --ckpt_path 'new path'"
    assert RunReport()._continue("new", trainer) == 'trainer.fit(..., ckpt_path="new")'
