# SPDX-License-Identifier: Apache-2.0
"""Exact resume: k steps, a checkpoint, a new process and N-k steps equal N steps, bit for bit.

Every Lightning checkpoint has weights, optimizer and loops. :class:`ExactResume` adds the random states
(``parallel/random_state.py``) and the place in the data (``data/position.py``, ``data/place.py``), as a dict for each
rank (:meth:`~ExactResume.rank_state`). The strategy calls its other methods from the hooks of the same name.

With another number of data-parallel ranks, no sample is lost or repeated if Lightning's distributed sampler distributes
them. Two things cannot be continued exactly: the random numbers of dataloader workers in the middle of an epoch (their
seeds are the same, also in later epochs), and a sampler or iterable dataset that draws from the global generators while
it is read.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.data.place import (
    EndOfRestart,
    Place,
    begin_epoch,
    load_loaders,
    recount_batches,
    restore_metrics,
    skip_batches,
    skip_batches_of,
    step_plateaus,
)
from lightning_mcore.data.position import FollowedLoader, Moment, Position, batches_in_pass
from lightning_mcore.parallel.consensus import control_group, run_on_all_ranks
from lightning_mcore.parallel.groups import process_group
from lightning_mcore.parallel.random_state import RandomState, draw_other_numbers, from_plain, pick, put, take, to_plain

if TYPE_CHECKING:
    from lightning_mcore.strategy.strategy import MCoreStrategy


# Lightning's counters differ between the moments at which a checkpoint may be saved, so restore() writes one of two
# places into the loops' state:
#   in an epoch    the run continues with the next batch, as after a checkpoint of on_train_batch_end
#   at its end     the next epoch starts with all of its hooks and a new iterator. Validation and on_train_epoch_end of
#                  the last batch are not repeated, because their metrics are gone
# A checkpoint that is saved while batches accumulate belongs to the last optimizer step. With
# accumulate_grad_batches=4, one saved after 6 of 10 batches continues with batch 4, and with the random state from
# before it. Buffers of a plain module (batch norm) have already seen batches 4 and 5.
@dataclass(frozen=True)
class _Restored:
    """The state from a checkpoint, kept until training starts."""

    place: Place
    random: RandomState
    loaders: list[dict[str, Any]] | None
    ranks: int
    metrics: dict[str, torch.Tensor]

    @property
    def skips_by_reading(self) -> bool:
        """Whether batches can only be skipped by reading them."""
        return "read" in self.kinds

    @property
    def kinds(self) -> list[str]:
        """How each loader continues: by ``index``, by its own state (``stateful``), or by being ``read``."""
        return [loader["kind"] for loader in self.loaders or []]

    @property
    def makes_iterator(self) -> bool:
        """Whether the next epoch may create its iterator; creating one in advance may consume data."""
        return set(self.kinds) <= {"index"}

    @property
    def is_between(self) -> bool:
        """Whether the place is between two epochs."""
        return not self.place.in_epoch and not self.place.ending

    def own_states(self, index: int) -> list[torch.Tensor]:
        """Return the generator states that the loader with this index was given, uint8 tensors [n]."""
        return list(self.loaders[index].get("own", [])) if self.loaders and index < len(self.loaders) else []

    def position(self, index: int) -> Position | None:
        """Return the position at which the loader with this index continues."""
        if self.loaders is None or index >= len(self.loaders) or "ranks" not in self.loaders[index]:
            return None
        saved = self.loaders[index]
        opened, started = [saved[key] and Moment.from_plain(saved[key]) for key in ("opened", "started")]
        position = Position(saved["batches"], saved["ranks"], saved["batch_size"], opened, started, saved["seed"])
        if not self.place.in_epoch:
            return replace(position, batches=0, opened=opened if self.makes_iterator else None, started=None)
        reads_all = self.skips_by_reading and "stateful" not in self.kinds
        return replace(position, batches=0) if reads_all else position


class ExactResume:
    """Random states and the place in the data of one rank."""

    def __init__(self, strategy: "MCoreStrategy", layout: ParallelLayout) -> None:
        self._strategy = strategy
        self._layout = layout
        self._restores = contextlib.ExitStack()
        self._quiet = contextlib.ExitStack()  # hides Lightning's warnings
        self._forget()

    def _forget(self) -> None:
        self._restored: _Restored | None = None
        self._loaders: dict[int, FollowedLoader] = {}
        self._num_loaders = 0
        self._window: tuple[int, RandomState] | None = None  # first batch of the window, and the state before it
        self._before_validation: RandomState | None = None
        self._after_run: RandomState | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state of this process."""
        return {"_strategy": self._strategy, "_layout": self._layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without the state of the other process."""
        self.__init__(state["_strategy"], state["_layout"])  # type: ignore[misc]

    def rank_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, in numbers and tensors; empty if there is nothing to resume."""
        module = self._strategy.lightning_module
        if module is None or module._trainer is None or "optimizer_states" not in checkpoint:
            return {}
        place = Place.of(module.trainer)
        fit_state = checkpoint["loops"]["fit_loop"]["state_dict"]
        # A rank that only receives its batches does not know the state of the loaders.
        loaders, stateful = self._strategy.batches.from_reader(
            (self._describe_loaders(module.trainer, place), fit_state.get("combined_loader", []))
        )
        return {
            "coordinates": self._coordinates(),
            "place": asdict(place),
            "random": to_plain(self._random_state(module.trainer, place)),
            "loaders": loaders,
            "stateful": stateful,
            "metrics": {name: value.detach().cpu() for name, value in module.trainer.callback_metrics.items()},
        }

    def gather(self, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's :meth:`rank_state` on rank 0, for a single-file checkpoint; collective."""
        mine = self.rank_state(checkpoint)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [mine]
        states: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, states if dist.get_rank() == 0 else None, dst=0, group=control_group())
        return states

    def _coordinates(self) -> dict[str, int]:
        strategy, layout = self._strategy, self._layout
        place = asdict(layout.coordinates(strategy.global_rank, strategy.world_size))
        sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
        numbers = {f"{name}_parallel_size": getattr(layout, f"{name}_parallel_size") for name in sizes}
        numbers["expert_tensor_parallel_size"] = layout.expert_tensor_size
        return {**place, **numbers, "data_parallel_size": layout.data_parallel_size(strategy.world_size)}

    def _random_state(self, trainer: pl.Trainer, place: Place) -> RandomState:
        """Return the random state that belongs to the place: the current one, or an earlier one."""
        if self._restored is not None:  # between reading a checkpoint and the first batch
            return self._restored.random
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if (place.rewound or batches.ready > batches.processed) and self._window is not None:
            number, state = self._window
            if number == place.batches:
                return state
        return self._before_validation or self._after_run or take(self._strategy.root_device)

    def _describe_loaders(self, trainer: pl.Trainer, place: Place) -> list[dict[str, Any]] | None:
        fit = trainer.fit_loop
        if fit._combined_loader is None or isinstance(fit._data_fetcher, _DataLoaderIterDataFetcher):
            return None  # with dataloader_iter the module reads as many batches as it likes
        described: list[dict[str, Any]] = []
        for loader in fit._combined_loader.flattened:
            followed = self._loaders.get(id(loader))
            if followed is None:
                described.append({"kind": "stateful" if isinstance(loader, _Stateful) else "read"})
                continue
            length = sized_len(loader)
            number = batches_in_pass(fit._combined_loader._mode, place.batches, length if length else float("inf"))
            position = followed.position(number)
            described.append(
                {
                    "kind": "index" if followed.reads_by_index else "read",
                    "batches": position.batches,
                    "ranks": position.ranks,
                    "batch_size": position.batch_size,
                    "opened": position.opened and position.opened.to_plain(),
                    "started": position.started and position.started.to_plain(),
                    "seed": position.seed,
                    "own": list(followed.own_states()),
                }
            )
        return described

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
        ranks, now = saved["data_parallel_size"], mine["data_parallel_size"]
        number, is_own = pick(saved, mine, self._strategy.global_rank)
        state = run_on_all_ranks(lambda: read(number))
        data = state if ranks == now else run_on_all_ranks(lambda: read(0))  # all ranks share the same order
        place, random = Place(**state["place"]), from_plain(state["random"])
        # On another layout, states of the device and of Megatron's tracker belong to other parts of the model.
        if not is_own:
            random = replace(random, device=None, tracker=None)
        loops = checkpoint["loops"]["fit_loop"]
        place.write(loops)
        loops["state_dict"].pop("combined_loader", None)
        if ranks == now and data["stateful"]:
            loops["state_dict"]["combined_loader"] = data["stateful"]
        if ranks != now and data["stateful"] and place.in_epoch:
            raise ValueError(
                f"the checkpoint contains dataloader states from the middle of an epoch on {ranks} data-parallel"
                f" ranks, which {now} ranks cannot use; resume on {ranks}, or from the end of an epoch"
            )
        self._restored = _Restored(place, random, data["loaders"], ranks, state["metrics"])

    def setup(self) -> None:
        """Forget an earlier run, but keep the checkpoint that was read for this one."""
        restored = self._restored
        self._forget()
        self._restored = restored

    def process_dataloader(self, loader: object) -> None:
        """Follow a training loader; keep validation loaders from drawing common random numbers for their workers."""
        self._seed_workers(loader)
        trainer, restored = self._trainer_of_fit, self._restored
        if trainer is None:
            return
        if trainer.state.stage != RunningStage.TRAINING:
            if isinstance(loader, DataLoader) and loader.generator is None:
                own = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
                self._restores.enter_context(mock.patch.object(loader, "generator", own))
            return
        index, self._num_loaders = self._num_loaders, self._num_loaders + 1
        _check_kind(loader, index, restored)
        progress: Any = trainer.fit_loop.epoch_progress.current
        epoch = restored.place.epoch if restored is not None else progress.processed
        _set_sampler_epoch(loader, epoch)  # workers read ahead before Lightning does it
        ranks = self._layout.data_parallel_size(self._strategy.world_size)
        if restored is not None and restored.is_between and not restored.makes_iterator:
            put(restored.random, self._strategy.root_device)  # before the only iterator is created
        if isinstance(loader, DataLoader) and not isinstance(loader, _Stateful):
            position = restored.position(index) if restored is not None else None
            followed = FollowedLoader(loader, ranks, self.batch_arrives, position)
            self._loaders[id(loader)] = followed
            self._restores.callback(followed.leave)
            if position is not None and restored is not None and restored.place.in_epoch:
                _check_can_go_on(followed, replace(position, batches=restored.place.batches), restored, ranks)
            if restored is not None and restored.is_between and not restored.makes_iterator:
                followed.put_own_states(restored.own_states(index))
        elif restored is None or isinstance(loader, _Stateful):
            return
        elif restored.place.in_epoch and restored.ranks != ranks:
            raise ValueError(_sentence(type(loader).__name__, restored, ranks, None, None))

    def _seed_workers(self, loader: object) -> None:
        """Seed a loader's workers by data-parallel rank, so that ranks of one model copy augment data alike."""
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            seed = partial(pl_worker_init_function, rank=process_group("dp").rank())
            self._restores.enter_context(mock.patch.object(loader, "worker_init_fn", seed))

    def batch_is_read(self, loader: Any) -> None:
        """Note that another rank of the model copy reads a loader's next batch, as the loader itself does here."""
        if id(loader) in self._loaders and loader.num_workers == 0:
            self.batch_arrives()

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

    def on_train_start(self) -> None:
        """Continue from the checkpoint; the last action before the first batch or the hooks of the first epoch."""
        restored, self._restored = self._restored, None
        self._window = self._before_validation = self._after_run = None
        assert self._strategy.lightning_module is not None
        fit = self._strategy.lightning_module.trainer.fit_loop
        if restored is None:
            return
        combined = fit._combined_loader
        assert combined is not None
        restore_metrics(fit, restored.metrics)
        if restored.place.in_epoch:
            if restored.loaders is not None and len(restored.loaders) != len(combined.flattened):
                raise ValueError(
                    f"the checkpoint was taken in the middle of an epoch over {len(restored.loaders)} dataloaders, but"
                    f" there are {len(combined.flattened)} now; resume with the dataloaders of the run that saved it"
                )
            if fit._combined_loader_states_to_load and not self._loaders:
                load_loaders(fit)
            EndOfRestart.attach(fit.trainer)
            self._continue_epoch(fit, restored)
            # Random states come last, because each step before this may draw numbers.
            put(restored.random, self._strategy.root_device)
            return
        fit._restarting = False  # otherwise Lightning would not step plateau schedulers at the end of this epoch
        if restored.is_between:
            begin_epoch(fit, restored.place, restored.makes_iterator)
            if restored.place.waits:
                step_plateaus(fit)
            if not restored.makes_iterator:
                return
        put(restored.random, self._strategy.root_device)
        for index, loader in enumerate(combined.flattened):
            if (followed := self._loaders.get(id(loader))) is not None:
                followed.put_own_states(restored.own_states(index))

    def _continue_epoch(self, fit: Any, restored: _Restored) -> None:
        loop = fit.epoch_loop
        if restored.skips_by_reading and "stateful" in restored.kinds:
            skip_batches_of(fit._data_fetcher, restored.place.batches, [kind == "read" for kind in restored.kinds])
        elif restored.skips_by_reading:
            skip_batches(fit._data_fetcher, restored.place.batches)
        elif len(self._loaders) == 1 and (position := restored.position(0)) is not None:
            [followed] = self._loaders.values()
            if not followed.is_dealt_as(position):
                recount_batches(fit, restored.place.batches, len(followed), followed.remaining(position))
        if loop._should_accumulate():  # Lightning counts this step only at the end of a window
            loop._batches_that_stepped += 1
        # Lightning looks for a loader with its own state and finds none, so it warns before the first batch.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")

    def on_validation_start(self) -> None:
        """Remember the random state of training."""
        if self._trainer_of_fit is not None:
            self._before_validation = take(self._strategy.root_device)
            draw_other_numbers()

    def on_validation_end(self) -> None:
        """Restore the random state of training."""
        state, self._before_validation = self._before_validation, None
        if state is not None and self._trainer_of_fit is not None:
            put(state, self._strategy.root_device)

    @property
    def _trainer_of_fit(self) -> pl.Trainer | None:
        """The trainer while it fits; None in other runs and without one."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer if trainer is not None and trainer.state.fn == TrainerFn.FITTING else None

    def on_train_end(self) -> None:
        """Remember the random state, for a checkpoint that is saved after the run."""
        self._after_run = take(self._strategy.root_device)

    def teardown(self) -> None:
        """Restore the loaders."""
        self._quiet.close()
        self._restored = None
        module = self._strategy.lightning_module
        if module is not None and module._trainer is not None:
            EndOfRestart.detach(module.trainer)
        self._restores.close()


def _check_kind(loader: object, index: int, restored: _Restored | None) -> None:
    """Reject a loader that would begin the epoch again, because it cannot use the saved loader's place."""
    if restored is None or not restored.place.in_epoch:
        return
    saved = restored.kinds[index] if index < len(restored.kinds) else "read"  # another number raises later
    now = "stateful" if isinstance(loader, _Stateful) else "index" if isinstance(loader, DataLoader) else "read"
    if saved not in ("read", now):
        was = {"stateful": "a dataloader that keeps its own state", "index": "a DataLoader of torch"}[saved]
        raise ValueError(
            f"the checkpoint was taken after {restored.place.batches} batches of an epoch of {was}, but"
            f" {type(loader).__name__} cannot continue from there; resume with the dataloaders of the run that saved"
            " it, or from the end of an epoch"
        )


def _check_can_go_on(followed: FollowedLoader, position: Position, restored: _Restored, ranks: int) -> None:
    if followed.is_dealt_as(position):
        return
    assert restored.loaders is not None
    if followed.can_be_dealt_anew and position.batch_size is not None and len(restored.loaders) == 1:
        return
    kind = "a train dataloader" if followed.reads_by_index else "an iterable dataset"
    raise ValueError(_sentence(kind, restored, ranks, position.batch_size, followed.samples_of_batch))


def _sentence(kind: str, restored: _Restored, ranks: int, then: int | None, now: int | None) -> str:
    sizes = [f" with batch_size={size}" if size is not None else "" for size in (then, now)]
    return (
        f"the checkpoint was taken after {restored.place.batches} batches of an epoch on {restored.ranks} "
        f"data-parallel ranks{sizes[0]}, but {kind} without Lightning's distributed sampler cannot continue from "
        f"there on {ranks}{sizes[1]}; resume with the settings of the run that saved it, or from the end of an epoch"
    )
