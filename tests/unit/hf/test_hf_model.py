# SPDX-License-Identifier: Apache-2.0
"""The model in Hugging Face's shape: padding on either side, transformers' loss, and what it refuses."""

import functools
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_mcore import LoRA, MCoreGPT, add_lora, single_process
from lightning_mcore.hf import HFModel, as_hf_model, hf_model
from lightning_mcore.layers.padded_rows import PaddedRows
from tests.support.hf_models import VOCAB_SIZE, tiny_folder
from tests.support.ranks import on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),  # where the layers run in this process
    pytest.mark.usefixtures("modules_are_tagged"),
]
LENGTHS = (7, 4, 1)


@pytest.fixture
def model() -> Any:
    with single_process():
        yield hf_model(pl.LightningModule(), str(tiny_folder("llama")))


@functools.cache
def of_transformers() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)


def padded(on_the_left: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = max(LENGTHS)
    batch = {"input_ids": torch.zeros(len(LENGTHS), width).long(), "labels": torch.full((len(LENGTHS), width), -100)}
    batch["attention_mask"] = torch.zeros(len(LENGTHS), width).long()
    for row, length in enumerate(LENGTHS):
        place = slice(width - length, width) if on_the_left else slice(0, length)
        batch["input_ids"][row, place] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        batch["labels"][row, place] = batch["input_ids"][row, place]
        batch["attention_mask"][row, place] = 1
    return batch


def test_padding_on_the_left_gives_the_bits_of_padding_on_the_right(model: HFModel) -> None:
    left, right = padded(on_the_left=True), padded(on_the_left=False)
    ours, moved = model(**right), model(**left)
    assert torch.equal(ours.loss, moved.loss)
    real = [batch["attention_mask"].bool() for batch in (right, left)]
    assert torch.equal(ours.logits[real[0]], moved.logits[real[1]])
    expected = of_transformers()(**right)
    torch.testing.assert_close(ours.loss, expected.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.logits[real[0]], expected.logits[real[0]], atol=1e-5, rtol=0)
    torch.testing.assert_close(moved.logits[real[1]], of_transformers()(**left).logits[real[1]], atol=1e-5, rtol=0)


def test_gradients_go_through_logits_and_loss_of_rows_with_padding_on_the_left(model: HFModel) -> None:
    found = {}
    for on_the_left in (True, False):
        batch = padded(on_the_left)
        output = model(**batch)
        mask = batch["attention_mask"].bool()
        (output.loss + output["logits"][mask].square().mean()).backward()
        weight = model.pipeline.chunks[0].decoder.layers[0].self_attention.linear_qkv.weight
        found[on_the_left], weight.grad = weight.grad, None
        model.zero_grad()
    torch.testing.assert_close(found[True], found[False], atol=1e-7, rtol=0)


def test_the_number_of_targets_may_be_given(model: HFModel) -> None:
    batch = padded(on_the_left=False)
    expected = of_transformers()(**batch, num_items_in_batch=20).loss
    torch.testing.assert_close(model(**batch, num_items_in_batch=20)[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(20)).loss, expected, atol=1e-5, rtol=0)


def test_usual_position_ids_change_nothing(model: HFModel) -> None:
    batch = padded(on_the_left=True)
    places = (batch["attention_mask"].cumsum(1) - 1).masked_fill(batch["attention_mask"] == 0, 1)
    assert torch.equal(model(**batch, position_ids=places, use_cache=False).loss, model(**batch).loss)


def test_config_and_attributes_are_those_of_transformers(model: HFModel) -> None:
    assert model.config.to_dict()["hidden_size"] == of_transformers().config.hidden_size
    assert model.config.pad_token_id == 0
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    output = model(padded(on_the_left=False)["input_ids"])
    assert output.loss is None
    assert output[0] is output.logits is output["logits"]
    with pytest.raises(KeyError):
        output["loss"]


def test_it_writes_itself_as_transformers_does(model: HFModel, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model.save_pretrained(str(tmp_path / "out"))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    expected = of_transformers().state_dict()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


IDS = torch.tensor([[5, 6, 7, 8]])
REFUSED: list[dict[str, Any]] = [
    {"inputs_embeds": torch.zeros(1)},
    {"token_type_ids": torch.zeros(1, 4)},
    {"output_attentions": True},
    {"attention_mask": torch.tensor([[1, 0, 1, 1]])},
    {"attention_mask": torch.tensor([[1, 2, 1, 1]])},
    {"attention_mask": torch.ones(1, 1, 4, 4)},
    {"position_ids": torch.tensor([[0, 1, 0, 1]])},
    {"labels": torch.ones(1, 3).long()},
    {"labels": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]])},
    {"labels": IDS + VOCAB_SIZE},
]


