# SPDX-License-Identifier: Apache-2.0
"""Rules between settings, as functions on plain data that yield a sentence for each broken rule.

The class that takes the settings raises the first sentence; ``lightning-mcore plan`` lists them all. Each rule is
written once. Rules within one part stay with that part: a layout (``config/layout.py``), FP8 (``config/fp8.py``), the
loss scale (``config/fp16.py``), the optimizer's options (``optimizer/rules.py``).
"""

from collections.abc import Iterable


def raise_first(sentences: Iterable[str]) -> None:
    """Raise the first sentence as a ValueError, if there is one."""
    for sentence in sentences:
        raise ValueError(sentence)
