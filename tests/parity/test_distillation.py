# SPDX-License-Identifier: Apache-2.0
"""A step of distillation equals plain transformers with autograd, on every layout, padded and packed.

The plain loop has student and teacher whole in one process, sequence by sequence, in fp64 (fp32 with experts), and
knows nothing of padding, packing, chunks or ranks. The teacher is of another family, wider and deeper than the student.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import (
    Distillation,
    LoRA,
    MCoreDistillation,
    MCoreFinetuningData,
    MCoreStrategy,
    Recipe,
    collate_padded,
    collate_rows,
)
from lightning_mcore.data.packing.best_fit import RowPart, TokenSample
from lightning_mcore.data.packing.rows import build_parts, build_row
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.interop.export import export_checkpoint
from lightning_mcore.interop.importing import import_checkpoint
from lightning_mcore.layers.hidden_states import PROJECTIONS
from lightning_mcore.models import generation, stored_logits
from lightning_mcore.parallel.groups import process_group
from tests.parity.global_tensors import whole_gradients
from tests.parity.hf_training import KeepsGradients, Part, differing_gradients, differing_values, on_disk
from tests.support.chats import characters, exchanges, write
from tests.support.hf_models import VARIANTS, VOCAB_SIZE, auto_model, read_tensors, save_tiny, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import make_trainer
from tests.trl_distillation import direction

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.xdist_group("distillation"),  # they share references
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
]

LENGTH, MULTIPLE = 48, 4  # a context-parallel rank pair asks for multiples of 4
CHUNK = 10  # tokens
ROWS = ((0, 1), (2, 3))  # the samples in packed rows
IN_PARTS = {  # by context-parallel ranks: rows, the ranks of their parts, and the samples in these
    2: (((1, (1,)), (1, (0, 2))), ((2, (3,)),)),
    4: (((2, (1,)), (2, (2, 0))), ((4, (3,)),)),
}
LOSS = 1e-5

CASES = {
    "forward": {"kd_ratio": 0.6, "temperature": 2.0},
    "reverse": {"beta": 1.0},
    "js": {"beta": 0.3, "temperature": 0.7, "kd_ratio": 0.9},
    "top": {"beta": 0.3, "temperature": 0.7, "kd_ratio": 0.9, "top_k": 7},
    "top forward": {"temperature": 2.0, "top_k": 30},
    "top reverse": {"beta": 1.0, "top_k": 1},
    "hidden": {"kd_ratio": 0.6, "intermediate_layer_pairs": [[2, 4], [4, 8], [2, 3]], "intermediate_weight": 0.7},
    "hidden, apart": {
        "kd_ratio": 0.6,
        "intermediate_layer_pairs": [[1, 7], [4, 2], [2, 4], [2, 8], [1, 5], [3, 1]],
        "intermediate_weight": 0.7,
    },
    "hidden, same width": {"kd_ratio": 0.9, "intermediate_layer_pairs": [[1, 1], [4, 8]]},
    "hidden, last layer": {"intermediate_layer_pairs": [[4, 8]], "temperature": 2.0},
    "hidden cosine": {"beta": 0.3, "intermediate_layer_pairs": [[3, 5], [4, 8]], "intermediate_loss": "cosine"},
}
RECOMPUTED: dict[str, dict[str, Any]] = {  # fields of the student
    "hidden cosine": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "hidden, last layer": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
Form = bool | Literal["hybrid"]  # whether rows are packed, perhaps with hybrid_context_parallel
Run = tuple[str, str, Form]  # a case, the student's family, and the form of the rows
DENSE: tuple[Run, ...] = (("js", "qwen2", False), ("forward", "qwen2", True), ("top", "qwen2", True))
APART: tuple[Run, ...] = (("hidden, apart", "qwen2", True), ("hidden, apart", "qwen2, untied", False))
HIDDEN: tuple[Run, ...] = (("hidden", "qwen2", False), ("hidden cosine", "qwen2, untied", True))
IN_ROWS_OF_BOTH_KINDS: tuple[Run, ...] = (("top", "qwen2", "hybrid"), ("hidden cosine", "qwen2, untied", "hybrid"))
LAYOUTS: dict[str, dict[Layout, tuple[Run, ...]]] = {  # each name begins with the number of ranks
    "1": {Layout(): (*((case, "qwen2", False) for case in CASES), ("reverse", "qwen2, untied", True))},
    "2": {
        Layout(tp=2, sp=True): (
            *DENSE,
            ("top forward", "qwen2", False),
            ("top reverse", "qwen2, untied", False),
            ("reverse", "qwen2, untied", False),
            ("js", "qwen2, sparse teacher", True),
            *HIDDEN,
        ),
        Layout(pp=2): (
            DENSE[2],
            ("reverse", "qwen2, untied", True),
            ("hidden, last layer", "qwen2", True),
            APART[0],
        ),
        Layout(cp=2): (*DENSE[:2], *IN_ROWS_OF_BOTH_KINDS),
        Layout(dp=2, distributed_optimizer=True): (DENSE[1], HIDDEN[0]),
        Layout(moe=True, dp=2, ep=2): (
            ("js", "qwen2_moe", False),
            ("hidden, same width", "qwen2_moe", True),
            ("forward", "qwen2_moe, dense teacher", False),
        ),
    },
    "2 more": {
        Layout(pp=2): (*DENSE[:2], *HIDDEN),
        Layout(cp=2): (DENSE[2], *HIDDEN),
        Layout(dp=2, distributed_optimizer=True): (DENSE[0], DENSE[2], HIDDEN[1]),
        Layout(moe=True, dp=2, ep=2): (("forward", "qwen2_moe", True),),
        Layout(tp=2): (*DENSE, *HIDDEN),
        Layout(pp=2, vp=2): (*DENSE, *HIDDEN, *APART),
        Layout(dp=2): (("reverse", "qwen2", False), *HIDDEN),
        Layout(dp=2, sharding="optim_grads_params"): HIDDEN,
        Layout(moe=True, tp=2, sp=True): (("js", "qwen2_moe", False),),
    },
    "4": {
        Layout(tp=2, cp=2, sp=True): (*DENSE, *HIDDEN, *IN_ROWS_OF_BOTH_KINDS),
        Layout(pp=2, cp=2): (*HIDDEN, *IN_ROWS_OF_BOTH_KINDS),
        Layout(tp=2, pp=2, sp=True): (*DENSE, *HIDDEN, *APART),
        Layout(pp=4): APART,
        Layout(pp=2, cp=2): APART,
        Layout(dp=2, cp=2): (*DENSE[1:], *HIDDEN, *IN_ROWS_OF_BOTH_KINDS),
        Layout(dp=2, pp=2): (*DENSE, *HIDDEN),
    },
    "4 that share rows": {Layout(cp=4): IN_ROWS_OF_BOTH_KINDS},
}


@functools.cache
def samples() -> list[TokenSample]:
    """Return four texts of uneven lengths; some of their tokens count for nothing."""
    generator = np.random.default_rng(3)
    made = []
    for number, length in enumerate((9, 23, 17, 24)):
        tokens = generator.integers(1, VOCAB_SIZE, length)
        made.append(TokenSample(tokens, np.arange(length) >= number + 2, number))
    return made


VARIANTS |= {
    "qwen2, untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2, sparse teacher": ("qwen2", {}),
    "qwen2_moe, dense teacher": ("qwen2_moe", {}),
}
TEACHER = {"hidden_size": 48, "num_hidden_layers": 8, "intermediate_size": 64}
SPARSE_TEACHER = {"num_hidden_layers": 8, "moe_intermediate_size": 24}  # as wide as the student, whose weights differ


@functools.cache
def teacher_folder(family: str = "llama", **changes: Any) -> str:
    """Return the folder of the teacher."""
    place = tiny_folder("qwen2").parent / f"teacher-{family}-{len(changes)}"
    return str(save_tiny(family, place, **{**(TEACHER if family == "llama" else {}), **changes}))


@functools.cache
def teacher_of(family: str) -> str:
    if family in ("qwen2_moe", "qwen2, sparse teacher"):
        return teacher_folder("qwen2_moe", **SPARSE_TEACHER)
    return teacher_folder("llama")


@functools.cache
def plain_step(case: str, family: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Run a step of the plain loop; return logged values, and gradients by their names on the disk."""
    has_experts = "moe" in family or "sparse" in family
    dtype = torch.float32 if has_experts else torch.float64  # grouped products have no fp64
    student, teacher = (
        auto_model().from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()
        for folder in (tiny_folder(family), teacher_of(family))
    )
    setting = {"beta": 0.0, "temperature": 1.0, "kd_ratio": 1.0, **CASES[case]}
    losses, divergences, distances = [], [], list[Tensor]()
    pairs = [(a, b) for a, b in setting.get("intermediate_layer_pairs", [])]
    widths = [model.config.hidden_size for model in (teacher, student)]
    projections = {pair: projection(pair, *widths).to(dtype).requires_grad_() for pair in pairs}
    for sample in samples():
        tokens = torch.from_numpy(sample.tokens)[None]
        counts = torch.from_numpy(sample.loss_mask[1:])  # type: ignore[index]
        both = [model(tokens[:, :-1], output_hidden_states=True) for model in (student, teacher)]
        logits, taught = (output.logits[0][counts].double() for output in both)
        taught = taught.detach()
        for pair, projected in projections.items():
            own, wanted = (output.hidden_states[layer][0][counts] for output, layer in zip(both, pair, strict=True))
            own = own if widths[0] == widths[1] else own @ projected.mT
            distances.append(distance(own, wanted.detach(), setting.get("intermediate_loss", "mse")) / len(pairs))
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:][counts], reduction="none"))
        p, q = ((values / setting["temperature"]).softmax(-1) for values in (logits, taught))
        if "top_k" in setting:
            tokens = q.topk(setting["top_k"]).indices
            p, q = (with_the_rest(values, tokens) for values in (p, q))
        divergences.append(divergence(p, q, setting["beta"]))
    loss, apart = torch.cat(losses).mean(), torch.cat(divergences).mean()
    mixed = (1 - setting["kd_ratio"]) * loss + setting["kd_ratio"] * apart
    values = {"train_loss": mixed, "train_token_loss": loss, "train_divergence": apart}
    if pairs:
        values["train_intermediate_loss"] = torch.cat(distances).sum() / sum(map(len, losses))
        values["train_loss"] = mixed + setting.get("intermediate_weight", 1.0) * values["train_intermediate_loss"]
    values["train_loss"].backward()
    gradients = on_disk(family, dict(student.named_parameters()))
    if widths[0] != widths[1]:
        gradients |= {f"{PROJECTIONS}.{a}-{b}.weight": projections[a, b].grad for a, b in pairs}  # type: ignore[misc]
    return {name: value.item() for name, value in values.items()}, gradients


