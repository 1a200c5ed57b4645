# SPDX-License-Identifier: Apache-2.0
"""Compute the log-probabilities of all answers under the reference model once, before training.

A forward pass over the pairs, on the layout of the run, takes a third of the time of one epoch, and then no step of any
epoch needs the reference. Its weights are those that the run begins with, or those of another model's folder, which
take the place of the trained ones for the length of the pass; these wait on the host. So there is never a second model
on a device.

The results of each split, two numbers for each pair, are in a file beside the data. Its name is a digest of the
reference's weights, of the pairs (``PairSource.key``: files, template, lengths) and of the number format. Rank 0
appends to it during the pass, and an interrupted pass continues where the file ends, on any layout. A checkpoint
records which reference its run has. A resumed run finds the file by that record, because its own weights have changed.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_mcore.data.packing.rows import packing_multiples
from lightning_mcore.data.preference.pairs import PairSource, collate_padded_pairs
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.parallel.consensus import decide

if TYPE_CHECKING:
    from lightning_mcore.models.preference import MCorePreference

_VERSION = "1"
_SILENT_SECONDS = 2.0  # shorter passes show no progress
_Table = NDArray[np.float64]  # [pairs, 2]


def compute_reference(module: "MCorePreference") -> None:
    """Give every split of the data module its reference, from files or by a pass over its pairs; collective.

    Args:
        module: The module, in a run. Without ``pair_sources()`` in the data module of its trainer, nothing happens.

    Raises:
        ValueError: The weights of this run are no longer, or never were, those of the reference, and the files lack
            some pairs; or a log-probability is not finite.
    """
    offered: dict[str, PairSource] = getattr(getattr(module.trainer, "datamodule", None), "pair_sources", dict)()
    sources = {name: source for name, source in offered.items() if source.reference is None}
    if not sources:
        return
    if module.reference_mark is not None and _read_all(module, sources):
        return
    with _weights_of_reference(module):
        mark = _mark(module)
        if module.reference_mark not in (None, mark):
            raise ValueError(
                "the reference's log-probabilities of this run are no longer beside the data, and"
                + (
                    " its weights have changed; give Preference(reference=...) the model that it began with"
                    if module.preference.reference is None
                    else f" {module.preference.reference} is another model than it began with; give that one"
                )
            )
        module.reference_mark = mark
        for name, source in sources.items():
            source.reference = _complete(module, name, source)


@contextlib.contextmanager
def _weights_of_reference(module: "MCorePreference") -> Iterator[None]:
    """Let the module be the reference model inside the ``with`` block; collective."""
    path = module.preference.reference
    with module.as_reference():
        if path is None:
            yield
            return
        from lightning_mcore.hf.pretrained import absolute, fill_weights

        tensors = [*module.model.parameters()]
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        try:
            fill_weights(module, absolute(path))
            yield
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.data.copy_(values)


def _mark(module: "MCorePreference") -> str:
    """Return what identifies the weights of the reference, the same on any layout; collective."""
    if module.adapters_can_be_off and module.preference.reference is None and module._base is not None:
        return module._base
    from lightning_mcore.hf.adapters import fingerprint

    return fingerprint(module)


def _read_all(module: "MCorePreference", sources: dict[str, PairSource]) -> bool:
    """Fill in the references of all splits from files, if these are complete; collective."""
    tables = {name: _stored(module, source) for name, source in sources.items()}
    if any(len(tables[name]) < len(source) for name, source in sources.items()):
        return False
    for name, source in sources.items():
        source.reference = tables[name]
    return True


def _path(module: "MCorePreference", source: PairSource) -> str:
    assert module.reference_mark is not None
    parts = (_VERSION, module.reference_mark, source.key, str(len(source)), str(module.trainer.precision))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return os.path.join(source.folder, f"reference-{digest}.f64")


def _stored(module: "MCorePreference", source: PairSource) -> _Table:
    """Return the first rows of a reference, [rows, 2], as far as they are in the file that rank 0 sees; collective."""
    path = _path(module, source)

    def read() -> _Table:
        if not os.path.exists(path):
            return np.zeros((0, 2))
        values = np.fromfile(path, "<f8")[: 2 * len(source)]
        return values[: len(values) // 2 * 2].reshape(-1, 2)

    return decide(read)


def _complete(module: "MCorePreference", name: str, source: PairSource) -> _Table:
    """Return the reference of a split, and write what its file lacks; collective."""
    table = _stored(module, source)
    if len(table) == len(source):
        return table
    trainer = module.trainer
    rank, ranks = data_parallel_place(trainer)
    at_once = source.batch_size * ranks
    multiple = packing_multiples(trainer).row
    path = _path(module, source)
    if table.size:
        rank_zero_info(f"the reference of the {name} data continues at pair {len(table)} of {len(source)}")
    parts = [table]
    with _appending(path, len(table), trainer.is_global_zero) as append:
        starts = range(len(table), len(source), at_once)
        shown = tqdm(
            starts,
            desc=f"log-probabilities of the {name} data under the reference",
            disable=not trainer.is_global_zero,
            delay=_SILENT_SECONDS,
            leave=False,
        )
        for start in shown:
            # ranks that have no pair of the last batch repeat the last one, because others may share experts with them
            own = [min(start + rank * source.batch_size + i, len(source) - 1) for i in range(source.batch_size)]
            pairs = source.take(own)
            longest = torch.tensor(max(sequence.length for pair in pairs for sequence in pair.sequences))
            length = int(trainer.strategy.reduce(longest.to(module.device), reduce_op="max"))  # experts want it equal
            batch = collate_padded_pairs(pairs, multiple, -(-length // multiple) * multiple)
            batch = module.on_before_batch_transfer(batch, 0)
            logps = module.run_forward("answer_logps", move_data_to_device(batch, module.device))
            gathered: Any = trainer.strategy.all_gather(logps)
            rows = gathered.reshape(-1, 2)[: len(source) - start].cpu()
            if not torch.isfinite(rows).all():
                bad = start + int((~torch.isfinite(rows)).any(dim=1).nonzero()[0])
                raise ValueError(
                    f"the reference gives an answer of pair {bad} of the {name} data the log-probability"
                    f" {rows[bad - start].tolist()}; check its weights and the precision"
                )
            parts.append(rows.numpy())
            append(parts[-1])
    return np.concatenate(parts)


@contextlib.contextmanager
def _appending(path: str, rows: int, is_writer: bool) -> Iterator[Any]:
    """Yield a function that appends [n, 2] fp64 rows to a file that has ``rows`` of them; it writes on one rank only.

    What a crash may have left behind the last whole row is cut off.
    """
    if not is_writer:
        yield lambda _: None
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "ab") as file:
        file.truncate(rows * 16)

        def append(values: _Table) -> None:
            file.write(values.astype("<f8").tobytes())
            file.flush()

        yield append
