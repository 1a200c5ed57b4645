# SPDX-License-Identifier: Apache-2.0
"""A run that starts from a Hugging Face model, on every layout: its weights, what is read, and resuming without it."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from lightning_mcore import MCoreGPT, MCoreModule, Recipe
from lightning_mcore.checkpoint.commands import main as checkpoint_command
from lightning_mcore.hf import load_pretrained
from lightning_mcore.hf.safetensors import SafetensorsFolder
from lightning_mcore.interop.importing import import_checkpoint
from lightning_mcore.layers.spec import gpt_block_spec
from tests.support.hf_models import VOCAB_SIZE, read_tensors, save_tiny
from tests.support.ranks import run_ranks
from tests.support.sentences import refuses
from tests.support.toy import PP2, make_trainer, texts

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SEQ_LENGTH = 16
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


data = partial(texts, 8, SEQ_LENGTH, VOCAB_SIZE, batch_size=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama in several files."""
    folder = tmp_path_factory.mktemp("hf") / "llama"
    return save_tiny("llama", folder, max_shard_size="60KB", rope_parameters=PLAIN_ROPE)


@pytest.fixture(scope="module")
def loss(model: Path) -> float:
    """Return its validation loss in transformers."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        losses = [
            functional.cross_entropy(reference(batch["tokens"]).logits.transpose(1, 2), batch["labels"])
            for batch in data()
        ]
    return float(torch.stack(losses).mean())


@pytest.fixture(scope="module")
def imported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checkpoint that is made of it offline."""
    out = str(tmp_path_factory.mktemp("imported") / "llama.ckpt")
    import_checkpoint(str(model), out)
    return out


class OwnModule(MCoreModule):
    """A module on Megatron's GPTModel that is not MCoreGPT.

    Args:
        path: The Hugging Face model that it starts from.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        self.model = self.pipeline(self.build_chunk)
        load_pretrained(self, self.path)

    def build_chunk(self, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        config = TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=48,
            normalization="RMSNorm",
            layernorm_epsilon=1e-3,
            gated_linear_unit=True,
            activation_func=functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **self.megatron_fields(),
        )
        return GPTModel(
            config,
            gpt_block_spec(config, "local", vp_stage),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQ_LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.forward_step(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        losses, _ = self.token_losses(batch)
        self.log("val_loss", losses.mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Loads(MCoreGPT):
    """A GPT that starts from a checkpoint as README has it.

    Args:
        path: Its directory.
    """

    path = ""

    def configure_model(self) -> None:
        super().configure_model()
        self.load_weights(self.path)


def validate(module: pl.LightningModule, strategy: Any, **arguments: Any) -> float:
    return float(make_trainer(strategy).validate(module, data(), verbose=False, **arguments)[0]["val_loss"])


def start(model: str, imported: str, folder: str) -> dict[str, Any]:
    """Rank function: the loss of runs that start from the model in every way, and what becomes of it in training."""
    found: dict[str, Any] = {}
    for name, strategy in {"tp2": TP2, "pp2": PP2, "replicas": {}, "ddp": "ddp"}.items():
        found[name] = validate(MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH), strategy)
    found["own module"] = validate(OwnModule(model), PP2)
    found["checkpoint"] = validate(MCoreGPT.from_pretrained(imported, seq_length=SEQ_LENGTH), PP2)
    loads = Loads(**MCoreGPT.from_pretrained(imported, seq_length=SEQ_LENGTH).hparams)
    loads.path = imported
    found["load_weights"] = validate(loads, TP2)
    for name, strategy in {"tp2": TP2, "pp2": PP2}.items():
        still = MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH, recipe=Recipe(learning_rate=0.0))
        trainer = make_trainer(strategy, max_steps=1, precision="bf16-mixed")
        trainer.fit(still, data())
        trainer.save_checkpoint(f"{folder}/{name}.ckpt", weights_only=True)
    module = MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH, recipe=Recipe(learning_rate=1e-2))
    trainer = make_trainer(TP2, max_steps=2)
    trainer.fit(module, data())
    trainer.save_checkpoint(f"{folder}/trained.ckpt")
    found["trained"] = validate(module, TP2)
    own = OwnModule(model)
    make_trainer(PP2, max_steps=2).fit(own, data())
    found["own, trained"] = validate(own, PP2)
    return found


@pytest.fixture(scope="module")
def started(model: Path, imported: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return what :func:`start` finds, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = run_ranks(2, start, str(model), imported, str(folder), timeout=240)
    assert first == second
    return first, folder


@pytest.mark.parametrize("way", ["tp2", "pp2", "replicas", "ddp", "own module", "checkpoint", "load_weights"])
def test_a_run_starts_from_the_weights_of_the_model(
    way: str, started: tuple[dict[str, Any], Path], loss: float
) -> None:
    assert started[0][way] == pytest.approx(loss, rel=1e-5)


def test_one_process_starts_from_the_weights_of_the_model(model: Path, loss: float) -> None:
    module = MCoreGPT.from_pretrained(str(model), seq_length=SEQ_LENGTH)
    [metrics] = make_trainer("auto").validate(module, data(), verbose=False)
    assert metrics["val_loss"] == pytest.approx(loss, rel=1e-5)


def fit_rows_beyond_seq_length(model: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the first step of each layout logs, for a model whose ``seq_length`` is a quarter of its rows."""
    logged = []
    for layout in layouts:
        module = MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH // 4, recipe=Recipe(optimizer="sgd"))
        trainer = make_trainer(layout, max_steps=1, accumulate_grad_batches=4)
        trainer.fit(module, data())
        logged.append({name: float(trainer.callback_metrics[name]) for name in ("train_loss", "grad_norm")})
    return logged


