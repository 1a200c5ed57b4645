# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; each has a Makefile target."""

import lightning_mcore  # noqa: F401  (before megatron-core, so that TransformerEngine works on the CPU)
