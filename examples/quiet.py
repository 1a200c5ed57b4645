# SPDX-License-Identifier: Apache-2.0
"""Hide warnings of other packages that every rank would print and that a reader of the examples cannot fix.

Import this module before Megatron. No warning about the run itself is hidden.
"""

import warnings

for _message in (
    ".*CUDA_DEVICE_MAX_CONNECTIONS.*",  # megatron-core: about GPUs
    ".*cuda_graph_scope.*",  # megatron-core warns about its own default
    ".*reuse_grad_buf_for_mxfp8_param_ag.*",  # megatron-core: about GPU memory
    ".*grad attribute of a Tensor that is not a leaf.*",  # megatron-core: its optimizer's fp32 shards are views
    ".*torch.distributed.*is deprecated.*",  # megatron-core 0.16 with a torch that renames collectives
    ".*isinstance.treespec, LeafSpec.*",  # Lightning with the same torch
    ".*does not have many workers.*",  # Lightning: the windows are in memory, and workers would compete with the ranks
):
    warnings.filterwarnings("ignore", message=_message)
