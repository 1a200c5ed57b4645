# SPDX-License-Identifier: Apache-2.0
"""``GPTChunk`` is Megatron's ``GPTModel``: the same numbers bit for bit, and checkpoints that either can read.

The parity tests compare it with ``GPTModel`` as well, on every layout: their hand-written loop trains that
(``tests/parity/bare_loop.py``). Here are the arguments that they leave out, and what is around the numbers.
"""

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.recurrent import RecurrentLayer
from tests.distributed.test_reshard import Losses, Saved, State, Watch, make_trainer
from tests.parity import lightning_loop
from tests.parity.bare_loop import _parallel_fields, process_groups
from tests.parity.lightning_loop import TinyGPT
from tests.support import tiny
from tests.support.layouts import Layout
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.tiny import DELTA_NET, SINCE_0_17, Recipe

pytestmark = pytest.mark.distributed

YARN = (("rotary_scaling_factor", 4.0), ("original_max_position_embeddings", 16), ("beta_fast", 4.0))
LATENT = {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4} | {
    "v_head_dim": 8,
    "kv_channels": None,
    "num_query_groups": None,
}
VARIANTS: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "rotary": (Layout(), {}, {"rotary_base": 500}),
    "interleaved": (Layout(), {"rotary_interleaved": True}, {}),
    "half": (Layout(), {}, {"rotary_percent": 0.5}),
    "llama3": (Layout(), {}, {"rope_scaling": True, "rope_scaling_factor": 4.0}),
    "interpolated": (Layout(), {}, {"seq_len_interpolation_factor": 2.0}),
    "yarn": (Layout(), {}, {"position_embedding_type": "yarn", "yarn": YARN}),
    "learned": (Layout(), {}, {"position_embedding_type": "learned_absolute"}),
    "none": (Layout(), {}, {"position_embedding_type": "none"}),
    "latent": (Layout(), LATENT, {}),
    "tied": (Layout(tied=True), {}, {}),
    "experts": (Layout(moe=True), {}, {}),
    "delta": (Layout(), {"delta_net": DELTA_NET}, {}),
    "ahead": (Layout(), {"mtp_num_layers": 2}, {}),
}


def _built(name: str, is_reference: bool) -> LanguageModule:
    """Return a chunk with the values that its constructor draws."""
    layout, fields, arguments = VARIANTS[name]
    recipe = Recipe(options=(("num_layers", 2), *fields.items()), model_options=tuple(arguments.items()))
    config = tiny.make_config({**tiny.transformer_fields(layout, recipe), **_parallel_fields(layout, recipe)})
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    return tiny.build_gpt(config, layout, recipe, True, True, None, is_reference)


