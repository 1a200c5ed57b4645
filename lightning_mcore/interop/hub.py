# SPDX-License-Identifier: Apache-2.0
"""Upload an exported folder to the Hugging Face hub, with a model card that says where the model comes from.

``SaveHFModel`` and ``export_checkpoint`` call :func:`upload`. ``SaveHFModel`` calls :func:`open_repository` when
training starts, so that a missing login does not cost a run.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_mcore.checkpoint.manifest import versions
from lightning_mcore.hf.files import ADAPTER_CONFIG_FILE
from lightning_mcore.hf.source import is_hub_name
from lightning_mcore.strategy import MCoreStrategy

_CARD = "README.md"


@dataclass(frozen=True)
class Origin:
    """Where a model comes from; None for what is not known."""

    base: str | None = None  # folder or hub name of the model that it started from
    data: str | None = None
    steps: int | None = None
    world_size: int | None = None
    layout: Mapping[str, Any] | None = None  # fields of a ParallelLayout
    versions: Mapping[str, str] | None = None  # of packages, when the checkpoint was written

    @classmethod
    def of_run(cls, trainer: pl.Trainer, module: pl.LightningModule) -> "Origin":
        """Describe a run's model, without paths of its machine."""
        data: Any = getattr(trainer, "datamodule", None)
        files = getattr(data, "train_files", None) or ()
        names = [os.path.basename(str(file)) for file in ([files] if isinstance(files, str) else files)]
        layout = asdict(trainer.strategy.layout) if isinstance(trainer.strategy, MCoreStrategy) else None
        return cls(
            base=base_of(module.hparams),
            data=None if data is None else ", ".join([type(data).__name__, *names]),
            steps=trainer.global_step,
            world_size=trainer.world_size,
            layout=layout,
        )

    @classmethod
    def of_checkpoint(cls, settings: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> "Origin":
        """Describe a checkpoint's model from its module's settings and its manifest, None for other programs'."""
        known = manifest or {}
        steps, world_size = known.get("global_step"), known.get("world_size")
        return cls(base_of(settings), None, steps, world_size, known.get("layout"), known.get("versions"))


def base_of(settings: Mapping[str, Any]) -> str | None:
    """Return the model that a module started from, by its settings; a folder by its last name only."""
    path = (settings.get("hf") or {}).get("path")
    return path if path is None or is_hub_name(path) else os.path.basename(os.path.normpath(path))


def require_name(repository: str) -> None:
    """Raise ValueError if a text is not the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # documented, but not in __all__

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(
            f"push_to_hub={repository!r} is not the name of a repository; give 'name' or 'organization/name'"
        ) from error


def open_repository(repository: str) -> None:
    """Make a private repository on the hub, unless it exists; RuntimeError if this user cannot write there."""
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
    except Exception as error:  # of several packages, from a missing login to a lost connection
        raise RuntimeError(
            f"push_to_hub={repository!r}: the hub cannot be written to ({_first_line(error)}); log in with"
            " `hf auth login`, or leave push_to_hub out"
        ) from error


def upload(folder: str, repository: str, origin: Origin) -> None:
    """Upload a complete folder, with a model card unless the repository has one; makes the repository."""
    from huggingface_hub import HfApi

    with open(os.path.join(folder, _CARD), "w", encoding="utf-8") as file:
        file.write(model_card(repository, origin, os.path.exists(os.path.join(folder, ADAPTER_CONFIG_FILE))))
    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        kept = [_CARD] if hub.file_exists(repository, _CARD) else None  # somebody may have edited it
        written = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=f"Upload from lightning_mcore {version('lightning-mcore')}",
            ignore_patterns=kept,
        )
    except Exception as error:  # as in open_repository
        raise RuntimeError(
            f"{folder} is complete, but was not uploaded ({_first_line(error)}); upload it with `hf upload"
            f" {repository} {folder}`"
        ) from error
    rank_zero_info(f"uploaded {folder}: {written.commit_url}")


def model_card(repository: str, origin: Origin, is_adapter: bool) -> str:
    """Return the content of a model card: the hub's settings as YAML, then a table."""
    from huggingface_hub import ModelCardData

    is_published = origin.base is not None and "/" in origin.base
    settings = ModelCardData(
        base_model=origin.base if is_published else None,
        library_name="peft" if is_adapter else "transformers",
        tags=["lightning-mcore"],
    )
    layout = {name: size for name, size in (origin.layout or {}).items() if size not in (None, False, 1)}
    ranks = None if origin.world_size is None else f"{origin.world_size} ranks"
    sizes = ", ".join(f"`{name}={size}`" for name, size in layout.items())
    packages = {"transformers": version("transformers"), **versions(), **(origin.versions or {})}
    rows = {
        "Base model": origin.base,
        "Training data": origin.data,
        "Steps": None if origin.steps is None else f"{origin.steps:,}",
        "Layout": ": ".join(filter(None, (ranks, sizes))) or None,
        "Versions": ", ".join(f"{name} {number}" for name, number in sorted(packages.items())),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    title = repository.rpartition("/")[2]
    what = "These LoRA adapters were" if is_adapter else "This model was"
    return (
        f"---\n{settings.to_yaml()}\n---\n\n# {title}\n\n{what} trained with lightning_mcore.\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