def test_rows_longer_than_seq_length_train_as_in_transformers(model: Path, loss: float) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model)
    for batch in data():
        logits = reference(batch["tokens"]).logits.transpose(1, 2)
        (functional.cross_entropy(logits, batch["labels"]) / 4).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    layouts = [PP2, PP2 | {"micro_batch_size": 1}, TP2, {"context_parallel_size": 2}]
    for rank in run_ranks(2, fit_rows_beyond_seq_length, str(model), layouts, timeout=120):
        for layout, logged in zip(layouts, rank, strict=True):
            wanted = {"train_loss": loss, "grad_norm": norm}
            assert logged == pytest.approx(wanted, rel=1e-5), layout


@pytest.mark.parametrize("name", ["trained", "own, trained"])
def test_what_was_trained_is_not_read_again(name: str, started: tuple[dict[str, Any], Path], loss: float) -> None:
    assert started[0][name] < 0.98 * loss


def megatron_tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model as Megatron has them, put together by hand."""
    hf = dict(read_tensors(model))
    yield "embedding.word_embeddings.weight", padded(hf["model.embed_tokens.weight"])
    yield "output_layer.weight", padded(hf["lm_head.weight"])
    yield "decoder.final_layernorm.weight", hf["model.norm.weight"]
    for layer in range(4):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        query, key, value = (
            hf[f"{theirs}self_attn.{name}_proj.weight"].view(2, -1, 32) for name in ("q", "k", "v")
        )  # [groups, rows of each, hidden]
        yield f"{ours}self_attention.linear_qkv.weight", torch.cat([query, key, value], dim=1).reshape(-1, 32)
        yield f"{ours}self_attention.linear_proj.weight", hf[f"{theirs}self_attn.o_proj.weight"]
        gate, up = (hf[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        yield f"{ours}mlp.linear_fc1.weight", torch.cat([gate, up])
        yield f"{ours}mlp.linear_fc2.weight", hf[f"{theirs}mlp.down_proj.weight"]
        yield f"{ours}input_layernorm.weight", hf[f"{theirs}input_layernorm.weight"]
        yield f"{ours}pre_mlp_layernorm.weight", hf[f"{theirs}post_attention_layernorm.weight"]


def padded(rows: Tensor) -> Tensor:
    return functional.pad(rows, (0, 0, 0, 128 - len(rows)))


def check_whole(path: str, model: Path, dtype: torch.dtype) -> None:
    """Check that a checkpoint holds the model's weights, bit for bit."""
    chunk = MCoreGPT.load_from_checkpoint(path).model.chunks[0]
    parameters = dict(chunk.named_parameters())
    wanted = dict(megatron_tensors(model))
    assert parameters.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(parameters[name], tensor.to(dtype).float()), name


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_a_fit_in_bf16_starts_from_the_weights_in_bf16(
    name: str, started: tuple[dict[str, Any], Path], model: Path
) -> None:
    check_whole(str(started[1] / f"{name}.ckpt"), model, torch.bfloat16)


