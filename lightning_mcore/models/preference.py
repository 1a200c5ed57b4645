# SPDX-License-Identifier: Apache-2.0
"""``MCorePreference``: an ``MCoreGPT`` that learns from preferences between answers, on every layout.

The model, its layouts, checkpoints and adapters are ``MCoreGPT``'s; only the batch and the loss differ.
``data/preference/pairs.py`` describes a batch: neighbouring sequences are the two answers of a pair. The
tensor-parallel ranks compute token losses from their parts of the vocabulary, and the losses are summed per answer
(``layers/losses.py``), so a row of logits is never assembled or copied to fp32. A step's loss
(``preference_losses.py``) is the mean over the pairs of all microbatches and ranks.

``reference.py`` computes the log-probabilities under the reference model before training. With LoRA, each step may
instead run the model once more with its adapters switched off.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_mcore.config.inherited_arguments import inherit_help, passed_on
from lightning_mcore.config.lora import LoRA
from lightning_mcore.config.positions import PositionEmbedding
from lightning_mcore.config.preference import Preference, can_be_off, faults_with_model
from lightning_mcore.config.rules import raise_first
from lightning_mcore.config.rules.model import weighted_by_tokens
from lightning_mcore.data.preference.pairs import check_pairs
from lightning_mcore.hf.family import SCORING
from lightning_mcore.hf.source import check_scores, variant_name
from lightning_mcore.layers.adapted_layers import adapters_off
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.inputs import ModelInputs, is_packed
from lightning_mcore.layers.losses import sample_sums, tail_weights
from lightning_mcore.layers.metrics import MeansOfKinds, RunningMean
from lightning_mcore.layers.score import ScoreLayer, last_scores
from lightning_mcore.layers.spec import TransformerImpl
from lightning_mcore.models import preference_losses as losses_of
from lightning_mcore.models.generation import evaluating
from lightning_mcore.models.gpt import Batch, MCoreGPT
from lightning_mcore.models.recipe import Recipe
from lightning_mcore.models.reference import compute_reference

_REFERENCE = "preference_reference"  # key of a checkpoint
_OFF: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "mtp_num_layers": None}
_KINDS = ("chosen", "rejected")
Values = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Answers:
    """A batch's answers, two in a row; the same on every context-parallel rank.

    ``logps`` are sums over an answer's tokens, -1 where there is no answer; in a reward model, they are its scores.
    """

    logps: Tensor  # [n, 2] fp64
    lengths: Tensor  # [n, 2] fp64, tokens of each answer, at least 1
    reference: Tensor | None  # [n, 2] fp64, log-probabilities under the reference model
    there: Tensor  # [n] bool, False for empty places at the end of packed rows

    @property
    def means(self) -> Tensor:
        """[n, 2] log-probabilities as means over tokens."""
        return self.logps / self.lengths

    def mean(self, values: Tensor, of: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean of [n] values over the pairs that are there (and ``of`` [n] bool), and their number."""
        counted = self.there if of is None else self.there & of
        count = counted.sum()
        return torch.where(counted, values, 0.0).sum() / count.clamp(min=1), count


