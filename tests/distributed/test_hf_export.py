# SPDX-License-Identifier: Apache-2.0
"""Models exported in Hugging Face form are bit for bit those imported, on every layout, live or from a checkpoint."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_mcore import MCoreCheckpointIO, MCoreGPT, MCoreStrategy, Recipe, single_process
from lightning_mcore.interop import export_tensors
from lightning_mcore.interop.callback import SaveHFModel
from lightning_mcore.interop.export import export_checkpoint, export_model
from tests.support.hf_models import FAMILIES, VOCAB_SIZE, read_tensors, save_tiny, tiny_folder
from tests.support.ranks import run_ranks
from tests.support.thorough import thorough_but
from tests.support.toy import CP2, PP2, make_trainer, texts

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # in this process warnings are errors, and Megatron has many
]

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {2: {"tp2": TP2, "pp2": PP2, "cp2": CP2, "ep2": EP2}, 4: {"tp2-pp2": TP2 | PP2, "tp2-ep2": TP2 | EP2}}
MODELS = (*FAMILIES, "llama, tied, wide heads", "deepseek_v3, multi-token", "glm4_moe, multi-token")
ON_TWO_AXES = ("qwen2", "qwen3_moe", "deepseek_v3, multi-token", "glm4_moe, multi-token", "llama, tied, wide heads")
WITH_EXPERTS = ("mixtral", "moe", "deepseek")
WITHOUT_CP = ("mistral", "multi-token")  # Megatron has no windows and no multi-token prediction under it
SHARD_SIZE = "40KB"
PROMPT = [5, 17, 3]


def fits(model: str, layout: str, thorough: bool) -> bool:
    """Whether a model can run on a layout, and is one of its models.

    Every model runs on one axis, and a few on the others and on two at once; the rest of the axes are thorough.
    """
    axis = "ep2" if any(part in model for part in WITH_EXPERTS) else "tp2"
    if (layout in LAYOUTS[4] and model not in ON_TWO_AXES) or thorough == (layout == axis or model in ON_TWO_AXES):
        return False
    has_experts = any(part in model for part in WITH_EXPERTS)
    return (has_experts or "ep" not in layout) and not (layout == "cp2" and any(part in model for part in WITHOUT_CP))


def data(rows: int = 4) -> Any:
    """Return batches of two sequences."""
    return texts(rows, 16, VOCAB_SIZE, batch_size=2)


def export_each(jobs: list[tuple[str, str, dict[str, Any], str]]) -> None:
    """Build each model from its folder on a layout, and write it again."""
    for name, folder, layout, out in jobs:
        try:
            module = MCoreGPT.from_pretrained(folder, seq_length=16)
            strategy = MCoreStrategy(**layout)
            make_trainer(strategy, limit_predict_batches=1).predict(module, data())
            export_model(module, out, max_shard_size=SHARD_SIZE)
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    ("world_size", "thorough"),
    [(2, False), *(pytest.param(*row, marks=pytest.mark.thorough) for row in ((4, False), (2, True)))],
)
def test_every_family_comes_back_bit_for_bit_from_every_layout(tmp_path: Path, world_size: int, thorough: bool) -> None:
    jobs = [
        (f"{model} at {layout}", str(tiny_folder(model)), strategy, str(tmp_path / f"{model} at {layout}"))
        for layout, strategy in LAYOUTS[world_size].items()
        for model in MODELS
        if fits(model, layout, thorough)
    ]
    run_ranks(world_size, export_each, jobs, timeout=300)
    for _, folder, _, out in jobs:
        check_same(folder, out)


@pytest.mark.parametrize("model", thorough_but(MODELS, *ON_TWO_AXES))
def test_one_process_writes_what_it_read(tmp_path: Path, model: str) -> None:
    folder, out = str(tiny_folder(model)), str(tmp_path / "out")
    with single_process():
        module = MCoreGPT.from_pretrained(folder, seq_length=16)
        module.configure_model()
        export_model(module, out)
    check_same(folder, out)
    assert read_json(out, "config.json") == read_json(folder, "config.json")
    assert read_json(out, "generation_config.json") == read_json(folder, "generation_config.json")
    check_loads(out, "multi-token" in model)


def check_same(folder: str, out: str) -> None:
    """Compare all tensors of two models, and the index with the files."""
    wanted, found = dict(read_tensors(folder)), dict(read_tensors(out))
    assert found.keys() == wanted.keys(), out
    different = [name for name in wanted if not identical(wanted[name], found[name])]
    assert not different, f"{out}: {different}"
    if not os.path.exists(os.path.join(out, "model.safetensors")):
        index = read_json(out, "model.safetensors.index.json")
        files = sorted(name for name in os.listdir(out) if name.endswith(".safetensors"))
        assert sorted(set(index["weight_map"].values())) == files
        assert index["weight_map"].keys() == found.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def identical(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def check_loads(folder: str, has_more: bool = False) -> Any:
    """Load a model with transformers, which finds what it needs and, but for multi-token prediction, nothing else."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not info["unexpected_keys"] or (has_more and all(".layers.4." in name for name in info["unexpected_keys"]))
    return model


