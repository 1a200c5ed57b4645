# SPDX-License-Identifier: Apache-2.0
"""The scale of gradients under context parallelism, against a formula.

Megatron multiplies a scalar loss by the context-parallel size and averages gradients over data- and context-parallel
ranks together; token-weighted losses take another path. A factor of cp, or a rank that weighs as much as its peers
though it has fewer tokens, is easily introduced and hard to see in a loss curve. So the model is one whose gradient is
known in closed form: a linear map w with squared error, d loss / d w = sum_t m_t (x_t w - y_t) x_t / sum_t m_t, over
the tokens that the meaning of the loss puts under one denominator.
"""

import pytest
import torch
from torch import Tensor

from tests.parity.linear import LENGTHS, MICRO_BATCH_SIZE, START, Kind, LinearModule, data
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks
from tests.support.toy import make_trainer

pytestmark = pytest.mark.distributed

LAYOUTS = (
    Layout(),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp=2, cp=2),
    Layout(dp=2, cp=2, distributed_optimizer=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
@on_ranks("layout", timeout=180)
def test_gradient_has_the_scale_of_the_formula(layout: Layout) -> None:
    kinds: tuple[Kind, ...] = ("mean of full masks", "masked mean", "token weighted")
    for kind in kinds:
        module = LinearModule(kind)
        num_microbatches = len(LENGTHS) // MICRO_BATCH_SIZE // layout.dp
        options = {"accumulate_grad_batches": num_microbatches, "use_distributed_sampler": False}
        make_trainer(layout.strategy_arguments, **options).fit(module)
        assert module.gradient is not None
        wanted = _analytic_gradient(kind)
        ratio = (module.gradient @ wanted) / (wanted @ wanted)
        assert ratio.item() == pytest.approx(1.0, abs=1e-6), kind
        torch.testing.assert_close(module.gradient, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


def test_the_masks_tell_right_from_wrong() -> None:
    mask = data("masked mean")["loss_mask"]
    assert mask[:MICRO_BATCH_SIZE, 4:12].sum() == 0, "of two context-parallel ranks the second has these tokens"
    by_microbatch, by_token = _analytic_gradient("masked mean"), _analytic_gradient("token weighted")
    assert (by_microbatch - by_token).abs().max() > 0.05 * by_microbatch.abs().max()


def _analytic_gradient(kind: Kind) -> Tensor:
    """Return d loss / d w, from the formula, in fp64."""
    batch = {name: tensor.double() for name, tensor in data(kind).items()}
    error = (batch["x"] @ torch.tensor(START, dtype=torch.float64) - batch["y"]) * batch["loss_mask"]
    by_sequence = (error.unsqueeze(-1) * batch["x"]).sum(1)
    num_tokens = batch["loss_mask"].sum(1)
    if kind == "token weighted":
        return by_sequence.sum(0) / num_tokens.sum()
    sums, counts = by_sequence.unflatten(0, (-1, MICRO_BATCH_SIZE)), num_tokens.unflatten(0, (-1, MICRO_BATCH_SIZE))
    return (sums.sum(1) / counts.sum(1, keepdim=True)).mean(0)
