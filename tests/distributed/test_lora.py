# SPDX-License-Identifier: Apache-2.0
"""Training with adapters: the same course on every layout, checkpoints of what is trained alone, PEFT's folders."""

import json
import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from lightning_mcore import LoRA, MCoreGPT, MCoreStrategy, Recipe, single_process
from lightning_mcore.checkpoint.io import MCoreCheckpointIO
from lightning_mcore.cli.hf import run as run_command
from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.hf import export_checkpoint, export_model
from lightning_mcore.hf.peft_tensors import adapter_pieces
from lightning_mcore.hf.source import planned_settings
from lightning_mcore.interop.export_adapter import save_adapter
from lightning_mcore.layers.adapted_layers import adapt
from lightning_mcore.layers.lora import Projection
from lightning_mcore.layers.lora import Rows as RowsOfLayer
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.planning.arguments import with_adapters
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.grid import GlobalBatch
from lightning_mcore.planning.model import GPTFields
from lightning_mcore.planning.sizes import Sizes
from lightning_mcore.planning.step import step_work
from tests.parity.hf_training import text
from tests.parity.test_lora import reference
from tests.support.hf_models import VOCAB_SIZE, tiny_folder
from tests.support.layouts import Layout
from tests.support.ranks import RanksFailedError, on_ranks, run_ranks
from tests.support.sentences import refuses
from tests.support.thorough import thorough_but
from tests.support.toy import Watch, make_trainer

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not:RuntimeWarning"),
]

LENGTH, GLOBAL_BATCH, STEPS = 32, 4, 10
WEIGHT = 1e-5  # of weights after four steps; measured: 1e-6
LOSS = 1e-5  # of the losses of ten steps; measured: 1e-6
RATE = 1e-2
SETTINGS: dict[str, Any] = {"r": 3, "lora_alpha": 6}

LAYOUTS = (
    Layout(tp=2, pp=2, sp=True),
    Layout(dp=2, distributed_optimizer=True, overlap=True),
    Layout(pp=2, vp=2),
    Layout(cp=2, dp=2, distributed_optimizer=True),
)
RESUMED = (
    pytest.param(Layout(), "llama", marks=pytest.mark.thorough),
    pytest.param(Layout(tp=2, pp=2, sp=True), "llama", marks=pytest.mark.thorough),
    pytest.param(Layout(tp=2, sp=True), "llama", marks=pytest.mark.thorough),
    (Layout(tp=2, dp=2, distributed_optimizer=True), "llama, one key head"),
    (Layout(tp=2, dp=2, distributed_optimizer=True), "phi3"),
    pytest.param(Layout(dp=2, distributed_optimizer=True), "llama", marks=pytest.mark.thorough),
    pytest.param(Layout(moe=True, dp=2, ep=2, distributed_optimizer=True), "qwen3_moe", marks=pytest.mark.thorough),
)
STACKED: dict[str, Any] = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}
JOINED: dict[str, Any] = {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}
GATES: dict[str, Any] = {"target_modules": ["q_proj", "shared_expert_gate"], "target_parameters": ["gate.weight"]}
ENDS: dict[str, Any] = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows enough for ten steps."""

    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(1, VOCAB_SIZE, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": row[:-1], "labels": row[1:]}


def train(
    family: str,
    layout: Layout,
    lora: dict[str, Any] | str,
    steps: int = STEPS,
    start: str | None = None,
    save: str | None = None,
    adapter: str | None = None,
    hf: str | None = None,
    fields: dict[str, Any] | None = None,
    experts: Any = "stacked",
    merged: list[str] | None = None,
    ratio: float | None = None,
    precision: Any = "32-true",
) -> dict[str, Any]:
    """Train some steps on a layout; return the course and what this rank holds of the adapter's file at the end."""
    plus = {} if ratio is None else {"loraplus_lr_ratio": ratio, "loraplus_lr_embedding": RATE / 3}
    recipe = Recipe(learning_rate=RATE, min_learning_rate=RATE, warmup_steps=0, **plus)
    module = MCoreGPT.from_pretrained(
        family,
        seq_length=LENGTH,
        transformer=fields,
        recipe=recipe,
        lora=lora if isinstance(lora, str) or "path" in lora else LoRA(**lora),
        adapters=merged,
    )
    strategy = MCoreStrategy(**layout.strategy_arguments, micro_batch_size=1)
    watch = Watch()
    saving = [] if save is None else [ModelCheckpoint(save, filename="{step}", every_n_train_steps=steps)]
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        accumulate_grad_batches=GLOBAL_BATCH // layout.dp,
        callbacks=[watch, *saving],
        enable_checkpointing=save is not None,
        precision=precision,
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=1), ckpt_path=start)
    if adapter is not None:
        save_adapter(module, adapter, experts=experts)
    if hf is not None:
        export_model(module, hf)
    flops = module.flops_per_token()
    held = [(piece.key, piece.start, piece.data.detach().clone()) for piece in adapter_pieces(module, module.lora)]
    return {"losses": watch.seen.logged, "norms": watch.seen.grad_norms, "held": held, "flops": flops}


