# SPDX-License-Identifier: Apache-2.0
"""Private names of TransformerEngine that its kernels on the CPU read are there in the release that is installed."""

from pathlib import Path

import pytest
import transformer_engine.pytorch as te

from tests.unit.strategy.test_private_names import OF_TRANSFORMER_ENGINE

SOURCES = [path.read_text(encoding="utf-8") for path in (Path(te.__file__).parent / "tensor").rglob("*.py")]


@pytest.mark.parametrize("name", sorted(OF_TRANSFORMER_ENGINE))
def test_the_name_is_there(name: str) -> None:
    assert any(name in source for source in SOURCES)
