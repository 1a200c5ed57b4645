# SPDX-License-Identifier: Apache-2.0
"""Write the checkpoints in ``tests/distributed/old_megatron``, with a release of megatron-core from before 0.14.

Until 0.13, the distributed optimizer saved each state tensor as flat ranges of the parameter's part on a
tensor-parallel rank. Later releases cannot write this format. So the folders are made once, by megatron-core's own
model, sharded state and writer, and committed::

    pip download --no-deps megatron-core==0.12.1 && unzip -d old megatron_core-*.whl
    PYTHONPATH=old python -m tests.old_megatron

Each element's value follows from its name and its place in the global tensor (:func:`values`), so a test knows what it
must read without a second reader.
"""

import argparse
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat

FOLDER = Path(__file__).parent / "distributed" / "old_megatron"
STEP, SAMPLES = 3, 24
STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
}
VOCABULARY, LENGTH = 32, 16


def values(key: str, shape: tuple[int, ...]) -> Tensor:
    """Return the global tensor of a name: distinct multiples of 1/4096, exact in fp32, from a start of its own."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + crc32(key.encode()) % 1000) / 4096).view(shape)


def _fill(piece: Any) -> None:
    """Give a piece of a weight its values; ``piece`` is a ShardedTensor or makes some that share its memory."""
    if not hasattr(piece, "global_shape"):
        for part in piece.build():
            _fill(part)
        return
    whole = values(piece.key, tuple(piece.global_shape))
    stacked = piece.global_offset[: piece.prepend_axis_num]
    place = tuple(
        slice(start, start + size)
        for start, size in zip(piece.global_offset[piece.prepend_axis_num :], piece.local_shape, strict=True)
    )
    piece.data.copy_(whole[(*stacked, *place)])


def _ranges(numel: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return this data-parallel rank's range of a parameter, cut at an uneven place as in a bucket."""
    cut = numel * 2 // 5 + 3 if ranks > 1 else numel
    bounds = [0, min(cut, numel), numel]
    return bounds[rank], bounds[rank + 1]


def _write(rank: int, world: int, tensor_parallel: int, path: Path, prefix: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer import TransformerConfig

    # What later releases of its packages changed, and what it asks of a GPU.
    numpy.product = numpy.prod
    filesystem_async._write_item = partial(
        filesystem_async._write_item, serialization_format=SerializationFormat.TORCH_SAVE
    )
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: torch.device("cpu")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29661"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor_parallel)
    config = TransformerConfig(
        **MODEL,  # type: ignore[arg-type]
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, spec, VOCABULARY, LENGTH, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )
    weights = {name: piece for name, piece in model.sharded_state_dict(prefix=prefix).items() if "_extra" not in name}
    with torch.no_grad():
        for piece in weights.values():
            _fill(piece)
    copies = parallel_state.get_data_parallel_world_size()
    states, ranges = {}, {}
    for name, piece in weights.items():
        begin, end = _ranges(piece.data.numel(), copies, parallel_state.get_data_parallel_rank())
        if begin < end:
            ranges[piece.data] = {"param": SimpleNamespace(start=begin, end=end)}
            states[piece.data] = (name, begin, end)

    def state_of(parameter: Tensor) -> dict[str, Tensor]:
        name, begin, end = states[parameter]
        found = {}
        for state in STATES:
            whole = torch.empty_like(parameter)
            _fill(replace(weights[name], key=f"optimizer.state.{state}.{weights[name].key}", data=whole))
            found["param" if state == "fp32_param" else state] = whole.view(-1)[begin:end].clone()
        return found

    optimizer = SimpleNamespace(
        gbuf_ranges=[{torch.float32: [{"param_map": ranges}]}],
        ddp_config=SimpleNamespace(use_custom_fsdp=False),
        distributed_optimizer_instance_id=0,
        _get_main_param_and_optimizer_states=state_of,
    )
    sharded = DistributedOptimizer.sharded_param_state_fs_model_space(optimizer, weights)
    inner = {"param_state": sharded, "optimizer": {"param_groups": [{"step": STEP, "lr": 0.1, "params": []}]}}
    if prefix:  # as NeMo 2 saves: Lightning's state, and lists of optimizers
        common = {"epoch": 0, "global_step": STEP, "state_dict": {}, "optimizer_states": {}, "lr_schedulers": []}
        rest = {"PreTrainingDataModule": {"consumed_samples": SAMPLES}}
        state = {**common, **rest, "sharded_state_dict": weights, "optimizer": [inner]}
    else:
        arguments = argparse.Namespace(data_parallel_size=copies, micro_batch_size=1, seed=1234)
        arguments.consumed_train_samples = SAMPLES
        state = {"iteration": STEP, "checkpoint_version": 3.0, "args": arguments, "model": weights, "optimizer": inner}
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(path), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import megatron.core

    if tuple(map(int, megatron.core.__version__.split(".")[:2])) > (0, 13):
        sys.exit(f"megatron-core {megatron.core.__version__} does not write this format; put 0.12.1 on PYTHONPATH")
    for name, world, size, below, prefix in (
        ("megatron_lm", 2, 1, "", ""),
        ("nemo", 4, 2, "weights", "module."),
    ):
        arguments = (world, size, FOLDER / name / below, prefix)
        torch.multiprocessing.spawn(_write, arguments, nprocs=world)