def projection(pair: tuple[int, int], *shape: int) -> Tensor:
    """Return the projection for a pair of layers, [teacher's width, student's width]."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * pair[0] + pair[1])) / 6


def distance(own: Tensor, wanted: Tensor, kind: str) -> Tensor:
    """Return the distance of each token's hidden states."""
    if kind == "mse":
        return ((own - wanted) ** 2).mean(-1)
    return 1 - (own * wanted).sum(-1) / (own.norm(dim=-1) * wanted.norm(dim=-1))


def divergence(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of probabilities, as the formula says it."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if beta in (0, 1):
        return kl(q, p) if beta == 0 else kl(p, q)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def with_the_rest(probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities of some tokens, and of all others together."""
    chosen = probabilities.gather(-1, tokens)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], dim=-1)


# ---- a run


class Data(pl.LightningDataModule):
    """The samples in one global batch, padded or packed; ``steps`` times."""

    def __init__(self, packed: Form, steps: int = 1) -> None:
        super().__init__()
        self._packed, self._steps = packed, steps

    def train_dataloader(self) -> DataLoader[Any]:
        rank, ranks = data_parallel_place(self.trainer)
        if self._packed == "hybrid":
            context = process_group("cp").size()
            wide = [
                [RowPart(width, [samples()[i] for i in part]) for width, part in row]
                for row in IN_PARTS[context][rank::ranks]
            ]
            batch = collate_rows([build_parts(build_row, row, LENGTH, 2 * context) for row in wide])
        elif self._packed:
            rows = [build_row([samples()[i] for i in row], LENGTH + 8, MULTIPLE) for row in ROWS[rank::ranks]]
            batch = collate_rows(rows)
        else:
            batch = collate_padded(samples()[rank::ranks], 4, LENGTH)
        return DataLoader([batch] * self._steps, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def projections_of(module: MCoreDistillation) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the pairs of layers whose projection is on this rank, and its weight."""
    for chunk in module.model.chunks:
        for name, layer in getattr(chunk, PROJECTIONS, {}).items():
            first, second = map(int, name.split("-"))
            yield (first, second), layer.weight


class Watched(KeepsGradients, MCoreDistillation):
    """Keeps finished gradients, also of projections, which begin with known values."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            for pair, weight in projections_of(self):
                weight.copy_(projection(pair, *weight.shape))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        strategy: Any = self.trainer.strategy
        found = [whole_gradients(chunk) for chunk in strategy._chunks.ddp]
        for (a, b), weight in projections_of(self):
            [gradient] = [of[weight.data_ptr()] for of in found if weight.data_ptr() in of]
            self.gradients.append(Part(f"{PROJECTIONS}.{a}-{b}.weight", (0, 0), gradient.clone()))


Seen = tuple[dict[str, float], list[Part]]


def train(layouts: dict[Layout, tuple[Run, ...]], folders: dict[str, tuple[str, str]]) -> list[list[Seen]]:
    """Train one step of each run on each layout, one after the other, on this rank."""
    return [[_train(layout, run, *folders[run[1]]) for run in runs] for layout, runs in layouts.items()]


def _train(layout: Layout, run: Run, folder: str, teacher: str) -> Seen:
    case, _, packed = run
    module = Watched.from_pretrained(
        folder, Distillation(teacher, **CASES[case]), seq_length=LENGTH, transformer=RECOMPUTED.get(case)
    )
    options: dict[str, Any] = {"micro_batch_size": 1} if layout.dp == 1 else {}
    options |= {"hybrid_context_parallel": packed == "hybrid", "loss_chunk_size": None if case == "reverse" else CHUNK}
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments | options),
        max_steps=1,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    trainer.fit(module, Data(packed))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.gradients


@pytest.mark.parametrize("name", thorough_but(LAYOUTS, "1", "2"))
def test_a_step_on_every_layout_is_that_of_plain_models(name: str) -> None:
    layouts = LAYOUTS[name]
    families = {family for runs in layouts.values() for _, family, _ in runs}
    folders = {family: (str(tiny_folder(family)), teacher_of(family)) for family in families}
    ranks = run_ranks(int(name[0]), train, layouts, folders, timeout=240)
    wrong: dict[str, Any] = {}
    for index, (layout, runs) in enumerate(layouts.items()):
        for number, run in enumerate(runs):
            found = differing_values(*plain_step(*run[:2]), [rank[index][number] for rank in ranks])
            if found:
                wrong[f"{layout.id} {run}"] = found
    assert wrong == {}


# ---- runs


class Losses(pl.Callback):
    """Keeps each step's ``train_loss``, ``train_token_loss`` and ``train_divergence``; may save after the second."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        names = ("train_loss", "train_token_loss", "train_divergence")
        self.seen.append([float(trainer.callback_metrics[name]) for name in names])
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def losses_of_run(layout: Layout, folder: str, teacher: str, steps: int, **options: Any) -> list[list[float]]:
    """Train and return each step's ``train_loss``, ``train_token_loss`` and ``train_divergence``."""
    resumed, kept, precision = (options.pop(name, None) for name in ("resumed", "kept", "precision"))
    more, packed = options.pop("setting", {}), options.pop("packed", True)
    callbacks = options.pop("callbacks", [])
    recipe = Recipe(learning_rate=0.01, min_learning_rate=0.01)
    setting = Distillation(teacher, **CASES["js"], **more)
    module = MCoreDistillation.from_pretrained(folder, setting, seq_length=LENGTH, recipe=recipe, **options)
    losses = Losses(kept)
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments, loss_chunk_size=CHUNK),
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=[losses, *callbacks],
        **({} if precision is None else {"precision": precision}),
    )
    trainer.fit(module, Data(packed, steps=steps), ckpt_path=resumed)
    assert float(trainer.callback_metrics["val_loss"]) > 0  # of the student alone, between two steps
    return losses.seen