@pytest.mark.parametrize("given", REFUSED)
def test_what_it_does_not_support_is_refused_by_name(model: HFModel, given: dict[str, Any]) -> None:
    with refuses(ValueError, *given):
        model(IDS, **given)


@pytest.mark.parametrize(
    "name",
    [
        "gradient_checkpointing_enable",
        "resize_token_embeddings",
        "get_input_embeddings",
        "lm_head",
        "push_to_hub",
    ],
)
def test_attributes_of_transformers_say_what_to_do_instead(model: HFModel, name: str) -> None:
    assert hasattr(of_transformers(), name)
    with refuses(AttributeError, f"{name} is not available"):
        getattr(model, name)
    assert not hasattr(model, "anything_else")


def test_programs_that_take_a_model_of_transformers_find_its_folder_and_may_tie_its_weights(model: HFModel) -> None:
    assert model.name_or_path == of_transformers().name_or_path
    logits = model(IDS).logits
    model.tie_weights()
    assert torch.equal(model(IDS).logits, logits)


def test_adapters_of_peft_are_refused_and_those_that_are_named_work(model: HFModel, tmp_path: Any) -> None:
    """What is written has them merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with refuses(TypeError, "PEFT cannot put adapters on the model of"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    add_lora(model.pipeline, LoRA(target_modules=["linear_qkv", "linear_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(str(tmp_path / "merged"))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    logits = model(IDS).logits
    torch.testing.assert_close(written(IDS).logits, logits, atol=1e-5, rtol=0)
    assert (of_transformers()(IDS).logits - logits).abs().max() > 1e-2


def test_a_model_that_is_built_in_the_constructor_is_refused_by_its_name() -> None:
    with refuses(RuntimeError, "hf_model() builds Megatron layers"):
        hf_model(pl.LightningModule(), str(tiny_folder("llama")))


class Tuned(pl.LightningModule):
    """Builds its model where Lightning's callbacks have already copied the module, or copy it too."""

    def configure_model(self) -> None:
        self.model = hf_model(self, str(tiny_folder("llama")))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


AVERAGES = {"ema": EMAWeightAveraging, "swa": partial(StochasticWeightAveraging, swa_lrs=0.1)}


@pytest.mark.parametrize("kind", AVERAGES)
@on_ranks(1)
def test_averages_of_a_model_that_may_be_split_are_refused(kind: str) -> None:
    with refuses(ValueError, "copies"):
        make_trainer({}, callbacks=[AVERAGES[kind]()], max_steps=1).fit(Tuned(), [IDS])  # type: ignore[arg-type]


class Shown(MCoreGPT):
    """Keeps the logits of itself shown as a Hugging Face model."""

    def on_validation_epoch_end(self) -> None:
        with as_hf_model(self) as model:
            self.logits = model(IDS).logits
        super().on_validation_epoch_end()


def show(path: str) -> list[Tensor]:
    """Return the logits of an ``MCoreGPT`` on each layout."""
    found = []
    for name in ("tensor", "pipeline"):
        module: Any = Shown.from_pretrained(path, seq_length=IDS.shape[1])
        rows: Any = DataLoader([{"tokens": IDS[0], "labels": IDS[0]}])  # type: ignore[arg-type]
        make_trainer({f"{name}_model_parallel_size": 2}).validate(module, rows, verbose=False)
        found.append(module.logits)
    return found


