# SPDX-License-Identifier: Apache-2.0
"""FP8: the settings land on Megatron's three configs, and what cannot be done is refused with the reason.

No line of FP8 arithmetic runs on a CPU: TransformerEngine has no CPU build. What is tested here is everything before
it: Megatron's own configs are built from the fields and validate them, and the checks of the machine are given machines
that are not there.
"""

import dataclasses
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from jsonargparse import ArgumentParser
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe, ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from lightning_mcore import MCoreModule, MCorePrecision, ModelShape, ParallelLayout
from lightning_mcore.config.fp8 import (
    ALIGNMENT,
    TRANSFORMER_FIELDS,
    FP8Recipe,
    FP8Settings,
    check_layers,
    check_microbatch,
    check_model,
)
from lightning_mcore.config.rules.model import check_fields
from lightning_mcore.layers.transformer_config import check_transformer_fields
from lightning_mcore.parallel.chunks import pipeline_config
from lightning_mcore.strategy.fp8_checks import (
    FP8Machine,
    check_chunks,
    check_fp8,
    check_machine,
    check_optimizer,
    check_versions,
)
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses
from tests.support.toy import PlainNet, StagedNet

pytestmark = pytest.mark.filterwarnings(
    "ignore:full scope is deprecated:UserWarning",  # Megatron's own default
    "ignore:mxfp8 without using reuse_grad_buf:UserWarning",
)

RECIPES = get_args(FP8Recipe)
HOPPER = FP8Machine("cuda", (9, 0), "12.9", "2.8.0")
BLACKWELL = FP8Machine("cuda", (10, 0), "12.9", "2.8.0")
ADA = FP8Machine("cuda", (8, 9), "12.9", "2.8.0")
MXFP8_WEIGHTS = {"fp8_recipe": "mxfp8", "fp8_param": True, "reuse_grad_buf_for_mxfp8_param_ag": True}


def settings(recipe: Any, **more: Any) -> FP8Settings:
    return FP8Settings(fp8_recipe=recipe, **more)


# Where the settings go


def test_without_fp8_nothing_is_said_about_it() -> None:
    plain = MCorePrecision("bf16-mixed")
    fields = {**plain.megatron_fields(), **plain.ddp_fields(), **plain.optimizer_fields(False)}
    assert not [name for name in fields if "fp8" in name or name in TRANSFORMER_FIELDS]


@pytest.mark.parametrize(
    ("given", "fp8", "recipe"),
    [
        ({"fp8_recipe": "tensorwise"}, "hybrid", "tensorwise"),
        ({"fp8": "e4m3"}, "e4m3", "delayed"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "e4m3", "blockwise"),
    ],
)
def test_a_recipe_or_a_format_alone_turns_fp8_on(given: dict[str, Any], fp8: str, recipe: str) -> None:
    fields = MCorePrecision("bf16-mixed", **given).megatron_fields()
    assert (fields["fp8"], fields["fp8_recipe"]) == (fp8, recipe)
    assert fields["bf16"]


EVERYTHING: dict[str, dict[str, Any]] = {
    "delayed": {
        "fp8": "e4m3",
        "fp8_margin": 1,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_wgrad": False,
        "fp8_dot_product_attention": True,
        "fp8_multi_head_attention": True,
        "tp_only_amax_red": True,
        "fp8_param": True,
    },
    "tensorwise": {
        "fp8": "hybrid",
        "fp8_dot_product_attention": True,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 2,
        "num_layers_at_end_in_bf16": 0,
        "fp8_param": True,
    },
    "blockwise": {"fp8": "e4m3", "first_last_layers_bf16": True, "fp8_param": True},
    "mxfp8": {"fp8": "e4m3", "fp8_param": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_lands_on_megatrons_configs_which_accept_it(recipe: str) -> None:
    given = EVERYTHING[recipe]
    precision = MCorePrecision("bf16-mixed", fp8_recipe=recipe, **given)  # type: ignore[arg-type]
    model = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **precision.megatron_fields())
    wanted = {name: value for name, value in given.items() if name in TRANSFORMER_FIELDS}
    assert {name: getattr(model, name) for name in wanted} == wanted
    assert model.fp8_recipe == getattr(Fp8Recipe, recipe)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, **precision.ddp_fields())
    reuse = bool(given.get("reuse_grad_buf_for_mxfp8_param_ag"))
    assert (ddp.fp8_param_gather, ddp.reuse_grad_buf_for_mxfp8_param_ag) == (True, reuse)
    optimizer = OptimizerConfig(**precision.optimizer_fields(inline=False))
    assert (optimizer.fp8_recipe, optimizer.reuse_grad_buf_for_mxfp8_param_ag) == (recipe, reuse)


