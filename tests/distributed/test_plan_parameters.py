# SPDX-License-Identifier: Apache-2.0
"""What ``planning`` counts is what Megatron builds: parameters of every rank, exactly, and the layers of every chunk.

Each rank of each layout is built for real, with Megatron's own modules and process groups. The groups are of torch's
``fake`` backend, which has every rank's place in them and sends nothing: so one process is all ranks, one after the
other, and worlds may be larger than this machine runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_mcore.config.layout import ParallelLayout
from lightning_mcore.config.lora import LoRA
from lightning_mcore.hf.adapters import add_adapters
from lightning_mcore.hf.freezing import train_only
from lightning_mcore.hf.registry import family_and_fields
from lightning_mcore.layers.gpt import GPTChunk
from lightning_mcore.layers.multi_token import gpt_mtp_block_spec
from lightning_mcore.layers.spec import gpt_block_spec
from lightning_mcore.layers.transformer_config import build_transformer_config
from lightning_mcore.parallel.chunks import ModelChunks
from lightning_mcore.parallel.cpu_runtime import cpu_runtime
from lightning_mcore.parallel.groups import close_process_groups, open_process_groups, pipeline_stage
from lightning_mcore.planning.arguments import with_adapters
from lightning_mcore.planning.formats import Formats
from lightning_mcore.planning.model import ChunkLayers, GPTFields, stage_layers
from lightning_mcore.planning.parameters import (
    ParameterCount,
    chunk_tensors,
    count_of,
    model_parameters,
    rank_tensors,
    whole_shapes,
)
from lightning_mcore.planning.state_memory import state_memory
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
BIASED: dict[str, Any] = {  # all of Megatron's defaults
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
}
MOE: dict[str, Any] = DENSE | {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
}
SHARED: dict[str, Any] = MOE | {
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
LATENT: dict[str, Any] = DENSE | {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
}
LEARNED = {"position_embedding_type": "learned_absolute"}
TIED = {"share_embeddings_and_output_weights": True}


@dataclass(frozen=True)
class Case:
    """A model on a layout.

    Args:
        world: Ranks.
        layout: Arguments of the layout, in short: tp, pp, vp, cp, ep, etp, sp, split.
        fields: Fields of the model's ``TransformerConfig``.
        model: More arguments of ``MCoreGPT``.
    """

    world: int
    layout: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=lambda: DENSE)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def parallel(self) -> ParallelLayout:
        given = dict(self.layout)
        return ParallelLayout(
            tensor_model_parallel_size=given.get("tp", 1),
            pipeline_model_parallel_size=given.get("pp", 1),
            virtual_pipeline_model_parallel_size=given.get("vp"),
            pipeline_model_parallel_layout=given.get("split"),
            context_parallel_size=given.get("cp", 1),
            expert_model_parallel_size=given.get("ep", 1),
            expert_tensor_parallel_size=given.get("etp"),
            sequence_parallel=given.get("sp", False),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return {"vocab_size": 101, "seq_length": 16, "transformer": self.fields, **self.model}


def of(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    return base | more


def adapters(**lora: Any) -> dict[str, Any]:
    return {"lora": {"r": 3, "rank_pattern": {"q_.*proj": 5}, **lora}}


CASES: dict[str, Case] = {
    "one": Case(1),
    "one-tied": Case(1, model=TIED),
    "dp4": Case(4),
    "tp2": Case(2, {"tp": 2}),
    "tp4-sp": Case(4, {"tp": 4, "sp": True}),
    "pp2": Case(2, {"pp": 2}),
    "pp4": Case(4, {"pp": 4}),
    "pp2-vp2": Case(2, {"pp": 2, "vp": 2}),
    "cp2": Case(2, {"cp": 2}),
    "tp2-pp2-cp2-dp2": Case(16, {"tp": 2, "pp": 2, "cp": 2, "sp": True}),
    "tied-pp2": Case(2, {"pp": 2}, model=TIED),
    "tied-pp2-dp5": Case(10, {"pp": 2}, model=TIED),
    "tied-tp2-pp2-vp2": Case(4, {"tp": 2, "pp": 2, "vp": 2}, model=TIED),
    "biased-tp2": Case(2, {"tp": 2}, BIASED),
    "biased-tp2-pp2-learned": Case(4, {"tp": 2, "pp": 2}, BIASED, LEARNED),
    "qkv-bias-norms-tp2": Case(2, {"tp": 2}, of(DENSE, add_qkv_bias=True, qk_layernorm=True, kv_channels=12)),
    "qkv-norms-with-bias": Case(2, {"tp": 2}, of(BIASED, qk_layernorm=True)),
    "l2-norms": Case(1, {}, of(DENSE, qk_l2_norm=True)),
    "output-gate-tp2": Case(2, {"tp": 2}, of(DENSE, attention_output_gate=True)),
    "sinks-tp2": Case(2, {"tp": 2}, of(DENSE, softmax_type="learnable")),
    "first1": Case(2, {"pp": 2}, of(DENSE, num_layers_in_first_pipeline_stage=1)),
    "last1": Case(2, {"pp": 2}, of(DENSE, num_layers_in_last_pipeline_stage=1)),
    "first2-last4-pp4-vp2": Case(
        4,
        {"pp": 4, "vp": 2},
        of(DENSE, num_layers=14, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=4),
    ),
    "embedding-counts": Case(2, {"pp": 2}, of(DENSE, num_layers=5, account_for_embedding_in_pipeline_split=True)),
    "loss-counts": Case(2, {"pp": 2}, of(DENSE, num_layers=5, account_for_loss_in_pipeline_split=True)),
    "both-count-pp4-vp2": Case(
        4,
        {"pp": 4, "vp": 2},
        of(
            DENSE,
            num_layers=14,
            account_for_embedding_in_pipeline_split=True,
            account_for_loss_in_pipeline_split=True,
        ),
    ),
    "split3and1": Case(2, {"pp": 2, "split": "Et*3|t,L"}),
    "split-vp": Case(2, {"pp": 2, "split": "Et|t*2|t|L"}),
    "split-list": Case(2, {"pp": 2, "split": [["embedding", "decoder"], ["decoder", "decoder", "decoder", "loss"]]}),
    "split-empty-stages": Case(4, {"pp": 4, "split": "E|tt|tt|L"}, model=TIED),
    "moe-dp4": Case(4, {}, MOE),
    "moe-ep4": Case(4, {"ep": 4}, MOE),
    "moe-tp2-ep2": Case(4, {"tp": 2, "ep": 2, "sp": True}, MOE),
    "moe-tp2-ep2-etp1": Case(4, {"tp": 2, "ep": 2, "etp": 1, "sp": True}, MOE),
    "moe-ep2-etp2": Case(4, {"ep": 2, "etp": 2}, MOE),
    "moe-tp4-ep2-etp2-pp2": Case(16, {"tp": 4, "ep": 2, "etp": 2, "pp": 2, "sp": True}, MOE),
    "moe-biased-ep2-tp2": Case(4, {"tp": 2, "ep": 2, "etp": 1, "sp": True}, of(MOE, add_bias_linear=True)),
    "shared-pp2-ep2": Case(4, {"pp": 2, "ep": 2}, SHARED),
    "shared-tp2-pp2-vp2-ep2": Case(8, {"tp": 2, "pp": 2, "vp": 2, "ep": 2, "sp": True}, SHARED),
    "moe-every-second-pp2": Case(2, {"pp": 2}, of(MOE, moe_layer_freq=2)),
    "latent": Case(1, {}, LATENT),
    "latent-tp2-pp2": Case(4, {"tp": 2, "pp": 2, "sp": True}, LATENT),
    "latent-no-query-rank-no-norm": Case(2, {"tp": 2}, of(LATENT, q_lora_rank=None, qk_layernorm=False)),
    "latent-moe-pp2-ep2": Case(4, {"pp": 2, "ep": 2}, LATENT | of(SHARED, num_query_groups=8)),
    "ahead": Case(1, {}, of(DENSE, mtp_num_layers=2)),
    "ahead-tied": Case(1, {}, of(DENSE, mtp_num_layers=1), TIED),
    "ahead-tp2-pp2": Case(4, {"tp": 2, "pp": 2, "sp": True}, of(DENSE, mtp_num_layers=1)),
    "ahead-pp2-dp5": Case(10, {"pp": 2}, of(DENSE, mtp_num_layers=1)),
    "ahead-pp2-vp2": Case(2, {"pp": 2, "vp": 2}, of(DENSE, mtp_num_layers=1)),
    "ahead-moe-ep2-split": Case(4, {"pp": 2, "ep": 2, "split": "Ettt|tmL"}, of(SHARED, mtp_num_layers=1)),
    "ahead-in-its-own-stage": Case(4, {"pp": 4, "split": "Et|tt|t|mL"}, of(DENSE, mtp_num_layers=1)),
    "ahead-before-the-last-stage": Case(4, {"pp": 4, "split": "Et|tt|tm|L"}, of(DENSE, mtp_num_layers=1)),
    "ahead-learned-pp2": Case(2, {"pp": 2}, of(BIASED, mtp_num_layers=1), LEARNED),
    "adapters-tp2-sp": Case(2, {"tp": 2, "sp": True}, model=adapters()),
    "adapters-pp2-vp2": Case(
        2, {"pp": 2, "vp": 2}, model=adapters(target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 2])
    ),
    "adapters-lengths-tp2-dp3": Case(
        6, {"tp": 2}, model=adapters(use_dora=True, modules_to_save=["embed_tokens", "lm_head", "norm"])
    ),
    "adapters-output-tp2-pp2": Case(
        4, {"tp": 2, "pp": 2}, model=adapters(target_modules=["q_proj", "lm_head"]) | {"vocab_size": 128}
    ),
    "adapters-ends-tp2-pp2": Case(
        4, {"tp": 2, "pp": 2}, model=adapters(target_modules=["q_proj", "embed_tokens", "lm_head"])
    ),
    "adapters-routers-tp2": Case(
        2,
        {"tp": 2, "sp": True},
        SHARED,
        adapters(target_modules=["q_proj", "gate", "shared_expert_gate"]) | {"hf": {"family": "qwen2_moe"}},
    ),
    "adapters-tied-pp2": Case(2, {"pp": 2}, model=TIED | adapters(modules_to_save=["embed_tokens"])),
    "frozen-tp2-pp2": Case(4, {"tp": 2, "pp": 2}, model={"train_only": ["layers.3.", "lm_head"]}),
    "frozen-tied-pp2": Case(2, {"pp": 2}, model=TIED | {"train_only": ["embed_tokens", "norm"]}),
    "frozen-shared-pp2-ep2": Case(
        4, {"pp": 2, "ep": 2}, SHARED, {"train_only": ["layers.1.mlp."], "hf": {"family": "qwen2_moe"}}
    ),
    "adapters-latent-tp2-pp2": Case(4, {"tp": 2, "pp": 2, "sp": True}, LATENT, adapters()),
    "adapters-moe-ep2": Case(4, {"ep": 2}, MOE, adapters(rank_pattern={r"experts\.[04]\.up_proj": 6})),
    "adapters-moe-tp2-ep2-etp1": Case(
        4,
        {"tp": 2, "ep": 2, "etp": 1, "sp": True},
        MOE,
        adapters(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    ),
    "adapters-shared-tp2": Case(
        2,
        {"tp": 2, "sp": True},
        of(SHARED, moe_shared_expert_gate=False),
        adapters(exclude_modules=["experts"]) | {"hf": {"family": "glm4_moe"}},
    ),
}


@contextmanager
def rank_of(case: Case, rank: int, instances: int = 1) -> Iterator[None]:
    """Be one rank of a world that has no others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
    try:
        options = {"num_distributed_optimizer_instances": instances}
        open_process_groups(case.parallel, seed=1, timeout=timedelta(seconds=60), options=options)
        yield
    finally:
        close_process_groups()
        dist.destroy_process_group()


