# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with tensor parallelism on two Ray workers: ``python examples/ray_train.py``.

The function ``train`` runs on each worker. Every ten steps it saves a checkpoint in ``outputs/ray_train``. If a worker
dies, Ray restarts both, and they resume from the last checkpoint. Requires ``pip install "lightning-mcore[ray]"``.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchConfig, TorchTrainer

import pretrain_gpt
from lightning_mcore import MCoreStrategy
from lightning_mcore.ray import RayReport, checkpoint_to_resume, prepare_trainer


def train(config: dict[str, Any]) -> None:
    """Train on this worker."""
    options = pretrain_gpt.parse_arguments(["--num-layers=2", "--hidden-size=64", f"--max-steps={config['max_steps']}"])
    pl.seed_everything(options.seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=get_context().get_local_world_size(),
        num_nodes=get_context().get_world_size() // get_context().get_local_world_size(),
        strategy=MCoreStrategy(tensor_model_parallel_size=2, micro_batch_size=4),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayReport(every_n_train_steps=10)],
        max_steps=options.max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = pretrain_gpt.build_model(options), pretrain_gpt.build_data(options)
    prepare_trainer(trainer).fit(model, datamodule=data, ckpt_path=checkpoint_to_resume())


def main() -> None:
    """Start Ray on this machine, train, and show the last report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("outputs/ray_train"), help="folder for the checkpoints")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    result = TorchTrainer(
        train,
        train_loop_config={"max_steps": options.max_steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(options.output.resolve()), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"step {result.metrics['step']}, training loss {result.metrics['train_loss']:.3f}: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
