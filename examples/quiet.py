# SPDX-License-Identifier: Apache-2.0
"""Silences what other packages say on every rank and a reader of the examples can do nothing about.

Imported before Megatron. Nothing about the run itself is hidden.
"""

import warnings

for _message in (
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",  # megatron-core: concerns GPUs
    ".*cuda_graph_scope.*",  # megatron-core: warns of its own default
    ".*grad attribute of a Tensor that is not a leaf.*",  # megatron-core: its optimizer's fp32 shards are views
    ".*torch.distributed.*is deprecated.*",  # megatron-core 0.16 under a torch that renames collectives
    ".*isinstance.treespec, LeafSpec.*",  # Lightning under the same torch
    ".*does not have many workers.*",  # Lightning: the windows lie in memory, workers would compete with the ranks
):
    warnings.filterwarnings("ignore", message=_message)
