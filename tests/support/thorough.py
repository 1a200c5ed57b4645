# SPDX-License-Identifier: Apache-2.0
"""What ``make test`` leaves to ``make test-thorough``: rows of a product whose claim a row that stays proves too."""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough_but(table: Iterable[Any], *stay: str | int) -> list[Any]:
    """Return the rows of a parametrized product, all but some of them marked ``thorough``.

    Args:
        table: Names or numbers, or objects with an ``id``.
        stay: The names, or ids, of the rows that stay in ``make test``.

    Returns:
        The parameters, under their names.

    Raises:
        ValueError: A row that is to stay is not in the table.
    """
    rows = {getattr(row, "id", row): row for row in table}
    missing = set(stay) - rows.keys()
    if missing:
        raise ValueError(f"there is no row {', '.join(map(str, missing))}; there are {', '.join(map(str, rows))}")
    thorough = pytest.mark.thorough
    return [pytest.param(row, id=str(name), marks=() if name in stay else thorough) for name, row in rows.items()]
