# SPDX-License-Identifier: Apache-2.0
"""Which class of this package has certain arguments, for runs and checkpoints that are described as plain data."""

from collections.abc import Collection

from lightning_mcore.models.embedding import MCoreEmbedding
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.models.reranker import MCoreReranker
from lightning_mcore.models.vision import MCoreVisionGPT

_KINDS: dict[str, type[MCoreGPT]] = {
    "preference": MCorePreference,
    "embedding": MCoreEmbedding,
    "reranker": MCoreReranker,
    "vision": MCoreVisionGPT,
}


def kind_of(arguments: Collection[str], otherwise: type[MCoreGPT] = MCoreGPT) -> type[MCoreGPT]:
    """Return the class that alone has one of the arguments; ``otherwise`` if there is none."""
    found = [name for name in _KINDS if name in arguments]
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are given, which are two kinds of model; leave one of them out")
    return _KINDS[found[0]] if found else otherwise
