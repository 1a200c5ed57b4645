# SPDX-License-Identifier: Apache-2.0
"""The arguments of a planned ``MCoreGPT``, and what follows from them: what is trained, the teacher, other losses.

The Hugging Face config supplies the other arguments of ``from_pretrained``. The rules of ``hf/adapters.py`` and
``hf/freezing.py`` say what remains to train with adapters or frozen weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_mcore.config.distillation import Distillation, check_sight
from lightning_mcore.config.embedding import Embedding, faults_of_batch
from lightning_mcore.config.embedding import faults_with_model as faults_of_vectors
from lightning_mcore.config.field_homes import DEFAULTS
from lightning_mcore.config.lora import LoRA, check_train_only
from lightning_mcore.config.preference import Preference, faults_with_model
from lightning_mcore.config.reranking import Reranker
from lightning_mcore.config.reranking import faults_of_batch as faults_of_documents
from lightning_mcore.config.rules.model import faults_of_mean
from lightning_mcore.config.run import RunSettings
from lightning_mcore.config.vision import PARTS, Vision
from lightning_mcore.hf.adapters import adapted_model, check_held, projection_names
from lightning_mcore.hf.family import HIDDEN, SCORING
from lightning_mcore.hf.freezing import check_trained, trained_model
from lightning_mcore.hf.peft_folder import given_lora
from lightning_mcore.hf.pixels import check_pixels
from lightning_mcore.hf.registry import family_and_fields
from lightning_mcore.hf.sentence_folder import check_vectors
from lightning_mcore.hf.source import (
    absolute,
    check_scores,
    planned_settings,
    require_head,
    seeing_name,
    sees_images,
    variant_name,
)
from lightning_mcore.layers.quantized import check_blocks, check_quantized_layers
from lightning_mcore.models import embedding as vectors
from lightning_mcore.models import reranker
from lightning_mcore.models.kinds import kind_of
from lightning_mcore.models.preference import arguments_of_base
from lightning_mcore.models.stored_logits import looks_complete
from lightning_mcore.models.vision import MCoreVisionGPT
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.parameters import whole_shapes
from lightning_mcore.planning.signatures import of_model
from lightning_mcore.planning.vision import with_tower

if TYPE_CHECKING:
    from lightning_mcore.planning.rules import RuleBook


def arguments_of_gpt(book: "RuleBook", model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with those from a Hugging Face config filled in.

    Raises FileNotFoundError or ValueError if there is no model, or its family is unknown.
    """
    if not model:
        raise ValueError("the run has no model; give MCoreGPT's arguments, or --model with a Hugging Face model")
    own = kind_of(model)
    setting_of(model)  # raises for a wrong setting
    if "path" not in model:
        return arguments_in_use(model)
    sees = bool(sees_images(model["path"], model.get("family")))
    kind = MCoreVisionGPT if sees else own
    given = book.known_arguments(f"argument of {kind.__name__}.from_pretrained", model, of_model(True, sees))
    head = ""
    if "preference" in given and Preference.of(given["preference"]).gives_scores:
        check_scores(given["path"])
        head = SCORING
    if "reranker" in given:
        tokens = Reranker.of(given["reranker"]).tokens
        check_scores(given["path"], tokens)
        head = SCORING if tokens is None else ""
    if "embedding" in given:
        check_vectors(given["path"], Embedding.of(given["embedding"]))
        head = HIDDEN
    family = variant_name(given["path"], given.get("family"), head)
    source = planned_settings(given["path"], family, given.get("seq_length"), given.get("transformer"))
    kind.check_kind(given["path"], source)
    require_head(given["path"], source["hf"]["family"], head)
    names = ("path", "family", "seq_length", "transformer")
    return arguments_in_use({**{name: value for name, value in given.items() if name not in names}, **source})


