# SPDX-License-Identifier: Apache-2.0
"""Three positions of a token against transformers bit for bit, and where the tower's outputs go; no ranks."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_mcore.config.vision import PROJECTOR, TOWER, VISION_FAMILIES, Vision
from lightning_mcore.data.multimodal import with_vision
from lightning_mcore.hf.registry import find_family
from lightning_mcore.hf.source import complete_config
from lightning_mcore.hf.vision_families import with_tower
from lightning_mcore.layers.multimodal_rotary import MultimodalRotary, positions_in_row
from lightning_mcore.layers.packed_sequences import packed_sequences, split_packed_rows
from lightning_mcore.layers.vision import VisionTower, share_out
from lightning_mcore.layers.vision_weights import tower_flops_per_token
from tests.support.sentences import refuses
from tests.support.vision_models import IMAGE_TOKEN, VIDEO_TOKEN, vision_batch, vision_config

FAMILIES = tuple(VISION_FAMILIES)


def settings(family: str) -> Vision:
    config = vision_config(family)
    sections = config.text_config.rope_parameters["mrope_section"]
    return Vision(family, config.vision_config.to_dict(), IMAGE_TOKEN, VIDEO_TOKEN, tuple(sections))


def model_of(family: str) -> Any:
    """Return transformers' model without weights."""
    row = VISION_FAMILIES[family]
    with torch.device("meta"):
        return getattr(importlib.import_module(row.package), row.model)(vision_config(family))


def tower_of(family: str, recompute: str | None = None, dtype: torch.dtype = torch.float32) -> VisionTower:
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, recompute_granularity=recompute)
    return VisionTower(settings(family), config)


def kinds_of(tokens: Tensor) -> Tensor:
    return (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int()


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str) -> None:
    batch = vision_batch(family)
    grids = {name: batch[name] for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if name in batch}
    wanted, _ = model_of(family).get_rope_index(batch["tokens"], kinds_of(batch["tokens"]), **grids)
    found = with_vision(batch, settings(family))
    assert torch.equal(found["rope_positions"].permute(2, 0, 1), wanted)
    assert found["rope_positions"].max() < batch["tokens"].size(1) - 1  # or there would be no image in it


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_packed_sequences_start_again(family: str) -> None:
    """A row of two sequences, of which the first is padded, has the positions of the two alone."""
    vision, dense = settings(family), vision_batch(family)
    alone = with_vision(dense, vision)["rope_positions"]
    padding = torch.zeros(1, 4, dtype=torch.long)
    tokens = torch.cat([dense["tokens"][:1], padding, dense["tokens"][1:]], dim=1)
    boundaries = {"cu_seqlens": torch.tensor([[0, 48, 96]]), "cu_seqlens_padded": torch.tensor([[0, 52, 100]])}
    found = with_vision({**dense, "tokens": tokens, **boundaries}, vision)
    assert torch.equal(found["rope_positions"][0, :48], alone[0])
    assert torch.equal(found["rope_positions"][0, 52:], alone[1])
    with_an_image = tokens[0] == IMAGE_TOKEN
    assert found["vision_rows"][0][with_an_image].tolist() == list(range(int(with_an_image.sum())))


