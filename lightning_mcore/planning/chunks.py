# SPDX-License-Identifier: Apache-2.0
"""The plan of any LightningModule that builds its model with ``pipeline()``, from its real chunks.

A rank of every pipeline stage is played in this process, one after the other: PyTorch's *fake* process group knows its
place and sends nothing, and the chunks are on the meta device, so they have shapes and no memory. What a step computes
and keeps is not known without running it; ``lightning-mcore rehearse`` does that.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.run import RunSettings
from lightning_mcore.parallel.chunks import find_pipeline
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups
from lightning_mcore.planning.built import ParameterTensor, held_tensors, of_parameter, on_meta
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.machines import Machine
from lightning_mcore.planning.model import ChunkLayers
from lightning_mcore.planning.parameters import ModelParameters, count_of
from lightning_mcore.planning.plan import Plan, StagePlan, new_plan, with_stages
from lightning_mcore.planning.rules import OWN, check_run
from lightning_mcore.planning.state_memory import state_memory


def plan_of_chunks(
    trainer: Any, module: Any, settings: RunSettings, devices: int, devices_per_node: int, machine: Machine | None
) -> Plan:
    """Return the plan of a module that no settings describe; activations, operations and traffic are not in it.

    Raises RuntimeError if this process has process groups already, and ValueError if the module builds no model with
    ``pipeline()``.
    """
    run = check_run(settings, devices, OWN)
    plan, layout = new_plan(run, devices_per_node, machine, None), run.layout
    if run.errors or layout is None or run.batch is None:
        return plan
    stages = [_chunks(trainer, module, layout, stage) for stage in range(layout.pipeline_model_parallel_size)]
    formats = Formats.of(run.rules.precision, run.rules.all_strategy)
    made, total, trained = [], 0, 0
    for stage, chunks in enumerate(stages):
        tensors = [of_chunk for _, of_chunk in chunks]
        memory = state_memory(tensors, layout, formats, devices, stage)
        layers = tuple(held for held, _ in chunks)
        made.append(StagePlan(stage, stage * devices // len(stages), layers, count_of(tensors), memory, ()))
        for tensor in (tensor for of_chunk in tensors for tensor in of_chunk):
            if tensor.is_shared and stage > 0:
                continue  # a copy of the first stage's
            ranks = layout.expert_tensor_size if tensor.expert else layout.tensor_model_parallel_size
            whole = tensor.elements * (1 if tensor.split is None else ranks)
            whole *= layout.expert_model_parallel_size if tensor.expert else 1
            total, trained = total + whole, trained + whole * tensor.is_trained
    assumptions = (
        *run.assumptions,
        f"{type(module).__name__} is known by its chunks only: activations, operations, traffic and time are not"
        " counted (lightning_mcore.rehearsal.rehearse runs it on fake GPUs)",
        "two moments of each trained parameter in the optimizer, as AdamW has",
    )
    return replace(with_stages(plan, made), parameters=ModelParameters(total, total, trained), assumptions=assumptions)


def _chunks(
    trainer: Any, module: Any, layout: ParallelLayout, stage: int
) -> list[tuple[ChunkLayers, list[ParameterTensor]]]:
    """Build the chunks of a stage's first rank in the smallest world of the layout, and return what they hold."""
    twin = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[name] = dict(getattr(module, name))
    twin.__dict__.pop("_built_pipeline", None)
    twin._trainer = trainer
    with _rank_of(layout, stage):
        try:
            twin.configure_model()
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"{type(module).__name__}.configure_model() fails with weights that have no values, as plan builds"
                f" them: {' '.join(str(error).split())}"
            ) from error
        pipeline = find_pipeline(twin)
    if pipeline is None:
        raise ValueError(
            f"{type(module).__name__} builds no model with pipeline(), which plan needs for its sizes; build it so in"
            " configure_model()"
        )
    return [(_held(chunk), [of_parameter(chunk, *item) for item in held_tensors(chunk)]) for chunk in pipeline.chunks]


def _held(chunk: Any) -> ChunkLayers:
    layers = getattr(getattr(chunk, "decoder", None), "layers", ())
    numbers = tuple(layer.layer_number - 1 for layer in layers if hasattr(layer, "layer_number"))
    return ChunkLayers(numbers, bool(getattr(chunk, "pre_process", False)), bool(getattr(chunk, "post_process", False)))


@contextlib.contextmanager
def _rank_of(layout: ParallelLayout, stage: int) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError(
            "a module of your own is planned in a process without process groups, and this one has some from a run;"
            " plan it in a new process"
        )
    # 2 tensor-parallel, 4 expert-parallel ranks and 3 stages: 12 ranks, of which 0, 4 and 8 begin a stage.
    dense = layout.tensor_model_parallel_size * layout.context_parallel_size
    size = math.lcm(dense, layout.expert_tensor_size * layout.expert_model_parallel_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_runtime())
        world = size * layout.pipeline_model_parallel_size
        dist.init_process_group("fake", store=FakeStore(), rank=stage * size, world_size=world)
        stack.callback(dist.destroy_process_group)
        open_process_groups(layout, seed=0, timeout=timedelta(minutes=1))
        stack.callback(close_process_groups)
        stack.enter_context(on_meta())
        yield
