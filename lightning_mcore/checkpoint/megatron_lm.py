# SPDX-License-Identifier: Apache-2.0
"""Read progress and optimizer state from a Megatron-LM, Megatron-Bridge or NeMo 2 checkpoint, to resume from it.

Progress and the loss scale are in ``common.pt``. Megatron-LM writes the iteration, and among the arguments how many
samples were read, on how many data-parallel ranks and in microbatches of which size. Megatron-Bridge writes no
arguments; ``train_state.pt`` has the number of samples. NeMo writes Lightning's state: the step, and the number of
samples in the state of its data module. Random states are objects among the tensors, which NeMo does not have.

``older_formats.py`` describes the tensors, ``strategy/checkpointing.py`` resumes from the rest.
"""

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from lightning_mcore.checkpoint.optimizer_state import Share
from lightning_mcore.optimizer.megatron import MCoreOptimizer
from lightning_mcore.optimizer.parts import optimizer_parts
from lightning_mcore.parallel.random_state import RandomState, of_megatron

_BY_BUCKET = re.compile(r"^(chained_\d+\.)?optimizer\.distributed\.")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_RANDOM = re.compile(r"^rng_state/shard_\d+\.\d+_(\d+)\.(\d+)$")  # pipeline and tensor parallel rank, then sizes
_WEIGHTS_ONLY = "start from its weights with self.load_weights(path) in configure_model"

TRAIN_STATE_FILE = "train_state.pt"
"""The file of Megatron-Bridge."""

_CLASSES = {"exp_avg_sq": "AdamW", "momentum_buffer": "SGD"}
"""Names of torch's classes by a state that each keeps."""


@dataclass(frozen=True)
class MegatronProgress:
    """How far a run of another program had come."""

    iteration: int  # optimizer steps, with skipped ones
    adam_step: int
    schedule_steps: int  # of the learning rate, which waits when a step is skipped
    consumed: int | None  # samples that all ranks together had read; None if the checkpoint does not say
    loss_scaling: dict[str, Any]  # the state of fp16's ``DynamicGradScaler``; empty in other precisions
    data_parallel_size: int
    micro_batch_size: int  # in samples
    seed: int

    @classmethod
    def of(cls, path: str, common: Mapping[str, Any], train_state: Mapping[str, Any]) -> "MegatronProgress":
        """Return the progress in ``common.pt`` and ``train_state.pt``; ValueError if they lack the iteration."""
        iteration = common.get("iteration", common.get("global_step"))
        if not isinstance(iteration, int):
            raise ValueError(
                f"{path} does not say after which iteration it was saved, so a run cannot resume from it;"
                f" {_WEIGHTS_ONLY}"
            )
        arguments = getattr(common.get("args"), "__dict__", {})
        sizes = [arguments.get(name) for name in ("data_parallel_size", "micro_batch_size", "seed")]
        consumed = arguments.get("consumed_train_samples")
        if not all(isinstance(number, int) for number in (consumed, *sizes)):
            # As if one rank had read single samples: a sampler that deals them out only needs their number.
            samples = train_state.get("consumed_train_samples", _samples_of_nemo(common))
            consumed, sizes = None if samples is None else int(samples), [1, 1, 0]
        optimizer = common.get("optimizer")
        counts = (step for name in ("step", "common_step") for step in _values(optimizer, name))
        step = next((int(step) for step in counts if isinstance(step, int | float)), iteration)
        schedule = _schedule_steps(common.get("opt_param_scheduler"), iteration, consumed)
        # Experts of several ranks have a scale of their own; the loss is multiplied by the first one.
        scaling: dict[str, Any] = next(_values(optimizer, "grad_scaler"), {}) or {}
        return cls(iteration, step, schedule, consumed, scaling, *sizes)  # type: ignore[arg-type]

    @property
    def batches(self) -> int:
        """Microbatches that each data-parallel rank had read."""
        # 4 steps with 64 samples, on 8 ranks in microbatches of 2: 256 // 16 = 16 microbatches on each.
        return (self.consumed or 0) // (self.data_parallel_size * self.micro_batch_size)


def _samples_of_nemo(common: Mapping[str, Any]) -> int | None:
    """Return the number of samples in the state of NeMo's data module, whatever its class."""
    states = (state for state in common.values() if isinstance(state, Mapping))
    return next((state["consumed_samples"] for state in states if "consumed_samples" in state), None)


