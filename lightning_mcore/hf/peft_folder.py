# SPDX-License-Identifier: Apache-2.0
"""Read adapters in PEFT's format, at any layout: ``adapter_config.json`` and ``adapter_model.safetensors``.

:func:`read_lora` reads the settings, :func:`load_adapter` the weights into a running model: each key of the file must
be used and each adapter filled, otherwise it is an error. ``peft_tensors.py`` knows the two layouts of experts.
``MCoreGPT`` calls these functions; ``interop/export_adapter.py`` writes such folders.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_mcore.checkpoint.differences import Differences
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.checkpoint.weights import load_weights
from lightning_mcore.config.lora import EMBEDDING, OUTPUT, TOWERS, LoRA
from lightning_mcore.hf.adapters import EACH_EXPERT, check_held, fingerprint, merge_adapters, projection_names
from lightning_mcore.hf.family import SCORE, VALUE_HEAD, VALUE_HEAD_FILE, Family, complete_fields
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, read_json
from lightning_mcore.hf.peft_tensors import (
    PREFIX,
    ExpertLayout,
    Piece,
    adapter_pieces,
    copied_name,
    copied_pieces,
    expected_shapes,
)
from lightning_mcore.hf.source import HFSource, is_own_checkpoint, local_folder
from lightning_mcore.hf.weights import require_finite, require_fits
from lightning_mcore.parallel.chunks import built_chunks
from lightning_mcore.parallel.consensus import all_gather_object, run_on_all_ranks

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
SETTINGS = frozenset(field.name for field in fields(LoRA)) - {"merged_adapters", "quantization", "double_quantization"}
_BESIDE_A_FOLDER = {"quantization", "double_quantization", "lora_dropout"}  # what a folder's config does not decide
_WITHOUT_EFFECT = """
    auto_mapping inference_mode peft_version revision task_type runtime_config eva_config corda_config loftq_config
    lora_ga_config megatron_config megatron_core layers_pattern qalora_group_size
"""
_VARIANTS = {
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "lora_bias": "a trained bias of B",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trained rows of the embedding",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
_OF_PLAIN_BASES = (None, True, False, "gaussian", "eva", "orthogonal")  # values of init_lora_weights
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
_LAYERS: tuple[Any, ...] = (None, "", [], "layers", ["layers"])
_INDIFFERENT = frozenset(_WITHOUT_EFFECT.split())
# Prefixes of a language model with a tower (the second is Llama 4's), and of one without
_BEGINNINGS = ("model.language_model.", "language_model.model.", "model.")
_BEGINNING = re.compile(rf"{re.escape(PREFIX)}(?:{'|'.join(_BEGINNINGS)})(?=layers\.|embed_tokens\.|norm\.)")
TIED = f"{PREFIX}{OUTPUT}.weight"  # in the file next to an embedding that is the output layer too
SCORES = f"{PREFIX}{SCORE}"  # the score layer of a reward model
_OF_TOWER = re.compile(rf"\.({'|'.join(TOWERS)})\.")
_EXPERTS = r".*\.experts\..*"
_OF_EXPERTS = {"gate_up_proj": "gate_proj|up_proj|w1|w3", "down_proj": "down_proj|w2"}
_ONLY: Mapping[str, Any] = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False}


def read_lora(path: str) -> LoRA:
    """Return the settings of a PEFT adapter, from its folder or its name on the hub."""
    folder = _adapter_folder(path)
    config = read_json(folder, ADAPTER_CONFIG_FILE)
    _refuse_variants(f"{folder}/{ADAPTER_CONFIG_FILE}", config)
    given = {key: value for key, value in config.items() if key in SETTINGS and value not in (None, {}, [])}
    if "target_modules" not in given and "target_parameters" in given:
        given["target_modules"] = []
    if given.get("init_lora_weights") != "gaussian":
        given.pop("init_lora_weights", None)  # its weights are read
    excluded = given.get("exclude_modules", [])
    if not isinstance(excluded, str):  # for PEFT, a list means these modules only, not modules within them
        excluded = "|".join(rf"(?:.*\.)?{re.escape(name)}" for name in excluded)
    if _layout(_keys(folder)) == "each":
        given |= _with_experts(given)
    else:  # names such as gate_proj mean dense layers only there
        excluded = rf"(?:{excluded})|{_EXPERTS}" if excluded else _EXPERTS
    given["exclude_modules"] = excluded or None
    try:
        return LoRA.of(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}/{ADAPTER_CONFIG_FILE}: {error}") from error


def _with_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the targets of a file with a pair for each expert, with parameters of all experts turned into modules."""
    parameters, modules = given.get("target_parameters", []), given.get("target_modules", [])
    stacks = [name for name in parameters if name.rpartition(".")[2] in _OF_EXPERTS]
    patterns = [modules] if isinstance(modules, str) else [rf"(?:.*\.)?{re.escape(name)}" for name in modules]
    # "mlp.experts.down_proj", a parameter of all experts, becomes "mlp.experts.0.down_proj" and so on, or "...0.w2".
    for name in stacks:
        around, _, last = name.rpartition(".")
        module = re.escape(around).replace("mlp", "(?:mlp|block_sparse_moe)")
        patterns.append(rf"(?:.*\.)?{module}\.\d+\.(?:{_OF_EXPERTS[last]})")
    if not stacks:
        return {}
    return {
        "target_modules": "|".join(patterns),
        "target_parameters": [x for x in parameters if x not in stacks] or None,
    }


