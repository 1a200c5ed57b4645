# SPDX-License-Identifier: Apache-2.0
"""MCoreGPT before any model exists: what its constructor refuses and knows, its optimizer, its sampling."""

import io
import math
import warnings
from collections import UserDict, UserList
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.layers import sampling
from lightning_mcore.layers.session import single_process
from lightning_mcore.models import generation
from lightning_mcore.models.gpt import MCoreGPT
from lightning_mcore.models.recipe import Recipe, warmup_cosine
from tests.support.hf_models import save_tiny
from tests.support.sentences import refuses

TRANSFORMER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "activation_func": "silu",
    "gated_linear_unit": True,
}
GRAPHED = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"  # renamed
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16}


def gpt(**arguments: Any) -> MCoreGPT:
    return MCoreGPT(**{"vocab_size": 100, "seq_length": 16, "transformer": TRANSFORMER, **arguments})


def test_lists_and_mappings_of_other_classes_are_taken_as_plain_ones() -> None:
    """Hydra hands over OmegaConf's classes, which are neither lists nor dicts."""
    experts = {**EXPERTS, "moe_layer_freq": [0, 1], "moe_router_topk": 2}
    of_classes = UserDict({**TRANSFORMER, **experts, "moe_layer_freq": UserList([0, 1])})
    recipe = Recipe(betas=UserList([0.8, 0.9]), lr_scheduler_type="cosine", lr_scheduler_kwargs=UserDict(num_cycles=1))  # type: ignore[arg-type]
    module = gpt(transformer=of_classes, recipe=recipe, lora=UserDict(target_modules=UserList(["q_proj"])))
    assert module.hparams["transformer"] == {**TRANSFORMER, **experts}
    assert type(module.hparams["transformer"]["moe_layer_freq"]) is list
    assert module.hparams["recipe"]["betas"] == [0.8, 0.9]
    assert type(module.hparams["recipe"]["lr_scheduler_kwargs"]) is dict
    assert type(module.hparams["lora"]["target_modules"]) is list
    stages: Any = UserList([UserList(["embedding", "decoder"]), UserList(["decoder", "loss"])])
    layout = ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=stages)
    assert layout.pipeline_model_parallel_layout == [["embedding", "decoder"], ["decoder", "loss"]]