def build(case: Case) -> list[GPTChunk]:
    """Build the chunks of this rank."""
    layout, given = case.parallel, {**case.arguments}
    names = [name for name in vars(layout) if name != "expert_tensor_parallel_size"]
    owned = {name: getattr(layout, name) for name in names}
    owned |= {"expert_tensor_parallel_size": layout.expert_tensor_size, "pipeline_dtype": torch.float32}
    if not isinstance(owned["pipeline_model_parallel_layout"], str):
        owned["virtual_pipeline_model_parallel_size"] = layout.virtual_pipeline_model_parallel_size
    config = build_transformer_config(case.fields, owned)
    chunks = []
    for index in range(layout.num_chunks):
        vp_stage = index if layout.num_chunks > 1 else None
        first, last = pipeline_stage(vp_stage)
        chunks.append(
            GPTChunk(
                config,
                gpt_block_spec(config, "local", vp_stage),
                vocab_size=GPTFields.of(given).padded_vocab_size,
                max_sequence_length=given["seq_length"],
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=given.get("share_embeddings_and_output_weights", False),
                position_embedding_type=given.get("position_embedding_type", "rope"),
                mtp_block_spec=gpt_mtp_block_spec(config, "local", vp_stage),
                vp_stage=vp_stage,
            )
        )
    if "lora" in given:
        model = ModelChunks(config, list(chunks), None)
        add_adapters(model, *family_and_fields(given), LoRA.of(given["lora"]))
    if "train_only" in given:
        shapes = whole_shapes(GPTFields.of(given))
        train_only(ModelChunks(config, list(chunks), None), shapes, *family_and_fields(given), given["train_only"])
    return chunks


