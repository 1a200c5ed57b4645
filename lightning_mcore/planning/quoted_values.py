# SPDX-License-Identifier: Apache-2.0
"""Quoted numbers, flags and nulls of a LightningCLI file, read as jsonargparse reads them.

jsonargparse takes ``"4"`` where an int is wanted, ``"true"`` where a bool is. ``cli_settings.py`` does the same with
this, so that ``plan`` refuses nothing that ``fit`` runs.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_mcore.config.checks import accepts
from lightning_mcore.config.signatures import Argument


def unquoted(values: Mapping[str, Any], known: Mapping[str, Argument]) -> dict[str, Any]:
    """Return values, text that does not fit its argument's type read as YAML where that fits.

    Args:
        values: By name; names that are not known stay as they are.
        known: The arguments that there are.
    """
    return {name: _fitting(known[name].hint, value) if name in known else value for name, value in values.items()}


def _fitting(hint: Any, value: Any) -> Any:
    if not isinstance(value, str) or accepts(hint, value):
        return value
    try:
        read = yaml.safe_load(value)
        read = float(read) if isinstance(read, str) else read  # 1e-4, which YAML takes for text
    except (yaml.YAMLError, ValueError):
        return value
    return read if accepts(hint, read) else value
