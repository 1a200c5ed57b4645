# SPDX-License-Identifier: Apache-2.0
"""Runs go on from folders that megatron-core 0.12.1 wrote, as Megatron-LM and NeMo 2 save, on any layout.

``tests/old_megatron.py`` made the folders with that release's model and writer. Each element's value follows from its
name and place, so what a rank holds is compared with that, bit for bit.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig

from lightning_mcore import MCoreGPT
from lightning_mcore.checkpoint.commands import inspect, verify
from lightning_mcore.data.sampling import training_loader
from lightning_mcore.interop.export import export_checkpoint
from tests.distributed.test_reshard import State, Watch
from tests.old_megatron import FOLDER, LENGTH, MODEL, SAMPLES, STEP, VOCABULARY, values
from tests.support import toy
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses

pytestmark = pytest.mark.distributed

FOLDERS = {"megatron-lm": FOLDER / "megatron_lm", "nemo": FOLDER / "nemo", "nemo weights": FOLDER / "nemo" / "weights"}
LAYOUTS: list[Any] = [
    pytest.param(1, {}, marks=pytest.mark.thorough),
    pytest.param(2, toy.SHARDED, marks=pytest.mark.thorough),
    pytest.param(2, {**toy.TP2, "sequence_parallel": True}, marks=pytest.mark.thorough),
    (2, toy.PP2),
    (4, {**toy.TP2, **toy.SHARDED}),
]


def gpt(cls: type[MCoreGPT] = MCoreGPT) -> MCoreGPT:
    return cls(
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
        make_vocab_size_divisible_by=16,
        transformer={**MODEL, "activation_func": "silu"},
    )


def resume(layout: dict[str, Any], precision: Any, path: str) -> tuple[State | None, int]:
    """Load on this rank; return what it holds before its first step, and the number of steps."""
    watch = Watch(trains=False)
    trainer = toy.make_trainer(layout, precision=precision, max_epochs=1, callbacks=[watch])
    trainer.fit(gpt(), toy.texts(rows=64, length=LENGTH, vocab_size=VOCABULARY), ckpt_path=path)
    return watch.before, trainer.global_step


@pytest.mark.parametrize("folder", ["megatron-lm", "nemo", pytest.param("nemo weights", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_weights_and_optimizer_state_are_those_that_were_saved(folder: str, ranks: int, layout: dict[str, Any]) -> None:
    prefix = "" if folder == "megatron-lm" else "module."
    for state, step in run_ranks(ranks, resume, layout, "bf16-mixed", str(FOLDERS[folder])):
        assert state is not None
        assert (step, state.steps) == (STEP, STEP)
        for part in state.weights:
            expected = part.of(values(prefix + part.key, part.shape))
            assert torch.equal(part.data, expected.bfloat16().float()), part.key
        names = set()
        for part in state.optimizer:  # such as optimizer.state.exp_avg.embedding.word_embeddings.weight
            _, _, name, weight = part.key.split(".", 3)
            stored = f"optimizer.state.{'fp32_param' if name == 'param' else name}.{prefix}{weight}"
            assert torch.equal(part.data, part.of(values(stored, part.shape))), part.key
            names.add(name)
        assert names == {"exp_avg", "exp_avg_sq", "param"}


@pytest.mark.parametrize("folder", ["megatron-lm", "nemo"])
@on_ranks(2)
def test_the_data_goes_on_after_the_samples_that_were_read(folder: str) -> None:
    rows: Any = toy.texts(rows=64, length=LENGTH, vocab_size=VOCABULARY).dataset
    first: list[torch.Tensor] = []

    class Model(MCoreGPT):
        def train_dataloader(self) -> Any:
            return training_loader(self.trainer, rows, 1, shuffle=False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            first.append(batch["tokens"])
            return super().training_step(batch, batch_idx)

    trainer = toy.make_trainer(toy.SHARDED, max_steps=STEP + 1, max_epochs=1)
    trainer.fit(gpt(Model), ckpt_path=str(FOLDERS[folder]))
    assert trainer.global_step == STEP + 1
    assert torch.equal(first[0][0], rows[SAMPLES + dist.get_rank()]["tokens"])


def test_a_folder_of_nemo_is_checked_shown_and_exported(tmp_path: Path) -> None:
    path = str(FOLDERS["nemo"])
    assert "has all 4 tensor files" in verify(path)
    shown = inspect(path, with_tensors=True)
    assert f"step        {STEP}" in shown
    assert "decoder.layers.mlp.linear_fc1.weight" in shown
    like = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=MODEL["hidden_size"],
        intermediate_size=MODEL["ffn_hidden_size"],
        num_hidden_layers=MODEL["num_layers"],
        num_attention_heads=MODEL["num_attention_heads"],
        num_key_value_heads=MODEL["num_query_groups"],
        architectures=["LlamaForCausalLM"],
    )
    like.save_pretrained(tmp_path / "like")
    export_checkpoint(path, str(tmp_path / "out"), like=str(tmp_path / "like"))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    gate_and_up = values("module.decoder.layers.mlp.linear_fc1.weight", (2, 48, 16))
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"].float(), gate_and_up[1, 24:])
    assert torch.equal(weights["lm_head.weight"].float(), values("module.output_layer.weight", (32, 16)))


def test_a_folder_without_some_tensor_files_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "nemo"
    shutil.copytree(FOLDERS["nemo"], path)
    for name in ("__2_0.distcp", "__3_0.distcp"):
        (path / "weights" / name).unlink()
    found = "weights is damaged: 2 of its 4 tensor files are missing, the first __2_0.distcp"
    with refuses(ValueError, found):
        verify(str(path))
    run_ranks(2, load_incomplete, str(path), found)


def load_incomplete(path: str, found: str) -> None:
    with refuses(ValueError, found):
        resume(toy.SHARDED, "32-true", path)


def test_a_folder_of_nemo_does_not_describe_its_model() -> None:
    with refuses(ValueError, "is a checkpoint of Megatron-LM or another program"):
        MCoreGPT.from_pretrained(str(FOLDERS["nemo"]))
    with refuses(ValueError, "does not say how to build its model"):
        MCoreGPT.load_from_checkpoint(str(FOLDERS["nemo"]))


class TwoOptimizers(toy.PlainNet):
    """A plain module with two optimizers, which step by hand, and of which a checkpoint may lack weights."""

    def configure_optimizers(self) -> Any:
        self.automatic_optimization, self.strict_loading = False, False
        return [torch.optim.AdamW(layer.parameters()) for layer in (self.net[0], self.net[2])]


@on_ranks(1)
def test_a_run_with_two_optimizers_does_not_resume_from_one_of_megatron() -> None:
    trainer, path = toy.make_trainer({}, max_epochs=1), str(FOLDERS["megatron-lm"])
    with refuses(ValueError, "the states of 1 optimizers, but configure_optimizers returned 2"):
        trainer.fit(TwoOptimizers(), toy.loader(4, 2), ckpt_path=path)
