# SPDX-License-Identifier: Apache-2.0
"""Replace ``self.log`` of a module for a while; the only file that does."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl


@contextlib.contextmanager
def log_replaced_by(function: Callable[..., None], module: pl.LightningModule) -> Iterator[None]:
    """Let ``module.log`` call ``function`` inside the ``with`` block; blocks may be nested."""
    outer: dict[str, Any] = {name: value for name, value in vars(module).items() if name == "log"}
    object.__setattr__(module, "log", function)  # not nn.Module's, which may take it for a submodule
    try:
        yield
    finally:
        object.__delattr__(module, "log")
        vars(module).update(outer)
