# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model as the source of an ``MCoreGPT``: its folder, its completed config, and the arguments from it.

:func:`pretrained_settings` returns the arguments before there are ranks, so faults in the config or the files are found
early. ``MCoreGPT.from_pretrained`` calls it; ``lightning-mcore plan`` calls :func:`planned_settings`, which reads no
weights. Reading a ``config.json`` imports neither Lightning nor megatron-core. Reading one of this package's checkpoint
directories, which hold the settings themselves, imports Lightning.

transformers fills in the defaults of a ``config.json`` and renames old keys, so a family's rules see one name for each
key. Importing transformers takes two seconds, so it is imported only to complete a config.
"""

import ast
import contextlib
import copy
import functools
import inspect
import json
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lightning_mcore.checkpoint import files as checkpoint_files
from lightning_mcore.config.field_homes import MODULE_FIELDS
from lightning_mcore.hf.config_rules import LONGEST_SEQUENCE, refuse_outside, refuse_unless
from lightning_mcore.hf.family import HIDDEN, SCORE, SCORING, VALUE_HEAD, VALUE_HEAD_FILE, Family, split_fields
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE, CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_json
from lightning_mcore.hf.registry import find_family, registered_family
from lightning_mcore.hf.rope_rules import ROPE_KEY, strange_rope_keys, without_rope_keys
from lightning_mcore.hf.vision_families import with_tower

GENERATION_FILE = "generation_config.json"

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST_LABELS = 1_000_000

_DESCRIPTIONS = ("*.json",)
_DOWNLOADED = (*_DESCRIPTIONS, "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt", "tokenizer*")
_PICKLED = ("pytorch_model*.bin",)
# Patterns match in subfolders too, which hold the weights once more, and additional_chat_templates/*.jinja
_NOT_DOWNLOADED = ("*/*[!a]", "consolidated*")

_KEPT = sorted(MODULE_FIELDS - {"make_vocab_size_divisible_by", "transformer_impl"})  # of the model, not of its runs

_NOT_COMPUTING = ("vocab_size", "attention_dropout", "hidden_dropout", "mtp_num_layers")  # in evaluation
_BASE = "model."  # how names of weights begin, but not in what AutoModel of transformers writes

_TIMES = 2  # smaller differences are found tensor by tensor after the model is built

_log = logging.getLogger(__name__)


def local_folder(path: str | os.PathLike[str], weights: bool = True) -> str:
    """Return a model's folder; a name on the hub, ``"org/model"``, is downloaded, perhaps without weights."""
    where = os.fspath(path)
    if os.path.isdir(where):
        return where
    if not is_hub_name(where):
        raise FileNotFoundError(f"{where} is not the folder of a Hugging Face model; give one with a {CONFIG_FILE}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def downloaded(*patterns: str) -> str:
        return str(snapshot_download(where, allow_patterns=list(patterns), ignore_patterns=list(_NOT_DOWNLOADED)))

    try:
        folder = downloaded(*(_DOWNLOADED if weights else _DESCRIPTIONS))
        has_weights = any(name.endswith(".safetensors") for name in os.listdir(folder))
        return folder if has_weights or not weights else downloaded(*_DOWNLOADED, *_PICKLED)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{where} is not a folder, and no model of that name could be downloaded; give a folder with a"
            f" {CONFIG_FILE}"
        ) from error


def is_hub_name(path: str) -> bool:
    """Return whether a path does not exist and looks like a name on the Hugging Face hub, ``"org/model"``."""
    return not os.path.exists(path) and path.count("/") == 1 and not path.startswith((".", "/", "~"))


def is_unknown_on_hub(path: str) -> bool:
    """Return whether a path is a hub name whose config has not been downloaded."""
    if not is_hub_name(path):
        return False
    from huggingface_hub import try_to_load_from_cache

    return not isinstance(try_to_load_from_cache(path, CONFIG_FILE), str)


def read_config(folder: str) -> dict[str, Any]:
    """Return the content of ``config.json``, without the quantization of weights that are dequantised later."""
    _refuse_adapter(folder)
    content = read_json(folder, CONFIG_FILE)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"{folder}/{CONFIG_FILE} has no model_type; give the folder of a Hugging Face model")
    quantised = content.get("quantization_config") or content.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "some method") if isinstance(quantised, dict) else "some method"
        # safetensors.py reads these weights as bf16
        if method == "mxfp4":
            return {key: value for key, value in content.items() if key != "quantization_config"}
        raise ValueError(
            f"the weights in {folder} are quantised with {method}, and training needs unquantised ones; give the"
            " model in bf16, fp16 or fp32"
        )
    return content


