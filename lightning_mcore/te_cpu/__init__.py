# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine on the CPU: its released Python package, unchanged, on kernels in plain PyTorch."""
