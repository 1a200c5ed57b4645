# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a GPU: an exact resume, the way to the CPU and back, asynchronous saves, Hugging Face folders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_mcore import MCoreGPT, single_process
from lightning_mcore.interop.export import export_model
from tests.gpu.runs import DEVICE, train_on
from tests.support.hf_models import read_tensors, tiny_folder
from tests.te.runs import Run

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAIN = Run(impl="local", steps=6, layout={"use_distributed_optimizer": True})
HALF = 3


class SaveAt(pl.Callback):
    """Saves after a step, with the checkpoint plugin as it is, or synchronously and asynchronously."""

    def __init__(self, step: int, *paths: Path) -> None:
        self.step, self.paths = step, paths

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if trainer.global_step != self.step:
            return
        plugin: Any = trainer.strategy.checkpoint_io
        for index, path in enumerate(self.paths):
            plugin.async_save = index > 0
            trainer.save_checkpoint(path)
        plugin.finish() if hasattr(plugin, "finish") else plugin.drain()
        plugin.async_save = False


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_goes_on_bit_by_bit(precision: str, tmp_path: Path) -> None:
    run = replace(PLAIN, precision=precision)
    whole = train_on(DEVICE, run, SaveAt(HALF, tmp_path / "half.ckpt"))
    rest = train_on(DEVICE, run, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses[-HALF:] == whole.losses[HALF:]
    assert rest.norms[-HALF:] == whole.norms[HALF:]


@pytest.mark.parametrize(("first", "second"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_a_run_goes_on_on_the_other_device(first: str, second: str, tmp_path: Path) -> None:
    whole = train_on(first, PLAIN, SaveAt(HALF, tmp_path / "half.ckpt"))
    rest = train_on(second, PLAIN, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses[-HALF:] == pytest.approx(whole.losses[HALF:], rel=1e-5)


def test_an_asynchronous_save_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = tmp_path / "sync.ckpt", tmp_path / "async.ckpt"
    train_on(DEVICE, PLAIN, SaveAt(HALF, *paths))
    shards = [sorted(path.glob("*.distcp")) for path in paths]
    assert [file.name for file in shards[0]] == [file.name for file in shards[1]] != []
    for one, other in zip(*shards, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_hugging_face_model_comes_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(family)
    with single_process():
        module = MCoreGPT.from_pretrained(str(folder))
        module.configure_model()
        module.to(DEVICE)
        export_model(module, str(tmp_path / "out"))
    out = dict(read_tensors(tmp_path / "out"))
    given = dict(read_tensors(folder))
    assert out.keys() == given.keys()
    assert all(torch.equal(out[name], tensor.to(out[name].dtype)) for name, tensor in given.items())
