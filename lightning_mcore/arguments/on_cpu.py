# SPDX-License-Identifier: Apache-2.0
"""Drop GPU switches from a run on a CPU, so that a file written for GPUs runs there unchanged.

Only switches that choose a kernel, a transport or a place in memory are dropped, and one note lists them; the numbers
stay the same. A switch that changes numbers, such as ``fp8``, raises on a CPU as it does everywhere else.

``mapping.py`` calls :func:`without_gpu_switches` for each run from arguments, and so for each LLaMA-Factory file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mcore.config.rules.model import KERNELS, TORCH_BACKEND_VALUES
from lightning_mcore.config.run import RunSettings
from lightning_mcore.te_cpu.load import is_prepared


def without_gpu_switches(settings: RunSettings) -> RunSettings:
    """Return the settings of a run on a CPU, with a note about what was dropped.

    For example ``{"process_group_backend": "nccl", "tp_comm_overlap": True}`` in the strategy becomes ``{}``, and the
    note names ``ddp_backend`` and ``tp_comm_overlap``.
    """
    strategy, of_strategy = _strategy(settings.strategy)
    model, of_model = _model(settings.model)
    gone = of_model + of_strategy
    if not gone:
        return settings
    note = (
        f"on a CPU, {', '.join(gone)} {'has' if len(gone) == 1 else 'have'} no effect and"
        f" {'is' if len(gone) == 1 else 'are'} left out; the numbers are the same"
    )
    return replace(settings, strategy=strategy, model=model, notes=(*settings.notes, note))


def _model(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the model's arguments without kernels, and the names of what was dropped."""
    model, gone = dict(given), []
    if model.get("transformer_impl") == "transformer_engine":
        # TransformerEngine's Python code is installed and runs on a CPU (te_cpu/), so its kernels may stay.
        if is_prepared():
            return model, []
        del model["transformer_impl"]
        gone.append("transformer_impl")
    transformer = model.get("transformer", {})
    kernels = [name for name, value in transformer.items() if _is_on(name, value)]
    if kernels:
        model["transformer"] = {name: value for name, value in transformer.items() if name not in kernels}
    return model, gone + kernels


def _is_on(name: str, value: Any) -> bool:
    """Return whether a field asks for a kernel that PyTorch's layers do not have."""
    allowed: tuple[Any, ...] = TORCH_BACKEND_VALUES[name][0] if name in TORCH_BACKEND_VALUES else ()
    return name in KERNELS and value not in (None, False, *allowed)


def _strategy(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the strategy's arguments without options of NCCL and CUDA, and the names of the dropped arguments."""
    strategy, gone = dict(given), []
    if strategy.get("process_group_backend") == "nccl":
        del strategy["process_group_backend"]
        gone.append("ddp_backend")
    if strategy.pop("tp_comm_overlap", False):
        gone.append("tp_comm_overlap")
    for config, name, argument in (
        # The config, its field, and the argument that set it
        ("optimizer_config", "optimizer_cpu_offload", "optimizer_cpu_offload"),
        ("ddp_config", "average_in_collective", "ddp_average_in_collective"),
        ("communication", "deallocate_pipeline_outputs", "deallocate_pipeline_outputs"),
    ):
        fields = strategy.get(config, {})
        if fields.get(name):
            gone.append(argument)
            # mapping.py fills optimizer_config only for optimizer_cpu_offload, so all its fields go.
            left = {} if config == "optimizer_config" else {key: fields[key] for key in fields if key != name}
            strategy |= {config: left}
            if not left:
                del strategy[config]
    return strategy, gone
