# SPDX-License-Identifier: Apache-2.0
"""The parts of an exported model besides its weights: family, ``config.json``, generation config, tokenizer files.

A model made from a Hugging Face model remembers that model's config (``MCoreGPT(hf=...)``). It is written with only
those keys changed that are no longer true. For a model made from scratch, the family's rules write the config. In both
cases the config is read back and must describe the exported model, because a slightly wrong config would load and
compute other numbers.
"""

import glob
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from safetensors.torch import save_file
from torch import Tensor

from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
from lightning_mcore.config.embedding import Embedding
from lightning_mcore.config.field_homes import MODULE_FIELDS
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.hf.cross_encoder_folder import TEMPLATE_FILE, chat_template, files_of_reranker, padding_of
from lightning_mcore.hf.family import (
    SCORING,
    VALUE_HEAD,
    VALUE_HEAD_FILE,
    Family,
    complete_fields,
    differences,
)
from lightning_mcore.hf.files import CONFIG_FILE
from lightning_mcore.hf.registry import family_names, find_family, recorded_family
from lightning_mcore.hf.sentence_folder import files_of
from lightning_mcore.hf.source import (
    GENERATION_FILE,
    HFSource,
    complete_config,
    flat,
    is_hub_name,
    read_config,
    read_generation_config,
    seeing_name,
)
from lightning_mcore.hf.vision_families import with_tower
from lightning_mcore.hf.weight_rules import Shape