def whole(ranks: list[dict[str, Any]]) -> dict[Any, Tensor]:
    return {(key, start): data for rank in ranks for key, start, data in rank["held"]}


def folder(family: str) -> str:
    return str(tiny_folder(family))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ten steps on one rank, saved halfway and at the end."""
    saved = tmp_path_factory.mktemp("one")
    run = run_ranks(1, train, folder("llama"), Layout(), SETTINGS, save=str(saved), adapter=str(saved / "peft"))[0]
    return {**run, "saved": saved}


@pytest.mark.parametrize("layout", thorough_but(LAYOUTS, "dp2-do-overlap", "pp2-vp2", "dp2-cp2-do"))
def test_ten_steps_are_those_of_one_rank(layout: Layout, one_rank: dict[str, Any]) -> None:
    for rank in run_ranks(layout.world_size, train, folder("llama"), layout, SETTINGS):
        assert rank["losses"] == pytest.approx(one_rank["losses"], abs=LOSS)
        assert rank["norms"] == pytest.approx(one_rank["norms"], rel=1e-4)
        assert rank["flops"] == one_rank["flops"]
    assert one_rank["losses"][-1] < one_rank["losses"][0] - 0.05


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_plus_is_that_of_peft_and_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    adapter = reference("embedding").folder
    losses, weights = steps_of_peft(folder("llama"), adapter, ratio=0.25, steps=4)
    given = {"lora": adapter, "ratio": 0.25}
    for layout in (Layout(tp=2, sp=True), Layout(dp=2, distributed_optimizer=True, overlap=True)):
        run = run_ranks(2, train, folder("llama"), layout, **given, steps=4)
        for rank in run:
            assert rank["losses"] == pytest.approx(losses, abs=LOSS)
        for (key, start), data in whole(run).items():
            part = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
            torch.testing.assert_close(data, weights[key][part], rtol=0, atol=WEIGHT)
    run_ranks(2, train, folder("llama"), layout, **given, steps=2, save=str(tmp_path))
    resumed = run_ranks(2, train, folder("llama"), layout, **given, steps=4, start=str(tmp_path / "step=2.ckpt"))
    assert all(torch.equal(data, whole(run)[place]) for place, data in whole(resumed).items())


def losses_of_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train a model of transformers on the same rows as the runs, and return the loss of each step."""
    losses = []
    shuffled = DistributedSampler(Rows(), num_replicas=1, rank=0)  # as Lightning does
    for batch in islice(DataLoader(Rows(), batch_size=GLOBAL_BATCH, sampler=shuffled), steps):
        loss = functional.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps_of_peft(base: str, adapter: str, ratio: float, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of PEFT with its own optimizer for LoRA+, and the adapter's weights at the end."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.optimizers import create_loraplus_optimizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).train()
    own = {"betas": Recipe().betas, "eps": Recipe().eps, "loraplus_weight_decay": Recipe().weight_decay}
    own["loraplus_lr_embedding"] = RATE / 3
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=RATE, loraplus_lr_ratio=ratio, **own)
    losses = losses_of_steps(model, optimizer, steps)
    return losses, get_peft_model_state_dict(model, save_embedding_layers=False)


def test_a_run_counts_the_work_that_is_planned(one_rank: dict[str, Any]) -> None:
    arguments = {**planned_settings(folder("llama"), seq_length=LENGTH), "lora": SETTINGS}
    fields = with_adapters(GPTFields.of(arguments), arguments)
    planned = step_work(Sizes(fields, ParallelLayout(), 1, GlobalBatch(1, 1, 1, 1, LENGTH), Formats.of({}, {})))
    assert one_rank["flops"] == planned.flops_per_token


