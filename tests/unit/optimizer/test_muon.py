# SPDX-License-Identifier: Apache-2.0
"""``MuonWithAdamW`` on one rank steps as ``torch.optim.Muon`` and ``AdamW`` do, iterating in bf16 as they do.

``tests/parity/test_muon.py`` compares it on every layout, iterating in fp64.
"""

import torch
from torch import nn

from lightning_mcore import MuonWithAdamW


def test_steps_are_those_of_torch() -> None:
    shapes = {"wide": (8, 24), "tall": (24, 8), "bias": (24,)}
    generator = torch.Generator().manual_seed(0)
    starts = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    ours = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    theirs = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
    optimizer = MuonWithAdamW(
        [ours["wide"], ours["tall"]], [ours["bias"]], lr=0.02, weight_decay=0.1, adamw_lr=0.01, adamw_weight_decay=0.1
    )
    muon = torch.optim.Muon([theirs["wide"], theirs["tall"]], lr=0.02, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs["bias"]], lr=0.01, betas=optimizer.param_groups[-1]["betas"], weight_decay=0.1)
    for _ in range(3):
        for name, shape in shapes.items():
            ours[name].grad = torch.randn(shape, generator=generator)
            theirs[name].grad = ours[name].grad.clone()  # type: ignore[union-attr] # set in the line above
        optimizer.step()
        muon.step()
        adamw.step()
    for name in shapes:
        # torch multiplies learning rate and factor of the shape before the matrix, so fp32 rounds elsewhere. Another
        # rounding to bf16 would show as 0.02 * 2**-8, which is 8e-5.
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)
        assert not torch.equal(ours[name], starts[name]), name
