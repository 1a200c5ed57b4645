# SPDX-License-Identifier: Apache-2.0
"""The layout refuses sizes that do not fit in one exact sentence, each as soon as it is known.

``test_layout_against_megatron.py`` compares what is refused with Megatron's own code.
"""

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

import lightning_mcore.config.layout
from lightning_mcore.config.layout import ModelShape, ParallelLayout
from tests.support.sentences import refuses

# TransformerConfig warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


# Settings and messages


@pytest.mark.parametrize(
    "sizes",
    [
        {TP: 0},
        {CP: -2},
        {VP: 1, PP: 2},
        {VP: 2},
        {"sequence_parallel": True},
        {TP: 2, EP: 4},
        {PP: 2, LAYOUT: "Et|t|L"},
        {PP: 2, LAYOUT: []},
        {LAYOUT: "Et|L"},
        {PP: 2, VP: 3, LAYOUT: "Et|t|t|L"},
        {PP: 2, LAYOUT: "Et|xL"},
        {PP: 2, LAYOUT: [["embedding", "decode"], ["loss"]]},
        *({PP: 2, LAYOUT: text} for text in ("tE|L", "Et|Lt", "E|EtL", "EL|tL", "t|t", "|EtL")),
        *({PP: 2, LAYOUT: text} for text in ("Etm|mL", "Em|tL", "Etm|||L")),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_at_construction(sizes: dict[str, Any]) -> None:
    with refuses(ValueError, *sizes):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        {TP: True},
        {PP: "2"},
        {VP: 2.0, PP: 2},
        {EP: None},
        {"sequence_parallel": 1, TP: 2},
        {LAYOUT: 4},
        {LAYOUT: ["Et", "tL"]},
    ],
)
def test_settings_of_the_wrong_type_are_refused_at_construction(sizes: dict[str, Any]) -> None:
    with refuses(TypeError, *sizes):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [
        ({TP: 2, PP: 2}, 6),
        ({CP: 4}, 2),
        ({TP: 2, EP: 4, "sequence_parallel": True}, 4),
        ({EP: 2, ETP: 3}, 4),
    ],
)
def test_a_world_the_layout_does_not_divide_is_refused(sizes: dict[str, Any], world_size: int) -> None:
    with refuses(ValueError, *sizes):
        ParallelLayout(**sizes).validate_world(world_size)


LAYERS = [
    ({PP: 3}, {"num_layers": 32}),
    ({PP: 2, VP: 3}, {"num_layers": 8}),
    ({PP: 4, VP: 2}, {"num_layers": 4}),
    ({PP: 4}, {"num_layers": 7, EMBEDDING: True, LOSS: True}),
    ({PP: 4}, {"num_layers": 8, FIRST: 1, LAST: 2}),
    ({PP: 3}, {"num_layers": 4, FIRST: 6}),
    ({PP: 2}, {"num_layers": 8, FIRST: 3, LAST: 4}),
    ({}, {"num_layers": 8, FIRST: 3, LAST: 5}),
    ({PP: 2, VP: 2}, {"num_layers": 7, FIRST: 3}),
    ({PP: 2, VP: 2}, {"num_layers": 7, FIRST: 2}),
    ({PP: 2}, {FIRST: 3, LOSS: True}),
    ({PP: 2, LAYOUT: "Et|tL"}, {EMBEDDING: True}),
    ({PP: 2, LAYOUT: "Et*3|t*4,L"}, {"num_layers": 8}),
    ({PP: 2, LAYOUT: "Et|tmL"}, {"num_layers": 2}),
]
WIDTHS = [
    ({TP: 3}, {"num_attention_heads": 8}),
    ({TP: 4}, {"num_attention_heads": 24, "num_query_groups": 6}),
    ({TP: 2}, {"num_attention_heads": 6, "num_query_groups": 4}),
    ({TP: 4}, {"num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 1}),
    ({TP: 4}, {"ffn_hidden_size": 6}),
    ({TP: 3}, {"hidden_size": 4}),
    ({TP: 2}, {"vocab_size": 257}),
    ({TP: 7}, {"vocab_size": 50304}),
]
EXPERTS = [
    ({EP: 2}, {"num_layers": 2}),
    ({EP: 3}, {"num_moe_experts": 8}),
    ({TP: 2}, {"num_moe_experts": 8}),
    ({ETP: 4}, {"num_moe_experts": 8, "moe_ffn_hidden_size": 6}),
    ({TP: 2, "sequence_parallel": True}, {"num_moe_experts": 8, "add_bias_linear": True}),
    ({TP: 4, ETP: 1, "sequence_parallel": True}, {"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 6}),
    (
        {TP: 4, ETP: 1, "sequence_parallel": True},
        {"num_moe_experts": 8, "moe_layer_freq": [0, 1], "ffn_hidden_size": 6, "moe_ffn_hidden_size": 8},
    ),
]
SEQUENCES = [
    ({CP: 2}, {"seq_length": 10}),
    ({TP: 4, "sequence_parallel": True}, {"seq_length": 2}),
    ({TP: 4, CP: 2, "sequence_parallel": True}, {"seq_length": 12}),
    ({TP: 3, CP: 2, "sequence_parallel": True}, {"seq_length": 18}),
]


@pytest.mark.parametrize(("sizes", "shape"), [*LAYERS, *WIDTHS, *EXPERTS, *SEQUENCES])
def test_a_model_the_layout_does_not_divide_is_refused(sizes: dict[str, Any], shape: dict[str, Any]) -> None:
    layout = ParallelLayout(**sizes)
    with refuses(ValueError, *sizes, *shape):
        layout.validate_model(ModelShape(**shape))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({TP: 4, PP: 3, CP: 2}, {}),
        ({PP: 2, LAYOUT: "E,t*2|m,L"}, {"num_layers": 2, "mtp_num_layers": 1}),
        ({PP: 2, LAYOUT: "E|t,L"}, {"num_layers": 1, "mtp_num_layers": 0}),
        ({PP: 2, LAYOUT: [["Embedding", " decoder "], ["loss"]]}, {"num_layers": 1}),
        ({TP: 8}, {"num_attention_heads": 16, "num_query_groups": 2, "hidden_size": 64}),
        ({TP: 4, ETP: 1, "sequence_parallel": True}, {"num_moe_experts": 8, "ffn_hidden_size": 6}),
        ({ETP: 2}, {"num_moe_experts": 8, "add_bias_linear": False}),
        ({TP: 2, CP: 2, "sequence_parallel": True}, {"seq_length": 4}),
    ],
)
def test_a_model_the_layout_divides_is_accepted(sizes: dict[str, Any], shape: dict[str, Any]) -> None:
    ParallelLayout(**sizes).validate_model(ModelShape(**shape))


def test_sizes_no_model_has_are_refused() -> None:
    with refuses(ValueError, "num_moe_experts=0"):
        ModelShape(num_moe_experts=0)
    with refuses(TypeError, "num_layers='4'"):
        ModelShape(num_layers="4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_microbatches", "group_size"),
    [
        (1, None),
        (3, None),
        (4, 3),
    ],
)
def test_microbatches_that_do_not_fill_the_interleaved_schedule_are_refused(
    num_microbatches: int, group_size: int | None
) -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with refuses(ValueError, f"num_microbatches={num_microbatches}"):
        layout.validate_microbatches(num_microbatches, group_size)


def test_group_of_microbatches_shorter_than_the_pipeline_is_refused() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    with refuses(ValueError, "microbatch_group_size_per_vp_stage=2"):
        layout.validate_microbatches(8, group_size=2)


def test_plain_pipeline_takes_any_number_of_microbatches_but_none() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=4)
    for num_microbatches in (1, 3, 5):
        layout.validate_microbatches(num_microbatches)
    with refuses(ValueError, "num_microbatches=0"):
        layout.validate_microbatches(0)


