# SPDX-License-Identifier: Apache-2.0
"""Run a command of ``lightning-mcore`` on Ray's workers, with the output and the exit code of a run without Ray.

``fit.py`` and ``llamafactory.py`` call :func:`run` when their file asks for Ray. Each worker then runs the same command
with the same arguments. Rank 0's output is printed here; other ranks' output is in Ray's logs.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mcore.cli.command import EXPECTED, FAILED, INTERRUPTED, refused
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.ray import RaySettings, elastic_sizes
from lightning_mcore.config.run import number_of_devices

_GPUS = {"cpu": False, "gpu": True, "cuda": True}


def run(
    module: str, words: Sequence[str], settings: RaySettings, layout: ParallelLayout, trainer: Mapping[str, Any]
) -> int:
    """Run a command on Ray's workers, and return its exit code.

    ``module`` has the command's function ``run``, which takes ``words``. ``storage_path`` is filled in. ``trainer`` has
    ``accelerator``, ``devices``, ``num_nodes`` and ``accumulate_grad_batches``.
    """
    try:
        _check_devices(settings, trainer)
        sizes = elastic_sizes(layout, settings.min_workers, settings.max_workers, trainer["accumulate_grad_batches"])
        from lightning_mcore.ray.launch import launch

        code = launch(settings, sizes, _work, module, list(words), gpus=_GPUS.get(trainer["accelerator"]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if type(error).__module__.startswith("ray."):
            print(error, file=sys.stderr)  # with the traceback of the workers that failed
            return FAILED
        if not isinstance(error, EXPECTED):
            raise
        return refused(error)
    return INTERRUPTED if code is None else int(code)  # None: ended before rank 0 returned


def _check_devices(settings: RaySettings, trainer: Mapping[str, Any]) -> None:
    """Reject numbers of devices and nodes that do not make the number of Ray's workers, and GPUs for a run on CPUs."""
    devices, nodes = number_of_devices(trainer["devices"]), trainer["num_nodes"] or 1
    if devices is not None and devices * nodes != settings.max_workers:
        raise ValueError(
            f"devices={trainer['devices']} times num_nodes={nodes} is not num_workers={settings.max_workers}, the ranks"
            " that Ray starts; leave devices and num_nodes out"
        )
    asked = (settings.resources_per_worker or {}).get("GPU", 0)
    if asked and _GPUS.get(trainer["accelerator"]) is False:
        raise ValueError(
            f"resources_per_worker has GPU={asked:g}, but accelerator={trainer['accelerator']} runs on CPUs; leave GPU"
            " out, or choose another accelerator"
        )


def _work(module: str, words: list[str]) -> int:
    """Run a command in a worker."""
    code: int = importlib.import_module(module).run(words)
    return code
