# SPDX-License-Identifier: Apache-2.0
"""Overlap tensor-parallel communication with matrix products: TransformerEngine's user buffers.

With ``MCoreStrategy(tp_comm_overlap=True)``, TransformerEngine's layers send parts of a result while they compute the
next. They use buffers that all tensor-parallel ranks share. These must be created once, for one shape of the
activations, before the first layer runs. Megatron-LM creates them at its start, because its arguments give the shape.
Here it is the shape of the first microbatch, so ``pipeline_runner.py`` creates the buffers with it
(:meth:`TensorParallelOverlap.open`), and the strategy frees them at teardown.

The other ``tp_comm_*`` fields are set in the model's ``TransformerConfig``.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.strategy import tensor_overlap_device_faults, tensor_overlap_faults
from lightning_mcore.config.value_checks import require_file, require_flag


class TensorParallelOverlap:
    """Whether tensor-parallel communication overlaps, and the buffers that it needs.

    ``config_path`` is a YAML file that says how each buffer (``qkv_fprop``, ``fc1_fprop``, ...) is used; None for
    TransformerEngine's defaults. Wrong values raise ``TypeError``, ``ValueError`` or ``FileNotFoundError``.
    """

    def __init__(self, enabled: bool, config_path: str | None, layout: ParallelLayout) -> None:
        require_flag("tp_comm_overlap", enabled)
        raise_first(tensor_overlap_faults(enabled, config_path, layout))
        require_file("tp_comm_overlap_cfg", config_path)
        self.enabled = enabled
        self._config_path = config_path
        self._layout = layout
        self._shape: tuple[int, int] | None = None

    def check_device(self, device: torch.device) -> None:
        """Raise ``ValueError`` without CUDA, ``ModuleNotFoundError`` without TransformerEngine; runs early."""
        raise_first(tensor_overlap_device_faults(self.enabled, device.type))
        if self.enabled and importlib.util.find_spec("transformer_engine") is None:
            raise ModuleNotFoundError(
                "tp_comm_overlap=True needs the package transformer_engine; install lightning-mcore[te], or set"
                " it to False"
            )

    def open(self, shape: tuple[int, int] | None, config: TransformerConfig) -> None:
        """Create the buffers at the first call, for ``shape`` (sequence length, rows); collective over the TP ranks.

        Raises ``ValueError`` if microbatches have no common shape, ``RuntimeError`` if they changed it.
        """
        if not self.enabled or (shape is not None and shape == self._shape):
            return
        if shape is None:
            raise ValueError(
                "tp_comm_overlap=True needs to know the one shape of all microbatches in advance; override"
                " microbatch_shape(batch) in the module, and set drop_last in its DataLoader"
            )
        if self._shape is not None:
            raise RuntimeError(
                f"tp_comm_overlap=True allocated buffers for microbatches of {self._shape} (sequence length, rows), but"
                f" one has {shape}; use one shape in training and validation, with drop_last where needed"
            )
        # Here, because importing TransformerEngine takes seconds.
        module = importlib.import_module("transformer_engine.pytorch.module.base")
        buffers = _read_yaml(self._config_path) if self._config_path is not None else {}
        module.initialize_ub(**user_buffer_arguments(shape, config, buffers, module))
        self._shape = shape

    def close(self) -> None:
        """Free the buffers; do nothing if there are none."""
        if self._shape is not None:
            importlib.import_module("transformer_engine.pytorch.module.base").destroy_ub()
            self._shape = None


def queue_hint(layout: ParallelLayout, capability: tuple[int, int], connections: str | None) -> str | None:
    """Return advice if kernels may overtake the communication that should overlap; otherwise None.

    ``connections`` is the environment variable CUDA_DEVICE_MAX_CONNECTIONS. Source: ``validate_args`` in
    megatron/training/arguments.py (0.16 to 0.19), which asserts it.
    """
    shares = layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
    if not shares or capability >= (10, 0) or connections == "1":
        return None
    return (
        "tensor and context parallelism overlap communication and computation on this GPU only with"
        " CUDA_DEVICE_MAX_CONNECTIONS=1; set it in the environment that starts the run"
    )


def user_buffer_arguments(
    shape: tuple[int, int], config: TransformerConfig, buffers: Mapping[str, Any], te_module: Any
) -> dict[str, Any]:
    """Return the arguments of TransformerEngine's ``initialize_ub``; ``te_module`` has the modes of quantization.

    Source: ``_initialize_tp_communicators`` in megatron/training/initialize.py (0.16 to 0.19).
    """
    seq_length, rows = shape
    # 4096 tokens x 2 rows on 2 context-parallel ranks make 4096 rows. TransformerEngine divides them by tp_size.
    modes = te_module.UserBufferQuantizationMode
    quantization = [modes.FP8 if config.fp8 else modes.NONE]
    ends = config.num_layers_at_start_in_bf16 > 0 or config.num_layers_at_end_in_bf16 > 0
    if config.fp8 is not None and config.first_last_layers_bf16 and ends:
        quantization.append(modes.NONE)
    return {
        "shape": [seq_length * rows // config.context_parallel_size, config.hidden_size],
        "tp_size": config.tensor_model_parallel_size,
        "ub_cfgs": dict(buffers),
        "bootstrap_backend": config.tp_comm_bootstrap_backend,
        "quantization_modes": quantization,
    }


def _read_yaml(path: str) -> dict[str, Any]:
    yaml = importlib.import_module("yaml")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except Exception as error:
        raise ValueError(f"tp_comm_overlap_cfg={path!r} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"tp_comm_overlap_cfg={path!r} is not a mapping; write one entry for each buffer, with its settings"
        )
    return content
