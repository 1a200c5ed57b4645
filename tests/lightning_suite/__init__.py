# SPDX-License-Identifier: Apache-2.0
"""Lightning's own tests, run with our strategy in the place of ddp.

Nobody knows better what a user of Lightning relies on. The tests come from a checkout of Lightning and are not part of
this project; here is what runs them three times and compares:

* ``plain``: as they are,
* ``ddp``: every Trainer that runs in one CPU process and names no strategy of its own gets Lightning's own ddp,
* ``mcore``: the same Trainers get ``MCoreStrategy``.

Some tests are about one process without ddp and fail with any strategy of ranks, so ddp is the yardstick: a test that
passes with ddp must pass with ours, or stand in ``differs.toml`` with the reason.

``--ranks 2`` runs each test in two processes, which are the ranks of every Trainer on a CPU; the outcome on each rank
is compared with that under ddp.

``python -m tests.lightning_suite`` (``make test-lightning``) runs it; ``swap.py`` is the pytest plugin that switches
the strategy, ``two_ranks.py`` runs a test on two ranks, ``verdict.py`` compares. At all model-parallel sizes 1 and in
fp32 this shows that Lightning's features survive; that layouts agree is shown in ``tests/parity``.
"""