def planned_fields(case: Case) -> GPTFields:
    return with_adapters(GPTFields.of(case.arguments), case.arguments)


def held(chunk: GPTChunk) -> tuple[ChunkLayers, list[tuple[int, bool]], list[tuple[int, bool]]]:
    """Return what a chunk holds: its layers, and each tensor's size and whether it is trained; experts apart."""
    layers = tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)
    ahead = len(chunk.mtp.layers) if hasattr(chunk, "mtp") else 0
    sizes: dict[bool, list[tuple[int, bool]]] = {False: [], True: []}
    for name, parameter in chunk.named_parameters():
        sizes[".local_experts." in name].append((parameter.numel(), parameter.requires_grad))
    return ChunkLayers(layers, chunk.pre_process, chunk.post_process, ahead), sorted(sizes[False]), sorted(sizes[True])


def built_on_every_rank() -> dict[str, list[tuple[int, list[Any]]]]:
    """Return for each case and rank its place in the pipeline, and what its chunks hold."""
    found = {}
    with cpu_runtime():
        for name, case in CASES.items():
            found[name] = []
            for rank in range(case.world):
                with rank_of(case, rank):
                    place = case.parallel.coordinates(rank, case.world).pipeline_model_parallel_rank
                    found[name].append((place, [held(chunk) for chunk in build(case)]))
    return found


