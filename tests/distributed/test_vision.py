# SPDX-License-Identifier: Apache-2.0
"""Models that see: files in and out, frozen parts, text alone, runs that go on; the numbers are in ``tests/parity``."""

import json
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCorePreference, MCoreVisionGPT, Recipe, single_process
from lightning_mcore.config.vision import LANGUAGE_MODEL, PARTS, PROJECTOR, TOWER
from lightning_mcore.interop.export import export_checkpoint, export_model
from tests.support.hf_models import read_tensors, tiny_config
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer
from tests.support.vision_models import CONFIGS, save_vision, vision_batch, vision_folder
from tests.unit.data.test_video_data import ROW, video_data
from tests.unit.data.test_vision_data import ROWS, seeing_tokenizer

pytestmark = pytest.mark.distributed

LENGTH = 48
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")


def step(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the losses of tokens on one rank."""
    losses: Tensor = module.token_losses(module.on_before_batch_transfer(batch, 0))[0]
    return losses.detach()


class PassesOn(MCoreVisionGPT):
    """Takes any argument, so that Lightning drops none that a checkpoint records."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


def exported(folder: str, out: str) -> None:
    with single_process():
        module = MCoreVisionGPT.from_pretrained(folder)
        module.configure_model()
        export_model(module, out)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.thorough] if name == "qwen2_5_vl" else []) for name in FAMILIES]
)
def test_files_come_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Also the config, and the file of the processor."""
    folder, out = vision_folder(family), tmp_path / "out"
    run_ranks(1, exported, str(folder), str(out), open_group=False)
    assert {path.name for path in folder.iterdir()} == {path.name for path in out.iterdir()}
    before, after = dict(read_tensors(folder)), dict(read_tensors(out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((folder / "config.json").read_text()) == json.loads((out / "config.json").read_text())


def test_experts_of_the_hub_and_of_transformers_are_read_alike(tmp_path: Path) -> None:
    """The hub has their matrices transposed, and that is written; transformers 5 writes them as it has them."""
    folder, out, again = vision_folder("qwen3_vl_moe"), tmp_path / "out", tmp_path / "again"
    run_ranks(1, exported, str(folder), str(out), open_group=False)
    run_ranks(1, exported, str(out), str(again), open_group=False)
    given, written = dict(read_tensors(folder)), dict(read_tensors(out))
    assert given.keys() == written.keys()
    for name, tensor in given.items():
        assert torch.equal(written[name], tensor.mT if ".mlp.experts." in name else tensor), name
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def flat_folder(path: Path) -> Path:
    """Return a folder as those of Qwen2-VL on the hub: the keys of the language model lie beside the others."""
    shutil.copytree(vision_folder("qwen2_vl"), path)
    content = json.loads((path / "config.json").read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["rope_theta"] = rope["rope_theta"]
    (path / "config.json").write_text(json.dumps({**text, **content}))
    return path


def losses_of(folders: list[str], fields: dict[str, Any], out: str) -> list[Tensor]:
    """Return the losses of models in one process; the last is written again with other fields."""
    found = []
    with single_process():
        for folder in folders:
            module = MCoreVisionGPT.from_pretrained(folder, seq_length=LENGTH)
            module.configure_model()
            found.append(step(module, vision_batch("qwen2_vl")))
        with _given_hyperparameters_context(dict(module.hparams), "lightning.pytorch.cli.instantiate_module"):
            MCoreVisionGPT(**module.hparams)
        changed = PassesOn(**{**module.hparams, **fields})
        assert changed.hparams.keys() == module.hparams.keys()
        changed.configure_model()
        export_model(changed, out)
    return found


def test_a_flat_config_of_the_hub_is_read_and_a_changed_one_is_written(tmp_path: Path) -> None:
    flat, out = flat_folder(tmp_path / "flat"), tmp_path / "out"
    folders = [str(flat), str(vision_folder("qwen2_vl"))]
    one, other = run_ranks(1, losses_of, folders, {"rotary_base": 500}, str(out), open_group=False)[0]
    assert torch.equal(one, other)
    written = json.loads((out / "config.json").read_text())
    assert written["text_config"]["rope_parameters"]["rope_theta"] == 500.0
    assert written["vision_config"]["depth"] == 4
    read = MCoreVisionGPT.from_pretrained(str(out))
    assert read.hparams["rotary_base"] == 500


def text_folder(path: Path) -> Path:
    """Return the language model of Qwen2-VL as a Qwen2."""
    path.mkdir()
    tensors = {name: tensor for name, tensor in read_tensors(vision_folder("qwen2_vl")) if "visual" not in name}
    save_file(tensors, path / "model.safetensors")
    sizes = {key: value for key, value in CONFIGS["qwen2_vl"]["text_config"].items() if key != "rope_parameters"}
    tiny_config("qwen2", **sizes, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}).save_pretrained(path)
    return path


def of_text(seeing: str, text: str) -> list[Tensor]:
    """Return the losses of text alone, with the tower and without."""
    batch = vision_batch("qwen2_vl", images=[[], []], videos=[[], []])
    with single_process():
        modules = [
            MCoreVisionGPT.from_pretrained(seeing, seq_length=LENGTH),
            MCoreGPT.from_pretrained(text, seq_length=LENGTH),
        ]
        found = []
        for module in modules:
            module.configure_model()
            found.append(step(module, batch))
    return found


def test_text_alone_is_that_of_the_text_family(tmp_path: Path) -> None:
    """Bit for bit. The folder of a Qwen3.5 is read as a text model by the class of text models."""
    both_ways = str(vision_folder("qwen3_5"))
    for paths in ((str(vision_folder("qwen2_vl")), str(text_folder(tmp_path / "text"))), (both_ways, both_ways)):
        one, other = run_ranks(1, of_text, *paths, open_group=False)[0]
        assert torch.equal(one, other)


class AtEnd(pl.Callback):
    """Keeps the weights of the end, and the number of those with gradients."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        chunks: Any = trainer.strategy._chunks  # type: ignore[attr-defined]
        self.trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.reduced = sum(len(buffer.params) for chunk in chunks.ddp for buffer in chunk.buffers)


