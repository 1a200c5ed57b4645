# SPDX-License-Identifier: Apache-2.0
"""A training file of LLaMA-Factory as ``RunSettings``, for ``lightning-mcore plan``.

Imports neither Lightning nor megatron-core, and reads no data.
"""

from collections.abc import Sequence

from lightning_mcore.config.run import RunSettings


def settings_of_file(path: str, overrides: Sequence[str] = ()) -> RunSettings:
    """Return the run that a file describes.

    Args:
        path: The file, YAML or JSON.
        overrides: What stands behind it, each ``key=value``.

    Raises:
        FileNotFoundError: There is no such file, model folder or dataset.
        ValueError: A key is unknown or not carried out, a value is not allowed, or two keys contradict each other.
        TypeError: A value is of another type.
    """
    from lightning_mcore.arguments.llamafactory.run import read_run

    return read_run(path, overrides).settings()
