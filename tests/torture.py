# SPDX-License-Identifier: Apache-2.0
"""Kill a rank at a random moment of a save, again and again, and see that nothing is lost.

One run of a small model saves after each optimizer step: a checkpoint named for the step, whose predecessor is deleted,
and ``last.ckpt``, which is replaced, or is a link that is set again. In each trial one rank, or both, is killed by
SIGKILL some time after a save began; then everything that can be seen in the folder has to be whole, and the next trial
starts with ``ckpt_path="last"``, from the newest that was saved under that name. So the losses of all trials together
are those of one run, which is compared with one that nobody disturbed. A survivor has to notice and to end by itself.

Runs differ (:class:`Kind`): in the layout, in whether ``last.ckpt`` is a link, and in whether the folder is reached
through a link. Within a run, four trials save synchronously, and the next four asynchronously.

The killer is a process of its own that was forked before; the rank wakes it when the save begins. It kills whatever the
rank is doing then: planning, copying, writing, renaming, deleting, training on. ``tests/distributed`` runs a few
trials, ``python -m benchmarks.checkpoint_torture`` as many as you like.
"""

import json
import os
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mcore import MCoreStrategy
from lightning_mcore.checkpoint.commands import verify
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.toy import PlainNet, StagedNet, loader, make_trainer

UNFINISHED = ".unfinished"
PHASES = ["before", "within", "after"]
WORLD_SIZE = 2
FOREVER = 100_000  # optimizer steps; a trial is ended by its killer


@dataclass(frozen=True)
class Kind:
    """What a run is like.

    Attributes:
        strategy: Arguments of MCoreStrategy.
        link: Whether ``last.ckpt`` is a link to the newest.
        linked_folder: Whether the folder of checkpoints lies behind a link.
    """

    strategy: dict[str, Any]
    link: bool = False
    linked_folder: bool = False


_PIPELINE, _DISTRIBUTED = {"pipeline_model_parallel_size": 2}, {"use_distributed_optimizer": True}
_ONE_FILE: dict[str, Any] = {}  # written by rank 0
KINDS = [
    Kind(_PIPELINE, link=True),
    Kind(_DISTRIBUTED, linked_folder=True),
    Kind(_PIPELINE, link=True, linked_folder=True),
    Kind(_DISTRIBUTED),
    Kind(_ONE_FILE, link=True),
    Kind(_PIPELINE),
]


