# SPDX-License-Identifier: Apache-2.0
"""Writes the losses of FP8 runs on the CPU, with which ``test_transformer_engine.py`` compares those of a GPU.

PYTHONPATH=$PWD/.te-2.11.0/site python -m tests.gpu.reference
"""

import json

from tests.gpu.runs import train_on
from tests.gpu.test_transformer_engine import REFERENCE, fp8


def main() -> None:
    """Train with each recipe, and write the losses."""
    losses = {recipe: train_on("cpu", fp8(recipe)).losses for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8")}
    REFERENCE.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    main()