def test_recomputation_changes_nothing(one_rank: dict[str, Any]) -> None:
    """The first block's input needs a gradient, or torch would drop those of all blocks."""
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for rank in run_ranks(2, train, folder("llama"), Layout(pp=2), SETTINGS, fields=fields):
        assert rank["losses"] == pytest.approx(one_rank["losses"], abs=LOSS)


def test_a_checkpoint_holds_what_is_trained_alone(one_rank: dict[str, Any]) -> None:
    contents = MCoreCheckpointIO().read_contents(str(one_rank["saved"] / f"step={STEPS}.ckpt"))
    weights = [name for name in contents.shapes if not name.startswith("optimizer.")]
    assert weights
    assert all(".lora." in name for name in weights)
    assert len(weights) == len(one_rank["held"])


@pytest.mark.parametrize(("layout", "family"), RESUMED, ids=lambda value: getattr(value, "id", value))
def test_a_run_goes_on_where_it_was_saved(layout: Layout, family: str, tmp_path: Path) -> None:
    """Bit for bit on the same layout; on another one within what layouts differ by."""
    of_dense = JOINED if family == "phi3" else ENDS
    lora = {**SETTINGS, **({"modules_to_save": ["lm_head"], **STACKED} if layout.moe else of_dense)}
    undisturbed = run_ranks(layout.world_size, train, folder(family), layout, lora, steps=4)
    run_ranks(layout.world_size, train, folder(family), layout, lora, steps=2, save=str(tmp_path))
    start = str(tmp_path / "step=2.ckpt")
    resumed = run_ranks(layout.world_size, train, folder(family), layout, lora, steps=4, start=start)
    wanted, found = whole(undisturbed), whole(resumed)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[place], found[place]) for place in wanted)
    for rank in run_ranks(2, train, folder(family), Layout(pp=2), lora, steps=4, start=start):
        assert rank["losses"] == pytest.approx(undisturbed[0]["losses"][2:], abs=LOSS)


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(
            {"target_modules": r".*experts\.[1-2]\.(up|down)_proj"}, id="some experts", marks=pytest.mark.thorough
        ),
        pytest.param(
            {"target_modules": "all-linear", "rank_pattern": {r"experts\.1\.down_proj": 2}}, id="ranks differ"
        ),
    ],
)
def test_adapters_that_differ_among_experts_go_on_and_are_exported(chosen: dict[str, Any], tmp_path: Path) -> None:
    lora, base = {**SETTINGS, **chosen}, folder("qwen3_moe")
    layout = Layout(moe=True, dp=2, ep=2, distributed_optimizer=True)
    undisturbed = run_ranks(2, train, base, layout, lora, steps=4)
    first, start, exported = (str(tmp_path / name) for name in ("first", "step=2.ckpt", "exported"))
    run_ranks(2, train, base, layout, lora, steps=2, save=str(tmp_path), adapter=first, experts="each")
    export_checkpoint(start, exported, adapter=True, experts="each")
    of_run, of_file = (load_file(Path(path) / "adapter_model.safetensors") for path in (first, exported))
    assert of_run.keys() == of_file.keys()
    assert all(torch.equal(of_run[name], of_file[name]) for name in of_run)
    resumed = whole(run_ranks(2, train, base, layout, lora, steps=4, start=start))
    assert all(torch.equal(data, resumed[place]) for place, data in whole(undisturbed).items())
    for rank in run_ranks(2, train, base, Layout(moe=True, pp=2), lora, steps=4, start=start):
        assert rank["losses"] == pytest.approx(undisturbed[0]["losses"][2:], abs=LOSS)


@on_ranks(1)
def test_a_checkpoint_of_adapters_is_refused_by_a_model_without_them(one_rank: dict[str, Any]) -> None:
    start, module = one_rank["saved"] / f"step={STEPS}.ckpt", MCoreGPT.from_pretrained(folder("llama"), LENGTH)
    with refuses(ValueError, "this checkpoint holds LoRA adapters, and the model has none"):
        make_trainer({}, max_steps=STEPS + 1).fit(module, DataLoader(Rows(), batch_size=1), ckpt_path=start)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"])
