# SPDX-License-Identifier: Apache-2.0
"""Adapters on models that see, held to PEFT; prompts with images, held to transformers; import, and the other doors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreGPT, MCoreStrategy, MCoreVisionGPT, Recipe, SaveHFModel, single_process
from lightning_mcore.checkpoint.weights import load_weights
from lightning_mcore.cli import main
from lightning_mcore.cli.plan import WRONG
from lightning_mcore.cli.plan import run as plan_command
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import LANGUAGE_MODEL, PROJECTOR, TOWER, Vision
from lightning_mcore.layers.vision_weights import tower_flops_per_token
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.planning.live import settings_of
from lightning_mcore.planning.machines import MACHINES
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.planning.suggest import suggest
from tests.support.hf_models import read_tensors
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import Watch, make_trainer
from tests.support.vision_models import IMAGE_TOKEN, PATCH_VALUES, VISION_START, vision_batch, vision_folder
from tests.unit.layers.test_multimodal import kinds_of

pytestmark = pytest.mark.distributed

LENGTH = 48
NEW = 6
ADAPTERS = {"r": 4, "lora_alpha": 8}
_SEEN = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


class Talk(Watch):
    """Continues a prompt with two images and a video at the end of training."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        prompt, images = asked(module.vision.model_type)
        self.tokens = module.generate(prompt, NEW, temperature=0.0, images=images)


def asked(family: str) -> tuple[list[int], dict[str, Tensor]]:
    """Return a prompt, and its images and its video as a processor hands them over."""
    batch = vision_batch(family, 36, images=[[(1, 4, 6), (1, 2, 2)]], videos=[[(2, 4, 2)]], seed=5)
    return batch["tokens"][0].tolist(), {name: batch[name] for name in _SEEN if name in batch}


