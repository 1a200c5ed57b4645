# SPDX-License-Identifier: Apache-2.0
"""The layer-wise distributed optimizer: each data-parallel rank steps its own share of the parameters, all of each.

Megatron's distributed optimizer cuts parameters into flat ranges, which only an elementwise optimizer can step. Here a
parameter stays whole, so any torch optimizer can be sharded, Muon above all. Gradients are summed on every rank, as
without sharding. Each rank then keeps the fp32 copies and the state of its own parameters only, steps them, and sends
them to the others::

    a group of four matrices with 8, 8, 4 and 4 elements, on two data-parallel ranks
    rank 0 owns 8 and 4, rank 1 owns 8 and 4;  each holds half of the state, and makes half of the step

Megatron's ``LayerWiseDistributedOptimizer`` has the same division, but its own format of checkpoints, and differs
between releases.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mcore.parallel.groups import replicas_of

_SHARED_OUT = "is_shared_out_over_ranks"  # an attribute of the user's optimizer


class LayerWiseShares:
    """Which rank owns which parameter, for an optimizer whose groups keep only those of this rank."""

    def __init__(self, user: Optimizer) -> None:
        """Share out the parameters of the optimizer's groups; ``RuntimeError`` if an earlier run has done so."""
        if getattr(user, _SHARED_OUT, False):
            raise RuntimeError(
                f"configure_optimizers returned the {type(user).__name__} of an earlier run, of whose parameters each"
                " rank kept only its own; return a new one for each run"
            )
        setattr(user, _SHARED_OUT, True)
        self.groups = [list(group["params"]) for group in user.param_groups]  # with all ranks' parameters
        # Ranks that hold the same experts share those; all data- and context-parallel ranks share the other parameters.
        self._owners: dict[dist.ProcessGroup, list[tuple[Tensor, int]]] = defaultdict(list)
        # Of all groups so far: a group for each layer would otherwise give rank 0 the largest matrix of each.
        loads: dict[dist.ProcessGroup, list[int]] = {}
        for group in user.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            of_ranks: dict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
            for parameter in trained:
                of_ranks[replicas_of(parameter)].append(parameter)
            # Frozen parameters stay in every rank's groups; nothing steps or sends them.
            own = {id(parameter) for parameter in group["params"]} - {id(parameter) for parameter in trained}
            for ranks, parameters in of_ranks.items():
                sizes = [parameter.numel() for parameter in parameters]
                owners = assign_owners(sizes, loads.setdefault(ranks, [0] * ranks.size()))
                for parameter, owner in zip(parameters, owners, strict=True):
                    self._owners[ranks].append((parameter, owner))
                    if owner == ranks.rank():
                        own.add(id(parameter))
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]

    @torch.no_grad()
    def send_parameters(self) -> None:
        """Send the parameters that this rank stepped to the ranks that share them, and receive theirs."""
        # Every rank goes through the same parameters in the same order, so that the broadcasts of a group match.
        sent = []
        for ranks, owners in self._owners.items():
            for parameter, owner in owners if ranks.size() > 1 else ():
                sent.append(dist.broadcast(parameter.data, group=ranks, group_src=owner, async_op=True))
        for work in sent:
            work.wait()


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each tensor: the largest first, each to the rank that has the fewest elements so far.

    ``loads`` are the elements of each rank before; they are updated.

    Examples:
        >>> assign_owners([4, 8, 4, 8], loads=[0, 0])
        [0, 0, 1, 1]
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners
