# SPDX-License-Identifier: Apache-2.0
"""Data for language models: packing, samplers, data modules, and the files that they read."""
