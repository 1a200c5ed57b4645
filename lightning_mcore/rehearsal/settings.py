# SPDX-License-Identifier: Apache-2.0
"""The rehearsal of a run that is described by a file, with rows of made-up tokens and images."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_mcore.arguments.build import make_precision, make_strategy
from lightning_mcore.config.embedding import Embedding
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.preference import Preference
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import Vision
from lightning_mcore.models.distillation import MCoreDistillation
from lightning_mcore.models.kinds import kind_of
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.models.vision_distillation import MCoreVisionDistillation
from lightning_mcore.planning.arguments import setting_of
from lightning_mcore.planning.model import backend_of
from lightning_mcore.planning.rules import check_run
from lightning_mcore.rehearsal.rank import STEPS, Build
from lightning_mcore.strategy.offload import OffloadActivations
from lightning_mcore.te_cpu.load import is_prepared

_OF_TRAINER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")


class MadeUpRows(Dataset[dict[str, Tensor]]):
    """Rows of zeros in the form of the run's data: sequences packed into rows of equal ones, or texts to compare.

    With ``hybrid_context_parallel``, ``shared_by`` ranks share a packed row. Most of it is then one sequence, so that
    the row is split: attention gathers its keys, which is the most memory that a row may need.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        packed: bool,
        preference: Preference | None = None,
        reference: bool = False,
        embedding: Embedding | Reranker | None = None,
        shared_by: int = 1,
    ) -> None:
        positions = torch.arange(length)
        self.rows = rows
        self.row = {"tokens": positions * 0, "labels": positions * 0, "lengths": torch.tensor(length)}
        sequences = 4 if embedding is None else 2 * embedding.texts
        boundaries = torch.arange(sequences + 1) * length // sequences
        if shared_by > 1:
            # Three sequences in a row of 32 for two ranks: 0 24 28 32
            boundaries = torch.cat(
                [torch.zeros(1), length - torch.arange(sequences - 1, -1, -1) * 2 * shared_by]
            ).long()
        if packed:
            self.row |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), boundaries)
        each = (sequences,) if packed else ()
        if embedding is not None or preference is not None:
            self.row["sample_ids"] = torch.zeros(each, dtype=torch.long)
        if isinstance(embedding, Reranker):
            self.row["relevance"] = torch.zeros(each)
        if preference is not None:
            # An answer's last token has no label
            self.row["loss_mask"] = torch.ones(length).index_fill(
                0, boundaries[1:] - 1 if packed else positions[-1:], 0
            )
            if preference.kind.reads == "examples":
                self.row["desirable"] = torch.ones(each, dtype=torch.bool)
            if reference:
                self.row["reference_logps"] = torch.zeros(each, dtype=torch.float64)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row


