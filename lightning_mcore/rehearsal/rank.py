# SPDX-License-Identifier: Apache-2.0
"""One rank of a rehearsal: two optimizer steps, a validation batch, and the state dicts of a save."""

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.optimizer.parts import optimizer_parts
from lightning_mcore.parallel.chunks import gradient_buffers
from lightning_mcore.parallel.fully_sharded import FullyShardedChunk
from lightning_mcore.parallel.groups import Axis, process_group
from lightning_mcore.planning.machines import Machine
from lightning_mcore.rehearsal.counts import Counts
from lightning_mcore.rehearsal.device import Answers, fake_cuda
from lightning_mcore.strategy.offload import OffloadActivations
from lightning_mcore.strategy.strategy import MCoreStrategy

STEPS = 2  # the first one also creates the optimizer's state
Progress = Callable[[str], None]
Build = Callable[[], tuple[pl.Trainer, pl.LightningModule, Any]]
"""Returns a Trainer, a module and its data; it runs in a process of its own, so it must be importable."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one group, in a step: calls, and bytes of their larger side."""

    kind: str
    group: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Wait:
    """A line of code at which a step waits for the device, and how often it does."""

    where: str
    what: str
    times: int


@dataclass(frozen=True)
class Holder:
    """What holds memory at the peak: a kind, and for activations the module that made them."""

    kind: str
    module: str
    bytes: int