def given_lora(given: LoRA | Mapping[str, Any] | str) -> tuple[LoRA, str | None]:
    """Return the settings of adapters, and the PEFT folder that they continue from, if there is one.

    ``given`` are the settings; or a folder or hub name; or a dict with that as ``path`` and, optionally,
    ``quantization``, ``double_quantization`` and ``lora_dropout``. Raises FileNotFoundError if there is no such folder,
    ValueError if it is another kind of adapter, or a setting is unknown or belongs to the folder.
    """
    if isinstance(given, str):
        return read_lora(given), given
    if not isinstance(given, Mapping) or "path" not in given:
        return LoRA.of(given), None
    more = {key: value for key, value in given.items() if key != "path"}
    for key in more.keys() - _BESIDE_A_FOLDER:
        raise ValueError(
            f"{key}={more[key]!r} contradicts path={given['path']!r}, whose adapter_config.json has the settings; leave"
            " one of them out"
        )
    return dataclasses.replace(read_lora(given["path"]), **more), given["path"]


def _adapter_folder(path: str) -> str:
    try:
        folder = local_folder(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is not the folder of a PEFT adapter, and not the name of one on the Hugging Face hub that could be"
            f" downloaded; give a folder with {ADAPTER_CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from error
    if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG_FILE)):
        raise FileNotFoundError(f"{folder} has no {ADAPTER_CONFIG_FILE}; give the folder of a PEFT adapter")
    return folder


def _refuse_variants(path: str, config: Mapping[str, Any]) -> None:
    for key, only in _ONLY.items():
        given = config.get(key, only)
        if given != only and not (given is None and only is False):  # axolotl writes fan_in_fan_out as null
            raise ValueError(
                f"{path} has {key}={config[key]!r}, and only {only!r} is supported; train a LoRA, or merge this one"
                " into its base with PEFT's merge_and_unload() and start from that"
            )
    start = config.get("init_lora_weights")
    if start not in _OF_PLAIN_BASES:
        raise ValueError(
            f"{path} has init_lora_weights={start!r}, which changes the weights of the base, so the adapter does not"
            " fit the published one; convert it to plain LoRA with PEFT's path_initial_model_for_weight_conversion"
            " (pissa_convert in LLaMA-Factory)"
        )
    if config.get("layers_pattern") not in _LAYERS:
        raise ValueError(
            f"{path} has layers_pattern={config['layers_pattern']!r}, and the layers of these models are called"
            " 'layers'; leave it out"
        )
    # A key of a later PEFT is an error only if it is set: PEFT writes every key, most with None or False
    for key, value in config.items():
        if key not in SETTINGS and key not in _INDIFFERENT and key not in _ONLY and value:
            what = f" ({_VARIANTS[key]})" if key in _VARIANTS else ""
            raise ValueError(
                f"{path} has {key}={value!r}{what}, which is not supported; train without it, or merge the adapter into"
                " its base with PEFT's merge_and_unload() and start from that"
            )