def batch_with_images(vision: Vision, rows: int, length: int, image_tokens: int, ranks: int = 1) -> dict[str, Tensor]:
    """Return a batch whose rows begin with images of equal size, each as close to a square as possible.

    The number of images lets ``ranks`` share the tower's work evenly, as plan assumes. With 2 x 2 patches per token,
    768 tokens on 2 ranks become two images of 32 x 48 patches.
    """
    images = math.gcd(image_tokens, ranks)
    if image_tokens + images > length:  # a token of text follows each image but the last
        images = 1
    size_of_one = image_tokens // images
    height = next(size for size in range(math.isqrt(size_of_one), 0, -1) if size_of_one % size == 0)
    merged, config = int(vision.config["spatial_merge_size"]), vision.config
    grid = torch.tensor([1, height * merged, size_of_one // height * merged])
    channels = config.get("in_channels") or config.get("in_chans") or 3
    pixels = channels * config.get("temporal_patch_size", 2) * config["patch_size"] ** 2
    tokens = torch.zeros(rows, length, dtype=torch.long)
    tokens[:, : image_tokens + images - 1] = vision.image_token_id
    tokens[:, size_of_one : image_tokens + images - 1 : size_of_one + 1] = 0
    return {
        "tokens": tokens,
        "labels": torch.zeros_like(tokens),
        "image_grid_thw": grid.expand(rows * images, 3).contiguous(),
        "pixel_values": torch.zeros(rows * images * int(grid.prod()), pixels),
    }


def layers_of(model: Mapping[str, Any]) -> str:
    """Return the layers that are rehearsed for arguments of ``MCoreGPT``: a GPU's, if TransformerEngine is here."""
    return backend_of(model, "cuda" if is_prepared() else "cpu")


def build_of(settings: RunSettings, devices: int, devices_per_node: int) -> tuple[Build, ParallelLayout]:
    """Return what builds the run of a file, for ``rehearse``, and its layout.

    Raises ValueError for settings with which the run would be refused, and for a model that sees images whose number is
    not given.
    """
    run = check_run(settings, devices)
    if run.errors:
        raise ValueError(run.errors[0])
    assert run.batch is not None
    if "vision" in run.model and settings.image_tokens is None:
        raise ValueError("the model sees images, and the tokens of them in a row are not known; give --image-tokens N")
    setting = setting_of(run.model)
    for name in ("stored", "on_policy"):
        if value := getattr(setting, name, None):
            raise ValueError(
                f"distillation.{name}={value!r} cannot be rehearsed, because it reads what a model answers; leave it"
                " out"
            )
    if run.device_type == "cpu":
        raise ValueError("accelerator='cpu' has no GPU to rehearse; set trainer.accelerator to 'gpu'")
    if settings.precision.get("fp4_recipe") is not None:
        raise ValueError(
            f"fp4_recipe={settings.precision['fp4_recipe']!r} cannot be rehearsed, because its kernels look at values;"
            " rehearse with fp8_recipe='mxfp8', whose copies of weights and inputs are twice as large"
        )
    needs_engine = run.rules.fp8 is not None or run.model.get("transformer_impl") == "transformer_engine"
    if needs_engine and not is_prepared():
        raise ModuleNotFoundError(
            "layers of TransformerEngine, and so FP8, are rehearsed with its Python code, which is not installed;"
            " install lightning-mcore[te-cpu], or set model.transformer_impl to 'local' and leave fp8_recipe out"
        )
    accumulated = settings.trainer.get("accumulate_grad_batches") or 1
    rows = run.batch.rows // (run.batch.data_parallel_size * accumulated)
    sizes = (devices, devices_per_node), (rows, run.batch.seq_length, accumulated)
    assert run.rules.layout is not None
    return partial(_build, settings, run.model, *sizes), run.rules.layout


def _build(
    settings: RunSettings, model: Mapping[str, Any], devices: tuple[int, int], batch: tuple[int, int, int]
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    rows, length, accumulated = batch
    arguments = {**model, "recipe": model.get("recipe") or {}}
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=devices[1],
        num_nodes=devices[0] // devices[1],
        strategy=make_strategy(settings.strategy),
        plugins=[make_precision(settings.precision)],
        use_distributed_sampler=False,
        callbacks=[OffloadActivations(**item.get("init_args", {})) for item in settings.trainer.get("callbacks", ())],
        **{name: settings.trainer[name] for name in _OF_TRAINER if name in settings.trainer},
    )
    if "vision" in model:
        assert settings.image_tokens is not None
        layout = trainer.strategy.layout  # type: ignore[attr-defined]
        ranks = layout.tensor_model_parallel_size * layout.context_parallel_size  # which share the images of a row
        images = batch_with_images(Vision.of(model["vision"]), rows, length, settings.image_tokens, ranks)
        loader: Any = DataLoader([images] * (accumulated * STEPS), batch_size=None)  # type: ignore[arg-type]
        if setting_of(model) is None:
            return trainer, MCoreVisionGPT(**arguments), (loader, loader)
        return trainer, _without_weights(MCoreVisionDistillation(**arguments)), (loader, loader)
    preference = Preference.of(model["preference"]) if "preference" in model else None
    # The reference of adapters is the model without them, which runs in each step.
    in_data = preference is not None and preference.needs_reference and not model.get("lora")
    embedding: Embedding | Reranker | None = Embedding.of(model["embedding"]) if "embedding" in model else None
    if "reranker" in model:
        embedding = Reranker.of(model["reranker"])
    packed = bool(settings.data.get("packing"))
    layout = trainer.strategy.layout  # type: ignore[attr-defined]
    shared_by = layout.context_parallel_size if layout.hybrid_context_parallel else 1
    data = MadeUpRows(rows * accumulated * STEPS, length, packed, preference, in_data, embedding, shared_by)
    loader = DataLoader(data, batch_size=rows)
    if setting_of(model) is not None:
        return trainer, _without_weights(MCoreDistillation(**arguments)), (loader, loader)
    return trainer, kind_of(model)(**arguments), (loader, loader)


def _without_weights(student: MCoreDistillation) -> MCoreDistillation:
    """Return a student whose teacher reads no weights: its config says how large it is."""
    student.teacher._starts_from = None
    return student
