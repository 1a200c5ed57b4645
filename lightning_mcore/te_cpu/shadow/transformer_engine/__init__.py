# SPDX-License-Identifier: Apache-2.0
"""Found before an installed TransformerEngine without its CUDA library; loads it with the kernels of ``te_cpu``."""

import sys

from lightning_mcore.te_cpu.load import load_into

if __name__ == "transformer_engine":
    load_into(sys.modules[__name__])