def arguments_in_use(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT``, with what the classes with another loss change in them.

    Raises FileNotFoundError if there is no such adapter, ValueError or TypeError for a wrong setting.
    """
    if not isinstance(model.get("transformer"), Mapping):
        return dict(model)
    if "embedding" in model:
        return {**model, **vectors.arguments_of_base(model["transformer"])}
    if "preference" not in model and "reranker" not in model:
        return dict(model)
    given = model["transformer"], _lora(model), bool(model.get("share_embeddings_and_output_weights"))
    if "reranker" in model:
        changed = reranker.arguments_of_base(Reranker.of(model["reranker"]), *given)
    else:
        changed = arguments_of_base(Preference.of(model["preference"]), *given)
    return {**model, **{name: value for name, value in changed.items() if name in model}}


def _lora(model: Mapping[str, Any]) -> LoRA | None:
    """Return the adapters of a model, also where they are given as a folder."""
    return None if model.get("lora") is None else given_lora(model["lora"])[0]


def faults_of_pairs(settings: RunSettings, model: Mapping[str, Any], batch: GlobalBatch | None) -> Iterator[str]:
    """Yield a sentence for each setting that the model does not allow, and if microbatches cut pairs apart.

    The same for an embedding and the texts of its queries, and for a reranker and their documents.
    """
    config = SimpleNamespace(**(DEFAULTS | (model.get("transformer") or {})))
    if "embedding" in model:
        embedding = Embedding.of(model["embedding"])
        yield from faults_of_vectors(embedding, config)
        if batch is not None and not batch.is_assumed and not settings.data.get("packing"):
            yield from faults_of_batch(embedding, batch.micro_batch_size, batch.data_parallel_size)
    if "reranker" in model:
        yield from faults_of_mean(config)
        if batch is not None and not batch.is_assumed and not settings.data.get("packing"):
            yield from faults_of_documents(Reranker.of(model["reranker"]), batch.micro_batch_size)
    if "preference" not in model:
        return
    yield from faults_with_model(Preference.of(model["preference"]), _lora(model), config)
    if batch is not None and batch.micro_batch_size % 2 and not settings.data.get("packing"):
        yield f"micro_batch_size={batch.micro_batch_size} cuts a pair apart; choose an even number"


def with_adapters(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model with the adapters or the frozen weights that the arguments of ``MCoreGPT`` ask for.

    Raises FileNotFoundError for a PEFT folder that does not exist, ValueError or TypeError for a wrong setting.
    """
    given, train_only = model.get("lora"), model.get("train_only")
    if train_only is not None:
        check_train_only(train_only, given is not None)
        family, settings = family_and_fields(model)
        check_trained(family, settings, train_only)
        return replace(fields, adapters=trained_model(whole_shapes(fields), family, settings, train_only))
    if given is None:
        return fields
    lora, continued = given_lora(given)
    family, settings = family_and_fields(model)
    lora.check_targets(projection_names(family, settings), strict=continued is None)
    check_held(family, settings, lora)
    return replace(fields, adapters=adapted_model(whole_shapes(fields), family, settings, lora))


def check_adapters(fields: GPTFields, config: Any, model: Mapping[str, Any], backend: str) -> None:
    """Refuse adapters that Megatron's settings, the layers and the layout do not allow."""
    adapted = fields.adapters
    if adapted is None or adapted.lora is None:
        return
    tp, etp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size or 1
    names = projection_names(*family_and_fields(model))
    adapted.lora.check_layers(config, names)
    adapted.lora.check_vocabulary(names, {**fields.transformer, **model}, fields.padded_vocab_size, tp)
    if adapted.lora.quantization:
        check_quantized_layers(backend)
        saved = {name for name, trained in adapted.of.items() if trained.is_saved}
        check_blocks({name: shape[-1] for name, shape in whole_shapes(fields).items() if name not in saved}, tp, etp)


def setting_of(model: Mapping[str, Any]) -> Distillation | None:
    """Return the settings of a model's distillation; None if it has no teacher."""
    return None if model.get("distillation") is None else Distillation.of(model["distillation"])


def with_teacher(fields: GPTFields, model: Mapping[str, Any]) -> GPTFields:
    """Return a model's sizes with its teacher's, if it has one.

    Raises FileNotFoundError if there is no such teacher, ValueError or TypeError for a wrong setting.
    """
    setting = setting_of(model)
    if setting is None:
        return fields
    if fields.vision is not None:
        setting.check_seeing()
    if setting.stored is not None and looks_complete(absolute(setting.stored)):
        return fields
    path = setting.teacher
    family = None if fields.vision is None else seeing_name(path, None)
    given = planned_settings(path, family, fields.seq_length, {"mtp_num_layers": None})
    check_sight(path, "vision" in given, fields.vision is not None)
    multiple = model.get("make_vocab_size_divisible_by") or 128
    teacher = GPTFields.of({**given, "make_vocab_size_divisible_by": multiple})
    if fields.vision is not None:
        fields.vision.check_teacher(path, Vision.of(given["vision"]))
        check_pixels((model.get("hf") or {}).get("path"), path)
        teacher = with_tower(teacher, {**given, "freeze": PARTS})
    return replace(
        fields,
        teacher=teacher,
        teacher_path=path,
        layer_pairs=tuple((own, taught) for own, taught in setting.intermediate_layer_pairs or ()),
        hidden_loss=setting.intermediate_loss,
        copies_of_logits=setting.copies_of_logits,
    )


def assumptions_of_loss(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not counted, as part of a sentence."""
    if "preference" in model and Preference.of(model["preference"]).needs_reference:
        yield "the passes that compute log-probabilities under the reference are not counted"
    setting = setting_of(model)
    if setting is not None and setting.stored is not None:
        yield "each step is counted as if the teacher ran in it, unless its logits are already stored"
    if setting is not None and setting.on_policy:
        yield "the passes in which the student samples its own answers are not counted"
