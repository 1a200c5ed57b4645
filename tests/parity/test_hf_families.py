# SPDX-License-Identifier: Apache-2.0
"""Every family equals transformers on every layout: logits, the loss, and each gradient of a training step, in fp32.

``tests/parity/hf_training.py`` has the step and the reference. One start of the ranks of a layout runs all families
that it allows. Measured: logits differ by at most 9e-6, losses by 2e-6, a gradient by 9e-6 of its greatest value.
"""

from collections.abc import Iterable

import pytest

from tests.parity.hf_training import differences, reference, train
from tests.support.hf_models import FAMILIES, VARIANTS, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("families")]  # they share runs

EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe")
DENSE = tuple(name for name in FAMILIES if name not in EXPERTS)
MULTI_TOKEN = ("deepseek_v3, multi-token", "glm4_moe, multi-token")
WINDOWS = ("qwen2, windows", "qwen3, windows", "qwen2_moe, normalised, windows")
TIED = ("llama, tied, wide heads", "qwen2", "glm4_moe, no bias, no norm")

SPLIT = (*WINDOWS, *MULTI_TOKEN, *TIED)  # which differ by layer, or share weights between stages

LAYOUTS: dict[Layout, tuple[str, ...]] = {
    Layout(): (*FAMILIES, *(name for name in SPLIT if name not in FAMILIES)),
    Layout(tp=2): DENSE,  # experts ask for sequence parallelism there
    Layout(tp=2, sp=True): (*EXPERTS, "qwen3"),  # experts are cut like the rest: expert_tensor_parallel_size=2
    Layout(pp=2): FAMILIES,
    Layout(tp=2, pp=2, sp=True): ("qwen2_moe", "deepseek_v3", "mistral", "qwen2"),
    Layout(tp=2, pp=2): ("llama", "qwen3"),
    Layout(cp=2): FAMILIES,
    Layout(moe=True, dp=2, ep=2): EXPERTS,
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1): EXPERTS,
    Layout(moe=True, dp=2, pp=2, ep=2): ("qwen2_moe", "glm4_moe, multi-token"),
    Layout(pp=2, vp=2): ("qwen2", "qwen2_moe", "glm4_moe, multi-token"),
    Layout(pp=2, first=1): ("llama", "qwen2, windows", "deepseek_v3, multi-token"),
    Layout(tp=2, cp=2, sp=True): ("mistral", "deepseek_v3"),
}
STAY: dict[Layout, tuple[str, ...]] = {  # every family is cut into two
    Layout(tp=2): DENSE,
    Layout(tp=2, sp=True): (*EXPERTS, "qwen3"),
    Layout(pp=2): ("qwen2", "deepseek_v3"),
    Layout(cp=2): ("llama", "deepseek_v3"),
    Layout(moe=True, dp=2, ep=2): ("qwen2_moe", "glm4_moe"),
    Layout(moe=True, tp=2, sp=True, ep=2, etp=1): ("mixtral", "deepseek_v3"),
    Layout(pp=2, first=1): ("llama", "deepseek_v3, multi-token"),
}


@pytest.mark.parametrize("layout", STAY, ids=lambda layout: layout.id)
def test_a_step_is_that_of_transformers(layout: Layout) -> None:
    _compare(layout, STAY[layout])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout", [row for row in LAYOUTS if LAYOUTS[row] != STAY.get(row)], ids=lambda layout: layout.id
)
def test_a_step_on_every_layout_is_that_of_transformers(layout: Layout) -> None:
    _compare(layout, [name for name in LAYOUTS[layout] if name not in STAY.get(layout, ())])


@pytest.mark.parametrize("layout", thorough_but([Layout(pp=2), Layout(tp=2, sp=True)], "pp2"))
def test_variants_that_differ_by_layer_are_split_too(layout: Layout) -> None:
    _compare(layout, SPLIT)


def test_a_step_of_every_other_variant_is_that_of_transformers() -> None:
    _compare(Layout(), [name for name in VARIANTS if name not in SPLIT])


def _compare(layout: Layout, names: Iterable[str]) -> None:
    folders = {name: str(tiny_folder(name)) for name in names}
    ranks = run_ranks(layout.world_size, train, folders, layout, timeout=120)
    wrong = {name: found for name in folders if (found := differences(reference(name), [seen[name] for seen in ranks]))}
    assert wrong == {}
