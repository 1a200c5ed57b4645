# SPDX-License-Identifier: Apache-2.0
"""The tests. This package comes first, because megatron-core may find TransformerEngine without its CUDA library."""

import lightning_mcore  # noqa: F401
