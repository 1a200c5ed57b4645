# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, checked on the syntax tree of every file.

Each rule answers a failure seen in a predecessor: process groups opened from anywhere, settings patched at run time,
misspelt arguments swallowed by ``**kwargs``, functions that grew into everything. A rule that is in the way is changed
here, with its reason, and not worked around.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_mcore"
PACKAGE_FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__main__")
PYTHON_FILES = sorted(
    path for folder in ("lightning_mcore", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

ROOMS = [
    "config",
    "te_cpu",
    "parallel",
    "layers",
    "optimizer",
    "checkpoint",
    "data",
    "strategy",
    "ray",
    "hf",
    "models",
    "interop",
    "arguments",
]
ROOMS += [
    "planning",
    "rehearsal",
    "callbacks",
    "cli",
]  # each imports only those before it; import-linter holds that (pyproject.toml)
# Our strategy, and a module under a strategy that is not ours.
MAY_ENTER_THE_CPU_RUNTIME = {"strategy/strategy.py", "layers/session.py", "planning/built.py", "planning/chunks.py"}
PASSES_ON_BY_NAME = {
    ("TrainingArguments", "trainer"),  # to Lightning's Trainer, after looking every name up there
    *(("RuleBook", name) for name in ("attempt", "passes")),  # typed by the check that they call
    ("HFModel", "generate"),  # to transformers, which refuses names that it does not know
}
SAYS_NOTHING = {"utils", "helpers", "common", "base", "misc"}
MAX_FUNCTION_LINES = 80


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the dotted names a file imports; for ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno}: import by the full name"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_from(path: Path, packages: set[str]) -> set[str]:
    """Return the local names a file binds by importing from ``packages``."""
    bound = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] in packages]
            bound |= {alias.asname or alias.name.split(".")[0] for alias in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages:
            bound |= {alias.asname or alias.name for alias in node.names}
    return bound


def in_package(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_root_of_the_package_lists_the_rooms() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert entries == {*ROOMS, "__init__.py", "py.typed"}
    for room in ROOMS:
        assert ast.get_docstring(tree(PACKAGE / room / "__init__.py")), f"{room} does not say what it is for"


def test_the_linter_of_imports_knows_the_rooms_in_their_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    assert settings["contracts"][0]["layers"] == ROOMS[::-1]


def test_contributing_has_a_row_for_each_room() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == ROOMS


def test_contributing_names_files_that_are_there_and_counts_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ways = text[text.index("## Three code paths") : text.index("## The parity rule")]
    counted = re.findall(r"^\*\*A \w+\*\*.*: (\d+) files\.$\n\n((?:^\|.*$\n)+)", ways, re.MULTILINE)
    assert len(counted) == 3
    for count, table in counted:
        names = re.findall(r"`([\w/]+\.py)`", table)
        assert len(set(names)) == len(names) == int(count)
    assert not [name for name in re.findall(r"`([\w/]+\.py)`", ways) if not (PACKAGE / name).is_file()]


def test_the_cpu_runtime_is_entered_by_its_owners_only() -> None:
    users = {
        in_package(path)
        for path in PACKAGE_FILES
        if "lightning_mcore.parallel.cpu_runtime" in set(imported_modules(path))
    }
    assert users <= MAY_ENTER_THE_CPU_RUNTIME


def test_parallel_state_opens_and_closes_in_one_file() -> None:
    names = {"initialize_model_parallel", "destroy_model_parallel"}
    users = {
        in_package(path)
        for path in PACKAGE_FILES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    }
    assert users == {"parallel/groups.py"}


def test_only_the_cpu_runtime_patches() -> None:
    others = [path for path in PACKAGE_FILES if in_package(path) != "parallel/cpu_runtime.py"]
    assert not [place for path in others for place in patched_places(path)]


def patched_places(path: Path) -> Iterator[str]:
    """Yield where a file sets an attribute of a module or class of another package."""
    foreign = names_from(path, {"torch", "megatron", "lightning", "transformers", "transformer_engine"})
    for node in ast.walk(tree(path)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            targets = [ast.Attribute(node.args[0], "")]
        for target in targets:
            if isinstance(target, ast.Attribute) and root_name(target) in foreign:
                yield f"{named(path)}:{node.lineno}: {ast.unparse(target)}"


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_a_file_is_named_for_what_it_holds() -> None:
    assert not [named(path) for path in PACKAGE_FILES if path.stem in SAYS_NOTHING]


def test_no_public_name_is_that_of_a_file_beside_it() -> None:
    """Importing the file would put it in the place of the name that the package finds later."""
    for package in PACKAGE.rglob("__init__.py"):
        public = {
            name
            for node in tree(package).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        }
        beside = {path.stem for path in package.parent.iterdir()}
        assert not public & beside, named(package)


def test_no_public_signature_swallows_a_misspelt_argument() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PACKAGE_FILES]
    if importlib.util.find_spec("ray") is None:
        of_ray = ("lightning_mcore.ray", "lightning_mcore.strategy.ray")
        names = [name for name in names if not name.startswith(of_ray)]
    found = [
        f"{name}: {owner.__name__}.{function.__name__}"
        for name in names
        for owner, function in public_functions(importlib.import_module(name))
        if any(item.kind is item.VAR_KEYWORD for item in inspect.signature(function).parameters.values())
        and not follows_a_foreign_signature(owner, function.__name__)
        and (owner.__name__, function.__name__) not in PASSES_ON_BY_NAME
    ]
    assert not found


def public_functions(owner: ModuleType | type) -> Iterator[tuple[ModuleType | type, FunctionType]]:
    """Yield what a user can call in a module or class: functions, methods and constructors, with their owners."""
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for name, value in vars(owner).items():
        if getattr(value, "__module__", None) != module or (name.startswith("_") and name != "__init__"):
            continue
        if isinstance(value, FunctionType):
            yield owner, value
        elif isinstance(value, type):
            yield from public_functions(value)


def follows_a_foreign_signature(owner: ModuleType | type, name: str) -> bool:
    """Return whether a method answers to one of torch, Lightning or Megatron, which decide what it is called with."""
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    return any(
        name in vars(base) for base in bases if base is not object and not base.__module__.startswith("lightning_mcore")
    )


def test_functions_stay_readable() -> None:
    long = [
        f"{named(path)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in PACKAGE_FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long


def test_every_file_states_its_licence() -> None:
    marks = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in PYTHON_FILES}
    missing = [named(path) for path, first in marks.items() if first != "# SPDX-License-Identifier: Apache-2.0"]
    assert not missing


def project_files() -> Iterator[Path]:
    """Yield every text file that belongs to the project."""
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg"}
    ours = {"lightning_mcore", "tests", "examples", "benchmarks", "docs", ".ci", ".github"}
    for path in [*ROOT.iterdir(), *(file for name in ours for file in (ROOT / name).rglob("*"))]:
        if path.is_file() and (path.suffix in suffixes or path.name in {"Makefile", "run", ".gitignore"}):
            yield path


def test_no_file_names_a_machine_or_leaves_a_mark() -> None:
    folders = "|".join(
        ["work", "farm", "root", "home", "opt", "Users"]
    )  # joined, so that this file passes its own rule
    hosts = "|".join(["pypi", "pythonhosted", "download.pytorch"])
    marks = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"])
    forbidden = re.compile(rf"(?<![\w.])/(?:{folders})/|\b(?:{hosts})\.org\b|\b(?:{marks})\b")
    found = [
        f"{named(path)}:{number}: {line.strip()[:90]}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not found


def test_the_package_and_its_metadata_give_one_version() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assignments = [node for node in tree(PACKAGE / "__init__.py").body if isinstance(node, ast.Assign)]
    versions = [
        ast.literal_eval(node.value)
        for node in assignments
        if [ast.unparse(name) for name in node.targets] == ["__version__"]
    ]
    assert versions == [metadata["project"]["version"]]
    assert f"## [{versions[0]}]" in changelog
