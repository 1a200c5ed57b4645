# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore plan``: files of every door, numbers of devices, output and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mcore.cli.plan import kind_of, run, settings_of_files
from lightning_mcore.planning.machines import machine_named, parse_memory
from lightning_mcore.planning.plan import make_plan
from lightning_mcore.planning.report import seconds
from lightning_mcore.planning.suggest import suggest
from tests.support.factory_files import LLAMA3, write_run
from tests.support.hf_models import tiny_folder
from tests.support.sentences import refuses
from tests.unit.planning.test_plan_rules import run_with

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


def cli_file(folder: Path, **changes: Any) -> str:
    document = {
        "trainer": {
            "accelerator": "gpu",
            "devices": 8,
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 16,
            "strategy": {
                "class_path": "lightning_mcore.MCoreStrategy",
                "init_args": {
                    "tensor_model_parallel_size": 4,
                    "pipeline_model_parallel_size": 2,
                    "sequence_parallel": True,
                },
            },
        },
        "model": {
            "class_path": "lightning_mcore.MCoreGPT",
            "init_args": {"vocab_size": 128256, "seq_length": 8192, "transformer": LLAMA},
        },
        "data": {
            "class_path": "lightning_mcore.MCorePretrainingData",
            "init_args": {"data_paths": "corpus", "seq_length": 8192, "batch_size": 1},
        },
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_plan_shows_run_groups_stages_traffic_and_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, cli_file(tmp_path), "--picture")
    assert code == 0
    for part in (
        *("8 x H100", "8.03 B", "tp4 pp2 cp1 dp1 sp", "micro batch 1 x 16 microbatches x data parallel 1 = 16 rows"),
        *(
            "embedding 0-15",
            "16-31 output",
            "all-gather and reduce-scatter",
            "bubble 5.9%",
            "stage 1 |",
            "PFLOP a step",
        ),
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_numbers_of_a_tiny_model_are_words_of_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = {"vocab_size": 64, "seq_length": 16, "transformer": {"num_layers": 1, "hidden_size": 32}}
    tiny["transformer"]["num_attention_heads"] = 2
    trainer = {"accelerator": "gpu", "devices": 1, "strategy": {"class_path": "lightning_mcore.MCoreStrategy"}}
    path = cli_file(
        tmp_path, trainer=trainer, model={"class_path": "lightning_mcore.MCoreGPT", "init_args": tiny}, data={}
    )
    code, text, _ = printed(capsys, path, "--backend", "local")
    assert code == 0
    assert "32-true, Megatron's layers in PyTorch\n" in text
    assert "= 1 row (assumed:" in text
    assert "\n                1 row x 16 = 16 tokens a step\n" in text
    assert "estimate      none on H100: launching kernels takes longest in so small a step\n" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(15.857, "15.86 s"), (0.9996, "1.00 s"), (0.4239, "424 ms"), (0.0123, "12.3 ms"), (1e-8, "0.0 ms"), (0.0, "0 s")],
)
def test_a_time_is_in_seconds_or_milliseconds(number: float, text: str) -> None:
    assert seconds(number) == text


def test_parts_of_recompute_that_are_not_counted_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}
    init = {"vocab_size": 128256, "seq_length": 8192, "transformer": LLAMA | parts}
    model = {"class_path": "lightning_mcore.MCoreGPT", "init_args": init}
    _, text, _ = printed(capsys, cli_file(tmp_path, model=model))
    assert "- memory that recompute of layernorm saves is not counted\n" in text


def test_json_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, cli_file(tmp_path), "--json", "--devices", "1024")
    plan = json.loads(text)
    assert code == 0
    assert plan["parameters"]["total"] == 8_030_261_248
    assert plan["grid"]["sizes"]["dp"] == 128
    assert [stage["first_rank"] for stage in plan["stages"]] == [0, 512]
    assert plan["stages"][0]["memory_bytes"]["total"] > 0
    assert plan["errors"] == []


def test_what_stands_behind_the_file_changes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trainer.strategy.pipeline_model_parallel_size=4", "--trainer.devices", "16", "data.batch_size=2")
    plan = json.loads(printed(capsys, cli_file(tmp_path), *words, "--json")[1])
    assert plan["layout"]["pipeline_model_parallel_size"] == 4
    assert (plan["devices"], plan["batch"]["rows"]) == (16, 32)


