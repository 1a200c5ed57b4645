# SPDX-License-Identifier: Apache-2.0
"""Where families are found: those of this package, those that another package registers, and one given by its path.

A package registers its own in its ``pyproject.toml``, and it is found by its name from then on::

    [project.entry-points."lightning_mcore.families"]
    gemma = "my_package.gemma:FAMILY"

Nothing is registered at run time, so that a name means the same in every process.

A path is imported where the user gives it. A file that was downloaded may name any module, so what stands in
``config.json`` or in a checkpoint is a name of one of these families and nothing else; :func:`recorded_family`.
"""

import importlib
import sys
from importlib.metadata import entry_points

from lightning_mcore.hf.family import Family

ENTRY_POINTS = "lightning_mcore.families"

_OWN = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
)


def family_names() -> list[str]:
    """Return the names of all families, as they stand in ``config.json`` under ``model_type``."""
    return [*_OWN, *sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))]


def find_family(name: str) -> Family:
    """Return a family that the user has named.

    Args:
        name: Its ``model_type``, or the path of a :class:`Family`, such as ``"my_package.gemma:FAMILY"``.

    Raises:
        ValueError: There is none of that name; names those there are.
    """
    return _import(name) if ":" in name else registered_family(name)


def recorded_family(name: str) -> Family:
    """Return the family that a checkpoint names; a path is looked up in what is imported already, and never imported.

    Args:
        name: As it stands there.

    Raises:
        ValueError: There is none of that name, or it is a path whose module the user has not imported.
    """
    if ":" not in name:
        return registered_family(name)
    module, _, attribute = name.partition(":")
    family = getattr(sys.modules.get(module), "__dict__", {}).get(attribute)
    if not isinstance(family, Family):
        raise ValueError(
            f"the checkpoint names the family {name!r}, and code is not imported because a file names it; if it is your"
            f" own, name it yourself: family={name!r} (--family {name})"
        )
    return family


def registered_family(name: str) -> Family:
    """Return a family by its ``model_type``: one of this package, or of another package that is installed.

    Raises:
        ValueError: There is none of that name; names those there are.
    """
    registered = next((entry.value for entry in entry_points(group=ENTRY_POINTS) if entry.name == name), None)
    if registered is not None:
        return _import(registered)
    if name in _OWN:
        return _import(f"lightning_mcore.hf.families.{name}:FAMILY")
    raise ValueError(
        f"models of type {name!r} are not supported; there are {', '.join(family_names())}, and you may give a family"
        " of your own, family='package.module:FAMILY'"
    )


def _import(path: str) -> Family:
    module, _, attribute = path.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ValueError(f"family={path!r} is no path of a family; give 'package.module:FAMILY'")
    try:
        family = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"family={path!r} cannot be imported, for {error}; give 'package.module:FAMILY'") from error
    if not isinstance(family, Family):
        raise ValueError(f"family={path!r} is a {type(family).__name__}, not a Family; give the path of one")
    return family
