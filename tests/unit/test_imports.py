# SPDX-License-Identifier: Apache-2.0
"""What is imported when: a command that needs no torch answers at once, and a name brings its own modules only."""

import subprocess
import sys
import warnings

import pytest

import lightning_mcore
from lightning_mcore import cli

pytestmark = pytest.mark.slow

HEAVY = ("lightning", "megatron", "torch", "transformers")
FILTERS = [
    "-W",
    "error",
    "-W",
    "ignore::DeprecationWarning",
    "-W",
    "ignore::FutureWarning",
    "-W",
    "ignore::SyntaxWarning",
]


def python(code: str, *options: str) -> str:
    """Run code in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_by(code: str) -> list[str]:
    """Return which of the heavy packages are imported when code has run."""
    found = python(f"{code}\nimport sys; print('found:', *[name for name in {HEAVY} if name in sys.modules])")
    return found.rpartition("found:")[2].split()


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_mcore",
        "from lightning_mcore import cli; assert cli.main(['--help']) == 0",
        "from lightning_mcore import cli; assert cli.main(['fti']) == 2",
        "from lightning_mcore import ParallelLayout",
        "import lightning_mcore.cli.preprocess",
        "import lightning_mcore.cli.hf",
    ],
)
def test_what_is_light_imports_nothing_heavy(code: str) -> None:
    assert imported_by(code) == []


def test_a_config_is_read_without_lightning_and_megatron() -> None:
    assert imported_by("from lightning_mcore.hf import find_family; find_family('deepseek_v3')") == []
    assert imported_by("from lightning_mcore.hf.source import pretrained_settings") == []


def test_every_command_has_its_module() -> None:
    for name, (module, line) in cli.COMMANDS.items():
        assert callable(__import__(module, fromlist=["run"]).run), name
        assert line


KNOWN = """
trainer = pl.Trainer(strategy='mcore', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)
from lightning_mcore import MCoreStrategy
assert type(trainer.strategy) is MCoreStrategy
from lightning.pytorch.strategies import StrategyRegistry
assert type(StrategyRegistry.get('mcore')) is MCoreStrategy
"""
LIGHTNING_FIRST = f"""
import sys, warnings
import lightning.pytorch as pl, transformers  # as isort orders them
finders, filters = [*sys.meta_path], [*warnings.filters]
import lightning_mcore
assert 'lightning_mcore.strategy.strategy' not in sys.modules
assert [*sys.meta_path] == finders
assert [*warnings.filters] == filters
lightning_mcore.MCoreStrategy
assert not [kept for kept in warnings.filters if kept not in filters and 'ransformer' in str(kept[1])]
added = [finder for finder in sys.meta_path if finder not in finders]
assert not [finder for finder in added if type(finder).__module__.startswith('lightning_mcore')]
{KNOWN}
"""
ALL_NAMES_FIRST = f"""
from lightning_mcore import *
import lightning_mcore, pickle
assert all(name in globals() for name in lightning_mcore.__all__)
assert pickle.loads(pickle.dumps(MCoreGPT)) is MCoreGPT is lightning_mcore.MCoreGPT
assert set(lightning_mcore.__all__) <= set(dir(lightning_mcore))
assert lightning_mcore.hf.Family
import lightning.pytorch as pl
{KNOWN}
"""
PACKAGE_FIRST = f"""
import sys
finders = [*sys.meta_path]
import lightning_mcore
import lightning.pytorch as pl
assert [finder for finder in sys.meta_path if type(finder).__module__ == 'lightning_mcore'] == []
{KNOWN}
"""
STRATEGY_FIRST = f"""
import sys, torch
import lightning.pytorch as pl  # replaces torch.compile itself
of_torch = torch.compile
import lightning_mcore.strategy
assert torch.compile is of_torch
assert torch.backends.cuda.is_built() or 'torch._inductor.compile_fx' not in sys.modules
{KNOWN}
"""


def test_whatever_is_imported_first_the_strategy_is_known_the_process_left_alone_and_megatron_not_heard() -> None:
    code = f"""
import gc, os
gc.disable()
import torch  # for all orders, each of which then has a process of its own
for first in {(LIGHTNING_FIRST, PACKAGE_FIRST, ALL_NAMES_FIRST, STRATEGY_FIRST)!r}:
    if os.fork() == 0:
        exec(first, {{}})
        print('quiet', flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, first
"""
    assert python(code, *FILTERS).splitlines() == ["quiet"] * 4


def test_every_public_name_has_one_home() -> None:
    assert sorted({*lightning_mcore.HOMES, "__version__"}) == sorted(lightning_mcore.__all__)
    with pytest.raises(AttributeError, match="module 'lightning_mcore' has no attribute 'MCoreStratgy'"):
        lightning_mcore.MCoreStratgy  # noqa: B018


@pytest.mark.parametrize(
    "text",
    [
        "Using deprecated internal API from Transformer Engine. transformer_engine.pytorch.fp8 will be removed",
        "transformer_engine.pytorch.float8_tensor is deprecated and will be removed in a future release.",
    ],
)
def test_what_transformer_engine_warns_of_at_import_ends_no_test(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=1)
