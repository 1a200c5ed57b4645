# SPDX-License-Identifier: Apache-2.0
"""Prepares what the first compiled function of a process changes for good."""

import pytest
from torch._dynamo.mutation_guard import install_generation_tagging_init


@pytest.fixture(scope="session", autouse=True)
def modules_are_tagged() -> None:
    """Let torch.compile wrap ``Module.__init__`` before the first test, which may not leave it changed."""
    install_generation_tagging_init()