def test_an_mcore_gpt_shown_as_a_hugging_face_model_has_the_logits_of_transformers() -> None:
    path = str(tiny_folder("llama"))
    expected = AutoModelForCausalLM.from_pretrained(path)(IDS).logits.detach()
    for rank in run_ranks(2, show, path, timeout=60):
        for logits in rank:
            assert (logits - expected).abs().max() < 1e-5


SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}


def test_a_model_of_no_hugging_face_folder_cannot_be_shown_as_one() -> None:
    module = MCoreGPT(vocab_size=64, seq_length=8, transformer=SIZES)
    with refuses(ValueError, "MCoreGPT"), as_hf_model(module):
        pass


def test_a_row_of_padding_alone_is_allowed() -> None:
    rows = PaddedRows.of(IDS, torch.zeros(1, 4), None, 8)
    assert rows.share(IDS, 0, 0, 1).shape == (1, 8)
    assert (rows.targets(torch.full((1, 4), -100)) == -100).all()


def test_an_unknown_family_says_which_are_known(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with single_process(), refuses(ValueError, "llama"):
        hf_model(pl.LightningModule(), str(tmp_path))


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "arguments", [{}, {"num_beams": 3}, {"repetition_penalty": 1.5, "eos_token_id": 17}], ids=["greedy", "beams", "end"]
)
def test_generation_gives_the_tokens_of_transformers(
    model: HFModel, use_cache: bool, arguments: dict[str, Any]
) -> None:
    batch = padded(on_the_left=True)
    del batch["labels"]
    settings = {"max_new_tokens": 12, "pad_token_id": 0, **arguments}
    expected = of_transformers().generate(**batch, **settings)
    assert torch.equal(model.generate(**batch, use_cache=use_cache, **settings), expected)


@pytest.mark.parametrize("arguments", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["greedy", "whole", "beams"])
def test_generation_goes_on_from_chunk_to_chunk(arguments: dict[str, Any]) -> None:
    """21 tokens are in three chunks of Llama 4; without padding, which counts for the temperature in transformers."""
    from transformers import AutoModelForCausalLM

    folder = str(tiny_folder("llama4_text"))
    settings = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None, **arguments}
    rows = torch.randint(3, VOCAB_SIZE, (3, 7), generator=torch.Generator().manual_seed(1))
    other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with single_process():
        model = hf_model(pl.LightningModule(), folder)
        assert torch.equal(model.generate(rows, **settings), other.generate(rows, **{**settings, "use_cache": False}))


