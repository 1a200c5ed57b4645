# SPDX-License-Identifier: Apache-2.0
"""What Lightning's ``Trainer`` refuses of plain data: the arguments that runs of several ranks set.

``rules.py`` calls :func:`check_trainer`. Names and types of the arguments were checked before it.

Source: ``Trainer.__init__``, ``_AcceleratorConnector``, ``FitLoop`` and ``_determine_batch_limits`` of Lightning 2.6.
"""

from collections.abc import Mapping
from typing import Any

from lightning_mcore.planning.rule_book import RuleBook

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_AT_LEAST = {"num_nodes": 1, "accumulate_grad_batches": 1, "max_epochs": -1, "max_steps": -1}
_SHARES = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("overfit_batches", "val_check_interval"),
)
_CLIPPING = ("norm", "value")


def check_trainer(book: RuleBook, trainer: Mapping[str, Any]) -> None:
    """Refuse values of the right type that the Trainer does not take.

    Args:
        book: Where refusals go.
        trainer: Arguments of ``Trainer``.
    """
    accelerator = trainer.get("accelerator", "auto")
    if accelerator not in _ACCELERATORS:
        book.refuse(f"trainer.accelerator={accelerator!r} is not available under MCoreStrategy; choose 'gpu' or 'cpu'")
    if accelerator == "cpu" and isinstance(trainer.get("devices"), list):
        book.refuse(f"trainer.devices={trainer['devices']} names devices, which a CPU has not; give their number")
    for name, least in _AT_LEAST.items():
        value = trainer.get(name)
        if isinstance(value, int) and value < least:
            unlimited = ", or -1 for no limit" if least < 0 else ""
            book.refuse(f"trainer.{name}={value} is too small; choose {max(least, 0)} or more{unlimited}")
    for name in _SHARES:
        value = trainer.get(name)
        if isinstance(value, float) and not 0.0 <= value <= 1.0:
            book.refuse(f"trainer.{name}={value} is no share; give a float from 0.0 to 1.0, or an int of batches")
    if trainer.get("sync_batchnorm"):
        book.refuse("sync_batchnorm=True is not available for a model built with pipeline(); set it to False")
    clipping = trainer.get("gradient_clip_algorithm")
    if clipping is not None and clipping not in _CLIPPING:
        book.refuse(f"trainer.gradient_clip_algorithm={clipping!r} is unknown; choose 'norm' or 'value'")


def may_never_end(trainer: Mapping[str, Any]) -> bool:
    """Return whether the arguments leave the number of steps unknown, however much data there is.

    Args:
        trainer: Arguments of ``Trainer``.
    """
    steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    return steps in (None, -1) and (epochs == -1 or (epochs is None and trainer.get("max_time") is not None))