def _layout(keys: Iterable[str]) -> ExpertLayout:
    """Return the layout of experts in a file, by the names of its tensors."""
    return "each" if any(EACH_EXPERT.search(key) for key in keys) else "stacked"


class _AdapterFile:
    """An open safetensors file of adapters, whose names get a family's prefix."""

    def __init__(self, file: Any, family: Family | None) -> None:
        self._file = file
        self._names = {_renamed(key, family): key for key in file.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        """Return the names of the tensors."""
        return self._names.keys()

    def get_slice(self, name: str) -> Any:
        """Return a tensor that is not read yet."""
        return self._file.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor


def _renamed(key: str, family: Family | None) -> str:
    """Return an adapter tensor's name with a family's prefix, with a tower or without.

    A language model is ``model.`` in the class for text, ``model.language_model.`` in the class for text and images
    (``language_model.model.`` of Llama 4), and older versions of transformers write ``model.`` for both.
    """
    wanted = None if family is None else family.in_adapters().layer_prefix.partition("layers.")[0]
    found = _BEGINNING.match(key)
    return key if wanted not in _BEGINNINGS or found is None else f"{PREFIX}{wanted}{key[found.end() :]}"


@contextlib.contextmanager
def _opened(path: str, family: Family | None = None) -> Iterator[Any]:
    """Yield an open safetensors file; damage is a ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield _AdapterFile(file, family)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again") from error


def _keys(folder: str) -> list[str]:
    with _opened(os.path.join(_folder_with_weights(folder), WEIGHTS_FILE)) as file:
        keys = list(file.keys())
        labels = file.get_slice(SCORES).get_shape()[0] if SCORES in keys else 1
    if labels > 1:
        raise ValueError(
            f"{folder} is an adapter of a classifier with num_labels={labels}, and a reward model has one score; give"
            " an adapter with one label, or merge it with PEFT"
        )
    tower = min(filter(_OF_TOWER.search, keys), default=None)
    if tower is not None:
        raise ValueError(
            f"{folder} has {tower}, of the vision tower, and only the language model can have adapters here; merge the"
            " adapter into its base with PEFT's merge_and_unload() and start from that"
        )
    return keys


def adapter_dtype(path: str) -> torch.dtype:
    """Return the dtype of a PEFT adapter's first tensor; fp32 for a dtype that models are not trained in."""
    folder = _folder_with_weights(path)
    with _opened(os.path.join(folder, WEIGHTS_FILE)) as file:
        return _DTYPES.get(file.get_slice(min(file.keys())).get_dtype(), torch.float32)


def load_adapter(module: pl.LightningModule, path: str, lora: LoRA) -> None:
    """Fill a model's adapters from a PEFT folder, a hub name or a checkpoint; collective over the world."""
    if is_own_checkpoint(path):
        module.on_load_checkpoint(MCoreCheckpointIO().load_directory(path))  # compares the bases
        load_weights(module, path)
        return
    folder = run_on_all_ranks(lambda: _folder_with_weights(path))
    # The file's own layout counts, whatever the settings describe
    pieces = list(adapter_pieces(module, lora, run_on_all_ranks(lambda: _layout(_keys(folder)))))
    # An adapter of a language model has no score layer, and LLaMA-Factory keeps a reward model's in a file of its own
    if lora.saves(SCORE.removesuffix(".weight")) and not run_on_all_ranks(partial(has_scores, folder)):
        run_on_all_ranks(lambda: _fill_scores(folder, pieces))
        pieces = [piece for piece in pieces if piece.key != SCORES]
    shapes = whole_shapes(pieces)
    names: Any = module
    family = names.hf_names()[0]
    run_on_all_ranks(lambda: _fill(folder, family, lora, pieces, shapes))
    run_on_all_ranks(lambda: _compare_copies(folder, family, list(copied_pieces(module))))


def has_scores(path: str) -> bool:
    """Return whether the settings or the weights of an adapter name a score layer."""
    folder = _folder_with_weights(path)
    return read_lora(folder).saves(SCORE.removesuffix(".weight")) or SCORES in _keys(folder)


def _fill_scores(folder: str, pieces: list[Piece]) -> None:
    """Fill a score layer from LLaMA-Factory's file; without one it keeps its start."""
    path = os.path.join(folder, VALUE_HEAD_FILE)
    scores = [piece for piece in pieces if piece.key == SCORES and os.path.exists(path)]
    for piece in scores:
        with _opened(path) as file, torch.no_grad():
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if key == VALUE_HEAD}  # noqa: SIM118
            _check(path, {VALUE_HEAD: piece.shape}, found)
            _copy(path, VALUE_HEAD, piece.data, file.get_slice(VALUE_HEAD)[piece.place])


