# SPDX-License-Identifier: Apache-2.0
"""``MCoreVisionGPT``: a vision-language model, ready to train on every layout.

It is an :class:`~lightning_mcore.MCoreGPT` behind transformers' vision tower (``layers/vision.py``). A batch has the
entries that ``MCoreGPT`` expects, and what a Hugging Face processor returns for images and videos: ``pixel_values`` and
``image_grid_thw``, ``pixel_values_videos`` and ``video_grid_thw`` (``data/multimodal.py``). On its way to the device,
:meth:`~MCoreVisionGPT.on_before_batch_transfer` turns these into patches, positions and the places of images. When a
batch is split into microbatches or over context-parallel ranks, its tokens are cut by the base class, and each part
gets its images back here.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_mcore.config.architecture import ARCHITECTURE_DEFAULTS
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.rules.model import LossNormalization
from lightning_mcore.config.vision import LANGUAGE_MODEL, PARTS, Vision
from lightning_mcore.data.multimodal import INPUTS, with_vision
from lightning_mcore.hf.source import seeing_name
from lightning_mcore.hf.vision_families import with_tower
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.host_values import known_values, note_values
from lightning_mcore.layers.inputs import ModelInputs
from lightning_mcore.layers.packed_sequences import OF_ROWS
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.layers.vision import VisionGPT, VisionInputs, with_own_images
from lightning_mcore.layers.vision_weights import tower_flops_per_token
from lightning_mcore.models import generation
from lightning_mcore.models.gpt import Batch, MCoreGPT
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.parallel.stage_layers import layers_of_first_chunk

_OF_THE_TOWER = ("patches", "vision_grids")  # entries of a batch that do not belong to tokens
_WHERE = ("vision_rows", *OF_ROWS)  # which tokens are of images, and in which sequence


@inherit_help(MCoreGPT)
class MCoreVisionGPT(MCoreGPT):
    """A model for text, images and videos: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, with and without experts.

    :meth:`from_pretrained` makes it from a Hugging Face model, and exports use the hub's weight names. It logs what
    ``MCoreGPT`` logs; ``model_tflops`` includes the tower's products with weights.

    Arguments that are not explained here are those of :class:`~lightning_mcore.MCoreGPT`.

    Args:
        seq_length: Tokens per sequence, including image tokens.
        transformer: Fields of Megatron's ``TransformerConfig`` for the language model.
        vision: The tower's settings, as plain data; filled in by :meth:`from_pretrained`.
        transformer_impl: The layers to use for the language model.
        architecture: ``{"delta_net": ...}`` for gated delta nets, as in Qwen3.5; other settings are not available.
        freeze: Parts that are not trained: ``"vision_tower"``, ``"multi_modal_projector"``, ``"language_model"``.
        lora: Train low-rank adapters of the language model, and freeze everything else; None for no adapters.

    Raises:
        ValueError: A value is not allowed.
        TypeError: A size is not an int.
    """

    takes_images = True

    without_images = "MCoreGPT"
    """Name of the class that trains such a model on text alone."""

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        vision: dict[str, Any],
        recipe: Recipe = Recipe(),
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        loss_normalization: LossNormalization = "tokens",
        architecture: dict[str, Any] | None = None,
        freeze: Sequence[str] = (),
        lora: LoRA | dict[str, Any] | None = None,
        hf: dict[str, Any] | None = None,
    ) -> None:
        arguments = passed_on(locals(), "vision", "freeze")
        self.vision = Vision.of(vision)
        check_parts(freeze, lora)
        self.freeze_parts = tuple(freeze)
        super().__init__(**arguments)
        for name in inspect.signature(MCoreGPT).parameters.keys() - inspect.signature(MCoreVisionGPT).parameters.keys():
            self.hparams.pop(name, None)  # not an argument of this class
        # Adapters read their base again, by this name too; a file cannot choose it
        named = with_tower(self.vision.model_type)
        if hf is not None and hf.get("family") == named:
            self._given_family = named
        given = {name: transformer.get(name) for name in ("multi_latent_attention", "mtp_num_layers")}
        for name, value in {**given, **(architecture or {})}.items():
            if value and name != "delta_net" and value != ARCHITECTURE_DEFAULTS.get(name):
                raise ValueError(f"{name}={value!r} is not available for a vision-language model; leave it out")

    @classmethod
    def from_pretrained(  # type: ignore[override]  # no train_only
        cls,
        path: str,
        seq_length: int | None = None,
        transformer: dict[str, Any] | None = None,
        recipe: Recipe = Recipe(),
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        loss_normalization: LossNormalization = "tokens",
        family: str | None = None,
        freeze: Sequence[str] = (),
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
    ) -> "MCoreVisionGPT":
        """Make a module from a Hugging Face vision-language model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreGPT.from_pretrained` without ``train_only``, and ``freeze`` as in the
        constructor. ``seq_length`` includes image tokens, and only the language model gets adapters.

        Raises:
            FileNotFoundError: There is no such model.
            ValueError: Its family is unknown or has no tower, or its config asks for something that is not supported.
        """
        family = seeing_name(path, family)
        return cls._of_pretrained(**passed_on(locals()))

    @classmethod
    def check_kind(cls, path: str, settings: dict[str, Any]) -> None:
        """Raise ValueError for a text-only model's settings, and drop settings that are not arguments here."""
        if "vision" not in settings:
            origin = (settings.get("hf") or {}).get("config") or {}
            name = str(origin.get("model_type"))
            if with_tower(name) != name:
                raise ValueError(
                    f"{path} was imported without its vision tower; import it with family={with_tower(name)!r}"
                    f" (--family {with_tower(name)}), or take {cls.without_images}"
                )
            raise ValueError(f"{path} is a text-only model; take {cls.without_images}")
        # A default may go, a setting that changes the model may not
        for name in settings.keys() - inspect.signature(cls).parameters.keys():
            value, usual = settings.pop(name), inspect.signature(MCoreGPT).parameters[name].default
            if value and value != usual:
                raise ValueError(
                    f"{path} needs {name}={value!r}, which {cls.__name__} does not have; take another model"
                )

    def check_settings(self) -> None:
        """Check that Megatron, the machine and the tower support the settings.

        Raises:
            ValueError: As in :meth:`MCoreGPT.check_settings`; or the first stage has too few layers for the tower's
                intermediate outputs.
            ModuleNotFoundError: TransformerEngine is asked for but not installed.
        """
        super().check_settings()
        Vision.check_first_stage(self.vision.deepstack, layers_of_first_chunk(self._build_config()))

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        """Build one chunk: with tower and embedding if ``pre_process``, with the output layer if ``post_process``."""
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        for name, parameter in chunk.named_parameters():
            sees = name.startswith("vision.tower.")
            part = self.vision.part_of(name.removeprefix("vision.tower.")) if sees else LANGUAGE_MODEL
            if part in self.freeze_parts:
                parameter.requires_grad_(False)
        return chunk

    def _new_chunk(self, *args: Any, **kwargs: Any) -> GPTChunk:
        return VisionGPT(*args, vision=self.vision, **kwargs)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Add positions and the places of images to a batch, and drop patches on stages without the tower.

        Raises:
            ValueError: As in :meth:`MCoreGPT.on_before_batch_transfer`; or the tokens of images or videos do not match
                the images or videos.
        """
        batch = with_vision(super().on_before_batch_transfer(batch, dataloader_idx), self.vision)
        # Only the first stage has the tower, and patches are most of a batch's bytes
        if any(chunk.pre_process for chunk in self.model.chunks):
            return batch
        return _parts(batch)[0]

    def split_rows(self, batch: Batch, rows: int) -> Iterator[tuple[Batch, float]]:
        """Cut a batch into microbatches, each with the images of its rows."""
        # Patches have no row axis: with 4 rows of one image each, the second microbatch gets images 2 and 3
        of_tokens, seen = _parts(batch)
        for part, share in super().split_rows(of_tokens, rows):
            yield with_own_images(part, seen, self.vision) if seen else part, share

    def shard_context(self, batch: Batch) -> Batch:
        """Return this context-parallel rank's share of a batch's tokens, and all of its images."""
        of_tokens, seen = _parts(batch)
        part = super().shard_context(of_tokens)
        on_host = {name: known_values(value) for name, value in of_tokens.items() if name in _WHERE}
        if "vision_rows" in on_host and None not in on_host.values():
            on_host["tokens"] = on_host["vision_rows"]  # which the base class measures
            note_values(part["vision_rows"], super().shard_context(on_host)["vision_rows"])
        return {**part, **seen}

    def model_inputs(self, batch: Batch) -> ModelInputs:
        """Return the model's inputs for a batch, or for this context-parallel rank's share of one.

        Args:
            batch: As :meth:`on_before_batch_transfer` returns it; without images, tokens are enough.
        """
        group = self._cp_group
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        return VisionInputs.of_batch(super().model_inputs(batch), batch, rank, size)

    def image_tokens(self, batch: Batch) -> Tensor:
        """Return the number of image and video tokens in a batch, a scalar ``[]``."""
        return (batch["vision_rows"] >= 0).sum()

    def flops_per_token(self) -> float:
        """Return the floating-point operations per token of the last step, including the tower's for images."""
        counter = self._counter
        share = counter.image_tokens / counter.tokens if counter is not None and counter.tokens else 0.0
        return super().flops_per_token() + share * self._tower_flops

    @functools.cached_property
    def _tower_flops(self) -> int:
        # Adapters are on the language model only, so with LoRA all of the tower is frozen
        return tower_flops_per_token(self.vision, PARTS if self.lora is not None else self.freeze_parts)

    def next_logits(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the logits of :meth:`MCoreGPT.next_logits`; image and video tokens are never generated."""
        logits = super().next_logits(batch, batch_idx)
        logits[:, [self.vision.image_token_id, self.vision.video_token_id]] = float("-inf")
        return logits

    def generate(
        self,
        prompt: list[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        images: Mapping[str, Tensor] | None = None,
        *,
        top_p: float = 1.0,
        eos_token_id: int | list[int] | None = None,
    ) -> list[int]:
        """Continue a prompt of text, images and videos, as :meth:`MCoreGPT.generate` does.

        Args:
            prompt: Tokens to continue, at least one, including image and video tokens.
            max_new_tokens: Tokens to add.
            temperature: Divides the logits; 0 always chooses the most probable token.
            top_k: Sample only among this many of the most probable tokens; None for all.
            seed: Random seed for sampling.
            images: What the model's processor returns for the images and videos of the prompt: ``pixel_values`` and
                ``image_grid_thw``, ``pixel_values_videos``, ``video_grid_thw`` and ``second_per_grid_ts``; other
                entries are not used.
            top_p: Sample only among the most probable tokens that together have this probability; 1 for all.
            eos_token_id: A token, or several, that end the text; the one that ends it is returned. None for no end.

        Returns:
            The prompt and the new tokens, the same on every rank.

        Raises:
            ValueError: As in :meth:`MCoreGPT.generate`; or the image tokens do not match the images, or they would not
                all fit into ``seq_length``.
        """
        seen = {name: value for name, value in (images or {}).items() if name in INPUTS}
        # A window that moves would cut image tokens off from their images
        if seen and len(prompt) + max_new_tokens > self.seq_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with images and {max_new_tokens} new tokens do not fit into"
                f" seq_length={self.seq_length}; give a shorter prompt, or fewer new tokens"
            )

        def prepare(window: Batch) -> Batch:
            batch = self.on_before_batch_transfer({**window, **seen}, 0)
            return {name: value.to(self.device) for name, value in batch.items()}

        return generation.continue_prompt(
            self, prompt, max_new_tokens, temperature, top_k, seed, top_p, eos_token_id, prepare
        )

    def _fusions(self) -> dict[str, bool]:
        return {**super()._fusions(), "apply_rope_fusion": False}


def check_parts(freeze: Sequence[str], lora: Any) -> None:
    """Raise an error for parts that do not exist, if nothing is left to train, and for adapters of a frozen model."""
    if isinstance(freeze, str):
        raise TypeError(f"freeze={freeze!r} is not a list; give [{freeze!r}]")
    for part in freeze:
        if part not in PARTS:
            raise ValueError(f"freeze has {part!r}; choose from {', '.join(PARTS)}")
    if {*freeze} == {*PARTS}:
        raise ValueError(f"freeze={[*freeze]} leaves nothing to train; leave one part out")
    if lora is not None and LANGUAGE_MODEL in freeze:
        raise ValueError(f"freeze has {LANGUAGE_MODEL!r}, and lora trains adapters of it; leave one of them out")


def _parts(batch: Batch) -> tuple[Batch, Batch]:
    """Return the entries of a batch that belong to tokens, and the entries that belong to the tower."""
    of_tokens = {name: value for name, value in batch.items() if name not in _OF_THE_TOWER}
    return of_tokens, {name: value for name, value in batch.items() if name in _OF_THE_TOWER}
