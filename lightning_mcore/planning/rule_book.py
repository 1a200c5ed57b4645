# SPDX-License-Identifier: Apache-2.0
"""All errors of a run, and not only the first: checks run one by one, and what they refuse is collected."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lightning_mcore.config.checks import accepts, choices_of
from lightning_mcore.config.text import unknown_name
from lightning_mcore.planning.signatures import Arguments

T = TypeVar("T")


class RuleBook:
    """Collects the sentences of checks that refuse something."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def attempt(self, check: Callable[[], T]) -> T | None:
        """Carry out a check and keep what it refuses.

        Args:
            check: Raises what it refuses.

        Returns:
            What it returns; None where it refused.
        """
        try:
            return check()
        except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
            self.refuse(str(error))
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Carry out a check, keep what it refuses, and return whether it refused nothing."""
        before = len(self.errors)
        self.attempt(check)
        return len(self.errors) == before

    def collect(self, sentences: Iterable[str]) -> bool:
        """Keep the sentences of rules, and return whether there was none."""
        before = len(self.errors)
        for sentence in sentences:
            self.refuse(sentence)
        return len(self.errors) == before

    def refuse(self, sentence: str) -> None:
        """Keep a sentence, once."""
        text = " ".join(sentence.split())
        if text not in self.errors:
            self.errors.append(text)

    def check_arguments(self, where: str, given: Mapping[str, Any], known: Arguments) -> dict[str, Any]:
        """Refuse names that do not exist and values that do not fit their type.

        Args:
            where: What takes them, such as ``"argument of MCoreStrategy"``.
            given: Values by name.
            known: The arguments that there are.

        Returns:
            Those that are right.
        """
        fitting = {}
        for name, value in given.items():
            if name not in known:
                self.refuse(unknown_name(where, name, known))
            elif not accepts(known[name].hint, value) and value != known[name].default:
                self.refuse(f"{where} {name}={value!r} does not fit; choose {choices_of(known[name].hint)}")
            else:
                fitting[name] = value
        return fitting