def merge_folders(module: pl.LightningModule, paths: Sequence[str]) -> list[str]:
    """Merge PEFT adapters into an ``MCoreGPT``'s weights, one after the other; collective over the world.

    Returns what identifies each adapter. The merged weights cannot identify them: layouts round them in different ways.
    Raises FileNotFoundError if there is no such adapter, ValueError if one does not fit this model.
    """
    names: Any = module
    marks: list[str] = []

    def fill(path: str, lora: LoRA) -> None:
        load_adapter(module, path, lora)
        marks.append(f"{fingerprint(module, of_adapters=True)} {lora.r} {lora.lora_alpha}")

    for path in paths:
        lora = run_on_all_ranks(partial(read_lora, path))
        family, fields = names.hf_names()
        lora.check_vocabulary(projection_names(family, fields), fields)
        check_held(family, fields, lora)
        merge_adapters(built_chunks(module), family, fields, lora, partial(fill, path, lora))
    return marks


def check_folders(base: str, paths: Sequence[str], family: str | None = None) -> None:
    """Check that PEFT adapters fit a Hugging Face model, by names and shapes; reads no weights."""
    if not paths or is_own_checkpoint(base):  # load_adapter() compares with the model itself
        return
    source = HFSource.open(base, family)
    settings = complete_fields(source.fields)
    names = projection_names(source.family, settings)
    # Adapters use the names of a model in memory, its files may have others
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in source.open_tensors().shapes.items():
        known = source.family.name_in_memory(name)
        # Three convolutions of Kimi Linear are the rows of one in memory
        shapes[known] = shape if known not in shapes else (shapes[known][0] + shape[0], *shape[1:])
    for path in (path for path in paths if not is_own_checkpoint(path)):
        lora = read_lora(path)
        lora.check_targets(names, strict=False)
        lora.check_vocabulary(names, settings)
        check_held(source.family, settings, lora)
        file = os.path.join(_folder_with_weights(path), WEIGHTS_FILE)
        with _opened(file, source.family) as weights:
            found, layout = _shapes_in(weights, lora), _layout(weights.keys())
        wanted = expected_shapes(lora, names, shapes, settings, layout)
        if lora.modules_to_save:  # a tied weight is not in the model's files
            found = {key: shape for key, shape in found.items() if ".lora_" in key or key in wanted}
            wanted = {key: shape for key, shape in wanted.items() if ".lora_" in key or key in found}
        _check(file, wanted, found)


def _folder_with_weights(path: str) -> str:
    folder = _adapter_folder(path)
    if os.path.exists(os.path.join(folder, WEIGHTS_FILE)):
        return folder
    if os.path.exists(os.path.join(folder, _PICKLED)):
        raise ValueError(
            f"{folder} has {_PICKLED}, which may run code when it is read; save it with PEFT as {WEIGHTS_FILE}"
        )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS_FILE}; give the folder of a PEFT adapter")


