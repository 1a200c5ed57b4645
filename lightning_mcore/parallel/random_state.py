# SPDX-License-Identifier: Apache-2.0
"""The state of all random number generators of a rank: taken, restored, and as plain values for a checkpoint.

Lightning saves none of them, so a resumed run with dropout or a shuffling sampler would draw other numbers than the
interrupted run. ``strategy/resume.py`` decides *when* a state is taken and restored; this file knows *what* it is:

==========  =========================================================================================
common      python's ``random``, numpy and torch on the CPU: datasets, samplers and augmentation use them
device      the default generator of this rank's GPU; none on the CPU, where it is torch's own
tracker     Megatron's named generators, for dropout (and initial weights) inside parallel layers
==========  =========================================================================================
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
    """The generators of one rank at one moment, as the module's table describes them."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: Tensor
    device: Tensor | None = None
    tracker: Mapping[str, Any] | None = None  # None in a common state


def take_common() -> RandomState:
    """Return the common state, which decides the data; takes about ten microseconds."""
    state: Any = numpy.random.get_state()
    return RandomState(random.getstate(), state, torch.get_rng_state())


def take(device: torch.device) -> RandomState:
    """Return the whole state of this rank."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return dataclasses.replace(take_common(), device=gpu, tracker=tensor_parallel.get_cuda_rng_tracker().get_states())


def of_megatron(first: Mapping[str, Any], own: Mapping[str, Any], now: RandomState) -> RandomState:
    """Return what Megatron-LM saved: the common state of the model copy's ``first`` rank, and this rank's ``own`` rest.

    ``now`` is this rank's current state. Raises ``ValueError`` for states of another kind of device, and what comes
    first for anything that is not a state.
    """
    # Megatron-LM seeds each pipeline stage's common generators differently; here they decide the data, on all stages.
    tracker = dict(own["rng_tracker_states"])
    size = (now.torch if now.device is None else now.device).numel()
    for state in (own["cuda_rng_state"], *tracker.values()):
        if state.dtype != torch.uint8 or state.numel() != size:
            raise ValueError("they are of another kind of device")
    saved = RandomState(
        first["random_rng_state"],
        first["np_rng_state"],
        first["torch_rng_state"],
        None if now.device is None else own["cuda_rng_state"],
        {**(now.tracker or {}), **tracker},  # older releases have fewer generators
    )
    random.Random().setstate(saved.python)
    numpy.random.RandomState().set_state(saved.numpy)
    torch.Generator().set_state(saved.torch)
    return saved


def put_common(state: RandomState) -> None:
    """Restore the common part of a state."""
    random.setstate(state.python)
    numpy.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


def put(state: RandomState, device: torch.device) -> None:
    """Restore the result of :func:`take`.

    Without a tracker, as on another layout, device and tracker are seeded from the common state, with the same seed on
    every rank that has the same common state.
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
    """Return a seed below 2**31 for a run, the same on ranks whose torch generators have the same state."""
    # The user's own seed if nothing was drawn since seed_everything, so that all strategies begin alike. The generator
    # moves on in either case: the next run begins with other numbers.
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
    # The common state must not move, because it decides the data.
    generator = torch.Generator()
    generator.set_state(state.torch)
    seed_stage(int(torch.randint(2**31 - 2**20, (), generator=generator)))


def seed_of_stage(seed: int) -> int:
    """Return the seed of this rank's pipeline stage, so that its layers begin unlike other stages' layers.

    Example:
        With ``seed=7`` and four stages: 7, 107, 207 and 307.
    """
    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return seed + _BETWEEN_STAGES * stage


def seed_stage(seed: int) -> None:
    """Seed Megatron's tracker, and on CUDA the default generator, for this rank's pipeline stage.

    ``seed`` is the same on every rank, and below 2**31 minus 100 for each stage. The state of the CPU's generator does
    not change.
    """
    # Megatron-LM's seed is seed + 100 * stage, and 100 more for the next expert-parallel rank: stage 1 would draw the
    # experts of stage 0's second rank. With two stages of two such ranks, the distances are 0 and 100, then 200 and
    # 300; in Megatron-LM 0 and 100, then 100 and 200.
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts = parallel_state.get_expert_model_parallel_world_size()
    ep_rank = parallel_state.get_expert_model_parallel_rank() + stage * (experts - 1)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed_of_stage(seed), ep_rank=ep_rank)
    torch.set_rng_state(state)  # which the line above seeds on the CPU


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
    """Return 32-bit words as an int32 tensor of the same bits."""
    return torch.from_numpy(numpy.asarray(words, dtype=numpy.uint32).view(numpy.int32).copy())


def _words(tensor: Tensor) -> Any:
    return tensor.numpy().view(numpy.uint32)


def pick(saved: Mapping[str, int], mine: Mapping[str, int], rank: int) -> tuple[int, bool]:
    """Return the rank whose saved state this rank takes, and whether it is its own.

    ``saved`` has the coordinates of any rank that saved, and the sizes of its axes; ``mine`` the same of this rank.
    """
    # Saved with TP=2 on two copies, resumed with TP=1 on four: copies 0 and 2 take rank 0's common state, copies 1 and
    # 3 rank 2's, because all ranks of a copy must draw the same data. put() seeds the rest from it.
    if all(mine[name] == value for name, value in saved.items() if name.endswith("_size")):
        return rank, True
    copy = mine["data_parallel_rank"] % saved["data_parallel_size"]
    return copy * saved["tensor_model_parallel_size"] * saved["context_parallel_size"], False
