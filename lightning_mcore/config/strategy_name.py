# SPDX-License-Identifier: Apache-2.0
"""``Trainer(strategy="mcore")`` after ``import lightning_mcore``, though neither imports the other.

Lightning looks a name up in its registry, and has no entry point for it. So the name is registered with a function that
imports the strategy when a Trainer asks for it: at once where Lightning is imported already, otherwise by an import
hook at the moment when Lightning's registry comes about. ``lightning_mcore/__init__.py`` calls :func:`register_name`;
importing the package stays light.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

NAME = "mcore"

_REGISTRY = "lightning.pytorch.strategies"  # the module that makes the registry


def register_name() -> None:
    """Let Lightning know the name, now or when it is imported; a second call changes nothing."""
    imported = sys.modules.get(_REGISTRY)
    if imported is not None and hasattr(imported, "StrategyRegistry"):
        _register(imported)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register(module: ModuleType) -> None:
    registry: Any = module.StrategyRegistry
    if NAME not in registry.available_strategies():
        registry.register(NAME, _build, description="Class: MCoreStrategy")


def _build() -> Any:
    return importlib.import_module("lightning_mcore.strategy.strategy").MCoreStrategy()


class _Waiting(MetaPathFinder):
    """Finds nothing but Lightning's registry, once."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return how to import Lightning's registry; None for anything else.

        Args:
            fullname: What is imported.
            path: Where its package lies.
            target: Of a reload.
        """
        if fullname != _REGISTRY:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec: ModuleSpec | None = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Registering(spec.loader.name, spec.loader.path)
        return spec


class _Registering(SourceFileLoader):
    """Imports Lightning's registry, and registers the name in it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register.

        Args:
            module: Lightning's.
        """
        super().exec_module(module)
        _register(module)
