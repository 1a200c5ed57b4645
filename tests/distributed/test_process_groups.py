# SPDX-License-Identifier: Apache-2.0
"""Fits with other layouts in one process: the groups of the layouts before are closed, unless a model needs them."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from lightning_mcore.parallel import groups as process_groups
from tests.support.ranks import on_ranks
from tests.support.toy import OVERLAPPED, SHARDED, PlainNet, StagedNet, loader, make_trainer, run_fit

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2},
    {"use_distributed_optimizer": True},
]


def open_sockets() -> int:
    """Return how many sockets this process has open."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


@on_ranks(2)
def test_the_groups_of_earlier_layouts_are_closed() -> None:
    """Go round the layouts three times, then run a model again whose layout was replaced."""
    counts = []
    rows = [{"tokens": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    for layout in [*LAYOUTS, *LAYOUTS, *LAYOUTS]:
        module = MCoreGPT(vocab_size=16, seq_length=8, transformer=SIZES)
        make_trainer(layout, max_steps=1).fit(module, DataLoader(rows, batch_size=2))
        del module
        counts.append((open_sockets(), len(os.listdir("/proc/self/task"))))
    assert max(counts[3:]) <= max(counts[:3]), counts

    kept = StagedNet()
    run_fit(kept, LAYOUTS[0], loader(8, 2), max_steps=1)
    run_fit(StagedNet(), LAYOUTS[1], loader(8, 2), max_steps=1)
    assert process_groups._replaced  # the groups of a model that lives are kept
    run_fit(kept, LAYOUTS[0], loader(8, 2), max_steps=1)
    del kept
    gc.collect()
    run_fit(StagedNet(), LAYOUTS[2], loader(8, 2), max_steps=1)
    assert not process_groups._replaced

    kept_on_rank_0 = StagedNet()
    run_fit(kept_on_rank_0, LAYOUTS[0], loader(8, 2), max_steps=1)
    if dist.get_rank() == 1:
        del kept_on_rank_0
    run_fit(StagedNet(), LAYOUTS[1], loader(8, 2), max_steps=1)
    assert process_groups._replaced  # on both ranks, because NCCL destroys a communicator on all of its ranks
    dist.barrier()


@on_ranks(1)
def test_a_sharded_optimizer_is_freed_with_its_trainer() -> None:
    """Its fp32 shards are views of the weights, so they hold the nodes of autograd to which Megatron adds hooks."""
    for strategy in (SHARDED, OVERLAPPED):
        for net in (PlainNet, StagedNet):
            trainer = make_trainer(strategy, max_steps=1)
            trainer.fit(net(), loader(4, 2))
            ended = weakref.ref(trainer)
            del trainer
            gc.collect()
            assert ended() is None
