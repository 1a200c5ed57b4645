# SPDX-License-Identifier: Apache-2.0
"""Any layout loads what any other layout saved: weights and optimizer state bit for bit, and the run goes on.

Every layout of a table trains two steps, saves and is done. One rank then loads each checkpoint; every other layout
loads that of the layout before it in the table and that of the most ranks, and trains one step more from one of them:
what it holds is the same, bit for bit, whatever it loaded. (That a layout goes on from its own is the claim of
``test_checkpoint.py``.) What is loaded is compared in global terms with what was saved, as Megatron's own
``sharded_state_dict`` of model and optimizer describe them (its distributed optimizer gathers the shards, ours reads
them in place, so the two are independent). The next loss and gradient norm are compared with a run on one rank that was
never interrupted, within the tolerance of ``tests/parity/test_layouts.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from lightning_mcore.checkpoint.optimizer_state import identity_of, shares_of
from lightning_mcore.parallel.fully_sharded import FullyShardedChunk
from tests.parity.bare_loop import process_groups
from tests.parity.global_tensors import Slice, assemble, moments_of_shards, spread, state_slices, weight_slices
from tests.parity.lightning_loop import TinyGPT
from tests.support import toy
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.tiny import DELTA_NET, KIMI_DELTA, Recipe

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # of tests/parity/test_layouts.py, whose measured spread is 2e-7 in the loss

DENSE = (
    Layout(),
    Layout(dp=2, distributed_optimizer=True),
    Layout(dp=2, sharding="optim_grads_params"),
    Layout(dp=4, distributed_optimizer=True, overlap=True),
    Layout(tp=2, sp=True),
    Layout(pp=2, vp=2),
    Layout(dp=2, tp=2, sp=True, sharding="optim_grads_params"),
    Layout(cp=2, distributed_optimizer=True),
    Layout(dp=2, layer_wise=True),
    Layout(tp=2, sp=True, dp=2, pp=2, distributed_optimizer=True),
)
EXPERTS = (
    Layout(moe=True),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, dp=2, distributed_optimizer=True),
    Layout(moe=True, dp=4, ep=2, layer_wise=True),
    Layout(moe=True, dp=4, ep=2, sharding="optim_grads_params"),
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1),
    Layout(moe=True, dp=2, pp=2, ep=2, distributed_optimizer=True),
)
RECIPE = Recipe(steps=1, global_batch_size=4, eps=1e-4)  # eps for the reason given in tests/parity/test_layouts.py


@dataclass(frozen=True)
class State:
    """What a rank holds, in global terms.

    Args:
        weights: Its slices of the weights.
        optimizer: Its slices of the optimizer's state.
        steps: The optimizer's count of steps.
    """

    weights: Sequence[Slice]
    optimizer: Sequence[Slice]
    steps: float


@dataclass(frozen=True)
class Loaded:
    """What a rank holds after loading, and loss and gradient norm of its next step."""

    state: State
    losses: list[float]
    grad_norms: list[float]


class Watch(pl.Callback):
    """Looks at the state when training begins, and at the losses.

    Args:
        trains: Whether training goes on then.
    """

    def __init__(self, trains: bool = True) -> None:
        self.trains = trains
        self.before: State | None = None
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = state_of(trainer)
        trainer.should_stop = not self.trains

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)
            self.grad_norms.append(trainer.optimizers[0].grad_norm)  # type: ignore[attr-defined]


def state_of(trainer: pl.Trainer) -> State:
    """Return the weights and the optimizer's state, as Megatron describes them."""
    strategy = trainer.strategy
    chunks = strategy._chunks.bare  # type: ignore[attr-defined]
    described = ensure_metadata_has_dp_cp_group(None)  # GPTModel of 0.16 looks into it, with multi-token prediction
    model = {f"model{index}": chunk.sharded_state_dict(metadata=described) for index, chunk in enumerate(chunks)}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    [steps] = {float(state["step"]) for state in trainer.optimizers[0].state.values()}  # type: ignore[attr-defined]
    wrapped = strategy._chunks.wrapped[0]  # type: ignore[attr-defined]
    if isinstance(wrapped, FullyShardedChunk):
        moments = moments_of_shards(wrapped, trainer.optimizers[0])
        return State(weight_slices(chunks), moments, steps)
    with strategy.runtime():  # type: ignore[attr-defined]
        optimizer = strategy.optimizers[0].megatron.sharded_state_dict(model, metadata=metadata)  # type: ignore[attr-defined]
    state = [part for part in state_slices(optimizer) if ".exp_avg" in part.key or "param." in part.key]
    moments = [replace(part, key=part.key.replace(".state.fp32_param.", ".state.param.")) for part in state]
    return State(weight_slices(chunks), moments, steps)


