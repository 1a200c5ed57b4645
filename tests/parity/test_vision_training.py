# SPDX-License-Identifier: Apache-2.0
"""Training on images: what changes time and memory changes no number, and every layout learns what one rank learns."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreStrategy, MCoreVisionGPT, SaveHFModel
from lightning_mcore.layers.spec import TransformerImpl
from tests.parity.hf_training import Part, differing_gradients, finished_gradients
from tests.parity.test_vision import packed
from tests.support.hf_models import read_tensors
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer
from tests.support.vision_models import joined, vision_batch, vision_folder
from tests.unit.layers.test_multimodal import kinds_of

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("vision training")]  # they share runs

LENGTH = 48
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**UNIFORM, "recompute_method": "block"}
NOTHING: list[Any] = [[], []]


IMAGES: list[list[Any]] = [[], [(1, 4, 4)], [(1, 2, 2), (1, 6, 4), (1, 2, 4)], [(1, 2, 2)] * 3 + [(1, 4, 6), (1, 2, 4)]]
"""The sizes of the images of each microbatch of a step."""

STEPS = 2
RATE = 1e-2
LAYOUTS: list[tuple[Layout, str]] = [
    (Layout(tp=2), "qwen3_vl"),
    (Layout(tp=2, sp=True), "qwen3_vl"),
    (Layout(tp=2, sp=True), "qwen3_5"),
    (Layout(pp=2, first=3), "qwen3_vl"),
    (Layout(pp=2, vp=2), "qwen2_vl"),
    (Layout(pp=2, vp=2), "qwen3_5"),
    (Layout(cp=2), "qwen2_5_vl"),
    (Layout(tp=2, cp=2), "qwen3_vl"),
    (Layout(tp=2, cp=2), "qwen3_5"),
    (Layout(tp=2, pp=2, sp=True, first=3), "qwen3_vl"),
    (Layout(dp=2, distributed_optimizer=True, overlap=True), "qwen3_vl"),
    (Layout(dp=2, distributed_optimizer=True, overlap=True), "qwen3_5"),
    (Layout(moe=True, dp=2, ep=2), "qwen3_vl_moe"),
]
THOROUGH = (
    (Layout(tp=2), "qwen3_vl"),
    (Layout(tp=2, sp=True), "qwen3_5"),
    (Layout(pp=2, first=3), "qwen3_vl"),
    (Layout(tp=2, pp=2, sp=True, first=3), "qwen3_vl"),
    (Layout(tp=2, cp=2), "qwen3_vl"),
    (Layout(dp=2, distributed_optimizer=True, overlap=True), "qwen3_5"),
    (Layout(moe=True, dp=2, ep=2), "qwen3_vl_moe"),
)
"""Layouts whose parts are those of other rows, or which ``test_vision.py`` compares with transformers."""


class Watched(MCoreVisionGPT):
    """Keeps the gradients of the first step, and the numbers of patches that its tower sees."""

    gradients: list[Part] | None = None

    def configure_model(self) -> None:
        super().configure_model()
        self.patches: list[int] = []
        for name, part in self.named_modules():
            if name.endswith("tower.patch_embed"):
                part.register_forward_pre_hook(lambda _, inputs: self.patches.append(len(inputs[0])))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradients is None:
            self.gradients = finished_gradients(self)


def fields_of(layout: Layout) -> dict[str, Any]:
    return {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}


@dataclass(frozen=True)
class Ran:
    """What a rank saw of a run: losses, the first gradients, and the patches of each microbatch on this rank."""

    losses: list[float]
    gradients: list[Part]
    patches: list[int]


def course(
    folder: str, layout: Layout, steps: int, packs: bool = False, transformer_impl: TransformerImpl = "auto"
) -> Ran:
    """Train some steps of four microbatches, with 0, 1, 3 and 5 images."""
    fields = fields_of(layout)
    module = Watched.from_pretrained(folder, 2 * (LENGTH + 4), fields, transformer_impl=transformer_impl)
    family, none = module.vision.model_type, [[]]
    rows = [
        vision_batch(family, LENGTH, [images], none, seed=4 * step + number)
        for step in range(steps)
        for number, images in enumerate(IMAGES)
    ]
    if packs:
        rows = [packed(rows[start : start + 2]) for start in range(0, len(rows), 2)]
    rank, size = parallel_state.get_data_parallel_rank, layout.dp
    watch = Watch()
    small_buckets = DistributedDataParallelConfig(bucket_size=20_000) if layout.overlap else None
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments, ddp_config=small_buckets),
        max_steps=steps,
        accumulate_grad_batches=len(rows) // steps // size,
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    module.train_dataloader = lambda: DataLoader(rows[rank() :: size], batch_size=None)  # type: ignore[arg-type, method-assign]
    trainer.fit(module)
    assert module.gradients is not None
    return Ran(watch.seen.logged, module.gradients, module.patches)


@functools.cache
def on_one_rank(family: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the first gradient of each tensor on the disk."""
    folder = vision_folder(family)
    (ran,) = run_ranks(1, course, str(folder), Layout(), steps, timeout=120)
    tensors = {name: tensor.mT if ".mlp.experts." in name else tensor for name, tensor in read_tensors(folder)}
    whole = {name: torch.full(tensor.shape, torch.nan) for name, tensor in tensors.items()}
    for part in ran.gradients:
        part.of(whole[part.name]).copy_(part.values)
    return ran.losses, whole


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(*row, id=f"{row[1]}-{row[0].id}", marks=[pytest.mark.thorough] if row in THOROUGH else [])
        for row in LAYOUTS
    ],
)
def test_steps_on_images_are_those_of_one_rank(layout: Layout, family: str) -> None:
    """And so are the first gradients of every weight, the tower's included; the images differ in number and size."""
    ranks = _compare(layout, family, STEPS)
    if layout == Layout(tp=2, sp=True):
        assert [ran.patches[: len(IMAGES)] for ran in ranks] == [[4, 16, 24, 24], [4, 4, 12, 20]]  # 4 are a blank image


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param(Layout(tp=2, sp=True), "qwen3_vl", id="tp2-sp-qwen3_vl"),
        pytest.param(Layout(cp=2), "qwen3_vl", id="cp2-qwen3_vl", marks=pytest.mark.thorough),
        pytest.param(Layout(cp=2), "qwen3_5", id="cp2-qwen3_5"),
    ],
)
def test_gradients_of_packed_rows_are_those_of_one_rank(layout: Layout, family: str) -> None:
    _compare(layout, family, 1, packs=True)


