# SPDX-License-Identifier: Apache-2.0
"""``use_dft_loss: true``: the loss of Dynamic Fine-Tuning.

Each token's cross entropy is multiplied by the probability ``p`` that the model gives the token, with ``p`` held
constant in backward. Tokens that the model finds improbable then weigh less. The loss is a mean over all tokens that
are not masked, in training and in evaluation, as in LLaMA-Factory; perplexities still use the cross entropy.

Source: ``dft_loss_func`` in LLaMA-Factory (src/llamafactory/train/trainer_utils.py, ff6d4d12); Wu et al. 2025, "On the
Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification".
"""

import torch
from torch import Tensor

from lightning_mcore.models.gpt import MCoreGPT


class DFTModel(MCoreGPT):
    """An ``MCoreGPT`` with the Dynamic Fine-Tuning loss; takes the same arguments."""

    def learned_losses(self, losses: Tensor) -> Tensor:
        """Return each token's cross entropy times its probability; any shape, and the same shape out."""
        # A token with p = 0.1 has a cross entropy of 2.303 and a loss of 0.230; with p = 0.9, 0.105 becomes 0.095.
        return losses * torch.exp(-losses.detach())
