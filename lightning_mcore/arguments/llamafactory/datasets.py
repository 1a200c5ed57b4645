# SPDX-License-Identifier: Apache-2.0
"""``dataset_info.json``: the datasets that a LLaMA-Factory file names.

The file is in ``dataset_dir``. For each name it gives a file or folder in ``dataset_dir``, a format (``alpaca``,
``sharegpt`` or ``openai``), and the names of columns and tags that differ from the defaults. :func:`read_datasets`
looks up the names. A dataset that would have to be downloaded raises, because nothing is downloaded silently.
``data.py`` reads the rows. This file imports neither torch nor megatron-core.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_mcore.arguments.documents import read_json, read_text
from lightning_mcore.config.text import split_names, unknown_name
from lightning_mcore.data.finetuning.files import find_files

INFO = "dataset_info.json"
_FORMATS = ("alpaca", "sharegpt", "openai")
# Keys that name a dataset elsewhere, with the word for it in errors
_HUBS = {
    "hf_hub_url": "the Hugging Face hub",
    "ms_hub_url": "ModelScope",
    "om_hub_url": "Modelers",
    "script_url": "a script",
    "cloud_file_name": "a cloud",
}
_TEXT_ONLY = "model_name_or_path is a text-only model"
_REFUSED_COLUMNS = {"audios": "audio models are not available"}


@dataclass(frozen=True)
class Columns:
    """The column of each part of a row, or None; the defaults are for a dataset that names no columns."""

    prompt: str | None = "instruction"
    query: str | None = "input"
    response: str | None = "output"
    history: str | None = None
    messages: str | None = "conversations"
    system: str | None = None
    tools: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    kto_tag: str | None = None
    images: str | None = None
    videos: str | None = None


@dataclass(frozen=True)
class Tags:
    """The names of fields and roles in messages; the defaults are for a dataset that names no tags."""

    role_tag: str | None = "from"
    content_tag: str | None = "value"
    user_tag: str | None = "human"
    assistant_tag: str | None = "gpt"
    observation_tag: str | None = "observation"
    function_tag: str | None = "function_call"
    system_tag: str | None = "system"


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset in ``dataset_info.json``."""

    name: str
    files: tuple[str, ...]
    formatting: str = "alpaca"
    columns: Columns = Columns()
    tags: Tags = Tags()
    num_samples: int | None = None  # rows to draw, with repetition if there are fewer; None for all
    ranking: bool = False  # whether a row has a better answer and a worse one


def read_datasets(names: str | Sequence[str], dataset_dir: str, sees: bool | None = False) -> list[DatasetEntry]:
    """Return the datasets of these names, in order; ``sees`` is None until the kind of model is known."""
    if dataset_dir == "ONLINE" or dataset_dir.startswith("REMOTE:"):
        raise ValueError(
            f"dataset_dir={dataset_dir!r} asks for datasets from a hub, and nothing is downloaded silently; download "
            f"them, and give a folder with {INFO}"
        )
    path = Path(dataset_dir, INFO)
    if not path.is_file():
        raise FileNotFoundError(f"dataset_dir={dataset_dir!r} has no {INFO}; give the folder that contains it")
    info = read_json(read_text(path), str(path))
    return [_entry(name, info, path, sees) for name in split_names(names)]


def _entry(name: str, info: Any, path: Path, sees: bool | None) -> DatasetEntry:
    if not isinstance(info, Mapping) or not isinstance(info.get(name, {}), Mapping):
        raise ValueError(f"{path} does not hold an object for each dataset; write {{{name!r}: {{'file_name': ...}}}}")
    if name not in info:
        raise ValueError(unknown_name(f"dataset of {path}", name, info, "name one that the file has"))
    says = info[name]
    place = f"the dataset {name!r} of {path}"
    for key, where in _HUBS.items():
        if key in says:
            raise ValueError(
                f"{place} comes from {where} ({key}: {says[key]!r}), and nothing is downloaded silently; download it, "
                "and give its file as file_name"
            )
    if "file_name" not in says:
        raise ValueError(f"{place} has no file_name; give a file or a folder next to {INFO}")
    if not isinstance(says["file_name"], str):
        raise ValueError(f"{place} has file_name: {says['file_name']!r}; give a file or a folder next to {INFO}")
    _refuse(says, place)
    files = tuple(find_files(str(path.parent / says["file_name"]), f"file_name of {place}"))
    entry = DatasetEntry(name, files, says.get("formatting", "alpaca"), num_samples=says.get("num_samples"))
    # Naming one column or tag turns off the defaults of the others.
    if "columns" in says:
        refused = _REFUSED_COLUMNS | (dict.fromkeys(("images", "videos"), _TEXT_ONLY) if sees is False else {})
        entry = replace(entry, columns=_named(Columns, says["columns"], f"column of {place}", refused))
    if "tags" in says:
        entry = replace(entry, tags=_named(Tags, says["tags"], f"tag of {place}", {}))
    return replace(entry, ranking=_ranks(says, entry.columns, place))


def _ranks(says: Mapping[str, Any], columns: Columns, place: str) -> bool:
    """Return whether a dataset's rows have two answers."""
    ranking = says.get("ranking", False)
    if not isinstance(ranking, bool):
        raise ValueError(f"{place} has ranking: {ranking!r}; choose true or false")
    named = [name for name in ("chosen", "rejected") if getattr(columns, name) is not None]
    if ranking and len(named) < 2:
        raise ValueError(f"{place} has ranking: true, and lacks a column for each answer; name chosen and rejected")
    if not ranking and named:
        raise ValueError(f"{place} has the column {named[0]!r} without ranking: true; set it, or leave the column out")
    if ranking and columns.kto_tag is not None:
        raise ValueError(f"{place} has both ranking: true and a kto_tag, for two kinds of rows; leave one of them out")
    return ranking


def _refuse(says: Mapping[str, Any], place: str) -> None:
    """Raise for an entry that asks for something that is not supported."""
    if says.get("formatting", "alpaca") not in _FORMATS:
        raise ValueError(f"{place} has formatting: {says['formatting']!r}; choose alpaca, sharegpt or openai")
    if says.get("split", "train") != "train" or says.get("subset") or says.get("folder"):
        raise ValueError(f"{place} names a split, a subset or a folder on a hub, which files do not have; leave it out")
    count = says.get("num_samples")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ValueError(f"{place} has num_samples: {count!r}; choose 1 or more")
    # file_sha1 is accepted and not checked, because nothing is downloaded.
    known = {"file_name", "file_sha1", "formatting", "ranking", "columns", "tags", "num_samples"}
    for key in set(says) - known - {"split", "subset", "folder"}:
        raise ValueError(unknown_name(f"key of {place}", key, known))


def _named(kind: Any, given: Mapping[str, Any], what: str, refused: Mapping[str, str]) -> Any:
    """Return the names that a dataset gives, with None for all others."""
    if not isinstance(given, Mapping):
        raise ValueError(f"the names for each {what} are {given!r}, which is not an object; write {{key: name}}")
    names = dict.fromkeys(kind.__dataclass_fields__)
    for key, value in given.items():
        if key in refused:
            raise ValueError(f"the {what} has {key!r}, and {refused[key]}; choose another dataset, or leave it out")
        if key not in names:
            raise ValueError(unknown_name(what, key, names))
        if value is not None and not isinstance(value, str):
            raise ValueError(f"the {what} {key!r} is {value!r}; give a name")
        names[key] = value
    return kind(**names)