def make_trainer(layout: Layout, max_epochs: int, precision: Any, watch: pl.Callback) -> pl.Trainer:
    """Return a quiet trainer, of which an epoch is one step."""
    return toy.make_trainer(
        layout.strategy_arguments,
        precision=precision,
        max_epochs=max_epochs,
        accumulate_grad_batches=RECIPE.num_microbatches(layout),
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        callbacks=[watch],
    )


class Saved(pl.Callback):
    """Saves after the last epoch and keeps what was saved."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.state: State | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.state = state_of(trainer)
        trainer.save_checkpoint(self.path)


def save(layout: Layout, path: str, precision: Any = "32-true", recipe: Recipe = RECIPE) -> State:
    """Train two steps on this rank and save."""
    saved = Saved(path)
    make_trainer(layout, 2, precision, saved).fit(TinyGPT(layout, recipe))
    assert saved.state is not None
    return saved.state


def load(
    layout: Layout,
    paths: Mapping[str, str],
    precision: Any = "32-true",
    trained: str | None = None,
    recipe: Recipe = RECIPE,
) -> dict[str, Loaded]:
    """Load each checkpoint into a new run on this rank, and train one step more from the one named ``trained``."""
    results = {}
    for name, path in paths.items():
        watch = Watch(name == trained)
        make_trainer(layout, 3, precision, watch).fit(TinyGPT(layout, recipe), ckpt_path=path)
        assert watch.before is not None
        results[name] = Loaded(watch.before, watch.losses, watch.grad_norms)
    return results


def train_on(layout: Layout, recipe: Recipe) -> tuple[float, float]:
    """Return loss and gradient norm of the third step of a run that is never interrupted."""
    watch = Losses()
    make_trainer(layout, 3, "32-true", watch).fit(TinyGPT(layout, recipe))
    return watch.losses[-1], watch.grad_norms[-1]


class Losses(Watch):
    """Looks at the losses alone: before the first step there is no state."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


@dataclass(frozen=True)
class Whole:
    """A checkpoint: where it is, and what was saved."""

    path: str
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    steps: float


def loaded_on(index: int, layouts: Sequence[Layout]) -> list[str]:
    """Return the names of the checkpoints that a layout of a table loads."""
    widest = max(layouts, key=lambda layout: layout.world_size)
    chosen = layouts if index == 0 else [layouts[index - 1], widest]
    return [layout.id for layout in dict.fromkeys(chosen)]


def save_on(layout: Layout, path: str, precision: Any = "32-true", recipe: Recipe = RECIPE) -> Whole:
    """Save on a layout and return what was saved as a whole."""
    ranks = run_ranks(layout.world_size, save, layout, path, precision, recipe, timeout=120)
    weights, optimizer = (assemble(s for rank in ranks for s in getattr(rank, k)) for k in ("weights", "optimizer"))
    return Whole(path, weights, optimizer, ranks[0].steps)


def table(*ids: str) -> tuple[Layout, ...]:
    """Return some of the layouts."""
    return tuple(layout for layout in (*DENSE, *EXPERTS) if layout.id in ids)


DELTA_NETS = replace(RECIPE, options=(("num_layers", 2), ("delta_net", DELTA_NET)))
KIMI = replace(RECIPE, options=(("num_layers", 2), ("kimi_delta", KIMI_DELTA)))

