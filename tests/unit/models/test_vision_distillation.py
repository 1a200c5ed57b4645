# SPDX-License-Identifier: Apache-2.0
"""Which teachers a student that sees images rejects, in a run and in its plan, and what ``plan`` counts of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore import Distillation, MCoreDistillation, MCoreStrategy, MCoreVisionDistillation
from lightning_mcore.cli import main
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import PARTS
from lightning_mcore.data.multimodal import with_vision
from lightning_mcore.layers.vision_weights import tower_flops_per_token
from lightning_mcore.models.vision_distillation import VisionTeacher
from lightning_mcore.planning.plan import make_plan
from tests.support.hf_models import VOCAB_SIZE, save_tiny
from tests.support.sentences import refuses
from tests.support.vision_models import CONFIGS, save_vision, vision_batch

LENGTH = 64


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sentences name folders without their place."""
    monkeypatch.chdir(tmp_path)


def folder(name: str, family: str = "qwen2_vl", scales: dict[str, Any] | None = None, **vision: Any) -> str:
    """Write a model whose tower has other settings, and perhaps a processor's."""
    ids = {key: vision.pop(key) for key in ("image_token_id", "num_hidden_layers") if key in vision}
    config: dict[str, Any] = {"vision_config": {**CONFIGS[family]["vision_config"], **vision}}
    if "num_hidden_layers" in ids:
        config["text_config"] = {**CONFIGS[family]["text_config"], "num_hidden_layers": ids.pop("num_hidden_layers")}
    path = save_vision(family, Path(name), **config, **ids)
    if scales is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(scales))
    return str(path)


def errors(student: str, teacher: str, strategy: dict[str, Any] | None = None, **setting: Any) -> str:
    """Return what the plan of a run says against it."""
    model = {"path": student, "seq_length": LENGTH, "distillation": {"teacher": teacher, **setting}}
    return " ".join(make_plan(RunSettings(model=model, strategy=strategy or {}), 2).errors)


TEACHERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"patch_size": 2}, "has patch_size=2 and the student 4"),
    ({"image_token_id": 96}, "has image_token_id=96 and the student 99"),
    ({"family": "qwen3_vl"}, "is a qwen3_vl and the student a qwen2_vl"),
)


@pytest.mark.parametrize(("changes", "said"), TEACHERS, ids=[said for _, said in TEACHERS])
def test_a_teacher_that_cannot_see_the_same_images_is_rejected(changes: dict[str, Any], said: str) -> None:
    paths = folder("small"), folder("big", **changes)
    module = MCoreVisionDistillation.from_pretrained(paths[0], Distillation(paths[1]), LENGTH)
    with refuses(ValueError, said):
        _ = module.teacher
    assert said in errors(*paths)


def test_a_teacher_whose_processor_scales_pixels_differently_is_rejected() -> None:
    scales: list[dict[str, Any]] = [{"image_mean": [value] * 3, "patch_size": 14} for value in (0.5, 0.25)]
    paths = folder("small", scales=scales[0]), folder("big", scales=scales[1])
    module = MCoreVisionDistillation.from_pretrained(paths[0], Distillation(paths[1]), LENGTH)
    with refuses(ValueError, "reads images with image_mean=[0.25, 0.25, 0.25]"):
        _ = module.teacher
    assert "reads images with image_mean=[0.25, 0.25, 0.25]" in errors(*paths)
    # transformers 5 writes both processors into one file, which counts first
    for path in paths:
        (Path(path) / "processor_config.json").write_text(json.dumps({"image_processor": scales[0]}))
    assert MCoreVisionDistillation.from_pretrained(paths[0], Distillation(paths[1]), LENGTH).teacher.takes_images
    assert errors(*paths) == ""


def test_only_one_of_student_and_teacher_may_not_see_images() -> None:
    seeing, text = folder("seeing"), str(save_tiny("qwen2", Path("text"), vocab_size=VOCAB_SIZE))
    module = MCoreVisionDistillation.from_pretrained(seeing, Distillation(text), LENGTH)
    with refuses(ValueError, "is a text-only model, and the student sees images"):
        _ = module.teacher
    blind = MCoreDistillation.from_pretrained(text, Distillation(seeing), LENGTH)
    with refuses(ValueError, "sees images, and the student does not"):
        _ = blind.teacher
    assert "is a text-only model, and the student sees images" in errors(seeing, text)
    assert "sees images, and the student does not" in errors(text, seeing)
    with refuses(ValueError, "which MCoreDistillation does not; take MCoreVisionDistillation"):
        MCoreDistillation.from_pretrained(seeing, Distillation(seeing))
    with refuses(ValueError, "is a text-only model; take MCoreDistillation"):
        MCoreVisionDistillation.from_pretrained(text, Distillation(seeing))