def read_json(folder: str | Path, name: str) -> Any:
    return json.loads((Path(folder) / name).read_text())


# ---- from a checkpoint


class Halfway(pl.Callback):
    """Exports after the first step, when some of the weights may not be gathered yet, and saves."""

    def __init__(self, out: str) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            export_model(pl_module, f"{self.out}/halfway", max_shard_size=SHARD_SIZE)
            trainer.save_checkpoint(f"{self.out}/halfway.ckpt")


def train_and_save(jobs: list[tuple[str, str, dict[str, Any], str]]) -> None:
    """Train each model for two steps on a layout, save it, and write it from memory too."""
    for name, folder, layout, out in jobs:
        try:
            module = MCoreGPT.from_pretrained(folder, seq_length=16, recipe=Recipe(learning_rate=1e-2))
            strategy = MCoreStrategy(**layout)
            trainer = make_trainer(strategy, max_steps=2, precision="bf16-mixed", callbacks=[Halfway(out)])
            trainer.fit(module, data(16))
            trainer.save_checkpoint(f"{out}/end.ckpt")
            export_model(module, f"{out}/end", max_shard_size=SHARD_SIZE)
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error


def test_a_checkpoint_of_any_layout_is_exported_in_one_process(tmp_path: Path) -> None:
    distributed = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    for world_size, layouts in {
        2: {"qwen2": TP2, "deepseek_v3, multi-token": EP2 | distributed},
        4: {"llama": TP2 | PP2 | distributed, "qwen3_moe": TP2 | EP2},
    }.items():
        jobs = [(model, str(tiny_folder(model)), layout, str(tmp_path / model)) for model, layout in layouts.items()]
        run_ranks(world_size, train_and_save, jobs, timeout=180)
        for model, folder, _, out in jobs:
            for moment in ("halfway", "end"):
                at = f"{out}/{moment}"
                export_checkpoint(f"{at}.ckpt", f"{at}-offline", max_shard_size="30KB")
                check_same(at, f"{at}-offline")
            end, trained = f"{out}/end-offline", dict(read_tensors(f"{out}/end"))
            assert all(
                not torch.equal(tensor.bfloat16(), trained[name].bfloat16())
                for name, tensor in read_tensors(folder)
                if name.endswith("proj.weight") and ".layers.4." not in name and "experts" not in name
            )
            assert read_json(end, "config.json")["dtype"] == "bfloat16", model
            check_loads(end, "multi-token" in model)


# ---- while training


class Speaks(pl.Callback):
    """Continues a prompt when training ends."""

    tokens: list[int]

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.tokens = pl_module.generate(PROMPT, 8, temperature=0)


def fit_with_exports(folder: str, out: str) -> list[int]:
    """Train with checkpoints, of which some are deleted, and return what the model says in the end."""
    speaks = Speaks()
    callbacks = [
        SaveHFModel(f"{out}/final", every_checkpoint=True, max_shard_size=SHARD_SIZE),
        ModelCheckpoint(f"{out}/ckpt", "{step}", monitor="step", mode="max", every_n_train_steps=2, save_last=True),
        speaks,
    ]
    strategy = MCoreStrategy(
        **TP2, use_distributed_optimizer=True, checkpoint_io=MCoreCheckpointIO(async_save="async" in out)
    )
    module = MCoreGPT.from_pretrained(folder, seq_length=16, recipe=Recipe(learning_rate=1e-2))
    trainer = make_trainer(strategy, max_steps=6, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, data(16))
    return speaks.tokens