@dataclass(frozen=True)
class Blow:
    """When a rank is to die.

    Attributes:
        victims: The ranks: one, or all as when a machine goes.
        save: The save of its run, from 0.
        since: What has to be seen on the disk before the delay: that nothing of this save is there (``"before"``), that
            it is being written (``"within"``), or that it is in place (``"after"``).
        delay: Seconds.
    """

    victims: tuple[int, ...]
    save: int
    since: str
    delay: float

    @classmethod
    def draw(cls, chance: random.Random, seconds: float, number: int) -> "Blow":
        """Draw one, for saves that take some seconds: every fourth at any moment, the others aimed at one phase."""
        since, span = [("before", 1.0), ("before", 0.1), ("within", 0.2), ("after", 0.5)][number % 4]
        victims = chance.choice([(0,), (1,), (0, 1)])
        return cls(victims, chance.randrange(4), since, chance.uniform(0, span * seconds))


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        folder: Where checkpoints go, and beside it what the run notes.
        steps: Optimizer steps to end at.
        kind: What it is like.
        asynchronous: Whether saves are.
        resume: The optimizer step that it has to start from, of the last checkpoint.
        blow: Who dies when, if anybody.
        saves: Whether it saves at all.
    """

    folder: Path
    steps: int
    kind: Kind
    asynchronous: bool = False
    resume: int = 0
    blow: Blow | None = None
    saves: bool = True

    @property
    def notes(self) -> Path:
        """What rank 0 notes as it happens: a JSON text in each line."""
        return self.folder.with_name(self.folder.name + ".notes")

    @property
    def sight(self) -> Path:
        """What the killer saw."""
        return self.folder.with_name(self.folder.name + ".sight")


@dataclass
class Tally:
    """What came of many trials.

    Attributes:
        phases: How many kills came in which part of a save.
        kills: How many there were.
        steps: The optimizer step that was reached.
        seconds: How long a save takes when nobody disturbs it.
    """

    phases: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    steps: int = 0
    seconds: float = 0.0


class Killer:
    """A forked process that kills this one some seconds after it is woken, and says what it saw on the disk then.

    Args:
        plan: The run.
        blow: When.
    """

    def __init__(self, plan: Plan, blow: Blow) -> None:
        reader, self._writer = os.pipe()
        victim = os.getpid()
        if os.fork() == 0:
            os.setsid()  # the launcher ends the rank's own session
            os.close(self._writer)  # so that it ends with the rank that never woke it
            if order := os.read(reader, 1000):
                save = json.loads(order)
                while PHASES.index(phase(plan.folder, **save)) < PHASES.index(blow.since) and os.getppid() == victim:
                    time.sleep(0.0002)
                time.sleep(blow.delay)
                if os.getppid() == victim:  # else it has noticed that the other one is dead, and ended by itself
                    os.kill(victim, signal.SIGKILL)
                    plan.sight.write_text(phase(plan.folder, **save))  # at once: survivors may clear up
            os._exit(0)
        os.close(reader)

    def wake(self, name: str, step: int) -> None:
        """Let the seconds begin, in the save of a checkpoint of this name at this optimizer step."""
        os.write(self._writer, json.dumps({"name": name, "step": step}).encode())


def phase(folder: Path, name: str, step: int) -> str:
    """Say how far a save is by what is on the disk."""
    if step_of(folder / name) == step:
        return "after"
    return "within" if (folder / UNFINISHED / name).exists() else "before"


def step_of(path: Path) -> int | None:
    """Return the optimizer step of a checkpoint, if there is one; one in a file is named for it."""
    if path.is_file():
        return int(path.resolve().name.removeprefix("step=").partition(".")[0].partition("-")[0])
    try:
        return json.loads((path / "checkpoint.json").read_text())["global_step"]
    except (FileNotFoundError, NotADirectoryError):  # of one in a file that has just come
        return None


class WatchedStrategy(MCoreStrategy):
    """Notes when saves begin and return, and wakes the killer."""

    def watch(self, plan: Plan) -> None:
        """Remember what this run is for."""
        self.plan = plan
        self.number_of_saves = 0
        blow = plan.blow
        self.killer = Killer(plan, blow) if blow is not None and dist.get_rank() in blow.victims else None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        began = time.monotonic()
        if self.killer is not None and self.plan.blow is not None and self.plan.blow.save == self.number_of_saves:
            self.killer.wake(os.path.basename(filepath), checkpoint["global_step"])
        self.number_of_saves += 1
        super().save_checkpoint(checkpoint, filepath, storage_options)
        note(self.plan, seconds=time.monotonic() - began)


class Notes(pl.Callback):
    """Notes the loss of each optimizer step before anything is saved.

    Sees to it that the run begins where it should, and that leftovers are gone after a save.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        assert self.step == self.plan.resume, f"begins at step {self.step}, and {self.plan.resume} was saved"

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        has_saved = self.plan.saves and not self.plan.asynchronous and trainer.strategy.number_of_saves  # type: ignore[attr-defined]
        if has_saved and trainer.is_global_zero:  # the others may be here while it deletes
            left = sorted(path.name for path in self.plan.folder.glob(f"{UNFINISHED}/*"))
            assert not left, f"{left} are left after a save"

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            note(self.plan, step=self.step, loss=float(outputs["loss"]))


def note(plan: Plan, **values: Any) -> None:
    """Append to the notes; in one write, so that a kill cannot cut a line."""
    if dist.get_rank() == 0:
        with open(plan.notes, "ab", buffering=0) as file:
            file.write(json.dumps(values).encode() + b"\n")


def train(plan: Plan) -> None:
    """Rank function: train until the end, or until killed."""
    strategy = WatchedStrategy(**plan.kind.strategy)
    strategy.watch(plan)
    callbacks: list[pl.Callback] = [Notes(plan)]
    if plan.saves:
        last: Any = "link" if plan.kind.link else True
        callbacks.append(ModelCheckpoint(plan.folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=last))
    trainer = make_trainer(
        strategy, max_steps=plan.steps, accumulate_grad_batches=2, callbacks=callbacks, enable_checkpointing=plan.saves
    )
    strategy.checkpoint_io = MCoreCheckpointIO(async_save=plan.asynchronous)
    net = StagedNet() if plan.kind.strategy else PlainNet()
    trainer.fit(net, loader(24, 2, shuffle=True), ckpt_path="last" if plan.saves else None)


