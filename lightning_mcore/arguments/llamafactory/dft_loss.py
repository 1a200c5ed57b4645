# SPDX-License-Identifier: Apache-2.0
"""``use_dft_loss: true``: the loss of Dynamic Fine-Tuning.

Each token's cross entropy is weighted with the probability that the model gives the token, as a number that is not
differentiated: ``p * -log(p)`` with the gradient of ``-p * log(p)`` for a constant ``p`` in front. Tokens that the
model holds for impossible then pull less. The mean is over all tokens that count, and losses of evaluation are of the
same kind, as there; perplexities stay those of the cross entropy.

Source: ``dft_loss_func`` in LLaMA-Factory (src/llamafactory/train/trainer_utils.py, ff6d4d12); Wu et al. 2025,
"On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification".
"""

import torch
from torch import Tensor

from lightning_mcore.models.gpt import MCoreGPT


class DFTModel(MCoreGPT):
    """An ``MCoreGPT`` with that loss; it takes the same arguments."""

    def learned_losses(self, losses: Tensor) -> Tensor:
        """Weight each cross entropy, of any shape, with the probability of its token."""
        return losses * torch.exp(-losses.detach())
