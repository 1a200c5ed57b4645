# SPDX-License-Identifier: Apache-2.0
"""Megatron's layers in plain PyTorch, packed sequences, the inputs and losses of language models, metrics."""
