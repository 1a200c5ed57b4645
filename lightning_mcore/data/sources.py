# SPDX-License-Identifier: Apache-2.0
"""Where samples come from: names of datasets or files, for losses that are logged apart, and numbers in batches.

A batch says where its samples come from in ``source_ids``, an index into the data module's ``source_names`` for each
sample: [b] for dense rows, [b, n] for the sub-sequences of packed rows, -1 for an empty one.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ENDS = ("_text_document", "_document")  # of Megatron's datasets, the same for all


def names_of_sources(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path: its last part, and as many folders as tell it from the others.

    ``data/web.jsonl`` and ``data/code.jsonl`` become ``web`` and ``code``; ``en/train.jsonl`` and ``de/train.jsonl``
    become ``en/train`` and ``de/train``.
    """
    parts = [_stem(path).replace(os.sep, "/").strip("/").split("/") for path in paths]
    ends = Counter(tuple(path[-length:]) for path in parts for length in range(1, len(path) + 1))
    names = []
    for path in parts:
        length = 1
        while length < len(path) and ends[tuple(path[-length:])] > 1:
            length += 1
        names.append("/".join(path[-length:]))
    return names


def _stem(path: str) -> str:
    stem = os.path.splitext(path)[0] if path.endswith((".jsonl", ".json", ".parquet")) else path
    return next((stem.removesuffix(end) for end in _ENDS if stem.endswith(end)), stem)


def with_sources(batch: Mapping[str, Tensor], firsts: NDArray[np.int64], sources: Sequence[int]) -> dict[str, Tensor]:
    """Return a batch with ``source_ids``, found by its ``sample_ids``: the numbers of rows in joined files.

    ``firsts`` [files] is the number of each file's first row, ``sources`` [files] the file's source.
    """
    # Files of 100 and 50 rows: firsts 0 100. Sample 120 is of file 1; an empty sub-sequence, -1, is of none.
    files = np.searchsorted(firsts, batch["sample_ids"].numpy(), side="right") - 1
    found = np.where(files < 0, -1, np.asarray(sources, np.int64)[files])
    return {**batch, "source_ids": torch.from_numpy(found)}