@inherit_help(MCoreGPT)
class MCorePreference(MCoreGPT):
    """A GPT trained on preferences between answers: DPO and its variants, ORPO, SimPO, KTO, and reward models.

    Dropout and multi-token prediction are off: dropout would add noise to the ratio of the trained model and its
    reference, and multi-token prediction has no part in it. The losses of routers are added as in ``MCoreGPT``.

    Logs ``train_loss``, ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins`` (chosen minus rejected),
    ``rewards/accuracies`` (fraction of pairs with a margin above 0), ``logps/chosen`` and ``logps/rejected`` (not for
    reward models, which have scores); for ORPO also ``sft_loss`` and ``odds_ratio_loss``, for KTO ``kl``. In validation
    and testing the names begin with ``val_`` and ``test_``. A reward is ``beta`` times the log ratio; without a
    reference, ``beta`` times the log-probability. For IPO, ORPO and SimPO, log-probabilities are means over an answer's
    tokens, otherwise sums. In KTO training, the values of chosen and rejected examples cover all steps since they were
    last logged, because a batch may contain only one kind. ``grad_norm`` and the speed are logged as by ``MCoreGPT``.

    With ``Preference("reward")``, the output layer gives each token one score, and a reward is the score of an answer's
    last token; batches must include that token (``with_last_token``). :meth:`from_pretrained` accepts transformers'
    ``*ForSequenceClassification`` with one label, or a language model, whose score layer starts from random values;
    exports are ``*ForSequenceClassification``. :meth:`predict_step` returns the scores. With LoRA, the score layer is
    trained in full.

    The arguments are those of :class:`~lightning_mcore.MCoreGPT` without ``loss_normalization``, and ``preference``.

    Args:
        preference: The loss and its reference; :class:`~lightning_mcore.Preference` has the settings.

    Raises:
        ValueError: A value is not allowed, or two contradict each other.
        TypeError: A value has the wrong type.

    Examples:
        A new model; ``MCorePreference.from_pretrained(path, preference=...)`` starts from a Hugging Face model.

        >>> from lightning_mcore import MCorePreference, Preference
        >>> sizes = {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16}
        >>> model = MCorePreference(32000, seq_length=2048, transformer=sizes, preference=Preference("simpo", beta=2.0))
    """

    with_images = None

    def __init__(
        self,
        vocab_size: int,
        seq_length: int,
        transformer: dict[str, Any],
        preference: Preference | dict[str, Any] = Preference(),
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
        arguments = passed_on(locals(), "preference")
        setting = Preference.of(preference)
        off = [f"{name}={transformer[name]}" for name in _OFF if transformer.get(name)]
        if off:
            rank_zero_info(f"training on preferences leaves out {' and '.join(off)}")
        is_tied = share_embeddings_and_output_weights
        super().__init__(**arguments | arguments_of_base(setting, transformer, lora, is_tied))
        self.hparams.pop("loss_normalization", None)  # not an argument of this class
        self.preference = setting
        if setting.gives_scores:
            self.hparams["share_embeddings_and_output_weights"] = False
            self._name_family()
        self.reference_mark: str | None = None  # tells the reference of this run from any other
        if self.preference.bco_weight:
            self.baseline = RunningMean()
        if self.preference.loss == "kto":
            self.metrics.update({f"{stage}_kinds": MeansOfKinds() for stage in ("train", "val", "test")})

    @classmethod
    def from_pretrained(  # type: ignore[override]  # the loss is a mean over pairs, without a loss_normalization
        cls,
        path: str,
        seq_length: int | None = None,
        transformer: dict[str, Any] | None = None,
        preference: Preference | dict[str, Any] = Preference(),
        recipe: Recipe = Recipe(),
        make_vocab_size_divisible_by: int = 128,
        transformer_impl: TransformerImpl = "auto",
        family: str | None = None,
        lora: LoRA | dict[str, Any] | str | None = None,
        adapters: list[str] | None = None,
        train_only: list[str] | None = None,
    ) -> "MCorePreference":
        """Make a module from a Hugging Face model, and start from its weights on any layout.

        The arguments are those of :meth:`MCoreGPT.from_pretrained` without ``loss_normalization``, and ``preference``
        as in the constructor.

        Raises:
            FileNotFoundError: There is no such model, or no such adapter.
            ValueError: Its family is unknown, or its config asks for something that is not supported.
        """
        if Preference.of(preference).gives_scores:
            check_scores(path)
            family = variant_name(path, family, SCORING)
        return cls._of_pretrained(**passed_on(locals()))

    def check_settings(self) -> None:
        """Check the settings as ``MCoreGPT`` does, and that they fit a loss over pairs.

        Raises:
            ValueError: Router losses would have wrong weights, or the model cannot become the reference.
        """
        super().check_settings()
        raise_first(faults_with_model(self.preference, self.lora, self._build_config()))

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTChunk:
        """Build one chunk; in a reward model, the output layer is a score layer."""
        chunk = super().build_chunk(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        if self.preference.gives_scores and post_process:
            chunk.output_layer = ScoreLayer(self.config)
        return chunk

    # ---- the reference

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's log-probabilities are computed before training, not in each step."""
        preference = self.preference
        if not preference.needs_reference or preference.precompute_reference is False:
            return False
        # Another model as reference, or a fully trained model, is not available during a step
        return bool(preference.precompute_reference or preference.reference) or not self.adapters_can_be_off

    @property
    def adapters_can_be_off(self) -> bool:
        """Whether the model without its adapters is the model that training began with."""
        return can_be_off(self.lora)

    @property
    def head(self) -> str:  # type: ignore[override]  # it depends on the settings
        """Suffix of the family's name: ``SCORING`` with a score layer."""
        return SCORING if self.preference.gives_scores else ""

    @property
    def output_size(self) -> int:
        """Columns of the output layer: one in a reward model, else the padded vocabulary."""
        return 1 if self.preference.gives_scores else super().output_size

    def setup(self, stage: str) -> None:
        """Forget the reference of an earlier run: a new one begins with other weights."""
        super().setup(stage)
        if stage == "fit" and self.trainer.global_step == 0:
            self.reference_mark = None

    def on_fit_start(self) -> None:
        """Compute the reference's log-probabilities of all pairs that the data module offers; collective."""
        self._compute_reference()

    def on_validation_start(self) -> None:
        """Compute the reference before a validation outside training; collective."""
        super().on_validation_start()
        self._compute_reference()

    def on_test_start(self) -> None:
        """Compute the reference before testing; collective."""
        self._compute_reference()

    def _compute_reference(self) -> None:
        if self.precomputes_reference:
            compute_reference(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Add the reference's log-probabilities to a batch, with the adapters switched off."""
        super().on_train_batch_start(batch, batch_idx)
        self._add_reference(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log KTO's values for its two kinds of examples, over the steps since they were last logged."""
        has_stepped = self.trainer.global_step != self._stepped
        super().on_train_batch_end(outputs, batch, batch_idx)
        if has_stepped and self.preference.loss == "kto":
            kinds = self._kinds("train")
            of_rewards, of_logps = kinds.means(
                self.trainer.strategy.reduce(kinds.sums.clone(), reduce_op="sum")
            ).float()
            self.log_dict({f"rewards/{kind}": value for kind, value in zip(_KINDS, of_rewards, strict=True)})
            self.log_dict({f"logps/{kind}": value for kind, value in zip(_KINDS, of_logps, strict=True)})
            self.log("rewards/margins", of_rewards[0] - of_rewards[1])
            every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
            if every and self.trainer.global_step % every == 0:
                kinds.reset()

    def _kinds(self, stage: str) -> MeansOfKinds:
        kinds = self.metrics[f"{stage}_kinds"]
        assert isinstance(kinds, MeansOfKinds)
        return kinds

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the reference's log-probabilities to a batch, with the adapters switched off."""
        super().on_validation_batch_start(batch, batch_idx, dataloader_idx)
        self._add_reference(batch)

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the reference's log-probabilities to a batch, with the adapters switched off."""
        super().on_test_batch_start(batch, batch_idx, dataloader_idx)
        self._add_reference(batch)

    def _add_reference(self, batch: Batch) -> None:
        if not self.preference.needs_reference or "reference_logps" in batch:
            return
        if self.precomputes_reference:
            raise ValueError(
                f"the loss {self.preference.loss!r} needs a reference, and the batch has no reference_logps; use a data"
                " module with pair_sources(), put reference_logps into the batch, or train LoRA adapters"
            )
        with self.as_reference():
            batch["reference_logps"] = self.run_forward("answer_logps", batch)

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """Run the model without its adapters, in evaluation mode, inside the ``with`` block."""
        with adapters_off(self), evaluating(self):
            yield

    def answer_logps(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return each answer's log-probability, a sum over its tokens, fp64: [2n], packed [b, k]."""
        losses, inputs = self.token_losses(batch)
        assert inputs.loss_mask is not None
        logps = -sample_sums(losses * inputs.loss_mask, inputs, self._cp_group)
        return logps if inputs.packed is None else logps.view(len(batch["tokens"]), -1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record which reference the run uses."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[_REFERENCE] = self.reference_mark

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read which reference the run uses."""
        super().on_load_checkpoint(checkpoint)
        self.reference_mark = checkpoint.get(_REFERENCE, self.reference_mark)

    # ---- steps

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Check a batch as ``MCoreGPT`` does, and that it holds pairs.

        Raises:
            ValueError: The sequences are not pairs, or lack entries that the loss needs.
        """
        if self._trainer is None or not self._trainer.predicting:
            check_pairs(batch, self.preference.loss)
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the mean loss over a microbatch's pairs and its weight, the number of pairs."""
        return self._step(batch, "train_loss", "")

    def _evaluate(self, stage: str, batch: Batch) -> None:
        self._step(batch, f"{stage}_loss", f"{stage}_")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return what ``MCoreGPT`` does; a reward model returns each sequence's score, fp64: [2n], packed [b, k]."""
        if not self.preference.gives_scores:
            return super().predict_step(batch, batch_idx)
        scores, _ = self._scores(batch)
        return scores.view(len(batch["tokens"]), -1) if is_packed(batch) else scores

    @property
    def _gives(self) -> str | None:
        return "a reward model gives scores" if self.preference.gives_scores else None

    def _step(self, batch: Batch, loss_name: str, prefix: str) -> Any:
        weighs = self._config_of_chunks().calculate_per_token_loss
        if is_packed(batch) and not weighs:
            raise ValueError(
                "packed rows hold different numbers of pairs, which calculate_per_token_loss=False would not weigh;"
                " pad the pairs instead, or leave out calculate_per_token_loss and the losses of routers"
            )
        rows = len(batch["tokens"])
        if not is_packed(batch) and rows % 2:
            raise ValueError(f"a microbatch has {rows} rows, which cuts a pair apart; choose an even micro_batch_size")
        if self.preference.gives_scores:
            answers = self._scored(batch)
            each, values = self._rewards(answers)
        else:
            answers = self._answers(*self.token_losses(batch), batch)
            is_single = self.preference.kind.reads == "examples"
            each, values = self._kto(answers, batch["desirable"], prefix) if is_single else self._pairs(answers)
        # Microbatches of 3 and 1 pairs with mean losses 0.6 and 0.2: weighed by their pairs, the step's loss is 0.5
        mean, count = answers.mean(each)
        self._log_means({loss_name: (mean, count), **{prefix + name: value for name, value in values.items()}})
        return {"loss": mean.float(), "num_tokens": count.int()} if weighs else mean.float()

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each sequence's score, which its last token has, and the sequences' lengths, both [sequences]."""
        scores, inputs, lengths = self._of_sequences(batch)
        return last_scores(scores.squeeze(-1), inputs, lengths, self._cp_group), lengths

    def _scored(self, batch: Batch) -> _Answers:
        scores, lengths = self._scores(batch)
        lengths = lengths.view(-1, 2)
        return _Answers(scores.view(-1, 2), lengths.clamp(min=1), None, (lengths > 0).all(dim=1))

    def _rewards(self, answers: _Answers) -> tuple[Tensor, Values]:
        """Return a reward model's loss per pair, [n], and the values to log with their weights."""
        chosen, rejected = answers.logps.unbind(1)
        each = losses_of.reward_model_loss(chosen, rejected, self.preference.center_weight)
        return each, _reward_values(answers, answers.logps)

    def _answers(self, losses: Tensor, inputs: ModelInputs, batch: Batch) -> _Answers:
        mask, group = inputs.loss_mask, self._cp_group
        assert mask is not None
        lengths = sample_sums(mask, inputs, group)
        alpha = self.preference.ld_alpha
        weights = mask if alpha is None else mask * tail_weights(inputs, lengths, alpha, group)
        logps = -sample_sums(losses * weights, inputs, group)
        logps = torch.where(lengths > 0, logps, -1.0).view(-1, 2)
        reference = batch["reference_logps"].view(-1, 2) if self.preference.needs_reference else None
        lengths = lengths.view(-1, 2)
        return _Answers(logps, lengths.clamp(min=1), reference, (lengths > 0).all(dim=1))

    def _pairs(self, answers: _Answers) -> tuple[Tensor, Values]:
        """Return the loss per pair, [n], and the values to log with their weights."""
        setting, beta = self.preference, self.preference.beta
        is_mean = setting.kind.is_of_means
        scores = answers.means if is_mean else answers.logps
        # Without a reference (ORPO, SimPO), a reward is beta times the log-probability itself
        ratios = scores
        if answers.reference is not None:
            ratios = scores - (answers.reference / answers.lengths if is_mean else answers.reference)
        chosen, rejected = scores.unbind(1)
        each = losses_of.OF_PAIRS[setting.loss](setting, chosen, rejected, ratios[:, 0] - ratios[:, 1])
        values: Values = {}
        if setting.loss == "orpo":
            odds = losses_of.odds_ratio_loss(chosen, rejected)
            values |= {"sft_loss": answers.mean(-chosen), "odds_ratio_loss": answers.mean(odds)}
        rewards = beta * ratios
        if setting.bco_weight:
            term = losses_of.bco_term(rewards[:, 0], rewards[:, 1], self._baseline(rewards.detach(), answers))
            each = (each + setting.bco_weight * term) / (1 + setting.bco_weight)
        if setting.sft_weight:
            each = each - setting.sft_weight * answers.means[:, 0]
        return each, values | {
            **_reward_values(answers, rewards),
            "logps/chosen": answers.mean(chosen),
            "logps/rejected": answers.mean(rejected),
        }

    def _baseline(self, rewards: Tensor, answers: _Answers) -> Tensor:
        """Return the mean of all rewards so far; in training including this microbatch's on all data-parallel ranks.

        ``rewards`` are [n, 2].
        """
        if self.training:
            total = torch.where(answers.there[:, None], rewards, 0.0).sum()
            sums = torch.stack([total, 2 * answers.there.sum().to(total)])
            self.baseline.update(*self.trainer.strategy.reduce(sums, reduce_op="sum"))
        return self.baseline.mean

    def _kto(self, answers: _Answers, desirable: Tensor, prefix: str) -> tuple[Tensor, Values]:
        """Return the loss per example, [n], and the values to log with their weights, except the values of a window."""
        setting = self.preference
        assert answers.reference is not None
        # A pair is an example's answer and another example's, which estimates the divergence
        is_good, there = desirable.view(-1, 2)[:, 0], answers.there
        ratios = answers.logps - answers.reference
        rewards, logps = setting.beta * ratios[:, 0], answers.logps[:, 0]
        number = there.sum()
        sums = torch.stack([torch.where(there, ratios[:, 1], 0.0).sum(), number.to(ratios)]).detach()
        if not self._counts_batch:
            sums = sums * 0
        divergence, examples = self.trainer.strategy.reduce(sums, reduce_op="sum")
        kl = (divergence / examples.clamp(min=1)).clamp(min=0)
        each = losses_of.kto_loss(
            ratios[:, 0], is_good, kl, setting.beta, setting.desirable_weight, setting.undesirable_weight
        )
        self._kinds(prefix.rstrip("_") or "train").update(rewards, logps, is_good, there)
        values: Values = {"kl": (kl, number)}
        if prefix:
            self.log(f"{prefix}rewards/margins", self._kinds(prefix.rstrip("_")), on_step=False, on_epoch=True)
            for kind, of in zip(_KINDS, (is_good, ~is_good), strict=True):
                values[f"rewards/{kind}"] = answers.mean(rewards, of)
                values[f"logps/{kind}"] = answers.mean(logps, of)
        return each, values


def _reward_values(answers: _Answers, rewards: Tensor) -> Values:
    """Return what is logged about the rewards of pairs, [n, 2]."""
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "rewards/chosen": answers.mean(rewards[:, 0]),
        "rewards/rejected": answers.mean(rewards[:, 1]),
        "rewards/margins": answers.mean(margins),
        "rewards/accuracies": answers.mean((margins > 0).to(margins)),
    }


def arguments_of_base(setting: Preference, transformer: Mapping[str, Any], lora: Any, is_tied: bool) -> dict[str, Any]:
    """Return the arguments of ``MCoreGPT`` that training on preferences changes, by name.

    ``lora`` is what ``LoRA.of`` reads, or None; ``is_tied`` is ``share_embeddings_and_output_weights``.
    """
    is_reward = setting.gives_scores
    if lora is not None:
        # Dropout in adapters would differ between the trained model and its reference
        lora = replace(LoRA.of(lora), lora_dropout=0.0)
        if is_reward:
            lora = lora.with_saved("score")
    return {
        "transformer": _without_noise(transformer),
        "lora": lora,
        "share_embeddings_and_output_weights": is_tied and not is_reward,
    }


def _without_noise(transformer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's fields without dropout and multi-token prediction.

    A loss of routers, which Megatron weighs by tokens, makes the loss a mean over microbatches.
    """
    fields = {**transformer, **{name: value for name, value in _OFF.items() if name in transformer}}
    if weighted_by_tokens(SimpleNamespace(**fields)):
        fields.setdefault("calculate_per_token_loss", False)
    return fields