PAIRS: dict[str, Any] = {"intermediate_layer_pairs": [[2, 4], [1, 7]]}


def resumed_runs(layout: Layout, folder: str, teacher: str, other: str, out: str) -> list[list[list[float]]]:
    """Train, resume in the middle, and be refused with another teacher."""
    kept = f"{out}/kept.ckpt"
    whole = losses_of_run(layout, folder, teacher, 4, kept=kept, setting=PAIRS)
    resumed = losses_of_run(layout, folder, teacher, 4, resumed=kept, setting=PAIRS)
    with pytest.raises(ValueError, match="has other weights than the teacher of the run that wrote the checkpoint"):
        losses_of_run(layout, folder, other, 4, resumed=kept)
    return [whole, resumed]


@pytest.mark.parametrize("layout", thorough_but([Layout(pp=2), Layout(tp=2, sp=True)], "pp2"))
def test_a_run_that_resumes_reads_the_teacher_again_and_repeats_every_bit(layout: Layout, tmp_path: Path) -> None:
    other = teacher_folder(rms_norm_eps=2e-3, vocab_size=VOCAB_SIZE, **TEACHER | {"intermediate_size": 72})
    given = (str(tiny_folder("qwen2")), teacher_of("qwen2"), other, str(tmp_path))
    for whole, resumed in run_ranks(layout.world_size, resumed_runs, layout, *given, timeout=120):
        assert whole[0][0] > whole[3][0]
        assert resumed == whole[2:]