class OneRank:
    """Stands for a process group of one rank, in which nothing is communicated."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = cast(dist.ProcessGroup, OneRank())

# What the constructor refuses


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocab_size": 0},
        {"seq_length": 0},
        {"make_vocab_size_divisible_by": 0},
        {"recipe": {"lerning_rate": 1.0}},
        {"position_embedding_type": "alibi"},
        {"transformer": {**TRANSFORMER, "num_heads": 4}},
        {"transformer": {**TRANSFORMER, "sequence_parallel": True}},
    ],
)
def test_constructor_refuses_in_one_sentence(arguments: dict[str, Any]) -> None:
    with refuses(ValueError):
        gpt(**arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_grouped_gemm": True, **EXPERTS}, "moe_grouped_gemm=True needs TransformerEngine"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, "needs CUDA, and this run is"),
        ({"moe_token_dispatcher_type": "flex", **EXPERTS}, "moe_token_dispatcher_type='flex' .* is not available"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local' is not available: CUDA graphs need random states"),
        (
            {"cuda_graph_impl": "transformer_engine"},
            "cuda_graph_impl='transformer_engine' is not available: CUDA graphs need",
        ),
        ({"cuda_graph_warmup_steps": 5}, "cuda_graph_warmup_steps=5 is not available: it is part of cuda_graph_impl"),
        ({GRAPHED: "attn"}, "cuda_graph_(scope|modules)=.* is not available: it is part of cuda_graph_impl"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "cpu_offloading=True needs TransformerEngine"),
    ],
)
def test_what_these_layers_cannot_do_is_refused_before_a_run(fields: dict[str, Any], message: str) -> None:
    module = gpt(transformer={**TRANSFORMER, "add_bias_linear": False, **fields}, transformer_impl="local")
    with pytest.raises(ValueError, match=message):
        module.check_settings()


def test_constructor_refuses_a_size_that_is_no_int() -> None:
    with refuses(TypeError, "vocab_size=True"):
        gpt(vocab_size=True)


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="num_layers"):
        gpt(num_layers=2)


# What it knows without a model


def test_hyperparameters_survive_a_checkpoint_that_is_loaded_safely() -> None:
    file = io.BytesIO()
    torch.save(dict(gpt(recipe=Recipe(warmup_steps=3)).hparams), file)
    file.seek(0)
    hparams = torch.load(file, weights_only=True)
    assert hparams["transformer"] == TRANSFORMER
    assert gpt(**hparams).hparams == gpt(recipe=Recipe(warmup_steps=3)).hparams


@pytest.mark.parametrize(("vocab_size", "multiple", "padded"), [(100, 128, 128), (128, 128, 128), (129, 64, 192)])
def test_vocabulary_is_padded_to_the_multiple_whatever_the_layout(vocab_size: int, multiple: int, padded: int) -> None:
    module = gpt(vocab_size=vocab_size, make_vocab_size_divisible_by=multiple)
    assert module.padded_vocab_size == padded
    assert module.model_shape().vocab_size == padded


def test_model_shape_is_read_off_the_plain_data() -> None:
    shape = gpt(transformer={**TRANSFORMER, "num_layers_in_first_pipeline_stage": 1}).model_shape()
    assert (shape.num_layers, shape.num_attention_heads, shape.num_query_groups) == (2, 4, 2)
    assert (shape.seq_length, shape.num_layers_in_first_pipeline_stage) == (16, 1)


@pytest.mark.parametrize(
    ("arguments", "layout", "message"),
    [
        ({}, {"tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3"),
        ({}, {"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size=3"),
        ({"seq_length": 18}, {"context_parallel_size": 2}, "seq_length=18"),
        ({"make_vocab_size_divisible_by": 5}, {"tensor_model_parallel_size": 2}, None),
        ({"vocab_size": 101, "make_vocab_size_divisible_by": 1}, {"tensor_model_parallel_size": 2}, "vocab_size=101"),
    ],
)
def test_layout_that_does_not_fit_is_refused_before_a_model_exists(
    arguments: dict[str, Any], layout: dict[str, int], message: str | None
) -> None:
    shape = gpt(**arguments).model_shape()
    if message is None:
        ParallelLayout(**layout).validate_model(shape)
        return
    with refuses(ValueError, message):
        ParallelLayout(**layout).validate_model(shape)


def test_contradictory_fields_are_refused_before_a_model_exists() -> None:
    module = gpt(transformer={**TRANSFORMER, "recompute_granularity": "full"})
    with refuses(ValueError, "refuses this model:"):
        module.check_settings()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the answer depends on what is installed")
def test_transformer_engine_on_the_cpu_is_refused_before_a_model_exists() -> None:
    with refuses(ValueError, "transformer_impl"):
        gpt(transformer_impl="transformer_engine").check_settings()


def test_settings_that_fit_pass() -> None:
    gpt().check_settings()


def test_microbatch_shape_is_sequence_first() -> None:
    assert gpt().microbatch_shape({"tokens": torch.zeros(3, 16)}) == (16, 3)


# Optimizer and learning rate


def configured(module: MCoreGPT, model: nn.Module, steps: float = 10) -> tuple[torch.optim.Optimizer, Any]:
    module.model = cast(Any, model)
    module._trainer = cast(Any, SimpleNamespace(estimated_stepping_batches=steps, callbacks=[]))
    settings = cast(dict[str, Any], module.configure_optimizers())
    return settings["optimizer"], settings["lr_scheduler"]["scheduler"]


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 2), "embedding": nn.Embedding(3, 4)})
    optimizer, _ = configured(gpt(recipe=Recipe(weight_decay=0.3, betas=(0.8, 0.9))), model)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(model["linear"].weight), id(model["embedding"].weight)}
    assert {id(p) for p in kept["params"]} == {id(p) for p in (*model["norm"].parameters(), model["linear"].bias)}
    assert decayed["betas"] == (0.8, 0.9)


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(False)
    optimizer, _ = configured(gpt(), model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


def test_stage_without_vectors_still_has_both_groups() -> None:
    optimizer, _ = configured(gpt(), nn.Linear(4, 2, bias=False))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_learning_rate_rises_then_falls_to_its_minimum_and_stays() -> None:
    module = gpt(recipe=Recipe(learning_rate=1.0, min_learning_rate=0.2, warmup_steps=3))
    optimizer, scheduler = configured(module, nn.Linear(2, 2), steps=7)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *cosine, 0.2, 0.2])


def test_warm_up_longer_than_the_run_ends_at_the_peak() -> None:
    assert warmup_cosine(20, warmup_steps=20, total_steps=10, least=0.0) == 1.0


@pytest.mark.parametrize("steps", [math.inf, -1])
def test_a_decay_without_an_end_is_refused(steps: float) -> None:
    with refuses(ValueError, "max_steps="):
        configured(gpt(), nn.Linear(2, 2), steps=steps)


def test_a_constant_rate_needs_no_end() -> None:
    optimizer, _ = configured(
        gpt(recipe=Recipe(learning_rate=0.1, min_learning_rate=0.1)), nn.Linear(2, 2), steps=math.inf
    )
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_new_model_is_initialized() -> None:
    module = gpt(transformer={**TRANSFORMER, "perform_initialization": False})
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(
        ckpt_path="last.ckpt", strategy=strategy, state=SimpleNamespace(fn="fit"), callbacks=[]
    )
    module._trainer = trainer
    module.check_settings()
    trainer.ckpt_path = None
    with refuses(ValueError, "perform_initialization=False"):
        module.check_settings()


# Sampling


@pytest.mark.parametrize(
    ("prompt", "arguments"),
    [
        ([], {}),
        ([100], {}),
        ([-1], {}),
        ([1], {"max_new_tokens": -1}),
        ([1], {"temperature": -0.5}),
        ([1], {"top_k": 0}),
        ([1], {"top_p": 1.5}),
        ([1], {"top_p": -0.1}),
        ([1], {"eos_token_id": [2, 100]}),
    ],
)
def test_generate_refuses_before_it_runs_the_model(prompt: list[int], arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        gpt().generate(prompt, **{"max_new_tokens": 1, **arguments})


class WithoutCache(MCoreGPT):
    """A GPT with its own ``next_logits``, which then computes each token from whole rows."""

    def next_logits(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().next_logits(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning")  # of Megatron
@pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")
@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "latent"])
def test_tokens_from_the_cache_are_those_of_whole_rows(positions: str) -> None:
    """Also of rows that reach ``seq_length`` while others go on, and of a text that becomes longer."""
    latent = {"multi_latent_attention": True, "num_query_groups": 4, "normalization": "RMSNorm"}
    more: dict[str, Any] = (
        {"transformer": TRANSFORMER | latent | {"ffn_hidden_size": 32}} if positions == "latent" else {}
    )
    if positions == "learned_absolute":
        more["position_embedding_type"] = positions
    arguments = {"vocab_size": 100, "seq_length": 16, "transformer": TRANSFORMER | {"ffn_hidden_size": 32}, **more}
    rows = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 4], [20, 21, 22]]
    found, widths = [], []
    with single_process():
        for kind in (MCoreGPT, WithoutCache):
            torch.manual_seed(3)
            module = kind(**arguments)
            module.configure_model()
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.3)
            calls: list[int] = []
            chunk = module.model.chunks[0]
            chunk.register_forward_pre_hook(lambda _, given, calls=calls: calls.append(given[0].size(1)))
            alone = module.generate(rows[0], 12, temperature=0)
            widths.append(list(calls))
            strategy = SimpleNamespace(reduce=lambda value, reduce_op: value)
            module._trainer = SimpleNamespace(strategy=strategy, state=SimpleNamespace(status=None))  # type: ignore[assignment]
            generator = torch.Generator().manual_seed(2)
            found.append((alone, generation.continue_rows(module, rows, 13, 1.0, None, generator)))
    assert found[0] == found[1]
    assert [len(row) for row in found[0][1]] == [16, 15, 16]
    assert widths == [[9] + [1] * 7 + [16] * 4, [*range(9, 17), *[16] * 4]]


def draws(logits: torch.Tensor, temperature: float, top_k: int | None, seed: int = 0, count: int = 200) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [generation.sample(logits, temperature, top_k, generator) for _ in range(count)]


def test_temperature_zero_takes_the_most_probable_token() -> None:
    assert set(draws(torch.tensor([0.0, 2.0, 1.9]), temperature=0, top_k=None)) == {1}


def test_top_k_draws_among_the_k_most_probable_only() -> None:
    assert set(draws(torch.tensor([0.0, 0.1, 0.2, -1.0]), temperature=1, top_k=2)) == {1, 2}


def test_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    assert set(draws(torch.zeros(3), temperature=1, top_k=9)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.2, 0.0])
@pytest.mark.parametrize("top_k", [None, 20, 1])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    temperature: float, top_k: int | None, top_p: float
) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or 100), TopPLogitsWarper(top_p)]
    wanted = LogitsProcessorList(warpers)(torch.tensor([[1]]), 3 * logits[None])[0].softmax(-1)
    found = generation.distribution(3 * logits, temperature, top_k, top_p)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    logits = torch.tensor([0.0, math.log(3.0)])
    drawn = draws(logits, temperature=1, top_k=None, count=4000)
    assert sum(drawn) / len(drawn) == pytest.approx(0.75, abs=0.03)
    assert drawn == draws(logits, temperature=1, top_k=None, count=4000)
    assert drawn != draws(logits, temperature=1, top_k=None, seed=1, count=4000)


def test_padding_of_the_vocabulary_is_never_the_most_probable() -> None:
    logits = torch.tensor([[[0.0, 1.0, 5.0, 9.0]]])
    assert sampling.vocab_parallel_argmax(logits, 2, ONE_RANK).tolist() == [[1]]


def test_logits_are_those_of_the_position_asked_for_without_padding() -> None:
    logits = torch.arange(24.0).view(2, 3, 4)
    asked = torch.tensor([[False, False, True], [True, False, False]])
    found = sampling.logits_at(logits, asked, 3, ONE_RANK, ONE_RANK)
    assert found.tolist() == [[8.0, 9.0, 10.0], [12.0, 13.0, 14.0]]


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "multiple"),
    [(2, 1, False, 1), (2, 1, True, 2), (1, 3, False, 6), (3, 2, True, 12)],
)
def test_window_is_padded_to_what_the_layout_cuts(tp: int, cp: int, sequence_parallel: bool, multiple: int) -> None:
    layout = ParallelLayout(
        tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=sequence_parallel
    )
    assert layout.sequence_multiple == multiple
    window = generation.last_window([1, 2, 3, 4, 5], 12, multiple, torch.device("cpu"))
    assert window["tokens"][0, :5].tolist() == [1, 2, 3, 4, 5]
    assert window["tokens"].size(1) % multiple == 0
    assert window["tokens"].size(1) - 5 < multiple
    assert window["last"].tolist() == [4]


def test_window_keeps_the_last_tokens_of_a_long_text() -> None:
    window = generation.last_window(list(range(20)), 8, 4, torch.device("cpu"))
    assert window["tokens"].tolist() == [list(range(12, 20))]
    assert window["last"].tolist() == [7]


def interrupted_evaluation(model: nn.Module) -> None:
    with generation.evaluating(model):
        assert not any(child.training for child in model.modules())
        raise RuntimeError("stop")


def test_evaluation_mode_gives_each_module_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    with pytest.raises(RuntimeError, match="stop"):
        interrupted_evaluation(model)
    assert [child.training for child in model.modules()] == [True, True, False, False]


# What it refuses of a batch


def test_images_that_a_language_model_would_ignore_are_refused() -> None:
    batch = {"tokens": torch.zeros(1, 4, dtype=torch.long), "pixel_values": torch.zeros(4, 3)}
    with refuses(ValueError, "a batch has pixel_values, which MCoreGPT"):
        gpt().on_before_batch_transfer(batch, 0)


def train_on(data: dict[str, Any], module: MCoreGPT) -> list[str]:
    """Start training with a data module of these attributes, and return the warnings."""
    module._trainer = cast(Any, SimpleNamespace(datamodule=SimpleNamespace(**data), global_step=0))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module.on_train_start()
    return [str(warning.message) for warning in found]


def test_data_with_other_tokens_than_the_model_is_noted(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    module = MCoreGPT.from_pretrained(str(save_tiny("llama", tmp_path / "base", tokenizer=True)), seq_length=16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert train_on({"tokenizer": tokenizer}, module) == []
    tokenizer.add_tokens(["new"])
    [told] = train_on({"tokenizer": tokenizer}, module)
    assert told.startswith(
        f"1 of the {len(tokenizer)} tokens of the data's tokenizer are missing from the tokenizer of"
    )
    assert "such as 'new'; give the model's tokenizer, or copy your own into the exported folder" in told
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "base").get_vocab()
    vocabulary["w5"], vocabulary["w7"] = vocabulary["w7"], vocabulary["w5"]
    [told] = train_on({"tokenizer": SimpleNamespace(get_vocab=lambda: vocabulary)}, module)
    assert told.startswith("2 of the ")
    assert "such as 'w7'" in told
    assert train_on({"tokenizer": tokenizer}, gpt()) == []  # a new model has no tokenizer


def test_rows_longer_than_the_model_expects_are_noted() -> None:
    assert train_on({"seq_length": 16}, gpt()) == []
    [told] = train_on({"seq_length": 32}, gpt())
    assert told.startswith("data.seq_length=32 is longer than the model's seq_length=16: rows are trained in full, but")
