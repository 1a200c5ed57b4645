# SPDX-License-Identifier: Apache-2.0
"""Walks over many draws: validates all of them, trains a sample of those that are accepted."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.draw import Settings, draw
from tests.fuzz.trial import (
    Outcome,
    Verdict,
    evaluate_alone,
    evaluates_alike,
    judge,
    tolerance,
    train,
)
from tests.support.ranks import RanksFailedError, run_ranks

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
        again = f'make fuzz ARGS="--only {self.settings.seed}"'
        return f"{self.settings}\n    {self.what}\n    again: {again}"


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


def train_all(
    accepted: Sequence[Settings], done: Callable[[int], None] = lambda number: None
) -> tuple[list[Defect], Counter[str]]:
    """Train with each settings on live ranks.

    Args:
        accepted: Settings that validation accepts.
        done: Called with the number of settings that have just been trained.

    Returns:
        What is wrong, and how many settings took which check.
    """
    defects, checks = list[Defect](), Counter[str]()
    for world_size in sorted({settings.world_size for settings in accepted}):
        same = [settings for settings in accepted if settings.world_size == world_size]
        for start in range(0, len(same), BATCH):
            batch = same[start : start + BATCH]
            defects += _train_batch(batch, checks)
            done(len(batch))
    return defects, checks


def _train_batch(batch: list[Settings], checks: Counter[str]) -> list[Defect]:
    """Train a batch; if it fails, each of its settings alone, to find which."""
    try:
        outcomes, alone = _run(batch)
    except RanksFailedError as failure:
        if len(batch) == 1:
            return [Defect(batch[0], str(failure))]
        return [defect for settings in batch for defect in _train_batch([settings], checks)]
    checks.update(check for first, *_ in outcomes for check in first.checks)
    checks["refused when the optimizer was known"] += sum(bool(first.refusals) for first, *_ in outcomes)
    checks["validated on one rank too"] += len(alone)
    faults = [list(_faults(s, o, alone.get(s.seed))) for s, o in zip(batch, outcomes, strict=True)]
    return [Defect(s, "\n    ".join(texts)) for s, texts in zip(batch, faults, strict=True) if texts]


def _run(batch: Sequence[Settings]) -> tuple[list[tuple[Outcome, ...]], dict[int, list[float]]]:
    """Return the outcomes of each settings on its ranks, and by seed the validation losses on one rank."""
    seconds = 60 + 60 * len(batch)
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        pairs = [(settings, _other_layout(settings)) for settings in batch]
        ranks = run_ranks(batch[0].world_size, train, pairs, folder, timeout=seconds, open_group=False)
        outcomes = list(zip(*ranks, strict=True))
        on_one = [_alone(s) for s, (first, *_) in zip(batch, outcomes, strict=True) if first.evaluated]
        accepted = [settings for settings in on_one if settings is not None]
        [losses] = run_ranks(1, evaluate_alone, accepted, folder, timeout=seconds, open_group=False)
        return outcomes, {settings.seed: own for settings, own in zip(accepted, losses, strict=True)}


def _other_layout(settings: Settings) -> Settings | None:
    """Return the run on another layout that is accepted, one of other sizes if there is any."""

    def sizes(strategy: dict[str, Any]) -> dict[str, Any]:
        return {name: size for name, size in strategy.items() if name.endswith("parallel_size") and size != 1}

    by_sizes = sorted(settings.course.others, key=lambda strategy: sizes(strategy) == sizes(settings.strategy))
    others = (settings.on(strategy, settings.world_size) for strategy in by_sizes)
    return next((other for other in others if other and other != settings and judge(other).accepted), None)


def _alone(settings: Settings) -> Settings | None:
    """Return the settings of the validation on one rank; None if that would compute something else."""
    alone = settings.on({}, 1)
    if alone is None or not evaluates_alike(settings):
        return None
    alone = replace(alone, ddp={})
    return alone if judge(alone).accepted else None


def _faults(settings: Settings, outcomes: Sequence[Outcome], alone: list[float] | None) -> Iterator[str]:
    """Yield what is wrong with what the ranks found."""
    first = outcomes[0]
    if any(outcome.refusals != first.refusals for outcome in outcomes):
        yield f"not all ranks refuse alike: {[outcome.refusals for outcome in outcomes]}"
    yield from (defect.what for verdict in first.refusals if (defect := wrong_refusal(settings, verdict)))
    yield from dict.fromkeys(text for outcome in outcomes for text in outcome.problems)
    if any(outcome.evaluated != first.evaluated for outcome in outcomes):
        yield f"val_loss differs between ranks: {[outcome.evaluated for outcome in outcomes]}"
    for loader, (loss, wanted) in enumerate(zip(first.evaluated, alone or first.evaluated, strict=True)):
        if not abs(loss - wanted) <= tolerance(settings):
            yield f"val_loss of loader {loader} is {loss}, and {wanted} on one rank"
