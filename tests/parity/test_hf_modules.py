# SPDX-License-Identifier: Apache-2.0
"""LightningModules written for DDP give DDP's numbers on every layout once ``hf_model`` is their model."""

import functools
from typing import Any

import pytest
import torch

from lightning_mcore.layers import chunked_loss, gpt
from tests.parity.hf_modules import (
    KINDS,
    NEW_TOKENS,
    freeze_each,
    score_each,
    train,
    train_each,
    validate_in_parts,
    write_each,
)
from tests.support.hf_models import read_tensors, tiny_folder
from tests.support.ranks import RanksFailedError, run_ranks
from tests.support.thorough import thorough_but

TOLERANCE = 1e-5  # of losses around 5; measured at most 2e-6

PP = "pipeline_model_parallel_size"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {PP: 2},
    "pp2-vp2": {PP: 2, "virtual_pipeline_model_parallel_size": 2},
    "dp2": {},
    "dp2-sharded": {"data_parallel_sharding": "optim_grads_params"},
    "ep2": {"expert_model_parallel_size": 2},
}
MODELS = {"ep2": "mixtral", "cp2-ep2": "mixtral"}
BESIDE_CP2: dict[str, dict[str, Any]] = {
    "cp4": {"context_parallel_size": 4},
    "cp2-tp2": LAYOUTS["tp2-sp"],
    "cp2-pp2": LAYOUTS["pp2"],
    "cp2-dp2": {},
    "cp2-ep2": LAYOUTS["ep2"],
}


SCORES = {"classification": 3, "reward": 1}


@functools.cache
def _path(model: str, scores: int | None = None) -> str:
    if scores is None:
        return str(tiny_folder(model))
    from transformers import AutoModelForSequenceClassification

    folder = tiny_folder(model).parent / f"{model}-{scores}"
    torch.manual_seed(4)
    AutoModelForSequenceClassification.from_pretrained(tiny_folder(model), num_labels=scores).save_pretrained(folder)
    return str(folder)


def _run(kind: str, layout: str) -> tuple[str, str, Any, dict[str, Any]]:
    gathered = {"accumulate_grad_batches": 2} if layout == "pp2-vp2" else {}
    return kind, _path(MODELS.get(layout, "llama"), SCORES.get(kind)), LAYOUTS[layout], gathered


OTHERS = ("tp2", "pp2", "dp2")  # whose parts other layouts have
ON: dict[str, tuple[str, tuple[str, ...]]] = {"fine-tuning": ("fine-tuning", tuple(LAYOUTS))}
for _kind in sorted(KINDS.keys() - ON.keys()):
    ON |= {_kind: (_kind, tuple(name for name in LAYOUTS if name not in OTHERS)), f"{_kind} on others": (_kind, OTHERS)}


@pytest.mark.parametrize(
    "name",
    # heads share the way through pools and gathers, which classification stands for in make test
    thorough_but(ON, "fine-tuning", "distillation", "classification"),
)
def test_a_module_written_for_ddp_gives_its_numbers_on_every_layout(name: str) -> None:
    kind, layouts = ON[name]
    runs = {layout: _run(kind, layout) for layout in layouts}
    of_ddp = {
        layout: (kind, path, "ddp", arguments)
        for layout, (kind, path, _, arguments) in ((each, _run(kind, each)) for each in LAYOUTS)
    }
    copies = {"dp2", "dp2-sharded", "ep2"} & runs.keys()
    one = run_ranks(1, train_each, {name: of_ddp[name] for name in ("tp2", "pp2-vp2")})[0]
    expected = {name: one["pp2-vp2" if name == "pp2-vp2" else "tp2"] for name in runs.keys() - copies}
    ranks = run_ranks(2, train_each, runs | {f"{name} of ddp": of_ddp[name] for name in copies}, timeout=120)
    for found in ranks:
        expected |= {name: found[f"{name} of ddp"] for name in copies}
        for name in runs:
            assert found[name] == pytest.approx(expected[name], abs=TOLERANCE), name


