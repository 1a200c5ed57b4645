# SPDX-License-Identifier: Apache-2.0
"""Level D: a model that was just drawn has what training takes for granted.

All other parity tests begin with common weights, so they cannot see how a layout draws them. Here nothing is filled in:
the weights are compared with those of a Megatron loop that seeds itself as Megatron-LM does, and with what must hold of
random numbers, on every layout of the table and for every kind of model.
"""

import functools
import hashlib
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_mcore import LoRA, MCoreGPT, MCoreModule, MCoreStrategy, single_process
from lightning_mcore.hf import find_family
from lightning_mcore.hf.family import split_fields
from lightning_mcore.hf.source import complete_config
from lightning_mcore.layers.score import ScoreLayer
from lightning_mcore.parallel.random_state import put, take_common
from tests.parity import bare_loop
from tests.parity.global_tensors import Slice, assemble, gradient_slices, weight_slices
from tests.parity.lightning_loop import TinyGPT, make_trainer
from tests.support import tiny
from tests.support.hf_models import CONFIGS, VOCAB_SIZE, tiny_config
from tests.support.layouts import LAYOUTS, ONE_RANK, Layout
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.thorough import thorough_but
from tests.support.tiny import Recipe

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("fresh models")]  # they share runs

SEED = 1234
RECIPE = Recipe(steps=1, global_batch_size=4, token_weighted=True)
STAY = ("dp2", "tp2", "tp2-sp", "pp4", "pp2-vp2", "cp2", "dp2-do-overlap", "moe-tp2-sp-ep2-etp1", "moe-dp2-pp2-ep2")
STAY += ("tied-tp2-sp-pp2", "dp2-tp2-sp-pp2-vp2-do-overlap")

LEARNED_POSITIONS = (("position_embedding_type", "learned_absolute"),)

# What the tiny GPT may have besides, on a layout that cuts it.
OPTIONS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "multi-token": (Layout(pp=2), {"options": (("mtp_num_layers", 1),)}),
    "biases": (Layout(tp=2, pp=2), {"options": (("add_bias_linear", True), ("qk_layernorm", True))}),
    "learned positions": (
        Layout(tp=2, sp=True, pp=2),
        {"model_options": (("position_embedding_type", "learned_absolute"),)},
    ),
    "cpu initialization": (Layout(tp=2, sp=True, pp=2), {"options": (("use_cpu_initialization", True),)}),
}

# A layout for each family that its kind of model allows.
DRAWN = (*ONE_RANK, *(layout for layout in LAYOUTS if layout.sharding is None))  # which is after weights are drawn

FAMILY_LAYOUTS = {
    "llama": Layout(tp=2, pp=2),
    "qwen2": Layout(tp=2, sp=True, pp=2),
    "gemma3_text": Layout(tp=2),
    "olmo2": Layout(tp=2, pp=2),
    "gpt_oss": Layout(dp=2, ep=2),
    "mixtral": Layout(dp=2, pp=2, ep=2),
    "qwen3_moe": Layout(tp=2, sp=True, ep=2, etp=1),
    "deepseek_v3": Layout(dp=2, pp=2, ep=2),
    "glm4_moe": Layout(tp=2, sp=True, pp=2),
    "qwen3_next": Layout(tp=2, sp=True, pp=2),
    "qwen3_5_text": Layout(tp=2, sp=True, pp=2),
}