def _shapes_in(file: Any, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, without its copies of frozen weights and of tied weights."""
    copies = {key for key in file.keys() if (name := copied_name(key)) is not None and lora.adapts(name)}  # noqa: SIM118
    embedding = _tied(file, lora)
    if embedding is not None:
        copies.add(TIED)
    return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if key not in copies}  # noqa: SIM118


def _tied(file: Any, lora: LoRA) -> str | None:
    """Return the name of the embedding that a file has twice because it is also the output layer; None for none."""
    keys = file.keys() if lora.ensure_weight_tying else ()
    return next((key for key in keys if TIED in keys and key.endswith(f".{EMBEDDING}.weight")), None)


def _compare_copies(folder: str, family: Family, copies: list[Piece]) -> None:
    """Raise ValueError if an adapter's copy of a frozen weight differs from the base."""
    path = os.path.join(folder, WEIGHTS_FILE)
    with _opened(path, family) as file, torch.no_grad():
        for piece in (piece for piece in copies if piece.key in file.keys()):  # noqa: SIM118
            stored = file.get_slice(piece.key)
            is_same = tuple(stored.get_shape()) == piece.shape
            if not (is_same and torch.equal(piece.data.to("cpu", (part := stored[piece.place]).dtype), part)):
                raise ValueError(
                    f"{path} has {piece.key}, which differs from this base; give the base that it was trained on"
                )


def _fill(
    folder: str,
    family: Family,
    lora: LoRA,
    pieces: list[Piece],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    path = os.path.join(folder, WEIGHTS_FILE)
    with _opened(path, family) as file, torch.no_grad():
        _check(path, shapes, _shapes_in(file, lora))
        embedding = _tied(file, lora)
        if embedding is not None and not torch.equal(file.get_tensor(TIED), file.get_tensor(embedding)):
            raise ValueError(
                f"{path} has ensure_weight_tying=True, and an output layer that differs from the embedding; give an"
                " adapter whose weights are those that PEFT wrote"
            )
        whole = lru_cache(maxsize=1)(file.get_tensor)  # each expert takes its part of the same tensor
        # By name, so that the pieces of one stacked tensor follow one another and it is read once
        for piece in sorted(pieces, key=lambda piece: piece.key):
            part = whole(piece.key).view(piece.view) if piece.view else file.get_slice(piece.key)
            _copy(path, piece.key, piece.data, part[piece.place])


def _copy(path: str, name: str, target: Tensor, values: Tensor) -> None:
    """Copy values of a file's tensor; raise ValueError for integers, 8-bit floats, NaN and infinity."""
    if not values.is_floating_point() or values.dtype.itemsize == 1:
        kind = str(values.dtype).removeprefix("torch.")
        raise ValueError(f"{name} in {path} holds {kind}; give an adapter in bf16, fp16 or fp32")
    require_finite(f"{name} in {path}", values)
    require_fits(f"{name} in {path}", values, target.dtype)
    target.copy_(values)


def _check(path: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    if differences := str(Differences.between(found, wanted)):
        raise ValueError(
            f"{path} does not fit this model and its LoRA settings: {differences}; give the base that it was trained"
            " on, and the settings of its own adapter_config.json"
        )


def has_tower(family: Family) -> bool:
    """Return whether a family is a language model with a vision tower."""
    return family.in_adapters().layer_prefix.startswith(_BEGINNINGS[:2])


def whole_shapes(pieces: list[Piece]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the file; collective over the world."""
    shapes: dict[str, tuple[int, ...]] = {}
    for of_rank in all_gather_object([(piece.key, piece.shape) for piece in pieces]):
        for key, whole in of_rank:
            # A piece of a weight trained whole only knows where it ends; the farthest end is the shape
            shapes[key] = tuple(map(max, shapes.get(key, whole), whole))
    return shapes
