# SPDX-License-Identifier: Apache-2.0
"""Compute the log-probabilities of all answers under the reference model once, before training.

A forward pass over the pairs, on the run's layout, takes a third as long as one epoch; after it, no step of any epoch
needs the reference. The reference has the weights that the run begins with, or another model's, from its folder. These
replace the trained weights during the pass, which wait on the host, so there is never a second model on a device.

Each split's results, two numbers per pair, are in a file next to the data. Its name is a digest of the reference's
weights and settings, of the pairs (``PairSource.key``: files, template, lengths) and of the number format. Rank 0
appends to it during the pass, and an interrupted pass continues where the file ends, on any layout. A checkpoint
records which reference its run uses. A resumed run finds the file by that record, because its own weights have changed.

``MCorePreference`` calls :func:`compute_reference` when a fit, validation or test starts.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray

from lightning_mcore.data.appended import appending
from lightning_mcore.data.packing.rows import packing_multiples
from lightning_mcore.data.preference.pairs import PairSource, collate_padded_pairs
from lightning_mcore.hf.adapters import fingerprint
from lightning_mcore.hf.family import complete_fields
from lightning_mcore.hf.pretrained import fill_weights
from lightning_mcore.hf.source import absolute, computing_fields, pretrained_settings
from lightning_mcore.models.forward_pass import results_of_samples
from lightning_mcore.parallel.consensus import run_on_all_ranks, run_on_rank0

if TYPE_CHECKING:
    from lightning_mcore.models.preference import MCorePreference

_VERSION = "1"
_Table = NDArray[np.float64]  # [pairs, 2]
# The mark of the reference that was assigned to a split: its data module may be used for another model after this one
_ASSIGNED: WeakKeyDictionary[PairSource, str] = WeakKeyDictionary()


def compute_reference(module: "MCorePreference") -> None:
    """Give each of the data module's splits its reference, from files or by a pass over its pairs; collective.

    Without ``pair_sources()`` in the trainer's data module, nothing happens. Raises ValueError if the files lack some
    pairs and the run no longer has the reference's weights, or if a log-probability is not finite.
    """
    offered: dict[str, PairSource] = getattr(getattr(module.trainer, "datamodule", None), "pair_sources", dict)()
    known = module.reference_mark
    sources = {
        name: source
        for name, source in offered.items()
        if source.reference is None or _ASSIGNED.get(source, known) != known
    }
    if not sources:
        return
    # A resumed run knows the reference's mark from its checkpoint, so complete files need no weights
    if known is not None and _read_all(module, sources):
        return
    with _weights_of_reference(module):
        mark = _mark(module)
        if known not in (None, mark):
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
            _assign(source, _complete(module, name, source), mark)


@contextlib.contextmanager
def _weights_of_reference(module: "MCorePreference") -> Iterator[None]:
    """Let the module be the reference model inside the ``with`` block; collective."""
    path = module.preference.reference
    with module.as_reference():
        if path is None:
            yield
            return
        run_on_all_ranks(lambda: _check_config(module, path))
        tensors = [*module.model.parameters()]
        # To the host: a copy on the device would be a second model there
        kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        try:
            fill_weights(module, absolute(path))
            yield
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                # In place, so that buffers of gradients and optimizers still refer to the same memory
                tensor.data.copy_(values)


def _check_config(module: "MCorePreference", path: str) -> None:
    """Raise ValueError if the model at ``path`` computes differently, because its weights run in the module."""
    own = module.hparams["hf"]
    if not own:
        return
    other = pretrained_settings(path, module._given_family, weights=False)["hf"]
    expected, given = (complete_fields(computing_fields(hf, module._given_family)) for hf in (own, other))
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"the config of reference={path!r} says {name}={given.get(name)!r}, and the model's says"
                f" {expected.get(name)!r}; give a reference with the same settings, or put reference_logps into the"
                " batches"
            )


def _mark(module: "MCorePreference") -> str:
    """Return what identifies the reference's weights and settings, the same on any layout; collective."""
    is_base = module.adapters_can_be_off and module.preference.reference is None and module._base is not None
    of_weights = module._base if is_base else fingerprint(module)
    hf: dict[str, Any] | None = module.hparams["hf"]
    if not hf:
        return str(of_weights)
    fields = computing_fields(hf, module._given_family)
    fields |= {name: module.transformer[name] for name in fields if name in module.transformer}
    text = json.dumps(fields, sort_keys=True, default=str)
    return f"{of_weights} {hashlib.sha256(text.encode()).hexdigest()}"


def _read_all(module: "MCorePreference", sources: dict[str, PairSource]) -> bool:
    """Fill in the references of all splits from files, if these are complete; collective."""
    tables = {name: _stored(module, source) for name, source in sources.items()}
    if any(len(tables[name]) < len(source) for name, source in sources.items()):
        return False
    for name, source in sources.items():
        assert module.reference_mark is not None
        _assign(source, tables[name], module.reference_mark)
    return True


def _assign(source: PairSource, table: _Table, mark: str) -> None:
    source.reference = table
    _ASSIGNED[source] = mark


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
        # A crash may have left half a row
        return values[: len(values) // 2 * 2].reshape(-1, 2)

    return run_on_rank0(read)


def _complete(module: "MCorePreference", name: str, source: PairSource) -> _Table:
    """Return a split's reference, and write what its file lacks; collective."""
    table = _stored(module, source)
    if len(table) == len(source):
        return table
    trainer = module.trainer
    multiple = packing_multiples(trainer).row
    if table.size:
        rank_zero_info(f"the reference of the {name} data continues at pair {len(table)} of {len(source)}")

    def batch_of(own: list[int], of_all: list[int]) -> dict[str, torch.Tensor]:
        pairs = source.take(own)
        longest = torch.tensor(max(sequence.length for pair in pairs for sequence in pair.sequences))
        length = int(trainer.strategy.reduce(longest.to(module.device), reduce_op="max"))  # experts want it equal
        return collate_padded_pairs(pairs, multiple, -(-length // multiple) * multiple)

    missing = range(len(table), len(source))
    what = f"log-probabilities of the {name} data under the reference"
    parts = [table]
    with appending(_path(module, source), len(table) * 16, trainer.is_global_zero) as append:  # two numbers of 8 bytes
        for start, logps in results_of_samples(module, "answer_logps", batch_of, missing, source.batch_size, what):
            if not torch.isfinite(logps).all():
                bad = int((~torch.isfinite(logps)).any(dim=1).nonzero()[0])
                raise ValueError(
                    f"the reference gives an answer of pair {start + bad} of the {name} data the log-probability"
                    f" {logps[bad].tolist()}; check its weights and the precision"
                )
            parts.append(logps.numpy())
            append(parts[-1].astype("<f8"))
    return np.concatenate(parts)
