# SPDX-License-Identifier: Apache-2.0
"""Three training steps of a Hugging Face model: by transformers in the parent, by ``MCoreGPT`` on a layout's ranks.

Both sides give the logits before them, and the loss and the gradient of every tensor in the last step, which depend on
all updates; gradients have their names on the disk. transformers keeps the
experts of a layer as one tensor in memory, so :func:`reference` takes them apart. Here a rank says of each rectangle of
a gradient that it holds where it lies in a Hugging Face tensor, by the rules that weights are exchanged by.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT
from lightning_mcore.config.field_homes import MODULE_FIELDS
from lightning_mcore.hf import find_family
from lightning_mcore.hf.family import complete_fields
from lightning_mcore.hf.pretrained import pieces_of_module
from lightning_mcore.hf.weight_map import WeightMap
from lightning_mcore.hf.weight_rules import index_of
from lightning_mcore.layers.sampling import gather_sequence
from lightning_mcore.parallel.groups import process_group
from tests.parity.global_tensors import whole_gradients
from tests.support.hf_models import (
    UNKNOWN_TO_TRANSFORMERS,
    VARIANTS,
    VOCAB_SIZE,
    auto_model,
    config_content,
    read_tensors,
    tiny_folder,
)
from tests.support.layouts import Layout
from tests.support.toy import make_trainer

ROWS, LENGTH = 2, 32
LOGITS, LOSS, GRADIENT = 1e-4, 1e-5, 1e-4  # the first two absolute, the third of the greatest value of a tensor
STEPS, LEARNING_RATE = 3, 0.002
MULTI_TOKEN_SCALE = 0.5
_OF_INDEXERS = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
KEPT = ("e_score_correction_bias", "mlp.expert_bias", "act_fn.beta", "act_fn.eps")
KEPT += tuple(f"self_attn.indexer.{name}" for name in _OF_INDEXERS)

Batch = dict[str, Tensor]


def text() -> Batch:
    """Return the rows of the step; the first fifth of the labels of each count for nothing.

    There is no token 0, which pads: transformers keeps its embedding as it is.
    """
    tokens = torch.randint(1, VOCAB_SIZE, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    labels = tokens[:, 1:].clone()
    labels[:, : LENGTH // 5] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


@dataclass(frozen=True)
class Reference:
    """What transformers computes.

    Attributes:
        logits: [b, s, v], before any update.
        loss: Mean over the tokens that count, in the last step.
        gradients: Of the last step, by the name of the tensor on the disk. A buffer has none, and stands there itself:
            no step changes it.
    """

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


@functools.cache
def reference(name: str) -> Reference:
    """Run the steps of a tiny model, or of one of its variants, with transformers in fp32."""
    folder = tiny_folder(name)
    model = load_model(name).train()
    batch, parameters, first = text(), dict(model.named_parameters()), None
    extra = _MultiToken(model) if getattr(model.config, "num_nextn_predict_layers", 0) else None
    parameters |= {} if extra is None else extra.parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(batch["tokens"], output_hidden_states=True)
        first = output.logits.detach() if first is None else first
        loss = total = _mean(output.logits, batch["labels"])
        if extra is not None:
            total = loss + MULTI_TOKEN_SCALE * extra.loss(batch, output.hidden_states[-1])
        total.backward()
        if step < STEPS - 1:
            optimizer.step()
    kept = {key: tensor for key, tensor in read_tensors(folder) if key.endswith(KEPT)}
    assert first is not None
    return Reference(first, loss.item(), on_disk(name, parameters) | kept)


@functools.cache
def reference_model(name: str) -> Any:
    """Load a tiny model, or one of its variants, with transformers in fp32, once; nothing trains it."""
    return load_model(name).eval()


def load_model(name: str) -> Any:
    """Load a tiny model, or one of its variants, with transformers in fp32."""
    from transformers import AutoConfig

    folder = tiny_folder(name)
    family = VARIANTS.get(name, (name,))[0]
    content = config_content(folder)
    config = AutoConfig.for_model(**{**content, "model_type": UNKNOWN_TO_TRANSFORMERS.get(family, family)})
    keys: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return auto_model().from_pretrained(folder, config=config, **keys)


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _MultiToken:
    """The layers for multi-token prediction as transformers makes and reads them; the sum of their losses is ours."""

    def __init__(self, model: Any) -> None:
        from transformers.modeling_layers import MtpModel

        self.first = model.config.num_hidden_layers
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self.first}\..*"]  # it reads those
        self.model = MtpModel.from_pretrained(model)

    def loss(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Return the sum over the tokens that count, divided by how many count for the next token, as Megatron does."""
        tokens, labels = batch["tokens"], batch["labels"]
        counted, total = (labels >= 0).sum(), torch.zeros(())
        for number in range(len(self.model.layers)):
            tokens, labels, hidden = tokens[:, 1:], labels[:, 1:], hidden[:, :-1]
            hidden = self._layer(number, tokens, hidden)
            logits = self.model.shared_head(hidden)
            total = total + functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted
        return total / len(self.model.layers)

    def _layer(self, number: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Run one layer on tokens [b, s] and hidden states [b, s, h], as ``MtpModel.forward`` does when it drafts."""
        model, positions = self.model, torch.arange(tokens.size(1))[None]
        embeddings = model.embed_tokens(tokens)
        masks = model.create_masks_for_mtp_layer(number, embeddings, None, positions)
        angles = model.rotary_emb(embeddings, position_ids=positions)
        # By position: the last argument, the cache, has other names in other releases.
        hidden = model.layers[number](embeddings, hidden, angles, masks["attention_mask"], positions, None)
        return model.shared_post_norm(hidden) if model.use_shared_post_norm else hidden

    def parameters(self) -> dict[str, Tensor]:
        """Return its own parameters by their names on the disk."""
        found = {}
        for name, parameter in self.model.named_parameters():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
                found[f"model.layers.{self.first + int(number)}.{rest}"] = parameter
        return found


def on_disk(name: str, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients with experts taken apart, under the names of the disk."""
    family = VARIANTS[name][0] if name in VARIANTS else name
    found: dict[str, Tensor] = {}
    for key, parameter in parameters.items():
        if key.endswith(KEPT):
            continue
        gradient = parameter.grad
        assert gradient is not None, key
        key = key.replace("model.", "backbone.", 1) if family == "nemotron_h" else key
        stem, _, last = key.rpartition(".")
        if family.startswith("granitemoe") and "block_sparse_moe" in key:
            found[_granite(key)] = gradient
            continue
        if last not in ("gate_up_proj", "up_proj", "down_proj") or family in ("gpt_oss", "mistral4", "llama4_text"):
            found[key] = gradient
            continue
        for expert, rows in enumerate(gradient):
            parts = {"gate_proj": rows.chunk(2)[0], "up_proj": rows.chunk(2)[1]}
            for part, value in (parts if last == "gate_up_proj" else {last: rows}).items():
                found[f"{stem}.{expert}.{part}.weight"] = value
    if family == "kimi_linear":
        return {name: value for key, gradient in found.items() for name, value in _kimi(key, gradient)}
    if family in ("mixtral", "minimax_m2"):
        for old, new in (("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            found = {key.replace(f".{old}.", f".{new}."): value for key, value in found.items()}
    return found


def _kimi(key: str, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names on the hub of a tensor of Kimi Linear, which has three convolutions in one, and their parts."""
    key = key.replace(".forget_gate.", ".")
    if re.search(r"\.mlp\.(gate\.|experts|shared)", key):
        key = key.replace(".mlp.", ".block_sparse_moe.")
    if ".block_sparse_moe.experts." in key:
        for old, new in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            key = key.replace(f".{old}.", f".{new}.")
    if ".conv1d." not in key:
        yield key, gradient
        return
    for part, rows in zip("qkv", gradient.chunk(3), strict=True):
        yield key.replace(".conv1d.", f".{part}_conv1d."), rows


def _granite(key: str) -> str:
    """Return the name on the disk of a tensor of Granite's experts, which it keeps as one."""
    for new, old in {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    }.items():
        key = key.replace(new, old)
    return key


@dataclass(frozen=True)
class Part:
    """A rectangle of the gradient of a Hugging Face tensor.

    Attributes:
        name: Of the tensor.
        start: Where it begins.
        values: In the axes of that tensor.
        view: A shape of the tensor in which it is a rectangle; None for its own.
        steps: As in ``Block``.
    """

    name: str
    start: tuple[int, ...]
    values: Tensor
    view: tuple[int, ...] | None = None
    steps: tuple[int, ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """Return the same rectangle of ``whole``."""
        return whole.view(self.view or whole.shape)[index_of(self.start, tuple(self.values.shape), self.steps)]


@dataclass(frozen=True)
class Seen:
    """What one rank has seen.

    Attributes:
        rows: Which rows of the text it read.
        logits: [b, s, v] of those rows, before any update.
        loss: Of the last step, over all rows.
        gradients: Those of the last step that it holds a part of.
    """

    rows: list[int]
    logits: Tensor
    loss: float
    gradients: list[Part]


class KeepsGradients:
    """A module that keeps the finished gradients of its last step."""

    gradients: list[Part]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = finished_gradients(self)


class Watched(KeepsGradients, MCoreGPT):
    """Reads the text, and keeps logits and finished gradients."""

    rows: list[int]

    def train_dataloader(self) -> DataLoader[Batch]:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.rows = list(range(ROWS))[rank::size]
        batch = {key: value[self.rows] for key, value in text().items()}
        steps = max(self.trainer.max_steps, 1)  # -1 in prediction
        return DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[Batch]:
        return DataLoader([next(iter(self.train_dataloader()))], batch_size=None)  # type: ignore[arg-type]

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return whole_logits(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def whole_logits(module: Any, batch: Batch) -> Tensor:
    """Return the logits [b, s, v] of whole sequences over the whole vocabulary, whatever this rank has of them."""
    logits, _ = module.token_logits(batch)  # [b, s / cp, v / tp]
    shares = [torch.empty_like(logits) for _ in range(process_group("tp").size())]
    dist.all_gather(shares, logits.contiguous(), group=process_group("tp"))
    logits = torch.cat(shares, dim=-1)[..., : module.hparams["vocab_size"]].contiguous()
    return gather_sequence(logits, process_group("cp"))


def finished_gradients(module: Any) -> list[Part]:
    """Return the gradients on this rank, which take the place of the weights for as long as it takes to look."""
    gradients: dict[int, Tensor] = {}
    for chunk in module.trainer.strategy._chunks.ddp:
        gradients |= whole_gradients(chunk)
    parameters = [each.data for each in module.model.parameters() if each.requires_grad]
    kept = [data.clone() for data in parameters]
    for data in parameters:
        data.copy_(gradients[data.data_ptr()])
    pieces = pieces_of_module(module)
    settings = {name: value for name, value in module.hparams.items() if name in MODULE_FIELDS}
    fields = complete_fields({**module.transformer, **settings})
    weights = WeightMap(find_family(module.hparams["hf"]["family"]), fields, pieces.shapes)
    parts = []
    for piece in pieces.own:
        for block in weights.blocks[piece.name]:
            part = block.within(piece.start, piece.shape)
            if part is None:
                continue
            place = tuple(slice(a - b, a - b + n) for a, b, n in zip(part.start, piece.start, part.shape, strict=True))
            values = piece.data.view(piece.shape)[place]
            values = (values.mT if part.transposed else values).reshape(part.hf_shape)
            parts.append(Part(part.hf, part.hf_start, values.clone(), steps=part.steps))
    for data, old in zip(parameters, kept, strict=True):
        data.copy_(old)
    return parts


def train(folders: dict[str, str], layout: Layout) -> dict[str, Seen]:
    """Predict with several models, one after the other, and train each for three steps, on this rank of a layout."""
    return {name: _train(folder, layout) for name, folder in folders.items()}


def _train(folder: str, layout: Layout) -> Seen:
    fields: dict[str, Any] = {"mtp_loss_scaling_factor": MULTI_TOKEN_SCALE}
    if layout.first is not None:
        fields["num_layers_in_first_pipeline_stage"] = layout.first
    module = Watched.from_pretrained(folder, seq_length=LENGTH, transformer=fields)
    return predict_and_step(module, layout, STEPS)


def predict_and_step(module: Watched, layout: Layout, steps: int = 1) -> Seen:
    """Predict with a model and train it for some steps, on this rank of a layout."""
    arguments = layout.strategy_arguments | ({"micro_batch_size": 1} if layout.dp == 1 else {})
    trainer = make_trainer(arguments, max_steps=steps, use_distributed_sampler=False)
    predicted: Any = trainer.predict(module)
    trainer.fit(module)
    loss = float(trainer.callback_metrics["train_loss"])
    return Seen(module.rows, torch.cat(list(predicted)), loss, module.gradients)


def differences(wanted: Reference, ranks: Sequence[Seen], logits: float = LOGITS) -> dict[str, float]:
    """Return what differs by more than it may on some rank; no row and no gradient may be missing."""
    found = differing_gradients(wanted.gradients, [seen.gradients for seen in ranks], GRADIENT)
    for seen in ranks:
        apart = abs(seen.loss - wanted.loss)
        if not apart <= LOSS:
            found["loss"] = apart
        if len(seen.logits):
            apart = (seen.logits - wanted.logits[seen.rows]).abs().max().item()
            if not apart <= logits:
                found["logits"] = apart
    assert {row for seen in ranks for row in seen.rows} == set(range(len(wanted.logits)))
    return found


def differing_values(
    values: dict[str, float], gradients: dict[str, Tensor], ranks: Sequence[tuple[dict[str, float], list[Part]]]
) -> dict[str, float]:
    """Return which logged values and gradients of a step differ on some rank by more than 1e-5 of what they are."""
    found = differing_gradients(gradients, [parts for _, parts in ranks], 1e-5)
    for logged, _ in ranks:
        for name, value in values.items():
            if not abs(logged[name] - value) <= 1e-5 * max(1, abs(value)):
                found[name] = logged[name] - value
    return found


def differing_gradients(wanted: dict[str, Tensor], ranks: Sequence[Sequence[Part]], allowed: float) -> dict[str, float]:
    """Return the tensors whose gradient differs on some rank by more than a share of its greatest value.

    All ranks together must hold a part of each tensor. A gradient of zeros, as that of an expert that no token chose,
    must be zero everywhere.
    """
    found = {}
    for part in chain.from_iterable(ranks):
        whole = wanted[part.name]
        apart = (part.values - part.of(whole)).abs().max().item() / max(whole.abs().max().item(), 1e-30)
        if not apart <= allowed:  # or NaN
            found[part.name] = apart
    assert {part.name for part in chain.from_iterable(ranks)} == wanted.keys()
    return found
