# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every test of the project.

* Nothing a test patches in torch survives it; process groups are closed after it and environment variables put back.
* Under ``--dist loadgroup`` tests that share a fixture of their module run in one process, so that it is made once.
* Tests marked ``gpu`` skip without a GPU, for one reason; with ``REQUIRE_GPU=1`` such a skip is a failure. Those marked
  ``gpus(count, capability, te)`` need that much beyond one GPU; they skip where it is missing. ``GPU_TESTS_DEVICE=cpu``
  runs them on the CPU, to try them out.
* ``MEGATRON_CORE_VERSION=x`` makes a run on another release of megatron-core an error.
* What tests make the package say is compared with ``tests/sentences.txt`` (``tests/support/sentences.py``).
* ``MIN_TESTS=n`` makes a run of fewer than n tests a failure (``tests/support/suite_size.py``).
"""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from typing import Any

from tests.support import economy  # noqa: F401 - before torch, Lightning and megatron-core

# isort: split

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE

from lightning_mcore.parallel.groups import close_process_groups
from tests.support import hygiene, ranks, sentences
from tests.support.suite_size import pytest_sessionfinish  # noqa: F401 - pytest finds the hook here

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test downloads nothing

torch.set_num_threads(1)  # the cores belong to the ranks

# Imported before pytest has a handler of its own, Lightning keeps its messages from the handlers of tests.
for _name in ("lightning.fabric", "lightning.pytorch"):
    logging.getLogger(_name).propagate = True
_LOG_LEVELS = {
    name: logging.getLogger(name).level for name in ("lightning.fabric", "lightning.pytorch", "lightning_mcore")
}


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaves torch patched; close process groups and put the environment back."""
    names = hygiene.snapshot()
    environment = dict(os.environ)
    for name, level in _LOG_LEVELS.items():  # a trainer of another test, or of its module's fixture, may be quiet
        logger = logging.getLogger(name)
        if logger.level != level:  # setLevel clears a cache of each of two thousand loggers: a millisecond
            logger.setLevel(level)
    yield
    changed = hygiene.changes(names, hygiene.snapshot())
    close_process_groups()  # like the default group, they outlive a run
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    if changed:
        pytest.fail(f"the test left these changed: {', '.join(changed)}", pytrace=False)


@pytest.fixture(scope="session")
def modules_are_tagged() -> None:
    """Let torch.compile, which Megatron's experts and gates use, wrap ``Module.__init__`` before the first test."""
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test another megatron-core than the one that was asked for."""
    imported = megatron.core.__version__.partition("+")[0]  # it adds the commit of the folder that it runs in
    wanted = os.environ.get("MEGATRON_CORE_VERSION", imported)
    if imported != wanted:
        pytest.exit(f"MEGATRON_CORE_VERSION={wanted}, but {imported} is imported", returncode=1)


def pytest_configure(config: pytest.Config) -> None:
    """Compare what tests say with the file of sentences; let a worker start ranks from the controller's fork server."""
    config.pluginmanager.register(sentences.Plugin())
    address = getattr(config, "workerinput", {}).get("fork_server")
    if address is not None:
        ranks.use_server(address)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start a fork server for all workers, unless the tests chosen need no ranks."""
    if "not distributed" not in node.config.option.markexpr:
        node.workerinput["fork_server"] = ranks.start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage among what the tests make; the imports left half a million objects."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that share a fixture of their module; those of another parameter of it are another group."""
    for item in items:
        definitions = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        shared = [name for name, known in definitions.items() if known and known[-1].scope == "module"]
        if shared:
            chosen = item.callspec.indices if hasattr(item, "callspec") else {}
            parameters = [str(chosen[name]) for name in sorted(shared) if name in chosen]
            item.add_marker(pytest.mark.xdist_group("-".join([item.path.stem, *parameters])))


def pytest_report_header() -> str:
    """Say which releases are tested."""
    return f"torch {torch.__version__}, megatron-core {megatron.core.__version__}"


def _gpu_is_required() -> bool:
    return os.environ.get("REQUIRE_GPU") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a GPU test where there is no GPU, or less than it needs."""
    needs = item.get_closest_marker("gpus")
    on_the_cpu = os.environ.get("GPU_TESTS_DEVICE") == "cpu"
    if _is_of_a_gpu(item) and not torch.cuda.is_available() and not on_the_cpu:
        pytest.skip("needs a CUDA GPU")
    if needs is not None:
        reason = _lacking(**needs.kwargs, on_the_cpu=on_the_cpu)
        if reason is not None:
            pytest.skip(reason)


def _is_of_a_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or item.get_closest_marker("gpus") is not None


def _lacking(on_the_cpu: bool, count: int = 1, capability: tuple[int, int] = (0, 0), te: bool = False) -> str | None:
    """Return what a test marked ``gpus`` lacks on this machine."""
    if te and not HAVE_TE:
        return "needs TransformerEngine"
    if not on_the_cpu and torch.cuda.device_count() < count:
        return f"needs {count} CUDA GPUs"
    if not on_the_cpu and torch.cuda.get_device_capability() < capability:
        return f"needs compute capability {'.'.join(map(str, capability))}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a GPU test into a failure where a GPU is required."""
    report = yield
    counts = item.get_closest_marker("gpu") or (_is_of_a_gpu(item) and not torch.cuda.is_available())
    if report.skipped and counts and _gpu_is_required() and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_GPU=1 is set, and the test was skipped: {reason}"
    return report
