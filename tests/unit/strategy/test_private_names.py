# SPDX-License-Identifier: Apache-2.0
"""Private names of other packages that this one reads: each has an owner here, and is there in what is installed.

A new release of Lightning, torch or megatron-core that renames one fails this test, and not a run on the last step.
"""

import ast
import contextlib
import inspect
from pathlib import Path
from types import ModuleType

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities import parsing
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch._library.custom_ops import CustomOpDef
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.jit import _builtins
from torch.optim import _muon
from transformers import Qwen3VLProcessor

from lightning_mcore.strategy import LIGHTNING, check_lightning
from tests.support.sentences import refuses

PACKAGE = Path(__file__).resolve().parents[3] / "lightning_mcore"

OWNERS: dict[str, type | ModuleType] = {
    "_C": torch,
    "_accelerator_connector": pl.Trainer,
    "_active_loop": pl.Trainer,
    "_adjust_lr": _muon,
    "_amp_foreach_non_finite_check_and_unscale_": torch,
    "_copy_main_params_to_model_params": Float16OptimizerWithFloat16Params,
    "_foreach_mul_": torch,
    "_foreach_norm": torch,
    "_forward_impl": ColumnParallelLinear,
    "_apply_scaling": RotaryEmbedding,
    "_early_exit": LearningRateFinder,
    "_make_forward_pre_hook": DistributedDataParallel,
    "_batches_that_stepped": _TrainingEpochLoop,
    "_replace_param_with_distributed_if_needed": MegatronFSDP,
    "_replace_param_with_raw_if_needed": MegatronFSDP,
    "_build_megatron_dataset_splits": BlendedMegatronDatasetBuilder,
    "_calculate_timestamps": Qwen3VLProcessor,
    "_callback_metrics": _LoggerConnector,
    "_cdata": torch.UntypedStorage,
    "_checkpoint_connector": pl.Trainer,
    "_get_loops_state_dict": _CheckpointConnector,
    "_coalescing_manager": distributed_c10d,
    "_combined_loader": _FitLoop,
    "_combined_loader_states_to_load": _FitLoop,
    "_compiler_ctx": pl.LightningModule,
    "_console_kwargs": RichProgressBar,
    "_current_graph_task_id": torch._C,
    "_current_fx_name": pl.LightningModule,
    "_data_connector": pl.Trainer,
    "_data_fetcher": _FitLoop,
    "_data_source": _FitLoop,
    "_datahook_selector": _DataConnector,
    "_defaults": torchmetrics.Metric,
    "_device_types": torch.distributed.ProcessGroup,
    "_dump_snapshot": torch.cuda.memory,
    "_evaluation_loop": pl.Trainer,
    "_find_builtin": _builtins,
    "_find_last_checkpoints": ModelCheckpoint,
    "_generate_state_key": pl.Callback,
    "_get": LightningCLI,
    "_get_backend": torch.distributed.ProcessGroup,
    "_get_main_param_and_optimizer_states": DistributedOptimizer,
    "_get_model_param_range_map": DistributedOptimizer,
    "_get_sequence_number_for_group": torch.distributed.ProcessGroup,
    "_global_process_group_list": parallel_state,
    "_hparams_name": parsing,
    "_init_fn": CustomOpDef,
    "_is_sequential": _EvaluationLoop,
    "_is_training_done": _TrainingEpochLoop,
    "_is_view": torch.Tensor,
    "_iterator": CombinedLoader,
    "_last_checkpoint_saved": ModelCheckpoint,
    "_kwargs": WeightAveraging,
    "_layer_sync": DDPStrategy,
    "_link_checkpoint": ModelCheckpoint,
    "_load_state_dicts": CombinedLoader,
    "_local_scalar_dense": torch.ops.aten,
    "_logger_connector": pl.Trainer,
    "_max_depth": ModelSummary,
    "_mode": CombinedLoader,
    "_monitor_candidates": ModelCheckpoint,
    "_non_persistent_buffers_set": torch.nn.Module,
    "_on_before_fetch": _TrainingEpochLoop,
    "_only_lift_cpu_tensors": torch._C,
    "_optimizer_step_post_hooks": torch.optim.Optimizer,
    "_optimizer_step_pre_hooks": torch.optim.Optimizer,
    "_optimizers": LightningArgumentParser,
    "_option_string_actions": jsonargparse.ArgumentParser,
    "_pickle_storage_type": torch.FloatStorage,
    "_precision_flag": _AcceleratorConnector,
    "_prepare_dataloader": _DataConnector,
    "_record_memory_history": torch.cuda.memory,
    "_register_builtin": _builtins,
    "_requires_distributed_sampler": _DataConnector,
    "_reset_optimizers_and_schedulers": DDPStrategy,
    "_results": pl.Trainer,
    "_sampler": _DatasetSamplerWrapper,
    "_save_topk_checkpoint": ModelCheckpoint,
    "_schema": torch._ops.OpOverload,
    "_scaled_dot_product_efficient_attention": torch.ops.aten,
    "_scaled_dot_product_flash_attention": torch.ops.aten,
    "_set_attention_backend": LanguageModule,
    "_set_only_lift_cpu_tensors": torch._C,
    "_set_main_param_and_optimizer_states": DistributedOptimizer,
    "_should_accumulate": _TrainingEpochLoop,
    "_should_check_val_fx": _TrainingEpochLoop,
    "_should_skip_saving_checkpoint": ModelCheckpoint,
    "_signal_connector": pl.Trainer,
    "_slurm_sigusr_handler_fn": _SignalConnector,
    "_state_dicts": CombinedLoader,
    "_subcommand_parsers": LightningCLI,
    "_to_copy": torch.ops.aten,
    "_type": torch.ScriptObject,
    "_timeout": DDPStrategy,
    "_use_buffers": WeightAveraging,
    "_update_count": torchmetrics.Metric,
    "_version": torch.Tensor,
    "_propagate_tensor_meta_non_cached": ShardingPropagator,
    "_world": distributed_c10d,
    "_zeropower_via_newtonschulz": _muon,
}
OF_TRANSFORMER_ENGINE = {
    "_amax_columnwise",
    "_amax_rowwise",
    "_canonicalized_amax_reduction_group",
    "_columnwise_data",
    "_columnwise_scale_inv",
    "_fp8_dtype",
    "_is_2D_scaled",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_scale_inv",
    "_transpose",
}
"""Names of its quantized tensors and quantizers; ``tests/te`` looks for them where it is installed."""
OF_PYTHON = {"_exit", "_getframe"}  # of os and sys, which have a page of documentation


