# SPDX-License-Identifier: Apache-2.0
"""Inside the CPU runtime the ``torch.cuda`` names of megatron-core mean the CPU; outside nothing has changed.

``conftest.py`` fails every test here that leaves a name replaced.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from megatron.core import optimizer, utils
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, router
from torch import nn
from torch.utils.data import DataLoader

from lightning_mcore import MCoreGPT, MCoreStrategy
from lightning_mcore.parallel.cpu_runtime import cpu_runtime, gpu_runtime
from tests.support import hygiene
from tests.support.ranks import on_ranks
from tests.support.sentences import refuses

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these tests expect that torch finds no GPU")

CPU = torch.device("cpu")


@pytest.fixture
def runtime() -> Iterator[None]:
    with cpu_runtime():
        yield


# What it replaces works inside


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.empty(2, device="cuda:3"),
        lambda: torch.ones(2, device=torch.device("cuda", 1)),
        lambda: torch.arange(2, device=torch.cuda.current_device()),
        lambda: torch.tensor([1], device="cuda"),
        lambda: torch.zeros_like(torch.ones(2), device="cuda"),
        lambda: torch.full((2,), 1.0, device="cuda", pin_memory=True),
        lambda: torch.ones(2).new_zeros(2, device="cuda"),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to("cuda", torch.bfloat16, non_blocking=True),
        lambda: torch.ones(2).to(device="cuda"),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).cuda(torch.cuda.current_device(), non_blocking=True),
        lambda: nn.Linear(2, 2, device="cuda").weight,
        lambda: nn.Linear(2, 2).cuda().weight,
        lambda: nn.Linear(2, 2).to("cuda").weight,
    ],
)
def test_a_tensor_for_cuda_lives_on_the_cpu(runtime: None, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert tensor.device == CPU
    assert not tensor.is_pinned()


def test_a_tensor_that_is_moved_keeps_its_values_and_takes_the_type(runtime: None) -> None:
    moved = torch.tensor([1.0, 2.0]).to("cuda", torch.float64)
    assert moved.dtype == torch.float64
    assert moved.tolist() == [1.0, 2.0]


def test_tensors_say_the_type_that_the_optimizers_of_megatron_compare_with(runtime: None) -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64  # with an argument it converts


def test_the_cpu_stays_without_cuda(runtime: None) -> None:
    assert not torch.cuda.is_available()


def test_streams_and_events_are_over_at_once(runtime: None) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        event.record()
    stream.wait_event(event)
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    event.synchronize()
    torch.cuda.synchronize()
    assert event.query()
    assert event.elapsed_time(torch.cuda.Event()) == 0.0
    assert stream.record_event().query()
    assert not torch.cuda.is_current_stream_capturing()


def test_the_device_can_be_asked_and_set(runtime: None) -> None:
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("a range")
    torch.cuda.nvtx.range_pop()
    assert torch.cuda.current_device() == CPU
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 1


@pytest.mark.parametrize("module", [torch.cuda, torch.cuda.random], ids=["cuda", "cuda.random"])
def test_the_generator_of_cuda_is_that_of_the_cpu(runtime: None, module: Any) -> None:
    state = module.get_rng_state()
    drawn = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.cuda.default_generators[5] is torch.default_generator
    assert list(torch.cuda.default_generators) == [torch.default_generator]


def test_the_tracker_of_megatron_forks_the_generator_and_puts_it_back(runtime: None) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 11)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork("model-parallel-rng"):
        first = torch.rand(2)
    with tracker.fork("model-parallel-rng"):
        second = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    stream = torch.rand(4, generator=torch.Generator().manual_seed(11))
    assert torch.equal(torch.cat([first, second]), stream)


def test_recomputation_draws_the_same_dropout(runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = CudaRNGStatesTracker()
    monkeypatch.setattr(megatron_random, "get_cuda_rng_tracker", lambda: tracker)
    masks = []

    def drop(x: torch.Tensor) -> torch.Tensor:
        masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
        return x * masks[-1]

    x = torch.ones(64, requires_grad=True)
    megatron_random.checkpoint(drop, False, x).sum().backward()
    assert len(masks) == 2
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(x.grad, masks[0])  # type: ignore[arg-type]


def test_autograd_functions_of_megatron_ask_about_the_autocast_of_the_cpu(runtime: None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with torch.amp.autocast_mode.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled("cuda")


def test_gradients_are_clipped_as_by_megatron_and_where_they_are(runtime: None) -> None:
    generator, norm = torch.Generator().manual_seed(0), 3.7
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,))]
    expected = [gradient.clone() for gradient in gradients]
    utils.local_multi_tensor_scale(2048, None, [expected, expected], 0.9 / (norm + 1e-6))
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.9, norm)
    for parameter, gradient, value in zip(parameters, gradients, expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, value)
        assert parameter.grad.data_ptr() == gradient.data_ptr()


@pytest.mark.filterwarnings("ignore")  # of Lightning and Megatron, about so small a run
@pytest.mark.parametrize("sharded", [False, True])
def test_kernels_of_an_installed_transformer_engine_do_not_see_cpu_tensors(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_the_address(*tensors: Any, **settings: Any) -> Any:
        raise AssertionError("a kernel of the GPU was given a CPU tensor")

    for owner, names in {
        optimizer: ("Adam", "SGD"),
        distrib_optimizer: ("Adam",),
        moe_utils: ("te_general_gemm",),
        mixed_precision: ("multi_tensor_applier", "multi_tensor_scale_impl"),
        clip_grads: (
            "multi_tensor_applier",
            "l2_norm_impl",
            "multi_tensor_scale_impl",
            "multi_tensor_scale_tensor_impl",
        ),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, read_the_address, raising=False)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    model = MCoreGPT(vocab_size=64, seq_length=16, transformer=sizes, recipe={"learning_rate": 0.01})
    data = DataLoader([{"tokens": torch.arange(16), "labels": torch.arange(1, 17)}] * 4)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = MCoreStrategy(use_distributed_optimizer=sharded)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        gradient_clip_val=0.1,
        max_steps=2,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(model, data)
    assert trainer.global_step == 2
    with cpu_runtime():
        assert moe_utils.te_general_gemm is None


def test_on_a_gpu_gradients_are_measured_in_fp32_and_scaled_where_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (1, 2, 2))]
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    with gpu_runtime():
        norm, _ = clip_grads.l2_norm_impl(2048, torch.zeros(1), [gradients], False)
        assert norm.shape == (1,)
        assert torch.allclose(norm[0], expected.norm())
        in_bf16, _ = clip_grads.l2_norm_impl(2048, torch.zeros(1), [[torch.ones(9, dtype=torch.bfloat16)]], False)
        assert in_bf16.dtype == torch.float32
        clip_grads.multi_tensor_scale_impl(2048, torch.zeros(1), [gradients, gradients], 0.25)
        clip_grads.multi_tensor_scale_impl(2048, torch.zeros(1), [[], []], 0.25)  # a rank without gradients
    assert torch.equal(torch.cat([gradient.flatten() for gradient in gradients]), 0.25 * expected)


def test_the_warning_that_two_generators_are_one_is_dropped_and_no_other(
    runtime: None, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.propagate = True
    with caplog.at_level(logging.WARNING, logger=logger.name):
        logger.warning("CPU RNG state changed within GPU RNG context")
        logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


@pytest.mark.parametrize("pads", [False, True])
def test_full_experts_drop_the_last_tokens_by_position(runtime: None, pads: bool) -> None:
    chosen = torch.zeros(64, 4, dtype=torch.bool)
    chosen[10:40, 0] = chosen[:3, 1] = True  # 30 tokens choose the first expert, and 3 the second
    probs = chosen * torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    kept_probs, kept = router.apply_router_token_dropping(
        probs, chosen, router_topk=1, capacity_factor=1.0, drop_policy="position", pad_to_capacity=pads
    )
    expected = torch.zeros_like(chosen)
    expected[10:26, 0] = expected[:3, 1] = True
    assert torch.equal(kept & chosen, expected)
    assert torch.equal(kept.sum(0), torch.tensor([16, 16 if pads else 3, *([16 if pads else 0] * 2)]))
    assert torch.equal(kept_probs, probs * expected)


def test_a_sharded_tensor_is_made_on_the_cpu(runtime: None) -> None:
    sharded = ShardedTensor.from_rank_offsets("a", torch.ones(2))
    sharded.data = None
    sharded.init_data("cuda")
    assert sharded.data is not None
    assert sharded.data.device == CPU


@on_ranks(1, open_group=False)
def test_the_context_of_a_device_works_inside_and_after() -> None:
    devices = []
    with cpu_runtime(), torch.device("meta"):
        devices.append(torch.empty(1).device.type)
        devices.append(torch.empty(1, device="cuda").device.type)
    with torch.device("meta"):
        devices.append(torch.empty(1).device.type)
    assert devices == ["meta", "cpu", "meta"]


def zeros_of_a_script(size: int) -> torch.Tensor:
    return torch.zeros([size])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # an error from torch 2.14 on
def test_a_function_can_be_scripted_inside(runtime: None) -> None:
    scripted = torch.jit.script(zeros_of_a_script)
    assert scripted(2).tolist() == [0.0, 0.0]


# Nothing is left after


def test_outside_nothing_has_changed() -> None:
    before = hygiene.snapshot()
    filters = list(logging.getLogger("megatron.core.tensor_parallel.random").filters)
    with cpu_runtime():
        assert "torch.cuda.current_device" in hygiene.changes(before, hygiene.snapshot())
    assert hygiene.changes(before, hygiene.snapshot()) == []
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == filters
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_names_that_were_not_there_are_gone_again() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    had = hasattr(moe_utils, "te_general_gemm")
    with cpu_runtime():
        assert hasattr(moe_utils, "te_general_gemm")
    assert hasattr(moe_utils, "te_general_gemm") == had


def test_the_inner_of_two_leaves_the_outer_one_at_work() -> None:
    before = hygiene.snapshot()
    with cpu_runtime():
        inside = hygiene.snapshot()
        with cpu_runtime():
            assert hygiene.changes(inside, hygiene.snapshot()) == []
        assert torch.zeros(1, device="cuda").device == CPU
        assert hygiene.changes(inside, hygiene.snapshot()) == []
    assert hygiene.changes(before, hygiene.snapshot()) == []


def test_it_can_be_entered_again_and_again() -> None:
    for _ in range(3):
        with cpu_runtime():
            assert torch.zeros(1, device="cuda").device == CPU


@pytest.mark.parametrize("depth", [1, 2])
def test_an_exception_passes_through_and_leaves_nothing(depth: int) -> None:
    before = hygiene.snapshot()

    def enter(levels: int) -> None:
        with cpu_runtime():
            if levels > 1:
                enter(levels - 1)
            raise KeyError("from inside")

    with refuses(KeyError, "from inside"):
        enter(depth)
    assert hygiene.changes(before, hygiene.snapshot()) == []


def test_an_interrupt_leaves_nothing() -> None:
    before = hygiene.snapshot()
    with pytest.raises(KeyboardInterrupt), cpu_runtime():
        raise KeyboardInterrupt
    assert hygiene.changes(before, hygiene.snapshot()) == []


def test_on_a_gpu_without_transformer_engine_megatron_finds_the_names_it_reads() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core.transformer import multi_latent_attention

    strategy = MCoreStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    before = hygiene.snapshot()
    with strategy.runtime():
        assert moe_utils.te_general_gemm is None
        assert not multi_latent_attention.HAVE_TE
        with strategy.runtime():
            pass
        assert moe_utils.te_general_gemm is None
        assert torch.zeros(1).device == CPU
    assert hygiene.changes(before, hygiene.snapshot()) == []