def test_a_later_file_counts(tmp_path: Path) -> None:
    first = cli_file(tmp_path)
    second = tmp_path / "more.yaml"
    second.write_text("trainer: {strategy: {init_args: {context_parallel_size: 2}}}\n", encoding="utf-8")
    settings = settings_of_files([first, str(second)], [])
    assert settings.strategy["context_parallel_size"] == 2
    assert settings.strategy["tensor_model_parallel_size"] == 4
    short = "trainer: {strategy: {class_path: MCoreStrategy, init_args: {context_parallel_size: 2}}}\n"
    second.write_text(short, encoding="utf-8")  # the same class by its short name
    assert settings_of_files([first, str(second)], []).strategy["tensor_model_parallel_size"] == 4


def test_another_class_keeps_the_arguments_that_it_has_too(tmp_path: Path) -> None:
    first = cli_file(tmp_path)
    words = [("data", "MCoreFinetuningData"), ("data.tokenizer", "t"), ("data.train_files", "f")]
    data = settings_of_files([first], words).data
    assert data["seq_length"] == 8192
    assert "data_paths" not in data
    assert data["batch_size"] == 1


def test_a_later_file_replaces_the_transformer_as_with_fit_and_a_word_changes_one_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "more.yaml"
    second.write_text("model: {init_args: {transformer: {num_layers: 2}}}\n", encoding="utf-8")
    code, text, _ = printed(capsys, cli_file(tmp_path), str(second))
    assert code == 2
    assert "transformer lacks hidden_size" in text
    assert printed(capsys, cli_file(tmp_path), "--model.transformer.num_layers=16")[0] == 0
    assert printed(capsys, cli_file(tmp_path), '--model.transformer={"num_layers": 2}')[0] == 2


