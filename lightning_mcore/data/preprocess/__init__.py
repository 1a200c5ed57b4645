# SPDX-License-Identifier: Apache-2.0
"""``lightning-mcore preprocess``: text into Megatron's indexed datasets."""
