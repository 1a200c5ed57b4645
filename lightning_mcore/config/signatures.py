# SPDX-License-Identifier: Apache-2.0
"""Names, types and defaults of arguments, read from source code without importing it.

``lightning-mcore plan`` answers within a second and tells a misspelt field all the same: it reads the dataclasses of
megatron-core, the ``Trainer`` and this package's own constructors as syntax trees. What is given as an expression that
only their modules can evaluate (a function, a torch type) stays its text.
"""

import ast
import enum
import importlib.util
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Owner = tuple[str, str]
"""A file below a top-level package, and a class in it, such as ``("megatron/core/x.py", "Config")``."""

TRANSFORMER: tuple[Owner, ...] = (
    ("megatron/core/model_parallel_config.py", "ModelParallelConfig"),
    ("megatron/core/transformer/transformer_config.py", "TransformerConfig"),
)
LATENT: Owner = ("megatron/core/transformer/transformer_config.py", "MLATransformerConfig")
DDP: Owner = ("megatron/core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")
OPTIMIZER: Owner = ("megatron/core/optimizer/optimizer_config.py", "OptimizerConfig")
STRATEGY: Owner = ("lightning_mcore/strategy/strategy.py", "MCoreStrategy")
PRECISION: Owner = ("lightning_mcore/strategy/precision.py", "MCorePrecision")
GPT: Owner = ("lightning_mcore/models/gpt.py", "MCoreGPT")
RECIPE: Owner = ("lightning_mcore/models/recipe.py", "Recipe")
TRAINER: Owner = ("lightning/pytorch/trainer/trainer.py", "Trainer")


_ALIASES = {
    "PositionEmbedding": "lightning_mcore/config/positions.py",
    "OptimizerName": "lightning_mcore/models/recipe.py",
    "SchedulerName": "lightning_mcore/models/recipe.py",
    "TransformerImpl": "lightning_mcore/layers/spec.py",
    "LossNormalization": "lightning_mcore/config/loss_normalization.py",
    "PrecisionName": "lightning_mcore/strategy/precision.py",
    "FP8Format": "lightning_mcore/config/fp8.py",
    "FP8Recipe": "lightning_mcore/config/fp8.py",
    "AmaxComputeAlgo": "lightning_mcore/config/fp8.py",
}
"""Where the names stand that our own constructors use for a choice."""


class Unread(str):
    """A default or a type that only its module can evaluate; its source text."""


@dataclass(frozen=True)
class Argument:
    """One field of a dataclass or argument of a constructor.

    Args:
        hint: Its type; ``typing.Any`` where the type is not one of Python's own.
        default: Its default, an :class:`Unread` text where it is no plain value; ``...`` where it has none.
    """

    hint: Any
    default: Any


@cache
def source_file(path: str) -> Path:
    """Return a file of an installed package, without importing the package.

    Args:
        path: Package and file, such as ``"megatron/core/optimizer/optimizer_config.py"``.

    Raises:
        ModuleNotFoundError: The package is not installed, or has no such file.
    """
    package, _, rest = path.partition("/")
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (file := Path(folder) / rest).is_file():
            return file
    raise ModuleNotFoundError(f"{path} is not installed; install {package}", name=package)


def transformer_arguments(latent: bool = False) -> dict[str, Argument]:
    """Return the fields of ``TransformerConfig``, with ``latent`` those of ``MLATransformerConfig``."""
    owners = (*TRANSFORMER, LATENT) if latent else TRANSFORMER
    merged: dict[str, Argument] = {}
    for owner in owners:
        own = dataclass_fields(owner)
        merged |= own if owner != LATENT else {n: a for n, a in own.items() if n != "multi_latent_attention"}
    return merged


@cache
def dataclass_fields(owner: Owner) -> dict[str, Argument]:
    """Return the fields that the body of a dataclass names; those of its bases are not in it."""
    fields = {}
    for node in _class(owner).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = Argument(_type(node.annotation), _default(node.value))
    return fields


@cache
def parameters(owner: Owner, method: str = "__init__") -> dict[str, Argument]:
    """Return the arguments of a method, without ``self`` or ``cls``."""
    functions = [node for node in _class(owner).body if isinstance(node, ast.FunctionDef) and node.name == method]
    given = functions[0].args
    positional = given.args[1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    pairs = [*zip(positional, [*defaults, *given.defaults], strict=True)]
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return {argument.arg: Argument(_type(argument.annotation), _default(value)) for argument, value in pairs}


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(source_file(path).read_text(encoding="utf-8"))


def _class(owner: Owner) -> ast.ClassDef:
    path, name = owner
    return next(node for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return ...
    if isinstance(node, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in given:
            return _default(given["default"])
        return Unread(ast.unparse(node))
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    try:  # such as 2.0**16
        return eval(compile(ast.Expression(node), "<default>", "eval"), {"__builtins__": {}})
    except (NameError, AttributeError, TypeError):
        return Unread(ast.unparse(node))


def _type(node: ast.expr | None) -> Any:
    """Return a type made of Python's own types and Megatron's enums; ``Any`` for all others."""
    if node is None:
        return Any
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, _names())
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


@cache
def _names() -> Mapping[str, Any]:
    plain = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, tuple)}
    special = ("Any", "Callable", "Dict", "List", "Literal", "Optional", "Sequence", "Tuple", "Union")
    python = {**plain, **{name: getattr(typing, name) for name in special}, "None": None}
    return {**python, **_enums(), **{name: _alias(name, path, python) for name, path in _ALIASES.items()}}


def _alias(name: str, path: str, python: Mapping[str, Any]) -> Any:
    for node in _tree(path).body:
        named = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name
        plain = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]
        if named or plain:
            return eval(ast.unparse(node.value), {"__builtins__": {}}, python)  # type: ignore
    return Any


def choices_named(alias: str) -> tuple[Any, ...]:
    """Return the choices that one of our own constructors has under a name such as ``"PrecisionName"``."""
    return typing.get_args(_names()[alias])


def _enums() -> dict[str, Any]:
    try:
        tree = _tree("megatron/core/transformer/enums.py")
    except ModuleNotFoundError:
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assigned = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
            members = [target.id for target in assigned if isinstance(target, ast.Name)]
            if members:
                found[node.name] = enum.Enum(node.name, members)
    return found
