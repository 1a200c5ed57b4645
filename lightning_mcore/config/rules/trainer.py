# SPDX-License-Identifier: Apache-2.0
"""What Lightning's ``Trainer`` refuses of arguments that runs of several ranks set, and what ``MCoreStrategy`` refuses.

Names and types of the arguments were checked before.

Source: ``Trainer.__init__``, ``_AcceleratorConnector``, ``FitLoop`` and ``_determine_batch_limits`` of Lightning 2.6.
"""

from collections.abc import Iterator, Mapping
from typing import Any

NO_SYNC_BATCHNORM = "sync_batchnorm=True is not available for a model built with pipeline(); set it to False"

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_AT_LEAST = {"num_nodes": 1, "accumulate_grad_batches": 1, "max_epochs": -1, "max_steps": -1}
_SHARES = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("overfit_batches", "val_check_interval"),
)
_CLIPPING = ("norm", "value")


def trainer_faults(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with values of the right type.

    Args:
        trainer: Arguments of ``Trainer``.
    """
    accelerator = trainer.get("accelerator", "auto")
    if accelerator not in _ACCELERATORS:
        yield f"trainer.accelerator={accelerator!r} is not available under MCoreStrategy; choose 'gpu' or 'cpu'"
    if accelerator == "cpu" and isinstance(trainer.get("devices"), list):
        yield f"trainer.devices={trainer['devices']} names devices, which a CPU does not have; give their number"
    for name, least in _AT_LEAST.items():
        value = trainer.get(name)
        if isinstance(value, int) and value < least:
            unlimited = ", or -1 for no limit" if least < 0 else ""
            yield f"trainer.{name}={value} is too small; choose {max(least, 0)} or more{unlimited}"
    for name in _SHARES:
        value = trainer.get(name)
        if isinstance(value, float) and not 0.0 <= value <= 1.0:
            yield f"trainer.{name}={value} is not a share; give a float from 0.0 to 1.0, or an int of batches"
    if trainer.get("sync_batchnorm"):
        yield NO_SYNC_BATCHNORM
    clipping = trainer.get("gradient_clip_algorithm")
    if clipping is not None and clipping not in _CLIPPING:
        yield f"trainer.gradient_clip_algorithm={clipping!r} is unknown; choose 'norm' or 'value'"


def precision_faults(asked: str | None, plugin: str) -> Iterator[str]:
    """Yield that there are two precisions: Lightning takes the strategy's and forgets the trainer's.

    Args:
        asked: That of ``Trainer(precision=...)``; ``"32-true"`` also stands where nothing was asked for.
        plugin: That of ``MCoreStrategy(precision_plugin=...)``.
    """
    if asked not in (None, "32-true", plugin):
        yield (
            f"Trainer(precision={asked!r}) contradicts the precision_plugin of MCoreStrategy, which has {plugin!r}; set"
            " it in one place"
        )


def may_never_end(trainer: Mapping[str, Any]) -> bool:
    """Return whether the arguments leave the number of steps unknown, however much data there is.

    Args:
        trainer: Arguments of ``Trainer``.
    """
    steps, epochs = trainer.get("max_steps"), trainer.get("max_epochs")
    return steps in (None, -1) and (epochs == -1 or (epochs is None and trainer.get("max_time") is not None))
