# SPDX-License-Identifier: Apache-2.0
"""Exact resume: k steps, a checkpoint, a new process and N-k steps equal N steps, bit for bit.

Every Lightning checkpoint has weights, optimizer and loops. :class:`ExactResume` adds each rank's random states and its
position in the data, as a dict (``rank_state.py``). The strategy calls its methods from the hooks of the same name.

Lightning's counters differ between the moments at which a checkpoint may be saved, so a run continues at one of two
places. *In an epoch*, it continues with the next batch, as after a checkpoint of ``on_train_batch_end``. *Between
epochs*, the next epoch starts with all of its hooks and a new iterator; validation and ``on_train_epoch_end`` of the
last batch are not repeated, because their metrics are gone. While batches accumulate, a checkpoint belongs to the last
optimizer step: with ``accumulate_grad_batches=4``, one saved after 6 of 10 batches continues with batch 4 and the
random state from before it. Buffers of a plain module (batch norm) have already seen batches 4 and 5.

With another number of data-parallel ranks, no sample is lost or repeated if Lightning's distributed sampler distributes
them. Two things cannot be continued exactly: the random numbers of dataloader workers in the middle of an epoch (their
seeds are the same, also in later epochs), and a sampler or iterable dataset that draws from the global generators while
it is read.
"""

import contextlib
import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len  # private, but finds every set_epoch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # private: how dataloader_iter is recognized
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_mcore.checkpoint.megatron_lm import MegatronProgress
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.data import loop_progress
from lightning_mcore.data.loop_progress import LoopProgress
from lightning_mcore.data.position import Position, PositionTracker, index_sampler, wrapped_sampler
from lightning_mcore.parallel.attributes import set_until_closed
from lightning_mcore.parallel.consensus import combine_on_rank0, control_group, run_on_all_ranks
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.random_state import RandomState, draw_other_numbers, pick, put, take
from lightning_mcore.strategy.preemption import shield_workers
from lightning_mcore.strategy.rank_state import LoaderState, RankState, epoch_of, kind_of, seed_of

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy

_LOST_ORDER = "Lightning's distributed sampler has replaced the sampler of a train dataloader that keeps its own state"
_KEEP_ORDER = (
    "set Trainer(use_distributed_sampler=False), and give the dataloader torchdata's StatefulDistributedSampler"
)


