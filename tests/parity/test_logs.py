# SPDX-License-Identifier: Apache-2.0
"""What is logged is the same number on every layout: losses of all kinds, metrics, norms and counts of tokens.

The rows are as uneven as they can be: full ones, some whose padding fills the share of a rank, one without a loss and
one of padding alone. Measured over the table: 4.8e-7 from one rank, relative to the larger of the value and 1.
"""

import functools
from collections.abc import Iterable
from math import prod
from typing import Any

import pytest
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, Recipe
from lightning_mcore.data.packing.best_fit import TokenSample
from lightning_mcore.data.packing.rows import build_row, collate_padded, collate_rows
from lightning_mcore.layers.metrics import TokensSeen
from lightning_mcore.strategy.progress import StepClock
from tests.parity.global_tensors import fill_weights
from tests.parity.packed import documents
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.toy import Memory, make_trainer

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
ROW = 32
LENGTHS = ((1,), (5, 13, 3), (32,), (9, 9), (2,), (), (1, 16, 7), (30,))
WITHOUT_LOSS = 3  # the row of which no token counts in the loss
STEPS = 2

BALANCED: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.02, 0.02],
    "moe_z_loss_coeff": 0.02,
    "moe_per_layer_logging": True,
}
GLOBAL = BALANCED | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.02}
BIASED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "none",
}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.02}
MICROBATCHES = {"calculate_per_token_loss": False}
AHEAD: dict[str, Any] = {"mtp_num_layers": 2}

DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the model, its other arguments
    "tokens": (AHEAD, {}),
    "samples": ({}, {"loss_normalization": "samples"}),
    "microbatches": (MICROBATCHES, {}),
}
EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "balanced": (BALANCED | AHEAD, {}),
    "balanced, by microbatches": (BALANCED | MICROBATCHES, {}),
    "balanced over all copies": (GLOBAL, {}),
    "biased": (BIASED, {}),
    "biased, by samples": (BIASED, {"loss_normalization": "samples"}),
    "sinkhorn": (SINKHORN, {}),  # its assignment is about the tokens of one rank
}
LAYOUTS = (
    Layout(dp=2, distributed_optimizer=True),
    Layout(tp=2, sp=True),
    Layout(cp=2),
    Layout(pp=2, vp=2),
    Layout(dp=2, cp=2),
    Layout(pp=2, cp=2),
    Layout(moe=True, dp=2, ep=2),
    Layout(moe=True, cp=2, ep=2),
    Layout(moe=True, tp=2, sp=True),
    Layout(moe=True, pp=2),
    Layout(moe=True, tp=2, sp=True, cp=2),
)
THOROUGH = ("dp2-cp2", "pp2-cp2", "moe-tp2-sp-cp2", "moe-dp2-ep2")  # axes that other rows have
PADDED = ("tokens", "balanced", "biased")  # these also with each document in a row of its own, on these layouts
PADDED_LAYOUTS = (
    Layout(),
    Layout(tp=2, sp=True),
    Layout(cp=2),
    Layout(moe=True),
    Layout(moe=True, dp=2, ep=2),
)


