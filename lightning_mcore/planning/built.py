# SPDX-License-Identifier: Apache-2.0
"""The parameters of the real model: one layer of each kind, built by ``MCoreGPT`` on PyTorch's meta device.

A meta tensor has a shape and no memory, so the model may be of any size. It is built as on one rank, with one of its
experts; what ranks share is known from the marks that Megatron puts on parameters, by which it also sums gradients and
norms. ``parameters.py`` lays the tensors out on ranks.

Megatron asks its process groups for sizes while it builds. :func:`alone` answers 1 for all of them, whatever groups
this process may have, and they are as before afterwards.
"""

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import nn

from lightning_mcore.checkpoint.model_state import sharded_tensors
from lightning_mcore.checkpoint.optimizer_state import pieces_of
from lightning_mcore.config.rules.model import KERNELS, NEEDS_CUDA, NEEDS_TRANSFORMER_ENGINE, TORCH_BACKEND_VALUES
from lightning_mcore.hf.weight_map import held_rectangle
from lightning_mcore.layers.indexer import Indexer
from lightning_mcore.layers.latent_experts import WholeLinear
from lightning_mcore.layers.spec import attention_environment_restored
from lightning_mcore.models.embedding import MCoreEmbedding
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.preference import MCorePreference
from lightning_mcore.parallel.chunks import ModelChunks
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import is_spread_expert
from lightning_mcore.planning.model import GPTFields, LayerKind

_OF_THE_RUN = {*KERNELS, *NEEDS_CUDA, *NEEDS_TRANSFORMER_ENGINE, *TORCH_BACKEND_VALUES}
_OF_THE_RUN |= {"moe_router_padding_for_fp8", "moe_router_padding_for_quantization"}  # Megatron asks for FP8
_OF_LAYERS = (
    *("num_layers_", "account_for_", "recompute_", "moe_layer_recompute", "distribute_saved"),
    *("no_rope_freq", "window_attn_skip_freq", "window_size"),
)
"""How the names of fields begin that divide the layers or have a value for each, but add no parameters."""


class ParameterTensor(NamedTuple):
    """Parameters of one kind and size."""

    name: str  # in a checkpoint; without the prefix of a layer
    size: int  # elements of one such parameter on a rank
    copies: int = 1  # on a rank; one for each expert
    expert: bool = False  # of routed experts
    is_matrix: bool = False
    is_linear: bool = False  # the weight of a linear layer inside a transformer layer, which FP8 may hold
    is_shared: bool = False  # with another stage: a tied embedding, or the embedding of multi-token prediction
    shape: tuple[int, ...] = ()  # on all ranks together
    split: int | None = None  # the axis that tensor-parallel ranks share; None where each has the whole
    is_trained: bool = True
    bits: float | None = None  # of an element of quantized weights, lengths of blocks included

    @property
    def elements(self) -> int:
        """Elements of all copies together."""
        return self.size * self.copies


@contextlib.contextmanager
def alone(experts: int = 1) -> Iterator[None]:
    """Build Megatron's layers for one rank inside the ``with`` block, which has one of ``experts`` experts."""
    names = vars(parallel_state)
    one, several = (SimpleNamespace(size=lambda ranks=ranks: ranks, rank=lambda: 0) for ranks in (1, experts))
    known: dict[str, Any] = {name: one for name in names if name.isupper() and "_GROUP" in name}
    known["_EXPERT_MODEL_PARALLEL_GROUP"] = several
    known |= {name: 0 for name in names if name.startswith("_MPU_") and name.endswith("_RANK")}
    known |= {name: None for name in names if name.startswith("_MPU_") and name.endswith("_SIZE")}
    replaced: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: 0,
        "get_world_size": lambda group=None: 1 if group is None else group.size(),
    }
    with on_meta(), mock.patch.dict(names, known), mock.patch.multiple(dist, **replaced):
        yield


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Put layers on the meta device inside the ``with`` block, and leave warnings and environment to the run."""
    meta = torch.device("meta")
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_runtime())
        stack.enter_context(attention_environment_restored())
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=meta))
        # Random states are of a device, and there are no values to draw.
        nothing = contextlib.nullcontext()
        stack.enter_context(mock.patch.object(CudaRNGStatesTracker, "fork", return_value=nothing))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        megatron = logging.getLogger("megatron")
        stack.callback(megatron.setLevel, megatron.level)
        megatron.setLevel(logging.ERROR)
        stack.enter_context(meta)
        yield


class Built(NamedTuple):
    """A model with one layer of each of :func:`kinds`, as on one rank, on the meta device."""

    chunk: nn.Module
    tensors: tuple[tuple[str, ParameterTensor], ...]  # its parameters, by prefix


def built_model(fields: GPTFields) -> Built:
    """Build the layers of a model; ValueError if Megatron's layers cannot be built with these sizes."""
    of_kinds = kinds(fields)
    architecture = {name: value for name, value in vars(fields.architecture).items() if value is not None}
    for name in ("delta_net", "kimi_delta"):
        if name in architecture:
            flags = [int(kind.mixer == name) for kind in of_kinds]
            architecture[name] = {**architecture[name], "linear_attention_freq": flags}
    if "indexer" in architecture:
        flags = [int(kind.has_indexer) for kind in of_kinds]
        architecture["indexer"] = {**architecture["indexer"], "indexer_freq": flags}
    if fields.architecture.layer_pattern is not None:
        architecture["layer_pattern"] = "".join(kind.letters for kind in of_kinds)
    given = fields.transformer
    transformer = {
        **{name: value for name, value in given.items() if name not in _OF_THE_RUN and not name.startswith(_OF_LAYERS)},
        "num_layers": len(of_kinds),
        "mtp_num_layers": 1 if fields.mtp_num_layers else None,
    }
    if fields.num_moe_experts is not None:
        transformer["moe_layer_freq"] = [int(kind.is_moe) for kind in of_kinds]
    arguments = {
        "vocab_size": fields.padded_vocab_size,
        "make_vocab_size_divisible_by": 1,
        "seq_length": fields.seq_length,
        "transformer": transformer,
        "architecture": architecture,
        "share_embeddings_and_output_weights": fields.tied,
        "position_embedding_type": "learned_absolute" if fields.learned_positions else "rope",
        "transformer_impl": "local",
    }
    try:
        return _built(json.dumps(arguments, default=str, sort_keys=True), fields.scores, fields.encodes)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"megatron-core cannot build this model: {error}") from error