def in_transformers(folder: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of some steps of :func:`trained_by_sgd` with transformers, and the weights after them."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches(model.config.model_type, steps):
        tokens, labels = batch.pop("tokens"), batch.pop("labels")
        logits = model(tokens, mm_token_type_ids=kinds_of(tokens), **batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


class WithSGD(MCoreVisionGPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.SGD(self.parameters(), lr=RATE)


def trained_by_sgd(folder: str, layout: Layout, steps: int, out: str) -> list[float]:
    """Train some steps of one batch, and write the model; return the losses."""
    module, watch = WithSGD.from_pretrained(folder, LENGTH), Watch()
    trainer = make_trainer(
        layout.strategy_arguments, max_steps=steps, callbacks=[watch, SaveHFModel(out)], use_distributed_sampler=False
    )
    found = batches(module.vision.model_type, steps)  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(found, batch_size=None))  # type: ignore[arg-type]
    return watch.seen.logged


@pytest.mark.parametrize("layout", thorough_but([Layout(), Layout(tp=2, sp=True)], "tp2-sp"))
def test_three_steps_of_qwen3_5_and_the_written_model_are_those_of_transformers(layout: Layout, tmp_path: Path) -> None:
    folder, out = vision_folder("qwen3_5"), tmp_path / "out"
    losses, weights = in_transformers(folder, 3)
    for found in run_ranks(layout.world_size, trained_by_sgd, str(folder), layout, 3, str(out), timeout=120):
        print(layout.id, max(map(abs, map(float.__sub__, found, losses))))
        assert found == pytest.approx(losses, abs=1e-5)
    before, worst = dict(read_tensors(folder)), 0.0
    for name, tensor in read_tensors(out):
        moved = (weights[name] - before[name]).abs().max().item()
        # Each step rounds a weight by half of a unit in the last place, here and there
        rounding = 3 * torch.finfo(torch.float32).eps * weights[name].abs().max().item()
        worst = max(worst, ((tensor - weights[name]).abs().max().item() - rounding) / moved)
    print(layout.id, worst)
    assert worst <= 1e-4  # measured: 2e-5


def _compare(layout: Layout, family: str, steps: int, packs: bool = False) -> list[Ran]:
    ranks: list[Ran] = run_ranks(
        layout.world_size, course, str(vision_folder(family)), layout, steps, packs, timeout=120
    )
    check_ranks(ranks, family, layout)
    return ranks


def check_ranks(ranks: list[Ran], family: str, layout: Layout) -> None:
    """Compare what ranks saw with a run on one rank: losses, and gradients by the greatest value of each."""
    losses, gradients = on_one_rank(family, STEPS)
    for ran in ranks:
        assert ran.losses == pytest.approx(losses[: len(ran.losses)], abs=1e-5), layout.id
    assert differing_gradients(gradients, [ran.gradients for ran in ranks], 1e-5) == {}, layout.id


def batches(family: str, count: int) -> list[dict[str, Tensor]]:
    """Return microbatches of two rows; every fourth is text alone."""
    text = {"images": NOTHING, "videos": NOTHING}
    return [vision_batch(family, LENGTH, seed=seed, **(text if seed % 4 == 3 else {})) for seed in range(count)]


def trained(
    folder: str,
    layout: Layout,
    fields: dict[str, Any],
    steps: int,
    microbatches: int,
    split: bool = False,
    transformer_impl: TransformerImpl = "auto",
    **trainer_arguments: Any,
) -> list[Tensor]:
    """Return this rank's weights after some steps; the strategy makes the microbatches if ``split``."""
    fields = {**fields_of(layout), **fields}
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, fields, transformer_impl=transformer_impl)
    found = batches(module.vision.model_type, steps * microbatches)
    if split:
        found = [joined(found[start : start + microbatches]) for start in range(0, len(found), microbatches)]
    trainer = make_trainer(
        MCoreStrategy(**layout.strategy_arguments, micro_batch_size=2 if split else None),
        max_steps=steps,
        accumulate_grad_batches=1 if split else microbatches,
        use_distributed_sampler=False,
        **trainer_arguments,
    )
    trainer.fit(module, DataLoader(found, batch_size=None))  # type: ignore[arg-type]
    return [parameter.detach().clone() for parameter in module.parameters()]


def ways(folder: str, layout: Layout, recomputes: list[dict[str, Any]]) -> list[list[bool]]:
    """Train plainly, with recomputing, and on whole batches; return which weights equal the first bit for bit."""
    plain = trained(folder, layout, {}, 2, 4)
    others = [trained(folder, layout, fields, 2, 4) for fields in recomputes]
    others.append(trained(folder, layout, {}, 2, 4, split=True))
    return [list(map(torch.equal, plain, other)) for other in others]


@pytest.mark.parametrize(
    ("layout", "family", "recomputes"),
    [
        pytest.param(
            Layout(pp=2, first=3), "qwen3_vl", [UNIFORM, {**BLOCK, "recompute_num_layers": 2}], id="pp2-first3-qwen3_vl"
        ),
        pytest.param(
            *(Layout(tp=2, sp=True), "qwen3_vl_moe", [{**UNIFORM, "recompute_num_layers": 2}]),
            id="tp2-sp-qwen3_vl_moe",
            marks=pytest.mark.thorough,
        ),
        pytest.param(Layout(pp=2), "qwen3_5", [{"recompute_granularity": "selective"}], id="pp2-qwen3_5"),
        pytest.param(Layout(pp=2), "qwen3_5", [UNIFORM], id="pp2-qwen3_5-uniform", marks=pytest.mark.thorough),
    ],
)
def test_recomputing_and_micro_batch_size_change_no_bit(
    layout: Layout, family: str, recomputes: list[dict[str, Any]]
) -> None:
    """Outputs from inside the tower belong to the microbatch whose layers are recomputed, and images to their rows."""
    for rank in run_ranks(2, ways, str(vision_folder(family)), layout, recomputes, timeout=120):
        assert all(all(same) for same in rank), rank


def evaluated(folder: str, layout: Layout, rows: int | None) -> tuple[dict[str, float], Tensor]:
    """Validate and predict two batches of eight rows with images, in parts of ``rows``; return what came out."""
    module = MCoreVisionGPT.from_pretrained(folder, LENGTH, fields_of(layout))
    found = batches(module.vision.model_type, 8)
    data: Any = DataLoader([joined(found[:4]), joined(found[4:])], batch_size=None)  # type: ignore[arg-type]
    strategy = MCoreStrategy(**layout.strategy_arguments, micro_batch_size=rows)
    [values] = make_trainer(strategy, use_distributed_sampler=False).validate(module, data, verbose=False)
    strategy = MCoreStrategy(**layout.strategy_arguments, micro_batch_size=rows)
    predicted: Any = make_trainer(strategy, use_distributed_sampler=False).predict(module, data)
    return dict(values), torch.cat(predicted)


@pytest.mark.parametrize("layout", thorough_but([Layout(pp=2, first=3), Layout(cp=2)], "pp2-first3"))
def test_the_parts_of_an_evaluation_batch_have_the_images_of_their_rows(layout: Layout) -> None:
    folder = str(vision_folder("qwen3_vl"))
    [(values, predicted)] = run_ranks(1, evaluated, folder, Layout(), None)
    for rank_values, rank_predicted in run_ranks(2, evaluated, folder, layout, 3, timeout=120):
        assert rank_values == pytest.approx(values, rel=1e-5)
        assert torch.equal(rank_predicted, predicted)
