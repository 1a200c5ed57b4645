# SPDX-License-Identifier: Apache-2.0
"""The state of all random number generators of a rank: taken, restored, and as plain values for a checkpoint.

Lightning saves none of them, so a resumed run with dropout or a shuffling sampler would draw other numbers than the
interrupted run. ``strategy/resume.py`` decides *when* a state is taken and restored; this file knows *what* it is:

==========  =========================================================================================
common      python's ``random``, numpy and torch on the CPU: datasets, samplers and augmentation use them
device      the default generator of this rank's GPU; none on the CPU, where it is torch's own
tracker     Megatron's named generators, for dropout (and initial weights) inside parallel layers
==========  =========================================================================================

On the layout that saved it, each rank gets back all three. On another layout the tracker's states belong to ranks that
no longer exist. Then :func:`pick` returns the common state of the rank that read the same data, or of another rank if
there is none, and :func:`put` seeds device and tracker from it. This is reproducible, but not what the interrupted run
would have drawn.
"""

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, is_graph_safe_cuda_rng_tracker
from torch import Tensor

Plain = dict[str, Any]

_BETWEEN_STAGES = 100
"""Distance between the seeds of neighbouring pipeline stages.

Source: ``_set_random_seed`` in Megatron-LM's training/initialize.py.
"""


@dataclass(frozen=True)
class RandomState:
    """The generators of one rank at one moment, as the module's docstring describes them.

    Attributes:
        python: As ``random.getstate()``.
        numpy: As ``numpy.random.get_state()``.
        torch: As ``torch.get_rng_state()``, [bytes] uint8.
        device: As ``torch.cuda.get_rng_state()``, [bytes] uint8; None on the CPU.
        tracker: Megatron's states by name; None in a common state.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    device: Tensor | None = None
    tracker: Mapping[str, Any] | None = None


def take_common() -> RandomState:
    """Return the common state, which decides the data; takes about ten microseconds."""
    state: Any = numpy.random.get_state()
    return RandomState(random.getstate(), state, torch.get_rng_state())


def take(device: torch.device) -> RandomState:
    """Return the whole state of this rank."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return dataclasses.replace(take_common(), device=gpu, tracker=tensor_parallel.get_cuda_rng_tracker().get_states())


def put_common(state: RandomState) -> None:
    """Restore the common part of a state."""
    random.setstate(state.python)
    numpy.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


def put(state: RandomState, device: torch.device) -> None:
    """Restore a state.

    Args:
        state: Result of :func:`take`. If it has no tracker, as on another layout, device and tracker are seeded from
            the common state, with the same seed on every rank that has the same common state.
        device: Device of this rank.
    """
    put_common(state)
    if state.tracker is None:
        _seed_device_and_tracker(state)
        return
    if state.device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.device, device)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphs = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states({name: convert_cuda_rng_state(s, to_graphable=graphs) for name, s in state.tracker.items()})


def new_seed() -> int:
    """Return a seed below 2**31 for a run, the same on ranks whose torch generators have the same state.

    It is the user's own if nothing was drawn since ``seed_everything``, so that all strategies begin alike, else a
    drawn one. The generator moves on in either case: the next run begins with other numbers.
    """
    seed = torch.initial_seed()
    is_as_seeded = torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    drawn = int(torch.randint(2**31, ()))
    return seed % 2**31 if is_as_seeded else drawn


def draw_other_numbers() -> None:
    """Seed the common generators with a number drawn from torch's, the same on ranks with the same state."""
    seed_common(int(torch.randint(2**31, ())))


def seed_common(seed: int) -> None:
    """Seed python, numpy and torch on the CPU; CUDA's generators do not change."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def _seed_device_and_tracker(state: RandomState) -> None:
    """Seed Megatron's tracker, and on CUDA the default generator, with a number drawn from the common state."""
    generator = torch.Generator()
    generator.set_state(state.torch)
    seed_stage(int(torch.randint(2**31 - 2**20, (), generator=generator)))


