# SPDX-License-Identifier: Apache-2.0
"""``MCoreEmbedding``: an ``MCoreGPT`` without an output layer that turns texts into vectors, on every layout.

The model, its layouts, checkpoints and adapters are ``MCoreGPT``'s; the last stage returns hidden states instead of
logits. ``data/embedding/texts.py`` describes a batch: neighbouring sequences are a query, its positive and its hard
negatives. ``layers/embedding.py`` pools the hidden states and computes the loss.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_mcore.config.embedding import Embedding, faults_of_batch, faults_with_model
from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.positions import PositionEmbedding
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.model import weighted_by_tokens
from lightning_mcore.data.embedding.texts import check_texts
from lightning_mcore.data.sampling import data_parallel_place
from lightning_mcore.hf.family import HIDDEN
from lightning_mcore.hf.sentence_folder import check_vectors
from lightning_mcore.hf.source import variant_name
from lightning_mcore.layers import embedding as vectors_of
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import is_packed
from lightning_mcore.layers.score import HiddenStates
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models.gpt import Batch, MCoreGPT
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.parallel.consensus import control_group
from lightning_mcore.parallel.groups import data_parallel_hosts, process_group

_SAMPLED = "as many batches, as Lightning's distributed sampler does"


@inherit_help(MCoreGPT)
class MCoreEmbedding(MCoreGPT):
    """A GPT that turns texts into vectors, trained on queries, texts that answer them and texts that do not.

    The vector of a text is pooled from the hidden states after the last norm, and has length 1. There is no output
    layer. Multi-token prediction is off. Router losses are added as in ``MCoreGPT``.

    Logs ``train_loss``, a mean over queries, and ``train_accuracy``, the fraction of queries that are more similar to
    their positive than to any other text. Validation logs ``val_loss``, ``val_accuracy`` and ``val_mrr``
    (mean reciprocal rank of the positive); testing logs the same names with ``test_``. Accuracies and ranks use
    full-size vectors. ``grad_norm`` and the speed are logged as by ``MCoreGPT``. :meth:`predict_step` returns the
    vectors.

    The arguments are those of :class:`~lightning_mcore.MCoreGPT` except ``loss_normalization``, plus ``embedding``.

    Args:
        embedding: Pooling, loss, hard negatives and prompts; :class:`~lightning_mcore.Embedding` has the settings.

    Raises:
        ValueError: A value is not allowed, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        A new model; ``MCoreEmbedding.from_pretrained(path)`` starts from a Hugging Face model.

        >>> from lightning_mcore import Embedding, MCoreEmbedding
        >>> sizes = {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
        >>> model = MCoreEmbedding(32000, seq_length=512, transformer=sizes, embedding=Embedding(negatives=1))
    """

    head = HIDDEN
    with_images = None

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        embedding: Embedding | dict[str, Any] = Embedding(),
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
        arguments = passed_on(locals(), "embedding")
        setting = Embedding.of(embedding)
        super().__init__(**arguments | arguments_of_base(transformer))
        self.hparams.pop("loss_normalization", None)  # not an argument of this class
        self.embedding = setting
        self.hparams["share_embeddings_and_output_weights"] = False
        self._name_family()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the loss is a mean over queries, without a loss_normalization
        cls,
        path: str,
        seq_length: int | None = None,
        transformer: dict[str, Any] | None = None,
        embedding: Embedding | dict[str, Any] = Embedding(),
        recipe: Recipe = Recipe(),
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        family: str | None = None,
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
        train_only: list[str] | None = None,
    ) -> "MCoreEmbedding":
        """Make a module from a Hugging Face model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreGPT.from_pretrained` except ``loss_normalization``, plus ``embedding`` as
        in the constructor. ``path`` may also be the folder of a ``SentenceTransformer`` with a decoder. The output
        layer of a language model is not read.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown, its config asks for something that is not supported, or a Sentence
                Transformers folder makes its vectors in another way.
        """
        check_vectors(path, Embedding.of(embedding))
        family = variant_name(path, family, HIDDEN)
        return cls._of_pretrained(**passed_on(locals()))

    def check_settings(self) -> None:
        """Check the settings as ``MCoreGPT`` does, and that they fit the vectors and a loss over queries.

        Raises:
            ValueError: A vector is shorter than a Matryoshka size, or router losses would have wrong weights.
        """
        super().check_settings()
        raise_first(faults_with_model(self.embedding, self._build_config()))

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        """Build one chunk; the last one returns hidden states."""
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if post_process:
            chunk.output_layer = HiddenStates(self.config)
        return chunk

    @property
    def output_size(self) -> int:
        """Columns of the output layer: none."""
        return 0

    def configure_model(self) -> None:
        """Build this rank's chunks as ``MCoreGPT`` does, and the group in which hosts exchange text counts."""
        super().configure_model()
        if self._host() is not None:
            data_parallel_hosts()
        elif dist.is_initialized():
            control_group()

    # ---- steps

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check a batch as ``MCoreGPT`` does, and that it has a query's texts next to each other.

        Raises:
            ValueError: The sequences are not such texts, a microbatch of training would have nothing to compare, or
                data-parallel ranks have different numbers of microbatches.
        """
        if self._trainer is None or not self._trainer.predicting:
            check_texts(batch, self.embedding)
            self._check_microbatches(batch)
        else:
            require_lengths(batch)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def _check_microbatches(self, batch: Batch) -> None:
        if self._trainer is None:
            return
        strategy, rows = self._trainer.strategy, len(batch["tokens"])
        most = getattr(strategy, "micro_batch_size", None) or rows
        copies = data_parallel_place(self._trainer)[1]
        # 10 rows in microbatches of 4 end with one of 2
        for part in () if is_packed(batch) else filter(None, (min(most, rows), rows % most)):
            raise_first(faults_of_batch(self.embedding, part, copies if self._trainer.training else 2))
        if self._trainer.training:
            self._compare_numbers(-(-rows // most), "microbatches in a batch", "a batch of as many rows")

    def on_validation_start(self) -> None:
        """Raise ValueError if data-parallel ranks, which compare the texts of a batch, differ in their batch counts."""
        super().on_validation_start()
        self._compare_numbers([*self.trainer.num_val_batches], "validation batches", _SAMPLED)

    def on_test_start(self) -> None:
        """Compare the numbers of batches, as :meth:`on_validation_start` does."""
        self._compare_numbers([*self.trainer.num_test_batches], "test batches", _SAMPLED)

    def _compare_numbers(self, own: Any, what: str, remedy: str) -> None:
        """Raise ValueError on data-parallel ranks of which one would wait for texts that others do not have."""
        if self._host() is None or not dist.is_initialized():
            return
        hosts = data_parallel_hosts()
        found: list[Any] = [None] * hosts.size()
        dist.all_gather_object(found, own, group=hosts)
        if any(number != found[0] for number in found):
            raise ValueError(
                f"the data-parallel ranks have {found} {what}, but they compare their texts in each; give every rank"
                f" {remedy}"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss over a microbatch's queries and its weight, the number of queries."""
        return self._step(batch, "train")

    def _evaluate(self, stage: str, batch: Batch) -> None:
        self._step(batch, stage)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the vector of each sequence, of length 1, fp32: [b, h], packed [b, k, h]."""
        vectors = functional.normalize(self._vectors(batch)[0], dim=1)
        return vectors.view(len(batch["tokens"]), -1, vectors.size(1)) if is_packed(batch) else vectors

    @property
    def _gives(self) -> str:
        return "MCoreEmbedding gives vectors"

    def _vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the vector of each sequence, [sequences, h] fp32, and the sequences' lengths, [sequences]."""
        states, inputs, lengths = self._of_sequences(batch)
        return vectors_of.pooled(states, inputs, lengths, self.embedding.pooling, self._cp_group), lengths

    def _step(self, batch: Batch, stage: str) -> Any:
        weighs = self._config_of_chunks().calculate_per_token_loss
        require_weights(batch, weighs)
        setting = self.embedding
        vectors, lengths = self._vectors(batch)
        there = lengths.view(-1, setting.texts)[:, 0] > 0
        there = there & self._counts_batch
        compared = vectors_of.of_all_ranks(vectors, there, setting.texts, self._data_parallel_groups())
        sizes = setting.matryoshka_sizes or [vectors.size(1)]
        losses = torch.stack([vectors_of.info_nce(compared, setting.temperature, size) for size in sizes]).sum(0)
        count = there.sum()
        ranks = vectors_of.reciprocal_ranks(compared.detached())
        values = {"loss": losses, "accuracy": (ranks == 1).float(), **({} if stage == "train" else {"mrr": ranks})}
        means = {name: (value * there).sum() / count.clamp(min=1) for name, value in values.items()}
        self._log_means({f"{stage}_{name}": (mean, count) for name, mean in means.items()})
        return {"loss": means["loss"], "num_tokens": count.int()} if weighs else means["loss"]

    def _data_parallel_groups(self) -> vectors_of.Groups | None:
        """Return the ranks that read other texts, on devices and hosts; under Lightning's own strategies all ranks."""
        if self._host() is not None:
            return process_group("dp"), data_parallel_hosts()
        world = dist.group.WORLD
        return None if self.trainer.world_size == 1 or world is None else (world, control_group())


def require_weights(batch: Batch, weighs: bool) -> None:
    """Raise ValueError for packed rows, whose numbers of queries differ, if the mean is not weighted by them."""
    if is_packed(batch) and not weighs:
        raise ValueError(
            "packed rows hold different numbers of queries, which calculate_per_token_loss=False would not weigh;"
            " set packing=False, or leave out calculate_per_token_loss and the losses of routers"
        )


def require_lengths(batch: Batch) -> None:
    """Raise ValueError for a padded batch that does not tell where its texts end, or that contains an empty text."""
    if not is_packed(batch) and "lengths" not in batch:
        raise ValueError(
            f"a padded batch with {', '.join(batch)} has no lengths, so it does not tell where its texts end; add"
            " lengths, the number of tokens of each row"
        )
    if is_packed(batch) or batch["lengths"].is_cuda or bool((batch["lengths"] > 0).all()):
        return
    raise ValueError(
        f"row {int((batch['lengths'] <= 0).nonzero()[0])} of a batch has lengths=0, so it has no text; leave it out"
    )


def arguments_of_base(transformer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` that embeddings change, by name.

    With router losses, which Megatron weights by tokens, the loss becomes a mean over microbatches.
    """
    fields = {**transformer, **({"mtp_num_layers": None} if "mtp_num_layers" in transformer else {})}
    if weighted_by_tokens(SimpleNamespace(**fields)):
        fields.setdefault("calculate_per_token_loss", False)
    return {"transformer": fields, "share_embeddings_and_output_weights": False}
