# SPDX-License-Identifier: Apache-2.0
"""``MCoreReranker``: an ``MCoreGPT`` that scores how well a document answers a query, on every layout.

The model, its layouts, checkpoints and adapters are ``MCoreGPT``'s. It reads a query and a document in one sequence (a
cross-encoder) and scores its last token: with a layer of one output, or by the logits of a yes and a no token.
``data/embedding/texts.py`` describes a batch: neighbouring sequences are the documents of a query.
``layers/reranking.py`` has the losses.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.positions import PositionEmbedding
from lightning_mcore.config.reranking import Reranker, faults_of_batch
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.model import faults_of_mean
from lightning_mcore.data.embedding.texts import check_texts
from lightning_mcore.data.preprocess.tokenizer import auto_tokenizer
from lightning_mcore.hf.cross_encoder_folder import warn_of_template
from lightning_mcore.hf.family import SCORING
from lightning_mcore.hf.source import check_scores, variant_name
from lightning_mcore.layers import reranking
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import is_packed
from lightning_mcore.layers.metrics import MeanOfQueries
from lightning_mcore.layers.score import ScoreLayer, TokenLogits, last_scores
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models import embedding as vectors
from lightning_mcore.models.gpt import Batch, MCoreGPT
from lightning_mcore.models.recipe import Recipe

_MEASURES = {"mrr": reranking.reciprocal_rank, "ndcg": reranking.ndcg}


@inherit_help(MCoreGPT)
class MCoreReranker(MCoreGPT):
    """A GPT that scores a query and a document, trained on queries with documents that are relevant or not.

    A score is computed from the last token. By default, a layer with one output replaces the output layer. With
    ``Reranker(tokens=["yes", "no"])``, the score is the difference between the language model's logits of these two
    tokens, and no other logits are computed. Multi-token prediction is off. Router losses are added as in ``MCoreGPT``.

    Logs ``train_loss``, a mean over queries, and ``train_accuracy``, the fraction of queries whose most relevant
    document has the highest score (with ``documents=1``, whether the score is above 0 if the label is above 0.5).
    Validation logs ``val_loss``, ``val_accuracy``, and with two or more documents ``val_mrr`` (mean reciprocal rank of
    the first relevant document) and ``val_ndcg`` over the queries with a relevant document. Testing logs the same names
    with ``test_``. ``grad_norm`` and the speed are logged as by ``MCoreGPT``. :meth:`predict_step` returns the scores.
    With LoRA, a score layer is trained in full.

    The arguments are those of :class:`~lightning_mcore.MCoreGPT` except ``loss_normalization``, plus ``reranker``.

    Args:
        reranker: Loss, documents, score and template; :class:`~lightning_mcore.Reranker` has the settings.
        share_embeddings_and_output_weights: Whether the output layer is the embedding's transpose; only with
            ``Reranker(tokens=...)``.

    Raises:
        ValueError: A value is not allowed, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        A new model; ``MCoreReranker.from_pretrained(path)`` starts from a Hugging Face model.

        >>> from lightning_mcore import MCoreReranker, Reranker
        >>> sizes = {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
        >>> model = MCoreReranker(32000, seq_length=512, transformer=sizes, reranker=Reranker(documents=8))
    """

    with_images = None

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        reranker: Reranker | dict[str, Any] = Reranker(),
        recipe: Recipe = Recipe(),
        position_embedding_type: PositionEmbedding = "rope",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        seq_len_interpolation_factor: float | None = None,
        yarn: dict[str, Any] | None = None,
        share_embeddings_and_output_weights: bool = False,
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        architecture: dict[str, Any] | None = None,
        hf: dict[str, Any] | None = None,
        lora: LoRA | dict[str, Any] | None = None,
        train_only: list[str] | None = None,
    ) -> None:
        arguments = passed_on(locals(), "reranker")
        setting = _with_ids(Reranker.of(reranker), (hf or {}).get("path"), vocab_size)
        changed = arguments_of_base(setting, transformer, lora, share_embeddings_and_output_weights)
        super().__init__(**arguments | changed)
        self.hparams.pop("loss_normalization", None)  # not an argument of this class
        self.reranker = setting
        self.hparams["reranker"] = setting.plain()
        for name in _MEASURES:
            for stage in ("val", "test"):
                self.metrics[f"{stage}_{name}"] = MeanOfQueries()
        if setting.tokens is None:
            self.hparams["share_embeddings_and_output_weights"] = False
            self._name_family()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the loss is a mean over queries, without a loss_normalization
        cls,
        path: str,
        seq_length: int | None = None,
        transformer: dict[str, Any] | None = None,
        reranker: Reranker | dict[str, Any] = Reranker(),
        recipe: Recipe = Recipe(),
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        family: str | None = None,
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
        train_only: list[str] | None = None,
    ) -> "MCoreReranker":
        """Make a module from a Hugging Face model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreGPT.from_pretrained` except ``loss_normalization``, plus ``reranker`` as
        in the constructor. A score layer is read from a ``*ForSequenceClassification`` with one label; from a language
        model, it starts at random.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown, its config asks for something that is not supported, it has several
                labels, or its tokenizer splits one of ``Reranker(tokens=...)``.
        """
        tokens = Reranker.of(reranker).tokens
        check_scores(path, tokens)
        if tokens is None:
            family = variant_name(path, family, SCORING)
        module = cls._of_pretrained(**passed_on(locals(), "tokens"))
        warn_of_template(path, module.reranker)
        return module

    def check_settings(self) -> None:
        """Check the settings as ``MCoreGPT`` does, and that they fit a loss over queries.

        Raises:
            ValueError: Router losses would have wrong weights, or an adapter would be on an output layer of which only
                a few logits are computed.
        """
        super().check_settings()
        raise_first(faults_of_mean(self._build_config()))
        if self.reranker.tokens is not None and self.lora is not None and self.lora.adapts("lm_head"):
            raise ValueError(
                f"target_modules={self.lora.target_modules!r} gives the output layer an adapter, but"
                f" tokens={self.reranker.tokens} computes only their logits; leave lm_head out, or put it into"
                " modules_to_save"
            )

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        """Build one chunk; the last one returns scores, or the logits of the tokens that make them."""
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if post_process:
            layer, tokens = chunk.output_layer, self.reranker.tokens
            chunk.output_layer = ScoreLayer(self.config) if tokens is None else TokenLogits.of(layer, tokens)
        return chunk

    @property
    def head(self) -> str:  # type: ignore[override]  # it depends on the settings
        """Suffix of the family's name: ``SCORING`` with a score layer."""
        return SCORING if self.reranker.tokens is None else ""

    @property
    def output_size(self) -> int:
        """Columns of the output layer that are computed."""
        return len(self.reranker.tokens or [None])

    # ---- steps

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check a batch as ``MCoreGPT`` does, and that it has a query's documents next to each other.

        Raises:
            ValueError: The sequences are not such documents, or a microbatch would separate the documents of a query.
        """
        if self._trainer is None or not self._trainer.predicting:
            check_texts(batch, self.reranker)
            if not is_packed(batch):
                most = getattr(self._trainer and self._trainer.strategy, "micro_batch_size", None)
                raise_first(faults_of_batch(self.reranker, most or self.reranker.documents))
        else:
            vectors.require_lengths(batch)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss over a microbatch's queries and its weight, the number of queries."""
        return self._step(batch, "train")

    def _evaluate(self, stage: str, batch: Batch) -> None:
        self._step(batch, stage)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the score of each sequence, fp64: [b], packed [b, k]."""
        scores = self._scores(batch)[0]
        return scores.view(len(batch["tokens"]), -1) if is_packed(batch) else scores

    @property
    def _gives(self) -> str:
        return "MCoreReranker gives scores"

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the score of each sequence, fp64, and the sequences' lengths, both [sequences]."""
        logits, inputs, lengths = self._of_sequences(batch)
        # One output or logit, or that of the first token minus that of the second
        return last_scores(logits[..., 0] - logits[..., 1:].sum(-1), inputs, lengths, self._cp_group), lengths

    def _step(self, batch: Batch, stage: str) -> Any:
        weighs = self._config_of_chunks().calculate_per_token_loss
        vectors.require_weights(batch, weighs)
        setting = self.reranker
        scores, lengths = (values.view(-1, setting.documents) for values in self._scores(batch))
        relevance, there = batch["relevance"].view_as(scores).to(scores), (lengths[:, 0] > 0) & self._counts_batch
        values = {
            "loss": (reranking.LOSSES[setting.loss](scores, relevance), there),
            "accuracy": (reranking.is_best_first(scores.detach(), relevance), there),
        }
        if stage != "train" and setting.documents > 1:
            ranked, metrics = there & (relevance > 0).any(1), self.metrics
            for name, measure in _MEASURES.items():
                metric: Any = metrics[f"{stage}_{name}"]
                metric.update(measure(scores.detach(), relevance, setting.top_k), ranked)
                self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True)
        means = {
            name: torch.where(counted, value, 0.0).sum() / counted.sum().clamp(min=1)
            for name, (value, counted) in values.items()
        }
        self._log_means({f"{stage}_{name}": (mean, values[name][1].sum()) for name, mean in means.items()})
        loss = means["loss"].float()
        return {"loss": loss, "num_tokens": there.sum().int()} if weighs else loss


def arguments_of_base(setting: Reranker, transformer: Mapping[str, Any], lora: Any, is_tied: bool) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` that training a reranker changes, by name.

    ``lora`` is what ``LoRA.of`` reads, or None; ``is_tied`` is ``share_embeddings_and_output_weights``.
    """
    has_layer = setting.tokens is None
    if lora is not None and has_layer:
        lora = LoRA.of(lora).with_saved("score")
    return {
        **vectors.arguments_of_base(transformer),
        "lora": lora,
        "share_embeddings_and_output_weights": is_tied and not has_layer,
    }


def _with_ids(setting: Reranker, path: str | None, vocab_size: int) -> Reranker:
    """Return settings with the ids of tokens that are given as texts, in the vocabulary of the model at ``path``."""
    tokens = setting.tokens
    if tokens is None or type(tokens[0]) is int:
        ids = tokens
    elif path is None:
        raise ValueError(f"tokens={tokens} are texts, and a new model has no tokenizer; give their ids")
    else:
        ids = _ids_of(tokens, path)
    for token in ids or []:
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens={tokens} has the id {token}, outside the vocabulary of vocab_size={vocab_size}")
    return replace(setting, tokens=ids)


def _ids_of(tokens: list[str], path: str) -> list[int]:
    try:
        tokenizer = auto_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"tokens={tokens} need the tokenizer of {path}: {error}; give their ids") from error
    found = tokenizer(tokens, add_special_tokens=False)["input_ids"]
    for token, ids in zip(tokens, found, strict=True):
        if len(ids) != 1:
            raise ValueError(
                f"tokens={tokens}: the tokenizer of {path} writes {token!r} as {len(ids)} tokens; choose words that"
                " are one token each, or give ids"
            )
    return [ids[0] for ids in found]