def test_the_defaults_are_megatrons() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    ours = {field.name: field.default for field in dataclasses.fields(FP8Settings)}
    assert ours.pop("reuse_grad_buf_for_mxfp8_param_ag") is False
    assert ours.pop("fp4_recipe") is None  # Megatron's is "nvfp4", likewise
    assert ours.pop("fp8_recipe") is None  # Megatron's is "delayed", also without FP8
    assert ours == {name: defaults[name] for name in ours}


def test_the_alignment_is_what_megatron_pads_to_or_more() -> None:
    from megatron.core.fp8_utils import get_fp8_align_size

    assert all(ALIGNMENT[recipe] % get_fp8_align_size(getattr(Fp8Recipe, recipe)) == 0 for recipe in RECIPES)


def test_yaml_and_the_command_line_reach_every_argument() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MCorePrecision, "precision")
    arguments = ["--precision.precision=bf16-mixed", "--precision.fp8_recipe=mxfp8", "--precision.fp8_param=true"]
    parsed = parser.parse_args([*arguments, "--precision.reuse_grad_buf_for_mxfp8_param_ag=true"])
    precision = parser.instantiate_classes(parsed).precision
    assert precision.fp8 == FP8Settings(**MXFP8_WEIGHTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TRANSFORMER_FIELDS)
def test_a_models_config_has_no_fp8_of_its_own(name: str) -> None:
    fields = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    with refuses(ValueError, f"{name} belongs to the precision"):
        check_transformer_fields({**fields, name: True})


def test_a_chunk_whose_config_has_fp8_of_its_own_is_refused() -> None:
    owned = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    owned |= {"virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "sequence_parallel": False}
    precision = MCorePrecision("bf16-mixed")
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, fp8="e4m3", **precision.megatron_fields()
    )
    chunk = SimpleNamespace(config=config, model_type=ModelType.encoder_or_decoder, set_input_tensor=print)
    pipeline: Any = SimpleNamespace(chunks=[chunk])
    with refuses(ValueError, "fp8='e4m3'"):
        pipeline_config(pipeline, {**owned, **precision.megatron_fields()})


# Settings against each other


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"fp8": "e5m2"}, ValueError),
        ({"fp8_recipe": "custom"}, ValueError),
        ({"fp8_recipe": "delayed", "fp8_amax_compute_algo": None}, ValueError),
        ({"fp8_recipe": "delayed", "fp8_param": "yes"}, TypeError),
        ({"fp8_recipe": "delayed", "fp8_margin": 1.5}, TypeError),
        ({"fp8_recipe": "delayed", "fp8_amax_history_len": 0}, ValueError),
        ({"fp8_param": True}, ValueError),
        ({"fp8_amax_history_len": 16}, ValueError),
        ({"fp8_recipe": "tensorwise", "fp8_margin": 1}, ValueError),
        ({"fp8_recipe": "mxfp8", "fp8_wgrad": False}, ValueError),
        ({"fp8_recipe": "blockwise", "tp_only_amax_red": True}, ValueError),
        ({"fp8_recipe": "blockwise", "fp8_dot_product_attention": True}, ValueError),
        ({"fp8": "e4m3", "first_last_layers_bf16": True}, ValueError),
        ({"fp8_recipe": "tensorwise", "num_layers_at_end_in_bf16": 2}, ValueError),
        ({"fp8_recipe": "mxfp8", "fp8_param": True}, ValueError),
        ({"fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True}, ValueError),
    ],
)
def test_a_wrong_setting_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with refuses(error, *given):
        MCorePrecision("bf16-mixed", **given)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "16-true"])
