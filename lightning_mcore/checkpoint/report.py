# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, as text for people: step, layout, model, number of parameters, sizes, tensors.

It is made of the manifest alone; an entry that is not there has no line. ``commands.py`` makes something like a
manifest for checkpoints that have none, of Megatron-LM or of a single file, and prints what comes from here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_mcore.checkpoint.format import FORMAT
from lightning_mcore.checkpoint.metadata import tensor_bytes
from lightning_mcore.config.text import human

SINGLE_FILE = "one file"  # what stands for the format of checkpoints that have no manifest
TORCH_DIST = "torch_dist"

_SIZES_OF_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "mtp_num_layers",
    "normalization",
    "params_dtype",
)
_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")  # "optimizer.state.exp_avg.w", of Megatron-LM "chained_0.optimizer. ..."


def render(path: str, manifest: Mapping[str, Any], with_tensors: bool = False) -> str:
    """Return the text.

    Args:
        path: Where the checkpoint stands.
        manifest: Its manifest, or what can be said without one.
        with_tensors: Add a table of names, types and shapes.
    """
    rows = [(label, text) for label, text in _rows(manifest) if text]
    width = max((len(label) for label, _ in rows), default=0)
    lines = [f"{path}: {_kind(manifest)}", *(f"  {label:{width}}  {text}" for label, text in rows)]
    if with_tensors:
        lines += ["", *_table(manifest.get("tensors") or {})]
    return "\n".join(lines)


def bytes_text(size: int) -> str:
    """Return a number of bytes in few characters: ``1.23GB``."""
    return f"{human(size)}B"


def _kind(manifest: Mapping[str, Any]) -> str:
    if manifest.get("format") == FORMAT:
        return f"sharded checkpoint of lightning_mcore, format version {manifest.get('format_version')}"
    if manifest.get("format") == TORCH_DIST:
        return f"torch_dist checkpoint of Megatron-LM or another program, without {FORMAT}'s manifest and checksums"
    return "checkpoint in one file"


def _rows(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, contents = manifest.get("model") or {}, manifest.get("contents") or {}
    versions, files = manifest.get("versions") or {}, manifest.get("files") or {}
    yield "step", _plain(manifest.get("global_step"))
    yield "epoch", _plain(manifest.get("epoch"))
    yield "saved", _plain(manifest.get("saved_at"))
    yield "model", _plain(model.get("class"))
    yield "sizes", _sizes_of(model)
    yield "parameters", _parameters(manifest)
    yield "layout", _layout(manifest)
    yield "precision", _plain(manifest.get("precision"))
    yield "optimizer", _optimizer(contents, bool(manifest.get("use_distributed_optimizer")))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "on disk", _on_disk(manifest.get("tensors") or {}, files)
    yield "note", _plain(manifest.get("note"))


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _sizes_of(model: Mapping[str, Any]) -> str:
    sizes = {"vocab_size": model.get("vocab_size")}
    config = model.get("config") or {}
    shown = (name for name in _SIZES_OF_MODEL if config.get("num_moe_experts") or not name.startswith("moe_"))
    sizes.update({name: config.get(name) for name in shown})
    return ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)


def _parameters(manifest: Mapping[str, Any]) -> str:
    number = manifest.get("parameters")
    if number is None:
        tensors = manifest.get("tensors") or {}
        number = sum(math.prod(entry["shape"]) for name, entry in tensors.items() if not _OPTIMIZER.search(name))
    return f"{human(number)} ({number:,})" if number and number >= 1000 else _plain(number or None)


def _layout(manifest: Mapping[str, Any]) -> str:
    layout, ranks = manifest.get("layout"), manifest.get("world_size")
    if not isinstance(layout, Mapping):
        return ""
    tp = layout.get("tensor_model_parallel_size") or 1
    filled = {**layout, "expert_tensor_parallel_size": layout.get("expert_tensor_parallel_size") or tp}
    parts = [f"{short}{filled.get(name) or 1}" for name, short in _AXES.items()]
    if isinstance(ranks, int):
        cut = tp * (layout.get("pipeline_model_parallel_size") or 1) * (layout.get("context_parallel_size") or 1)
        parts.append(f"dp{ranks // cut} on {ranks} rank{'s' if ranks != 1 else ''}")
    if layout.get("sequence_parallel"):
        parts.append("with sequence parallelism")
    if stages := layout.get("pipeline_model_parallel_layout"):
        parts.append(f"and stages {stages}")
    return " ".join(parts)


def _optimizer(contents: Mapping[str, Any], distributed: bool) -> str:
    if "optimizer" not in contents:
        return ""
    if not contents["optimizer"]:
        return "none: weights alone"
    return _plain(contents.get("optimizer_class") or "its state") + (", distributed" if distributed else "")


def _on_disk(tensors: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    total = sum(record["size"] for record in files.values())
    parts = {"weights": 0, "optimizer": 0}
    for name, entry in tensors.items():
        part = "optimizer" if _OPTIMIZER.search(name) else "weights"
        parts[part] += tensor_bytes(entry["shape"], entry["dtype"])
    shares = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    number = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    return f"{bytes_text(total)} in {number}" + (f" ({shares})" if shares else "")


def _table(tensors: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, entry["dtype"], str(entry["shape"])) for name, entry in sorted(tensors.items())]
    if not rows:
        yield "no names of tensors are recorded"
        return
    names, kinds = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, kind, shape in rows:
        yield f"{name:{names}}  {kind:{kinds}}  {shape}"