class Logging(MCoreGPT):
    """Starts from weights that do not depend on the layout, and has a clock that says 1 s for every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = TokensSeen()

    def configure_model(self) -> None:
        is_new = not hasattr(self, "model")
        super().configure_model()
        if is_new:
            fill_weights(self.model.chunks)

    def on_train_start(self) -> None:
        super().on_train_start()
        seconds = iter(range(1000))
        self._clock = StepClock(now=lambda: float(next(seconds)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(batch)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def biases(self) -> dict[int, list[float]]:
        """Return the bias of the experts in each layer of this rank."""
        routers = [child for child in self.modules() if isinstance(child, TopKRouter) and child.expert_bias is not None]
        return {router.layer_number: router.expert_bias.tolist() for router in routers}


def samples() -> list[list[TokenSample]]:
    """Return the documents of each row."""
    made = [documents(lengths, 10 * row) for row, lengths in enumerate(LENGTHS)]
    for sample in made[WITHOUT_LOSS]:
        sample.loss_mask[:] = False
    return made


def packed_rows() -> list[dict[str, Tensor]]:
    """Return the documents as packed rows; the one without documents is padding alone."""
    rows = []
    for documents_of_row in samples():
        row = build_row(documents_of_row or documents((1,), 0), ROW, 8)
        if not documents_of_row:
            row["cu_seqlens"][:] = 0
            row["loss_mask"][:] = 0
        rows.append(row)
    return rows


def loaders(kind: str) -> tuple[DataLoader[Any], list[DataLoader[Any]]]:
    """Return what to train on, a row or a document in each microbatch, and two sets to validate on."""
    if kind == "packed":
        rows: list[Any] = packed_rows()
        return (
            DataLoader(rows, 1, collate_fn=collate_rows),
            [DataLoader(rows[1:5], 2, collate_fn=collate_rows), DataLoader(rows[4:], 1, collate_fn=collate_rows)],
        )
    collate = functools.partial(collate_padded, multiple=ROW)
    each: list[Any] = [sample for row in samples() for sample in row][:8]
    return (
        DataLoader(each, 1, collate_fn=collate),
        [DataLoader(each[1:5], 2, collate_fn=collate), DataLoader(each[4:], 1, collate_fn=collate)],
    )


Logged = tuple[list[dict[str, float]], dict[str, float], dict[int, list[float]]]


def train(layout: Layout, cases: Iterable[tuple[str, str]]) -> list[Logged]:
    """Train each model; return what loggers got, the last values and the biases of experts on this rank."""
    results = []
    for name, kind in cases:
        fields, arguments = (EXPERTS if layout.moe else DENSE)[name]
        experts = tiny.EXPERTS | {"num_layers": 2} if layout.moe else {}
        transformer = tiny.TRANSFORMER | experts | {"activation_func": "silu"} | fields
        model, memory = (
            Logging(tiny.VOCAB_SIZE, ROW, transformer, recipe=Recipe(learning_rate=1e-3), **arguments),
            Memory(),
        )
        rows, validated = loaders(kind)
        trainer = make_trainer(
            layout.strategy_arguments,
            max_epochs=1,
            accumulate_grad_batches=len(LENGTHS) // STEPS // layout.dp,
            logger=memory,
        )
        trainer.fit(model, rows, validated)
        last = {key: float(value) for key, value in trainer.callback_metrics.items()}
        results.append((memory.rows, last, model.biases()))
    return results


@functools.cache
def _of_one_rank(moe: bool, cases: tuple[tuple[str, str], ...]) -> list[Logged]:
    (results,) = run_ranks(1, train, Layout(moe=moe), cases, timeout=240)
    return results


def _cases(layout: Layout) -> tuple[tuple[str, str], ...]:
    names = list(EXPERTS if layout.moe else DENSE)
    if layout.dp > 1:
        names = [name for name in names if name != "balanced over all copies"]  # it is about all copies' microbatches
    if layout.tp * layout.cp > 1:
        names = [name for name in names if name != "sinkhorn"]
    if layout.vp is not None:
        names = [name for name in names if name not in ("tokens", "balanced")]
    sizes = layout.dp, layout.tp, layout.pp, layout.cp
    if max(sizes) < prod(sizes) or (layout.moe and max(layout.pp, layout.cp) > 1):  # the other layouts weigh losses so
        names = [name for name in names if "microbatches" not in name and ", by " not in name]
    padded = PADDED if layout in PADDED_LAYOUTS else ()
    return tuple((name, kind) for name in names for kind in ("packed", "padded")[: 1 + (name in padded)])


def _in_one_process(moe: bool) -> pytest.MarkDecorator:
    """Return the mark of tests that share a run on one rank, so that it is made once."""
    return pytest.mark.xdist_group("logs of experts" if moe else "logs of dense models")


def _marks(layout: Layout) -> list[pytest.MarkDecorator]:
    return [_in_one_process(layout.moe), *([pytest.mark.thorough] if layout.id in THOROUGH else [])]


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=_marks(layout), id=layout.id) for layout in LAYOUTS])
def test_logged_values_are_those_of_one_rank_on_every_layout(layout: Layout) -> None:
    cases = _cases(layout)
    every = _cases(Layout(moe=layout.moe))
    wanted = dict(zip(every, _of_one_rank(layout.moe, every), strict=True))
    worst: dict[str, float] = {}
    for rank, results in enumerate(run_ranks(layout.world_size, train, layout, cases, timeout=300)):
        for case, (rows, last, biases) in zip(cases, results, strict=True):
            wanted_rows, wanted_last, wanted_biases = wanted[case]
            pairs = [(last, wanted_last)] + (list(zip(rows, wanted_rows, strict=True)) if rank == 0 else [])
            for values, expected in pairs:
                assert sorted(values) == sorted(expected), case
                for key in expected:
                    if key != "model_tflops":  # of a device
                        distance = abs(values[key] - expected[key]) / max(1.0, abs(expected[key]))
                        worst[f"{case}: {key}"] = max(worst.get(f"{case}: {key}", 0.0), distance)
            for layer, bias in biases.items():
                assert bias == pytest.approx(wanted_biases[layer], abs=1e-7), (case, layer)
    print(f"{layout.id}: {max(worst.values()):.1e}")
    assert {key: value for key, value in worst.items() if not value <= TOLERANCE} == {}


@_in_one_process(moe=True)
def test_the_values_say_something() -> None:
    every = _cases(Layout(moe=True))
    for (name, kind), (_, last, biases) in zip(every, _of_one_rank(True, every), strict=True):
        assert all(value == value for value in last.values()), (name, kind, last)
        assert {"train_loss", "grad_norm", "tokens_per_second", "seen"} <= set(last)
        for metric in ("val_loss", "val_perplexity", "val_accuracy"):
            assert {f"{metric}/dataloader_idx_{index}" for index in range(2)} <= set(last)
        assert any(any(bias) for bias in biases.values()) == name.startswith("biased")
        if "balanced" in name:
            assert "z_loss" in last
            assert any(key.startswith("moe/") for key in last)


def biases_of_one_step(kind: str) -> dict[int, list[float]]:
    """Return the biases of experts after one step over all documents."""
    made = [sample for row in samples() for sample in row]
    batches: list[Any] = packed_rows() if kind == "packed" else made
    collate = collate_rows if kind == "packed" else collate_padded
    transformer = tiny.TRANSFORMER | tiny.EXPERTS | {"activation_func": "silu"} | BIASED
    model = Logging(tiny.VOCAB_SIZE, ROW, transformer)
    trainer = make_trainer({}, max_epochs=1, accumulate_grad_batches=len(batches))
    trainer.fit(model, DataLoader(batches, 1, collate_fn=collate))
    return model.biases()


def test_the_bias_of_experts_moves_as_with_the_documents_one_by_one() -> None:
    (packed,) = run_ranks(1, biases_of_one_step, "packed", timeout=120)
    (one_by_one,) = run_ranks(1, biases_of_one_step, "one by one", timeout=120)
    assert packed == one_by_one
    assert any(any(bias) for bias in packed.values())
