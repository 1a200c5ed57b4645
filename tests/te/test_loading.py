# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's Python package is found, loaded at its first import, and left alone where it is whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformer_engine
from megatron.core.extensions.transformer_engine import HAVE_TE

from lightning_mcore.layers.spec import resolve_transformer_impl
from lightning_mcore.strategy.fp8_checks import FP8Machine, check_machine
from lightning_mcore.strategy.precision import MCorePrecision
from lightning_mcore.te_cpu.load import TESTED
from tests.te.runs import Run

SITE = Path(transformer_engine.__path__[0]).parent


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run code in another process, with folders before everything on its path."""
    paths = [str(folder) for folder in folders]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def copy_of_the_package(folder: Path, version: str) -> Path:
    """Return a folder that has TransformerEngine's code, which says that it is another version."""
    (folder / "transformer_engine").mkdir()
    for path in (SITE / "transformer_engine").iterdir():
        (folder / "transformer_engine" / path.name).symlink_to(path)
    (folder / f"transformer_engine-{version}.dist-info").mkdir()
    (folder / f"transformer_engine-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n"
    )
    return folder


def test_megatron_finds_it_and_the_default_stays_the_torch_backend() -> None:
    assert HAVE_TE
    assert transformer_engine.__version__ in TESTED
    assert resolve_transformer_impl("auto", "cpu") == "local"
    assert resolve_transformer_impl("transformer_engine", "cpu") == "transformer_engine"


def test_importing_the_package_imports_neither_torch_nor_transformer_engine() -> None:
    loaded = "print([n for n in ('torch', 'transformer_engine', 'unittest', 'importlib.metadata') if n in sys.modules])"
    result = python(f"import sys, lightning_mcore; {loaded}", SITE)
    assert result.stdout.strip() == "[]", result.stderr


def test_on_a_cuda_device_it_is_refused_in_one_sentence() -> None:
    assert resolve_transformer_impl("auto", "cuda") == "local"
    with pytest.raises(
        ValueError, match=r"has no CUDA library and runs on the CPU alone; install lightning-mcore\[te\]"
    ):
        resolve_transformer_impl("transformer_engine", "cuda")
    settings = MCorePrecision("bf16-mixed", fp8_recipe="tensorwise").fp8
    with pytest.raises(ValueError, match=r"^fp8_recipe='tensorwise' is not available: the installed TransformerEngine"):
        check_machine(settings, FP8Machine("cuda", (9, 0), "13.0", TESTED[0], on_the_cpu=True))


def test_another_release_is_as_if_it_were_not_installed_and_named_when_it_is_asked_for(tmp_path: Path) -> None:
    code = """
import lightning_mcore
from lightning_mcore import MCoreGPT
from megatron.core.extensions.transformer_engine import HAVE_TE
from lightning_mcore.layers.spec import resolve_transformer_impl
print(HAVE_TE, resolve_transformer_impl("auto", "cpu"))
try:
    resolve_transformer_impl("transformer_engine", "cpu")
except ValueError as error:
    print(error)
"""
    result = python(code, copy_of_the_package(tmp_path, "2.99.0"))
    sentence = "TransformerEngine 2.99.0 is not tested on the CPU; install lightning-mcore[te-cpu], which has"
    assert result.stdout.splitlines() == ["False local", f"{sentence} {' or '.join(TESTED)}"], result.stderr


def test_a_package_with_its_cuda_library_is_left_alone(tmp_path: Path) -> None:
    folder = copy_of_the_package(tmp_path, TESTED[0])
    (folder / "transformer_engine" / "wheel_lib").mkdir()
    (folder / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so").touch()
    result = python("import sys; before = list(sys.path); import lightning_mcore; print(before == sys.path)", folder)
    assert result.stdout.strip() == "True", result.stderr


NUMBERS = """
import warnings
warnings.filterwarnings("ignore")
import lightning_mcore
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from tests.te.runs import Run, train
for fields in ({}, {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_router_dtype": "fp32"}):
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    run = Run("local", "bf16-mixed", transformer=fields, layout={"ddp_config": ddp_config})
    print("numbers", HAVE_TE, train(run))
"""


@pytest.mark.slow
def test_a_run_of_the_torch_backend_computes_the_same_with_and_without_it() -> None:
    assert Run().impl == "transformer_engine"
    found = [python(NUMBERS, *folders) for folders in ([SITE], [])]
    assert not any(one.returncode for one in found), found[0].stderr + found[1].stderr
    lines = [[line.split() for line in one.stdout.splitlines() if line.startswith("numbers")] for one in found]
    assert [one[0][1] for one in lines] == ["True", "False"], found[0].stderr + found[1].stderr
    assert [line[2:] for line in lines[0]] == [line[2:] for line in lines[1]]
    assert len(lines[0]) == 2