@dataclass(frozen=True)
class RankReport:
    """What one rank does in its second step, and the most memory that it ever needs.

    Args:
        rank: The rank.
        stage: Its pipeline stage.
        parameters: Numbers that it holds.
        peak_bytes: The most memory, over both steps, validation and save.
        peak_phase: When that was.
        holders: What holds memory at the peak, largest first.
        step_peak_bytes: The most memory of the second step.
        traffic: The collectives of a step.
        waits: Where a step waits for the device.
        operators: Operators on the device in a step.
        seconds: How long this rank took to rehearse.
        cpu_seconds: The CPU time of that, without imports.
        host_bytes: The most memory of its process on the host.
        reads: The module's own lines that read values from the device, and the values that they got.
        notes: What else was assumed.
    """

    rank: int
    stage: int
    parameters: int
    peak_bytes: int
    peak_phase: str
    holders: tuple[Holder, ...]
    step_peak_bytes: int
    traffic: tuple[Traffic, ...]
    waits: tuple[Wait, ...]
    operators: int
    seconds: float
    cpu_seconds: float
    host_bytes: int
    reads: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class _Phases(Callback):
    """Follows a fit from phase to phase."""

    counts: Counts
    progress: Progress
    phase: str = "setup"
    peaks: dict[str, tuple[int, Counter[tuple[str, str]]]] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    stage: int = 0

    def enter(self, phase: str) -> None:
        """End a phase and begin another."""
        memory = self.counts.memory
        memory.keep_holders()
        if memory.peak > self.peaks.get(self.phase, (0,))[0]:
            self.peaks[self.phase] = memory.peak, memory.at_peak
        memory.restart_peak()
        self.phase = phase
        self.progress(phase)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Learn the names of modules, and what the tensors that exist are for."""
        for chunk in trainer.strategy.chunks.bare:  # type: ignore[attr-defined]
            self.counts.name_modules(chunk)
            config: Any = getattr(chunk, "config", None)
            if getattr(config, "mtp_detach_heads", False) and config.mtp_num_layers:  # the last stage has these heads
                self.counts.answers["has_grad_norm_group"] = 1
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 1, STEPS  # now that schedules are made
        self.claim(trainer)
        own = {id(item): item.numel() for chunk in trainer.strategy.chunks.bare for item in chunk.parameters()}  # type: ignore[attr-defined]
        self.parameters, self.stage = sum(own.values()), process_group("pp").rank()

    def claim(self, trainer: pl.Trainer) -> None:
        """Say which tensors are weights, gradients and state of the optimizer."""
        chunks: Any = trainer.strategy.chunks  # type: ignore[attr-defined]
        for optimizer in trainer.strategy.megatron_optimizers:  # type: ignore[attr-defined]
            for part in optimizer_parts(optimizer.megatron):
                if getattr(part, "is_stub_optimizer", False):
                    continue
                values = [value for state in part.optimizer.state.values() for value in state.values()]
                groups = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
                tensors = (item for item in (*values, *groups) if isinstance(item, torch.Tensor))
                own = (item.to_local() if isinstance(item, DTensor) else item for item in tensors)
                self.counts.claim(own, "optimizer")
        for chunk in chunks.bare:
            self.counts.claim(chunk.parameters(), "weights")
            self.counts.claim((item.grad for item in chunk.parameters() if item.grad is not None), "gradients")
            self.counts.claim(chunk.buffers(), "buffers")
            for module in chunk.modules():
                self.counts.claim(getattr(module, "_fp8_workspaces", {}).values(), "weights in 8 bits")
        for chunk in chunks.ddp:
            self.counts.claim(gradient_buffers(chunk), "gradients")
            if isinstance(chunk, FullyShardedChunk):
                self.counts.claim(chunk.weights, "weights")

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Begin a step with its first batch."""
        phase = f"step {trainer.global_step + 1}"
        if self.phase != phase:
            self.claim(trainer)
            self.enter(phase)
            if trainer.global_step == STEPS - 1:  # the first step also creates state, so only the last is counted
                for seen in (self.counts.collectives, self.counts.traffic, self.counts.waits):
                    seen.clear()
                self.counts.operators = 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Count what follows as the optimizer's."""
        self.counts.is_stepping = True

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Keep what the last step has done."""
        self.counts.is_stepping = False
        if trainer.global_step == STEPS:
            self.keep_step()

    def keep_step(self) -> None:
        """Keep what the last step has done so far, unless it is kept."""
        if not self.step:
            counts = self.counts
            self.step = {
                "traffic": tuple(
                    Traffic(*key, calls, counts.traffic[key])
                    for key, calls in counts.collectives.most_common()
                    if key[1]
                ),
                "waits": tuple(Wait(*key, times) for key, times in counts.waits.most_common()),
                "operators": counts.operators,
            }

    def leave_out_gathers(self, strategy: MCoreStrategy) -> None:
        """Do not count the gather of parameters that follows the last step of a run: other steps leave it to the next.

        In manual optimization each step gathers them.
        """
        complete = strategy.complete_parameters

        def complete_after_step() -> None:
            if self.phase == f"step {STEPS}" and strategy.lightning_module.automatic_optimization:  # type: ignore[union-attr]
                self.keep_step()
            complete()

        strategy.complete_parameters = complete_after_step  # type: ignore[method-assign]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin validation."""
        self.enter("validation")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the state dicts of a save."""
        self.claim(trainer)
        self.enter("save")
        trainer.save_checkpoint("rehearsal.ckpt")  # goes to _Nowhere
        self.enter("end")


class _Nowhere(MCoreCheckpointIO):
    """Takes the state of a save, and writes nothing."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Do nothing."""


def shorten(trainer: Any, phases: "_Phases") -> None:
    """Let a trainer run two steps and a validation batch, and write nothing."""
    strategy = trainer.strategy
    strategy._launcher = None  # this process plays its rank alone
    strategy._process_group_backend = "fake"
    strategy.checkpoint_io = _Nowhere()
    trainer.limit_train_batches = STEPS * trainer.accumulate_grad_batches
    trainer.limit_val_batches = min(1, trainer.limit_val_batches) and 1
    trainer.num_sanity_val_steps, trainer.val_check_interval, trainer.check_val_every_n_epoch = 0, 1.0, 1
    if trainer.max_steps != -1:  # then it alone says how long a schedule of learning rates is
        trainer.fit_loop.max_epochs = -1
    trainer.loggers = []
    # Those of Lightning and of this package save, print or watch.
    own = [
        item
        for item in trainer.callbacks
        if type(item).__module__.partition(".")[0] not in _NOT_THE_USERS or isinstance(item, OffloadActivations)
    ]
    trainer.callbacks = [*own, phases]
    phases.leave_out_gathers(strategy)


_NOT_THE_USERS = ("lightning", "pytorch_lightning", "lightning_mcore")