def train(
    folder: str,
    layout: Layout,
    freeze: list[str],
    steps: int,
    out: str | None = None,
    save: str | None = None,
    start: str | None = None,
) -> dict[str, Any]:
    """Train some steps of two microbatches, of which the second of every other step is text alone."""
    recipe = Recipe(learning_rate=1e-2, min_learning_rate=1e-2)
    fields = {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, fields, recipe, freeze=freeze)
    family, nothing = module.vision.model_type, [[], []]
    batches = [
        vision_batch(family, seed=number, **({"images": nothing, "videos": nothing} if number % 4 == 3 else {}))
        for number in range(8)
    ]
    end = AtEnd()
    trainer = make_trainer(
        layout.strategy_arguments,
        max_steps=steps,
        accumulate_grad_batches=2,
        callbacks=[end],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=start)  # type: ignore[arg-type]
    if save is not None:
        trainer.save_checkpoint(save)
    if out is not None:
        export_model(module, out)
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    return {"trained": end.trained, "reduced": end.reduced, "weights": weights}


@pytest.mark.parametrize(
    ("layout", "family", "freeze"),
    [
        (Layout(dp=2, overlap=True, distributed_optimizer=True), "qwen3_vl", [TOWER]),
        (Layout(tp=2, sp=True), "qwen2_5_vl", [TOWER, PROJECTOR]),
        (Layout(pp=2, first=3), "qwen2_vl", [LANGUAGE_MODEL]),
        (Layout(pp=2), "qwen3_5", [PROJECTOR]),
    ],
    ids=lambda value: getattr(value, "id", str(value)),
)
def test_frozen_parts_stay_as_they_are_and_cost_nothing(
    layout: Layout, family: str, freeze: list[str], tmp_path: Path
) -> None:
    folder, out = vision_folder(family), tmp_path / "out"
    for rank in run_ranks(layout.world_size, train, str(folder), layout, freeze, 2, out=str(out), timeout=120):
        assert rank["reduced"] == len(rank["trained"])
    before, after = dict(read_tensors(folder)), load_file(out / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    parts = {
        PROJECTOR: {name for name in before if "visual." in name and "merger" in name},
        TOWER: {name for name in before if "visual." in name and "merger" not in name},
        LANGUAGE_MODEL: {name for name in before if "visual." not in name},
    }
    assert changed == set().union(*(names for part, names in parts.items() if part not in freeze))


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        pytest.param(Layout(tp=2, sp=True), Layout(pp=2, first=3), id="tp2-sp"),
        pytest.param(
            Layout(cp=2, distributed_optimizer=True, overlap=True),
            Layout(tp=2, sp=True),
            id="cp2-do",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_run_with_images_goes_on_bit_for_bit_and_its_checkpoint_is_exported(
    layout: Layout, other: Layout, tmp_path: Path
) -> None:
    """On its own layout; on another, the weights differ by rounding."""
    folder, saved, out = str(vision_folder("qwen3_vl")), str(tmp_path / "saved.ckpt"), str(tmp_path / "out")
    whole = run_ranks(2, train, folder, layout, [], 4, out=str(tmp_path / "whole"), timeout=120)
    run_ranks(2, train, folder, layout, [], 2, save=saved, timeout=120)
    again = run_ranks(2, train, folder, layout, [], 4, start=saved, timeout=120)
    for one, resumed in zip(whole, again, strict=True):
        assert all(map(torch.equal, one["weights"], resumed["weights"]))
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    for elsewhere in (Layout(), other):
        run_ranks(elsewhere.world_size, train, folder, elsewhere, [], 4, start=saved, out=out, timeout=120)
        found = load_file(f"{out}/model.safetensors")
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4, msg=name)
        shutil.rmtree(out)
    settings = MCoreVisionGPT.from_pretrained(saved, freeze=[TOWER]).hparams
    assert settings["vision"] == MCoreVisionGPT.from_pretrained(folder).hparams["vision"]
    run_ranks(1, export_checkpoint, saved, str(tmp_path / "half"), open_group=False)
    assert load_file(tmp_path / "half" / "model.safetensors").keys() == wanted.keys()


def train_on_images(
    folder: str, files: Path, layout: Layout, steps: int = 2, save: str | None = None, start: str | None = None
) -> list[float]:
    """Train on conversations about images and videos, packed, that workers read; return the losses."""
    watch = Watch()
    module = MCoreVisionGPT.from_pretrained(folder, 160, recipe=Recipe(learning_rate=1e-3, min_learning_rate=1e-3))
    trainer = make_trainer(layout.strategy_arguments, max_steps=steps, callbacks=[watch])
    rows = [{"videos": [], **row} for row in (*ROWS, ROW)]
    workers = layout.tp + layout.dp - 2
    read = video_data(files, 3 * rows, "qwen3", packing=True, seq_length=160, shuffle=True, num_workers=workers)
    trainer.fit(module, datamodule=read, ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
    return watch.seen.logged


def talking(family: str, folder: Path) -> str:
    """Return the folder of a model for the tokenizer of the conversations."""
    tokenizer = seeing_tokenizer()
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    text = {**CONFIGS[family]["text_config"], "vocab_size": len(tokenizer)}
    return str(save_vision(family, folder / "talker", text_config=text, **ids))


@pytest.mark.parametrize("family", thorough_but(["qwen3_vl", "qwen3_5"], "qwen3_5"))
def test_conversations_about_images_and_videos_are_trained_on(family: str, tmp_path: Path) -> None:
    talker = talking(family, tmp_path)
    one, *_ = run_ranks(1, train_on_images, talker, tmp_path, Layout(), timeout=120)
    for losses in run_ranks(2, train_on_images, talker, tmp_path, Layout(tp=2, sp=True), timeout=120):
        assert losses == pytest.approx(one, abs=1e-5)
    assert len(one) == 2


def test_a_run_goes_on_within_an_epoch_of_images_and_videos_bit_for_bit(tmp_path: Path) -> None:
    """After one of the steps of an epoch, and into the next; workers read the images and decode the videos."""
    talker = talking("qwen3_vl", tmp_path)
    layout, saved = Layout(dp=2), str(tmp_path / "saved.ckpt")
    whole = run_ranks(2, train_on_images, talker, tmp_path, layout, 3, timeout=120)
    run_ranks(2, train_on_images, talker, tmp_path, layout, 1, save=saved, timeout=120)
    again = run_ranks(2, train_on_images, talker, tmp_path, layout, 3, start=saved, timeout=120)
    assert [losses[1:] for losses in whole] == again
    assert len(set(whole[0])) == 3


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    seeing, text = str(vision_folder("qwen3_vl")), str(text_folder(tmp_path / "text"))
    with pytest.raises(ValueError, match="also sees images, which MCoreGPT does not; take MCoreVisionGPT"):
        MCoreGPT.from_pretrained(seeing)
    with pytest.raises(ValueError, match="also sees images, which MCorePreference does not; give a text-only model"):
        MCorePreference.from_pretrained(seeing)
    with pytest.raises(ValueError, match="is a text-only model; take MCoreGPT"):
        MCoreVisionGPT.from_pretrained(text)
    with pytest.raises(ValueError, match="freeze has 'tower'; choose from vision_tower, multi_modal_projector"):
        MCoreVisionGPT.from_pretrained(seeing, freeze=["tower"])
    with pytest.raises(TypeError, match=r"freeze='vision_tower' is not a list; give \['vision_tower'\]"):
        MCoreVisionGPT.from_pretrained(seeing, freeze="vision_tower")
    with pytest.raises(ValueError, match=r"freeze=.* leaves nothing to train; leave one part out"):
        MCoreVisionGPT.from_pretrained(seeing, freeze=PARTS)
    with pytest.raises(ValueError, match="mtp_num_layers=1 is not available for a vision-language model"):
        MCoreVisionGPT.from_pretrained(seeing, transformer={"mtp_num_layers": 1})
    settings = MCoreVisionGPT.from_pretrained(seeing).hparams
    with pytest.raises(ValueError, match=r"embedding_scale=2.0 is not available for a vision-language model"):
        MCoreVisionGPT(**{**settings, "architecture": {"embedding_scale": 2.0}})
    refused: list[tuple[dict[str, Any], str]] = [
        ({"pipeline_model_parallel_size": 2}, "the first pipeline stage has 2 layers, and outputs of the vision"),
    ]
    for arguments, message in refused:
        module = MCoreVisionGPT.from_pretrained(seeing)
        module.trainer = make_trainer(arguments)
        with pytest.raises(ValueError, match=message):
            module.check_settings()


def test_a_stretched_rotation_is_refused(tmp_path: Path) -> None:
    folder = save_vision("qwen2_vl", tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    content["text_config"]["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="rope_type='linear' is not supported, because positions of images are not"):
        MCoreVisionGPT.from_pretrained(str(folder))
