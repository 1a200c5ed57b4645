# SPDX-License-Identifier: Apache-2.0
"""``use_dft_loss: true``: the loss of Dynamic Fine-Tuning.

Each token's cross entropy is multiplied by the probability ``p`` that the model gives the token, with ``p`` held
constant in backward. Tokens that the model finds improbable then weigh less. The loss is a mean over all tokens that
are not masked, in training and in evaluation, as in LLaMA-Factory; perplexities are still those of the cross entropy.

Source: ``dft_loss_func`` in LLaMA-Factory (src/llamafactory/train/trainer_utils.py, ff6d4d12); Wu et al. 2025,
"On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification".
"""

import torch
from torch import Tensor

from lightning_mcore.models.gpt import MCoreGPT


class DFTModel(MCoreGPT):
    """An ``MCoreGPT`` with the Dynamic Fine-Tuning loss; takes the same arguments."""

    def learned_losses(self, losses: Tensor) -> Tensor:
        """Return each token's cross entropy times its probability; floats of any shape, and the same shape out."""
        return losses * torch.exp(-losses.detach())
