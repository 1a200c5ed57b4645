# SPDX-License-Identifier: Apache-2.0
"""Prepares what the first use of the GPU and of the compiler change for good in a process, and makes fp32 exact."""

import os

# Before the first product: TransformerEngine multiplies fp32 in TF32 whatever torch is told, and rounding by 1e-3 sends
# tokens to other experts.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

import pytest
import torch
from torch._dynamo.mutation_guard import install_generation_tagging_init


@pytest.fixture(scope="session", autouse=True)
def process_is_prepared() -> None:
    """Make CUDA's generators, and let torch.compile wrap ``Module.__init__``: a test may not leave them changed."""
    if torch.cuda.is_available():
        torch.cuda.init()
    install_generation_tagging_init()