@pytest.mark.parametrize("family", FAMILIES)
def test_angles_are_those_of_transformers(family: str) -> None:
    """Bit for bit; cosine and sine are taken of the same numbers."""
    vision, config = settings(family), vision_config(family).text_config
    positions = with_vision(vision_batch(family), vision)["rope_positions"].permute(2, 0, 1)
    row = VISION_FAMILIES[family]
    package = importlib.import_module(row.package)
    name = next(name for name in dir(package) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    cos, sin = getattr(package, name)(config)(torch.zeros(1), positions)
    if cos.dim() == 4:  # an older transformers gives one for each axis, and takes each channel's where it rotates
        rotate = package.apply_multimodal_rotary_pos_emb
        one, sections = torch.ones(1, 1, 1, 1), list(vision.sections)
        cos, sin = (rotate(one, one, factor, torch.zeros_like(factor), sections)[0][:, 0] for factor in (cos, sin))
    channels = round(16 * config.rope_parameters.get("partial_rotary_factor", 1.0))
    rotary = MultimodalRotary(channels, config.rope_parameters["rope_theta"], vision.sections, row.interleaved)
    rotary.positions = positions
    angles = rotary(0)[:, :, 0].transpose(0, 1)
    assert torch.equal(angles.cos(), cos)
    assert torch.equal(angles.sin(), sin)


def test_positions_of_a_rank_lie_where_megatron_cuts_them_out() -> None:
    """Two sequences of a row, the slices of rank 1 of 2: its positions come back at its places, and zeros elsewhere."""
    boundaries = torch.tensor([[0, 8, 16]])
    packed = packed_sequences(boundaries, boundaries, 16, context_parallel_size=2)
    whole = torch.arange(1, 49).view(1, 16, 3)
    local = split_packed_rows(whole, boundaries, 1, 2)
    found = positions_in_row(local.permute(2, 0, 1), packed, 1, 2)[:, 0].t()
    mine = [2, 3, 4, 5, 10, 11, 12, 13]
    assert torch.equal(found[mine], whole[0, mine])
    assert found.count_nonzero() == 3 * len(mine)


def test_rows_of_the_tower_follow_images_and_then_videos() -> None:
    found = with_vision(vision_batch("qwen2_vl"), settings("qwen2_vl"))
    tokens, rows = found["tokens"], found["vision_rows"]
    assert rows[tokens == IMAGE_TOKEN].tolist() == list(range(13))
    assert rows[tokens == VIDEO_TOKEN].tolist() == list(range(13, 19))
    assert (rows >= 0).sum() == 19
    assert found["vision_grids"].tolist() == [[1, 4, 6], [1, 2, 2], [1, 6, 4], [3, 4, 2]]
    assert len(found["patches"]) == 24 + 4 + 24 + 24
    assert with_vision(found, settings("qwen2_vl")) is found


def test_text_alone_counts_on() -> None:
    found = with_vision(vision_batch("qwen3_vl", images=[[], []], videos=[[], []]), settings("qwen3_vl"))
    assert torch.equal(found["rope_positions"], torch.arange(48)[None, :, None].expand(2, -1, 3))
    assert "patches" not in found
    assert found["vision_rows"].max() == -1


@pytest.mark.parametrize(
    "change",
    [
        {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])},
        {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 2], [1, 6, 4]])},
        {"video_grid_thw": torch.tensor([[3, 4, 2]] * 2)},
        {"pixel_values": torch.zeros(52, 12)},
        {"video_grid_thw": None},
    ],
)
def test_images_without_their_tokens_are_refused(change: dict[str, Any]) -> None:
    with refuses(ValueError):
        with_vision({**vision_batch("qwen2_vl"), **change}, settings("qwen2_vl"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"image_grid_thw": [[1, 4, 6], [1, 2, 2], [1, 6, 4]]}, TypeError, "image_grid_thw"),
        ({"pixel_values": [[0.0] * 96] * 52}, TypeError, "pixel_values"),
        ({"image_grid_thw": torch.tensor([[4, 6], [2, 2], [6, 4]])}, ValueError, "image_grid_thw"),
        ({"image_grid_thw": torch.tensor([[[1, 4, 6], [1, 2, 2], [1, 6, 4]]])}, ValueError, "image_grid_thw"),
        ({"video_grid_thw": torch.tensor([[3.0, 4.0, 2.0]])}, ValueError, "video_grid_thw"),
    ],
)
def test_images_that_are_not_what_a_processor_returns_are_refused(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with refuses(error, words):
        with_vision({**vision_batch("qwen2_vl"), **change}, settings("qwen2_vl"))


_HUB_TEXT: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
_HUB_IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
HUB: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_HUB_TEXT,
        "max_window_layers": 28,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vision_token_id": 151654,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"embed_dim": 1280, "in_chans": 3, "hidden_size": 2048, "spatial_patch_size": 14},
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_HUB_TEXT,
            "model_type": "qwen3_vl_moe_text",
            "dtype": "bfloat16",
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "vision_config": {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
    },
    "qwen3_5_moe": {
        "text_config": {
            **{name: value for name, value in _HUB_TEXT.items() if name not in ("intermediate_size", "rope_theta")},
            "model_type": "qwen3_5_moe_text",
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "full_attention_interval": 4,
            "head_dim": 256,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "default",
            },
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "deepstack_visual_indexes": [], "out_hidden_size": 2048},
        "vision_end_token_id": 151654,
    },
}
"""Configs as the hub has them, old names of keys included."""