def test_rank_outside_the_world_has_no_coordinates() -> None:
    with refuses(ValueError, "rank=4"):
        ParallelLayout().coordinates(4, 4)


# What the layout derives


def test_layout_cannot_be_changed_after_validation() -> None:
    layout = ParallelLayout()
    with pytest.raises(FrozenInstanceError):
        layout.tensor_model_parallel_size = 2  # type: ignore[misc]


def test_virtual_size_follows_from_the_stages_of_the_pipeline_layout() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E,t|(t|)*2,t*2,L")
    assert layout.pipeline_stages == [["E", "t"], ["t"], ["t"], ["t", "t", "L"]]
    assert layout.virtual_pipeline_model_parallel_size == layout.num_chunks == 2
    assert ParallelLayout(**{PP: 4, LAYOUT: "E|t|t|L"}).virtual_pipeline_model_parallel_size is None


@pytest.mark.parametrize(
    ("sizes", "world_size", "line"),
    [
        ({TP: 2, PP: 2, "sequence_parallel": True}, 4, "tp2 pp2 cp1 dp1 sp"),
        ({PP: 2, VP: 2, CP: 2}, 8, "tp1 pp2 vp2 cp2 dp2"),
        ({TP: 2, EP: 2, ETP: 1, "sequence_parallel": True}, 8, "tp2 pp1 cp1 dp4 ep2 etp1 edp4 sp"),
    ],
)
def test_line_for_the_start_of_a_run_names_every_axis(sizes: dict[str, Any], world_size: int, line: str) -> None:
    assert ParallelLayout(**sizes).describe(world_size) == line


def test_shape_is_read_off_a_config_or_a_namespace_of_its_fields() -> None:
    config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, add_bias_linear=False)
    shape = ModelShape.from_config(config, seq_length=8, vocab_size=256)
    assert shape == ModelShape(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        ffn_hidden_size=128,
        add_bias_linear=False,
        seq_length=8,
        vocab_size=256,
    )
    fields = SimpleNamespace(num_layers=4, moe_layer_freq=[1, 0], hidden_size=None)
    assert ModelShape.from_config(fields) == ModelShape(num_layers=4, moe_layer_freq=[1, 0], add_bias_linear=True)


def test_layout_is_arithmetic_that_imports_neither_torch_nor_megatron() -> None:
    folder = Path(lightning_mcore.config.layout.__file__).parent
    for name in ("layout", "pipeline_stages", "value_checks"):
        nodes = list(ast.walk(ast.parse((folder / f"{name}.py").read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {module for module in imported if module.split(".")[0] in ("torch", "megatron", "lightning")}
