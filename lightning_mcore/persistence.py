# SPDX-License-Identifier: Apache-2.0
"""Lightning's checkpoint hooks: what is one file, what is a directory, and when each part is read.

:class:`MCorePersistence` is the part of the strategy that saves and resumes; ``strategy.py`` builds the steps on it.
A model that is whole on every rank is saved as Lightning saves it; of a split one ``sharded_state.py`` writes and reads
the shards, and Lightning's own state lies beside them.

Lightning asks for a checkpoint in two pieces. Before ``setup`` it calls ``load_checkpoint`` and hands out its state;
shards can only be read into the wrapped model, so they wait until the end of ``setup``.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_mcore import sharded_state as sharded
from lightning_mcore.chunks import ModelChunks, synchronize_parameters
from lightning_mcore.optimizer import MCoreOptimizer
from lightning_mcore.parallelism import MCoreParallelism


class MCorePersistence(MCoreParallelism):
    """Saving and resuming of :class:`~lightning_mcore.MCoreStrategy`."""

    _chunks: ModelChunks | None = None
    _finished_chunks: ModelChunks | None = None
    _pending_checkpoint: tuple[str, bool] | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Lightning reads its own part before ``setup``; shards are read at the end of it."""
        return False

    @property
    def _saves_one_file(self) -> bool:
        return not self._splits_weights and not self.gradients.distributed

    @property
    def _splits_weights(self) -> bool:
        layout = self.layout
        return layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size > 1 or (
            layout.expert_model_parallel_size > 1
        )

    def _megatron_optimizers(self) -> list[MCoreOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, MCoreOptimizer)]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a one-file checkpoint, or what stands beside the shards of a split model."""
        state = super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return state if self._saves_one_file else sharded.state_outside_chunks(self.lightning_module, state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the optimizer; beside shards only what LR schedulers read back."""
        owner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._saves_one_file:
            state: dict[str, Any] = owner.state_dict()
            return state
        return {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in owner.param_groups]}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state` returned; the state itself, if it is in shards, is there already.

        Raises:
            ValueError: The checkpoint holds the states of another number of optimizers, and not of none.
        """
        optimizers, states = self.optimizers, checkpoint["optimizer_states"]
        if len(states) not in (0, len(optimizers)):
            raise ValueError(
                f"the checkpoint holds the states of {len(states)} optimizers and configure_optimizers returned"
                f" {len(optimizers)}; resume with the optimizers of the run that saved it"
            )
        for optimizer, saved in zip(optimizers, states, strict=False):
            if "state" in saved or "megatron" in saved:
                optimizer.load_state_dict(saved)
                continue
            for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update(values)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write one file, or a directory where the model is split; collective over the world.

        Works during a run and after it, as ``trainer.save_checkpoint`` does.

        Raises:
            RuntimeError: There has been no run yet, and a run may split the model.
        """
        chunks = self._chunks or self._finished_chunks
        if chunks is not None:
            synchronize_parameters(chunks)
        if self._saves_one_file:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if chunks is None:
            raise RuntimeError("there is no model to save before the first run; call fit() or validate() first")
        optimizers = self._megatron_optimizers() if "optimizer_states" in checkpoint else []
        with self.runtime():
            sharded.save_sharded(
                self.broadcast(str(filepath)), chunks, optimizers, checkpoint, self._cuts_of_shards(True)
            )

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file, or Lightning's part of a directory, whose shards follow in ``setup``.

        Raises:
            FileNotFoundError: The path is a directory, but no checkpoint.
            ValueError: The checkpoint was written with other settings.
        """
        path = self.broadcast(str(checkpoint_path))  # not a Path, which breaks "http://"
        if not sharded.is_sharded(path):
            whole = super().load_checkpoint(path, weights_only)
            if self._splits_weights:
                raise ValueError(
                    f"{path} is one file, as it is written where the model is not split; this run splits it into"
                    f" {self.layout.describe(self.world_size)}, and reads a directory that was written on this layout"
                )
            return whole
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        state = sharded.load_lightning_state(path, weights_only, self._cuts_of_shards(fitting))
        self._pending_checkpoint = (path, "optimizer_states" in state)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a one-file checkpoint, or what stands beside the shards of a split model."""
        if self._pending_checkpoint is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
        if self._chunks is not None:  # in the middle of a run, as after a search for a learning rate
            self._load_pending(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    def _load_pending(self, fitting: bool) -> None:
        if self._pending_checkpoint is None:
            return
        (path, has_optimizers), self._pending_checkpoint = self._pending_checkpoint, None
        assert self._chunks is not None
        assert self.lightning_module is not None
        optimizers = self._megatron_optimizers() if fitting and has_optimizers else []
        sharded.load_sharded(path, self._chunks, optimizers, strict=self.lightning_module.strict_loading)
        if not optimizers:
            for optimizer in self._megatron_optimizers():
                optimizer.megatron.reload_model_params()

    def _cuts_of_shards(self, with_optimizers: bool) -> dict[str, Any]:
        """Return the settings that decide how weights, and with them the optimizer state, are cut into shards."""
        weights = {**dataclasses.asdict(self.layout), "precision": self.precision_plugin.precision}
        return {**weights, "use_distributed_optimizer": self.gradients.distributed} if with_optimizers else weights