@dataclass(frozen=True)
class Buffers:
    """A case, and how its gradient buffers are laid out."""

    case: str
    bucket_size: int | None = None
    instances: int = 1
    large: bool = False


BUFFERS: dict[str, Buffers] = {
    "dp4": Buffers("dp4"),
    "dp4-two-instances": Buffers("dp4", instances=2),
    "dp4-buckets": Buffers("dp4", bucket_size=5000),
    "dp4-large-buckets": Buffers("dp4", bucket_size=5000, large=True),
    "16-ranks-buckets": Buffers("tp2-pp2-cp2-dp2", bucket_size=3000),
    "tied-pp2-dp5": Buffers("tied-pp2-dp5"),
    "ahead-pp2-dp5": Buffers("ahead-pp2-dp5"),
    "tied-tp2-pp2-vp2-buckets": Buffers("tied-tp2-pp2-vp2", bucket_size=2000),
    "learned-buckets": Buffers("biased-tp2-pp2-learned", bucket_size=2000),
    "moe-ep4": Buffers("moe-ep4"),
    "moe-ep2-buckets": Buffers("shared-pp2-ep2", bucket_size=4000),
    "moe-16-ranks": Buffers("moe-tp4-ep2-etp2-pp2"),
    "ahead-pp2-buckets": Buffers("ahead-tp2-pp2", bucket_size=3000),
    "adapters-dp3": Buffers("adapters-lengths-tp2-dp3"),
    "adapters-moe-buckets": Buffers("adapters-moe-ep2", bucket_size=300),
    "adapters-tied": Buffers("adapters-tied-pp2"),
}