class ExactResume:
    """Saves and restores the random states and the position in the data of one rank.

    A checkpoint may need an earlier random state than the current one:

    =======================================  =============================================
    before the first batch after a resume    the one from the checkpoint that was read
    within a window of accumulated batches   the one from before the window's first batch
    during validation, and after the run     the one that training set aside
    =======================================  =============================================
    """

    def __init__(self, strategy: "MCoreStrategy", layout: ParallelLayout) -> None:
        self._strategy = strategy
        self._layout = layout
        self._restores = contextlib.ExitStack()  # undoes changes to loaders and callbacks
        self._quiet = contextlib.ExitStack()  # hides Lightning's warnings
        self._forget()

    def _forget(self) -> None:
        self._restored: RankState | None = None  # from a checkpoint, until training starts
        self._trackers: dict[int, PositionTracker] = {}  # by the id of the loader
        self._num_loaders = 0  # that Lightning has loaded together
        self._replaced = id(None)  # of the loaders that Lightning replaces by these
        # The interrupted run's seeds of distributed samplers, by number of the loader and this run's seed
        self._seeds: dict[int, dict[int, int]] = {}
        self._window: tuple[int, RandomState] | None = None  # its first batch, and the random state before that
        self._random_of_training: RandomState | None = None  # while validation draws, and after the run
        self._loaders_of_fit: Any = None  # after the run, because Lightning's validate() drops them
        # States of stateful loaders, taken before they read a batch: the first batch of this window and of the next, by
        # number; the epoch's last batch; and the previous epoch's last batch. The states are None if a loader had read
        # nothing before this epoch.
        self._states_of_windows: dict[int, list[Any]] = {}
        self._states_before_last: list[Any] | None = None
        self._states_of_previous_epoch: list[Any] | None = None
        self._loaded_states: list[Any] | None = None  # until a batch is read, as LitData's loader returns wrong ones

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state of this process."""
        return {"_strategy": self._strategy, "_layout": self._layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without the state of the other process."""
        self.__init__(state["_strategy"], state["_layout"])  # type: ignore[misc]

    # ---- resuming, in this order

    def restore(
        self, saved: Mapping[str, int] | None, read: Callable[[int], dict[str, Any]], checkpoint: dict[str, Any]
    ) -> None:
        """Take over the state of a rank that saved, before Lightning reads the rest of the checkpoint; collective.

        ``saved`` has the coordinates of one of them (None leaves everything to Lightning), ``read`` returns any rank's
        :meth:`rank_state`. Loops and loaders in ``checkpoint`` are changed for this rank. Raises ``ValueError`` if
        loaders with their own state were in the middle of an epoch on another number of data-parallel ranks.
        """
        if saved is None or "loops" not in checkpoint or self._trainer_of_fit is None:
            return
        mine = self._coordinates()
        ranks = mine["data_parallel_size"]
        number, is_own = pick(saved, mine, self._strategy.global_rank)
        state = RankState.from_plain(run_on_all_ranks(lambda: read(number)))
        if state.ranks != ranks:  # all ranks share the same order, which rank 0 has in any case
            first = RankState.from_plain(run_on_all_ranks(lambda: read(0)))
            state = replace(state, loaders=first.loaders, stateful=first.stateful)
        # On another layout, states of the device and of Megatron's tracker belong to other parts of the model.
        if not is_own:
            state = replace(state, random=replace(state.random, device=None, tracker=None))
        loops = checkpoint["loops"]["fit_loop"]
        state.progress.write(loops)
        loops["state_dict"].pop("combined_loader", None)
        if state.stateful and state.ranks == ranks:
            if not state.begins_pass:  # otherwise on_train_start() loads them
                loops["state_dict"]["combined_loader"] = state.stateful
        elif state.stateful and state.progress.in_epoch:
            raise ValueError(
                f"the checkpoint contains dataloader states from the middle of an epoch on {state.ranks} data-parallel"
                f" ranks, which {ranks} ranks cannot use; resume on {state.ranks}, or from the end of an epoch"
            )
        self._restored = state

    def restore_of_megatron(
        self,
        progress: MegatronProgress,
        loops: dict[str, Any],
        read: Callable[[Mapping[str, int], RandomState], RandomState | str],
    ) -> str | None:
        """Continue where a run of Megatron-LM stopped in the data, if its checkpoint says where; changes ``loops``.

        An item of a loader is a microbatch on one data-parallel rank, in Megatron-LM as here. ``read`` returns the
        random state for a rank's coordinates and current state, or why there is none. Returns why random states begin
        anew, or None if they continue; collective.
        """
        if not progress.batches:
            return "the checkpoint does not say how many samples were read"
        mine, now = self._coordinates(), take(self._strategy.root_device)
        random = read(mine, now)
        why = combine_on_rank0(
            lambda: random if isinstance(random, str) else None,
            lambda reasons: next((reason for reason in reasons if reason is not None), None),
        )
        if why is not None or isinstance(random, str):
            random = now
        place = LoopProgress(0, True, False, False, progress.batches, 0, progress.iteration)
        place.write(loops)
        ranks, size = progress.data_parallel_size, progress.micro_batch_size
        position = Position(progress.batches, ranks, size, seed=progress.seed)
        self._restored = RankState(
            coordinates={**mine, "data_parallel_size": ranks},
            progress=place,
            random=random,
            loaders=[LoaderState("index", position)],
            stateful=[],
            metrics={},
        )
        return why

    def setup(self) -> None:
        """Forget an earlier fit, but keep the checkpoint that was read for this one."""
        if self._trainer_of_fit is None:  # a checkpoint that is saved after validate() belongs to the fit before it
            return
        restored = self._restored
        self._forget()
        self._restored = restored

    def process_dataloader(self, loader: object) -> None:
        """Track a training loader; keep validation loaders from drawing common random numbers for their workers."""
        self._seed_workers(loader)
        trainer = self._trainer_of_fit
        if trainer is None:
            return
        if trainer.state.stage == RunningStage.TRAINING:
            self._process_training_loader(loader, trainer)
        elif isinstance(loader, DataLoader) and loader.generator is None:
            own = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
            set_until_closed(self._restores, loader, "generator", own)

    def _seed_workers(self, loader: object) -> None:
        """Seed a loader's workers by data-parallel rank, so that ranks of one model copy augment data alike."""
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            seed = partial(pl_worker_init_function, rank=process_group("dp").rank())
            set_until_closed(self._restores, loader, "worker_init_fn", seed)
        if isinstance(loader, DataLoader) and self._strategy.lightning_module is not None:
            shield_workers(loader, self._strategy.lightning_module.trainer, self._restores)

    def _process_training_loader(self, loader: Any, trainer: pl.Trainer) -> None:
        """Track a training loader; Lightning opens it next, with the random states that are set here."""
        restored = self._restored
        if (replaced := id(trainer.fit_loop._combined_loader)) != self._replaced:
            self._num_loaders, self._replaced = 0, replaced
            # With reload_dataloaders_every_n_epochs, a resumed run loads twice if it asks how many steps there will be.
            if restored is not None:
                self._forget_trackers(())
        index = self._num_loaders
        self._num_loaders += 1
        ranks = self._layout.data_parallel_size(self._strategy.world_size)
        progress: Any = trainer.fit_loop.epoch_progress.current
        epoch = restored.progress.epoch if restored is not None else progress.processed
        _set_sampler_epoch(loader, epoch)  # workers read ahead before Lightning does it
        if restored is not None:
            restored.set_epoch(loader, index)
        opens_now = restored is not None and restored.is_between_epochs and not restored.can_open_later
        if restored is not None and opens_now:  # otherwise on_train_start() restores them, at the end
            put(restored.random, self._strategy.root_device)
        tracker = self._trackers.get(id(loader))  # of a loader that a reload returns again
        if tracker is None and isinstance(loader, DataLoader) and kind_of(loader) != "stateful":
            position = restored.position(index) if restored is not None else None
            seeds = self._seeds.setdefault(index, {})
            tracker = PositionTracker(loader, ranks, self.batch_arrives, position, seeds)
            self._trackers[id(loader)] = tracker
            self._restores.callback(_detach, weakref.ref(tracker))
            if position is not None and opens_now:
                tracker.put_own_states(position.own)
        elif tracker is None:
            self._set_seed(loader, index)
        if restored is not None and restored.progress.in_epoch:
            _check_continues(loader, index, tracker, restored, ranks)
        if _loses_order(loader):
            rank_zero_warn(f"this run cannot resume in the middle of an epoch, because {_LOST_ORDER}; {_KEEP_ORDER}")

    def _set_seed(self, loader: Any, index: int) -> None:
        """Give a loader's distributed sampler the interrupted run's seed, which the loader's own state lacks."""
        seeds, users_seed = self._seeds.setdefault(index, {}), seed_of(loader)
        if users_seed is None:
            return
        if self._restored is not None and (saved := self._restored.seed(index)) is not None:
            seeds[users_seed] = saved
        if users_seed in seeds:
            set_until_closed(self._restores, index_sampler(loader), "seed", seeds[users_seed])

    def on_train_start(self) -> None:
        """Continue from the checkpoint; the last action before the first batch or the hooks of the first epoch."""
        restored = self._restored
        self._restored = self._window = self._random_of_training = None
        assert self._strategy.lightning_module is not None
        fit: Any = self._strategy.lightning_module.trainer.fit_loop
        self._keep_states(fit)
        if restored is None:
            if fit.epoch_progress.current.processed == 0:
                nothing = [None for loader in fit._combined_loader.flattened if kind_of(loader) == "stateful"]
                self._states_of_previous_epoch = self._states_before_last = nothing
            return
        if restored.begins_pass:
            self._states_of_previous_epoch = self._states_before_last = restored.stateful
        elif restored.progress.in_epoch and restored.stateful:
            self._loaded_states = copy.deepcopy(restored.stateful)  # LitData's loader changes what it has loaded
            self._states_of_windows = {restored.progress.batches: self._loaded_states}
        loop_progress.restore_metrics(fit, restored.metrics)
        if restored.progress.in_epoch:
            self._continue_epoch(fit, restored)
        else:
            self._leave_epoch(fit, restored)

    def _keep_states(self, fit: Any) -> None:
        """Keep the states of stateful loaders before each batch at which a run may continue."""
        # With accumulate_grad_batches=4, a checkpoint after 6 of 10 batches continues with batch 4. One after the epoch
        # continues in a new pass, which a loader may begin where the old one ended: so the old one is brought there,
        # from before its last batch.
        before_fetch = fit.epoch_loop._on_before_fetch

        def keep() -> None:
            fetcher, loaders = fit._data_fetcher, fit._combined_loader.flattened
            number, length = fetcher.fetched, fetcher.length
            self._forget_trackers(loaders)
            if number == 0:
                self._states_of_previous_epoch, self._states_before_last = self._states_before_last, None
            # Source: ``_PrefetchDataFetcher`` (2.6) reads one batch ahead if the length is unknown, to find the last.
            is_last = number + 1 == length if length is not None else number < min(fit._combined_loader.limits)
            begins_window = number % fit.trainer.accumulate_grad_batches == 0
            if (begins_window or is_last) and not self._strategy.batches.only_receives:
                loaded, self._loaded_states = self._loaded_states, None
                states = loaded if loaded is not None else _states(loaders, number)
                if begins_window:
                    self._states_of_windows = dict([*self._states_of_windows.items()][-1:]) | {number: states}
                # end_pass() reads the last batch again.
                has_all = number > 0 or None not in states
                can_end = is_last and has_all and all(kind_of(it) != "read" for it in loaders)
                self._states_before_last = states if can_end else None
            before_fetch()

        self._restores.enter_context(mock.patch.object(fit.epoch_loop, "_on_before_fetch", keep))

    def _forget_trackers(self, loaders: Iterable[Any]) -> None:
        """Forget the trackers of loaders that other ones have replaced."""
        kept = set(map(id, loaders))
        # The newest first: if two have one sampler, the older knows the user's seed
        for tracker in [self._trackers.pop(it) for it in reversed([*self._trackers]) if it not in kept]:
            tracker.detach(self._trackers.values())

    def _continue_epoch(self, fit: Any, restored: RankState) -> None:
        """Continue with the next batch of an epoch."""
        num_loaders = len(fit._combined_loader.flattened)
        if restored.loaders is not None and len(restored.loaders) != num_loaders:
            raise ValueError(
                f"the checkpoint was taken in the middle of an epoch over {len(restored.loaders)} dataloaders, but"
                f" there are {num_loaders} now; resume with the dataloaders of the run that saved it"
            )
        if fit._combined_loader_states_to_load:
            loop_progress.load_loaders(fit, [kind == "stateful" for kind in restored.kinds])
        if restored.begins_pass:
            loop_progress.begin_pass(fit, restored.stateful)
        loop_progress.EndOfRestart.attach(fit.trainer)
        self._restores.callback(loop_progress.EndOfRestart.detach, fit.trainer)
        self._skip_batches(fit, restored)
        for callback in fit.trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):  # Lightning skips this hook in a resumed epoch
                callback.on_train_epoch_start(fit.trainer)
        if fit.epoch_loop._should_accumulate():  # Lightning counts this step only at the end of a window
            fit.epoch_loop._batches_that_stepped += 1
        # Lightning looks for a loader with its own state and finds none, so it warns before the first batch.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        # Random states come last, because each step before this may draw numbers.
        put(restored.random, self._strategy.root_device)

    def _skip_batches(self, fit: Any, restored: RankState) -> None:
        """Skip batches that can only be skipped by reading; trackers skip the others without."""
        batches, kinds = restored.progress.batches, restored.kinds
        if "read" in kinds and "stateful" in kinds:
            loop_progress.skip_batches_of(fit._data_fetcher, batches, [kind == "read" for kind in kinds])
        elif "read" in kinds:
            loop_progress.skip_batches(fit._data_fetcher, batches)
        elif len(self._trackers) == 1 and (position := restored.position(0)) is not None:
            [tracker] = self._trackers.values()
            if not tracker.has_same_batches(position):
                length = len(fit._combined_loader.flattened[0])
                loop_progress.recount_batches(fit, batches, length, tracker.remaining(position))

    def _leave_epoch(self, fit: Any, restored: RankState) -> None:
        """Begin the next epoch, or end the one whose last validation has run."""
        fit._restarting = False  # otherwise Lightning would not step plateau schedulers at the end of this epoch
        kinds = [kind_of(loader) for loader in fit._combined_loader.flattened]
        if restored.loaders is None or kinds == restored.kinds:  # loaders of other kinds begin anew
            if fit._combined_loader_states_to_load:
                loop_progress.load_loaders(fit, [kind == "stateful" for kind in restored.kinds])
            if restored.ranks == self._layout.data_parallel_size(self._strategy.world_size):
                self._states_before_last = restored.stateful
            if "stateful" in kinds and restored.can_open_later and restored.loaders is not None:
                loop_progress.end_pass(fit)
        if restored.is_between_epochs:
            loop_progress.begin_epoch(fit, restored.progress, restored.can_open_later)
            if restored.progress.waits:
                loop_progress.step_plateaus(fit)
            if not restored.can_open_later:
                return  # process_dataloader() has restored the random states
        put(restored.random, self._strategy.root_device)
        for index, loader in enumerate(fit._combined_loader.flattened):
            tracker, position = self._trackers.get(id(loader)), restored.position(index)
            if tracker is not None and position is not None:
                tracker.put_own_states(position.own)

    # ---- while training

    def batch_arrives(self) -> None:
        """Remember the random state before the first batch of a window of ``accumulate_grad_batches``."""
        assert self._strategy.lightning_module is not None
        self._quiet.close()
        trainer = self._strategy.lightning_module.trainer
        number = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not trainer.training or number % trainer.accumulate_grad_batches:
            return
        if self._window is None or self._window[0] != number:
            self._window = (number, take(self._strategy.root_device))

    def batch_is_read(self, loader: Any) -> None:
        """Note that another rank of the model copy reads a loader's next batch, as the loader itself does here."""
        if id(loader) in self._trackers and loader.num_workers == 0:
            self.batch_arrives()

    def on_validation_start(self) -> None:
        """Set the random state of training aside."""
        if self._trainer_of_fit is not None:
            self._random_of_training = take(self._strategy.root_device)
            draw_other_numbers()

    def on_validation_end(self) -> None:
        """Restore the random state of training."""
        if self._trainer_of_fit is not None and self._random_of_training is not None:
            put(self._random_of_training, self._strategy.root_device)
            self._random_of_training = None

    def on_train_end(self) -> None:
        """Set the random state and the loaders aside, for a checkpoint that is saved after the run."""
        self._random_of_training = take(self._strategy.root_device)
        assert self._strategy.lightning_module is not None
        self._loaders_of_fit = self._strategy.lightning_module.trainer.fit_loop._combined_loader

    def teardown(self) -> None:
        """Restore the loaders and the trainer's callbacks."""
        self._quiet.close()
        self._restored = None
        self._restores.close()

    # ---- saving

    def gather(self, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's :meth:`rank_state` on rank 0, for a single-file checkpoint; collective."""
        mine = self.rank_state(checkpoint)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [mine]
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, states if dist.get_rank() == 0 else None, dst=0, group=control_group())
        return states

    def rank_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's ``RankState`` as a dict; empty if there is nothing to resume."""
        module = self._strategy.lightning_module
        if module is None or module._trainer is None or "optimizer_states" not in checkpoint:
            return {}
        trainer = module.trainer
        progress = LoopProgress.of(trainer)
        fit_state = checkpoint["loops"]["fit_loop"]["state_dict"]
        # A rank that only receives its batches does not know the state of the loaders.
        stateful = fit_state.get("combined_loader", [])
        if trainer.fit_loop._combined_loader is None and self._loaders_of_fit is not None:  # after validate()
            stateful = self._loaders_of_fit._state_dicts()
        kept = self._states_of_windows.get(progress.batches) if progress.in_epoch else self._states_before_last
        previous = self._states_of_previous_epoch if progress.in_epoch and progress.batches == 0 else None
        if previous is not None:
            stateful = previous
        if kept is not None:
            stateful = [now if before is None else before for before, now in zip(kept, stateful, strict=True)]
        own = self._loader_states(trainer, progress), stateful, bool(previous)
        loaders, stateful, begins_pass = self._strategy.batches.from_reader(own)
        state = RankState(
            coordinates=self._coordinates(),
            progress=progress,
            random=self._random_state(trainer, progress),
            loaders=loaders,
            stateful=stateful,
            begins_pass=begins_pass,
            metrics={name: value.detach().cpu() for name, value in trainer.callback_metrics.items()},
        )
        return state.to_plain()

    def _coordinates(self) -> dict[str, int]:
        """Return this rank's place on every axis, and the sizes of the axes."""
        strategy, layout = self._strategy, self._layout
        places = asdict(layout.coordinates(strategy.global_rank, strategy.world_size))
        axes = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {f"{axis}_parallel_size": getattr(layout, f"{axis}_parallel_size") for axis in axes}
        sizes["expert_tensor_parallel_size"] = layout.expert_tensor_size
        return {**places, **sizes, "data_parallel_size": layout.data_parallel_size(strategy.world_size)}

    def _random_state(self, trainer: pl.Trainer, progress: LoopProgress) -> RandomState:
        """Return the random state that belongs to the progress: the current one, or one kept from earlier."""
        if self._restored is not None:  # between reading a checkpoint and the first batch
            return self._restored.random
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_in_window = progress.rewound > 0 or batches.ready > batches.processed
        if is_in_window and self._window is not None:
            first_batch, random = self._window
            if first_batch == progress.batches:
                return random
        return self._random_of_training or take(self._strategy.root_device)

    def _loader_states(self, trainer: pl.Trainer, progress: LoopProgress) -> list[LoaderState] | None:
        fit = trainer.fit_loop
        combined: Any = self._loaders_of_fit if fit._combined_loader is None else fit._combined_loader
        if combined is None or isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher):
            return None  # with dataloader_iter the module reads as many batches as it likes
        states = []
        for index, loader in enumerate(combined.flattened):
            position, seed = None, seed_of(loader)
            if (tracker := self._trackers.get(id(loader))) is not None:
                batches = loop_progress.batches_in_pass(combined._mode, progress.batches, sized_len(loader))
                position = tracker.current_position(batches)
            if seed is not None:  # after the run, the sampler has the user's seed again
                seed = self._seeds.get(index, {}).get(seed, seed)
            states.append(LoaderState(kind_of(loader), position, epoch_of(loader), seed))
        return states

    @property
    def _trainer_of_fit(self) -> pl.Trainer | None:
        """The trainer while it fits; None in other runs and without one."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None


def _detach(tracker: Callable[[], PositionTracker | None]) -> None:
    """Give a loader back its own sampler, if the loader still exists."""
    if (existing := tracker()) is not None:
        existing.detach()


def _states(loaders: list[Any], number: int) -> list[Any]:
    """Return copies of the states of stateful loaders before batch ``number`` of the epoch; None to use others."""
    # A loader that counts trained batches need not be asked early. Before the first batch of an epoch, only torchdata's
    # has begun, and the state of another may still be the end of the epoch before.
    return [
        None
        if getattr(loader, "counts_trained_batches", False) or not (number > 0 or isinstance(loader, DataLoader))
        else copy.deepcopy(loader.state_dict())
        for loader in loaders
        if kind_of(loader) == "stateful"
    ]


def _check_continues(
    loader: object, index: int, tracker: PositionTracker | None, restored: RankState, ranks: int
) -> None:
    """Reject a loader that would begin the epoch again, or go on at the wrong sample."""
    kind = kind_of(loader)
    saved = restored.kinds[index] if index < len(restored.kinds) else "read"  # another number raises later
    if saved not in ("read", kind):
        was = {"stateful": "a dataloader that keeps its own state", "index": "a DataLoader of torch"}[saved]
        now = "an iterable dataset" if isinstance(loader, DataLoader) and kind == "read" else type(loader).__name__
        raise ValueError(
            f"the checkpoint was taken after {restored.progress.batches} batches of an epoch of {was}, but {now}"
            " cannot continue from there; resume with the dataloaders of the run that saved it, or from the end of an"
            " epoch"
        )
    if restored.progress.batches and _loses_order(loader):
        raise ValueError(
            f"the checkpoint was taken after {restored.progress.batches} batches of an epoch, but lacks the order of"
            f" its samples, because {_LOST_ORDER}; resume from the end of an epoch; for later runs, {_KEEP_ORDER}"
        )
    position = restored.position(index)
    if tracker is None and kind == "read" and restored.ranks != ranks:
        raise ValueError(_cannot_continue(type(loader).__name__, restored, ranks))
    if tracker is None or position is None or tracker.has_same_batches(position):
        return
    if not tracker.can_deal(position) or len(restored.kinds) > 1:
        name = "a train dataloader" if tracker.reads_by_index else "an iterable dataset"
        raise ValueError(_cannot_continue(name, restored, ranks, position.batch_size, tracker.batch_size))


def _loses_order(loader: Any) -> bool:
    """Whether Lightning has wrapped the sampler of a loader with its own state, which then lacks the sampler's."""
    wrapped = wrapped_sampler(index_sampler(loader))
    has_same_order = isinstance(wrapped, Sequence) or hasattr(wrapped, "set_epoch")  # with the same seed
    return kind_of(loader) == "stateful" and wrapped is not None and not has_same_order


def _cannot_continue(
    name: str, restored: RankState, ranks: int, saved_size: int | None = None, size: int | None = None
) -> str:
    sizes = [f" with batch_size={size}" if size is not None else "" for size in (saved_size, size)]
    return (
        f"the checkpoint was taken after {restored.progress.batches} batches of an epoch on {restored.ranks} "
        f"data-parallel ranks{sizes[0]}, but {name} without Lightning's distributed sampler cannot continue from "
        f"there on {ranks}{sizes[1]}; resume with the settings of the run that saved it, or from the end of an epoch"
    )
