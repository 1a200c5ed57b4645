# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore checkpoint``: check a checkpoint, or show what it holds, from a shell or from Python.

The commands::

    python -m lightning_mcore.checkpoint verify PATH             # size and checksum of every file
    python -m lightning_mcore.checkpoint inspect PATH            # step, layout, model, parameters, sizes
    python -m lightning_mcore.checkpoint inspect PATH --tensors  # and names, types and shapes
    python -m lightning_mcore.checkpoint inspect PATH --json     # the manifest

In Python, call :func:`verify` and :func:`inspect`. Single-file and Megatron-LM checkpoints work too, as far as they
describe themselves. ``inspect`` reads no tensor, runs no code from the checkpoint, and needs no ranks.
"""

import argparse
import contextlib
import io
import json
import math
import posixpath
import re
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch
from fsspec import AbstractFileSystem

from lightning_mcore.checkpoint.files import (
    check_complete,
    check_size,
    common_state,
    has_checksums,
    names_in,
    open_store,
    read_manifest,
    tensors_folder,
    writes_directly,
)
from lightning_mcore.checkpoint.files import verify as verify_files
from lightning_mcore.checkpoint.manifest import (
    FORMAT,
    METADATA_FILE,
    damaged,
    is_megatron,
    least_sizes,
    read_metadata,
    size_of_tensor,
    tensors_of,
)
from lightning_mcore.checkpoint.older_formats import as_today
from lightning_mcore.config.text import human

__all__ = ["inspect", "main", "verify"]

SINGLE_FILE = "one file"
TORCH_DIST = "torch_dist"

_PROGRAM = "python -m lightning_mcore.checkpoint"
_SILENT_SECONDS = 1.0  # shorter checks show no progress
_BETWEEN_UPDATES = 0.2  # seconds
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
_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")  # "optimizer.state.exp_avg.w"; in Megatron-LM "chained_0.optimizer. ..."


def verify(path: str, on_progress: Callable[[int, int], None] | None = None) -> str:
    """Read a whole checkpoint, compare it with its checksums, and return one sentence about what was checked."""
    fs, root = open_store(path)
    if fs.isfile(root):
        return _verify_single_file(fs, root, path)
    path = tensors_folder(path)
    fs, root = open_store(path)
    if is_megatron(names_in(fs, root)):
        return _verify_torch_dist(fs, root, path)
    files = verify_files(path, on_progress)["files"]
    total = bytes_text(sum(record["size"] for record in files.values()))
    return f"{path} is whole: size and checksum of {len(files)} files are right, {total} in all"


def inspect(path: str, with_tensors: bool = False) -> str:
    """Return a description of a checkpoint; ``with_tensors`` adds names, types and shapes of all tensors."""
    return render(path, summary(path), with_tensors)


def summary(path: str) -> dict[str, Any]:
    """Return the manifest, or what is known without one and without reading tensors; errors as in :func:`inspect`."""
    fs, root = open_store(path)
    if fs.isfile(root):
        return _single_file(fs, root, path)
    path = tensors_folder(path)
    fs, root = open_store(path)
    return _torch_dist(fs, root, path) if is_megatron(names_in(fs, root)) else read_manifest(path)


def run(arguments: Sequence[str]) -> int:
    """Run ``lightning-mcore checkpoint`` with the words after the command's name, and return the exit code."""
    return main(arguments, "lightning-mcore checkpoint")


