# SPDX-License-Identifier: Apache-2.0
"""A run that ends, however it ends, leaves the process as it was; what ends it has a name."""

import contextlib
import copy
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mcore import MCoreCheckpointIO, MCoreGPT, MCoreStrategy
from lightning_mcore.parallel import consensus, rank_hub, rank_process, rank_watch
from lightning_mcore.parallel.groups import open_single_process
from lightning_mcore.parallel.rank_connections import Lines
from lightning_mcore.strategy import checkpointing
from tests.support import hygiene
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, Samples, StagedNet, loader, make_trainer, metrics_of

pytestmark = [  # Megatron's own
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]


class StubbornIO(MCoreCheckpointIO):
    """A plugin that cannot be torn down."""

    def teardown(self) -> None:
        raise OSError("the disk is gone")


class InStep(PlainNet):
    """Does something in its steps.

    Args:
        function: What.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.function()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [PlainNet, StagedNet])
def test_teardown_restores_everything_though_a_plugin_of_it_fails(module: type[pl.LightningModule]) -> None:
    names, handler, environment = hygiene.snapshot(), signal.getsignal(signal.SIGTERM), _attention_variables()
    trainer = make_trainer(MCoreStrategy(checkpoint_io=StubbornIO()), max_steps=1)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(module(), loader(4, 2))
    assert not hygiene.changes(names, hygiene.snapshot())
    assert signal.getsignal(signal.SIGTERM) is handler
    assert _attention_variables() == environment


def test_teardown_unwraps_the_model_though_the_cluster_environment_is_gone() -> None:
    trainer = make_trainer(MCoreStrategy(), max_steps=1)
    strategy: Any = trainer.strategy
    with contextlib.suppress(AssertionError):
        trainer.fit(InStep(lambda: setattr(strategy, "cluster_environment", None)), loader(4, 2))
    assert not strategy.is_set_up


class Normalizes(PlainNet):
    """Has a batch norm, which its steps do not use.

    Args:
        norm: The batch norm.
    """

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def setup(self, stage: str) -> None:
        self.trainer.strategy._layer_sync = TorchSyncBatchNorm()  # type: ignore[attr-defined]


def test_synchronized_batch_norm_lasts_as_long_as_the_fit_that_needs_it() -> None:
    module = Normalizes(torch.nn.BatchNorm1d(4).requires_grad_(False))
    make_trainer(MCoreStrategy(), max_steps=1).fit(module, loader(4, 2))
    assert not isinstance(module.norm, torch.nn.SyncBatchNorm)
    own = Normalizes(torch.nn.SyncBatchNorm(4))
    make_trainer(MCoreStrategy()).validate(own, loader(4, 2), verbose=False)
    assert isinstance(own.norm, torch.nn.SyncBatchNorm)


class BrokenEnvironment(LightningEnvironment):
    """A cluster environment that cannot be torn down."""

    def teardown(self) -> None:
        raise OSError("the cluster is gone")


def outside_of_a_run(trainer: pl.Trainer, loaders: list[Any]) -> dict[str, Any]:
    """Return what a run changes in objects of the user while it lasts."""
    found: dict[str, Any] = {}
    for number, data in enumerate(loaders):
        found |= {f"loader {number}: {name}": value for name, value in vars(data).items()}
        if isinstance(data.sampler, DistributedSampler):
            found[f"sampler {number}: seed"] = data.sampler.seed
    for callback in trainer.checkpoint_callbacks:
        found["link"] = vars(callback).get("_link_checkpoint")
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    found["inference_mode"] = [loop.inference_mode for loop in loops]
    found["warnings"] = [entry for entry in warnings.filters if "resuming" in str(entry)]
    return found


@pytest.mark.parametrize("fails", [False, True], ids=["", "a plugin fails"])
def test_what_a_run_changes_of_the_users_objects_does_not_outlive_it(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    def run(seed: int, steps: int, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        samplers: Any = [DistributedSampler(Samples(size), num_replicas=1, rank=0, seed=seed) for size in (8, 4)]
        loaders = [loader(len(sampler), 2, sampler=sampler) for sampler in samplers]
        strategy = MCoreStrategy(checkpoint_io=StubbornIO() if fails else None)
        plugins = [BrokenEnvironment() if fails else LightningEnvironment()]
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_last="link", every_n_train_steps=1)
        options = {"plugins": plugins, "callbacks": [checkpoint], "enable_checkpointing": True}
        trainer = make_trainer(strategy, max_steps=steps, **options)
        before = outside_of_a_run(trainer, loaders)
        with pytest.raises(OSError, match="is gone") if fails else contextlib.nullcontext():
            trainer.fit(PlainNet(), *loaders, **arguments)
        return before, outside_of_a_run(trainer, loaders)

    for before, after in (run(1, 1), run(2, 4, ckpt_path=str(tmp_path / "step=1.ckpt"))):
        assert after == before


@pytest.mark.distributed
@on_ranks(2)
def test_metrics_of_a_pipeline_can_be_copied_after_the_run() -> None:
    module = StagedNet()
    trainer = make_trainer({"pipeline_model_parallel_size": 2}, max_steps=1)
    trainer.fit(module, loader(4, 2))
    copied = pickle.loads(pickle.dumps([metric.process_group for metric in metrics_of(module)]))
    assert isinstance(copy.deepcopy(metrics_of(module)), list)
    assert copied
    assert set(copied) == {None}


def _attention_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NVTE_")}


def test_a_second_model_may_choose_another_attention_backend() -> None:
    rows = [{"tokens": torch.arange(8), "labels": torch.arange(8)} for _ in range(2)]
    transformer = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    before = _attention_variables()
    modules = [
        MCoreGPT(vocab_size=16, seq_length=8, transformer={**transformer, "attention_backend": backend})
        for backend in ("auto", "local")
    ]
    for module in [*modules, modules[0]]:  # and go back to the first one, which is built already
        make_trainer({}, max_steps=1).fit(module, DataLoader(rows, batch_size=2))
        assert _attention_variables() == before


@pytest.mark.parametrize("place", ["training_step", "validation_step", "on_before_optimizer_step"])
def test_stop_iteration_in_a_step_is_an_error_and_not_the_end_of_the_data(place: str) -> None:
    module = PlainNet()

    def step(*_: Any, **__: Any) -> None:
        next(iter(()))

    setattr(module, place, step)
    with refuses(RuntimeError, "StopIteration was raised in a step"):
        make_trainer({}).fit(module, loader(4, 2), loader(4, 2))


def test_sigterm_ends_a_run_with_the_exit_code_of_shells() -> None:
    before = signal.getsignal(signal.SIGTERM)
    module = InStep(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SIGTERMException) as end:
        make_trainer({}).fit(module, loader(4, 2))
    assert end.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_group_of_a_world_that_is_closed_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_single_process()
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    group = consensus.control_group()
    assert group is consensus.control_group()
    assert len(consensus._groups) == 1
    dist.destroy_process_group()
    assert len(consensus._groups) == 0


def test_an_error_is_told_in_one_line_even_if_it_cannot_be_printed() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert rank_process.describe(ValueError("two\nlines")) == "ValueError: two lines"
    assert rank_process.describe(UnprintableError()) == "UnprintableError"
    assert len(rank_process.describe(ValueError("x" * 10_000))) < 1000


def test_messages_come_whole_however_they_are_cut() -> None:
    lines = Lines()
    assert lines.split(b'["enter", 1]\n["le') == [["enter", 1]]
    assert lines.split(b"") == []
    assert lines.split(b'ft", 1]\n') == [["left", 1]]


def test_a_rank_that_failed_waits_for_the_others_as_long_as_they_live_and_it_may() -> None:
    assert (
        rank_watch._GRACE + 2 * rank_watch._TICK < rank_watch._MEETING < rank_watch._LAST_GRACE - 2 * rank_watch._TICK
    )


def test_a_device_that_never_ends_its_work_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "_DEVICE_TIMEOUT", 0.2)
    never = threading.Event()
    assert not checkpointing._finishes(never.wait)
    never.set()
    assert checkpointing._finishes(never.wait)


def test_ranks_that_issued_other_numbers_of_collectives_are_out_of_step() -> None:
    assert rank_hub.out_of_step({0: {"dp": 3, "tp": 1}, 1: {"dp": 3}}) is None
    assert rank_hub.out_of_step({0: {"dp": 3}, 1: {}, 2: {"dp": 4}}) == (
        "ranks 0 and 2 are out of step since the run that failed"
    )


def test_a_checkpoint_io_of_lightning_is_torn_down_too() -> None:
    """The strategy tears down whatever plugin it was given."""

    class Counting(TorchCheckpointIO):
        times = 0

        def teardown(self) -> None:
            Counting.times += 1

    make_trainer(MCoreStrategy(checkpoint_io=Counting()), max_steps=1).fit(PlainNet(), loader(4, 2))
    assert Counting.times == 1