@pytest.mark.parametrize(
    ("family", "sections", "deepstack"),
    [("qwen2_vl", (16, 24, 24), 0), ("qwen3_vl_moe", (24, 20, 20), 3), ("qwen3_5_moe", (11, 11, 10), 0)],
)
def test_configs_of_the_hub_are_read(family: str, sections: tuple[int, ...], deepstack: int) -> None:
    rules, content = find_family(with_tower(family)), {"model_type": family, **_HUB_IDS, **HUB[family]}
    fields = rules.read_config(complete_config(rules, content))
    vision = Vision.of(fields["vision"])
    assert (vision.sections, vision.deepstack, vision.image_token_id) == (sections, deepstack, 151655)
    assert (fields["hidden_size"], fields["rotary_base"]) == (2048, 1000000)


def test_a_tower_with_outputs_that_its_family_does_not_have_is_refused() -> None:
    rules, content = find_family("qwen3_5_moe+tower"), {"model_type": "qwen3_5_moe", **_HUB_IDS, **HUB["qwen3_5_moe"]}
    content["vision_config"] = {**content["vision_config"], "deepstack_visual_indexes": [8, 16, 24]}
    with refuses(ValueError, "vision_config.deepstack_visual_indexes=[8, 16, 24]"):
        rules.read_config(complete_config(rules, content))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rotary_tables_of_the_tower_stay_fp32(family: str) -> None:
    """Transformers keeps them so when it reads a model in bf16; its weights are cast."""
    tower = tower_of(family, dtype=torch.bfloat16)
    tables = {name: table.clone() for name, table in tower.named_buffers()}
    assert tables
    tower.bfloat16()
    assert all(torch.equal(table, tables[name]) for name, table in tower.named_buffers())
    assert {table.dtype for table in tables.values()} == {torch.float32}
    assert {parameter.dtype for parameter in tower.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_full_recompute_reaches_the_tower(family: str) -> None:
    """Its blocks run a second time, before their backward pass, and no gradient changes."""
    gradients, runs = [], []
    for recompute in (None, "selective", "full"):
        torch.manual_seed(3)
        tower: Any = tower_of(family, recompute)
        for parameter in tower.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        counted: list[Any] = []
        tower.tower.blocks[0].attn.register_forward_hook(lambda *seen, counted=counted: counted.append(seen))
        tower(None, None).square().sum().backward()
        gradients.append([parameter.grad for parameter in tower.parameters()])
        runs.append(len(counted))
    assert runs == [1, 1, 2]
    assert all(map(torch.equal, gradients[0], gradients[2]))
    assert any(gradient.any() for gradient in gradients[0])
    assert not tower.requires_grad_(False)(None, None).requires_grad


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_the_tower_are_those_that_torch_counts(family: str, recompute: str | None) -> None:
    """Products with weights, forward, recomputed and backward; a frozen tower runs forward alone."""
    vision = settings(family)
    tower: Any = tower_of(family, recompute).tower
    grids = torch.tensor([[1, 4, 6], [1, 8, 4]])
    patches = torch.randn(56, 96)
    tokens, aten = 56 // 4, torch.ops.aten
    for frozen in ((), (TOWER,), (PROJECTOR,), (TOWER, PROJECTOR)):
        for name, parameter in tower.named_parameters():
            parameter.requires_grad_(vision.part_of(name) not in frozen)
        with FlopCounterMode(display=False) as counter:
            output = tower(patches, grid_thw=grids, return_dict=True)
            seen = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            if len(frozen) < 2:
                sum(each.sum() for each in seen).backward()
        counts = counter.get_flop_counts()["Global"]
        kinds = (aten.mm, aten.addmm, aten.convolution, aten.convolution_backward)
        found = sum(counts.get(kind, 0) for kind in kinds)
        assert found == tokens * tower_flops_per_token(vision, frozen, recompute is not None), frozen


def test_settings_that_fit_nothing_are_refused() -> None:
    with refuses(ValueError, "model_type='qwen4_vl'"):
        Vision("qwen4_vl", {}, 1, 2, (1, 1, 1))
    with refuses(ValueError, "mrope_section=[2, 3, 3]"):
        MultimodalRotary(32, 1e4, (2, 3, 3), interleaved=False)


def test_frames_are_shared_out_by_load() -> None:
    """A frame of many patches costs more than its number of patches, less so where most blocks have windows."""
    assert share_out([5, 1, 4, 1, 1], 2) == [[0, 3], [1, 2, 4]]
    assert share_out([3], 2) == [[0], []]
    full, windows = settings("qwen2_vl"), settings("qwen2_5_vl")
    assert full.load_of(1) == 4 * (12 * 24 + 2)
    assert full.load_of(1000) > 1000 * full.load_of(1)
    assert windows.load_of(1000) < full.load_of(1000)