_TOKENIZER_FILES = (
    *("tokenizer*", "*.model", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("tekken.json", "*.tiktoken"),
    *("chat_template*", "*.jinja", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_CODE_FILES = ("*.py",)  # copied for a config with auto_map
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that a vision-language config has at its top level; all others describe the language model (text_config)
_OUTER = {"architectures", "dtype", "model_type", "tie_word_embeddings", "torch_dtype", "transformers_version"} | {
    "vision_config"
}
_NOT_OF_THE_MODEL = {"transformer_impl", "seq_length", "make_vocab_size_divisible_by"}


@dataclass(frozen=True)
class Description:
    """A model to export, as plain data."""

    family: str
    fields: dict[str, Any]  # all of them, by Megatron's and ``MCoreGPT``'s names
    config: dict[str, Any]  # content of config.json, without the dtype of the weights
    generation_config: dict[str, Any] | None
    source: str | None  # Hugging Face folder with the tokenizer
    stored: StoredDtypes | None = None  # dtypes of the weights in the model that it was made from
    embedding: Embedding | None = None  # how a model of vectors pools them
    reranker: Reranker | None = None  # how a reranker writes a pair
    seq_length: int | None = None


def describe(
    what: str,
    settings: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    like: str | None = None,
    family: str | None = None,
) -> Description:
    """Find the family and the config of a model.

    ``what`` names the model in errors. ``settings`` are the arguments of its ``MCoreGPT`` (others are ignored; may be
    empty), ``shapes`` the shapes of its tensors by whole name. ``like`` is a Hugging Face folder whose config,
    generation config and tokenizer to use. Raises FileNotFoundError if ``like`` is not a model, ValueError if the model
    does not fit the family or any family, or nothing describes it.
    """
    origin: dict[str, Any] = dict(settings.get("hf") or {})
    named = seeing_name(like, family) if like is not None and settings.get("vision") else family
    source = HFSource.open(like, named) if like is not None else None
    if source is not None:
        origin = {
            "path": source.folder,
            "family": named or source.family.model_type,
            "config": read_config(source.folder),
            "generation_config": read_generation_config(source.folder),
        }
    if "transformer" in settings:
        fields = _fields_of(settings)
    elif source is not None:
        fields = dict(source.fields)
    else:
        raise ValueError(
            f"{what} does not describe its model, as MCoreGPT's checkpoints do; give a Hugging Face model of the same "
            "shape with like (--like FOLDER)"
        )
    _check_layers(what, fields, shapes)
    # What counts is which multi-token prediction layers have weights, not what the settings say
    fields = complete_fields({**fields, "mtp_num_layers": _count_layers("mtp", shapes) or None})
    # In this order: the user's choice, the source's family, the family of the vision tower, the first that fits
    tower = with_tower(fields["vision"]["model_type"]) if fields["vision"] else None
    name = family or origin.get("family") or tower or _guess(what, fields)
    known = find_family(name) if family else recorded_family(name)
    config = _config(known, fields, origin.get("config"), settings.get("seq_length"))
    if name.endswith(SCORING):
        config |= _labels(origin.get("config") or {}, shapes["output_layer.weight"][0])
    return Description(
        name,
        fields,
        config,
        origin.get("generation_config"),
        _folder_of(origin.get("path")),
        StoredDtypes.recorded(settings.get("hf")),
        Embedding.of(settings["embedding"]) if "embedding" in settings else None,
        Reranker.of(settings["reranker"]) if "reranker" in settings else None,
        settings.get("seq_length"),
    )


def write_files(description: Description, dtype: torch.dtype, folder: str) -> None:
    """Write all files but the weights into a folder; ``dtype`` is the dtype of most weights."""
    config = {**description.config, "dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    copied = _copy(description.source, (*_TOKENIZER_FILES, *(_CODE_FILES if "auto_map" in config else ())), folder)
    if not any(name.endswith(".py") for name in copied):
        config.pop("auto_map", None)  # it refers to code that was not copied
    if description.reranker is not None:
        config |= padding_of(description.reranker, description.source)
    write_json(os.path.join(folder, CONFIG_FILE), config)
    if description.generation_config is not None:
        write_json(os.path.join(folder, GENERATION_FILE), description.generation_config)
    files: dict[str, Any] = {}
    if description.embedding is not None:
        assert description.seq_length is not None
        files = files_of(description.embedding, description.fields["hidden_size"], description.seq_length)
    if description.reranker is not None:
        files = files_of_reranker(description.reranker)
        with open(os.path.join(folder, TEMPLATE_FILE), "w", encoding="utf-8") as file:
            file.write(chat_template(description.reranker))
    for path, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
        write_json(os.path.join(folder, path), content)


def copy_tokenizer(path: str | None, folder: str) -> None:
    """Copy a Hugging Face model's tokenizer (of a folder or hub name) into a folder, if the model is still there."""
    _copy(_folder_of(path), _TOKENIZER_FILES, folder)


def write_value_head(folder: str, weight: Tensor) -> None:
    """Write a reward model's score layer, [labels, h], as LLaMA-Factory reads it; nothing for several labels."""
    if weight.size(0) > 1:
        return
    bias = VALUE_HEAD.replace("weight", "bias")
    tensors = {VALUE_HEAD: weight.clone(), bias: torch.zeros_like(weight[:, 0])}
    save_file(tensors, os.path.join(folder, VALUE_HEAD_FILE))


def write_json(path: str, content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a JSON file as transformers does, and flush it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def warn_of_losses(description: Description, settings: Mapping[str, Any], like: str | None) -> None:
    """Warn about losses of an export that is still possible: a missing tokenizer, and experts that dropped tokens."""
    path = (settings.get("hf") or {}).get("path")
    if like is None and path is not None and _folder_of(path) is None:
        rank_zero_warn(
            f"{path}, the source of the model, no longer exists, so the tokenizer is not exported; give a folder that "
            "has it with like (--like FOLDER)"
        )
    capacity = description.fields.get("moe_expert_capacity_factor")
    if capacity is not None and capacity >= 0:  # Megatron takes a negative one as none
        rank_zero_warn(
            f"the model was trained with moe_expert_capacity_factor={capacity}, so that full experts dropped tokens;"
            " transformers does not, and computes other numbers for those tokens"
        )


def _fields_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    of_the_module = MODULE_FIELDS - _NOT_OF_THE_MODEL
    return {**{name: settings[name] for name in of_the_module if name in settings}, **settings["transformer"]}


def _config(
    family: Family, fields: Mapping[str, Any], given: Mapping[str, Any] | None, seq_length: int | None
) -> dict[str, Any]:
    """Return a ``config.json`` that is equivalent to ``fields``."""
    if given is not None and given.get("model_type") == family.model_type:
        content = _adapted(family, fields, given)
    else:
        ids = {name: (given or {}).get(name) for name in _TOKENS}
        length = {} if seq_length is None else {"max_position_embeddings": seq_length}
        written = family.in_words_of_files({**ids, **length, **family.write_config(fields)})
        content = {"model_type": family.model_type, **_nested(written)}
        content["transformers_version"] = version("transformers")
    content |= {"architectures": [family.architecture], **family.more_config}
    family.check_same(_read(family, content), fields)
    return content


def _labels(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return class names for a config, from a given config if it has as many."""
    names = given.get("id2label") or {}
    if count == 1 or len(names) != count:
        names = {str(number): f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: int(number) for number, name in names.items()}}


def _adapted(family: Family, fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with only those keys changed that do not match the model."""
    before = _read(family, given)
    if not differences(before, fields):
        return dict(given)
    # Compare what the rules write: the given config itself may have other names for the same keys
    told = family.write_config(before)
    changed = {key: value for key, value in family.write_config(fields).items() if told.get(key, value) != value}
    changed = family.in_words_of_files(changed)
    # A changed key that is not written out may have an old name there: then write the completed config
    is_there = changed.keys() <= flat(given).keys()
    base = dict(given) if is_there else family.in_words_of_files(complete_config(family, given))
    return _nested({**flat(base), **changed}) if "vision_config" in given else {**base, **changed}


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the language model's keys in ``text_config``, if the model has a vision tower."""
    if "vision_config" not in config:
        return dict(config)
    outer = {key: value for key, value in config.items() if key in _OUTER or key.endswith("_token_id")}
    text = {key: value for key, value in config.items() if key not in outer or key in _TOKENS}
    return {**outer, "text_config": text}


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    return complete_fields(family.read_config(complete_config(family, config)))


def _guess(what: str, fields: Mapping[str, Any]) -> str:
    """Return the first family that a model fits; ValueError with what is missing to the nearest one."""
    # A model with LayerNorm: one misfit with the nearest family, several with a family of experts.
    misfits: dict[str, list[str]] = {}
    for name in family_names():
        misfits[name] = find_family(name).misfits(fields)
        if not misfits[name]:
            return name
    nearest = min(misfits, key=lambda name: len(misfits[name]))
    first, *more = misfits[nearest]
    also = f" ({len(more)} more of its settings do not fit either)" if more else ""
    raise ValueError(
        f"{what} does not fit a known family; the nearest is {nearest!r}, but {first}{also}; change the model, or give"
        " your own family with family"
    )


def _check_layers(what: str, fields: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    embedding = shapes.get("embedding.word_embeddings.weight")
    # Without this check, a config with fewer layers than the weights would export a part of the model
    found = {"num_layers": _count_layers("decoder", shapes), "hidden_size": embedding[-1] if embedding else None}
    for name, value in found.items():
        if value is not None and value != fields.get(name):
            raise ValueError(
                f"{what} has {name}={value} in its weights and {fields.get(name)} in its config;"
                " give another checkpoint"
            )


def _count_layers(stem: str, shapes: Mapping[str, Shape]) -> int:
    start = f"{stem}.layers."
    return len({name.removeprefix(start).partition(".")[0] for name in shapes if name.startswith(start)})


def _folder_of(path: str | None) -> str | None:
    """Return the folder of a model on this machine, or of a downloaded model with this name on the hub."""
    if path is None or os.path.isdir(path):
        return path
    if not is_hub_name(path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None


def _copy(source: str | None, patterns: tuple[str, ...], folder: str) -> list[str]:
    if source is None:
        return []
    found = sorted({name for pattern in patterns for name in glob.glob(pattern, root_dir=source)})
    names = [name for name in found if os.path.isfile(os.path.join(source, name))]
    for name in names:
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    return names