def projecting_runs(layouts: Sequence[Layout], folder: str, teacher: str, out: str) -> list[list[list[float]]]:
    """Train with projections on the first layout, resume on the others, and read the checkpoint without projections."""
    kept, lora = f"{out}/kept.ckpt", LoRA(r=4, target_modules=["q_proj", "down_proj"])
    options: dict[str, Any] = {"setting": PAIRS, "callbacks": [SaveHFModel(f"{out}/saved")]}
    pl.seed_everything(1)
    whole = losses_of_run(layouts[0], folder, teacher, 4, kept=kept, **options)
    found = [whole[2:]]
    options["callbacks"] = []
    found += [losses_of_run(layout, folder, teacher, 4, resumed=kept, **options) for layout in layouts[1:]]
    # A new run from its weights, with it as the teacher, whose projections stay behind
    losses_of_run(layouts[0], kept, kept, 1)
    module = MCoreDistillation.from_pretrained(folder, Distillation("nowhere"), seq_length=LENGTH)
    trainer = make_trainer(MCoreStrategy(**layouts[1].strategy_arguments), use_distributed_sampler=False)
    [values] = trainer.validate(module, Data(packed=True), ckpt_path=kept, verbose=False)
    assert values["val_loss"] > 0
    adapted = losses_of_run(layouts[0], folder, teacher, 4, kept=f"{out}/lora.ckpt", lora=lora, **options)
    found += [
        adapted[2:],
        losses_of_run(layouts[0], folder, teacher, 4, resumed=f"{out}/lora.ckpt", lora=lora, **options),
    ]
    return found


@pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning")  # Megatron, once in a process
def test_projections_are_in_checkpoints_for_every_layout_and_not_in_exported_models(tmp_path: Path) -> None:
    folder, out = tiny_folder("qwen2"), str(tmp_path)
    layouts = [Layout(pp=2), Layout(tp=2, sp=True), Layout(cp=2, distributed_optimizer=True)]
    for first, *others, adapted, again in run_ranks(
        2, projecting_runs, layouts, str(folder), teacher_of("qwen2"), out, timeout=240
    ):
        for found in others:
            assert np.array(found) == pytest.approx(np.array(first), abs=LOSS)
        assert again == adapted
    names = {name for name, _ in read_tensors(folder)}
    export_checkpoint(f"{out}/kept.ckpt", f"{out}/exported")
    assert {name for name, _ in read_tensors(tmp_path / "exported")} == names
    assert {name for name, _ in read_tensors(tmp_path / "saved")} == names
    export_checkpoint(f"{out}/lora.ckpt", f"{out}/adapter", adapter=True)
    assert all(".lora_" in name for name, _ in read_tensors(tmp_path / "adapter"))


def adapted_runs(layouts: Sequence[Layout], folder: str, teacher: str) -> list[list[list[float]]]:
    """Train adapters of the student on each layout."""
    lora = LoRA(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
    found = []
    for layout in layouts:
        pl.seed_everything(1)
        found.append(losses_of_run(layout, folder, teacher, 3, lora=lora))
    return found


def test_a_student_with_adapters_learns_alike_on_every_layout() -> None:
    given = (str(tiny_folder("qwen2, untied")), teacher_of("qwen2"))
    [[wanted]] = run_ranks(1, adapted_runs, [Layout()], *given)
    values, _ = plain_step("js", "qwen2, untied")
    assert wanted[0] == pytest.approx([*values.values()], abs=LOSS)
    assert wanted[2][0] < wanted[0][0]
    for rank in run_ranks(2, adapted_runs, [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)], *given):
        for found in rank:
            assert np.array(found) == pytest.approx(np.array(wanted), abs=LOSS)


