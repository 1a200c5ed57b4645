# SPDX-License-Identifier: Apache-2.0
"""Ready-made LightningModules: ``MCoreGPT`` and its recipe."""
