# SPDX-License-Identifier: Apache-2.0
"""LightningModules written for DDP in the shape of public tutorials; one line decides whose model they wrap.

Each of them runs with a model of transformers under Lightning's ``ddp``, and with ``hf_model`` on every layout.
:func:`train` is the function of a rank: it fits one of them for four batches and returns what was logged.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_mcore.hf import hf_model
from tests.support.hf_models import VOCAB_SIZE
from tests.support.toy import make_trainer

STEPS, ROWS = 4, 4
NEW_TOKENS = 5
RATE = 2.5e-4  # four steps of Adam move a weight by up to 1e-3
Batch = dict[str, Tensor]
_INPUTS = ("input_ids", "attention_mask")


class Texts(Dataset[Batch]):
    """Rows of different lengths, with a class for each row."""

    def __init__(self, size: int = 128) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(5, 20, (size,), generator=generator).tolist()
        self.rows = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        row = self.rows[index]
        return {"input_ids": row, "classes": row.sum() % 3}


def collate(samples: list[Batch]) -> Batch:
    """Pad rows on the right, as tokenizers do."""
    length = max(len(sample["input_ids"]) for sample in samples)
    batch = {}
    for name, filler in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        batch[name] = torch.full((len(samples), length), filler)
        for row, sample in enumerate(samples):
            values = torch.ones_like(sample["input_ids"]) if name == "attention_mask" else sample["input_ids"]
            batch[name][row, : len(values)] = values
    return {**batch, "classes": torch.stack([sample["classes"] for sample in samples])}


class FineTuning(pl.LightningModule):
    """Plain fine-tuning of a language model.

    Args:
        path: The model.
        ours: Whether the model is ours or that of transformers.
    """

    transformer_impl: Any = "auto"

    def __init__(self, path: str, ours: bool) -> None:
        super().__init__()
        self.path, self.ours = path, ours
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.ours:
            self.model = hf_model(self, self.path, transformer_impl=self.transformer_impl)
        elif not hasattr(self, "model"):
            self.model = _of_transformers("AutoModelForCausalLM", self.path)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch.pop("classes")
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        batch.pop("classes")
        first, second = self.model(**batch), self.model(batch["input_ids"], batch["attention_mask"])
        self.log("val_loss", first.loss, sync_dist=True)
        hits = (second.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()
        self.log("val_hits", hits.float(), reduce_fx="sum", sync_dist=True)
        self.log("val_difference", (first.logits - second.logits).abs().max(), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.accumulate_grad_batches == 1:  # or it is the mean of the window, where ddp logs each batch
            self.seen.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


class Distillation(FineTuning):
    """The student learns the logits of a frozen teacher, with a z-loss that keeps its own logits small."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "teacher"):
            self.teacher = _of_transformers("AutoModelForCausalLM", self.path).requires_grad_(False).eval()
            for parameter in self.teacher.parameters():
                parameter.mul_(1.1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        mask = batch["attention_mask"].bool()
        with torch.no_grad():
            taught = self.teacher(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[mask]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0][mask]
        divergence = functional.kl_div(logits.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="sum")
        z_loss = logits.logsumexp(-1).square().mean()
        loss = divergence / len(logits) + 1e-2 * z_loss
        self.log_dict({"train_loss": loss, "z_loss": z_loss}, sync_dist=True)
        return loss


class TwoCalls(FineTuning):
    """Calls the model twice in a step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        first, second = (self.model(batch["input_ids"][i::2]).logits for i in (0, 1))
        return (first - second).mean()


class Classification(FineTuning):
    """Three classes of rows; labels go to the model, as in the tutorials for GLUE."""

    num_labels = 3

    def configure_model(self) -> None:
        if self.ours:
            self.model = hf_model(self, self.path, head="sequence-classification", num_labels=self.num_labels)
        elif not hasattr(self, "model"):
            self.model = _of_transformers("AutoModelForSequenceClassification", self.path, num_labels=self.num_labels)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["classes"])
        self.log("train_loss", outputs.loss, sync_dist=True)
        return outputs.loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
        self.log("val_loss", functional.cross_entropy(logits, batch["classes"]), sync_dist=True)
        self.log("val_right", (logits.argmax(-1) == batch["classes"]).float().mean(), sync_dist=True)


class Reward(Classification):
    """A reward head learns which row of a pair is better; both go through the model in one call."""

    num_labels = 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.model(batch["input_ids"], attention_mask=batch["attention_mask"])["logits"].squeeze(-1)
        loss = -functional.logsigmoid(scores[0::2] - scores[1::2]).mean()
        self.log_dict({"train_loss": loss, "margin": (scores[0::2] - scores[1::2]).mean()}, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = (self.model(**{k: v[i::2] for k, v in batch.items() if k in _INPUTS}).logits for i in (0, 1))
        self.log("val_right", (first > second).float().mean(), sync_dist=True)


class Embedding(FineTuning):
    """Rows that share a class come closer: a contrastive loss on the mean of the last hidden states."""

    def configure_model(self) -> None:
        if self.ours:
            self.model = hf_model(self, self.path, head="hidden-states")
        elif not hasattr(self, "model"):
            self.model = _of_transformers("AutoModel", self.path)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        vectors = self.embed(batch)
        near = (batch["classes"][:, None] == batch["classes"][None]).float()
        loss = functional.binary_cross_entropy_with_logits(10 * vectors @ vectors.T, near)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_length", self.embed(batch).sum(-1).abs().mean(), sync_dist=True)

    def embed(self, batch: Batch) -> Tensor:
        mask = batch["attention_mask"][..., None]
        states = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _of_transformers(name: str, path: str, **arguments: Any) -> Any:
    import transformers

    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32, **arguments)


KINDS = {
    "fine-tuning": FineTuning,
    "distillation": Distillation,
    "classification": Classification,
    "reward": Reward,
    "embedding": Embedding,
}
REFUSED = {"two calls": TwoCalls}


def train(kind: str, path: str, strategy: Any, **arguments: Any) -> dict[str, Any]:
    """Train for some batches on this rank, validate, and return the values that were logged.

    Args:
        kind: Name of a module in ``KINDS``.
        path: The model.
        strategy: Arguments of ``MCoreStrategy``; a name for Lightning's strategies with the model of transformers.
        arguments: More arguments of the Trainer.
    """
    pl.seed_everything(1, verbose=False)
    module = {**KINDS, **REFUSED}[kind](path, ours=isinstance(strategy, dict))
    loader = DataLoader(Texts(), ROWS, collate_fn=collate)
    trainer = make_trainer(strategy, limit_train_batches=STEPS, limit_val_batches=2, **arguments)
    trainer.fit(module, loader, loader)
    values = trainer.callback_metrics.items()
    found = {name: float(value) for name, value in values if name.startswith("val") or module.seen}
    return found | {f"loss {step}": loss for step, loss in enumerate(module.seen)}


def train_each(runs: dict[str, tuple[str, str, Any, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Run :func:`train` with the arguments of each entry, one after another on the same ranks."""
    return {name: train(*run, **arguments) for name, (*run, arguments) in runs.items()}


class Frozen(FineTuning):
    """The same with a frozen embedding, by the names of transformers."""

    def configure_model(self) -> None:
        super().configure_model()
        for names, parameter in self.model.hf_named_parameters():
            if any("embed_tokens" in name for name in names):
                parameter.requires_grad_(False)

    def on_train_start(self) -> None:
        self.before = [parameter.detach().clone() for parameter in self.parameters()]


def freeze_each(runs: dict[str, tuple[str, Any]]) -> dict[str, tuple[set[str], set[str]]]:
    """Train modules with a frozen embedding; return the names of this rank's weights, and of those that changed."""
    found = {}
    for name, (path, strategy) in runs.items():
        module = Frozen(path, ours=True)
        trainer = make_trainer(strategy, limit_train_batches=2, accumulate_grad_batches=2)
        trainer.fit(module, DataLoader(Texts(), ROWS, collate_fn=collate))
        names_of = {id(parameter): names for names, parameter in module.model.hf_named_parameters()}
        weights = [(names_of[id(parameter)], parameter) for parameter in module.parameters()]  # each has names
        kept = zip(weights, module.before, strict=True)
        changed = {name for (names, parameter), old in kept if not torch.equal(parameter, old) for name in names}
        found[name] = {each for names, _ in weights for each in names}, changed
    return found


class WatchRows(pl.Callback):
    """Keeps the rows of the calls that the layers see."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.ours:
            chunk = pl_module.model.pipeline.chunks[0]
            chunk.register_forward_pre_hook(lambda _, args: self.rows.add(len(args[0])))


def validate_in_parts(runs: dict[str, tuple[str, str, Any]]) -> dict[str, tuple[dict[str, float], set[int]]]:
    """Validate each module on batches of at most ten rows; return what it logged, and the rows of its calls."""
    found = {}
    for name, (kind, path, strategy) in runs.items():
        pl.seed_everything(1, verbose=False)
        module, watch = KINDS[kind](path, ours=isinstance(strategy, dict)), WatchRows()
        loader = DataLoader(Texts(24), 10, collate_fn=collate)
        [values] = make_trainer(strategy, callbacks=[watch]).validate(module, loader, verbose=False)
        found[name] = values, watch.rows
    return found


class Writer(FineTuning):
    """Continues prompts in ``validation_step``."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.widths: list[int] = []
        if self.ours:
            self.model.pipeline.chunks[0].register_forward_pre_hook(self._count, with_kwargs=True)
        prompts: Any = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "pad_token_id": 0}
        self.written = self.model.generate(**prompts, max_new_tokens=NEW_TOKENS)
        widths = list(self.widths)
        torch.manual_seed(self.global_rank)
        self.sampled = self.model.generate(**prompts, max_new_tokens=4, do_sample=True)
        self.widths = widths

    def _count(self, chunk: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        self.widths.append(args[0].size(1))


def write_each(runs: dict[str, tuple[str, Any]]) -> dict[str, tuple[Tensor, Tensor, list[int]]]:
    """Let a model on each layout continue two prompts; return the tokens and the widths of the calls."""
    found = {}
    for name, (path, strategy) in runs.items():
        module = Writer(path, ours=isinstance(strategy, dict))
        batch = collate([Texts()[0], Texts()[1]])
        lengths = batch["attention_mask"].sum(1)
        for part in ("input_ids", "attention_mask"):  # tokenizers pad prompts on the left
            rows = zip(batch[part], lengths.tolist(), strict=True)
            batch[part] = torch.stack([row.roll(len(row) - length) for row, length in rows])
        trainer = make_trainer(strategy)
        trainer.validate(module, DataLoader([batch], batch_size=None), verbose=False)
        found[name] = (module.written, module.sampled, module.widths)
    return found


class Scorer(FineTuning):
    """Continues prompts in ``validation_step``, and computes the log-probabilities of the new tokens once more."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        prompts = batch["input_ids"]
        written = self.model.generate(
            prompts, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        self.new = written.sequences[:, prompts.size(1) :]
        self.told = torch.stack(written.logits, dim=1).log_softmax(-1).gather(-1, self.new[..., None])[..., 0]
        # Logits after token n are of token n + 1
        logits = self.model(written.sequences).logits[:, prompts.size(1) - 1 : -1]
        self.found = logits.float().log_softmax(-1).gather(-1, self.new[..., None])[..., 0]


def score_each(runs: dict[str, tuple[str, Any]]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return the tokens that a model on each layout adds, and their log-probabilities, told and found again."""
    found = {}
    for name, (path, strategy) in runs.items():
        module = Scorer(path, ours=isinstance(strategy, dict))
        prompts = {"input_ids": torch.randint(3, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(6))}
        make_trainer(strategy).validate(module, DataLoader([prompts], batch_size=None), verbose=False)  # type: ignore[arg-type]
        found[name] = module.new, module.told, module.found
    return found