def test_fp8_needs_bf16(precision: Any) -> None:
    with refuses(ValueError, "fp8_recipe='delayed'"):
        MCorePrecision(precision, fp8="hybrid")


def test_fp8_weights_need_the_sharded_optimizer_and_mxfp8_ones_no_overlap() -> None:
    with refuses(ValueError, "fp8_param=True"):
        check_optimizer(settings("delayed", fp8_param=True), DistributedDataParallelConfig())
    overlapped = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    check_optimizer(settings("delayed", fp8_param=True), overlapped)
    mxfp8 = FP8Settings(**MXFP8_WEIGHTS)  # type: ignore[arg-type]
    check_optimizer(mxfp8, replace(overlapped, overlap_param_gather=False))
    with refuses(ValueError, "overlap_param_gather=False"):
        check_optimizer(mxfp8, overlapped)
    check_optimizer(settings("blockwise", fp8_param=True), overlapped)
    offload: Any = SimpleNamespace(optimizer_cpu_offload=True)  # Megatron's own wants more beside it
    check_optimizer(settings("delayed", fp8_param=True), overlapped, offload)
    check_optimizer(settings("tensorwise"), overlapped, offload)
    with refuses(ValueError, "fp8_recipe='delayed'"):
        check_optimizer(settings("tensorwise", fp8_param=True), overlapped, offload)


# The machine


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [
        ("delayed", ADA),
        ("tensorwise", ADA),
        ("blockwise", HOPPER),
        ("mxfp8", BLACKWELL),
        ("blockwise", BLACKWELL),
        ("mxfp8", replace(BLACKWELL, capability=(10, 3))),
        ("tensorwise", replace(HOPPER, cuda="12.4")),
        ("delayed", replace(HOPPER, transformer_engine="1.13.0")),
        ("blockwise", replace(HOPPER, transformer_engine="2.3.0.dev0+5fdd7bb")),
    ],
)
def test_a_machine_that_can_is_accepted(recipe: str, machine: FP8Machine) -> None:
    check_machine(settings(recipe), machine)


@pytest.mark.parametrize(
    ("recipe", "machine", "error"),
    [
        ("delayed", FP8Machine("cpu"), ValueError),
        ("delayed", replace(HOPPER, transformer_engine=None), ModuleNotFoundError),
        ("delayed", replace(HOPPER, capability=(8, 6)), ValueError),
        ("blockwise", ADA, ValueError),
        ("mxfp8", HOPPER, ValueError),
        ("mxfp8", replace(BLACKWELL, capability=(12, 0)), ValueError),
        ("blockwise", replace(HOPPER, cuda="12.8"), ValueError),
        ("tensorwise", replace(HOPPER, transformer_engine="2.1.0"), ValueError),
        ("blockwise", replace(HOPPER, transformer_engine="2.2.0"), ValueError),
        ("mxfp8", replace(BLACKWELL, transformer_engine="2.0.0"), ValueError),
    ],
)
def test_a_machine_that_cannot_is_refused(recipe: str, machine: FP8Machine, error: type[Exception]) -> None:
    with refuses(error):
        check_machine(settings(recipe), machine)


def test_the_machine_of_a_cpu_run_is_a_cpu() -> None:
    assert FP8Machine.of(torch.device("cpu")) == FP8Machine("cpu")


# Shapes

ALIGNED = ModelShape(num_layers=4, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512)  # q 256, q and kv 768


