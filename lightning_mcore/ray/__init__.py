# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray: a check of the trainer, checkpoints that are reported to Ray, a launch, and elastic sizes.

Ray Train places the workers, opens torch's process group and calls a function on each worker; that function makes a
``Trainer`` with ``MCoreStrategy`` as anywhere else::

    def train(config):
        options = {"plugins": [RayLightningEnvironment()], "callbacks": [RayReport()]}
        trainer = pl.Trainer(devices=2, strategy=MCoreStrategy(tensor_model_parallel_size=2), **options)
        prepare_trainer(trainer).fit(model, data, ckpt_path=checkpoint_to_resume())


    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()

``launch.py`` does this for the commands and for arguments in the style of Hugging Face.

Only this subpackage imports ``ray``, and it is imported only for a run on Ray.
"""

try:
    from lightning_mcore.ray.elastic import ElasticTorchTrainer
    from lightning_mcore.ray.prepare import prepare_trainer
    from lightning_mcore.ray.report import CHECKPOINT, RayReport, checkpoint_to_resume
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'a run on Ray needs the package {error.name}, which is not installed; pip install "lightning-mcore[ray]"'
    ) from error

__all__ = ["CHECKPOINT", "ElasticTorchTrainer", "RayReport", "checkpoint_to_resume", "prepare_trainer"]
