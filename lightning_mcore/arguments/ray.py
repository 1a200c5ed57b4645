# SPDX-License-Identifier: Apache-2.0
"""``RayArguments``: LLaMA-Factory's options for a launch on Ray, which is not supported yet.

The values are read and checked, so that a file with the defaults is accepted. A file that asks for Ray's workers is
refused.
"""

import dataclasses
import json
import os
from typing import Any

from lightning_mcore.arguments.fields import check_types, option

_YES = {"1", "true", "y", "yes", "on"}


@dataclasses.dataclass
class RayArguments:
    """Where Ray would start workers; each field's help text explains it.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range or not JSON, or a value or the environment variable USE_RAY asks for Ray's
            workers.
    """

    ray_num_workers: int = option("Workers that Ray would start; 1 for a launch without Ray.", default=1)
    ray_init_kwargs: dict[str, Any] | str | None = dataclasses.field(
        default=None, metadata={"help": "Arguments of ray.init: a JSON object."}
    )
    master_addr: str | None = option("Address of the first machine, for environment().")
    master_port: str | None = option("Port of the first machine, for environment().")

    def __post_init__(self) -> None:
        """Check the values, and refuse to launch on Ray."""
        port: Any = self.master_port
        if isinstance(port, int) and not isinstance(port, bool):  # as YAML reads it
            self.master_port = str(port)
        check_types(self)
        self._read_init_kwargs()
        if self.master_port is not None and not (self.master_port.isdigit() and 0 < int(self.master_port) < 65536):
            raise ValueError(f"master_port={self.master_port!r} is not a port; choose 1 to 65535")
        if self.ray_num_workers < 1:
            raise ValueError(f"ray_num_workers={self.ray_num_workers} is too small; choose 1 or more")
        if self.ray_num_workers > 1:
            raise ValueError(
                f"ray_num_workers={self.ray_num_workers} asks for Ray's workers, but runs cannot be launched on Ray "
                "yet; leave it out, and start the run with torchrun or srun"
            )
        if os.environ.get("USE_RAY", "0").lower() in _YES:
            raise ValueError(
                f"USE_RAY={os.environ['USE_RAY']} asks for Ray's workers, but runs cannot be launched on Ray yet; unset"
                " it, and start the run with torchrun or srun"
            )
        if self.ray_init_kwargs:
            raise ValueError(
                f"ray_init_kwargs={self.ray_init_kwargs!r} does nothing without Ray's workers, and runs cannot be "
                "launched on Ray yet; leave it out"
            )

    def environment(self) -> dict[str, str]:
        """Return the environment variables that say where the first machine is, as torch.distributed reads them."""
        given = {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
        return {name: value for name, value in given.items() if value is not None}

    def _read_init_kwargs(self) -> None:
        if not isinstance(self.ray_init_kwargs, str):
            return
        try:
            loaded = json.loads(self.ray_init_kwargs)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"ray_init_kwargs={self.ray_init_kwargs!r:.500} is not JSON: {error}; give an object"
            ) from error
        if not isinstance(loaded, dict):
            raise ValueError(f"ray_init_kwargs={self.ray_init_kwargs!r} is not a JSON object; give one")
        self.ray_init_kwargs = loaded