@pytest.mark.parametrize("name", ["ministral3", "llama4_text, dense"], ids=["growing-queries", "chunks"])
def test_generation_counts_positions_from_the_first_token_where_attention_uses_them(name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(tiny_folder(name))
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = padded(on_the_left=True)
    del batch["labels"]
    settings = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
    with single_process():
        model: Any = hf_model(pl.LightningModule(), folder)
        for given in (batch, {"input_ids": batch["input_ids"][:1]}):
            assert torch.equal(model.generate(**given, **settings), other.generate(**given, **settings))
        places = torch.arange(7).expand(3, -1)
        moved = places - (batch["attention_mask"] == 0).sum(1, keepdim=True)
        assert torch.equal(model(**batch, position_ids=moved).logits, model(**batch).logits)
        with refuses(ValueError, "position_ids do not begin with 0 at the"):
            model(**batch, position_ids=places)


@pytest.mark.parametrize(("labels", "problem"), [(1, "regression"), (3, "single_label_classification")])
def test_a_classifier_scores_the_last_token_and_writes_itself(labels: int, problem: str, tmp_path: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(2)
    other = AutoModelForSequenceClassification.from_pretrained(tiny_folder("qwen2"), num_labels=labels)
    other.save_pretrained(tmp_path / "in")
    right, left = padded(on_the_left=False), padded(on_the_left=True)
    targets = torch.tensor([0, 2, 1]) if labels == 3 else torch.tensor([0.5, 1.0, -1.0])
    with single_process():
        model: Any = hf_model(
            pl.LightningModule(), str(tmp_path / "in"), head="sequence-classification", num_labels=labels
        )
        for batch in (right, left):
            inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": targets}
            expected = other(**inputs)
            torch.testing.assert_close(model(**inputs).logits, expected.logits, atol=1e-5, rtol=0)
            torch.testing.assert_close(model(**inputs).loss, expected.loss, atol=1e-5, rtol=0)
        assert model.config.problem_type == problem
        with refuses(TypeError, "needs logits over the vocabulary"):
            model.generate(IDS)
        model.save_pretrained(str(tmp_path / "out"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.num_labels == labels
    assert all(torch.equal(again.state_dict()[name], value) for name, value in other.state_dict().items())


def test_an_encoder_returns_the_last_hidden_state_and_writes_itself(tmp_path: Any) -> None:
    from transformers import AutoModel

    batch = padded(on_the_left=True)
    real = batch["attention_mask"].bool()
    other = AutoModel.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    with single_process():
        model = hf_model(pl.LightningModule(), str(tiny_folder("llama")), head="hidden-states")
        output = model(batch["input_ids"], batch["attention_mask"])
        assert output.keys() == ["last_hidden_state"]
        expected = other(batch["input_ids"], batch["attention_mask"]).last_hidden_state[real]
        torch.testing.assert_close(output.last_hidden_state[real], expected, atol=1e-5, rtol=0)
        with refuses(AttributeError, "last_hidden_state"):
            _ = output.logits
        with refuses(ValueError, "which has no loss; leave them out"):
            model(**batch)
        model.save_pretrained(str(tmp_path / "out"))
    again = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    "given",
    [
        {"head": "token-classification"},
        {"num_labels": 2},
    ],
)
def test_a_head_that_does_not_exist_is_refused(given: dict[str, Any]) -> None:
    with refuses(ValueError, *given):
        hf_model(pl.LightningModule(), str(tiny_folder("llama")), **given)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize(
    "family",
    thorough_but(
        ["mistral", "gemma3_text", "hunyuan_v1_dense", "qwen3_next", "qwen3_5_text"],
        *("gemma3_text", "hunyuan_v1_dense", "qwen3_next"),
    ),
)
def test_generation_beyond_the_window_and_with_other_layers(family: str, arguments: dict[str, Any]) -> None:
    """Windows, norms after the rotation, and gated delta nets."""
    from transformers import AutoModelForCausalLM

    batch = padded(on_the_left=True)
    del batch["labels"]
    settings = {"max_new_tokens": 14, "pad_token_id": 0, **arguments}
    other: Any = AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32)
    with single_process():
        model = hf_model(pl.LightningModule(), str(tiny_folder(family)))
        assert torch.equal(model.generate(**batch, **settings), other.generate(**batch, **settings))


@pytest.mark.parametrize("given", [{"prompt_lookup_num_tokens": 2}, {"guidance_scale": 1.5}, {"assistant_model": "x"}])
def test_generation_with_a_cache_of_transformers_is_refused_by_name(model: HFModel, given: dict[str, Any]) -> None:
    with refuses(ValueError, *given):
        model.generate(IDS, max_new_tokens=1, **given)
    if "assistant_model" not in given:
        with refuses(ValueError, *given):
            model.generate(IDS, generation_config=GenerationConfig(max_new_tokens=1, **given))


@pytest.mark.parametrize(
    "given",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"output_router_logits": True},
        {"token_healing": True},
        {"prefill_chunk_size": 2},
        {"position_ids": torch.arange(4)[None]},
    ],
)
def test_other_arguments_that_generation_does_not_follow_are_refused_by_name(
    model: HFModel, given: dict[str, Any]
) -> None:
    with refuses(ValueError, *given):
        model.generate(IDS, max_new_tokens=1, **given)
    off = {name: False for name, value in given.items() if value is True}
    assert model.generate(IDS, max_new_tokens=1, pad_token_id=0, **off).size(1) == IDS.size(1) + 1


def test_prompts_with_padding_on_the_right_are_refused(model: HFModel) -> None:
    with refuses(ValueError, "with padding on the right"):
        model.generate(IDS, attention_mask=torch.tensor([[1, 1, 1, 0]]), max_new_tokens=1, pad_token_id=0)
