# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine on the CPU: its released Python package with kernels in plain PyTorch."""
