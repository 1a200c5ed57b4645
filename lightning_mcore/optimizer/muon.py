# SPDX-License-Identifier: Apache-2.0
"""Muon for a model's matrices and AdamW for its other parameters, as one torch optimizer.

Muon is meant for hidden matrices; AdamW trains embeddings, output layers, norms and biases. torch has both as separate
optimizers, and Lightning's automatic optimization takes only one. :class:`MuonWithAdamW` combines them into an ordinary
torch optimizer, which runs under ``"auto"``, ``"ddp"`` and ``MCoreStrategy`` with data, pipeline and context
parallelism. It needs complete matrices, so ``rules.py`` rejects it if tensor parallelism or the distributed optimizer
splits them. Megatron's own Muon, which does both, needs the package ``emerging_optimizers`` and is not used.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]

_KIND = "trained_by"


class MuonWithAdamW(Optimizer):
    """Muon for matrices, AdamW for everything else.

    ``MuonWithAdamW(hidden, others, lr=0.02, adamw_lr=3e-4)`` in ``configure_optimizers``; a pipeline stage may leave
    either list empty. Each parameter is one matrix, including Megatron's joint weight of queries, keys and values.

    Args:
        matrices: Parameters of two dimensions, or groups of them with their own values.
        others: All other parameters, or groups of them.
        lr: Learning rate of Muon.
        weight_decay: Decoupled weight decay of Muon.
        momentum: Momentum of Muon.
        nesterov: Whether to use Nesterov momentum.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: ``"original"`` or ``"match_rms_adamw"``; None for torch's default.
        adamw_lr: Learning rate of AdamW.
        adamw_betas: Betas of AdamW.
        adamw_eps: Added to AdamW's denominator.
        adamw_weight_decay: Decoupled weight decay of AdamW.

    Raises:
        ModuleNotFoundError: torch is older than 2.9, which brought Muon.
        ValueError: A matrix does not have two dimensions, or a value is out of its range.

    Examples:
        >>> import torch
        >>> from lightning_mcore import MuonWithAdamW
        >>> layer = torch.nn.Linear(4, 4)
        >>> optimizer = MuonWithAdamW([layer.weight], [layer.bias], lr=0.02, adamw_lr=3e-4)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.0003]
    """

    def __init__(
        self,
        matrices: Parameters,
        others: Parameters,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ModuleNotFoundError(
                f"MuonWithAdamW needs the Muon of torch 2.9 or newer, and {torch.__version__} is installed; update it,"
                " or use AdamW"
            )
        muon = torch.optim.Muon(
            _groups(matrices, "muon"),
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        adamw = AdamW(
            _groups(others, "adamw"),
            lr=adamw_lr,
            betas=adamw_betas,
            eps=adamw_eps,
            weight_decay=adamw_weight_decay,
        )
        # One list of groups for LR schedulers and checkpoints, each marked with the optimizer that steps it.
        self._by_kind: dict[str, Optimizer] = {"muon": muon, "adamw": adamw}
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": lr, _KIND: "adamw"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, step both, and return the closure's result."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for kind, optimizer in self._by_kind.items():
            # At each step, because loading a state replaces the groups and the state of this optimizer.
            optimizer.param_groups = [group for group in self.param_groups if group[_KIND] == kind]
            optimizer.state = self.state
            optimizer.step()
        return result


def _groups(parameters: Parameters, kind: str) -> list[dict[str, Any]]:
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, _KIND: kind} for group in groups]
