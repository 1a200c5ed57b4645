# SPDX-License-Identifier: Apache-2.0
"""Python reads this first in each program that a test starts (``program_environment`` of ``tests/support/ranks.py``).

Looking for garbage among what is being imported takes a quarter of the seconds of an import.
"""

import gc

gc.set_threshold(100_000)
