# SPDX-License-Identifier: Apache-2.0
"""What a user says of indexed datasets: which, with which weights, and which share of them is for what; checked.

``datamodule.py`` reads its arguments with these functions. They look at no file.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix

SPLITS = ("train", "val", "test")  # in Megatron's order


@dataclass(frozen=True)
class Blend:
    """Which datasets, and how much of each.

    Attributes:
        prefixes: Of their files.
        weights: Share of the samples of each, positive; None takes them as they are.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Return from where to where the documents of each split go, as shares of all; None for an empty one.

    Raises:
        ValueError: It is no list of at most three shares.
    """
    parts = split.split(",")
    if len(parts) > len(SPLITS) or not all(re.fullmatch(r"\s*\d+(\.\d*)?\s*", part) for part in parts):
        raise ValueError(
            f"split={split!r} is no list of shares for training, validation and test; give up to three numbers such as"
            " '969,30,1'"
        )
    shares = [float(part) for part in parts] + [0.0] * (len(SPLITS) - len(parts))
    if sum(shares) == 0:
        raise ValueError(f"split={split!r} leaves nothing to any split; give a positive share")
    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(
        [share / sum(shares) for share in shares]
    )
    return matrix


def parse_paths(name: str, paths: object) -> Blend:
    """Return the blend that an argument stands for.

    Args:
        name: Of the argument.
        paths: A prefix, a list of prefixes, or a dict of prefixes and weights.

    Raises:
        TypeError: It is something else.
        ValueError: It is empty, names a dataset twice, or has a weight that is not positive.
    """
    if isinstance(paths, str):
        paths = [paths]
    if isinstance(paths, dict):
        bad = [key for key, weight in paths.items() if not _is_weight(weight)]
        if bad:
            raise ValueError(
                f"{name} gives {bad[0]} the weight {paths[bad[0]]!r}; give a positive number, or leave the dataset out"
            )
        prefixes, weights = tuple(map(str, paths)), tuple(float(weight) for weight in paths.values())
    elif isinstance(paths, Sequence) and all(isinstance(path, str) for path in paths):
        prefixes, weights = tuple(paths), None
    else:
        raise TypeError(
            f"{name}={paths!r} is neither a prefix nor a list of prefixes nor a dict of prefixes and weights"
        )
    if not prefixes:
        raise ValueError(f"{name} is empty; name the prefix of a dataset")
    if len(set(prefixes)) < len(prefixes):
        raise ValueError(f"{name} names a dataset twice; name it once, and give it a larger weight")
    return Blend(prefixes, weights)


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