@pytest.mark.parametrize(
    ("recipe", "change", "tp"),
    [
        ("tensorwise", {"hidden_size": 264, "kv_channels": 64}, 1),
        ("mxfp8", {"ffn_hidden_size": 528}, 1),
        ("blockwise", {"hidden_size": 1024}, 8),
        ("delayed", {"kv_channels": 2}, 1),
        ("blockwise", {"num_query_groups": 1}, 2),
        ("mxfp8", {"num_moe_experts": 2, "moe_ffn_hidden_size": 80}, 1),
        ("mxfp8", {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 48}, 1),
    ],
)
def test_sizes_that_do_not_divide_into_blocks_are_refused(recipe: str, change: dict[str, Any], tp: int) -> None:
    shape = replace(ALIGNED, **change)
    with refuses(ValueError, f"needs multiples of {ALIGNMENT[recipe]}"):
        check_model(settings(recipe), shape, tp, tp)


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_divide_or_are_unknown_are_accepted(recipe: str) -> None:
    check_model(settings(recipe), ALIGNED, 2, 2)
    check_model(settings(recipe), ModelShape(), 8, 8)


def test_layers_in_bf16_fit_on_a_stage() -> None:
    ends = settings("tensorwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=3)
    check_layers(ends, num_layers=12, pipeline_model_parallel_size=4)
    with refuses(ValueError, "num_layers_at_start_in_bf16=3"):
        check_layers(ends, num_layers=8, pipeline_model_parallel_size=4)
    with pytest.raises(ValueError, match="must be between 0 and number of layers per pipeline stage"):
        TransformerConfig(  # as Megatron itself says
            num_layers=8,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=4,
            pipeline_dtype=torch.bfloat16,
            **ends.transformer_fields(),
        )


def test_tokens_of_a_microbatch_divide_into_blocks_on_each_rank() -> None:
    layout = ParallelLayout(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    check_microbatch(settings("mxfp8"), (64, 2), layout)
    check_microbatch(settings("mxfp8"), None, layout)
    check_microbatch(FP8Settings(), (3, 1), layout)
    with refuses(ValueError, "seq_length=64"):
        check_microbatch(settings("mxfp8"), (64, 1), layout)
    check_microbatch(settings("mxfp8"), (64, 1), ParallelLayout(tensor_model_parallel_size=2))


# All of it, as the strategy asks


class Shaped(MCoreModule):
    """Says its sizes."""

    def __init__(self, shape: ModelShape | None) -> None:
        super().__init__()
        self.shape = shape

    def model_shape(self) -> ModelShape | None:
        return self.shape


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        (replace(ALIGNED, hidden_size=264, kv_channels=64), None, "hidden_size=264"),
        (replace(ALIGNED, num_layers=2), None, "num_layers_at_end_in_bf16=3"),
        (replace(ALIGNED, seq_length=24), 1, "seq_length=24"),
        (replace(ALIGNED, seq_length=24), 2, None),
        (replace(ALIGNED, seq_length=24), None, None),
        (None, 1, None),
    ],
)
def test_what_the_module_says_of_its_sizes_is_checked_before_anything_is_allocated(
    shape: ModelShape | None, rows: int | None, message: str | None
) -> None:
    ends = settings("tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=3)
    arguments: Any = (ends, Shaped(shape), ParallelLayout(), DistributedDataParallelConfig(), None, HOPPER, rows)
    if message is None:
        check_fp8(*arguments)
    else:
        with refuses(ValueError, message):
            check_fp8(*arguments)


def test_a_plain_module_is_refused_and_without_fp8_nothing_is() -> None:
    arguments: Any = (PlainNet(), ParallelLayout(), DistributedDataParallelConfig(), None, FP8Machine("cpu"), None)
    check_fp8(FP8Settings(), *arguments)
    with refuses(ValueError, "PlainNet does not build a Megatron model"):
        check_fp8(settings("delayed"), *arguments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_torch_backend_has_no_fp8(recipe: Any) -> None:
    fields = MCorePrecision("bf16-mixed", fp8_recipe=recipe).megatron_fields()
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **fields)
    with refuses(ValueError, "fp8='hybrid'"):
        check_fields(config, "local", "cuda")
    check_fields(config, "transformer_engine", "cuda")


@pytest.mark.distributed
@on_ranks(2)
def test_a_model_without_layers_of_transformer_engine_is_refused_on_every_rank() -> None:
    module = StagedNet()
    check_chunks(FP8Settings(), [module])
    with refuses(ValueError, "needs TransformerEngine's layers, but the"):
        check_chunks(settings("delayed"), [module])


@pytest.mark.parametrize(
    ("recipe", "grouped", "megatron_core", "transformer_engine", "is_refused"),
    [
        ("tensorwise", True, "0.16.1", "2.20.2", True),
        ("blockwise", True, "0.16.1", "2.17.1", True),
        ("tensorwise", True, "0.16.1", "2.17.0", False),
        ("tensorwise", True, "0.19.2", "2.20.2", False),
        ("tensorwise", False, "0.16.1", "2.20.2", False),
        ("delayed", True, "0.16.1", "2.20.2", False),
        ("tensorwise", True, "0.16.1", None, False),
    ],
)
def test_grouped_experts_in_fp8_that_could_not_be_saved_are_refused(
    recipe: Any, grouped: bool, megatron_core: str, transformer_engine: str | None, is_refused: bool
) -> None:
    arguments = (settings(recipe), grouped, megatron_core, transformer_engine)
    if not is_refused:
        check_versions(*arguments)
        return
    with refuses(ValueError, "install TransformerEngine") as refusal:
        check_versions(*arguments)
    advised = re.search(r"TransformerEngine (\S+) or older", str(refusal.value))
    assert advised is not None
    check_versions(*arguments[:3], advised[1])  # what it advises is accepted


BLACKWELL = FP8Machine("cuda", (10, 0), "12.8", "2.11.0")


def test_fp4_lands_on_megatrons_config_alone() -> None:
    precision = MCorePrecision("bf16-mixed", fp4_recipe="nvfp4", first_last_layers_bf16=True)
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **precision.megatron_fields())
    assert (config.fp4, config.fp4_recipe, config.fp8) == ("e2m1", "nvfp4", None)
    assert config.first_last_layers_bf16
    assert precision.fp8.ddp_fields() == precision.fp8.optimizer_fields() == {}
    check_machine(precision.fp8, BLACKWELL)
    check_machine(precision.fp8, FP8Machine("cpu", on_the_cpu=True))