def seed_of_stage(seed: int) -> int:
    """Return the seed of this rank's pipeline stage, so that its layers begin unlike those of other stages.

    Example:
        With ``seed=7`` and four stages: 7, 107, 207 and 307.
    """
    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return seed + _BETWEEN_STAGES * stage


def seed_stage(seed: int) -> None:
    """Seed Megatron's tracker, and on CUDA the default generator, for this rank's pipeline stage.

    The state of the CPU's generator does not change. The seeds are Megatron-LM's: ``seed + 100 * stage``, to which
    ``model_parallel_cuda_manual_seed`` adds a distance for tensor-parallel ranks and one for expert-parallel ranks. The
    latter is also 100, so stage 1 would draw the experts that stage 0 draws on its second expert-parallel rank.
    Here, each stage goes on counting where the stage before it ended.

    Example:
        Distances of the experts' seeds with two stages of two expert-parallel ranks: 0 and 100, then 200 and 300. In
        Megatron-LM: 0 and 100, then 100 and 200.

    Args:
        seed: The same on every rank; below 2**31 less 100 for each stage.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts = parallel_state.get_expert_model_parallel_world_size()
    ep_rank = parallel_state.get_expert_model_parallel_rank() + stage * (experts - 1)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed_of_stage(seed), ep_rank=ep_rank)
    torch.set_rng_state(state)  # on the CPU, the line above also seeds torch's generator


def to_plain(state: RandomState) -> Plain:
    """Return a state as numbers and tensors, which ``torch.load(weights_only=True)`` can read."""
    version, words, gauss = state.python
    name, key, position, has_gauss, cached = state.numpy
    plain: Plain = {
        "python": {"version": version, "words": _tensor(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "key": _tensor(key),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": state.torch.clone(),
    }
    if state.device is not None:
        plain["device"] = state.device.clone()
    if state.tracker is not None:
        tracker = {key: convert_cuda_rng_state(value, to_graphable=False) for key, value in state.tracker.items()}
        plain["tracker"] = {key: value.clone() for key, value in tracker.items()}
    return plain


def from_plain(plain: Mapping[str, Any]) -> RandomState:
    """Rebuild a state from the result of :func:`to_plain`."""
    python, numbers = plain["python"], plain["numpy"]
    return RandomState(
        python=(python["version"], tuple(_words(python["words"]).tolist()), python["gauss"]),
        numpy=(
            numbers["name"],
            _words(numbers["key"]),
            numbers["position"],
            numbers["has_gauss"],
            numbers["cached"],
        ),
        torch=plain["torch"],
        device=plain.get("device"),
        tracker=plain.get("tracker"),
    )


def _tensor(words: Any) -> Tensor:
    """Return 32-bit words as an int32 tensor, [words], of the same bits."""
    return torch.from_numpy(numpy.asarray(words, dtype=numpy.uint32).view(numpy.int32).copy())


def _words(tensor: Tensor) -> Any:
    return tensor.numpy().view(numpy.uint32)


def pick(saved: Mapping[str, int], mine: Mapping[str, int], rank: int) -> tuple[int, bool]:
    """Return the rank whose saved state this rank takes, and whether it is its own.

    Args:
        saved: The coordinates of any rank that saved, and the sizes of its axes, by name.
        mine: The same of this rank.
        rank: The number of this rank.

    Returns:
        On the layout that saved: this rank, and True. On another: the first rank with the same data-parallel rank,
        modulo their number if there were fewer, and False: all ranks of one model copy must draw the same data.
    """
    if all(mine[name] == value for name, value in saved.items() if name.endswith("_size")):
        return rank, True
    copy = mine["data_parallel_rank"] % saved["data_parallel_size"]
    return copy * saved["tensor_model_parallel_size"] * saved["context_parallel_size"], False
