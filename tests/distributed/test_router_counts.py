# SPDX-License-Identifier: Apache-2.0
"""The layers of a microbatch share the number of its real tokens."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from tests.support.ranks import run_ranks
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

LENGTH, VOCABULARY, LAYERS = 16, 64, 3
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def counted(layout: dict[str, Any], fields: dict[str, Any]) -> list[int]:
    """Return what the routers have summed over ranks in a step of two microbatches with 8 and 5 real tokens a row."""
    sums: list[int] = []
    all_reduce = dist.all_reduce

    def noting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = all_reduce(tensor, *args, **kwargs)
        if sys._getframe(1).f_code.co_filename.endswith("layers/router.py"):
            sums.append(int(tensor))
        return result

    dist.all_reduce = noting
    tokens = torch.arange(LENGTH).expand(2, LENGTH)
    batches: Any = [{"tokens": tokens, "labels": tokens, "lengths": torch.tensor([n, n])} for n in (8, 5)]
    trainer = make_trainer(layout, max_steps=1, accumulate_grad_batches=2)
    trainer.fit(MCoreGPT(VOCABULARY, LENGTH, SIZES | fields), DataLoader(batches, batch_size=None))
    dist.all_reduce = all_reduce
    return sums


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layers_of_a_microbatch_count_once(name: str) -> None:
    for sums in run_ranks(2, counted, LAYOUTS[name], {}):
        assert sums == [16, 10]


def test_recomputed_layers_do_not_count_again() -> None:
    for sums in run_ranks(2, counted, LAYOUTS["tp2-sp"], RECOMPUTE):
        assert sums == [16, 10]