def _schedule_steps(scheduler: Any, iteration: int, consumed: int | None) -> int:
    """Return how often the learning rate has changed, from the state of Megatron's schedule, which counts samples."""
    # 10 iterations read 640 samples, 64 each; fp16 skipped two of them, so the schedule is at 512: 8 steps.
    samples = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    if not isinstance(samples, int) or not consumed or samples * iteration % consumed:  # the batch size has grown
        return iteration
    return min(iteration, samples * iteration // consumed)


def random_state(
    read: Callable[[str], Any], objects: Iterable[str], mine: Mapping[str, int], now: RandomState
) -> RandomState | str:
    """Return the random state with which Megatron-LM would resume this rank, or why there is none.

    ``read`` reads one of the ``objects`` in the checkpoint. ``mine`` has this rank's coordinates and the sizes of the
    axes, and ``now`` is its current state. As in Megatron-LM, the tensor and pipeline parallel sizes must not have
    changed since the save. Data-parallel ranks share one state, or have one each (``--data-parallel-random-init``).
    """
    saved = [match for match in map(_RANDOM.match, objects) if match]
    tp, pp = (mine[f"{axis}_model_parallel_size"] for axis in ("tensor", "pipeline"))
    if not saved:
        return "the checkpoint contains none"
    if (sizes := tuple(map(int, saved[0].groups()))) != (pp, tp):
        return f"they were saved with tensor_model_parallel_size={sizes[1]} and pipeline_model_parallel_size={sizes[0]}"
    own = mine["pipeline_model_parallel_rank"], mine["tensor_model_parallel_rank"]
    try:
        with torch.serialization.safe_globals(_arrays()):
            first, state = (read(f"rng_state/shard_{stage}.{rank}_{pp}.{tp}") for stage, rank in ((0, 0), own))
        copies, copy = mine["data_parallel_size"], mine["data_parallel_rank"]
        if len(state) not in (1, copies):
            return f"they were saved on {len(state)} data-parallel ranks"
        return of_megatron(first[copy % len(first)], state[copy % len(state)], now)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        return f"they cannot be used: {error}"


def _arrays() -> list[Any]:
    """Return what a pickled numpy array consists of; numpy 1 had it in another module."""
    rebuild: Any = numpy.zeros(0).__reduce__()[0]
    known: list[Any] = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*known, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]


def _values(state: Any, name: str) -> Iterator[Any]:
    """Yield each value of this name in the state of one optimizer or a list of them, at any depth."""
    if isinstance(state, list):
        for inner in state:
            yield from _values(inner, name)
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key == name:
            yield value
        yield from _values(value, name)


def optimizer_class(path: str, names: Iterable[str]) -> str:
    """Return the class name of the saved optimizer, from the names of its tensors; ValueError without any."""
    # optimizer.state.exp_avg_sq.decoder.final_layernorm.weight, or by buckets
    # optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(...).bucket_idx_0.exp_avg_sq
    kinds = set()
    for name in names:
        if is_by_bucket(name):
            kinds.add(name.rpartition(".")[2])
        elif name.startswith("optimizer.state."):
            kinds.add(name.split(".")[2])
    found = next((known for kind, known in _CLASSES.items() if kind in kinds), None)
    if found is None:
        raise ValueError(f"{path} has no optimizer state, so a run cannot resume from it; {_WEIGHTS_ONLY}")
    return found


def is_by_bucket(name: str) -> bool:
    """Whether a tensor is of a distributed optimizer that stores its state as it lies in memory (dp_reshardable)."""
    return _BY_BUCKET.match(name) is not None


@torch.no_grad()
def load_buckets(
    path: str,
    read: Callable[[dict[str, Any]], dict[str, Any]],
    optimizer: MCoreOptimizer,
    shares: Iterable[Share],
    step: int,
) -> None:
    """Read state that is stored by buckets into an optimizer with equal buckets; collective over the world."""
    parts = optimizer_parts(optimizer.megatron)
    advice = (
        "resume with use_distributed_optimizer=True and the tensor, pipeline and expert parallel sizes and the overlap"
        " of the run that saved it, or save it with --dist-ckpt-optim-fully-reshardable (Megatron-LM) or"
        f" checkpoint.dist_ckpt_optim_fully_reshardable=True (Megatron-Bridge), or {_WEIGHTS_ONLY}"
    )
    why = f"{path} stores the optimizer's state by the buckets of its run (dp_reshardable), and this run has others"
    for share in shares:  # allocates the state
        share.targets(_MOMENTS, {})
        share.set_numbers({"step": step})
    wanted = {}
    for index, part in enumerate(parts):
        if part.is_stub_optimizer:
            continue
        if not isinstance(part, DistributedOptimizer) or part.ddp_config.use_megatron_fsdp:
            raise ValueError(f"{why}; {advice}")
        state = part.sharded_param_state_dp_reshardable({}, is_loading=True)
        if len(parts) > 1:
            add_prefix_for_sharding(state, f"chained_{index}.")
        wanted[str(index)] = state
    try:
        loaded = read(wanted)
    except ValueError as error:
        raise ValueError(f"{why}: {error}; {advice}") from error
    for index, part in enumerate(parts):
        if not part.is_stub_optimizer:
            part.load_parameter_state_from_dp_reshardable(loaded[str(index)])