@dataclass
class Seen:
    """What one rank sees of the first step of a fresh model.

    Attributes:
        weights: Its slices of the weights, after data-parallel copies were made equal.
        gradients: Its slices of the first step's gradients, before clipping.
        trained: Global names of its weights that are trained.
        norm: The norm that the optimizer reports.
        uncalled: Modules with trainable weights of their own that were not called.
        decay: Weight decay of each of its parameters, by name in its chunk.
        shapes: Shape of each of its parameters, by the same names.
    """

    weights: list[Slice] = field(default_factory=list)
    gradients: list[Slice] = field(default_factory=list)
    norm: float = math.nan
    uncalled: list[str] = field(default_factory=list)
    decay: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Look(Callback):
    """Fills a :class:`Seen` during a step."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._waiting: dict[nn.Module, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chunks = trainer.strategy._chunks
        self.seen.weights = weight_slices(chunks.wrapped)
        for chunk in chunks.bare:
            for name, module in chunk.named_modules():
                if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
                    self._waiting[module] = name
                    module.register_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, args: Any) -> None:
        self._waiting.pop(module, None)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.seen.gradients = gradient_slices(trainer.strategy._chunks.ddp)
        names = {p: name for chunk in trainer.strategy._chunks.bare for name, p in chunk.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in names:
                    self.seen.decay[names[parameter]] = group["weight_decay"]
                    self.seen.shapes[names[parameter]] = tuple(parameter.shape)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.norm = trainer.optimizers[0].grad_norm
        self.seen.uncalled = sorted(self._waiting.values())


class FreshGPT(TinyGPT):
    """The tiny GPT as it is drawn."""

    def configure_model(self) -> None:
        fields = tiny.transformer_fields(self.layout, self.recipe)
        self.config = tiny.make_config({**fields, **self.megatron_fields()})
        self.model = self.pipeline(self.build_chunk)


def look(layout: Layout, recipe: Recipe, family: str | None = None, seed: int | None = SEED) -> Seen:
    """Train a fresh model for a step: the tiny GPT, or one of a family."""
    if seed is not None:
        pl.seed_everything(seed, verbose=False)
    rows = recipe.num_microbatches(layout)
    module: MCoreModule = FreshGPT(layout, recipe) if family is None else family_module(family)
    trainer = make_trainer(
        layout.world_size, MCoreStrategy(**layout.strategy_arguments), rows, clip=1.0, limit_train_batches=rows
    )
    callback = Look()
    trainer.callbacks.append(callback)
    trainer.fit(module, None if family is None else DataLoader(text(rows), batch_size=1))
    return callback.seen


def family_module(family: str) -> MCoreGPT:
    known = find_family(family)
    content = {**tiny_config(family).to_dict(), **CONFIGS[family], "model_type": family}
    module, fields = split_fields(known.read_config(complete_config(known, content)))
    return MCoreGPT(**module, seq_length=tiny.SEQ_LENGTH, transformer=fields)


def text(rows: int) -> list[dict[str, Tensor]]:
    drawn = torch.randint(1, VOCAB_SIZE, (rows, tiny.SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in drawn]


def look_at_both(layout: Layout) -> tuple[Seen, list[Slice]]:
    """Train the fresh tiny GPT for a step; return what is seen of it, and the weights that Megatron-LM draws."""
    return look(layout, RECIPE), bare_loop.draw_weights(layout, RECIPE, SEED)


@functools.cache
def _both(layout: Layout) -> list[tuple[Seen, list[Slice]]]:
    return run_ranks(layout.world_size, look_at_both, layout, timeout=180)


@functools.cache
def _fresh(layout: Layout, family: str | None = None, recipe: Recipe = RECIPE) -> list[Seen]:
    if family is None and recipe == RECIPE:
        return [seen for seen, _ in _both(layout)]
    return run_ranks(layout.world_size, look, layout, recipe, family, timeout=120)


# ---- the weights are Megatron-LM's


@pytest.mark.parametrize("layout", thorough_but(DRAWN, "one", *STAY))
def test_a_fresh_model_has_the_weights_that_megatron_lm_draws(layout: Layout) -> None:
    corrected = layout.pp > 1 and layout.ep > 1  # see the next test
    for ours, theirs in _both(layout):
        for mine, other in zip(ours.weights, theirs, strict=True):
            assert (mine.key, mine.index) == (other.key, other.index)
            if not (corrected and "mlp.experts" in mine.key):
                assert torch.equal(mine.data, other.data), f"{mine.key} {mine.index}"


def test_megatron_lm_draws_the_experts_of_two_stages_alike_and_we_do_not() -> None:
    ours, theirs = zip(*_both(Layout(moe=True, dp=2, pp=2, ep=2)), strict=True)
    assert any("experts" in key for names in _equal(list(theirs)) for key, _ in names)
    assert not _equal([seen.weights for seen in ours])


# ---- what must hold of random numbers


@pytest.mark.parametrize("layout", thorough_but(DRAWN, "one", *STAY))
def test_a_fresh_model_is_well_drawn(layout: Layout) -> None:
    _check(_fresh(layout), _fresh(layout.one_rank))


@pytest.mark.parametrize("name", thorough_but(OPTIONS, "multi-token"))
def test_a_fresh_model_with_another_part_is_well_drawn(name: str) -> None:
    layout, options = OPTIONS[name]
    recipe = replace(RECIPE, **options)
    _check(_fresh(layout, recipe=recipe), _fresh(Layout(), recipe=recipe))


def test_a_table_of_positions_that_two_stages_would_hold_is_refused() -> None:
    recipe = replace(RECIPE, options=(("mtp_num_layers", 1),), model_options=LEARNED_POSITIONS)
    with pytest.raises(RanksFailedError, match="learned positions with mtp_num_layers=1 and"):
        run_ranks(4, look, Layout(pp=4), recipe, timeout=60)  # the two stages between have no table


@pytest.mark.parametrize("family", thorough_but(FAMILY_LAYOUTS, "llama", "deepseek_v3", "gpt_oss", "qwen3_next"))
def test_a_fresh_model_of_a_family_is_well_drawn(family: str) -> None:
    ranks = _fresh(FAMILY_LAYOUTS[family], family)
    _check(ranks, _fresh(Layout(), family))
    _check_decay(ranks)


def _check(ranks: list[Seen], one_rank: list[Seen]) -> None:
    weights = _check_copies(ranks)
    assert not _equal([seen.weights for seen in ranks])
    _check_spread(weights, assemble(one_rank[0].weights))
    gradients = assemble(part for seen in ranks for part in seen.gradients)
    without = [name for name, gradient in gradients.items() if not gradient.any()]
    assert not without, f"no gradient: {without}"
    assert {key for seen in ranks for key in seen.uncalled} == set()
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
    for seen in ranks:
        assert seen.norm == pytest.approx(norm, rel=1e-5)  # each element once


def _check_copies(ranks: list[Seen]) -> dict[str, Tensor]:
    """Return the whole weights, of which every rank has its slices, bit for bit."""
    whole = assemble(part for seen in ranks for part in seen.weights)
    differs = {
        part.key for seen in ranks for part in seen.weights if not torch.equal(part.of(whole[part.key]), part.data)
    }
    assert not differs, f"copies differ: {differs}"
    return whole


def _equal(ranks: list[list[Slice]]) -> list[set[tuple[str, str]]]:
    """Return the sets of different places that hold equal random numbers."""
    places = defaultdict(set)
    for slices in ranks:
        for part in slices:
            for row in _rows(part.data):
                places[hashlib.sha256(row.numpy().tobytes()).digest()].add((part.key, str(part.index)))
    return [found for found in places.values() if len(found) > 1]


def _rows(data: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a drawn tensor, none of one that begins as a constant; a rank's fused parts may be swapped."""
    if data.numel() > 8 and data.std() > 0:
        yield from data.contiguous().view(-1, data.shape[-1]) if data.shape[-1] > 4 else [data.contiguous()]


