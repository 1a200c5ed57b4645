# SPDX-License-Identifier: Apache-2.0
"""Makes the modules in ``examples/`` importable by their short names, as they are where a script there is run."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"

sys.path.insert(0, str(EXAMPLES))