@pytest.mark.parametrize(
    "arguments",
    [
        {"fp4_recipe": "e2m1"},
        {"fp8_recipe": "mxfp8"},
        {"fp8": "e4m3"},
        {"fp8_param": True},
        {"precision": "32-true"},
    ],
    ids=str,
)
def test_fp4_settings_that_contradict_each_other_are_refused(arguments: dict[str, Any]) -> None:
    with refuses(ValueError, *arguments):
        MCorePrecision(**{"precision": "bf16-mixed", "fp4_recipe": "nvfp4", **arguments})


@pytest.mark.parametrize(
    "machine",
    [
        HOPPER,
        replace(BLACKWELL, cuda="12.6"),
        replace(BLACKWELL, transformer_engine="2.7.0"),
        FP8Machine("cpu"),
        FP8Machine("cuda", on_the_cpu=True),
    ],
    ids=str,
)
def test_fp4_on_a_machine_that_lacks_it_is_refused(machine: FP8Machine) -> None:
    with refuses(ValueError):
        check_machine(FP8Settings(fp4_recipe="nvfp4"), machine)


def test_sizes_that_fp4_cannot_cut_are_refused() -> None:
    with refuses(ValueError, "hidden_size=48"):
        check_model(FP8Settings(fp4_recipe="nvfp4"), ModelShape(hidden_size=48), 1, 1)