def test_a_checkpoint_of_another_base_is_refused(name: str, one_rank: dict[str, Any], tmp_path: Path) -> None:
    """Even if one value alone differs."""
    other = shutil.copytree(folder("llama"), tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights[name][-1, -1] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    start = str(one_rank["saved"] / f"step={STEPS}.ckpt")
    with pytest.raises(RanksFailedError, match=r"were trained on another base than .*other; give the model"):
        run_ranks(1, train, str(other), Layout(), SETTINGS, start=start)


@pytest.mark.parametrize(
    ("layout", "family", "lora"),
    [
        (Layout(tp=2, sp=True), "llama", {**SETTINGS, "modules_to_save": ["embed_tokens", "lm_head"]}),
        (Layout(dp=2), "qwen2", {**SETTINGS, "use_dora": True}),
        (Layout(tp=2), "llama, one key head", {**SETTINGS, "target_modules": ["q_proj", "v_proj"]}),
        (Layout(moe=True, pp=2), "qwen2_moe", {**SETTINGS, **GATES}),
        pytest.param(Layout(moe=True, dp=2, ep=2), "qwen2_moe", SETTINGS, marks=pytest.mark.thorough),
        pytest.param(Layout(tp=2, pp=2), "llama", {**SETTINGS, **ENDS}, marks=pytest.mark.thorough),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_a_folder_of_peft_comes_back(layout: Layout, family: str, lora: dict[str, Any], tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_ranks(layout.world_size, train, folder(family), layout, lora, steps=2, adapter=first)
    run_ranks(1, copy_adapter, folder(family), first, second)
    before, after = (load_file(f"{path}/adapter_model.safetensors") for path in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads(Path(path, "adapter_config.json").read_text()) for path in (first, second)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        (Layout(tp=2, sp=True), {**SETTINGS, **ENDS}),
        (Layout(pp=2), {**SETTINGS, "use_dora": True, "use_rslora": True}),
    ],
    ids=lambda value: getattr(value, "id", "lora"),
)
def test_an_export_is_what_peft_merges(layout: Layout, lora: dict[str, Any], tmp_path: Path) -> None:
    """To the last bit with LoRA; the lengths of DoRA are computed in other ways."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter, merged = str(tmp_path / "adapter"), str(tmp_path / "merged")
    saved = str(tmp_path / "saved")
    run_ranks(layout.world_size, train, folder("llama"), layout, lora, steps=2, save=saved, adapter=adapter, hf=merged)
    base = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    unloaded = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    for name, wanted in unloaded.state_dict().items():
        difference = (exported[name] - wanted).abs().max().item()
        assert difference <= (1e-6 if "use_dora" in lora else 0), name
    checkpoint, again = f"{saved}/step=2.ckpt", [str(tmp_path / name) for name in ("adapter again", "merged again")]
    run_ranks(1, export_both, checkpoint, *again, open_group=False)
    for one, other, file in ((adapter, again[0], "adapter_model"), (merged, again[1], "model")):
        before, after = (load_file(f"{path}/{file}.safetensors") for path in (one, other))
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6 if "use_dora" in lora else 0)


@pytest.mark.parametrize(
    "layout",
    thorough_but(
        (
            Layout(tp=2, sp=True),
            Layout(moe=True, dp=2, ep=2),
            Layout(moe=True, tp=2, sp=True, ep=2, etp=1),
            Layout(moe=True, pp=2),
        ),
        *("tp2-sp", "moe-dp2-ep2"),
    ),
)
def test_both_layouts_of_experts_come_back(layout: Layout, tmp_path: Path) -> None:
    """From PEFT's stacked tensors to those of each expert and back, bit for bit; PEFT computes the same."""
    source, stacked, each = reference("stacked experts"), str(tmp_path / "stacked"), str(tmp_path / "each")
    again, stacked_again = str(tmp_path / "each again"), str(tmp_path / "stacked again")
    copies = {
        source.folder: {stacked: "stacked", each: "each"},
        stacked: {stacked_again: "stacked"},
        each: {again: "each"},
    }
    run_ranks(layout.world_size, copy_adapters, folder("deepseek_v3"), copies, layout)
    for before, after in ((source.folder, stacked), (stacked, stacked_again), (each, again)):
        wanted, found = (load_file(f"{path}/adapter_model.safetensors") for path in (before, after))
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    configs = [json.loads(Path(path, "adapter_config.json").read_text()) for path in (stacked, stacked_again)]
    assert configs[0] == configs[1]
    assert (logits_of_peft("deepseek_v3", stacked) - source.logits).abs().max() <= 1e-5


def test_copies_of_frozen_weights_are_compared_with_the_base(tmp_path: Path) -> None:
    """PEFT writes them beside adapters of the embedding and the output layer."""
    source = Path(shutil.copytree(reference("embedding").folder, tmp_path / "changed"))
    tensors = load_file(source / "adapter_model.safetensors")
    copied = "base_model.model.lm_head.base_layer.weight"
    tensors[copied][-1, -1] += 1e-3
    save_file(tensors, source / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(RanksFailedError, match=rf"has {copied}, which differs from this base; give the base that it"):
        run_ranks(1, copy_adapter, folder("llama"), str(source), str(tmp_path / "again"))


def test_experts_with_an_a_each_fit_both_layouts(tmp_path: Path) -> None:
    """PEFT computes with either what transformers computes with the merged weights."""
    from transformers import AutoModelForCausalLM

    first, each, stacked, merged = (str(tmp_path / name) for name in ("first", "each", "stacked", "merged"))
    layout = Layout(moe=True, dp=2, ep=2)
    run_ranks(2, train, folder("qwen3_moe"), layout, SETTINGS, steps=2, adapter=first, hf=merged, experts="each")
    run_ranks(1, copy_adapters, folder("qwen3_moe"), {first: {each: "each", stacked: "stacked"}}, Layout(moe=True))
    wanted, found = (load_file(f"{path}/adapter_model.safetensors") for path in (first, each))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    logits = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(text()["tokens"]).logits
    for path in (each, stacked):
        assert (logits_of_peft("qwen3_moe", path) - logits).abs().max() <= 1e-5


def test_several_adapters_are_merged_one_after_the_other(tmp_path: Path) -> None:
    """As PEFT does it; a third one is trained on top, and its checkpoint knows what was merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    first, second = reference("lengths").folder, reference("all").folder
    adapter, exported, again = (str(tmp_path / name) for name in ("adapter", "exported", "again"))
    layout, saved = Layout(tp=2, sp=True), str(tmp_path)
    options: dict[str, Any] = {"steps": 2, "merged": [first, second]}
    run_ranks(2, train, folder("llama"), layout, SETTINGS, save=saved, adapter=adapter, hf=exported, **options)
    run_ranks(1, export_checkpoint, f"{saved}/step=2.ckpt", again, open_group=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    for path in (first, second, adapter):
        model = PeftModel.from_pretrained(model, path).merge_and_unload()
    for path in (exported, again):
        found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for name, wanted in model.state_dict().items():
            torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-6)  # lengths are computed in other ways
    with pytest.raises(RanksFailedError, match=r"with adapters=\['.*', '.*'\] merged into it, and adapters=\[\]"):
        run_ranks(1, train, folder("llama"), Layout(), SETTINGS, start=f"{saved}/step=2.ckpt")


def test_an_imported_adapter_is_a_checkpoint_of_any_layout(tmp_path: Path) -> None:
    """Loaded on ranks it is PEFT's own again; so is what the command writes."""
    source, imported, layout = (
        reference("stacked experts").folder,
        str(tmp_path / "in.ckpt"),
        Layout(moe=True, dp=2, ep=2),
    )
    files = [str(tmp_path / name) for name in ("on ranks", "by command")]
    words = ["import", folder("deepseek_v3"), imported, "--adapter", source]
    assert run_ranks(1, run_command, words, open_group=False) == [0]
    assert run_ranks(1, run_command, ["export", imported, files[1], "--adapter"], open_group=False) == [0]
    run_ranks(2, copy_imported, imported, files[0], layout)
    wanted = load_file(f"{source}/adapter_model.safetensors")
    for path in files:
        found = load_file(f"{path}/adapter_model.safetensors")
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    with pytest.raises(ValueError, match=r"is a checkpoint of LoRA adapters and continues them; leave lora and ad"):
        MCoreGPT.from_pretrained(imported, lora=source)


def copy_imported(checkpoint: str, target: str, layout: Layout) -> None:
    """Load the checkpoint of an adapter on a layout, and write it as a folder."""
    module = MCoreGPT.from_pretrained(checkpoint, seq_length=LENGTH)
    trainer = make_trainer(MCoreStrategy(**layout.strategy_arguments, micro_batch_size=1), limit_val_batches=1)
    trainer.validate(module, DataLoader(Rows(), batch_size=1), verbose=False)
    save_adapter(module, target)


def logits_of_peft(family: str, adapter: str) -> Tensor:
    """Return what PEFT computes of the text of the parity tests, [b, s, v]."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32, attn_implementation="eager")
    logits: Tensor = PeftModel.from_pretrained(base, adapter).eval()(text()["tokens"]).logits
    return logits.detach()


def copy_adapters(family: str, copies: dict[str, dict[str, Any]], layout: Layout) -> None:
    """Read adapters on a layout and write each in the layouts of experts that are asked for."""
    for source, targets in copies.items():
        module = MCoreGPT.from_pretrained(family, seq_length=LENGTH, lora=source)
        trainer = make_trainer(MCoreStrategy(**layout.strategy_arguments, micro_batch_size=1), limit_val_batches=1)
        trainer.validate(module, DataLoader(Rows(), batch_size=1), verbose=False)
        for target, experts in targets.items():
            save_adapter(module, target, experts=experts)


def export_both(checkpoint: str, adapter: str, merged: str) -> None:
    """Export a checkpoint as the command does."""
    export_checkpoint(checkpoint, adapter, adapter=True)
    export_checkpoint(checkpoint, merged)


def copy_adapter(family: str, source: str, target: str) -> None:
    """Read an adapter and write it again."""
    module = MCoreGPT.from_pretrained(family, seq_length=LENGTH, lora=source)
    with single_process():
        module.configure_model()
        save_adapter(module, target)


@cpu_runtime()
def gradient_below_adapters(sizes: tuple[int, int], sequence_parallel: bool) -> tuple[Tensor, list[int]]:
    """Return the gradient of what enters two layers whose weights are zero, so that only adapters pass it on.

    Returns:
        The gradient on this rank, [s, b, h], and the first and last token of it.
    """
    inputs, wide = sizes
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    rank, size = parallel_state.get_tensor_model_parallel_rank(), dist.get_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, use_cpu_initialization=True
    )
    options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    up = ColumnParallelLinear(inputs, wide, gather_output=False, **options)
    down = RowParallelLinear(wide, inputs, input_is_parallel=True, skip_bias_add=False, **options)
    share = wide // size
    adapt(up, [Projection("up", (RowsOfLayer(0, rank * share, share),), wide, inputs, 0)], LoRA(r=3), 0)
    adapt(down, [Projection("down", (RowsOfLayer(0, 0, inputs),), inputs, wide, rank * share)], LoRA(r=3), 1)
    with torch.no_grad():  # A is drawn from its name: the same on every layout
        for layer, outputs, first in ((up, wide, rank * share), (down, inputs, 0)):
            (adapter,) = layer.lora.values()
            whole = torch.randn(outputs, 3, generator=torch.Generator().manual_seed(outputs))
            adapter.lora_B.copy_(whole[first : first + len(adapter.lora_B)])
        for layer in (up, down):
            layer.weight.requires_grad_(False)
    tokens = 8
    own = tokens // size if sequence_parallel else tokens
    place = [rank * own, rank * own + own] if sequence_parallel else [0, tokens]
    text, wanted = torch.randn(2, tokens, 2, inputs, generator=torch.Generator().manual_seed(0))
    entering = text[place[0] : place[1]].clone().requires_grad_()
    (down(up(entering)[0])[0] * wanted[place[0] : place[1]]).sum().backward()
    assert entering.grad is not None
    return entering.grad, place


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_gradient_below_adapters_is_that_of_one_rank(sequence_parallel: bool) -> None:
    """Its ratio to one rank's is 1.0; it is 2.0 where the gathered input's gradient is summed twice."""
    ((wanted, _),) = run_ranks(1, gradient_below_adapters, (6, 4), False)
    for gradient, (first, last) in run_ranks(2, gradient_below_adapters, (6, 4), sequence_parallel):
        whole = wanted[first:last]
        ratio = (gradient * whole).sum() / whole.square().sum()
        assert ratio.item() == pytest.approx(1.0, abs=1e-6)
        torch.testing.assert_close(gradient, whole)


def drawn(family: str, layout: Layout, seed: str | None, runs: int) -> list[list[tuple[Any, ...]]]:
    """Return what the adapters of several runs of a process begin with, of this rank."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    if seed is not None:
        os.environ["PL_GLOBAL_SEED"] = seed
    found = []
    for _ in range(runs):
        module = MCoreGPT.from_pretrained(family, seq_length=LENGTH, lora=LoRA(**SETTINGS, target_modules=TARGETS))
        trainer = make_trainer(layout.strategy_arguments, limit_val_batches=1)
        trainer.validate(module, DataLoader(Rows(), batch_size=1), verbose=False)
        pieces = adapter_pieces(module, module.lora)
        found.append([(piece.key, piece.start, piece.data.clone()) for piece in pieces])
    return found


TARGETS = ["q_proj", "down_proj", "embed_tokens"]


def test_runs_begin_with_other_adapters_unless_they_are_seeded() -> None:
    """Ranks that share an adapter begin with the same one; with a seed, those of all layouts do."""
    by_layout = []
    for layout, seed in ((Layout(tp=2), None), (Layout(tp=2, pp=2), "7"), (Layout(), "7"), (Layout(), "8")):
        ranks = run_ranks(layout.world_size, drawn, folder("llama"), layout, seed, 2)
        runs: list[dict[Any, Tensor]] = [{}, {}]
        for number, held in [(number, held) for rank in ranks for number, held in enumerate(rank)]:
            for key, start, data in held:
                assert torch.equal(runs[number].setdefault((key, start), data), data)
        same = {torch.equal(data, runs[1][place]) for place, data in runs[0].items() if data.any()}
        assert same == {seed is not None}
        by_layout.append(runs[0])
    _, sharded, whole, other = by_layout
    for (key, start), data in sharded.items():
        part = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
        assert torch.equal(data, whole[key, (0, 0)][part])
    changed = [key for key, tensor in whole.items() if not torch.equal(tensor, other[key])]
    assert changed == [key for key, tensor in whole.items() if tensor.any()]


def test_lengths_of_frozen_rows_are_computed_once_and_after_a_load() -> None:
    run_ranks(1, read_lengths, folder("llama"))


def read_lengths(family: str) -> None:
    """Read the lengths of rows before and after their weights change."""
    module = MCoreGPT.from_pretrained(family, lora=LoRA(use_dora=True, target_modules=["o_proj"]))
    with single_process():
        module.configure_model()
        layer = module.model.chunks[0].decoder.layers[0].self_attention.linear_proj
        adapters, weight = layer.lora, layer.weight
        with torch.inference_mode():
            first = adapters._squares(weight)
        assert not first.is_inference()
        with torch.no_grad():
            weight.copy_(2 * weight)
        torch.testing.assert_close(adapters.ratio(weight), torch.full_like(first, 0.5))
        assert adapters._squares(weight) is adapters._squares(weight)
        weight.data = weight.data.bfloat16()
        assert adapters._squares(weight).equal(weight.float().square().sum(1))


@cpu_runtime()
def dropped_ones(sequence_parallel: bool) -> dict[str, Tensor]:
    """Return what dropout makes of ones before the adapters of a column-parallel and of a row-parallel layer."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    size = dist.get_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, use_cpu_initialization=True
    )
    options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    up = ColumnParallelLinear(8, 8, gather_output=False, **options)
    down = RowParallelLinear(8, 8, input_is_parallel=True, skip_bias_add=False, **options)
    found = {}
    for name, layer, split in (("column", up, 0), ("row", down, 1)):
        rows, columns = layer.weight.shape
        adapt(layer, [Projection(name, (RowsOfLayer(0, 0, rows),), 8, 8, 0)], LoRA(lora_dropout=0.25), split)
        ones = torch.ones(4000, 1, columns)
        found[name] = layer.lora._dropped(ones)
        assert layer.lora.eval()._dropped(ones) is ones
        layer.lora.train().dropout = 0.0
        assert layer.lora._dropped(ones) is ones
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_differs_between_ranks_with_other_tokens_or_columns_alone(sequence_parallel: bool) -> None:
    first, second = run_ranks(2, dropped_ones, sequence_parallel)
    assert torch.equal(first["column"], second["column"]) is not sequence_parallel
    assert not torch.equal(first["row"], second["row"])
    for dropped in (*first.values(), *second.values()):
        assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
        assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
