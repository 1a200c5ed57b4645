# SPDX-License-Identifier: Apache-2.0
"""Read settings as dicts from YAML or JSON files, and from the ``key=value`` words after a file on the command line.

Argument files (``parse.py``) and LLaMA-Factory files are read here, so the same rules apply to both. Numbers follow
YAML 1.2, as in LightningCLI, so ``3e-6`` is a number and not text. A repeated key raises. A later ``key=value``
replaces an earlier one, and ``a.b=1`` sets a key inside a dict. This file imports neither torch nor megatron-core.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

# PyYAML follows YAML 1.1, where a number with an exponent needs a point and a sign: 3e-6 would be text.
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")


def read_file(path: str | None, what: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a file's keys and values, with the overrides (``key=value``) applied; without a path only these."""
    return overridden({} if path is None else _read_keys(path, what), overrides)


def overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``values`` with the overrides applied; ValueError if one is not ``key=value``.

    ``["a.b=1", "c=3e-6"]`` turns ``{"a": {"x": 0}}`` into ``{"a": {"x": 0, "b": 1}, "c": 3e-06}``.
    """
    values = dict(values)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"{override!r} is not key=value; write for example learning_rate=1e-5")
        put_at(values, key, read_yaml(value, override))
    return values


def require_file(path: str, what: str) -> None:
    """Raise FileNotFoundError if there is no such file; ``what`` names it, as in :func:`read_file`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path!r} is not a file; give {what}, in YAML or JSON")


def _read_keys(path: str, what: str) -> dict[str, Any]:
    require_file(path, what)
    text = read_text(path)
    if Path(path).suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path!r} is neither YAML nor JSON; give a file that ends with .yaml, .yml or .json")
    values = read_json(text, path) if Path(path).suffix == ".json" else read_yaml(text, path)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path!r} does not hold keys with values; write one 'key: value' on each line")
    return values


def put_at(values: dict[str, Any], place: str, value: Any) -> None:
    """Set a value at a dotted place: ``"strategy.timeout"`` sets ``values["strategy"]["timeout"]``."""
    keys = place.split(".")
    for key in keys[:-1]:
        inner = values.get(key)
        # Copy each dict on the way, so that the given one stays unchanged; a value that is not a dict is replaced.
        values[key] = dict(inner) if isinstance(inner, dict) else {}
        values = values[key]
    values[keys[-1]] = value


def read_text(path: str | Path) -> str:
    """Return a file's content; ValueError if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; save it in UTF-8") from error


def read_json(text: str, name: str) -> Any:
    """Parse JSON text, which errors call ``name``; ValueError if it is not JSON, or nested or written too long."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} of {name} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}; use less nesting and shorter numbers") from error


def read_yaml(text: str, name: str) -> Any:
    """Parse YAML text, which errors call ``name``; ValueError if it is not YAML, or a mapping has a key twice."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1} of {name}" if mark is not None else name
        raise ValueError(f"{place} is not YAML: {getattr(error, 'problem', None) or error}") from error
    except Exception as error:  # from a value or a tag, such as a date in month 13
        raise ValueError(
            f"{name} has a value that YAML does not allow ({str(error)[:200]}); quote or remove it"
        ) from error


@cache
def _loader() -> Any:
    """Return a safe YAML loader class that reads ``3e-6`` as a number and rejects repeated keys."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Reads the numbers of YAML 1.2."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Return a mapping; raise for repeated keys, of which PyYAML would keep the last."""
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value!r} appears twice; keep one", problem_mark=key.start_mark
                    )
                seen.add(str(key.value))
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    # PyYAML finds a scalar's type by its first character. Copy the table, which all loaders share, and put our pattern
    # in place of the one for floats, after the pattern for integers.
    resolvers = {first: list(found) for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    Loader.yaml_implicit_resolvers = resolvers
    for first in "-+0123456789.":
        others = [pair for pair in resolvers.get(first, []) if not pair[0].endswith(":float")]
        resolvers[first] = [*others, ("tag:yaml.org,2002:float", _FLOAT)]
    return Loader