def _refuse_adapter(folder: str) -> None:
    """Raise ValueError for a PEFT adapter's folder, with a model in it (which transformers would change) or without."""
    if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG_FILE)):
        return
    if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        base = read_json(folder, ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} is the folder of a PEFT adapter; give its base ({base}) as the model, and this folder with"
            " adapters=[...] to merge it or with lora= to train it further"
        )
    raise ValueError(
        f"{folder} has {ADAPTER_CONFIG_FILE} beside the weights of a model, and transformers would apply that adapter;"
        " move its files into a folder of their own, and give that with adapters=[...] to merge it or with lora= to"
        " train it further"
    )


def complete_config(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` with transformers' defaults, if it knows the model."""
    content = family.in_our_words(content)
    # transformers makes lists as long as the config says, and looks up the dtype in torch: check both first
    family.check_sizes(flat(content))
    for key in ("dtype", "torch_dtype"):
        refuse_unless(key, content.get(key), (None, *_DTYPES), "weights are trained in one of these")
    if content.get("num_labels") is not None:
        refuse_outside("num_labels", content["num_labels"], 0, _MOST_LABELS)
    # Kimi K2's config class is DeepSeek-V3's, under which transformers completes it; the name is put back afterwards
    is_stand_in = family.config_class and family.model_type == content["model_type"]
    known = {"model_type": family.config_class} if is_stand_in else {}
    whole = _completed(json.dumps({**content, **known})) | dict.fromkeys(known, family.model_type)
    config = family.in_our_words(flat(copy.deepcopy(whole)))
    if "partial_rotary_factor" in (config.get(ROPE_KEY) or {}):
        config.pop("partial_rotary_factor", None)  # transformers before 5.20 leaves it here too, and reads the other
    return config if is_stand_in else _without_unread(family, config, whole, content.get("transformers_version"))


def _without_unread(family: Family, config: dict[str, Any], whole: Mapping[str, Any], version: Any) -> dict[str, Any]:
    """Leave out keys that neither a rule nor transformers' code for the model knows, as published models have them.

    ``whole`` is the config as transformers completes it, and ``version`` the release of transformers that wrote it.
    """
    strange = (*family.strange_keys(config), *strange_rope_keys(config.get(ROPE_KEY)))
    if not strange:
        return config
    parts = (whole, *(part for part in whole.values() if isinstance(part, dict)))
    model_types = tuple(sorted({str(part["model_type"]) for part in parts if "model_type" in part}))
    unread = _unread_by_transformers(strange, family.model_type, model_types, str(version or "0"))
    kept = {key: value for key, value in config.items() if key not in unread}
    return {**kept, ROPE_KEY: without_rope_keys(kept[ROPE_KEY], unread)} if ROPE_KEY in kept else kept


@functools.lru_cache(maxsize=16)  # which also keeps a run from warning more than once
def _unread_by_transformers(
    keys: tuple[str, ...], family: str, model_types: tuple[str, ...], version: str
) -> frozenset[str]:
    """Return the keys that transformers' code for these model types never mentions, and warn of them.

    Nothing is returned if transformers does not know one of the types, or if a newer release wrote the config.
    """
    import transformers
    from lightning.pytorch.utilities import rank_zero_only
    from packaging.version import InvalidVersion, Version

    try:
        is_newer = Version(version) > Version(transformers.__version__)
    except InvalidVersion:
        is_newer = True
    if is_newer or any(name not in transformers.CONFIG_MAPPING for name in model_types):
        return frozenset()
    known = _names_in_code(model_types)
    unread = [key for key in keys if key.removeprefix(f"{ROPE_KEY}.") not in known]
    if unread:
        rank_zero_only(_log.warning)(
            "keys of config.json are ignored, because transformers does not read them for %r models: %s",
            *(family, ", ".join(unread)),
        )
    return frozenset(unread)


def _names_in_code(model_types: tuple[str, ...]) -> set[str]:
    """Return all names in transformers' code that reads configs of these types, or computes with them."""
    import transformers

    folders = {Path(inspect.getfile(transformers.CONFIG_MAPPING[name])).parent for name in model_types}
    files = [file for folder in folders for file in folder.glob("*.py") if not file.name.startswith("modular_")]
    for pattern in ("modeling_*.py", "configuration_utils.py", "masking_utils.py", "cache_utils.py"):
        found = Path(transformers.__file__).parent.glob(pattern)
        files += [file for file in found if "gguf" not in file.name]  # which reads another kind of files
    names: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        # config.key, getattr(config, "key"), a parameter, and the field of a dataclass
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) | ast.arg(arg=name) | ast.Name(id=name):
                names.add(name)
    return names


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of its ``text_config``, if it has one; its own keys win."""
    text = config.get("text_config")
    return {**(text if isinstance(text, dict) else {}), **{key: config[key] for key in config if key != "text_config"}}


def with_numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with infinity where a file has ``{"__float__": "Infinity"}``, as transformers writes it."""

    def number(found: dict[str, Any]) -> Any:
        is_number = found.keys() == {"__float__"} and found["__float__"] in ("Infinity", "-Infinity")
        return float(found["__float__"]) if is_number else found

    whole: dict[str, Any] = json.loads(json.dumps(content), object_hook=number)
    return whole


@functools.lru_cache(maxsize=16)  # a run calls this several times, and transformers would warn each time
def _completed(text: str) -> dict[str, Any]:
    from transformers import AutoConfig

    given = with_numbers(json.loads(text))
    try:
        config = AutoConfig.for_model(given.pop("model_type"), **given)
        whole: dict[str, Any] = config.to_dict()
    except Exception as error:  # keys become attributes, so a bad key can break anything
        # A model of the user's own family: its config is taken as it is
        if "Unrecognized model identifier" in str(error):
            found: dict[str, Any] = json.loads(text)
            return found
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error  # str() of it has quotes
        raise ValueError(f"transformers cannot read it: {' '.join(str(reason).split())}") from error
    return whole


def family_of(config: Mapping[str, Any], family: str | None) -> Family:
    """Return the family of a config: the user's choice, or the registered family of ``model_type``."""
    return find_family(family) if family else registered_family(str(config["model_type"]))


def variant_name(path: str, family: str | None, suffix: str) -> str | None:
    """Return the name of the family with another output layer whose rules read the weights at ``path``.

    ``path`` is a folder, hub name or checkpoint, ``family`` the user's choice or None, and ``suffix`` is ``SCORING``,
    ``HIDDEN`` or "". With ``SCORING``, the folder of a Llama is read by "llama+score".
    """
    if not suffix or is_own_checkpoint(path):
        return family
    name = family or str(read_config(local_folder(path, weights=False))["model_type"])
    return name if name.endswith(suffix) else name + suffix


def require_head(path: str, family: str, suffix: str) -> None:
    """Raise ValueError for a checkpoint of ``family`` without the output layer that ``suffix`` names."""
    found = next((kind for kind in (SCORING, HIDDEN) if family.endswith(kind)), "")
    if found == suffix or not is_own_checkpoint(path):
        return
    layers = {SCORING: "a score layer", HIDDEN: "no output layer", "": "an output layer over the vocabulary"}
    remedy = (
        "export it with lightning-mcore export, and give that folder" if suffix else "give it to the class of its run"
    )
    raise ValueError(
        f"{path} is a checkpoint of a model with {layers[found]}, and this model has {layers[suffix]}; {remedy}"
    )


def check_scores(path: str, tokens: Sequence[str] | Sequence[int] | None = None) -> None:
    """Raise ValueError for a classifier with several labels, or with any if logits of ``tokens`` make the score."""
    if is_own_checkpoint(path):
        return
    config = read_config(local_folder(path, weights=False))
    if not any("Classification" in name for name in config.get("architectures") or []):
        return
    if tokens is not None:
        raise ValueError(
            f"{path} is a classifier, which has no logits of tokens={list(tokens)}; leave tokens out of Reranker to"
            " score with its layer, or give a language model"
        )
    labels = len(config.get("id2label") or []) or config.get("num_labels", 2)  # transformers does not write two
    if labels > 1:
        raise ValueError(
            f"{path} is a classifier with num_labels={labels}, and a reranker or reward model has one score; give a"
            " model with one label, or a language model"
        )


def seeing_name(path: str, family: str | None) -> str | None:
    """Return the name of the family that reads the vision tower of the model at ``path``.

    ``path`` is a folder, hub name or checkpoint, and ``family`` the user's choice or None, which is returned unless
    models of this type are read as text models without another name: the folder of a Qwen3.5 is read by
    "qwen3_5+tower".
    """
    if is_own_checkpoint(path):
        return family
    name = family or str(read_config(local_folder(path, weights=False))["model_type"])
    seeing = with_tower(name)
    return family if seeing == name else seeing


def sees_images(path: str, family: str | None = None) -> bool | None:
    """Return whether a model is read with a vision tower; None if its config has not been downloaded.

    ``path`` is a folder, a hub name or one of this package's checkpoints, and ``family`` the user's choice or None.
    Raises ValueError if its family is unknown.
    """
    if is_own_checkpoint(path):
        return "vision" in pretrained_settings(path)
    if is_unknown_on_hub(path):
        return None
    folder = local_folder(path, weights=False) if is_hub_name(path) else path
    if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        return None
    return family_of(read_config(folder), family).tower is not None


def read_generation_config(folder: str) -> dict[str, Any] | None:
    """Return the content of ``generation_config.json``; None if there is none."""
    return read_json(folder, GENERATION_FILE) if os.path.exists(os.path.join(folder, GENERATION_FILE)) else None


if TYPE_CHECKING:
    from lightning_mcore.checkpoint.stored_dtypes import StoredDtypes
    from lightning_mcore.hf.safetensors import SafetensorsFolder


@dataclass(frozen=True)
class HFSource:
    """The Hugging Face model that an ``MCoreGPT`` is made from."""

    folder: str
    family: Family
    config: dict[str, Any]  # with transformers' defaults
    fields: dict[str, Any]  # the same as settings of Megatron and ``MCoreGPT``

    @classmethod
    def open(cls, path: str, family: str | None = None, weights: bool = True) -> "HFSource":
        """Read a model's config; ``weights`` says whether to download the weights of a hub name too."""
        folder = local_folder(path, weights)
        content = read_config(folder)
        known = family_of(content, family)
        try:
            config = complete_config(known, content)
            refuse_outside("max_position_embeddings", config.get("max_position_embeddings"), 1, LONGEST_SEQUENCE)
            fields = known.read_config(config)
            if fields.get("rotary_interleaved") and fields.get("position_embedding_type") == "yarn":
                raise ValueError(
                    f"rope_parameters with rope_type='yarn' are not supported for {known.model_type!r}, which rotates"
                    " neighbouring channels; give a model without"
                )
        except ValueError as error:
            raise ValueError(f"{folder}/config.json: {known.in_words_of(content, str(error))}") from error
        return cls(folder, known, config, fields)

    def open_tensors(self) -> "SafetensorsFolder":
        """Open the model's weights, reading only their headers; ValueError if they cannot be the model's."""
        from lightning_mcore.hf.safetensors import SafetensorsFolder

        tensors = SafetensorsFolder(self.folder, self.family.unread)
        tensors.put_under(_BASE, f"{self.family.layer_prefix.partition('{')[0]}", except_for=("lm_head.", "score."))
        old, new = self.family.in_memory or ("", "")
        # Qwen2-VL's names in the files of programs that save a model's state as it is
        if old == _BASE and any(name.startswith(new) for name in tensors.shapes):
            tensors.rename({new: old, f"{_BASE}{self.family.tower}": f"{self.family.tower}"})
        # LLaMA-Factory keeps a reward model's score layer in a file next to the language model
        is_lacking = SCORE in self.family.optional and SCORE not in tensors.shapes
        if is_lacking and os.path.exists(os.path.join(self.folder, VALUE_HEAD_FILE)):
            tensors.adopt(VALUE_HEAD_FILE, VALUE_HEAD, SCORE)
        there, least = sum(map(prod, tensors.shapes.values())), _least_weights(self.fields)
        if least > _TIMES * there:
            raise ValueError(
                f"{self.folder}/config.json describes a model of {least} weights or more, and its files hold {there};"
                " give config and weights of one model"
            )
        return tensors


def pretrained_settings(
    path: str,
    family: str | None = None,
    seq_length: int | None = None,
    transformer: Mapping[str, Any] | None = None,
    weights: bool = True,
) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` for a Hugging Face model.

    Args:
        path: Its folder, its name on the Hugging Face hub, or a checkpoint of such a model.
        family: Name or path of its family; None for the one in its config.
        seq_length: Tokens per sequence in training; None for the longest that the model supports.
        transformer: Fields of ``TransformerConfig`` that override the config's.
        weights: False reads the config alone, as :func:`planned_settings` does.

    Returns:
        ``vocab_size``, ``seq_length``, ``transformer`` and the position settings; ``hf`` describes their source, as
        plain data. ``lora`` is among them for a checkpoint of adapters.

    Raises:
        FileNotFoundError: There is no such model, or one of its files is missing.
        ValueError: Its family is not known, its config needs something that is not supported, or a file is damaged.
    """
    if is_own_checkpoint(path):
        settings = _settings_of_checkpoint(path, family, transformer or {})
    else:
        refuse_megatron_checkpoint(path)
        source = HFSource.open(path, family, weights)
        folder = source.open_tensors() if weights else None
        tensors, stored = (_names_there(source), None) if folder is None else (folder.shapes, folder.stored)
        settings = settings_of_source(source, tensors, path, family, stored)
    given = dict(transformer or {})
    if given.get("num_moe_experts") and not settings["transformer"].get("num_moe_experts"):
        raise ValueError(
            f"transformer has num_moe_experts={given['num_moe_experts']}, but the model at {path} has no experts;"
            " leave the field out, or first convert the model to one with experts, such as Qwen3MoeForCausalLM"
        )
    settings["transformer"] = {**settings["transformer"], **given}
    return {**settings, "seq_length": settings["seq_length"] if seq_length is None else seq_length}


def computing_fields(hf: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    """Return what a recorded config says about how a model computes log-probabilities from its weights.

    ``hf`` is the record of :func:`pretrained_settings`, and ``family`` the user's choice or None.
    """
    known = family_of(hf["config"], family)
    fields = known.read_config(complete_config(known, hf["config"]))
    return {name: value for name, value in fields.items() if name not in _NOT_COMPUTING}


def planned_settings(
    path: str,
    family: str | None = None,
    seq_length: int | None = None,
    transformer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of :func:`pretrained_settings`, with the same arguments, from a config alone, without weights.

    Multi-token prediction layers are included, unless the weights are there and lack them.
    """
    return pretrained_settings(path, family, seq_length, transformer, weights=False)


def _names_there(source: HFSource) -> Collection[str] | None:
    """Return the names of the tensors in the index or in the only file; None if there is neither."""
    with contextlib.suppress(OSError, ValueError, SafetensorError):  # absent or damaged; the run will report it
        if os.path.exists(os.path.join(source.folder, INDEX_FILE)):
            names = read_json(source.folder, INDEX_FILE).get("weight_map")
            return names if isinstance(names, dict) else None
        with safe_open(os.path.join(source.folder, SINGLE_FILE), "pt") as file:
            return list(file.keys())
    return None


def absolute(path: str) -> str:
    """Return the absolute path of a folder; a hub name is returned unchanged."""
    return os.path.abspath(path) if os.path.isdir(path) else path


def refuse_megatron_checkpoint(path: str) -> None:
    """Raise ValueError for a checkpoint of Megatron-LM or another program, which does not describe its model."""
    if os.path.isdir(path) and checkpoint_files.is_megatron_checkpoint(checkpoint_files.tensors_folder(path)):
        raise ValueError(
            f"{path} is a checkpoint of Megatron-LM or another program, which does not describe its model; start"
            f" from its weights with self.load_weights({path!r}) in configure_model"
        )


def settings_of_source(
    source: HFSource,
    tensors: Collection[str] | None,
    path: str,
    family: str | None,
    stored: "StoredDtypes | None" = None,
) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` for a model whose config and headers have been read.

    ``tensors`` are the names of its weights and ``stored`` their dtypes; None if unknown. ``path`` and ``family`` are
    what the user gave, for the record in ``hf``.
    """
    module, fields = split_fields(source.fields)
    # transformers saves a model without these layers: with 61 ordinary ones, no name starts with model.layers.61.
    [behind] = source.family.multi_token_prefixes(source.fields["num_layers"], 1)
    unpredicted = tensors is not None and not any(name.startswith(behind) for name in tensors)
    if fields.get("mtp_num_layers") and unpredicted:
        _log.info(
            "%s has no weights for multi-token prediction, so the model is built without those layers", source.folder
        )
        del fields["mtp_num_layers"]
    indexed = ((module.get("architecture") or {}).get("indexer") or {}).get("index_topk")
    return {
        **module,
        "seq_length": min(source.config["max_position_embeddings"], indexed or LONGEST_SEQUENCE),
        "transformer": fields,
        "hf": {
            "path": absolute(path),
            "family": family or source.family.model_type,
            "config": read_config(source.folder),
            "generation_config": read_generation_config(source.folder),
            **({} if stored is None else {"stored": stored.plain()}),
        },
    }


def _least_weights(fields: Mapping[str, Any]) -> int:
    """Return a lower bound for a model's number of weights: its embedding and the larger matrices of its layers.

    Llama-3-8B has at least 4096 * (128256 + 32 * 4096 + 2 * 32 * 14336) = 4.8 billion, of 8.0 billion in fact. The
    bound only has to catch weights of another model, before the model is built.
    """
    sizes = defaultdict(int, {name: value for name, value in fields.items() if isinstance(value, int)})
    layers, narrow = sizes["num_layers"], sizes["ffn_hidden_size"]
    head = sizes["v_head_dim"] or sizes["kv_channels"]
    attention = sizes["num_attention_heads"] * head if head else sizes["hidden_size"]
    flags, pattern = fields.get("moe_layer_freq"), fields.get("layer_pattern")
    sparse = sum(flags) if isinstance(flags, list) else layers if sizes["num_moe_experts"] else 0
    attending, dense = layers, layers - sparse
    for name in ("delta_net", "kimi_delta"):
        attending -= sum((fields.get(name) or {}).get("linear_attention_freq", ()))
    if pattern:
        attending, sparse, dense = (pattern.count(letter) for letter in "*E-")
    # Megatron's experts may work in a narrower space than hidden_size
    width = sizes["moe_latent_size"] or sizes["hidden_size"]
    experts = width * sizes["num_moe_experts"] * (sizes["moe_ffn_hidden_size"] or narrow)
    # An MLP has at least two matrices of [hidden_size, width]
    mlps = sizes["hidden_size"] * (sparse * sizes["moe_shared_expert_intermediate_size"] + dense * narrow)
    return sizes["hidden_size"] * (sizes["vocab_size"] + attending * attention) + 2 * (mlps + sparse * experts)


def is_own_checkpoint(path: str) -> bool:
    """Return whether a path is one of this package's checkpoint directories, which hold their own settings."""
    return checkpoint_files.is_checkpoint_directory(path)


def _settings_of_checkpoint(path: str, family: str | None, chosen: Collection[str]) -> dict[str, Any]:
    """Return the model settings in a checkpoint directory, without its training run's settings.

    ``chosen`` are the names of fields that the user overrides.
    """
    from lightning.pytorch import LightningModule

    from lightning_mcore.checkpoint.io import MCoreCheckpointIO
    from lightning_mcore.layers.transformer_config import refuse_recorded_code

    saved = MCoreCheckpointIO().load_checkpoint(path).get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {})
    hf = saved.get("hf")
    if not hf:
        raise ValueError(
            f"{path} is a checkpoint of a model that was not made from a Hugging Face model; start from it with"
            f" self.load_weights({path!r}) in configure_model"
        )
    if family not in (None, hf["family"]):
        raise ValueError(
            f"family={family!r} is given for {path}, a checkpoint of family {hf['family']!r}, whose weights are "
            "already Megatron's; leave it out"
        )
    if family is not None:
        find_family(family)  # import it now, because the user names it and an export of this run needs it
    # What the user gives may name code; what the checkpoint records may not
    recorded = {name: value for name, value in saved["transformer"].items() if name not in chosen}
    refuse_recorded_code(path, recorded)
    kept = (*_KEPT, "transformer", "hf", *(("lora",) if saved.get("lora") else ()))
    return {name: saved[name] for name in kept if name in saved}
