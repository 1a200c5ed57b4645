# SPDX-License-Identifier: Apache-2.0
"""Which warnings a run hides: those of our own methods, and not those of the same methods of a user's module."""

import warnings

import pytest

from lightning_mcore import MCoreGPT
from lightning_mcore.parallel.known_warnings import ignore_known_warnings, ignore_warnings_of_methods

VALIDATION = "You defined a `validation_step` but have no `val_dataloader`. Skipping val loop."
TRANSFER = "You have overridden `on_before_batch_transfer` in `LightningModule` but have passed in a datamodule"


class Own(MCoreGPT):
    """A user's model, with a validation of its own."""

    def validation_step(self, batch: object, batch_idx: int) -> None:
        """Do nothing."""


def shown(kind: type) -> list[str]:
    """Return which of the two warnings are shown in a run of a class."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        ignore_known_warnings()
        ignore_warnings_of_methods(kind)
        warnings.filterwarnings("always", append=True)
        for text in (VALIDATION, TRANSFER):
            warnings.warn(text, stacklevel=1)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("kind", "left"), [(MCoreGPT, []), (Own, [VALIDATION])])
def test_a_warning_of_a_users_own_method_is_shown(kind: type, left: list[str]) -> None:
    assert shown(kind) == left


def test_the_filters_of_the_user_come_first() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.filterwarnings("always")
        ignore_known_warnings()
        warnings.warn("MimoModelConfig is experimental", stacklevel=1)
    assert len(caught) == 1