def _check_spread(weights: Mapping[str, Tensor], one_rank: Mapping[str, Tensor]) -> None:
    """Compare mean and deviation of each tensor with those of one rank; six standard errors are allowed."""
    assert weights.keys() == one_rank.keys()
    for name, drawn in weights.items():
        expected, count = one_rank[name], drawn.numel()
        assert drawn.shape == expected.shape
        if not expected.std() > 0:
            assert torch.equal(drawn, expected), name
            continue
        deviation = expected.std().item()
        assert abs(drawn.std().item() - deviation) < 6 * deviation / math.sqrt(count), name
        assert abs(drawn.mean().item() - expected.mean().item()) < 6 * deviation * math.sqrt(2 / count), name


def _check_decay(ranks: list[Seen]) -> None:
    """Biases and vectors do not decay, matrices do, as in Megatron-LM."""
    for seen in ranks:
        assert seen.decay
        for name, decay in seen.decay.items():
            is_vector = name.endswith(".bias") or len(seen.shapes[name]) == 1
            assert (decay == 0) == is_vector, f"{name}: {decay}"


# ---- dropout


@dataclass
class Masks:
    """The state of the generator at each call of dropout on a rank, by kind of dropout, and its place."""

    hidden: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)


def draw_masks(layout: Layout) -> Masks:
    """Train two steps with dropout, and note what each mask is drawn from."""
    pl.seed_everything(SEED, verbose=False)
    masks = Masks()
    hidden, attention = functional.dropout, functional.scaled_dot_product_attention

    def state() -> str:
        return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()

    def noting_hidden(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p and training:
            masks.hidden.append(state())
        return hidden(x, p, training, inplace)

    def noting_attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        if dropout_p:
            masks.attention.append(state())
        return attention(*args, dropout_p=dropout_p, **kwargs)

    functional.dropout, functional.scaled_dot_product_attention = noting_hidden, noting_attention
    try:
        options = (("hidden_dropout", 0.2), ("attention_dropout", 0.2))
        recipe = Recipe(steps=2, global_batch_size=4, options=options)
        strategy = MCoreStrategy(**layout.strategy_arguments)
        make_trainer(layout.world_size, strategy, recipe.num_microbatches(layout)).fit(FreshGPT(layout, recipe))
    finally:
        functional.dropout, functional.scaled_dot_product_attention = hidden, attention
    return masks


@pytest.mark.parametrize(
    ("layout", "hidden_is_alike", "attention_is_alike"),
    [
        (Layout(tp=2), True, False),  # each rank has heads of its own; the hidden states are copies
        (Layout(tp=2, sp=True), False, False),  # and tokens of its own
        (Layout(pp=2), False, False),
        (Layout(dp=2), True, True),  # Megatron-LM's convention: one stream for all copies of a weight
        (Layout(cp=2), True, None),  # likewise, until ranks draw masks of different sizes: their queries see other keys
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_masks_differ_where_ranks_hold_different_parts(
    layout: Layout, hidden_is_alike: bool, attention_is_alike: bool | None
) -> None:
    first, second = run_ranks(2, draw_masks, layout, timeout=120)
    for mine, other, alike in (
        (first.hidden, second.hidden, hidden_is_alike),
        (first.attention, second.attention, attention_is_alike),
    ):
        assert mine
        assert len(set(mine)) == len(mine)  # no mask twice
        if alike is None:
            assert mine[0] == other[0]
        else:
            assert (mine == other) if alike else not set(mine) & set(other)


def restore_on_another_layout(layout: Layout) -> dict[str, str]:
    """Return digests of Megatron's generators after a state from another layout was restored."""
    with bare_loop.process_groups(layout):
        torch.manual_seed(SEED)
        put(take_common(), torch.device("cpu"))
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {name: hashlib.sha256(state.numpy().tobytes()).hexdigest() for name, state in states.items()}


def test_stages_draw_other_masks_after_a_resume_on_another_layout() -> None:
    ranks = run_ranks(8, restore_on_another_layout, Layout(moe=True, pp=2, dp=2, tp=2, ep=2))
    streams = [
        {"tp": rank % 2, "dp": rank // 2 % 2, "pp": rank // 4, "states": states} for rank, states in enumerate(ranks)
    ]
    for one, other in itertools.combinations(streams, 2):
        same = {name for name in one["states"] if one["states"][name] == other["states"][name]}
        is_stage = one["pp"] == other["pp"]
        assert ("data-parallel-rng" in same) == is_stage
        assert ("model-parallel-rng" in same) == (is_stage and one["tp"] == other["tp"])
        assert ("expert-parallel-rng" in same) == (is_stage and (one["tp"], one["dp"]) == (other["tp"], other["dp"]))


# ---- models and runs of one process


@pytest.mark.parametrize("seed", [None, 7])
def test_score_layers_begin_alike_with_the_same_seed_alone(seed: int | None) -> None:
    def draw() -> Tensor:
        if seed is not None:
            pl.seed_everything(seed, verbose=False)
        with single_process():
            return ScoreLayer(tiny.make_config(tiny.TRANSFORMER)).weight.detach()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        one, two = draw(), draw()
    assert torch.equal(one, two) == (seed is not None)


@pytest.mark.parametrize(
    ("seed", "strategy", "alike"),
    [
        (None, "mcore", False),
        (None, "auto", False),
        (7, "auto", False),  # as any module's
        (7, "mcore", True),  # each run begins from the seed, as under "ddp"
    ],
)
@on_ranks(1, timeout=120)
def test_a_second_model_of_a_process_begins_as_under_lightnings_strategies(
    seed: int | None, strategy: str, alike: bool
) -> None:
    if seed is not None:
        pl.seed_everything(seed, verbose=False)
    first = []
    for _ in range(2):
        module = MCoreGPT(
            vocab_size=64,
            seq_length=8,
            transformer={
                **tiny.TRANSFORMER,
                **tiny.EXPERTS,
                "num_layers": 1,
                "qk_layernorm": True,
                "activation_func": "silu",
            },
            lora=LoRA(r=2, target_modules=["q_proj", "o_proj"]),
        )
        kept: dict[str, Tensor] = {}

        class Keep(Callback):
            def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, kept: Any = kept) -> None:
                kept |= {name: p.detach().clone() for name, p in pl_module.named_parameters() if p.std() > 0}

        trainer = make_trainer(1, MCoreStrategy() if strategy == "mcore" else strategy, 1, limit_train_batches=1)
        trainer.callbacks.append(Keep())
        trainer.fit(module, DataLoader([{"tokens": torch.arange(8), "labels": torch.arange(8)}]))
        first.append(kept)
    one, two = first
    assert one.keys() == two.keys()
    assert any(name.endswith("lora_A") for name in one)
    assert any(name.endswith("router.weight") for name in one)
    assert {name for name in one if torch.equal(one[name], two[name])} == (one.keys() if alike else set())
