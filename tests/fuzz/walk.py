# SPDX-License-Identifier: Apache-2.0
"""Walks over many draws: validates all of them, trains a sample of those that are accepted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.fuzz.draw import Settings, draw
from tests.fuzz.trial import Verdict, judge, train
from tests.ranks import RanksFailedError, run_ranks

BATCH = 6
"""Settings that are trained one after the other by the same ranks."""


@dataclass(frozen=True)
class Defect:
    """Settings that validation and Megatron do not agree about.

    Args:
        settings: What was drawn.
        what: What is wrong.
    """

    settings: Settings
    what: str

    def __str__(self) -> str:
        return f"{self.settings}\n    {self.what}"


def validate(seeds: Iterable[int]) -> Iterator[tuple[Settings, Verdict]]:
    """Yield the settings of each seed with the verdict of validation."""
    for seed in seeds:
        settings = draw(seed)
        yield settings, judge(settings)


def wrong_refusal(settings: Settings, verdict: Verdict) -> Defect | None:
    """Return what is wrong with a refusal: it is to be one sentence, and ours."""
    if verdict.accepted:
        return None
    if not verdict.ours:
        return Defect(settings, f"refused by another package first: {verdict.text}")
    if not verdict.text or "\n" in verdict.text.strip():
        return Defect(settings, f"the refusal is no sentence: {verdict.text!r}")
    return None


def train_all(accepted: Sequence[Settings], done: Callable[[int], None] = lambda number: None) -> list[Defect]:
    """Train one step with each settings on live ranks; return those that do not train.

    Args:
        accepted: Settings that validation accepts.
        done: Called with the number of settings that have just been trained.
    """
    defects = []
    for world_size in sorted({settings.world_size for settings in accepted}):
        same = [settings for settings in accepted if settings.world_size == world_size]
        for start in range(0, len(same), BATCH):
            batch = same[start : start + BATCH]
            defects += _train_batch(batch)
            done(len(batch))
    return defects


def _train_batch(batch: list[Settings]) -> list[Defect]:
    """Train a batch; if it fails, each of its settings alone, to find which."""
    try:
        losses = run_ranks(batch[0].world_size, train, batch, timeout=60 + 30 * len(batch), open_group=False)
    except RanksFailedError as failure:
        if len(batch) == 1:
            return [Defect(batch[0], str(failure))]
        return [defect for settings in batch for defect in _train_batch([settings])]
    of_all_ranks = zip(*losses, strict=True)
    apart = [(s, of_ranks) for s, of_ranks in zip(batch, of_all_ranks, strict=True) if len(set(of_ranks)) > 1]
    return [Defect(settings, f"train_loss differs between ranks: {of_ranks}") for settings, of_ranks in apart]
