# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show; ``make gpu`` runs all of it, in pieces of a few minutes.

Each test trains in one process, on one GPU, and most compare with the CPU. ``GPU_TESTS_DEVICE=cpu`` runs the same code
on the CPU, with TransformerEngine's Python package on the path also what needs that.
"""