def visible(folder: Path) -> list[Path]:
    """Return what can be taken for a checkpoint."""
    return sorted(path for path in folder.glob("*") if path.name != UNFINISHED)


def last_step(folder: Path) -> int:
    """Check that everything in the folder is whole, and return the step that ``ckpt_path="last"`` goes on from.

    That is the newest, or the one before where the kill came after that was saved and before it was also the last.
    """
    steps = {}
    for path in visible(folder):
        verify(str(path))
        steps[path] = step_of(path) or 0
    last = max((step for path, step in steps.items() if path.name.startswith("last")), default=0)
    newest = max(steps.values(), default=0)
    assert newest - 1 <= last <= newest, f"the last is of step {last}, and that of step {newest} is there"
    return last


def lines(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield what the run noted."""
    if plan.notes.exists():
        yield from map(json.loads, plan.notes.read_text().splitlines())


def torture(folder: Path, kills: int, seed: int, kind: Kind) -> Tally:
    """Kill ranks of one run after another, and compare their losses with an undisturbed run.

    Args:
        folder: An empty folder.
        kills: How many ranks to kill.
        seed: Of the moments.
        kind: What the run is like; all of it is one run.

    Returns:
        What the kills hit.

    Raises:
        AssertionError: Something was lost, or taken for what it is not.
    """
    chance = random.Random(seed)
    checkpoints = folder / "checkpoints"
    disk = folder / "disk" if kind.linked_folder else checkpoints
    disk.mkdir(parents=True)
    if kind.linked_folder:
        checkpoints.symlink_to("disk")
    calm = Plan(folder / "calm", 4, kind)
    run_ranks(WORLD_SIZE, train, calm)
    tally = Tally(seconds=statistics.median(line["seconds"] for line in lines(calm) if "seconds" in line))
    shutil.rmtree(calm.folder)
    seen: dict[int, float] = {}
    resume = 0
    while tally.kills < kills:
        blow = Blow.draw(chance, tally.seconds, tally.kills)
        plan = Plan(checkpoints, FOREVER, kind, tally.kills // 4 % 2 == 1, resume, blow)
        for path in (plan.notes, plan.sight):
            path.unlink(missing_ok=True)
        expect_death(plan)
        tally.kills += 1
        tally.phases[sighted(plan)] += 1
        seen |= record(plan, seen)
        last = last_step(checkpoints)
        assert last >= resume, f"the last was of step {resume} and is of step {last}"
        resume = last
    tally.steps = max(seen) + 2
    end = Plan(checkpoints, tally.steps, kind, resume=resume)
    end.notes.unlink(missing_ok=True)
    run_ranks(WORLD_SIZE, train, end)
    seen |= record(end, seen)
    assert last_step(checkpoints) == tally.steps
    assert not (checkpoints / UNFINISHED).exists()
    whole = Plan(folder / "whole", tally.steps, kind, saves=False)
    run_ranks(WORLD_SIZE, train, whole)
    undisturbed = record(whole, {})
    differ = {step for step in {*seen, *undisturbed} if seen.get(step) != undisturbed.get(step)}
    assert not differ, f"steps {sorted(differ)} of {tally.steps} have other losses than in a run that nobody disturbed"
    return tally


def expect_death(plan: Plan) -> None:
    """Run, and check that it ended by the kill and nothing else, and that the survivor noticed."""
    assert plan.blow is not None
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(WORLD_SIZE, train, plan, grace=20)
    assert any("SIGKILL" in failure.value.errors.get(victim, "") for victim in plan.blow.victims), failure.value
    assert not failure.value.unfinished, failure.value


def sighted(plan: Plan) -> str:
    """Return the phase that the killer saw; it may take a moment to say so."""
    deadline = time.monotonic() + 10
    while not plan.sight.exists() or not plan.sight.read_text():
        assert time.monotonic() < deadline, "the killer left no word"
        time.sleep(0.001)
    return plan.sight.read_text()


def record(plan: Plan, seen: dict[int, float]) -> dict[int, float]:
    """Return the losses that a run noted, by optimizer step; a step that ran before must have had the same."""
    losses = {line["step"]: line["loss"] for line in lines(plan) if "loss" in line}
    again = {step: loss for step, loss in losses.items() if step in seen and seen[step] != loss}
    assert not again, f"steps {sorted(again)} have other losses than before the kill"
    return losses
