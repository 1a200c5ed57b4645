# SPDX-License-Identifier: Apache-2.0
"""Models that see equal transformers on every layout: logits, the loss, and the gradient of every weight, in fp32.

A step has four rows: two images, an image and a video, text alone, one image. Each is a microbatch, or two of them
are, as two rows or packed into one with padding between. Measured: logits differ by at most 1.5e-5 where the greatest
is 17, losses by 1e-6, a gradient by 7e-6 of its greatest value.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore.models.vision import MCoreVisionGPT
from tests.parity.hf_training import KeepsGradients, Reference, Seen, differences, whole_logits
from tests.support.hf_models import read_tensors
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer
from tests.support.vision_models import IMAGE_TOKEN, VIDEO_TOKEN, joined, vision_batch, vision_folder

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("vision models")]  # they share runs

LENGTH, PADDING = 48, 4
ROWS: list[tuple[list[Any], list[Any]]] = [
    ([(1, 4, 6), (1, 2, 2)], []),
    ([(1, 6, 4)], [(3, 4, 2)]),
    ([], []),
    ([(1, 4, 4)], []),
]
DENSE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
SPARSE = ("qwen3_vl_moe", "qwen3_5_moe")

LAYOUTS: dict[Layout, tuple[str, ...]] = {
    Layout(): (*DENSE, *SPARSE),
    Layout(tp=2, sp=True): (*DENSE, *SPARSE),
    Layout(tp=2): ("qwen2_vl", "qwen3_5"),
    Layout(pp=2, first=3): ("qwen3_vl", "qwen3_5"),
    Layout(cp=2): ("qwen2_5_vl", "qwen3_vl", "qwen3_5"),
    Layout(tp=2, pp=2, sp=True, first=3): ("qwen2_vl", "qwen3_vl", "qwen3_5"),
    Layout(dp=2, overlap=True): ("qwen2_vl", "qwen3_vl", "qwen3_5"),
    Layout(moe=True, dp=2, ep=2): SPARSE,
}

THOROUGH = (Layout(), Layout(tp=2), Layout(pp=2, first=3), Layout(dp=2, overlap=True))  # parts of other rows


@functools.cache
def rows(family: str) -> list[dict[str, Tensor]]:
    """Return the rows of the step, one batch each."""
    return [
        vision_batch(family, LENGTH, [images], [videos], seed=number) for number, (images, videos) in enumerate(ROWS)
    ]


def packed(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as sequences of one row, each with padding behind it."""
    parts = {name: torch.zeros(1, PADDING, dtype=torch.long) for name in ("tokens", "labels")}
    parts["labels"] -= 100
    row = {name: torch.cat([part for each in batches for part in (each[name], parts[name])], 1) for name in parts}
    count = len(batches)
    boundaries = {
        "cu_seqlens": LENGTH * torch.arange(count + 1)[None],
        "cu_seqlens_padded": (LENGTH + PADDING) * torch.arange(count + 1)[None],
    }
    return {**joined(batches), **row, **boundaries}


@functools.cache
def reference(family: str) -> Reference:
    """Run the step with transformers."""
    from transformers import AutoModelForImageTextToText

    folder = vision_folder(family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = joined(rows(family))
    tokens, labels = batch.pop("tokens"), batch.pop("labels")
    kinds = (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int()
    logits = model.train()(tokens, mm_token_type_ids=kinds, **batch).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    held = {name: _as_on_the_hub(family, name, parameter.grad) for name, parameter in model.named_parameters()}
    return Reference(
        logits.detach(), loss.item(), {name: held[in_memory(name, held)] for name, _ in read_tensors(folder)}
    )


def _as_on_the_hub(family: str, name: str, gradient: Tensor | None) -> Tensor:
    assert gradient is not None, name
    return gradient.mT if family == "qwen3_vl_moe" and ".mlp.experts." in name else gradient


def in_memory(name: str, held: dict[str, Any]) -> str:
    """Return the name of a tensor on the disk as transformers has it in memory."""
    old = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else f"model.{name}"
    return name if name in held else old


class Watched(KeepsGradients, MCoreVisionGPT):
    """Reads the rows, and keeps logits and finished gradients."""

    join: Callable[[list[Any]], Any] | None = None
    rows: list[int]

    def train_dataloader(self) -> DataLoader[Any]:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.rows = list(range(len(ROWS)))[rank::size]
        batches = [rows(self.vision.model_type)[row] for row in self.rows]
        if self.join is not None:
            batches = [self.join(batches[:2]), self.join(batches[2:])]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return whole_logits(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def see(folders: dict[str, str], layout: Layout, packs: bool) -> dict[str, Seen]:
    """Predict with several models and train each for one step, on this rank of a layout."""
    found = {}
    for name, folder in folders.items():
        fields = {} if layout.first is None else {"num_layers_in_first_pipeline_stage": layout.first}
        module: Any = Watched.from_pretrained(folder, seq_length=2 * (LENGTH + PADDING), transformer=fields)
        module.join = packed if packs else joined if layout.world_size > layout.dp else None
        trainer = make_trainer(
            layout.strategy_arguments,
            max_steps=1,
            accumulate_grad_batches=len(ROWS) // layout.dp // (1 if module.join is None else 2),
            use_distributed_sampler=False,
        )
        logits = torch.empty(0) if packs else torch.cat(list(trainer.predict(module)))  # type: ignore[arg-type]
        trainer.fit(module)
        found[name] = Seen(module.rows, logits, float(trainer.callback_metrics["train_loss"]), module.gradients)
    return found


def _row(layout: Layout) -> Any:
    return pytest.param(layout, id=layout.id, marks=[pytest.mark.thorough] if layout in THOROUGH else [])


@pytest.mark.parametrize("layout", [_row(layout) for layout in LAYOUTS])
def test_a_step_with_images_is_that_of_transformers(layout: Layout) -> None:
    _compare(layout, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(tp=2, sp=True), id="tp2-sp", marks=pytest.mark.thorough),
        pytest.param(Layout(cp=2), id="cp2"),
    ],
)
def test_a_step_with_images_in_packed_rows_is_that_of_transformers(layout: Layout) -> None:
    _compare(layout, ("qwen2_5_vl", "qwen3_vl", "qwen3_5"), packs=True)


def _compare(layout: Layout, names: tuple[str, ...], packs: bool = False) -> None:
    folders = {name: str(vision_folder(name)) for name in names}
    ranks = run_ranks(layout.world_size, see, folders, layout, packs, timeout=120)
    wrong = {name: found for name in names if (found := differences(reference(name), [seen[name] for seen in ranks]))}
    assert wrong == {}
