# SPDX-License-Identifier: Apache-2.0
"""Rules between settings, as functions over plain data that yield a sentence for each one that is broken.

The class that takes the settings raises the first sentence; ``lightning-mcore plan`` lists them all. A rule stands here
once. Rules within one part stay with it: a layout (``config/layout.py``), FP8 (``config/fp8.py``), the loss scale
(``config/fp16.py``), the optimizer's options (``optimizer/rules.py``).
"""

from collections.abc import Iterable


def raise_first(sentences: Iterable[str]) -> None:
    """Refuse what breaks a rule.

    Args:
        sentences: One for each broken rule.

    Raises:
        ValueError: There is a sentence; the first one.
    """
    for sentence in sentences:
        raise ValueError(sentence)
