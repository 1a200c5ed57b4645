# SPDX-License-Identifier: Apache-2.0
"""Warnings of other packages that an ordinary run causes, and that its user cannot do anything about.

Every rank would print them: 29 lines in a run of 20 steps on four CPU ranks. ``MCoreStrategy``, ``MCoreGPT`` and the
command line hide them. The filters come after the user's own, so ``python -W default`` shows them all. No warning about
the run itself is hidden.
"""

import warnings

import torch

_PACKAGE = f"{__name__.partition('.')[0]}."
_EVERYWHERE = (
    ".*MimoModelConfig is experimental.*",  # megatron-core 0.19 imports it for every optimizer
    ".*cuda_graph_scope.*",  # megatron-core warns of its own default
    ".*grad attribute of a Tensor that is not a leaf.*",  # the fp32 shards of megatron-core's optimizer are views
    ".*torch.distributed.*is deprecated.*",  # megatron-core 0.16 under a torch that renames collectives
    ".*isinstance.treespec, LeafSpec.*",  # Lightning under the same torch
    ".*Total length of `list` across ranks is zero.*",  # there are no validation files
)
_ON_A_CPU = (
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",
    ".*reuse_grad_buf_for_mxfp8_param_ag.*",  # megatron-core: about GPU memory
)


_OF_METHODS = {  # by the method that Lightning warns of
    "on_before_batch_transfer": ".*You have overridden `on_before_batch_transfer`.*",
    "validation_step": ".*You defined a `validation_step` but have no `val_dataloader`.*",
}


def ignore_known_warnings() -> None:
    """Hide the warnings in this process from now on."""
    _ignore(*_EVERYWHERE, *(() if torch.cuda.is_available() else _ON_A_CPU))


def ignore_warnings_of_methods(kind: type) -> None:
    """Hide Lightning's warnings of the methods that a module's class has from this package, not from its user."""
    _ignore(*(text for name, text in _OF_METHODS.items() if getattr(kind, name).__module__.startswith(_PACKAGE)))


def _ignore(*messages: str) -> None:
    for message in messages:
        warnings.filterwarnings("ignore", message=message, append=True)
