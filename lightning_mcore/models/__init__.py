# SPDX-License-Identifier: Apache-2.0
"""Ready-made LightningModules: ``MCoreGPT``, its vision and preference variants, and their recipe."""
