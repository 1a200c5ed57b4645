# SPDX-License-Identifier: Apache-2.0
"""Asks an optimizer, by a trial on two small matrices, what it looks at: elements, whole matrices or all parameters.

Under tensor parallelism each rank steps a part of a matrix, and under pipeline parallelism some of the parameters. Both
give the weights of one rank with AdamW, but not with LAMB, which scales a step by norms of the matrix, or with Prodigy,
which estimates one learning rate from all parameters. The wrong weights come without an error, and names do not tell:
bitsandbytes' ``AdamW8bit`` is AdamW, its ``LAMB8bit`` is LAMB. So ``rules.py`` asks here before a run begins.

The trial creates optimizers of the same class and never steps the user's.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LooksAt = Literal["elements", "matrices", "parameters"]
Create = Callable[[list[nn.Parameter]], Optimizer]

_ROWS, _COLUMNS, _STEPS = 4, 6, 10
_TOLERANCE = 1e-3  # of the largest change of a weight; rounding errors are a thousand times smaller


def looks_at(user: Optimizer) -> LooksAt | None:
    """Return what a step of an optimizer of this class looks at; None if it cannot be created or stepped here."""
    accepted = inspect.signature(type(user).__init__).parameters
    arguments = {name: value for name, value in user.defaults.items() if name in accepted}
    arguments |= {"lr": 0.01} if arguments.get("lr") == 0 else {}  # a rate of 0 shows nothing

    def create(parameters: list[nn.Parameter]) -> Optimizer:
        return type(user)(parameters, **arguments)

    device = next((parameter.device for group in user.param_groups for parameter in group["params"]), None)
    on_gpu = device is not None and device.type == "cuda"
    # Not compiled: torchao compiles its step, which takes a minute for the shapes of the trial.
    eagerly = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(), torch.random.fork_rng([device] if on_gpu else []), eagerly:
        warnings.simplefilter("ignore")
        try:
            return _compare(create, device)
        except Exception:  # what another package raises is not known: it may need a closure, a mode, or other arguments
            return None


def _compare(create: Create, device: torch.device | None) -> LooksAt | None:
    """Step two matrices [4, 6] together, apart and as halves, and return what the results depend on."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, _ROWS, _COLUMNS, generator=generator).to(device) * 0.1
    gradients = 1 + torch.randn(_STEPS, *values.shape, generator=generator).to(device)
    # Some gradients are ten times larger, so that no norm, mean or maximum of a half or of one matrix is that of all.
    gradients[..., : _ROWS // 2, : _COLUMNS // 2] *= 10
    gradients[:, 1] *= -10
    together = _changes(create, values, gradients)
    if not _alike(_changes(create, values, gradients), together):
        return None  # it draws random numbers
    apart = torch.cat([_changes(create, values[one], gradients[:, one]) for one in (slice(0, 1), slice(1, 2))])
    if not _alike(apart, together):
        return "parameters"
    for dim in (-1, -2):
        pairs = zip(values.chunk(2, dim), gradients.chunk(2, dim), strict=True)
        if not _alike(torch.cat([_changes(create, half, own) for half, own in pairs], dim), together):
            return "matrices"
    return "elements"


def _changes(create: Create, values: Tensor, gradients: Tensor) -> Tensor:
    """Return how far some steps of one optimizer move matrices [n, r, c]; gradients are [steps, n, r, c]."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = create(parameters)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.stack([parameter.detach() for parameter in parameters]) - values


def _alike(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