def test_a_teacher_has_enough_layers_on_the_first_stage_for_outputs_from_inside_its_tower() -> None:
    path, strategy = folder("small", "qwen3_vl", num_hidden_layers=8), {"pipeline_model_parallel_size": 2}
    teacher = folder("big", "qwen3_vl")
    module = MCoreVisionDistillation.from_pretrained(path, Distillation(teacher), LENGTH)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=MCoreStrategy(**strategy))
    module._trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    with refuses(ValueError, "the first pipeline stage has 2 layers of the teacher"):
        module.check_settings()
    assert "the first pipeline stage has 2 layers of the teacher" in errors(path, teacher, strategy)


def test_a_teacher_that_times_videos_differently_computes_positions_that_a_batch_has_already() -> None:
    paths = folder("small"), folder("big", "qwen2_5_vl")
    module = MCoreVisionDistillation.from_pretrained(paths[0], Distillation(paths[1]), LENGTH)
    batch = vision_batch("qwen2_5_vl", images=[[], []])
    module._trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=MCoreStrategy())
    module.trainer.state.fn = TrainerFn.FITTING
    module._stored = None
    module.model = SimpleNamespace(chunks=[SimpleNamespace(pre_process=True)])  # type: ignore[assignment]
    own = with_vision(batch, module.vision)["rope_positions"]
    found = module.on_before_batch_transfer({**batch, "rope_positions": own}, 0)
    teacher = module.teacher
    assert isinstance(teacher, VisionTeacher)
    assert torch.equal(found["teacher_rope_positions"], with_vision(batch, teacher.vision)["rope_positions"])
    assert not torch.equal(found["teacher_rope_positions"], own)


def test_a_student_that_sees_images_does_not_write_answers() -> None:
    path = folder("small")
    with refuses(ValueError, "on_policy=0.5"):
        MCoreVisionDistillation.from_pretrained(path, Distillation(path, on_policy=0.5))
    assert "on_policy=0.5 lets the student continue prompts" in errors(path, path, on_policy=0.5)


def test_a_plan_counts_the_tower_of_the_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights on the first stage, and its forward pass for the images of a row."""
    path, teacher = folder("small"), folder("big", embed_dim=48, num_heads=4, num_hidden_layers=8)
    layout: dict[str, Any] = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    plans = []
    for name, taught in ((path, None), (path, teacher), (teacher, None)):
        model: dict[str, Any] = {"path": name, "seq_length": LENGTH}
        model |= {} if taught is None else {"distillation": {"teacher": taught}}
        settings = RunSettings(model=model, strategy=layout, trainer={"accelerator": "gpu"}, image_tokens=16)
        plans.append(make_plan(settings, 4))
    alone, both, other = plans
    assert both.errors == ()
    for one, two, more in zip(alone.stages, both.stages, other.stages, strict=True):
        assert two.memory.weights == one.memory.weights + more.memory.weights
        assert two.memory.optimizer == one.memory.optimizer
    assert alone.work is not None
    assert both.work is not None
    assert other.work is not None
    assert other.fields is not None
    assert other.fields.vision is not None
    assert other.batch is not None
    towers = 16 * other.batch.rows * tower_flops_per_token(other.fields.vision, PARTS)
    of_text = (other.work.hardware_flops - other.work.tower_flops) / 3
    assert both.work.hardware_flops == pytest.approx(alone.work.hardware_flops + of_text + towers)
    file = {"class_path": "lightning_mcore.MCoreVisionDistillation.from_pretrained"}
    Path("run.yaml").write_text(
        json.dumps(
            {
                "trainer": {"accelerator": "cpu", "strategy": {"class_path": "lightning_mcore.MCoreStrategy"}},
                "model": {**file, "init_args": {"path": path, "seq_length": 64, "distillation": {"teacher": teacher}}},
            }
        )
    )
    assert main(["plan", "run.yaml", "--devices", "1"]) == 0