def main(arguments: Sequence[str] | None = None, program: str = _PROGRAM) -> int:
    """Run the command line (of this process, if ``arguments`` is None) and return its exit code.

    0: the checkpoint is complete. 1: it is damaged, unfinished or not a checkpoint. 2: the check was not possible,
    because of a missing or unreadable path or wrong arguments.
    """
    options = _parser(program).parse_args(arguments)
    progress = _Progress(sys.stderr)
    try:
        if options.command == "verify":
            text = verify(options.path, progress)
        elif options.json:
            text = json.dumps(summary(options.path), indent=1)
        else:
            text = inspect(options.path, options.tensors)
    except ValueError as error:
        return progress.refuse(error, 1)
    except (OSError, ImportError) as error:  # ImportError: the package for this store is not installed
        return progress.refuse(error, 2)
    with contextlib.suppress(BrokenPipeError):  # as under "| head"
        print(text, flush=True)
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(program, description="Check and show checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    verifying = commands.add_parser("verify", help="check size and checksum of every file")
    inspecting = commands.add_parser("inspect", help="show step, layout, model, number of parameters, sizes")
    for command in (verifying, inspecting):
        command.add_argument("path", help="a checkpoint directory or file, local or remote")
    shape = inspecting.add_mutually_exclusive_group()
    shape.add_argument("--tensors", action="store_true", help="add names, types and shapes of all tensors")
    shape.add_argument("--json", action="store_true", help="print the manifest instead")
    return parser


def _verify_single_file(fs: AbstractFileSystem, root: str, path: str) -> str:
    """Compare the checksums that ``torch.save`` wrote, one per record."""
    try:
        with fs.open(root, "rb") as file, zipfile.ZipFile(file) as archive:
            if not has_checksums(archive.infolist()):
                return f"{path} is one file that torch.save wrote without checksums; there is nothing to compare"
            broken = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile can raise anything on a damaged archive
        raise damaged(path, "it is not a complete torch.save archive") from error
    if broken is not None:
        raise damaged(path, f"the checksum of its record {broken} differs from the one that was saved")
    return f"{path} is whole: one file, the checksums in it are right, {bytes_text(fs.info(root)['size'])} in all"


def _verify_torch_dist(fs: AbstractFileSystem, root: str, path: str) -> str:
    """Check the sizes of the tensor files, and the checksums that ``torch.save`` wrote for each piece in them."""
    metadata = read_metadata(path, fs.cat_file(f"{root}/{METADATA_FILE}"))
    check_complete(path, metadata)
    sizes = least_sizes(metadata)
    for name, size in sizes.items():
        check_size(fs, root, path, name, size, or_more=True)
    places = (metadata.storage_data or {}).values()
    compared = sum(_has_right_checksums(fs, root, path, place) for place in places)
    found = f"{path} has all {len(sizes)} tensor files, with the sizes in {METADATA_FILE}"
    right = f", and the checksums of {compared} of its {len(places)} pieces are right" if compared else ""
    without = "no checksums of files" if compared else "no checksums"
    return f"{found}{right}; it was not written by lightning_mcore and has {without} to compare with"


def _has_right_checksums(fs: AbstractFileSystem, root: str, path: str, place: Any) -> bool:
    """Check the checksums of one piece; return False if it has none."""
    with fs.open(f"{root}/{place.relative_path}", "rb") as file:
        file.seek(place.offset)
        piece = io.BytesIO(file.read(place.length))
    try:
        with zipfile.ZipFile(piece) as archive:
            if not has_checksums(archive.infolist()):
                return False
            broken = archive.testzip()
    except Exception as error:
        raise damaged(path, f"{place.relative_path} has no torch.save archive at byte {place.offset}") from error
    if broken is not None:
        raise damaged(path, f"the checksum of a piece at byte {place.offset} of {place.relative_path} is wrong")
    return True


def _torch_dist(fs: AbstractFileSystem, root: str, path: str) -> dict[str, Any]:
    names = sorted(names_in(fs, root))
    found: dict[str, Any] = {"format": TORCH_DIST}
    metadata = as_today(read_metadata(path, fs.cat_file(f"{root}/{METADATA_FILE}")))
    if common := common_state(path, metadata):
        arguments = getattr(common.get("args"), "__dict__", {})
        settings = {name: value for name, value in arguments.items() if isinstance(value, bool | int | str)}
        found["global_step"] = common.get("iteration", common.get("global_step"))
        if "tensor_model_parallel_size" in settings:
            config = {"config": settings, "vocab_size": settings.get("padded_vocab_size")}
            found.update(layout=settings, world_size=settings.get("world_size"), model=config)
    found["tensors"] = tensors_of(metadata)
    found["files"] = {name: {"size": fs.info(f"{root}/{name}")["size"]} for name in names}
    return found


def _single_file(fs: AbstractFileSystem, root: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"format": SINGLE_FILE}
    found["files"] = {posixpath.basename(root): {"size": fs.info(root)["size"]}}
    if not writes_directly(path):
        return {**found, "note": "copy it to a local disk to see more"}
    try:  # mapped into memory, so that no tensor is read
        content = torch.load(root, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive can raise anything
        if not zipfile.is_zipfile(root):
            raise ValueError(f"{path} is not a complete checkpoint; give the path of a checkpoint") from error
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(root)
        return {**found, "note": f"not shown, because it holds objects of {', '.join(classes) or 'other kinds'}"}
    return {**found, **_content_of(content)}


def _content_of(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        return {"note": f"it holds a {type(content).__name__}"}
    # Lightning's dict, or a plain state_dict that someone saved with torch.save.
    weights = content.get("state_dict", content)
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    states = content.get("optimizer_states") or []
    for number, state in enumerate(states):
        for weight, values in (state.get("state") or {}).items():
            found = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
            tensors.update({f"optimizer.{number}.state.{key}.{weight}": value for key, value in found.items()})
    version = content.get("pytorch-lightning_version")
    return {
        "global_step": content.get("global_step"),
        "epoch": content.get("epoch"),
        "versions": {"lightning": version} if version else {},
        "contents": {"weights": True, "optimizer": bool(states)},
        "tensors": {
            str(name): {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in tensors.items()
        },
    }


class _Progress:
    """Shows a check's progress on a terminal, once the check has taken more than a second."""

    def __init__(self, output: TextIO) -> None:
        self._output, self._begin, self._last = output, time.monotonic(), 0.0
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Update the line if enough time has passed."""
        now = time.monotonic()
        passed = now - self._begin
        is_due = passed > _SILENT_SECONDS and now - self._last > _BETWEEN_UPDATES
        if self._output.isatty() and (is_due or (self._shown and done == total)):
            self._last, self._shown = now, True
            text = f"{done / total:4.0%}  {bytes_text(done)} of {bytes_text(total)}  {bytes_text(int(done / passed))}/s"
            print(f"\r{text:60}", end="", file=self._output, flush=True)
        if self._shown and done == total:
            self.end()

    def end(self) -> None:
        """Finish the line, if one was shown."""
        if self._shown:
            print(file=self._output)
        self._shown = False

    def refuse(self, error: Exception, code: int) -> int:
        """Write an error on a line of its own, and return the exit code."""
        self.end()
        print(f"error: {error}", file=self._output)
        return code


def render(path: str, manifest: Mapping[str, Any], with_tensors: bool = False) -> str:
    """Return the description as text; ``manifest`` may be the result of :func:`summary`, so every entry is optional."""
    rows = [(label, text) for label, text in _rows(manifest) if text]
    width = max((len(label) for label, _ in rows), default=0)
    lines = [f"{path}: {_kind(manifest)}", *(f"  {label:{width}}  {text}" for label, text in rows)]
    if with_tensors:
        lines += ["", *_table(manifest.get("tensors") or {})]
    return "\n".join(lines)


def bytes_text(size: int) -> str:
    """Return a number of bytes as short text, such as ``1.23GB``."""
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
    yield "step", _text(manifest.get("global_step"))
    yield "epoch", _text(manifest.get("epoch"))
    yield "saved", _text(manifest.get("saved_at"))
    yield "model", _text(model.get("class"))
    yield "sizes", _sizes_of(model)
    yield "parameters", _parameters(manifest)
    yield "layout", _layout(manifest)
    yield "precision", _text(manifest.get("precision"))
    yield "optimizer", _optimizer(contents, bool(manifest.get("use_distributed_optimizer")))
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "on disk", _on_disk(manifest.get("tensors") or {}, files)
    yield "note", _text(manifest.get("note"))


def _text(value: Any) -> str:
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
    return f"{human(number)} ({number:,})" if number and number >= 1000 else _text(number or None)


def _layout(manifest: Mapping[str, Any]) -> str:
    layout, ranks = manifest.get("layout"), manifest.get("world_size")
    if not isinstance(layout, Mapping):
        return ""
    tp = layout.get("tensor_model_parallel_size") or 1
    # Megatron's default: experts are split like the other layers.
    filled = {**layout, "expert_tensor_parallel_size": layout.get("expert_tensor_parallel_size") or tp}
    parts = [f"{short}{filled.get(name) or 1}" for name, short in _AXES.items()]
    if isinstance(ranks, int):
        # 8 ranks with TP=2, PP=2 and CP=1 leave 2 for data parallelism.
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
        return "none: weights only"
    return _text(contents.get("optimizer_class") or "its state") + (", distributed" if distributed else "")


def _on_disk(tensors: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    total = sum(record["size"] for record in files.values())
    parts = {"weights": 0, "optimizer": 0}
    for name, entry in tensors.items():
        part = "optimizer" if _OPTIMIZER.search(name) else "weights"
        parts[part] += size_of_tensor(entry["shape"], entry["dtype"])
    shares = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    number = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    return f"{bytes_text(total)} in {number}" + (f" ({shares})" if shares else "")


def _table(tensors: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, entry["dtype"], str(entry["shape"])) for name, entry in sorted(tensors.items())]
    if not rows:
        yield "tensor names are not recorded"
        return
    names, kinds = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, kind, shape in rows:
        yield f"{name:{names}}  {kind:{kinds}}  {shape}"
