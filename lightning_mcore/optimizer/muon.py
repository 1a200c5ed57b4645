# SPDX-License-Identifier: Apache-2.0
"""Muon for a model's matrices and AdamW for its other parameters, as one torch optimizer.

Muon is meant for hidden matrices; AdamW trains embeddings, output layers, norms and biases. torch has both as separate
optimizers, and Lightning's automatic optimization takes only one. :class:`MuonWithAdamW` combines them into an ordinary
torch optimizer, which runs under ``"auto"``, ``"ddp"`` and ``MCoreStrategy``.

Muon orthogonalizes the momentum of a complete matrix. Under ``MCoreStrategy``, :func:`place_matrices` tells it which
matrix each parameter is part of, as in Megatron's own Muon, which needs the package ``emerging_optimizers``::

    a matrix split by tensor parallelism     is gathered in bf16, and each rank keeps its own part of the result
    the joint weight of an attention layer   is taken apart into queries, keys and values
    an expert                                is a matrix of its own, as Megatron stores it

With ``MCoreStrategy(use_layer_wise_distributed_optimizer=True)``, each data-parallel rank does this for its own share
of the matrices only (``layer_wise.py``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, _muon

from lightning_mcore.parallel.groups import is_spread_expert, process_group

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]

_KIND = "trained_by"


@dataclass(frozen=True)
class Placement:
    """Which part of which matrices a parameter is; by default one complete matrix."""

    group: dist.ProcessGroup | None = None  # the tensor-parallel ranks that share the parameter; None for one rank
    dim: int = 0  # along which they split it
    rows: tuple[int, ...] = ()  # of queries, keys and values in each query group of an attention layer's joint weight


class MuonWithAdamW(Optimizer):
    """Muon for matrices, AdamW for everything else.

    ``MuonWithAdamW(hidden, others, lr=0.02, adamw_lr=3e-4)`` in ``configure_optimizers``; a pipeline stage may leave
    either list empty.

    Args:
        matrices: Parameters of two dimensions, or groups of them with their own values.
        others: All other parameters, or groups of them.
        lr: Learning rate of Muon.
        weight_decay: Decoupled weight decay of Muon.
        momentum: Momentum of Muon.
        nesterov: Whether to use Nesterov momentum.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: ``"original"`` or ``"match_rms_adamw"``; None for torch's default. The shape is that of the
            complete matrix.
        split_qkv: Under ``MCoreStrategy``, take Megatron's joint weight of queries, keys and values (and the gate) of
            an attention layer as separate matrices.
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
        split_qkv: bool = True,
        adamw_lr: float = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
    ) -> None:
        muon = torch.optim.Muon(  # not stepped: it checks the values and fills the groups with torch's defaults
            _groups(matrices, "muon"),
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        self._adamw = AdamW(
            _groups(others, "adamw"),
            lr=adamw_lr,
            betas=adamw_betas,
            eps=adamw_eps,
            weight_decay=adamw_weight_decay,
        )
        self.split_qkv = split_qkv
        self.placements: dict[Tensor, Placement] = {}  # of parameters that are not one complete matrix
        # One list of groups for LR schedulers and checkpoints, each marked with the optimizer that steps it.
        super().__init__([*muon.param_groups, *self._adamw.param_groups], {"lr": lr, _KIND: "adamw"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, step both, and return the closure's result."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            if group[_KIND] == "muon":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_matrix(parameter, group)
        # At each step, because loading a state replaces the groups and the state of this optimizer.
        self._adamw.param_groups = [group for group in self.param_groups if group[_KIND] == "adamw"]
        self._adamw.state = self.state
        self._adamw.step()
        return result

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter, which has a gradient, as ``torch.optim.Muon`` steps a matrix."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = _orthogonalized(update, self.placements.get(parameter, Placement()), group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])


def _orthogonalized(update: Tensor, placement: Placement, group: dict[str, Any]) -> Tensor:
    """Return this rank's part of the orthogonalized matrices, each times the factor of its shape, in fp32."""
    whole = update.bfloat16()  # in which torch iterates
    if placement.group is not None:
        parts = [torch.empty_like(whole) for _ in range(placement.group.size())]
        dist.all_gather(parts, whole.contiguous(), group=placement.group)
        whole = torch.cat(parts, placement.dim)
    # Two query groups of 4 query rows, 2 of keys and 2 of values: [16, n] becomes [2, 8, n], and then matrices of
    # [8, n], [4, n] and [4, n].
    rows = list(placement.rows) or [whole.size(0)]
    by_query_group = whole.view(-1, sum(rows), whole.size(1))
    done = []
    for matrix in torch.split(by_query_group, rows, dim=1):
        flat = matrix.reshape(-1, matrix.size(2))
        orthogonal = _muon._zeropower_via_newtonschulz(flat, group["ns_coefficients"], group["ns_steps"], group["eps"])
        factor = _muon._adjust_lr(1.0, group["adjust_lr_fn"], flat.shape)
        done.append((orthogonal.float() * factor).view_as(matrix))
    result = torch.cat(done, dim=1).view_as(whole)
    if placement.group is None:
        return result
    return result.chunk(placement.group.size(), placement.dim)[placement.group.rank()]


def place_matrices(optimizer: MuonWithAdamW, chunks: Sequence[nn.Module]) -> None:
    """Tell the optimizer which part of which matrices each parameter of the chunks is."""
    joint = {}
    if optimizer.split_qkv:
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SelfAttention):
                    joint[getattr(module.linear_qkv, "weight", None)] = _rows_of_query_group(module.config)
    for group in optimizer.param_groups:
        for parameter in group["params"] if group[_KIND] == "muon" else ():
            ranks = process_group("expert_tp" if is_spread_expert(parameter) else "tp")
            # Megatron marks a parameter that every rank holds whole with -1, or not at all.
            dim = getattr(parameter, "partition_dim", -1)
            is_split = ranks.size() > 1 and dim >= 0 and parameter.tensor_model_parallel
            optimizer.placements[parameter] = Placement(
                group=ranks if is_split else None, dim=max(dim, 0), rows=joint.get(parameter, ())
            )


def _rows_of_query_group(config: TransformerConfig) -> tuple[int, ...]:
    """Return the rows of queries, gate (if there is one), keys and values; as ``get_query_key_value_tensors`` does."""
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = (queries,) if config.attention_output_gate else ()
    return (queries, *gate, config.kv_channels, config.kv_channels)


def _groups(parameters: Parameters, kind: str) -> list[dict[str, Any]]:
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, _KIND: kind} for group in groups]