def foreign_names() -> set[str]:
    """Return the private attributes that the package reads and does not define."""
    read, own = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.ctx, ast.Load):
                    read.add(node.attr)
                elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    own.add(node.attr)
    return read - own - OF_PYTHON - OF_TRANSFORMER_ENGINE


def test_every_private_name_of_another_package_has_its_owner_in_the_table() -> None:
    assert foreign_names() == set(OWNERS)


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_the_owner_has_the_name(name: str) -> None:
    owner = OWNERS[name]
    assert hasattr(owner, name) or any(f".{name} =" in source or f".{name}:" in source for source in sources(owner))


def sources(owner: type | ModuleType) -> list[str]:
    """Return the text of a module, or of the classes that a class is made of, where it is Python."""
    bases = owner.__mro__ if isinstance(owner, type) else [owner]
    found = []
    for base in bases:
        with contextlib.suppress(OSError, TypeError):
            found.append(inspect.getsource(base))
    return found


def test_another_minor_release_of_lightning_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.__version__", "2.7.1")
    with refuses(ImportError, "lightning 2.7.1 is installed"):
        check_lightning()


def test_the_metadata_asks_for_the_release_of_lightning_that_is_checked() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"lightning>={LIGHTNING},<2.{int(LIGHTNING.split(".")[1]) + 1}"' in text
