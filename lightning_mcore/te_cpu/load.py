# SPDX-License-Identifier: Apache-2.0
"""Find a TransformerEngine without its CUDA library, and load it with the kernels of this room.

``pip install lightning-mcore[te-cpu]`` installs only TransformerEngine's Python code. It cannot be imported by itself,
and neither can megatron-core, which imports it. So ``import lightning_mcore`` calls :func:`prepare`, which puts the
folder ``shadow`` before that package on ``sys.path``. The ``transformer_engine`` in that folder replaces the compiled
modules, and then runs the code of the real package. This happens only when something imports TransformerEngine. A
release that is not tested counts as not installed. A TransformerEngine with its CUDA library is never touched.

FP8 values and their scales are the same as on a GPU. Sums are fp32, in another order.
"""

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

TESTED = ("2.11.0", "2.20.2")
"""The releases of TransformerEngine with which the kernels of this room are tested."""

ONLY_ON_THE_CPU = (
    "the installed TransformerEngine has no CUDA library and runs on the CPU alone; install lightning-mcore[te], or"
    ' choose accelerator="cpu"'
)
"""The error of a run that would use the TransformerEngine of this room on a CUDA device."""

_NAME = "transformer_engine"
# TransformerEngine looks for its CUDA libraries while it is imported, unless it believes that it is being built.
_SETTINGS = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0", "NVTE_TORCH_COMPILE": "0"}
_SHADOW = os.path.join(os.path.dirname(__file__), "shadow")


def prepare() -> None:
    """Make a later ``import transformer_engine`` work if it lacks its CUDA library; nothing is imported here."""
    if _NAME in sys.modules or is_prepared():
        return
    version, spec = version_without_core(), _installed()
    if version is None or spec is None or spec.origin is None:
        return
    if version not in TESTED:
        sys.modules[_NAME] = None  # type: ignore[assignment]  # as if it were not installed
        return
    folder = os.path.dirname(os.path.dirname(spec.origin))
    sys.path.insert(sys.path.index(folder) if folder in sys.path else 0, _SHADOW)


def is_prepared() -> bool:
    """Return whether ``transformer_engine`` is this room's, or will be when it is imported."""
    return _SHADOW in sys.path


def _installed() -> importlib.machinery.ModuleSpec | None:
    return importlib.machinery.PathFinder.find_spec(_NAME, [path for path in sys.path if path != _SHADOW])


def version_without_core() -> str | None:
    """Return the version of an installed TransformerEngine without its CUDA library; None if there is none.

    Source: ``_get_shared_object_file`` (``transformer_engine.common``, 2.11.0 and 2.20.2).
    """
    spec = _installed()
    if spec is None or spec.origin is None:
        return None
    folder = os.path.dirname(os.path.dirname(spec.origin))
    folders = {folder, *(path for path in sys.path if path.endswith("-packages"))}
    places = [os.path.join(one, part) for one in folders for part in ("", _NAME, os.path.join(_NAME, "wheel_lib"))]
    if any(name.startswith("libtransformer_engine") for place in places for name in _names(place)):
        return None
    versions = [name for name in _names(folder) if name.startswith(f"{_NAME}-") and name.endswith(".dist-info")]
    return versions[0].removeprefix(f"{_NAME}-").removesuffix(".dist-info") if len(versions) == 1 else None


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def untested_on_the_cpu() -> str | None:
    """Return what is wrong with an installed TransformerEngine without its CUDA library; None if it is tested."""
    version = version_without_core()
    if version is None or version in TESTED:
        return None
    return (
        f"TransformerEngine {version} is not tested on the CPU; install lightning-mcore[te-cpu], which has"
        f" {' or '.join(TESTED)}"
    )


def load_into(module: types.ModuleType) -> None:
    """Run TransformerEngine's own code in the empty module ``transformer_engine``, with this room's compiled modules.

    Raises RuntimeError if it cannot be loaded, because megatron-core takes an ImportError for a package that is not
    installed.
    """
    try:
        _load_into(module)
    except Exception as error:
        raise RuntimeError(f"TransformerEngine cannot be loaded on the CPU: {error}") from error


def _load_into(module: types.ModuleType) -> None:
    torch = importlib.import_module("torch")
    extension = importlib.import_module("lightning_mcore.te_cpu.extension")
    triton = importlib.import_module("lightning_mcore.te_cpu.experts").TRITON
    spec = _installed()
    assert spec is not None
    assert spec.loader is not None
    module.__file__ = spec.origin
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["transformer_engine_torch"] = extension.extension(str(version_without_core()))
    prefix = f"{_NAME}.pytorch"
    sys.modules[f"{prefix}.onnx_extensions"] = extension.refusing_module(f"{prefix}.onnx_extensions", {})
    package = extension.refusing_module(f"{prefix}.triton", {})
    package.__path__ = []
    sys.modules[f"{prefix}.triton"] = package
    for name, functions in triton.items():
        kernels = extension.refusing_module(f"{prefix}.triton.{name}", functions)
        sys.modules[f"{prefix}.triton.{name}"] = kernels
        setattr(package, name, kernels)
    script, environment = torch.jit.script, dict(os.environ)
    os.environ |= _SETTINGS
    try:
        common: Any = importlib.import_module(f"{_NAME}.common")
        common.load_framework_extension = lambda framework: None
        torch.jit.script = lambda function: function  # TransformerEngine compiles small functions with it
        spec.loader.exec_module(module)
    finally:
        torch.jit.script = script
        for name in _SETTINGS:
            os.environ.pop(name)
            if name in environment:
                os.environ[name] = environment[name]
    if "pytorch" not in module.__dict__:  # TransformerEngine hides the error; this raises it
        importlib.import_module(prefix)
    importlib.import_module("lightning_mcore.te_cpu.patches").patch_transformer_engine()
