# SPDX-License-Identifier: Apache-2.0
"""The sentence for a name that does not exist, with its nearest neighbour.

Every front door (command line, YAML, arguments in the style of Hugging Face, LLaMA-Factory) refuses a misspelt key with
it. Pure arithmetic on strings.
"""

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that refuses a name: ``unknown option 'lerning_rate'; did you mean 'learning_rate'?``.

    Args:
        what: What the name should have been one of, as ``"option"`` or ``"key of run.yaml"``.
        name: What was given.
        known: The names that there are.
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"unknown {what} {name!r}; did you mean {close[0]!r}?"
    shown = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])}, ..."
    return f"unknown {what} {name!r}; choose from {shown}"
