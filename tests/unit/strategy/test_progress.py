# SPDX-License-Identifier: Apache-2.0
"""How the progress bar writes numbers."""

import math

import pytest

from lightning_mcore.config.text import human


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345, "12.3k"),
        (999.6, "1.00k"),
        (999.4, "999.4"),
        (123456, "123k"),
        (1.5e6, "1.50M"),
        (-2.5e9, "-2.50G"),
        (7e12, "7.00T"),
        (2.31415, "2.314"),
        (0.0123456, "0.01235"),
        (4.1e-5, "4.1e-05"),
        (0, "0"),
        (3, "3"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert human(value) == text
