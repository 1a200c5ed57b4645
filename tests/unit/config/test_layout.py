# SPDX-License-Identifier: Apache-2.0
"""The layout refuses sizes that do not fit in one exact sentence, each as soon as it is known.

``test_layout_against_megatron.py`` compares what is refused with Megatron's own code.
"""

import ast
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

import lightning_mcore.config.layout
from lightning_mcore.config.layout import ModelShape, ParallelLayout

# TransformerConfig warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def exactly(message: str) -> str:
    return f"^{re.escape(message)}$"


# Settings and messages


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({TP: 0}, f"{TP}=0 is too small; choose 1 or more"),
        ({CP: -2}, f"{CP}=-2 is too small; choose 1 or more"),
        ({VP: 1, PP: 2}, f"{VP}=1 interleaves nothing; choose None, or 2 or more"),
        (
            {VP: 2},
            f"{VP}=2 needs {PP} of 2 or more, but it is 1; leave the virtual size None or raise the pipeline size",
        ),
        (
            {"sequence_parallel": True},
            f"sequence_parallel=True needs {TP} of 2 or more, but it is 1;"
            " set sequence_parallel=False or raise the tensor size",
        ),
        ({TP: 2, EP: 4}, f"{EP}=4 with {TP}=2 needs sequence_parallel=True; set it, or {TP}=1"),
        (
            {PP: 2, LAYOUT: "Et|t|L"},
            f"{LAYOUT}='Et|t|L' has 3 stages, not a multiple of {PP}=2; write 2 or 4 stages or change the size",
        ),
        ({PP: 2, LAYOUT: []}, f"{LAYOUT}=[] has 0 stages, not a multiple of {PP}=2; write 2 stages or change the size"),
        ({LAYOUT: "Et|L"}, f"{LAYOUT}='Et|L' has 2 stages but {PP}=1; write 1 stage or raise the size"),
        (
            {PP: 2, VP: 3, LAYOUT: "Et|t|t|L"},
            f"{VP}=3 disagrees with {LAYOUT}='Et|t|t|L', whose stages make 2 for each of 2 pipeline ranks;"
            " leave it None",
        ),
        (
            {PP: 2, LAYOUT: "Et|xL"},
            f"{LAYOUT}='Et|xL' holds 'x', which is not a layer;"
            " choose from E, t, m or L, with | between stages and *n to repeat",
        ),
        (
            {PP: 2, LAYOUT: [["embedding", "decode"], ["loss"]]},
            f"{LAYOUT}=[['embedding', 'decode'], ['loss']] holds 'decode', which is not a layer;"
            " choose from embedding, decoder, mtp or loss",
        ),
        *(
            (
                {PP: 2, LAYOUT: text},
                f"{LAYOUT}={text!r} must begin its first stage with its only embedding and end its last with its only "
                "loss; write it as 'E...|...L'",
            )
            for text in ("tE|L", "Et|Lt", "E|EtL", "EL|tL", "t|t", "|EtL")
        ),
        *(
            (
                {PP: 2, LAYOUT: text},
                f"{LAYOUT}={text!r} must have its MTP layers in one of its last 2 stages, after every decoder layer;"
                " move each m there",
            )
            for text in ("Etm|mL", "Em|tL", "Etm|||L")
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_at_construction(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({TP: True}, f"{TP}=True is not an int; give an int of 1 or more"),
        ({PP: "2"}, f"{PP}='2' is not an int; give an int of 1 or more"),
        ({VP: 2.0, PP: 2}, f"{VP}=2.0 is not an int; give an int of 1 or more"),
        ({EP: None}, f"{EP}=None is not an int; give an int of 1 or more"),
        ({"sequence_parallel": 1, TP: 2}, "sequence_parallel=1 is not a bool; give True or False"),
        (
            {LAYOUT: 4},
            f"{LAYOUT}=4 is neither a string nor a list of lists of layer names; give one, such as 'Et|tL'",
        ),
        (
            {LAYOUT: ["Et", "tL"]},
            f"{LAYOUT}=['Et', 'tL'] is neither a string nor a list of lists of layer names; give one, such as 'Et|tL'",
        ),
    ],
)
def test_settings_of_the_wrong_type_are_refused_at_construction(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=exactly(message)):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (
            {TP: 2, PP: 2},
            6,
            f"world_size=6 is not a multiple of {TP}=2 * {PP}=2 * {CP}=1, which makes 4;"
            " choose sizes whose product is 1, 2, 3 or 6, or start 4 or 8 ranks",
        ),
        (
            {CP: 4},
            2,
            f"world_size=2 is not a multiple of {TP}=1 * {PP}=1 * {CP}=4, which makes 4;"
            " choose sizes whose product is 1 or 2, or start 4 ranks",
        ),
        (
            {TP: 2, EP: 4, "sequence_parallel": True},
            4,
            f"world_size=4 is not a multiple of {ETP}={TP}=2 * {EP}=4 * {PP}=1, which makes 8;"
            " choose sizes whose product is 1, 2 or 4, or start 8 ranks",
        ),
        (
            {EP: 2, ETP: 3},
            4,
            f"world_size=4 is not a multiple of {ETP}=3 * {EP}=2 * {PP}=1, which makes 6;"
            " choose sizes whose product is 1, 2 or 4, or start 6 ranks",
        ),
    ],
)
def test_a_world_the_layout_does_not_divide_is_refused(sizes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        ParallelLayout(**sizes).validate_world(world_size)


LAYERS = [
    ({PP: 3}, {"num_layers": 32}, f"{PP}=3 does not divide num_layers=32; choose 1, 2, 4, 8, 16 or 32"),
    (
        {PP: 2, VP: 3},
        {"num_layers": 8},
        f"{VP}=3 does not divide the 4 layers of each pipeline stage; choose 2, 4 or None",
    ),
    (
        {PP: 4, VP: 2},
        {"num_layers": 4},
        f"{VP}=2 does not divide the 1 layers of each pipeline stage; choose None",
    ),
    (
        {PP: 4},
        {"num_layers": 7, EMBEDDING: True, LOSS: True},
        f"{PP}=4 does not divide num_layers + {EMBEDDING} + {LOSS}=9; choose 1, 3 or 9",
    ),
    (
        {PP: 4},
        {"num_layers": 8, FIRST: 1, LAST: 2},
        f"{FIRST}=1 with {LAST}=2 leaves 5 of num_layers=8 to the other 2 pipeline stages;"
        " leave a multiple of 2, at least 2",
    ),
    (
        {PP: 3},
        {"num_layers": 4, FIRST: 6},
        f"{FIRST}=6 leaves -2 of num_layers=4 to the other 2 pipeline stages; leave a multiple of 2, at least 2",
    ),
    (
        {PP: 2},
        {"num_layers": 8, FIRST: 3, LAST: 4},
        f"{FIRST}=3 with {LAST}=4 leaves 1 of num_layers=8 to the other 0 pipeline stages; leave 0",
    ),
    (
        {},
        {"num_layers": 8, FIRST: 3, LAST: 5},
        f"{FIRST}=3 with {LAST}=5 needs {PP} of 2 or more, but it is 1; raise it or leave both None",
    ),
    ({PP: 2, VP: 2}, {"num_layers": 7, FIRST: 3}, f"{VP}=2 does not divide the 3 layers of {FIRST}; choose 3 or None"),
    (
        {PP: 2, VP: 2},
        {"num_layers": 7, FIRST: 2},
        f"{VP}=2 does not divide the 5 layers of each other pipeline stage; choose 5 or None",
    ),
    ({PP: 2}, {FIRST: 3, LOSS: True}, f"{FIRST} and {LOSS} both say how to split the layers; set only one"),
    (
        {PP: 2, LAYOUT: "Et|tL"},
        {EMBEDDING: True},
        f"{LAYOUT} and {EMBEDDING} both say how to split the layers; set only one",
    ),
    (
        {PP: 2, LAYOUT: "Et*3|t*4,L"},
        {"num_layers": 8},
        f"{LAYOUT}='Et*3|t*4,L' holds 7 decoder layers but num_layers=8; make them equal",
    ),
    (
        {PP: 2, LAYOUT: "Et|tmL"},
        {"num_layers": 2},
        f"{LAYOUT}='Et|tmL' holds 1 MTP layers but mtp_num_layers=0; make them equal",
    ),
]
WIDTHS = [
    ({TP: 3}, {"num_attention_heads": 8}, f"{TP}=3 does not divide num_attention_heads=8; choose 1, 2, 4 or 8"),
    (
        {TP: 4},
        {"num_attention_heads": 24, "num_query_groups": 6},
        f"{TP}=4 neither divides num_query_groups=6 nor is a multiple of it; choose 1, 2, 3, 6, 12 or 24",
    ),
    (
        {TP: 2},
        {"num_attention_heads": 6, "num_query_groups": 4},
        "num_query_groups=4 does not divide num_attention_heads=6; choose 1, 2, 3 or 6",
    ),
    (
        {TP: 4},
        {"num_attention_heads": 4, "num_query_groups": 1, "kv_channels": 1},
        f"{TP}=4 does not divide query, key and value rows=6; choose 1, 2, 3 or 6",
    ),
    ({TP: 4}, {"ffn_hidden_size": 6}, f"{TP}=4 does not divide ffn_hidden_size=6; choose 1, 2, 3 or 6"),
    ({TP: 3}, {"hidden_size": 4}, f"{TP}=3 does not divide ffn_hidden_size=16; choose 1, 2, 4, 8 or 16"),
    ({TP: 2}, {"vocab_size": 257}, f"{TP}=2 does not divide padded vocab_size=257; choose 1 or 257"),
    (
        {TP: 7},
        {"vocab_size": 50304},
        f"{TP}=7 does not divide padded vocab_size=50304; choose 1, 2, 3, 4, 6, 8, 12, 16, ... or 50304",
    ),
]
EXPERTS = [
    (
        {EP: 2},
        {"num_layers": 2},
        f"{EP}=2 needs a mixture of experts, but num_moe_experts is None; choose {EP}=1 or give the model experts",
    ),
    ({EP: 3}, {"num_moe_experts": 8}, f"{EP}=3 does not divide num_moe_experts=8; choose 1, 2, 4 or 8"),
    ({TP: 2}, {"num_moe_experts": 8}, f"num_moe_experts=8 with {TP}=2 needs sequence_parallel=True; set it, or {TP}=1"),
    (
        {ETP: 4},
        {"num_moe_experts": 8, "moe_ffn_hidden_size": 6},
        f"{ETP}=4 does not divide moe_ffn_hidden_size=6; choose 1, 2, 3 or 6",
    ),
    (
        {TP: 2, "sequence_parallel": True},
        {"num_moe_experts": 8, "add_bias_linear": True},
        f"{ETP}={TP}=2 needs experts without biases, but add_bias_linear=True; choose {ETP}=1 or add_bias_linear=False",
    ),
    (
        {TP: 4, ETP: 1, "sequence_parallel": True},
        {"num_moe_experts": 8, "moe_shared_expert_intermediate_size": 6},
        f"{TP}=4 does not divide moe_shared_expert_intermediate_size=6; choose 1, 2, 3 or 6",
    ),
    (
        {TP: 4, ETP: 1, "sequence_parallel": True},
        {"num_moe_experts": 8, "moe_layer_freq": [0, 1], "ffn_hidden_size": 6, "moe_ffn_hidden_size": 8},
        f"{TP}=4 does not divide ffn_hidden_size=6; choose 1, 2, 3 or 6",
    ),
]
SEQUENCES = [
    (
        {CP: 2},
        {"seq_length": 10},
        f"seq_length=10 is not a multiple of 4, as {CP}=2 (two slices a rank) needs; choose 8 or 12",
    ),
    (
        {TP: 4, "sequence_parallel": True},
        {"seq_length": 2},
        f"seq_length=2 is not a multiple of 4, as sequence_parallel with {TP}=4 needs; choose 4",
    ),
    (
        {TP: 4, CP: 2, "sequence_parallel": True},
        {"seq_length": 12},
        f"seq_length=12 is not a multiple of 8, as {CP}=2 (two slices a rank) and sequence_parallel with {TP}=4"
        " needs; choose 8 or 16",
    ),
    (
        {TP: 3, CP: 2, "sequence_parallel": True},
        {"seq_length": 18},
        f"seq_length=18 is not a multiple of 12, as {CP}=2 (two slices a rank) and sequence_parallel with {TP}=3"
        " needs; choose 12 or 24",
    ),
]


@pytest.mark.parametrize(("sizes", "shape", "message"), [*LAYERS, *WIDTHS, *EXPERTS, *SEQUENCES])
def test_a_model_the_layout_does_not_divide_is_refused(
    sizes: dict[str, Any], shape: dict[str, Any], message: str
) -> None:
    layout = ParallelLayout(**sizes)
    with pytest.raises(ValueError, match=exactly(message)):
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
    with pytest.raises(ValueError, match=exactly("num_moe_experts=0 is too small; choose 1 or more")):
        ModelShape(num_moe_experts=0)
    with pytest.raises(TypeError, match=exactly("num_layers='4' is not an int; give an int of 1 or more")):
        ModelShape(num_layers="4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_microbatches", "group_size", "message"),
    [
        (
            1,
            None,
            f"num_microbatches=1 does not fill groups of 2, as the interleaved schedule of {PP}=2 needs; choose 2",
        ),
        (
            3,
            None,
            f"num_microbatches=3 does not fill groups of 2, as the interleaved schedule of {PP}=2 needs; choose 2 or 4",
        ),
        (
            4,
            3,
            f"num_microbatches=4 does not fill groups of 3, as the interleaved schedule of {PP}=2 needs; choose 3 or 5",
        ),
    ],
)
def test_microbatches_that_do_not_fill_the_interleaved_schedule_are_refused(
    num_microbatches: int, group_size: int | None, message: str
) -> None:
    way_out = " through Trainer(accumulate_grad_batches=...) or MCoreStrategy(micro_batch_size=...)"
    layout = ParallelLayout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=exactly(message + way_out)):
        layout.validate_microbatches(num_microbatches, group_size)


def test_group_of_microbatches_shorter_than_the_pipeline_is_refused() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    message = f"microbatch_group_size_per_vp_stage=2 is less than {PP}=4; choose 4 or more"
    with pytest.raises(ValueError, match=exactly(message)):
        layout.validate_microbatches(8, group_size=2)


def test_plain_pipeline_takes_any_number_of_microbatches_but_none() -> None:
    layout = ParallelLayout(pipeline_model_parallel_size=4)
    for num_microbatches in (1, 3, 5):
        layout.validate_microbatches(num_microbatches)
    with pytest.raises(ValueError, match=exactly("num_microbatches=0 is too small; choose 1 or more")):
        layout.validate_microbatches(0)


def test_rank_outside_the_world_has_no_coordinates() -> None:
    with pytest.raises(ValueError, match=exactly("rank=4 is outside world_size=4; choose 0 to 3")):
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
