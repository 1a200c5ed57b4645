# SPDX-License-Identifier: Apache-2.0
"""The former place of :mod:`lightning_mcore.ray`, whose public names can still be imported from here."""

from lightning_mcore.ray import CHECKPOINT, ElasticTorchTrainer, RayReport, checkpoint_to_resume, prepare_trainer

__all__ = ["CHECKPOINT", "ElasticTorchTrainer", "RayReport", "checkpoint_to_resume", "prepare_trainer"]
