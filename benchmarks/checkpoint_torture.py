# SPDX-License-Identifier: Apache-2.0
"""Kill ranks at random moments during saves, as often as you like; the test of the same name does it twenty times.

    python -m benchmarks.checkpoint_torture --kills 500

Each run of 25 kills has its own seed and its own setup: a layout, a ``last.ckpt`` that is replaced or a link, and a
folder that may be reached through a link. Four trials save synchronously, the next four asynchronously. A run that
loses anything stops with an error; ``--kills 25 --seed N`` repeats it, as far as random moments can be repeated.
``tests/torture.py`` says what is checked. The results, with versions and commit, go to benchmarks/results/.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.overhead import REPOSITORY, circumstances, write_results
from tests.torture import KINDS, Tally, torture

KILLS_OF_A_RUN = 25


def main() -> None:
    """Run the requested number of kills and write the results."""
    parser = argparse.ArgumentParser(description="Kill ranks at random moments of saves.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=100, help="of the first run; the others count on")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    facts = circumstances(options)
    total, seed, began = Tally(), options.seed, time.monotonic()
    while total.kills < options.kills:
        kind = KINDS[seed % len(KINDS)]
        print(f"seed {seed}, {kind} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="torture_") as folder:
            tally = torture(Path(folder, "run"), min(KILLS_OF_A_RUN, options.kills - total.kills), seed, kind)
        print(tally, flush=True)
        total.kills += tally.kills
        total.steps += tally.steps
        total.phases += Counter(tally.phases)
        seed += 1
    result = {"kills": total.kills, "lost": 0, "optimizer_steps": total.steps, "kills_by_phase": dict(total.phases)}
    facts["seconds"] = round(time.monotonic() - began)
    text = "\n".join(f"- {key}: {value}" for key, value in result.items())
    write_results(options.output, "checkpoint_torture", "Ranks killed while saving", facts, result, text)


if __name__ == "__main__":
    main()