ENDS_OF_EPOCHS: dict[str, tuple[dict[str, Any], bool]] = {
    "no validation": ({"save_top_k": -1}, False),
    "val_loss": ({"monitor": "val_loss", "save_top_k": -1, "save_last": True}, True),
}


def fit_epochs(folder: str, out: str) -> None:
    """Train for epochs at whose ends checkpoints are saved."""
    for name, (arguments, validates) in ENDS_OF_EPOCHS.items():
        callbacks = [SaveHFModel(every_checkpoint=True), ModelCheckpoint(f"{out}/{name}", **arguments)]
        module = MCoreGPT.from_pretrained(folder, seq_length=16, recipe=Recipe(learning_rate=1e-2))
        trainer = make_trainer(TP2, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, data(4), data(2) if validates else None)


def test_what_stands_beside_a_checkpoint_of_an_epoch_has_its_weights(tmp_path: Path) -> None:
    run_ranks(2, fit_epochs, str(tiny_folder("llama")), str(tmp_path), timeout=120)
    for run, (arguments, _) in ENDS_OF_EPOCHS.items():
        checkpoints = sorted((tmp_path / run).glob("*.ckpt"))
        assert len(checkpoints) == (4 if "save_last" in arguments else 3)
        for checkpoint in checkpoints:
            offline = str(tmp_path / "offline" / run / checkpoint.name)
            export_checkpoint(str(checkpoint), offline)
            check_same(offline, f"{checkpoint}-hf")


def fail_on_one(folder: str, out: str) -> list[str]:
    """Let one rank fail in its own part of an export, in several ways; return what this rank is told."""
    module = MCoreGPT.from_pretrained(folder, seq_length=16)
    make_trainer(TP2, limit_predict_batches=1).predict(module, data())
    told = []

    def attempt(**options: Any) -> None:
        try:
            export_model(module, out, max_shard_size=SHARD_SIZE, **options)
        except Exception as error:
            told.append(str(error))

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no memory left here")

    for name in ("_memory", "_held"):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(export_tensors, name, refuse)
            attempt()
    weight = next(
        weight for name, weight in module.named_parameters() if name.endswith("layers.0.mlp.linear_fc2.weight")
    )
    kept = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = 1e6 if dist.get_rank() == 1 else kept
        attempt(dtype="float16")
        weight[0, 0] = kept
    origin = module.hparams["hf"]
    module.hparams["hf"] = {**origin, "path": f"{out}-gone"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attempt()
    module.hparams["hf"] = origin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_tensors, "_ON_THEIR_WAY", 5000)  # several rows of sends
        attempt()
    return told


def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    folder, out = str(tiny_folder("llama")), tmp_path / "disk"
    out.mkdir()
    (tmp_path / "out").symlink_to("disk")
    told = run_ranks(2, fail_on_one, folder, str(tmp_path / "out"), timeout=60)
    for sentences in told:
        assert sentences[:2] == ["no memory left here"] * 2
        assert sentences[2].startswith(
            "model.layers.0.mlp.down_proj.weight has values up to 1e+06, and the largest of float16"
        )
        assert "out-gone, the source of the model, no longer exists" in sentences[3]
        assert len(sentences) == 4
    check_same(folder, str(out))
    assert sorted(os.listdir(tmp_path)) == ["disk", "out"]


def test_a_run_leaves_its_model_beside_the_checkpoints_that_stay(tmp_path: Path) -> None:
    folder = str(save_tiny("qwen3", tmp_path / "tiny", tokenizer=True))
    for out in (tmp_path / "sync", tmp_path / "async"):
        tokens = run_ranks(2, fit_with_exports, folder, str(out), timeout=120)[0]
        assert sorted(os.listdir(out / "ckpt")) == ["last.ckpt", "last.ckpt-hf", "step=6.ckpt", "step=6.ckpt-hf"]
        for name in ("last.ckpt", "step=6.ckpt"):
            check_same(str(out / "final"), str(out / "ckpt" / f"{name}-hf"))
        export_checkpoint(str(out / "ckpt" / "last.ckpt"), str(out / "offline"))
        check_same(str(out / "final"), str(out / "offline"))
        assert (out / "final" / "tokenizer.json").read_bytes() == (tmp_path / "tiny" / "tokenizer.json").read_bytes()
        model = check_loads(str(out / "offline"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert said[0].tolist() == tokens
