# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, checked on the syntax tree of every file.

Each rule answers a failure seen in a predecessor: process groups opened from anywhere, settings patched at run time,
misspelt arguments swallowed by ``**kwargs``, files that grew into everything. A rule that is in the way is changed
here, with its reason, and not worked around.
"""

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_mcore"
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = sorted(
    path for folder in ("lightning_mcore", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)

HF_FAMILIES = {path.stem for path in (PACKAGE / "hf" / "families").glob("*.py")} - {"__init__"}

# Who may know whom: a file imports only files of the levels above it.
LEVELS = [
    {
        "sizes",
        "spelling",
        "without_torch",
        "loss_normalization",
        "run_settings",
        "argument_fields",
        "megatron_source",
        "foreign_fields",
        "command_errors",
        *("factory_file", "factory_keys", "refused_keys", "loss_record"),
        "step_callbacks",
        "strategy_name",
        "rectangles",
        "muon",
        "cpu_runtime",
        "context_split",
        "throughput",
        "evaluation",
        "field_support",
        "field_values",
        "moe_router",
        "positions",
        "optimizer_parts",
        "atomic_directory",
        "checkpoint_format",
        "agreement",
        "background_task",
        "tensor_record",
        "random_state",
        "epoch_place",
        "file_checksums",
        "indexed_shares",
        "preprocess_worker",
        "preprocess_tokenizer",
        "packing_statistics",
        "data_files",
        "value_range",
        "download_checksums",
        "weight_rules",
        "config_rules",
        "training_fields",
        "learning_rate",
        "fp16",
    },
    {
        "additional_configs",
        "ray_arguments",
        "model_shape",
        "command_parser",
        "training_guard",
        "rank_connections",
        "model_folder",
        "config_faults",
        "attention",
        "packed_sequences",
        "gathered_keys",
        "progress",
        "checkpoint_files",
        "checksummed_file",
        "shard_plan",
        "torch_dist_metadata",
        "checkpoint_reader",
        "indexed_files",
        "checked_cache",
        "preprocess_inputs",
        "preprocess_workers",
        "sampling",
        "packing",
        "conversations",
        "chat_templates",
        *("dataset_info", "key_rules", "translated_keys"),
    },
    {
        "rank_watch",
        "optimizer_recipe",
        "pipeline_split",
        "core_attention",
        "checkpoint_writer",
        "safetensors_file",
        "checkpoint_staging",
        "checkpoint_report",
        "preprocess_journal",
        "indexed_blend",
        "data_position",
        "packed_rows",
        "chat_tokens",
        "template_encoder",
        "gpt_fields",
    },
    {
        "layout",
        "backend",
        "checkpoint",
        "checkpoint_save",
        "preprocess",
        "pretraining_data",
        "online_packing",
        "packed_dataset",
        "tokenized_files",
        "saved_tensors",
    },
    {"fp8", "preprocess_command", "token_stream", "text_blocks", "factory_rows", "stage_layers", "flight_order"},
    {"field_homes", "field_rules", "fp8_arguments", "fp8_sizes"},
    {"distributing_arguments", "training_rules", "optimizer_options"},
    {"megatron_arguments", "run_mapping"},
    {"trainer_parts"},
    {
        "process_groups",
        "packed_layout",
        "streaming",
        "exact_resume",
        "transformer_fields",
        "settings",
        "optimizer_kinds",
        "loss_scale",
        "communication",
        "tensor_overlap",
        "multi_token",
        "parameter_tensors",
    },
    {
        "session",
        "step_logs",
        "finetuning_data",
        "auxiliary_logs",
        "log_names",
        "plateau",
        "generation",
        "checkpoint_io",
        "rank_parameters",
        "state_memory",
        "activation_memory",
        "family",
        "rope_rules",
    },
    {"factory_data", "pipeline", "rank_memory", "decoder_rules", "expert_rules", "known_families", "weight_map"},
    {"chunks", "optimizer", "checkpoint_manifest", "hf_config", "export_plan", *HF_FAMILIES},
    {"optimizer_shards", "safetensors_folder", "stored_tensors"},
    {"stored_state", "hf_weights"},
    {"sharded_state", "optimizer_factory", "hf_source"},
    {"weights", "language_step", "model_pieces"},
    {"metrics", "pretrained", "live_tensors"},
    {"module", "exported_config"},
    {"averaging", "fp8_checks", "speed_logs"},
    {"schedule", "precision"},
    {"parallelism", "gpt", "preemption"},
    {"persistence", "folder_import", "dft_loss"},
    {"strategy", "export", "import_command"},
    {"save_hf_model", "export_command", "cli"},
    {"training_cli"},
    {"fit_command"},
    {"lightning_objects"},
    {"training_arguments"},
    {"argument_parsing", "factory_run"},
    {"llamafactory_command", "llamafactory_settings"},
    {"machines", "transformer_rules", "global_batch", "rank_grid", "pipeline_schedule"},
    {"rule_book", "schedule_picture", "communication_volume", "quoted_values"},
    {"step_work", "step_time", "strategy_rules", "trainer_rules", "cli_settings"},
    {"model_rules"},
    {"run_rules"},
    {"run_warnings", "plan_files", "real_check"},
    {"plan"},
    {"plan_report", "live_run"},
    {"suggest"},
    {"plan_command"},
    {"__init__"},
]


def stems_of(folder: str) -> set[str]:
    return {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}


PURE_ARITHMETIC = {
    *("sizes", "spelling", "run_settings", "rectangles", "model_shape", "pipeline_split", "layout", "throughput"),
    *("field_homes", "field_values", "fp8_sizes", "fp16", "loss_normalization"),
    *("factory_file", "factory_keys", "refused_keys", "key_rules", "model_folder", "dataset_info", "chat_templates"),
    *stems_of("arguments")
    - {"argument_parsing", "lightning_objects", "step_callbacks", "training_arguments"}
    - {"training_rules"},
    *stems_of("planning") - {"live_run", "real_check"},
}
MAY_ENTER_THE_CPU_RUNTIME = {"parallelism", "session"}  # our strategy, and a module under a strategy that is not ours
PASSES_ON_BY_NAME = {("TrainingArguments", "trainer")}  # to Lightning's Trainer, after looking every name up there
SAYS_NOTHING = {"utils", "helpers", "common", "base", "misc"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


package_file = pytest.mark.parametrize("path", PACKAGE_FILES, ids=named)


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


def imported_siblings(path: Path) -> set[str]:
    files = {file.stem for file in PACKAGE_FILES}
    parts = [name.split(".") for name in imported_modules(path)]
    found = (next((name for name in part[1:] if name in files), None) for part in parts if part[0] == "lightning_mcore")
    return {name for name in found if name is not None}


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


def test_the_package_was_found() -> None:
    assert len(PACKAGE_FILES) >= 10


def test_every_level_names_files_that_exist() -> None:
    assert sorted(set().union(*LEVELS)) == sorted({path.stem for path in PACKAGE_FILES})
    assert sum(len(level) for level in LEVELS) == len({path.stem for path in PACKAGE_FILES})
    outside = [path for path in PACKAGE_FILES if path.stem != "__init__"]
    assert len({path.stem for path in outside}) == len(outside), "two files share a name"


@package_file
def test_dependencies_point_one_way(path: Path) -> None:
    level = next((level for level, files in enumerate(LEVELS) if path.stem in files), None)
    assert level is not None, f"{path.name} has no place in LEVELS: say on which level of the package it stands"
    assert imported_siblings(path) <= set().union(*LEVELS[:level])


@pytest.mark.parametrize("path", [path for path in PACKAGE_FILES if path.stem in PURE_ARITHMETIC], ids=named)
def test_pure_arithmetic_needs_no_torch(path: Path) -> None:
    packages = {name.split(".")[0] for name in imported_modules(path)}
    assert not packages & {"torch", "megatron", "lightning", "transformers"}


def test_the_cpu_runtime_is_entered_by_its_owners_only() -> None:
    users = {path.stem for path in PACKAGE_FILES if "cpu_runtime" in imported_siblings(path)}
    assert users - {"__init__"} <= MAY_ENTER_THE_CPU_RUNTIME


def test_parallel_state_opens_and_closes_in_one_file() -> None:
    names = {"initialize_model_parallel", "destroy_model_parallel"}
    users = {
        path.stem
        for path in PACKAGE_FILES
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
    }
    assert users == {"process_groups"}


@package_file
def test_only_the_cpu_runtime_patches(path: Path) -> None:
    if path.stem == "cpu_runtime":
        return
    foreign = names_from(path, {"torch", "megatron", "lightning", "transformers", "transformer_engine"})
    patched = []
    for node in ast.walk(tree(path)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
            targets = [ast.Attribute(node.args[0], "")]
        patched += [
            f"{named(path)}:{node.lineno}: {ast.unparse(target)}"
            for target in targets
            if isinstance(target, ast.Attribute) and root_name(target) in foreign
        ]
    assert not patched


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@package_file
def test_a_file_is_named_for_what_it_holds(path: Path) -> None:
    assert path.stem not in SAYS_NOTHING


@package_file
def test_no_public_signature_swallows_a_misspelt_argument(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    found = [
        f"{owner.__name__}.{function.__name__}"
        for owner, function in public_functions(module)
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


@package_file
def test_files_and_functions_stay_readable(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{named(path)} has {lines} lines"
    long = [
        f"{named(path)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
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


def test_the_tour_names_every_file_of_the_package() -> None:
    tour = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named_files = set(
        re.findall(
            r"`(?:arguments/|data/|hf/|llamafactory/|planning/)?(\w+)\.py`",
            tour.partition("## A tour")[2].partition("\n## ")[0],
        )
    )
    assert {path.stem for path in PACKAGE_FILES} - {"__init__"} - HF_FAMILIES == named_files
