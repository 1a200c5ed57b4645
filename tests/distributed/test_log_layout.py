# SPDX-License-Identifier: Apache-2.0
"""The layout and the plan of a run reach its loggers once, from rank 0, with the module's hyper-parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from lightning_mcore.callbacks import LogLayout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.toy import Memory, PlainNet, loader, make_trainer

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 64}


class Parameters(Memory):
    """Keeps the hyper-parameters that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def log_hyperparams(self, params: Any) -> None:  # type: ignore[override]
        self.given.append(dict(params))


def logged(strategy: Any, plain: bool = False, **options: Any) -> tuple[list[dict[str, Any]], int]:
    """Train a step on two batches of two rows; return what was logged, and the number of this rank's parameters."""
    module = PlainNet() if plain else MCoreGPT(vocab_size=128, seq_length=8, transformer=SHAPE)
    data: Any = loader(8, 2)
    if not plain:
        row = {"tokens": torch.arange(8), "labels": torch.arange(1, 9)}
        data = DataLoader([row] * 8, batch_size=2)  # type: ignore[arg-type]
    logger = Parameters()
    arguments: dict[str, Any] = {"max_steps": 1, "accumulate_grad_batches": 2}
    make_trainer(strategy, callbacks=[LogLayout(**options)], logger=logger, **arguments).fit(module, data)
    return logger.given, sum(parameter.numel() for parameter in module.parameters())


def logged_on_each() -> dict[str, list[dict[str, Any]]]:
    """Return what is logged on every layout."""
    return {name: logged(layout)[0] for name, layout in LAYOUTS.items()}


def test_the_first_hyper_parameters_have_layout_and_plan_on_rank_0_alone() -> None:
    ranks = run_ranks(2, logged_on_each)
    [(_, parameters)] = run_ranks(1, logged, {})
    for name, layout in LAYOUTS.items():
        first, *rest = ranks[0][name]
        assert ranks[1][name] == rest  # what Lightning itself gives to the loggers of all ranks
        assert first["vocab_size"] == 128
        copies = 2 if name == "dp2" else 1
        assert first["layout"].items() >= {**layout, "data_parallel_size": copies, "world_size": 2}.items()
        plan = first["plan"]
        assert (plan["parameters"], plan["precision"]) == (parameters, "32-true")
        assert (plan["rows_per_step"], plan["tokens_per_step"]) == (4 * copies, 32 * copies)
        assert plan["pipeline_bubble"] == pytest.approx(1 / 3 if name == "pp2" else 0)  # of a step: 1 / (2 + 1)
        assert plan["memory_bytes"] > plan["parameters"] * 4 / 2


@on_ranks(2)
def test_without_a_plan_only_the_layout_is_logged() -> None:
    for given in (logged({}, plan=False), logged({}, plain=True), logged("ddp", plain=True)):
        if dist.get_rank() == 0:
            assert given[0][0]["layout"]["world_size"] == 2
            assert "plan" not in given[0][0]