TABLES = (
    pytest.param(
        (table("one", "dp2-do", "dp2-optim_grads_params", "tp2-sp", "pp2-vp2", "dp2-lw", "cp2-do"), RECIPE), id="dense"
    ),
    pytest.param((table("moe", "moe-tp2-sp-ep2-etp1", "moe-dp4-ep2-lw", "moe-dp2-pp2-ep2-do"), RECIPE), id="experts"),
    pytest.param(((Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)), DELTA_NETS), id="delta-nets"),
    pytest.param(((Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2)), KIMI), id="kimi-delta"),
    pytest.param((DENSE, RECIPE), marks=pytest.mark.thorough, id="dense-all"),
    pytest.param((EXPERTS, RECIPE), marks=pytest.mark.thorough, id="experts-all"),
)


@pytest.fixture(scope="module", params=TABLES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save once on every layout of a table."""
    folder = tmp_path_factory.mktemp("layouts")
    layouts, recipe = request.param
    wholes = {layout.id: save_on(layout, str(folder / f"{layout.id}.ckpt"), recipe=recipe) for layout in layouts}
    [reference] = run_ranks(1, train_on, layouts[0].one_rank, recipe)
    return layouts, recipe, wholes, reference


def test_a_layout_loads_what_others_saved(saved: Any) -> None:
    layouts, recipe, wholes, (loss, grad_norm) = saved
    assert len(wholes) == len(layouts)
    for index, layout in enumerate(layouts):
        paths = {name: wholes[name].path for name in loaded_on(index, layouts)}
        trained = layouts[index - 1].id
        ranks = run_ranks(layout.world_size, load, layout, paths, trained=trained, recipe=recipe, timeout=300)
        for name in paths:
            what = f"{name} on {layout.id}"
            for rank in ranks:
                check_state(rank[name].state, wholes[name], what)
                assert len(rank[name].losses) == (name == trained), what
        what = f"{trained} on {layout.id}"
        for rank in ranks:
            assert rank[trained].grad_norms == pytest.approx([grad_norm], rel=TOLERANCE), what
        # the loss of a rank is that of its own sequences
        assert fmean(rank[trained].losses[0] for rank in ranks) == pytest.approx(loss, rel=TOLERANCE), what


def check_state(state: State, whole: Whole, what: str) -> None:
    """Compare bit for bit."""
    assert state.steps == whole.steps == 2, what
    # In fp32 the unsharded optimizer steps the weights themselves, so that there is no copy of them.
    expected = {**{f"optimizer.state.param.{key}": weight for key, weight in whole.weights.items()}, **whole.optimizer}
    for slices, wanted in ((state.weights, whole.weights), (state.optimizer, expected)):
        assert slices, what
        for part in slices:
            assert torch.equal(part.data, part.of(wanted[part.key])), f"{part.key}: {what}"


# Other precisions


HALF = (
    Layout(dp=2, distributed_optimizer=True),
    Layout(dp=2, sharding="optim_grads_params"),
    Layout(pp=2, vp=2, dp=2, distributed_optimizer=True, overlap=True),
    Layout(tp=2, sp=True),
    Layout(dp=2, layer_wise=True),
)


@pytest.fixture(scope="module")
def saved_in_half(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """Save once on some layouts in bf16."""
    folder = tmp_path_factory.mktemp("half")
    return {layout.id: save_on(layout, str(folder / f"{layout.id}.ckpt"), "bf16-mixed") for layout in HALF}


def test_copies_in_fp32_go_from_layout_to_layout(saved_in_half: dict[str, Whole]) -> None:
    for index, layout in enumerate(HALF):
        paths = {name: saved_in_half[name].path for name in loaded_on(index, HALF)}
        for rank in run_ranks(layout.world_size, load, layout, paths, "bf16-mixed", timeout=120):
            for name, loaded in rank.items():
                assert any(".param." in part.key for part in loaded.state.optimizer)
                check_state(loaded.state, saved_in_half[name], f"{name} on {layout.id}")


def test_a_run_in_fp32_takes_the_copies_for_its_weights(saved_in_half: dict[str, Whole]) -> None:
    paths = {name: whole.path for name, whole in saved_in_half.items()}
    for layout in (Layout(), Layout(dp=2, distributed_optimizer=True), Layout(dp=2, sharding="optim_grads_params")):
        for rank in run_ranks(layout.world_size, load, layout, paths, "32-true", timeout=120):
            for name, loaded in rank.items():
                copies = saved_in_half[name].optimizer
                weights = {key: copies[f"optimizer.state.param.{key}"] for key in saved_in_half[name].weights}
                assert any(not torch.equal(weights[key], saved_in_half[name].weights[key]) for key in weights)
                check_state(loaded.state, replace(saved_in_half[name], weights=weights), f"{name} on {layout.id}")


def test_a_run_in_fp16_rounds_the_copies_of_bf16_for_its_weights(saved_in_half: dict[str, Whole]) -> None:
    check_rounded(
        saved_in_half,
        (
            Layout(tp=2),
            Layout(dp=2, distributed_optimizer=True, overlap=True),
            Layout(dp=2, pp=2, vp=2, distributed_optimizer=True),  # a rank's share of the copies ends within a tensor
        ),
        "16-true",
        torch.float16,
    )


def test_a_run_in_bf16_rounds_the_copies_of_fp16_for_its_weights(tmp_path: Path) -> None:
    whole = save_on(Layout(tp=2), str(tmp_path / "fp16.ckpt"), "16-true")
    layouts = (Layout(dp=2, distributed_optimizer=True), Layout(dp=2, sharding="optim_grads_params"))
    check_rounded({"fp16": whole}, layouts, "bf16-true", torch.bfloat16)


def check_rounded(wholes: dict[str, Whole], layouts: Sequence[Layout], precision: str, dtype: torch.dtype) -> None:
    """Load checkpoints in another 16-bit precision, and compare the weights with the copies, rounded once."""
    paths = {name: whole.path for name, whole in wholes.items()}
    for layout in layouts:
        for rank in run_ranks(layout.world_size, load, layout, paths, precision, timeout=120):
            for name, loaded in rank.items():
                copies = {key: wholes[name].optimizer[f"optimizer.state.param.{key}"] for key in wholes[name].weights}
                weights = {key: copy.to(dtype).float() for key, copy in copies.items()}
                check_state(loaded.state, replace(wholes[name], weights=weights), f"{name} on {layout.id}")


def test_a_run_in_bf16_takes_the_weights_of_fp32_for_its_copies(tmp_path: Path) -> None:
    whole = save_on(Layout(pp=2), str(tmp_path / "fp32.ckpt"), "32-true")
    for layout in (Layout(tp=2), Layout(dp=2, distributed_optimizer=True), Layout(dp=2, sharding="optim_grads_params")):
        for rank in run_ranks(layout.world_size, load, layout, {"fp32": whole.path}, "bf16-mixed", timeout=120):
            rounded = {key: weight.bfloat16().float() for key, weight in whole.weights.items()}
            copies = {f"optimizer.state.param.{key}": weight for key, weight in whole.weights.items()}
            wanted = replace(whole, weights=rounded, optimizer={**copies, **whole.optimizer})
            check_state(rank["fp32"].state, wanted, layout.id)


# Layers that are not trained


class FrozenLayer(TinyGPT):
    """The tiny GPT without training its first layer, which shares its tensors with the others in a checkpoint."""

    def configure_model(self) -> None:
        super().configure_model()
        for child in self.modules():
            if isinstance(child, TransformerLayer) and child.layer_number == 1:
                child.requires_grad_(False)


def save_frozen(layout: Layout, path: str, precision: Any = "32-true") -> None:
    """Train two steps on this rank and save."""
    trainer = make_trainer(layout, 2, precision, pl.Callback())
    trainer.fit(FrozenLayer(layout, RECIPE))
    trainer.save_checkpoint(path)


def load_frozen(layout: Layout, path: str | None, precision: Any = "32-true") -> tuple[float, list[Slice], list[Slice]]:
    """Train the third step on this rank, resumed or not; return the norm, the weights and the frozen ones."""
    watch = Losses()
    module = FrozenLayer(layout, RECIPE)
    make_trainer(layout, 3, precision, watch).fit(module, ckpt_path=path)
    with process_groups(layout):
        weights = weight_slices(module.model.chunks)
        frozen = [s for s in weights if s.key.startswith("decoder.layers.") and s.index[0] == 0]
        return watch.grad_norms[-1], weights, frozen


def test_a_frozen_layer_among_trained_ones_goes_from_layout_to_layout(tmp_path: Path) -> None:
    layouts = (Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=2, distributed_optimizer=True))
    if hasattr(DistributedDataParallelConfig, "megatron_fsdp_main_params_dtype"):  # since 0.19 it holds frozen ones
        layouts += (Layout(dp=2, sharding="optim_grads_params"),)
    [(grad_norm, weights, frozen)] = run_ranks(1, load_frozen, Layout(), None, timeout=120)
    whole = assemble(weights)
    assert frozen
    for saving, loading in zip(layouts, layouts[1:] + layouts[:1], strict=True):
        path, what = str(tmp_path / f"{saving.id}.ckpt"), f"{saving.id} on {loading.id}"
        run_ranks(saving.world_size, save_frozen, saving, path, timeout=120)
        for norm, slices, kept in run_ranks(loading.world_size, load_frozen, loading, path, timeout=120):
            assert norm == pytest.approx(grad_norm, rel=TOLERANCE), what
            assert all(torch.equal(part.data, part.of(whole[part.key])) for part in kept), what
            held = {part.key: whole[part.key] for part in slices}  # a stage has not all of the tensors
            assert max(spread(slices, held).values()) <= TOLERANCE, what


def test_a_frozen_layer_goes_from_layout_to_layout_in_bf16(tmp_path: Path) -> None:
    # Only with the layer-wise optimizer are frozen parameters in the groups of an optimizer that steps copies.
    layouts = (Layout(dp=2, layer_wise=True), Layout(tp=2, sp=True))
    [(_, weights, _)] = run_ranks(1, load_frozen, Layout(), None, "bf16-mixed", timeout=120)
    whole = assemble(weights)
    for saving in layouts:
        path = str(tmp_path / f"{saving.id}.ckpt")
        run_ranks(saving.world_size, save_frozen, saving, path, "bf16-mixed", timeout=120)
        for loading in [layout for layout in layouts if layout != saving]:
            for _, _, kept in run_ranks(loading.world_size, load_frozen, loading, path, "bf16-mixed", timeout=120):
                assert kept
                assert all(torch.equal(part.data, part.of(whole[part.key])) for part in kept), loading.id


def unfreeze(layout: Layout, path: str) -> list[set[float]]:
    """Resume with the first layer trained too; return the steps of its parameters and of the others."""
    module = TinyGPT(layout, RECIPE)
    watch = Steps()
    make_trainer(layout, 3, "32-true", watch).fit(module, ckpt_path=path)
    return [watch.of_first_layer, watch.of_others]


class Steps(pl.Callback):
    """Looks at the optimizer's count of steps."""

    def __init__(self) -> None:
        self.of_first_layer: set[float] = set()
        self.of_others: set[float] = set()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        chunks = strategy._chunks.bare  # type: ignore[attr-defined]
        state = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
        for share in shares_of(strategy.optimizers[0], state):
            is_first = share.sharded.key.startswith("decoder.layers.") and identity_of(share.sharded).endswith("@0")
            (self.of_first_layer if is_first else self.of_others).add(float(share.numbers()["step"]))


def test_a_layer_that_is_trained_after_a_resume_begins_with_a_fresh_state(tmp_path: Path) -> None:
    path = str(tmp_path / "frozen.ckpt")
    run_ranks(2, save_frozen, Layout(tp=2, sp=True), path, timeout=120)
    for layout in (Layout(dp=2, distributed_optimizer=True), Layout(tp=2, sp=True)):
        first, second = run_ranks(2, unfreeze, layout, path, timeout=120)
        assert first[0] | second[0] == {1.0}, layout.id
        assert first[1] | second[1] == {3.0}, layout.id