def test_losses_in_chunks_are_those_of_ddp_on_every_layout() -> None:
    runs = {name: _run("fine-tuning", name) for name in LAYOUTS if name not in ("dp2", "dp2-sharded", "ep2")}
    of_ddp = {name: (kind, path, "ddp", arguments) for name, (kind, path, _, arguments) in runs.items()}
    expected = run_ranks(1, train_each, {name: of_ddp[name] for name in ("tp2", "pp2-vp2")})[0]
    chunked = {
        name: (kind, path, {**strategy, "loss_chunk_size": 8}, arguments)
        for name, (kind, path, strategy, arguments) in runs.items()
    }
    ranks = run_ranks(2, _train_in_chunks, chunked, timeout=120)
    for name in chunked:
        assert any(numbers[name] for _, numbers in ranks), name  # only the last stage has losses
        for found, _ in ranks:
            wanted = expected["pp2-vp2" if name == "pp2-vp2" else "tp2"]
            assert found[name] == pytest.approx(wanted, abs=TOLERANCE), name


def _train_in_chunks(runs: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return what each run logged, and how many losses were computed in chunks."""
    calls: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return chunked_loss.in_chunks(*args, **options)

    gpt.in_chunks = counted
    found, numbers = {}, {}
    for name, run in runs.items():
        calls.clear()
        found |= train_each({name: run})
        numbers[name] = len(calls)
    return found, numbers


FREEZING = {"tp2": "qwen2", "pp2": "qwen2", "ep2": "mixtral", "pp2-vp2": "llama"}
"""qwen2's embedding is its output layer too, of which the last stage has a copy."""


def test_weights_go_by_the_names_of_transformers_and_may_be_frozen_by_them() -> None:
    runs = {name: (str(tiny_folder(model)), LAYOUTS[name]) for name, model in FREEZING.items()}
    ranks = run_ranks(2, freeze_each, runs, timeout=120)
    for name, model in FREEZING.items():
        folder = {key for key, _ in read_tensors(tiny_folder(model))}
        assert set.union(*(found[name][0] for found in ranks)) == folder, name
        assert set.union(*(found[name][1] for found in ranks)) == folder - {"model.embed_tokens.weight"}, name


def test_two_calls_in_a_step_of_a_pipeline_are_refused_without_a_hang() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, train, "two calls", _path("llama"), LAYOUTS["pp2"], callbacks=[])
    assert "was called twice in training_step under pipeline_model_parallel_size=2" in failure.value.errors[1]


@pytest.mark.parametrize("kind", thorough_but(KINDS, "fine-tuning"))
def test_micro_batch_size_cuts_the_calls_of_the_model_in_validation(kind: str) -> None:
    in_chunks = {name: {"loss_chunk_size": 8} for name in ("tp2-sp", "cp2", "pp2-vp2")}
    runs = {
        name: (*_run(kind, name)[:2], {**LAYOUTS[name], "micro_batch_size": 4, **in_chunks.get(name, {})})
        for name in LAYOUTS
        if name != "dp2"
    }
    paths = {path: (kind, path, "auto") for _, path, _ in runs.values()}
    [whole] = run_ranks(1, validate_in_parts, paths)
    for found in run_ranks(2, validate_in_parts, runs, timeout=120):
        for name, (_, path, _) in runs.items():
            values, rows = found[name]
            assert max(rows) == 4, name
            if name not in ("ep2", "dp2-sharded"):  # where each rank logs the rows of its own model copy
                assert values == pytest.approx(whole[path][0], abs=TOLERANCE), name