def test_an_imported_checkpoint_holds_the_weights(
    imported: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_whole(imported, model, torch.float32)
    assert checkpoint_command(["verify", imported]) == 0
    assert checkpoint_command(["inspect", imported]) == 0
    assert "num_layers 4, hidden_size 32" in capsys.readouterr().out
    hf = MCoreGPT.load_from_checkpoint(imported).hparams["hf"]
    assert hf["path"] == str(model)
    assert hf["config"]["model_type"] == "llama"
    assert hf["generation_config"]["eos_token_id"] == 2


def test_an_imported_checkpoint_has_the_type_that_was_asked_for(model: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "bf16.ckpt")
    import_checkpoint(str(model), out, dtype="bfloat16")
    check_whole(out, model, torch.bfloat16)
    stored = json.loads((Path(out) / "checkpoint.json").read_text())
    assert {tensor["dtype"] for tensor in stored["tensors"].values()} == {"bfloat16"}
    assert stored["precision"] == "bf16-true"


# Going on, without the Hugging Face model


def go_on(path: str, imported: str) -> dict[str, Any]:
    """Rank function: what a run does from its checkpoint."""
    found: dict[str, Any] = {}
    for strategy in (PP2, TP2):
        module = MCoreGPT.from_pretrained(path, seq_length=SEQ_LENGTH, recipe=Recipe(learning_rate=1e-2))
        trainer = make_trainer(strategy, max_steps=4)
        trainer.fit(module, data(), ckpt_path=path)
        found["steps"] = trainer.global_step
        trained = trainer.validate(module, data(), verbose=False)[0]["val_loss"]
        found["kept"] = float(trained)
    saved = MCoreGPT.from_pretrained(imported, seq_length=SEQ_LENGTH)
    found["validated"] = validate(saved, TP2, ckpt_path=path)
    again = MCoreGPT.from_pretrained(path, seq_length=SEQ_LENGTH)
    [tested] = make_trainer(TP2).test(again, data(), ckpt_path=path, verbose=False)
    found["tested"] = float(tested["test_loss"])
    predicted = make_trainer(TP2).predict(MCoreGPT.from_pretrained(path, seq_length=SEQ_LENGTH), data(), ckpt_path=path)
    found["predicted"] = len(predicted or [])
    return found


def test_a_run_goes_on_without_the_hugging_face_model(
    started: tuple[dict[str, Any], Path], imported: str, model: Path, tmp_path: Path
) -> None:
    found, folder = started
    path = str(folder / "trained.ckpt")
    shutil.move(model, tmp_path / "elsewhere")
    try:
        first, _ = run_ranks(2, go_on, path, imported, timeout=240)
        module = MCoreGPT.load_from_checkpoint(path)
    finally:
        shutil.move(tmp_path / "elsewhere", model)
    assert first["steps"] == 4
    assert first["kept"] < 0.98 * found["trained"]
    assert first["validated"] == pytest.approx(found["trained"], rel=1e-5)
    assert first["tested"] == pytest.approx(found["trained"], rel=1e-5)
    assert first["predicted"] == 4
    assert module.hparams["hf"]["path"] == str(model)


# What is read


def count_bytes(model: str) -> int:
    """Rank function: the bytes that this rank reads of the model."""
    read, count = SafetensorsFolder.read, 0

    def counting(folder: SafetensorsFolder, *rectangle: Any) -> Tensor:
        nonlocal count
        values = read(folder, *rectangle)
        count += values.nbytes
        return values

    SafetensorsFolder.read = counting  # type: ignore[method-assign]
    try:
        validate(MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH), {**TP2, **PP2})
    finally:
        SafetensorsFolder.read = read  # type: ignore[method-assign]
    return count


def test_a_rank_reads_what_it_holds_and_no_more(model: Path) -> None:
    whole = sum(tensor.nbytes for _, tensor in read_tensors(model))
    counts = run_ranks(4, count_bytes, str(model), timeout=240)
    assert whole <= sum(counts) < 1.02 * whole  # norms are on both ranks that share a layer
    assert max(counts) < 0.27 * whole


# What is refused


def refuse_broken_models(model: str) -> None:
    """Rank function: expect that two broken models are refused, once the ranks are there."""
    for kind, about in (
        (ValueError, "it lacks model.layers.3.mlp.up_proj.weight"),
        (FileNotFoundError, "lacks model-00001-of-00004.safetensors"),
    ):
        module = MCoreGPT.from_pretrained(model, seq_length=SEQ_LENGTH)
        dist.barrier()
        if kind is FileNotFoundError:
            Path(model, "model-00001-of-00004.safetensors").unlink(missing_ok=True)
            dist.barrier()
        with refuses(kind, about):
            validate(module, PP2)


def test_every_rank_refuses_with_the_same_words(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", max_shard_size="60KB", rope_parameters=PLAIN_ROPE)
    tensors = dict(read_tensors(folder))
    del tensors["model.layers.3.mlp.up_proj.weight"]  # of the second stage
    for path in folder.glob("model*"):
        path.unlink()
    names = sorted(tensors)
    index = {}
    for number in range(4):
        file = f"model-0000{number + 1}-of-00004.safetensors"
        save_file({name: tensors[name] for name in names[number::4]}, folder / file)
        index |= dict.fromkeys(names[number::4], file)
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))
    run_ranks(2, refuse_broken_models, str(folder), timeout=240)


def compared_files(folder: str) -> list[str]:
    """Return the names of the files that this rank compares with checksums, when it starts from a model."""
    from lightning_mcore.hf import pretrained

    compared: list[str] = []
    pretrained.check_download = lambda path: compared.append(Path(path).name) is None
    make_trainer(PP2, limit_val_batches=1).validate(MCoreGPT.from_pretrained(folder), data(), verbose=False)
    return compared


def test_the_ranks_of_a_machine_compare_each_file_once(model: Path) -> None:
    found = run_ranks(2, compared_files, str(model))
    assert all(found)
    assert sorted(found[0] + found[1]) == sorted(path.name for path in model.glob("*.safetensors"))