def train(folder: str, layout: Layout, out: str) -> tuple[list[float], list[int], int]:
    """Train adapters for three steps and write them; return losses, a continued prompt, and what the model counts."""
    module = MCoreVisionGPT.from_pretrained(
        folder, LENGTH, recipe=Recipe(learning_rate=1e-2, min_learning_rate=1e-2), lora=ADAPTERS
    )
    talk = Talk()
    trainer = make_trainer(
        layout.strategy_arguments,
        max_steps=3,
        callbacks=[talk, SaveHFModel(out, adapter=True)],
        use_distributed_sampler=False,
    )
    batches = [vision_batch(module.vision.model_type, seed=seed) for seed in range(3)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return talk.seen.logged, talk.tokens, trained


def in_peft(family: str, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(vision_folder(family), dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).eval()


def logits_of(folder: str, adapter: str, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of adapters that are read from a PEFT folder, [b, s, v]."""
    with single_process():
        module: Any = MCoreVisionGPT.from_pretrained(folder, LENGTH, lora=adapter)
        module.configure_model()
        logits, _ = module.token_logits(module.on_before_batch_transfer(batch, 0))
    found: Tensor = logits.detach()
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen2_5_vl", Layout(pp=2), marks=pytest.mark.thorough),
        ("qwen3_vl", Layout(tp=2, sp=True)),
        ("qwen3_5", Layout(pp=2)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_and_prompts_with_images_are_those_of_peft_and_transformers(
    family: str, layout: Layout, tmp_path: Path
) -> None:
    """On two layouts; the tower has no adapters, although some of its modules have names of the language model's."""
    folder, one = str(vision_folder(family)), tmp_path / "one"
    losses, tokens, trained = run_ranks(1, train, folder, Layout(), str(one))[0]
    for found in run_ranks(2, train, folder, layout, str(tmp_path / "two")):
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == tokens
    assert losses[2] != losses[0]
    model = in_peft(family, one)
    adapters = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    assert trained == sum(tensor.numel() for tensor in adapters.values())
    written = load_file(one / "adapter_model.safetensors")
    assert len(written) == len(adapters)
    prompt, images = asked(family)
    ids = torch.tensor([prompt])
    kinds = kinds_of(ids)
    with torch.no_grad():
        wanted = model.generate(
            input_ids=ids, mm_token_type_ids=kinds, **images, max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        batch = vision_batch(family)
        seen = {name: batch[name] for name in _SEEN if name in batch}
        logits = model(input_ids=batch["tokens"], mm_token_type_ids=kinds_of(batch["tokens"]), **seen).logits
    assert wanted[0].tolist() == tokens
    read = run_ranks(1, logits_of, folder, str(one), batch, open_group=False)[0]
    torch.testing.assert_close(read[..., : logits.size(-1)].view_as(logits), logits, rtol=0, atol=1e-4)


class Counts(pl.Callback):
    """Keeps the tokens, those of images, and the operations per token, of each step."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        counter = trainer.strategy.logs.pipeline
        self.found.append((counter.tokens, counter.image_tokens, module.flops_per_token()))


def count(folder: str, layout: Layout) -> list[tuple[float, float, float]]:
    counts = Counts()
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH)
    trainer = make_trainer(layout.strategy_arguments, max_steps=2, callbacks=[counts])
    batches = [vision_batch("qwen2_vl"), vision_batch("qwen2_vl", images=[[], []], videos=[[], []])]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return counts.found


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(pp=2)], ids=str)
def test_tokens_of_images_count_with_the_operations_of_the_tower(layout: Layout) -> None:
    """On every rank, also on a stage without the tower; the second step has no image."""
    vision = Vision.of(MCoreVisionGPT.from_pretrained(str(vision_folder("qwen2_vl"))).hparams["vision"])
    seen = int((vision_batch("qwen2_vl")["tokens"] >= IMAGE_TOKEN).sum())
    for steps in run_ranks(layout.world_size, count, str(vision_folder("qwen2_vl")), layout):
        (tokens, images, flops), (_, none, plain) = steps
        assert (tokens, images, none) == (2 * LENGTH, seen, 0)
        assert flops - plain == pytest.approx(seen / (2 * LENGTH) * tower_flops_per_token(vision))


@on_ranks(1, open_group=False)
def test_prompts_without_their_images_are_refused() -> None:
    folder = str(vision_folder("qwen2_vl"))
    with single_process():
        module = MCoreVisionGPT.from_pretrained(folder, LENGTH)
        module.configure_model()
        prompt, images = asked("qwen2_vl")
        with pytest.raises(ValueError, match=r"do not fit into seq_length=48; give a shorter prompt"):
            module.generate(prompt, 40, images=images)
        with pytest.raises(ValueError, match=r"1 runs of image tokens, .2. long, but its images need 0"):
            module.generate([5, VISION_START, IMAGE_TOKEN, IMAGE_TOKEN], 2)


def test_adapters_of_a_frozen_language_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze has 'language_model', and lora trains adapters of it; leave one of"):
        MCoreVisionGPT.from_pretrained(str(vision_folder("qwen2_vl")), freeze=[LANGUAGE_MODEL], lora=LoRA())


def through_commands(folder: str, saved: str, out: str, options: list[str]) -> list[Tensor]:
    """Import and export on the command line, and return the weights of a model that starts from the import."""
    assert main(["import", folder, saved, *options]) == 0
    assert main(["export", saved, out]) == 0
    with single_process():
        module = MCoreVisionGPT.from_pretrained(saved, LENGTH)
        module.configure_model()
        other = MCoreVisionGPT.from_pretrained(folder, LENGTH)
        other.configure_model()
        load_weights(other, saved)
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    return []


@pytest.mark.parametrize(
    ("family", "options"),
    [pytest.param("qwen3_vl", [], marks=pytest.mark.thorough), ("qwen3_5", ["--family", "qwen3_5+tower"])],
)
def test_commands_import_and_export_models_that_see(family: str, options: list[str], tmp_path: Path) -> None:
    folder, out = vision_folder(family), tmp_path / "out"
    run_ranks(1, through_commands, str(folder), str(tmp_path / "saved.ckpt"), str(out), options, open_group=False)
    before, after = dict(read_tensors(folder)), dict(read_tensors(out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def import_text(folder: str, saved: str) -> None:
    assert main(["import", folder, saved]) == 0
    with pytest.raises(ValueError, match=r"was imported without its vision tower; import it with family='qwen3_5\+tow"):
        MCoreVisionGPT.from_pretrained(saved)
    assert MCoreGPT.from_pretrained(saved).hparams["hf"]["family"] == "qwen3_5_text"


def test_an_import_of_qwen3_5_leaves_out_its_tower_unless_asked_for(tmp_path: Path) -> None:
    folder, saved = str(vision_folder("qwen3_5")), str(tmp_path / "saved.ckpt")
    run_ranks(1, import_text, folder, saved, open_group=False)


def saves_adapters(folder: str, saved: str) -> Tensor:
    """Train adapters for a step and save them; return the logits of the model with them."""
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, lora=ADAPTERS)
    trainer = make_trainer(MCoreStrategy(), max_steps=1, use_distributed_sampler=False)
    batch = vision_batch(module.vision.model_type)
    trainer.fit(module, DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    trainer.save_checkpoint(saved)
    module.eval()
    logits: Tensor = module.token_logits(module.on_before_batch_transfer(batch, 0))[0].detach()
    return logits


def exports_adapters(saved: str, merged: str, adapter: str) -> None:
    assert main(["export", saved, merged]) == 0
    assert main(["export", saved, adapter, "--adapter"]) == 0


@pytest.mark.parametrize("family", ["qwen3_vl"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_checkpoint_of_adapters_is_exported_merged_and_alone(family: str, tmp_path: Path) -> None:
    """Transformers computes the same with the merged model, and PEFT with the adapters."""
    from transformers import AutoModelForImageTextToText

    saved, merged, adapter = (tmp_path / name for name in ("saved.ckpt", "merged", "adapter"))
    wanted = run_ranks(1, saves_adapters, str(vision_folder(family)), str(saved))[0]
    run_ranks(1, exports_adapters, str(saved), str(merged), str(adapter), open_group=False)
    batch = vision_batch(family)
    seen = {name: batch[name] for name in _SEEN if name in batch}
    for model in (AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32), in_peft(family, adapter)):
        with torch.no_grad():
            found = model.eval()(batch["tokens"], mm_token_type_ids=kinds_of(batch["tokens"]), **seen).logits
        torch.testing.assert_close(wanted[..., : found.size(-1)], found, rtol=0, atol=1e-4)


def counted(folder: str, layout: Layout, freeze: list[str], lora: dict[str, Any] | None) -> tuple[int, int]:
    """Return the parameters of a rank, and how many of them are trained, and hold a plan of the run to them."""
    fields = {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, fields, freeze=freeze, lora=lora)
    trainer = make_trainer(layout.strategy_arguments, max_steps=1, use_distributed_sampler=False)
    batches = [vision_batch(module.vision.model_type)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    parameters = list(module.parameters())
    found = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    plan = make_plan(settings_of(trainer, module, batch_size=1), layout.world_size)
    assert not plan.errors
    assert "vision tower" in plan.assumptions[-1]
    stage = plan.stages[process_group("pp").rank()].parameters
    assert (stage.total, stage.trained_dense + stage.trained_expert) == found
    if layout.world_size == 1:
        assert plan.parameters is not None
        assert (plan.parameters.total, plan.parameters.trained) == found
    return found


@pytest.mark.parametrize(
    ("family", "layout", "freeze", "lora"),
    [
        ("qwen2_vl", Layout(tp=2, pp=2, sp=True), [TOWER, PROJECTOR], None),
        ("qwen2_5_vl", Layout(), [LANGUAGE_MODEL], None),
        ("qwen3_vl", Layout(pp=2, first=3), [], ADAPTERS),
        pytest.param("qwen3_vl_moe", Layout(), [PROJECTOR], None, marks=pytest.mark.thorough),
        ("qwen3_5", Layout(tp=2, sp=True), [TOWER], None),
        pytest.param("qwen3_5_moe", Layout(), [], ADAPTERS, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_plan_counts_the_weights_of_the_tower(
    family: str, layout: Layout, freeze: list[str], lora: dict[str, Any] | None
) -> None:
    """On each stage, and those that are trained."""
    run_ranks(layout.world_size, counted, str(vision_folder(family)), layout, freeze, lora)


@pytest.mark.parametrize(
    ("layout", "freeze"), [(Layout(pp=2, dp=2), []), (Layout(tp=2, pp=2, sp=True), [TOWER, PROJECTOR])], ids=str
)
def test_a_plan_counts_the_tower_for_image_tokens(layout: Layout, freeze: list[str]) -> None:
    """On the first stage: operations as ``model_tflops`` has them, their time, and the patches of both microbatches."""
    folder = str(vision_folder("qwen2_vl"))
    settings = RunSettings(
        strategy=layout.strategy_arguments,
        model={"path": folder, "seq_length": LENGTH, "freeze": freeze},
        trainer={"accumulate_grad_batches": 2},
    )
    plain, seen = (
        make_plan(replace(settings, image_tokens=tokens), 4, machine=MACHINES["h100"]) for tokens in (None, 16)
    )
    assert "not counted (or give --image-tokens)" in plain.assumptions[-1]
    assert "16 tokens of images in each row" in seen.assumptions[-1]
    assert plain.work is not None
    assert seen.work is not None
    assert seen.batch is not None
    assert seen.fields is not None
    vision = seen.fields.vision
    assert vision is not None
    of_row = 16 * tower_flops_per_token(vision, freeze)
    assert seen.work.tower_flops == seen.batch.rows * of_row
    assert seen.work.flops_per_token - plain.work.flops_per_token == pytest.approx(of_row / LENGTH)
    for name, factor in (("hardware_flops_of_rank", 1.0), ("slowed_flops_of_rank", 1 + 512 / 24)):
        more = [a - b for a, b in zip(getattr(seen.work, name), getattr(plain.work, name), strict=True)]
        assert more == pytest.approx([seen.work.tower_flops / 2 * factor, 0.0])
    first, last = (a.memory.activations - b.memory.activations for a, b in zip(seen.stages, plain.stages, strict=True))
    patches = 2 * 16 * 4 * PATCH_VALUES * 4
    assert (first == patches) if freeze else (first > patches)
    assert last == 0


def test_a_plan_refuses_what_the_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(vision_folder("qwen3_vl"))

    def errors(strategy: dict[str, Any], **model: Any) -> tuple[str, ...]:
        return make_plan(RunSettings(strategy=strategy, model={"path": folder, **model}), devices=2).errors

    assert errors({}) == ()
    assert "the first pipeline stage has 2 layers, and outputs of" in errors({"pipeline_model_parallel_size": 2})[0]
    assert "freeze has 'tower'; choose from vision_tower" in errors({}, freeze=["tower"])[0]
    assert "freeze has 'language_model', and lora" in errors({}, freeze=[LANGUAGE_MODEL], lora=ADAPTERS)[0]
    assert "train_only" in errors({}, train_only=["lm_head"])[0]
    seeing = RunSettings(model={"path": folder, "seq_length": LENGTH}, data={"batch_size": 2}, image_tokens=LENGTH + 1)
    wrong = "image_tokens=49 does not fit a row of 48 tokens; choose 1 to 48"
    assert make_plan(seeing, devices=1).errors == (wrong,)
    with pytest.raises(ValueError, match=wrong):
        suggest(seeing, 1, 1, MACHINES["h100"])
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    text = RunSettings(model={"vocab_size": 64, "seq_length": 8, "transformer": sizes, "freeze": [TOWER]})
    assert "'freeze'" in make_plan(text, devices=1).errors[0]
    assert "image_tokens=4 is given, but the model" in make_plan(replace(text, image_tokens=4), devices=1).errors[1]
    model = {"class_path": "lightning_mcore.MCoreVisionGPT.from_pretrained", "init_args": {"path": folder}}
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"trainer": {"strategy": "mcore", "max_steps": 1}, "model": model}))
    assert plan_command([str(run), "--devices", "2"]) == 0
    assert plan_command([str(run), "--devices", "2", "--image-tokens", "32"]) == 0
    assert "vision tower" in capsys.readouterr().out.split("WORK")[2]


@pytest.mark.parametrize("owner", ["MCoreGPT", "MCoreVisionGPT"])
def test_a_plan_of_qwen3_5_has_the_tower_where_the_run_has_it(
    owner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class of a file says so; with ``--model``, image tokens do."""
    folder = str(vision_folder("qwen3_5"))
    seen = sum(tensor.numel() for name, tensor in read_tensors(Path(folder)) if "visual" in name)
    text = sum(tensor.numel() for _, tensor in read_tensors(Path(folder))) - seen
    model = {"class_path": f"lightning_mcore.{owner}.from_pretrained", "init_args": {"path": folder}}
    run, sees = tmp_path / "run.yaml", owner == "MCoreVisionGPT"
    run.write_text(json.dumps({"trainer": {"strategy": "mcore", "max_steps": 1}, "model": model}))

    def planned(*options: str) -> int:
        assert plan_command([str(run), "--devices", "1", "--json", *options]) == 0
        found: int = json.loads(capsys.readouterr().out)["parameters"]["total"]
        return found - _padding(folder)

    assert planned() == text + sees * seen
    assert planned("--model", folder) == text
    assert planned("--model", folder, "--image-tokens", "32") == text + seen
    assert plan_command([str(run), "--devices", "1", "--image-tokens", "32"]) == (0 if sees else WRONG)


def _padding(folder: str) -> int:
    """Return the numbers in rows of the embedding for no token."""
    settings = MCoreVisionGPT.from_pretrained(folder)
    return (settings.padded_vocab_size - settings.vocab_size) * 64
