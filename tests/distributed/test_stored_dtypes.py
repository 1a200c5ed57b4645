# SPDX-License-Identifier: Apache-2.0
"""What a model in bf16 has in fp32, a run in bf16 or fp16 has in fp32 too: biases and gates of routers, decays."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import MCoreGPT, Recipe, SaveHFModel
from lightning_mcore.hf import export_checkpoint
from tests.support.hf_models import VOCAB_SIZE
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.toy import Watch, make_trainer, texts
from tests.unit.hf.test_hf_dtypes import differences, mixed_folder, tensors_of

pytestmark = pytest.mark.distributed

WIDE = ("mlp.gate.weight", "e_score_correction_bias", "A_log", "dt_bias", "linear_attn.norm.weight", "conv1d.weight")
FAMILIES = {"deepseek_v3": 2, "qwen3_next": 5}
"""Models, and how many kinds of tensors they have in fp32."""
SHARDED = Layout(dp=2, distributed_optimizer=True)
LAYOUTS = (Layout(tp=2, sp=True), Layout(pp=2), SHARDED)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(WIDE) else torch.bfloat16


def fit(
    folder: str, layout: Layout, precision: Any, rate: float, ckpt_path: str | None = None, **arguments: Any
) -> tuple[list[tuple[float, float]], pl.Trainer]:
    """Train on this rank, one step unless the arguments say more; return losses and gradient norms, and the trainer."""
    pl.seed_everything(1, verbose=False)
    recipe = Recipe(learning_rate=rate, weight_decay=0.0, warmup_steps=0)
    module = MCoreGPT.from_pretrained(folder, seq_length=16, recipe=recipe)
    watch = Watch()
    callbacks = [watch, *arguments.pop("callbacks")]
    options: dict[str, Any] = {"max_steps": 1, "precision": precision, "callbacks": callbacks}
    trainer = make_trainer(layout.strategy_arguments, **{**options, **arguments})
    trainer.fit(module, texts(8, 16, VOCAB_SIZE), ckpt_path=ckpt_path)
    return list(zip(watch.seen.logged, watch.seen.grad_norms, strict=True)), trainer


def write(folders: dict[str, str], layouts: list[tuple[Layout, str]], out: str) -> None:
    """Take a step of length zero with each model on each layout, and write it."""
    for layout, precision in layouts:
        for name, folder in folders.items():
            place = f"{out}/{name} {layout.id} {precision}"
            _, trainer = fit(folder, layout, precision, 0.0, callbacks=[SaveHFModel(place)])
            trainer.save_checkpoint(f"{place}.ckpt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_length_zero_leaves_all_bits_on_every_layout(ranks: int, tmp_path: Path) -> None:
    tensors = {name: mixed_folder(name, tmp_path / name, dtype_of) for name in FAMILIES}
    folders = {name: str(tmp_path / name) for name in FAMILIES}
    for name, kinds in FAMILIES.items():
        assert len({wide for wide in WIDE for each in tensors[name] if each.endswith(wide)}) == kinds
    layouts = [(layout, "bf16-mixed") for layout in LAYOUTS]
    if ranks == 1:
        layouts = [(Layout(), precision) for precision in ("bf16-mixed", "bf16-true")]
    run_ranks(ranks, write, folders, layouts, str(tmp_path), timeout=120)
    for layout, precision in layouts:
        for name in FAMILIES:
            place = tmp_path / f"{name} {layout.id} {precision}"
            assert differences(tensors[name], tensors_of(place)) == [], place.name
            export_checkpoint(f"{place}.ckpt", f"{place} again")
            assert differences(tensors[name], tensors_of(Path(f"{place} again"))) == [], place.name


def resumed(folders: dict[str, str], out: str) -> list[tuple[Any, Any]]:
    """Return the last losses of four steps, and of two after two."""
    found = []
    for name, folder in folders.items():
        keep = ModelCheckpoint(f"{out}/{name}-kept", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {"max_steps": 4, "enable_checkpointing": True}
        whole, _ = fit(folder, SHARDED, "bf16-mixed", 1e-2, callbacks=[keep], **options)
        path = f"{out}/{name}-kept/step=2.ckpt"
        again, _ = fit(folder, SHARDED, "bf16-mixed", 1e-2, path, callbacks=[], **options)
        found.append((whole[2:], again))
    return found


def test_a_sharded_optimizer_of_two_dtypes_resumes_bit_for_bit(tmp_path: Path) -> None:
    for name in FAMILIES:
        mixed_folder(name, tmp_path / name, dtype_of)
    folders = {name: str(tmp_path / name) for name in FAMILIES}
    for whole, again in run_ranks(2, resumed, folders, str(tmp_path), timeout=120)[0]:
        assert len(again) == 2
        assert whole == again