def test_halved_precision_rounds_the_same_losses() -> None:
    layout, folders = Layout(tp=2, sp=True, pp=2), (str(tiny_folder("qwen2")), teacher_of("qwen2"))
    values, _ = plain_step("js", "qwen2")
    for found in run_ranks(4, functools.partial(losses_of_run, precision="bf16-mixed"), layout, *folders, 1):
        assert found[0] == pytest.approx([*values.values()], rel=0.02)


def taught_by_checkpoint(folder: str, teacher: str) -> list[list[float]]:
    """Learn from a checkpoint; then validate, which needs no teacher."""
    found = losses_of_run(Layout(tp=2), folder, teacher, 1)
    module = MCoreDistillation.from_pretrained(folder, Distillation("nowhere"), seq_length=LENGTH)
    trainer = make_trainer(MCoreStrategy(tensor_model_parallel_size=2), use_distributed_sampler=False)
    [values] = trainer.validate(module, Data(packed=True), verbose=False)
    return [*found, [values["val_loss"]]]


def test_a_checkpoint_is_a_teacher_too_and_validation_needs_none(tmp_path: Path) -> None:
    values, _ = plain_step("js", "qwen2")
    teacher = str(tmp_path / "teacher")
    run_ranks(1, import_checkpoint, teacher_of("qwen2"), teacher)
    for found, validated in run_ranks(2, taught_by_checkpoint, str(tiny_folder("qwen2")), teacher, timeout=120):
        assert found == pytest.approx([*values.values()], abs=LOSS)
        assert validated == pytest.approx([values["train_token_loss"]], abs=LOSS)


# ---- stored logits

STORED = {"beta": 0.3, "kd_ratio": 0.9, "top_k": 7}


def losses_of_files(
    layout: Layout, folder: str, files: str, packing: bool, steps: int = 2, **setting: Any
) -> list[list[float]]:
    """Train some steps on a file of exchanges; return each step's three losses."""
    hybrid = {"hybrid_context_parallel": True, "micro_batch_size": 1} if setting.pop("hybrid", False) else {}
    module = MCoreDistillation.from_pretrained(
        folder, Distillation(**STORED | setting), seq_length=LENGTH, recipe=Recipe(learning_rate=0.01)
    )
    losses = Losses()
    data = MCoreFinetuningData(
        files,
        characters(),
        seq_length=LENGTH,
        batch_size=4 // layout.dp,
        packing=packing,
        overlong="split",
        cache_dir=f"{folder}/cache",
        streaming=setting.get("stored") == "of a stream",
    )
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments | hybrid, loss_chunk_size=CHUNK), max_steps=steps, callbacks=[losses]
    )
    trainer.fit(module, datamodule=data)
    return losses.seen


def alike(layouts: Sequence[Layout], folder: str, teacher: str, files: str, out: str) -> list[list[list[float]]]:
    """Train on logits stored on the first layout; the second continues the file, and the others have no teacher."""
    found = []
    for number, layout in enumerate(layouts):
        if number == 1 and torch.distributed.get_rank() == 0:
            logits = Path(out) / "logits.f32"
            os.truncate(logits, logits.stat().st_size * 2 // 3 + 1)
        torch.distributed.barrier()
        given = teacher if number < 2 else "nowhere"
        found.append(losses_of_files(layout, folder, files, number % 2 == 0, teacher=given, stored=out))
        if layout.cp > 1:  # rows are packed for it
            found.append(losses_of_files(layout, folder, files, number % 2 == 0, teacher=teacher))
            for each in ({"teacher": "nowhere", "stored": out}, {"teacher": teacher}):
                found.append(losses_of_files(layout, folder, files, True, hybrid=True, **each))
    refused = {
        "has logits for other training data, or another order": {"files": files.replace("chats", "others")},
        "has logits for top_k=7; give what": {"top_k": 6},
        "has logits for temperature=1.0; give what": {"temperature": 2.0},
        "needs training data whose samples have a fixed order": {"stored": "of a stream"},
        "is more than the 260 tokens of the vocabulary": {"top_k": 1000},
    }
    for text, change in refused.items():
        options = {"folder": folder, "files": files, "packing": True, "teacher": teacher, "stored": out, **change}
        with pytest.raises(ValueError, match=text):
            losses_of_files(layouts[0], **options)  # type: ignore[arg-type]
    return found


def live(folder: str, teacher: str, files: str) -> list[list[list[float]]]:
    return [losses_of_files(Layout(), folder, files, packing, teacher=teacher) for packing in (True, False)]


def test_stored_logits_train_like_the_teacher_on_every_layout(tmp_path: Path) -> None:
    """Stored on one layout, continued on another after an interruption, and read by others without the teacher."""
    vocabulary = {"vocab_size": len(characters())}
    folder, teacher = (
        str(save_tiny(family, tmp_path / family, **changes))
        for family, changes in (("qwen2", vocabulary), ("llama", TEACHER | vocabulary))
    )
    for name in ("chats", "others"):
        write(tmp_path / f"{name}.jsonl", exchanges(60, longest=70, seed=len(name)))
    files = str(tmp_path / "chats.jsonl")
    [wanted] = run_ranks(1, live, folder, teacher, files, timeout=120)
    layouts = [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2, distributed_optimizer=True)]
    for rank in run_ranks(2, alike, layouts, folder, teacher, files, str(tmp_path / "stored"), timeout=240):
        packed, padded = wanted
        for found, expected in zip(rank, (packed, padded, rank[3], rank[3], rank[5], rank[5], padded), strict=True):
            assert np.array(found) == pytest.approx(np.array(expected), abs=LOSS)


