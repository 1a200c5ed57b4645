# SPDX-License-Identifier: Apache-2.0
"""A student that sees images learns from a teacher that sees them as plain transformers does, on every layout.

The plain loop has both models whole in one process, in fp64 (fp32 with experts or delta nets), row by row. It takes
two steps of SGD. The teacher is wider and deeper than the student, and its tower wider than the student's.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import Distillation, MCoreStrategy, MCoreVisionDistillation
from lightning_mcore.config.vision import PROJECTOR, TOWER
from lightning_mcore.data.sampling import data_parallel_place
from tests.parity.hf_training import GRADIENT, KeepsGradients, Part, differing_gradients
from tests.parity.test_distillation import distance, divergence, projection, projections_of, with_the_rest
from tests.parity.test_vision import LENGTH, PADDING, ROWS, in_memory, packed, rows
from tests.support.hf_models import read_tensors
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer
from tests.support.vision_models import (
    CONFIGS,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VOCAB_SIZE,
    joined,
    save_vision,
    vision_folder,
)
from tests.unit.data.test_video_data import ROW, video_data
from tests.unit.data.test_vision_data import ROWS as CHATS
from tests.unit.data.test_vision_data import seeing_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("vision distillation")]  # they share references

STEPS, RATE = 2, 1e-2
CASES: dict[str, dict[str, Any]] = {
    "forward": {"kd_ratio": 0.6, "temperature": 2.0},
    "reverse": {"beta": 1.0},
    "js": {"beta": 0.3, "temperature": 0.7, "kd_ratio": 0.9},
    "top": {"beta": 0.3, "kd_ratio": 0.9, "top_k": 7},
    "hidden": {"kd_ratio": 0.6, "intermediate_layer_pairs": [[2, 4], [4, 8]], "intermediate_loss": "cosine"},
}
WITHIN = {"reverse": 3e-5}  # measured: 1.6e-5; plain transformers in fp32 differs from itself in fp64 by 1.1e-5
IN_FP64 = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # the others' kernels have none, so both sides round in each step
OTHERS = {"qwen2_vl": "qwen2_5_vl"}  # whose videos have other positions
Run = tuple[str, str, tuple[str, ...]]  # a case, the student's family, and its frozen parts


def teacher_of(family: str) -> str:
    """Return the folder of a teacher, made once."""
    family = OTHERS.get(family, family)
    return wide(family, vision_folder(family).parent / f"teacher-{family}")


@functools.cache
def wide(family: str, place: Path, vocab_size: int = VOCAB_SIZE, **ids: int) -> str:
    """Write a model with wider layers, twice as many of them, and a wider tower; return its folder."""
    config = CONFIGS[family]
    text = {**config["text_config"], "hidden_size": 96, "num_hidden_layers": 8, "num_attention_heads": 6}
    text["vocab_size"] = vocab_size
    if "layer_types" in text:
        text["layer_types"] = 2 * text["layer_types"]
    tower = {**config["vision_config"], "num_heads": 4}
    width = {"embed_dim": 48, "hidden_size": 96} if "embed_dim" in tower else {"hidden_size": 48, "out_hidden_size": 96}
    return str(save_vision(family, place, text_config=text, vision_config={**tower, **width}, **ids))


def model_of(folder: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def outputs_of(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the logits of the tokens with a target, [n, v], and the hidden states of each layer, [n, h]."""
    seen = {name: value for name, value in batch.items() if name != "labels"}
    tokens = seen.pop("tokens")
    kinds = (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int()
    dtype = next(model.parameters()).dtype
    seen = {name: value.to(dtype) if name.startswith("pixel") else value for name, value in seen.items()}
    output = model(tokens, mm_token_type_ids=kinds, output_hidden_states=True, **seen)
    return tuple(values[batch["labels"] >= 0] for values in (output.logits, *output.hidden_states[1:]))


@functools.cache
def plain_steps(case: str, family: str, frozen: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of the plain loop, and the gradients of its last step by their names on the disk."""
    dtype = torch.float64 if family in IN_FP64 else torch.float32
    student, teacher = (model_of(folder, dtype).train() for folder in (vision_folder(family), teacher_of(family)))
    for name, parameter in student.named_parameters():
        if "visual." in name and (PROJECTOR if "merger" in name else TOWER) in frozen:
            parameter.requires_grad_(False)
    seen = descended(student, teacher, case, family)
    held = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
    held = {name: each.mT if family == "qwen3_vl_moe" and ".experts." in name else each for name, each in held.items()}
    names = {name: in_memory(name, held) for name, _ in read_tensors(vision_folder(family))}
    return seen, {name: held[inner] for name, inner in names.items() if inner in held}


def descended(student: Any, teacher: Any, case: str, family: str) -> list[float]:
    """Take the steps of the plain loop, and return the loss of each."""
    setting = {"beta": 0.0, "temperature": 1.0, "kd_ratio": 1.0, **CASES[case]}
    pairs = [(own, taught) for own, taught in setting.get("intermediate_layer_pairs", [])]
    projections = {pair: projection(pair, 96, 64).to(student.dtype).requires_grad_() for pair in pairs}
    trained = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD([*trained, *projections.values()], lr=RATE)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses, divergences, distances = [], [], [torch.zeros(1)]
        for batch in rows(family):
            with torch.no_grad():
                taught, *wanted = outputs_of(teacher, batch)
            (logits, *states), labels = outputs_of(student, batch), batch["labels"][batch["labels"] >= 0]
            for (own, other), projected in projections.items():
                distances.append(distance(states[own - 1] @ projected.mT, wanted[other - 1], "cosine") / len(pairs))
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
            p, q = ((values / setting["temperature"]).softmax(-1) for values in (logits, taught))
            if "top_k" in setting:
                tokens = q.topk(setting["top_k"]).indices
                p, q = (with_the_rest(values, tokens) for values in (p, q))
            divergences.append(divergence(p, q, setting["beta"]))
        ratio = setting["kd_ratio"]
        loss = (1 - ratio) * torch.cat(losses).mean() + ratio * torch.cat(divergences).mean()
        loss = loss + torch.cat(distances).sum() / sum(map(len, losses))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


class Watched(KeepsGradients, MCoreVisionDistillation):
    """Reads the rows, in batches of two."""

    packs = False

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            for pair, weight in projections_of(self):
                weight.copy_(projection(pair, *weight.shape))

    def train_dataloader(self) -> DataLoader[Any]:
        rank, size = data_parallel_place(self.trainer)
        own, join = rows(self.vision.model_type)[rank::size], packed if self.packs else joined
        batches = [join(own[start : start + 2]) for start in range(0, len(own), 2)]
        return DataLoader(batches * STEPS, batch_size=None)  # type: ignore[arg-type]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.lora is None:
            super().on_before_optimizer_step(optimizer)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.SGD(self.parameters(), lr=RATE)


Seen = tuple[list[float], list[Part]]


def train(layout: Layout, runs: Sequence[Run], folders: dict[str, tuple[str, ...]], packs: bool) -> list[Seen]:
    """Train some steps of each run on this rank of a layout."""
    found = []
    for case, family, frozen in runs:
        student, teacher, *adapters = folders[family]
        fields = {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}
        setting = Distillation(teacher, **CASES[case])
        lora = adapters[0] if adapters else None
        module = Watched.from_pretrained(student, setting, 2 * (LENGTH + PADDING), fields, freeze=frozen, lora=lora)
        module.packs = packs  # type: ignore[attr-defined]
        watch = Watch()
        trainer = make_trainer(
            MCoreStrategy(**layout.strategy_arguments, loss_chunk_size=None if case == "reverse" else 10),
            max_steps=STEPS,
            accumulate_grad_batches=len(ROWS) // 2 // layout.dp,
            callbacks=[watch],
            use_distributed_sampler=False,
        )
        trainer.fit(module)
        found.append((watch.seen.logged, [] if adapters else module.gradients))  # type: ignore[attr-defined]
    return found


FROZEN = (TOWER,)
MORE = "more "
LAYOUTS: dict[str, tuple[Layout, tuple[Run, ...], bool]] = {  # by id; the last says whether rows are packed
    "one": (Layout(), (("forward", "qwen2_vl", ()), ("top", "qwen3_vl", FROZEN)), False),
    "tp2-sp": (Layout(tp=2, sp=True), (("hidden", "qwen2_vl", ()),), False),
    "pp2-first3": (Layout(pp=2, first=3), (("js", "qwen3_vl", ()),), False),
    "cp2-packed": (Layout(cp=2), (("top", "qwen2_vl", ()),), True),
    f"{MORE}one": (
        Layout(),
        (
            *((case, "qwen2_vl", ()) for case in ("reverse", "js", "hidden")),
            ("hidden", "qwen3_vl", FROZEN),
            ("js", "qwen2_5_vl", (TOWER, PROJECTOR)),
            ("js", "qwen3_5", ()),
            ("js", "qwen3_vl_moe", ()),
        ),
        False,
    ),
    f"{MORE}tp2-sp": (Layout(tp=2, sp=True), (("top", "qwen3_vl", FROZEN), ("js", "qwen3_5", ())), True),
    f"{MORE}tp2": (Layout(tp=2), (("js", "qwen3_vl", ()),), False),
    f"{MORE}pp2": (Layout(pp=2), (("top", "qwen2_vl", FROZEN), ("js", "qwen3_5", ())), False),
    f"{MORE}pp2-packed": (Layout(pp=2, first=3), (("top", "qwen2_vl", ()), ("js", "qwen3_vl", FROZEN)), True),
    f"{MORE}pp2-vp2": (Layout(pp=2, vp=2), (("js", "qwen2_vl", ()),), False),
    f"{MORE}cp2": (Layout(cp=2), (("js", "qwen2_vl", ()), ("top", "qwen3_vl", FROZEN)), False),
    f"{MORE}dp2": (Layout(dp=2, overlap=True), (("js", "qwen3_vl", FROZEN),), False),
    f"{MORE}ep2": (Layout(moe=True, dp=2, ep=2), (("js", "qwen3_vl_moe", ()),), False),
    f"{MORE}tp2-pp2": (Layout(tp=2, pp=2, sp=True, first=3), (("top", "qwen2_vl", ()), ("js", "qwen3_vl", ())), False),
    f"{MORE}tp2-cp2": (Layout(tp=2, cp=2), (("js", "qwen3_vl", ()),), True),
}


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, *(name for name in LAYOUTS if not name.startswith(MORE))))
def test_steps_are_those_of_plain_models(name: str) -> None:
    compare(*LAYOUTS[name])


def compare(layout: Layout, runs: Sequence[Run], packs: bool = False) -> None:
    folders = {family: (str(vision_folder(family)), teacher_of(family)) for _, family, _ in runs}
    ranks = run_ranks(layout.world_size, train, layout, runs, folders, packs, timeout=240)
    wrong: dict[Any, Any] = {}
    for number, run in enumerate(runs):
        losses, gradients = plain_steps(*run)
        parts = [[part for part in seen[number][1] if part.name in gradients] for seen in ranks]
        found: Any = differing_gradients(gradients, parts, WITHIN.get(run[0], 1e-5) if run[1] in IN_FP64 else GRADIENT)
        for seen in ranks:
            if seen[number][0] != pytest.approx(losses, abs=1e-5):
                found["losses"] = seen[number][0], losses
        if found:
            wrong[run] = found
    assert wrong == {}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_student_with_adapters_learns_as_with_peft(tmp_path: Path) -> None:
    """The adapters are read from PEFT's folder, and both models descend by SGD."""
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, family, case = vision_folder("qwen2_5_vl"), "qwen2_5_vl", "js"
    targets = r".*language_model.*\.(q_proj|down_proj)"
    made = get_peft_model(
        model_of(folder, torch.float32), LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    )
    made.save_pretrained(tmp_path)
    student = PeftModel.from_pretrained(model_of(folder, torch.float64), tmp_path, is_trainable=True).double()
    losses = descended(student.train(), model_of(teacher_of(family), torch.float64), case, family)
    folders = {family: (str(folder), teacher_of(family), str(tmp_path))}
    for [(found, _)] in run_ranks(2, train, Layout(tp=2, sp=True), [(case, family, ())], folders, False, timeout=120):
        assert found == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0]


# ---- stored logits


def losses_of_files(layout: Layout, student: str, files: Path, **setting: Any) -> list[float]:
    """Train two steps on conversations about images and videos; return the losses."""
    module = MCoreVisionDistillation.from_pretrained(student, Distillation(**CASES["top"], **setting), 300)
    watch = Watch()
    rows = [{"videos": [], **row} for row in (*CHATS, ROW)]
    data = video_data(files, 2 * rows, "qwen2", batch_size=2)
    trainer = make_trainer(layout.strategy_arguments, max_steps=2, callbacks=[watch])
    trainer.fit(module, datamodule=data)
    return watch.seen.logged


def stored_runs(layouts: Sequence[Layout], student: str, teacher: str, files: Path, out: str) -> list[list[float]]:
    """Store logits on the first layout, continue on the second after an interruption, and read them on all."""
    found = []
    for number, layout in enumerate(layouts):
        if number == 1 and torch.distributed.get_rank() == 0:
            logits = Path(out) / "logits.f32"
            os.truncate(logits, logits.stat().st_size // 2)
        torch.distributed.barrier()
        given = teacher if number < 2 else "nowhere"
        found.append(losses_of_files(layout, student, files, teacher=given, stored=out))
    return found


def test_stored_logits_of_images_train_like_the_teacher(tmp_path: Path) -> None:
    tokenizer = seeing_tokenizer()
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    text = {**CONFIGS["qwen2_vl"]["text_config"], "vocab_size": len(tokenizer)}
    student = str(save_vision("qwen2_vl", tmp_path / "student", text_config=text, **ids))
    teacher = wide("qwen2_5_vl", tmp_path / "teacher", len(tokenizer), **ids)
    [wanted] = run_ranks(1, losses_of_files, Layout(), student, tmp_path, teacher=teacher, timeout=120)
    layouts = [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)]
    for found in run_ranks(2, stored_runs, layouts, student, teacher, tmp_path, str(tmp_path / "stored"), timeout=240):
        for losses in found:
            assert losses == pytest.approx(wanted, abs=1e-5)