def _results(model: LanguageModule, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights, logits, token losses, gradients, and logits with a cache of keys and values."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    called = {"attention_mask": None, "input_ids": batch["tokens"], "position_ids": batch["position_ids"]}
    losses = model(**called, labels=batch["labels"], loss_mask=batch["loss_mask"])
    losses.sum().backward()
    found |= {"losses": losses.detach()} | {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    if model.config.mtp_num_layers:
        return found  # GPTModel of 0.16 needs labels
    with torch.no_grad():
        found["logits"] = model.eval()(**called)
        if any(isinstance(layer, RecurrentLayer) for layer in model.modules()):
            return found  # which has no place in Megatron's caches
        context = StaticInferenceContext(len(batch["tokens"]), 40)
        found["last"] = model(**called, inference_context=context, runtime_gather_output=True)[:, -1:]
    return found


def compare(names: list[str]) -> None:
    """Compare ours with Megatron's, on this rank."""
    batch = tiny.text("ragged", 0)
    with process_groups(Layout()):
        for name in names:
            ours, theirs = (_built(name, is_reference) for is_reference in (False, True))
            assert (type(ours), type(theirs)) == (GPTChunk, GPTModel)
            found, wanted = _results(ours, batch), _results(theirs, batch)
            assert list(found) == list(wanted), name
            unequal = [key for key, value in wanted.items() if not torch.equal(found[key], value)]
            assert unequal == [], name


def test_every_argument_computes_what_megatrons_model_computes() -> None:
    run_ranks(1, compare, list(VARIANTS), timeout=180)


class Theirs(TinyGPT):
    """The tiny GPT on Megatron's own class."""

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> LanguageModule:
        return tiny.build_gpt(self.config, self.layout, self.recipe, pre_process, post_process, vp_stage, True)


def resume_the_other(layout: Layout, recipe: Recipe, folder: str) -> None:
    """Save after two steps with one class, go on for two more with the other, on this rank."""
    whole = Losses()
    make_trainer(layout, 4, "32-true", whole).fit(Theirs(layout, recipe))
    for name, first, second in (("theirs", Theirs, TinyGPT), ("ours", TinyGPT, Theirs)):
        path = f"{folder}/{name}.ckpt"
        saved, watch = Saved(path), Watch()
        make_trainer(layout, 2, "32-true", saved).fit(first(layout, recipe))
        make_trainer(layout, 4, "32-true", watch).fit(second(layout, recipe), ckpt_path=path)
        assert _equal(saved.state, watch.before), name
        assert (watch.losses, watch.grad_norms) == (whole.losses[2:], whole.grad_norms[2:]), name


def _equal(one: State | None, other: State | None) -> bool:
    assert one is not None
    assert other is not None
    pairs = [*zip(one.weights, other.weights, strict=True), *zip(one.optimizer, other.optimizer, strict=True)]
    assert one.weights
    assert one.optimizer
    same = all((a.key, a.index) == (b.key, b.index) and torch.equal(a.data, b.data) for a, b in pairs)
    return same and one.steps == other.steps


CHECKPOINTS = {
    "sharded-optimizer": (Layout(dp=2, distributed_optimizer=True, overlap=True), ()),
    "stages": (Layout(pp=2, vp=2, tied=True), ()),
    "experts": (Layout(moe=True, dp=2, ep=2), ()),
    "ahead": (Layout(pp=2), (("mtp_num_layers", 1),)),
    "delta": (Layout(tp=2, sp=True), (("delta_net", DELTA_NET), ("num_layers", 2))),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_either_class_goes_on_from_the_others_checkpoint_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout, options = CHECKPOINTS[name]
    by_tokens = name == "ahead" and not SINCE_0_17  # GPTModel needs it there
    recipe = Recipe(steps=1, global_batch_size=4, options=options, token_weighted=by_tokens)
    run_ranks(layout.world_size, resume_the_other, layout, recipe, str(tmp_path), timeout=180)


@on_ranks(1, timeout=60)
def test_offloading_of_activations_is_told_what_megatrons_model_tells_it() -> None:
    """Compare how both classes announce a microbatch to Megatron's offloading, on this rank."""
    keep = "mark_not_offload" if hasattr(Offloading, "mark_not_offload") else "mark_not_offloadable"
    batch = tiny.text("full", 0)
    calls = []
    with process_groups(Layout()):
        for is_reference in (False, True):
            model = _built("rotary", is_reference)
            model.config.fine_grained_activation_offloading = True
            model.config.min_offloaded_tensor_size = 17
            with (
                mock.patch.object(Offloading, "init_chunk_handler", autospec=True) as announce,
                mock.patch.object(Offloading, keep) as kept,
            ):
                for _ in range(2):
                    model(batch["tokens"], batch["position_ids"], None)
            calls.append(announce.call_args_list)
            marked = {id(call.args[0]) for call in kept.call_args_list}
            assert {id(parameter) for parameter in model.decoder.parameters()} <= marked
            assert len(kept.call_args_list) == len(marked)  # the second microbatch marks none
    assert calls[0] == calls[1]
    assert len(calls[0]) == 2


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@on_ranks(1, timeout=60)
def test_megatron_does_not_call_the_model_deprecated() -> None:
    """GPTModel says at each construction that it is, since megatron-core 0.19."""
    said = Said()
    logging.getLogger("megatron").addHandler(said)
    model = MCoreGPT(128, 32, {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2})
    batch = {name: tensor[:1] for name, tensor in tiny.text("full", 0).items()}
    trainer = make_trainer(Layout(), 1, "32-true", pl.Callback())
    trainer.fit(model, DataLoader([batch] * trainer.accumulate_grad_batches, batch_size=None))  # type: ignore[arg-type]
    assert trainer.global_step == 1
    assert [message for message in said.messages if "deprecated" in message.lower()] == []


class OfMegatron(TinyGPT):
    """The tiny model of Megatron's own class."""

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> LanguageModule:
        with mock.patch.object(tiny, "GPTChunk", GPTModel):
            return tiny.build_gpt(self.config, self.layout, self.recipe, pre_process, post_process, vp_stage)


def _fit_megatrons(layout: Layout, recipe: Recipe, options: dict[str, Any]) -> str:
    """Return why a model of Megatron's class is refused."""
    strategy = MCoreStrategy(**layout.strategy_arguments, **options)
    try:
        lightning_loop.make_trainer(layout.world_size, strategy, 1).fit(OfMegatron(layout, recipe))
    except ValueError as error:
        return str(error)
    return ""


def test_megatrons_model_is_refused_where_it_divides_losses_ahead_by_other_numbers() -> None:
    """Since 0.17 with context parallelism, before with means of microbatches; also without a pipeline."""
    layout = Layout(cp=2) if SINCE_0_17 else Layout(dp=2)
    recipe = Recipe(token_weighted=SINCE_0_17, steps=1, options=(("mtp_num_layers", 1), ("num_layers", 2)))
    for told in run_ranks(2, _fit_megatrons, layout, recipe, {}):
        assert told.startswith("mtp_num_layers=1 with")


def test_megatrons_model_takes_no_loss_in_chunks_and_says_so() -> None:
    [told] = run_ranks(1, _fit_megatrons, Layout(), Recipe(steps=1), {"loss_chunk_size": 8})
    assert told.startswith("loss_chunk_size=8 needs a model built of GPTChunk")


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
def test_positions_that_the_chunk_cannot_make_are_refused() -> None:
    config = tiny.make_config({**tiny.TRANSFORMER, "num_layers": 1})
    with refuses(ValueError, "position_embedding_type='mrope'"):
        GPTChunk(config, ModuleSpec(GPTChunk), 8, 8, position_embedding_type="mrope")  # type: ignore[arg-type]
