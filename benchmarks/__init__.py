# SPDX-License-Identifier: Apache-2.0
"""Measurements, each run by a target of the Makefile."""

import lightning_mcore  # noqa: F401  (before megatron-core, so that TransformerEngine works on the CPU)
