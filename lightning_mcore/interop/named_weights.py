# SPDX-License-Identifier: Apache-2.0
"""Stream the running model's weights under Hugging Face names, to an engine that generates while the model trains.

:func:`named_weights` yields the tensors that ``SaveHFModel`` would write into safetensors files. It follows the same
export plan, in which the ranks together fill one file after another (``exchange`` in ``export_tensors.py``), but yields
the content of each file, a *piece*, instead of writing it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_mcore.hf.peft_tensors import ExpertLayout
from lightning_mcore.interop.auto_model import HFModel
from lightning_mcore.interop.export import LiveModel, require_groups
from lightning_mcore.interop.export_adapter import check_adapter_export, collect_adapter
from lightning_mcore.interop.export_plan import ExportOptions, parse_size
from lightning_mcore.interop.export_tensors import digest, digests, exchange, ready_to_read
from lightning_mcore.parallel.consensus import all_gather_object, any_true, run_on_all_ranks, run_on_rank0

Receivers = Literal["all", "first"]


def named_weights(
    module: pl.LightningModule | HFModel,
    *,
    receivers: Receivers = "all",
    sent: dict[str, bytes] | None = None,
    adapter: bool = False,
    experts: ExpertLayout = "stacked",
    like: str | None = None,
    family: str | None = None,
    dtype: str = "auto",
    piece_size: str | int = "256MB",
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the running model under their Hugging Face names, whatever the layout; collective.

    Names, values and dtypes are those of the safetensors files that :func:`export_model` writes. Call it on every rank
    and iterate to the end on every rank, without training in between. If one rank stops early, the others raise an
    error. Tensors are gathered piece by piece in host memory; a receiving rank holds one piece at a time, unless you
    keep the tensors.

    Args:
        module: A module whose model is built with ``pipeline()``, or the result of :func:`hf_model`.
        receivers: ``"all"`` yields each tensor on every rank, ``"first"`` only on rank 0. On the other ranks the
            iterator then yields nothing, but they must still iterate over it: that is when they send.
        sent: Yield only tensors whose values have changed since the last call with the same dictionary. Start with an
            empty dictionary on each rank. It is updated when the iteration has ended.
        adapter: Yield only the LoRA adapters, under PEFT's names and in one piece; False yields the whole model, with
            the adapters merged into its weights.
        experts: As in :class:`SaveHFModel`.
        like: As in :func:`export_checkpoint`.
        family: As in :func:`export_checkpoint`.
        dtype: As in :func:`export_model`; it has no effect on adapters.
        piece_size: Size of a piece in bytes, or as text, such as ``"256MB"``. A larger tensor is a piece of its own.

    Returns:
        An iterator over names and tensors; the tensors are on the CPU, and yours to keep.

    Raises:
        RuntimeError: The module has no model yet, there are no process groups, or another rank stopped reading.
        Exception: An error of :func:`export_model`; the same on every rank.
    """
    if receivers not in ("all", "first"):
        raise ValueError(f"receivers={receivers!r} is not known; choose 'all' or 'first'")
    size = parse_size(piece_size, "piece_size")
    require_groups("named_weights")
    owner: pl.LightningModule = module._own_builder if isinstance(module, HFModel) else module
    receives = receivers == "all" or dist.get_rank() == 0
    if adapter:
        check_adapter_export(owner, experts)
        return _read_by_all(_of_adapter(owner, experts, receivers, sent), receives)
    options = run_on_all_ranks(lambda: ExportOptions(like, family, dtype, size))
    with ready_to_read(owner):
        model = LiveModel.prepare(owner, options)
    return _read_by_all(_of_model(owner, model, receivers, sent), receives)


def _of_model(
    owner: pl.LightningModule, model: LiveModel, receivers: Receivers, sent: dict[str, bytes] | None
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors that this rank receives, by name, piece by piece; collective over the world."""
    plan, fresh = model.plan, {}
    if sent is not None:
        with ready_to_read(owner):
            fresh = run_on_all_ranks(lambda: digests(plan, model.pieces))
        # Ranks 0 and 1 hold half of q_proj each. If only rank 1's half has changed, it reports the name for both.
        changed = [name for name, value in fresh.items() if sent.get(name) != value]
        plan.keep({name for of_rank in all_gather_object(changed) for name in of_rank})
    for file in plan.files:
        with ready_to_read(owner):
            tensors = exchange(plan, model.pieces, [file] * (dist.get_world_size() if receivers == "all" else 1))
        yield tensors
    if sent is not None:
        sent.update(fresh)


def _of_adapter(
    owner: pl.LightningModule, experts: ExpertLayout, receivers: Receivers, sent: dict[str, bytes] | None
) -> Iterator[dict[str, Tensor]]:
    """Yield the adapters that this rank receives, by name, one by one; collective over the world."""
    tensors = collect_adapter(owner, experts)  # on rank 0
    known, fresh = ({}, {}) if sent is None else (sent, {name: digest([tensors[name]]) for name in tensors})
    changed = [name for name in tensors if sent is None or known.get(name) != fresh[name]]
    names: list[str] = run_on_rank0(lambda: changed)
    for name in names:
        if receivers == "all":
            yield {name: run_on_rank0(partial(tensors.__getitem__, name))}
        else:
            yield {name: tensors[name]} if name in tensors else {}
    known.update(fresh)


def _read_by_all(pieces: Iterator[dict[str, Tensor]], receives: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of pieces; if one rank stops reading, others do not wait for it in the next piece."""
    for piece in pieces:
        stops = False
        try:
            for name in list(piece):
                yield name, piece.pop(name)  # not kept here while the next piece is gathered
        except GeneratorExit:
            stops = True
            raise
        finally:
            one_stops = any_true(stops)
        if one_stops and receives:
            raise RuntimeError(
                "named_weights() was not read to its end on another rank; read it to its end on every rank"
            )
        if one_stops:
            return
