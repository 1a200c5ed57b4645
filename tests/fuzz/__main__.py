# SPDX-License-Identifier: Apache-2.0
"""The long walk: ``python -m tests.fuzz --count 3000 --train 150`` (``make fuzz``)."""

import argparse
import sys
import warnings

from rich.console import Console
from rich.progress import Progress

from tests.fuzz.draw import draw
from tests.fuzz.trial import judge
from tests.fuzz.walk import train_all, validate, wrong_refusal

CONSOLE = Console(soft_wrap=True, markup=False, highlight=False)


def main() -> int:
    """Walk, print what is wrong, and return the number of defects, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="settings to validate")
    parser.add_argument("--train", type=int, default=150, help="accepted settings to train, to interrupt and to resume")
    parser.add_argument("--seed", type=int, default=0, help="the first draw")
    parser.add_argument("--only", type=int, help="train the draw with this number and no other")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.only is not None:
        return _only(arguments.only)
    with Progress(console=CONSOLE, disable=not CONSOLE.is_terminal) as progress:
        task = progress.add_task("validate", total=arguments.count)
        defects, accepted = [], []
        for settings, verdict in validate(range(arguments.seed, arguments.seed + arguments.count)):
            defects += [defect] if (defect := wrong_refusal(settings, verdict)) else []
            accepted += [settings] if verdict.accepted else []
            progress.advance(task)
        sample = accepted[: arguments.train]
        CONSOLE.print(f"{arguments.count} settings: {len(accepted)} accepted, {len(sample)} of them are trained")
        task = progress.add_task("train", total=len(sample))
        wrong, checks = train_all(sample, lambda number: progress.advance(task, number))
        defects += wrong
    for check, number in sorted(checks.items()):
        CONSOLE.print(f"{number} {check}")
    for defect in defects:
        CONSOLE.print(f"\nDEFECT {defect}")
    CONSOLE.print(f"\n{len(defects)} defects")
    return int(bool(defects))


def _only(seed: int) -> int:
    settings = draw(seed)
    verdict = judge(settings)
    CONSOLE.print(settings)
    CONSOLE.print("accepted" if verdict.accepted else f"refused: {verdict.text}")
    defects = train_all([settings])[0] if verdict.accepted else []
    for defect in defects:
        CONSOLE.print(defect.what)
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