def ddp_arguments(buffers: Buffers) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": buffers.bucket_size is not None,
        "bucket_size": buffers.bucket_size,
        "num_distributed_optimizer_instances": buffers.instances,
        "pad_buckets_for_high_nccl_busbw": buffers.large,
    }


def buffers_on_every_rank() -> dict[str, list[tuple[int, int]]]:
    """Return for each rank its place in the pipeline, and the elements of its gradient buffers, padding included."""
    found: dict[str, list[tuple[int, int]]] = {}
    with cpu_runtime():
        for name, buffers in BUFFERS.items():
            case, found[name] = CASES[buffers.case], []
            for rank in range(case.world):
                with rank_of(case, rank, buffers.instances):
                    place = case.parallel.coordinates(rank, case.world).pipeline_model_parallel_rank
                    settings = DistributedDataParallelConfig(**ddp_arguments(buffers))
                    wrapped = [
                        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=index > 0)
                        for index, chunk in enumerate(build(case))
                    ]
                    held = [b.numel for ddp in wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
                    found[name].append((place, sum(held)))
    return found


@pytest.fixture(scope="module")
def laid_out() -> dict[str, list[tuple[int, int]]]:
    (found,) = run_ranks(1, buffers_on_every_rank, open_group=False, timeout=240)
    return found


@pytest.fixture(scope="module")
def built() -> dict[str, list[tuple[int, list[Any]]]]:
    (found,) = run_ranks(1, built_on_every_rank, open_group=False, timeout=240)
    return found


def test_there_are_enough_layouts() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_layers_and_parameters_that_are_planned(name: str, built: Any) -> None:
    case = CASES[name]
    fields, layout = planned_fields(case), case.parallel
    layout.validate_world(case.world)
    layout.validate_model(fields.shape)
    planned = stage_layers(fields, layout)

    for place, chunks in built[name]:
        assert [chunk[0] for chunk in chunks] == planned[place]
        for (_, dense, expert), layers in zip(chunks, planned[place], strict=True):
            tensors = chunk_tensors(fields, layout, layers)
            for is_expert, sizes in ((False, dense), (True, expert)):
                own = [(t.size, t.is_trained) for t in tensors if t.expert is is_expert for _ in range(t.copies)]
                assert sorted(own) == sizes
        dense, expert = ([tensor for chunk in chunks for tensor in chunk[kind]] for kind in (1, 2))
        trained = (sum(size for size, is_trained in kind if is_trained) for kind in (dense, expert))
        whole = (sum(size for size, _ in kind) for kind in (dense, expert))
        assert count_of(rank_tensors(fields, layout, place)) == ParameterCount(*whole, *trained)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.world == 1])
def test_the_whole_model_has_the_parameters_that_are_planned(name: str, built: Any) -> None:
    ((_, [(_, dense, expert)]),) = built[name]

    assert model_parameters(GPTFields.of(CASES[name].arguments)).total == sum(size for size, _ in dense + expert)


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_are_padded_as_planned(name: str, laid_out: Any) -> None:
    case = CASES[BUFFERS[name].case]
    formats = Formats.of({}, {"ddp_config": ddp_arguments(BUFFERS[name])})

    for place, elements in laid_out[name]:
        tensors = rank_tensors(planned_fields(case), case.parallel, place)
        planned = state_memory(tensors, case.parallel, formats, case.world, place)
        frozen = sum(tensor.elements for chunk in tensors for tensor in chunk if not tensor.is_trained)
        assert planned.gradients == planned.weights - 4 * frozen == 4 * elements