def stored_elsewhere(folder: str, teacher: str, files: str, out: str) -> list[list[list[float]]]:
    """Store logits on four tensor-parallel ranks without a step; train on them on four data-parallel ranks."""
    stored = losses_of_files(Layout(tp=4, sp=True), folder, files, False, steps=0, teacher=teacher, stored=out)
    with mock.patch.object(stored_logits, "rank_zero_warn") as warn:
        found = losses_of_files(Layout(dp=4), folder, files, False, teacher="nowhere", stored=out)
    [(message,)] = [call.args for call in warn.call_args_list]
    assert message.startswith(f"stored={out!r} has logits of teacher={teacher!r}, which a run with teacher='nowhere'")
    return [stored, found]


def test_a_teacher_runs_on_a_layout_of_its_own(tmp_path: Path) -> None:
    sizes = {"vocab_size": len(characters()), "num_key_value_heads": 4}
    folder, teacher = (
        str(save_tiny(family, tmp_path / family, **changes))
        for family, changes in (("qwen2", sizes), ("llama", TEACHER | sizes))
    )
    write(tmp_path / "chats.jsonl", exchanges(60, longest=70, seed=5))
    files = str(tmp_path / "chats.jsonl")
    [[_, wanted]] = run_ranks(1, live, folder, teacher, files, timeout=120)
    for stored, found in run_ranks(4, stored_elsewhere, folder, teacher, files, str(tmp_path / "stored"), timeout=240):
        assert stored == []
        assert np.array(found) == pytest.approx(np.array(wanted), abs=LOSS)


# ---- the student's own answers

OWN = {"beta": 1.0, "on_policy": 1.0, "max_new_tokens": 9, "kd_ratio": 0.5, "stop_token": 17}
Answered = tuple[list[list[int]], list[list[int]], float, list[Part]]  # tokens, those that count, loss, gradients


def prompts() -> list[list[int]]:
    """Return what the student continues: of each sample, the tokens before those that count."""
    return [sample.tokens[: int(sample.loss_mask[1:].argmax()) + 1].tolist() for sample in samples()]  # type: ignore[index]


class Answers(Watched):
    """Keeps the rows that it wrote itself."""

    rows: dict[str, Tensor]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.rows = batch