def kinds(fields: GPTFields) -> list[LayerKind]:
    """Return the kinds of layers, the last layer's last."""
    return list(dict.fromkeys(fields.kind(layer) for layer in reversed(range(fields.num_layers))))[::-1]


@lru_cache(maxsize=64)
def _built(arguments: str, scores: bool, encodes: bool) -> Built:
    given = json.loads(arguments)
    experts = given["transformer"].get("num_moe_experts") or 1
    with alone(experts):
        kind = partial(MCorePreference, preference={"loss": "reward"}) if scores else MCoreGPT
        module = (MCoreEmbedding if encodes else kind)(**given)
        module.megatron_fields = lambda: {"expert_model_parallel_size": experts}  # type: ignore[method-assign]
        chunk = module.build_chunk(pre_process=True, post_process=True, vp_stage=None)
        entries = sharded_tensors(ModelChunks(chunk.config, [chunk], None), 0)
        names = {id(entry.data): held_rectangle(pieces_of(entry)[0].place)[0] for entry in entries}
    found = []
    for local, parameter in held_tensors(chunk):
        prefix, name = _of_layer(names[id(parameter)])
        tensor = of_parameter(chunk, local, parameter)
        found.append((prefix, tensor._replace(name=name, copies=experts if tensor.expert else 1)))
    return Built(chunk, tuple(found))


def held_tensors(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a chunk's parameters by name, and the buffers that are as large: those of indexers."""
    yield from chunk.named_parameters()
    for name, module in chunk.named_modules():
        if isinstance(module, Indexer):
            yield from module.named_buffers(name)


def of_parameter(chunk: nn.Module, name: str, parameter: torch.Tensor) -> ParameterTensor:
    """Return what is known of a parameter by Megatron's marks on it, and by the module that owns it."""
    dim = getattr(parameter, "partition_dim", -1)
    split = dim if dim >= 0 and getattr(parameter, "tensor_model_parallel", False) else None
    if name.endswith(".softmax_offset"):
        split = 0  # a sink for each head; Megatron does not mark them
    owner, is_matrix = chunk.get_submodule(name.rpartition(".")[0]), parameter.dim() == 2
    is_linear = isinstance(owner, ColumnParallelLinear | RowParallelLinear | WholeLinear)
    return ParameterTensor(
        name,
        parameter.numel(),
        expert=".local_experts." in name or is_spread_expert(parameter),
        is_matrix=is_matrix,
        is_linear=is_linear and is_matrix and name.startswith(("decoder.", "mtp.")),
        is_shared=getattr(parameter, "shared_embedding", False),
        shape=tuple(parameter.shape),
        split=split,
        is_trained=parameter.requires_grad,
    )


def _of_layer(name: str) -> tuple[str, str]:
    """Return a name in a checkpoint as a prefix and the rest: ``decoder.layers.0.`` and ``mlp.linear_fc1.weight``."""
    found = re.match(r"(decoder|mtp)\.layers\.\d+\.|embedding\.|decoder\.|", name)
    assert found is not None  # the last alternative is empty
    return found[0], name[found.end() :]
