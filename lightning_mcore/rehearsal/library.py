# SPDX-License-Identifier: Apache-2.0
"""Build ``fake_cuda.cpp``, the CUDA device that does nothing, once for each PyTorch that is installed."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_CACHE = "LIGHTNING_MCORE_CACHE"


def fake_cuda_library() -> Path:
    """Return the path of the library, built on first use into a cache folder.

    Raises RuntimeError if there is no C++ compiler, or it cannot build the library with this release of PyTorch.
    """
    # It is linked to the libraries of one installation: another environment, or this one moved, needs its own.
    place = " ".join(cpp_extension.library_paths())
    made_for = f"{torch.__version__} {platform.machine()} {place}".encode()
    key = hashlib.sha256(made_for + _SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get(_CACHE) or Path.home() / ".cache" / "lightning_mcore")
    path = folder / f"fake_cuda-{key}.so"
    if not path.is_file():
        _build(path)
    return path


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"a rehearsal needs a C++ compiler, and {compiler} is not installed; install g++, or set CXX to another one"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    libraries = [f"{option}{folder}" for folder in cpp_extension.library_paths() for option in ("-L", "-Wl,-rpath,")]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [
            *(compiler, "-std=c++20", "-O1", "-fPIC", "-shared", str(_SOURCE), "-o", str(made)),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{folder}" for folder in cpp_extension.include_paths()),
            *libraries,
            *("-lc10", "-ltorch_cpu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise RuntimeError(
                f"{compiler} could not build a rehearsal's device with PyTorch {torch.__version__}: {lines[0].strip()};"
                f" run it to see all errors: {shlex.join(command[:4])} ..."
            )
        os.replace(made, path)  # at once, because another process may build it too