def test_every_error_is_listed_and_the_exit_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model.transformer.recompute_granularity=full", "--trainer.strategy.overlap_param_gather=true")
    code, text, _ = printed(capsys, cli_file(tmp_path), *words, "--devices", "6")
    joined = " ".join(text.split())
    assert code == 2
    for part in (
        "recompute_method",
        "overlap_param_gather=True needs",
        "number of ranks (devices * num_nodes), which is 6",
    ):
        assert part in joined, part


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--trainr.devices=4"], "did you mean 'trainer'?"),
        (["--trainer.strategy.tensor_parallel_size=4"], "did you mean 'tensor_model_parallel_size'?"),
        (["--model.transformer.num_layer=4"], "did you mean num_layers?"),
        (["--data.batchsize=4"], "did you mean 'batch_size'?"),
        (["--trainer.devises=4"], "did you mean '--trainer.devices'?"),
        (["--trainer.precision=bf17"], "precision='bf17'"),
        (["--trainer.strategy.sequence_parallel=maybe"], "sequence_parallel='maybe'"),
        (["--devices", "0"], "devices=0"),
        (["--trainer.max_steps={"], "max_steps"),
        (["--devices", "8", "--nodes", "3"], "nodes=3"),
        (["--memory", "eighty"], "memory='eighty'"),
        (["--devicees", "8"], "did you mean 'devices'?"),
        (["--trainer.strategy", "ddp"], "'ddp' is not MCoreStrategy"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, error = printed(capsys, cli_file(tmp_path), *words)
    assert code == 2
    assert part in " ".join(f"{text} {error}".split())
    assert "Traceback" not in error


def test_a_missing_file_a_broken_one_and_one_of_no_front_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, strange = tmp_path / "broken.yaml", tmp_path / "strange.yaml"
    broken.write_text("trainer: [1, 2", encoding="utf-8")
    strange.write_text("colour: red\n", encoding="utf-8")
    for path, part in (
        (tmp_path / "no.yaml", "is not a file"),
        (broken, "is not YAML"),
        (strange, "is not the file of a run"),
    ):
        code, _, error = printed(capsys, str(path))
        assert code == 2
        assert part in error
        assert error.count("\n") == 1


def test_the_front_door_is_told_by_the_keys() -> None:
    assert kind_of({"trainer": {}, "model": {}}, "a") == "lightning"
    assert kind_of({"fit": {"trainer": {}}}, "a") == "lightning"
    assert kind_of({"stage": "sft", "dataset": "x", "cutoff_len": 8}, "a") == "llamafactory"
    assert kind_of({"tensor_model_parallel_size": 2, "learning_rate": 0.1}, "a") == "arguments"


def test_a_file_of_hugging_face_style_arguments(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    values = {
        "output_dir": "out",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_distributed_optimizer": True,
        "bf16": True,
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    settings = settings_of_files([str(path)], [("tensor_model_parallel_size", "4")])
    assert settings.strategy["tensor_model_parallel_size"] == 4
    assert settings.precision["precision"] == "bf16-mixed"
    assert settings.data["batch_size"] == 4
    assert settings.trainer["accumulate_grad_batches"] == 2


def test_a_small_learning_rate_without_a_dot_is_a_number(tmp_path: Path) -> None:
    settings = settings_of_files([cli_file(tmp_path)], [("model.recipe.learning_rate", "1e-4")])
    assert settings.model["recipe"]["learning_rate"] == 1e-4


def test_warnings_name_what_idles_and_what_does_not_fit() -> None:
    plan = make_plan(
        run_with(strategy={"pipeline_model_parallel_size": 4, "overlap_grad_reduce": True}),
        4,
        memory_limit=1000.0,
    )
    warnings = "\n".join(plan.warnings)
    for part in ("waits 75%", "overlap_grad_reduce=True does nothing", "needs 0.0 GiB"):
        assert part in warnings, part
    plan = make_plan(run_with(strategy={"tensor_model_parallel_size": 4}), 4, devices_per_node=2)
    warnings = "\n".join(plan.warnings)
    for part in ("spans nodes of 2", "sequence_parallel=False"):
        assert part in warnings, part
    assert make_plan(run_with(), 1).warnings == ()


def llama(**changes: Any) -> Any:
    return run_with(
        base=LLAMA,
        precision={"precision": "bf16-mixed"},
        trainer={"accelerator": "gpu", "devices": 8, "accumulate_grad_batches": 8},
        model={"vocab_size": 128256, "seq_length": 8192},
        **changes,
    )


def test_suggestions_fit_keep_the_global_batch_and_come_best_first() -> None:
    machine = machine_named("h100")
    found = suggest(llama(), 16, 8, machine, most=1000)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        changed = run_with(
            base={**LLAMA, **one.recompute},
            strategy=dict(one.strategy),
            precision={"precision": "bf16-mixed"},
            trainer={"accelerator": "gpu", "accumulate_grad_batches": one.num_microbatches},
            model={"vocab_size": 128256, "seq_length": 8192},
            data={"batch_size": one.micro_batch_size},
        )
        plan = make_plan(changed, 16, 8, machine)
        assert plan.errors == ()
        assert plan.batch is not None
        assert plan.batch.rows == 2 * 8 * 8
        assert plan.fullest is not None
        assert plan.fullest.memory.total == one.memory <= machine.memory


def test_suggestions_shard_as_the_optimizer_allows() -> None:
    run = run_with(base=LLAMA, trainer={"accelerator": "gpu"}, model={"recipe": {"optimizer": "muon"}})
    found = suggest(run, 4, 4, machine_named("h100"), backend="local")
    assert any("use_layer_wise_distributed_optimizer" in one.strategy for one in found)
    assert not any("use_distributed_optimizer" in one.strategy for one in found)


def test_a_file_that_would_be_refused_on_every_layout_is_told_why() -> None:
    with refuses(ValueError, "max_stepss"):
        suggest(run_with(base=LLAMA, trainer={"accelerator": "gpu", "max_stepss": 3}), 4, 4, machine_named("h100"))


def test_a_long_search_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_mcore.cli.plan._SILENT_SECONDS", 0.0)

    code, _, error = printed(capsys, cli_file(tmp_path), "--suggest", "--memory", "80GB")

    assert code == 0
    lines = [line for line in error.splitlines() if "tried" in line]
    tried = [int(line.split()[2]) for line in lines]
    assert tried == sorted(tried)
    assert len(lines) > 1
    assert lines[-1].endswith(" fit")


def test_suggest_prints_a_table_and_lines_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, cli_file(tmp_path), "--suggest", "--memory", "80GB")
    assert code == 0
    assert "BEST FIRST" in text
    pasted = yaml.safe_load(text.partition("into the file:")[2])
    assert pasted["trainer"]["strategy"]["class_path"] == "lightning_mcore.MCoreStrategy"


def test_a_model_of_many_experts_is_not_tried_on_every_layout() -> None:
    """There are some 6,400 ways to cut this one; the best layouts come early and are found."""
    model = {**LLAMA, "num_layers": 64, "hidden_size": 7168, "num_attention_heads": 128, "num_query_groups": 128}
    model |= {"num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_grouped_gemm": True}
    run = run_with(
        base=model,
        precision={"precision": "bf16-mixed"},
        trainer={"accelerator": "gpu", "devices": 2048, "accumulate_grad_batches": 8},
        model={"vocab_size": 129280, "seq_length": 16384},
        data={"batch_size": 1},
    )
    best = suggest(run, 2048, 8, machine_named("h100"))[0]
    assert best.flops_rate > 150e12


def pasted(document: Any, lines: Any) -> Any:
    if not isinstance(document, dict) or not isinstance(lines, dict):
        return lines
    return {**document, **{key: pasted(document.get(key), value) for key, value in lines.items()}}


def test_lines_to_paste_hold_on_top_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has settings that the suggestion has not: a pipeline, rows of a microbatch, recomputation, alignment."""
    path = cli_file(tmp_path)
    document = yaml.safe_load(Path(path).read_text("utf-8"))
    strategy = document["trainer"]["strategy"]["init_args"]
    strategy |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "micro_batch_size": 2}
    strategy |= {"overlap_grad_reduce": True, "align_grad_reduce": True, "tp_comm_overlap": True}
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    document["model"]["init_args"]["transformer"] |= full
    document["data"]["init_args"]["batch_size"] = 8
    Path(path).write_text(yaml.safe_dump(document), encoding="utf-8")
    words = ("--devices", "64", "--memory", "140GB")
    before = json.loads(printed(capsys, path, "--json")[1])["batch"]["rows"]
    best = json.loads(printed(capsys, path, *words, "--suggest", "--json")[1])[0]
    assert "pipeline_model_parallel_size" in best["strategy"]
    lines = printed(capsys, path, *words, "--suggest")[1].partition("into the file:")[2]
    Path(path).write_text(yaml.safe_dump(pasted(document, yaml.safe_load(lines))), encoding="utf-8")
    code, text, _ = printed(capsys, path, *words, "--json")
    plan = json.loads(text)
    assert code == 0
    assert plan["batch"]["rows"] == before
    assert plan["pipeline"]["bubble"] == best["bubble"]
    assert max(stage["memory_bytes"]["total"] for stage in plan["stages"]) == best["memory"]


def test_nothing_that_fits_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, error = printed(capsys, cli_file(tmp_path), "--suggest", "--memory", "2GB")
    assert (code, text) == (2, "")
    assert error.startswith("error: no layout of 8 devices fits: the smallest needs")


def test_sizes_of_memory() -> None:
    assert parse_memory("80GB") == 80e9
    with refuses(ValueError, "80 bytes"):
        parse_memory("80")
    assert parse_memory("1.5 GiB") == 1.5 * 2**30


def test_a_line_of_flags_is_planned_like_the_file_with_these_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path, LLAMA3, "llama")
    keys = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    spoken = ["--do-train" if flag == "--do_train=true" else flag for flag in flags]  # read by LLaMA-Factory's rules
    plans = []
    for words in ([file], flags, spoken):
        assert run([*words, "--devices", "2", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] == plans[2]
    assert run([*flags, "--cutof_len=8", "--devices", "2"]) == 2
    assert "unknown option '--cutof_len'; did you mean '--cutoff_len'?" in capsys.readouterr().err
    assert run(["--devices", "2"]) == 2
    assert "error: no FILE is given; give the file of a run, or the keys of LLaMA" in capsys.readouterr().err


def test_a_model_of_the_hub_is_planned_with_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    rows = [{"instruction": "a", "input": "", "output": "b"}]
    keys = {**LLAMA3, "model_name_or_path": "nobody/llama", "pure_bf16": True}
    file = write_run(tmp_path, keys, model=None, data=rows)
    document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    Path(file).write_text(yaml.safe_dump({**document, "model_name_or_path": "nobody/llama"}), encoding="utf-8")
    code, text, _ = printed(capsys, file, "--devices", "2")
    assert code == 2
    assert text.splitlines()[0] == (
        "nobody/llama is a name on the Hugging Face hub whose config is not here, so nothing below includes the "
        "model; give its config.json with --config FILE"
    )
    config = tiny_folder("llama, plain") / "config.json"
    code, text, error = printed(capsys, file, "--devices", "2", "--config", str(config))
    assert code == 0, error + text
    assert "hub" not in text
    assert "pure_bf16: True becomes bf16: true" in " ".join(text.split())
    code, planned, _ = printed(capsys, file, "--devices", "2", "--json", "--model", str(config.parent))
    assert code == 0
    assert json.loads(planned)["parameters"]["total"] > 0
    for words, sentence in (
        (["--config", str(config), "--model", "x"], "are two models; give one of them"),
        (["--config", str(config), "--config", str(config)], "should be one config.json"),
    ):
        code, _, error = printed(capsys, file, "--devices", "2", *words)
        assert (code, sentence in error) == (2, True)
    code, _, error = printed(capsys, str(config), "--devices", "2")
    assert (code, "describes a model but no run; give the file of the run too" in error) == (2, True)


def test_a_pipeline_file_of_roll_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text("pretrain: model\nbeta: 0.1\nmax_grad_norm: 1.0\nactor_train: {}\nreference: {}\n")
    assert run([str(file)]) == 2
    assert "is a pipeline file of ROLL, which is not read" in capsys.readouterr().err
