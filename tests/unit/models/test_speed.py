# SPDX-License-Identifier: Apache-2.0
"""The logs of a step do not make the host wait for the device."""

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from tests.te.runs import Run, make_loader, make_model, make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_lightning_logs_is_a_tensor_already(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning copies a host number to the device, and that copy waits for the whole step."""
    log, logged = pl.LightningModule.log, {}

    def record(module: Any, name: str, value: Any, **options: Any) -> None:
        logged[name] = value
        log(module, name, value, **options)

    monkeypatch.setattr(pl.LightningModule, "log", record)
    run = Run(impl="local", precision=precision, steps=2)
    make_trainer(run, 1).fit(make_model(run), make_loader(run))
    assert {"train_loss", "tokens_per_second", "model_tflops", "grad_norm"} <= set(logged)
    assert ("loss_scale" in logged) == (precision == "16-mixed")
    assert not {name: value for name, value in logged.items() if not isinstance(value, Tensor)}