def _written(world_size: int, layouts: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Compare the tokens, and the widths of a chunk's calls, with those of transformers."""
    copies = ("ep2", "dp2-sharded", "cp2-dp2", "cp2-ep2")  # which sample for themselves
    runs = {name: (str(tiny_folder(model)), layout) for name, (model, layout) in layouts.items()}
    one = run_ranks(1, write_each, {model: (str(tiny_folder(model)), "auto") for model, _ in layouts.values()})[0]
    ranks = run_ranks(world_size, write_each, runs, timeout=120)
    for name, (model, layout) in layouts.items():
        expected, length = one[model][0], one[model][0].size(1) - NEW_TOKENS
        size = layout.get("context_parallel_size", 1)
        multiple = 1 if size == 1 else 2 * size
        multiple *= 2 if layout.get("sequence_parallel") else 1
        for found in ranks:
            tokens, sampled, widths = found[name]
            assert torch.equal(tokens, expected), name
            assert torch.equal(sampled, ranks[0][name][1]) or name in copies, name
            calls = 2 if "vp2" in name else 1  # of each chunk, whose schedule wants two microbatches
            prompt = -(-length // multiple) * multiple // size
            assert widths == [prompt] * calls + [1] * calls * (NEW_TOKENS - 1), name


ELSEWHERE = (*OTHERS, *(f"delta net, {name}" for name in OTHERS))


@pytest.mark.parametrize("others", thorough_but([False, True], False))
def test_generation_gives_the_tokens_of_transformers_on_every_layout(others: bool) -> None:
    latent = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layouts = {name: (MODELS.get(name, "llama"), LAYOUTS[name]) for name in LAYOUTS if name != "dp2"}
    layouts |= {f"latent, {name}": ("deepseek_v3", LAYOUTS[name]) for name in ("tp2-sp", "cp2")}
    layouts |= {f"delta net, {name}": ("qwen3_5_text", LAYOUTS[name]) for name in ("tp2", "pp2", "pp2-vp2", "cp2")}
    layouts |= {f"window, {name}": ("gemma3_text", LAYOUTS[name]) for name in ("cp2",)}
    layouts["sinks"] = "gpt_oss", {**latent, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    layouts["sinks, cp2"] = "gpt_oss", {**LAYOUTS["cp2"], "expert_model_parallel_size": 2}
    _written(2, {name: row for name, row in layouts.items() if (name in ELSEWHERE) == others})


@pytest.mark.parametrize("others", thorough_but([False, True], False))
def test_context_parallel_ranks_share_the_cache_on_every_layout_of_four_ranks(others: bool) -> None:
    layouts = {name: (MODELS.get(name, "llama"), LAYOUTS["cp2"] | more) for name, more in BESIDE_CP2.items()}
    for kind, model, name in (
        ("latent", "deepseek_v3", "cp4"),
        ("window", "gemma3_text", "cp4"),
        ("delta net", "qwen3_5_text", "cp2-tp2"),
    ):
        layouts[f"{kind}, {name}"] = model, layouts[name][1]
    _written(4, {name: row for name, row in layouts.items() if ("cp4" in name) != others})


@pytest.mark.parametrize("world_size", thorough_but([2, 4], 2))
def test_log_probabilities_of_given_tokens_are_those_with_which_they_were_generated(world_size: int) -> None:
    layouts = LAYOUTS if world_size == 2 else {name: LAYOUTS["cp2"] | more for name, more in BESIDE_CP2.items()}
    runs = {name: (str(tiny_folder(MODELS.get(name, "llama"))), layout) for name, layout in layouts.items()}
    of_transformers = {model: (str(tiny_folder(model)), "auto") for model in ("llama", "mixtral")}
    one = run_ranks(1, score_each, of_transformers)[0]
    for found in run_ranks(world_size, score_each, runs, timeout=120):
        for name in runs:
            tokens, told, again = found[name]
            expected = one[MODELS.get(name, "llama")]
            assert torch.equal(tokens, expected[0]), name
            for values in (told, again):
                torch.testing.assert_close(values, expected[2], rtol=0, atol=TOLERANCE, msg=name)