def answers(layouts: Sequence[Layout], folder: str, teacher: str) -> list[Answered]:
    """Train a step on the most probable answers on each layout; return this rank's part of it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "sample", lambda logits, *_: int(logits.argmax()))
        for layout in layouts:
            module = Answers.from_pretrained(folder, Distillation(teacher, **OWN), seq_length=LENGTH)
            trainer = make_trainer(
                MCoreStrategy(**layout.strategy_arguments, loss_chunk_size=CHUNK),
                max_steps=1,
                use_distributed_sampler=False,
                limit_val_batches=0,
            )
            trainer.fit(module, Data(packed=False))
            rows = [
                row[:length].tolist()
                for row, length in zip(module.rows["tokens"], module.rows["lengths"].tolist(), strict=True)
            ]
            counted = [mask.nonzero()[:, 0].tolist() for mask in module.rows["loss_mask"]]
            found.append((rows, counted, float(trainer.callback_metrics["train_loss"]), module.gradients))
    return found


@functools.cache
def plain_answers() -> tuple[list[list[int]], float, dict[str, Tensor]]:
    """Return the whole rows of a plain student's most probable answers, their mean divergence and its gradients."""
    student, teacher = (
        auto_model().from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        for folder in (tiny_folder("qwen2"), teacher_of("qwen2"))
    )
    rows, divergences = [], []
    for row in prompts():
        first = len(row) - 1
        for _ in range(OWN["max_new_tokens"]):
            row.append(int(student(torch.tensor([row])).logits[0, -1].argmax()))
            if row[-1] == OWN["stop_token"]:
                break
        rows.append(row)
        p, q = (model(torch.tensor([row[:-1]])).logits[0, first:].softmax(-1) for model in (student, teacher))
        divergences.append(divergence(p, q.detach(), OWN["beta"]))
    loss = torch.cat(divergences).mean()
    loss.backward()
    return rows, loss.item(), on_disk("qwen2", dict(student.named_parameters()))


def test_a_student_learns_from_its_own_answers_on_every_layout() -> None:
    """The answers are those of a plain student, and the loss is their divergence alone."""
    rows, loss, gradients = plain_answers()
    assert len({len(row) for row in rows}) > 2
    layouts = [Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout(dp=2, distributed_optimizer=True)]
    given = (str(tiny_folder("qwen2")), teacher_of("qwen2"))
    ranks = run_ranks(2, answers, layouts, *given, timeout=180)
    for index, layout in enumerate(layouts):
        assert differing_gradients(gradients, [rank[index][-1] for rank in ranks], 1e-5) == {}, layout.id
    for rank, found in enumerate(ranks):
        for layout, (written, counted, value, _) in zip(layouts, found, strict=True):
            own = rows[rank::2] if layout.dp == 2 else rows
            assert written == [row[:-1] for row in own], layout.id
            starts = [len(prompt) - 1 for prompt in prompts()]
            starts = starts[rank::2] if layout.dp == 2 else starts
            assert counted == [[*range(start, len(row) - 1)] for start, row in zip(starts, own, strict=True)]
            assert value == pytest.approx(loss, abs=LOSS), layout.id


def test_a_step_on_own_answers_is_that_of_trl() -> None:
    """Answers, loss and gradients are those of ``GKDTrainer``; ``tests/trl_distillation.py`` writes the file."""
    wanted = json.loads(Path(__file__).with_name("trl_on_policy.json").read_text(encoding="utf-8"))
    [[(rows, _, loss, gradients)]] = run_ranks(1, answers, [Layout()], str(tiny_folder("qwen2")), teacher_of("qwen2"))
    assert rows == [row[:-1] for row in wanted["rows"]]
    assert loss == pytest.approx(wanted["loss"], rel=1e-6)
    shapes = {name: tensor.shape for name, tensor in read_tensors(tiny_folder("qwen2"))}
    products = dict.fromkeys(wanted["gradients"], 0.0)
    for part in gradients:
        products[part.name] += float((part.values * part.of(direction(part.name, shapes[part.name]))).sum())
    norms = {name: norm for name, (_, norm) in wanted["gradients"].items()}
    apart = {name: abs(products[name] - product) for name, (product, _) in wanted["gradients"].items()}
    assert {name for name, value in apart.items() if not value <= 1e-5 * norms[name]} == set()


def resumed_answers(layout: Layout, folder: str, teacher: str, out: str) -> list[list[list[float]]]:
    options: dict[str, Any] = {"setting": {"on_policy": 0.5, "max_new_tokens": 5}, "packed": False}
    whole = losses_of_run(layout, folder, teacher, 4, kept=f"{out}/kept.ckpt", **options)
    with pytest.raises(ValueError, match=r"on_policy=0\.5 continues prompts, which packed rows do not have one by one"):
        losses_of_run(layout, folder, teacher, 4, **options | {"packed": True})
    return [whole, losses_of_run(layout, folder, teacher, 4, resumed=f"{out}/kept.ckpt", **options)]


def test_a_resumed_run_samples_the_same_answers(tmp_path: Path) -> None:
    given = (str(tiny_folder("qwen2")), teacher_of("qwen2"), str(tmp_path))
    for whole, resumed in run_ranks(2, resumed_answers, Layout(tp=2, sp=True), *given, timeout=120):
        assert resumed == whole[2:]