def _name_of(group: dist.ProcessGroup) -> str:
    """Return the axis of a group, or how many ranks it has; nothing for a group of one rank."""
    if group.size() == 1:
        return ""
    for axis in get_args(Axis):
        if process_group(axis) is group:
            return str(axis)
    return "all" if group is dist.group.WORLD else f"{group.size()} ranks"


@dataclass(frozen=True)
class World:
    """The ranks of a run, from its Trainer."""

    size: int
    devices_per_node: int
    layout: ParallelLayout

    def chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        """Return the ranks to show; None means the first, middle and last stage of rank 0's pipeline.

        Raises ValueError if the layout does not divide the world, or a rank is outside it.
        """
        self.layout.validate_world(self.size)
        stages = self.layout.pipeline_model_parallel_size
        of_stage = self.size // stages
        # 32 ranks in 4 stages: rank 0 sends to rank 8, then 16, then 24.
        ranks = sorted({0, stages // 2 * of_stage, (stages - 1) * of_stage}) if ranks is None else ranks
        for rank in ranks:
            self.layout.coordinates(rank, self.size)
        return tuple(dict.fromkeys(ranks))

    def with_ends(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks and the ends of their pipelines.

        Loss and logs come from the last stage, and unknown shapes from the first.
        32 ranks in 4 stages: rank 10 is in stage 1, and its pipeline begins with rank 2 and ends with rank 26.
        """
        stages = self.layout.pipeline_model_parallel_size
        of_stage = self.size // stages
        ends = (stage * of_stage + rank % of_stage for rank in ranks for stage in (0, stages - 1))
        return tuple(dict.fromkeys([*ranks, *ends]))


def world_of(build: Build, library: Path, devices_per_node: int, machine: Machine) -> World:
    """Make the Trainer of a run, as rank 0 does, and return its world."""
    with fake_cuda(library, 0, 1, devices_per_node, machine, Answers()):
        trainer, _, _ = build()
        strategy = trainer.strategy
        if not isinstance(strategy, MCoreStrategy):
            kind = type(strategy).__name__
            raise TypeError(f"{kind} is not MCoreStrategy; rehearse a Trainer(strategy=MCoreStrategy(...))")
        if strategy.root_device.type != "cuda":
            raise ValueError("accelerator='cpu' has no GPU to rehearse; make the Trainer with accelerator='gpu'")
        return World(trainer.num_devices * trainer.num_nodes, trainer.num_devices, strategy.layout)


def play(
    build: Build,
    world: World,
    rank: int,
    together: tuple[int, ...],
    store: Any,
    library: Path,
    machine: Machine,
    assume: Mapping[str, float],
    progress: Progress,
) -> RankReport:
    """Run a fit as one rank of a world; ``together`` are the ranks that are played at the same time."""
    begun = time.monotonic()
    answers = Answers(store, rank, together)
    with fake_cuda(library, rank, world.size, world.devices_per_node, machine, answers, assume) as counts:
        progress("setup")
        trainer, module, data = build()
        phases = _Phases(counts, progress)
        counts.group_names = _name_of
        shorten(trainer, phases)
        try:
            trainer.fit(module, *([data] if isinstance(data, pl.LightningDataModule) else data))
        except Exception as error:
            error.reads = counts.reads  # type: ignore[attr-defined]
            raise
        if not phases.step:
            done = trainer.global_step
            raise ValueError(f"the data ended after {done} of {STEPS} optimizer steps; give more batches")
    peak_phase, (peak, held) = max(phases.peaks.items(), key=lambda item: item[1][0])
    return RankReport(
        rank=rank,
        stage=phases.stage,
        parameters=phases.parameters,
        peak_bytes=peak,
        peak_phase=peak_phase,
        holders=tuple(Holder(kind, module, size) for (module, kind), size in held.most_common() if size > 0),
        step_peak_bytes=phases.peaks[f"step {STEPS}"][0],
        seconds=time.monotonic() - begun,
        cpu_seconds=time.process_time(),
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        reads=dict(counts.reads),
        notes=tuple(sorted(counts.notes)),
        **phases.step,
    )
