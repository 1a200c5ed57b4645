# SPDX-License-Identifier: Apache-2.0
"""The parts that Megatron's optimizer is chained of.

Megatron makes one optimizer for the dense parameters and another for the experts, chains them, and returns one alone
where there is nothing to chain. A rank without parameters for a part holds a stub in its place. Who steps, saves or
scales goes over the parts.
"""

from megatron.core.optimizer.optimizer import MegatronOptimizer


def optimizer_parts(megatron: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the parts of Megatron's optimizer, stubs included, in its order; itself where it is not chained."""
    return list(getattr(megatron, "chained_optimizers", [megatron]))
