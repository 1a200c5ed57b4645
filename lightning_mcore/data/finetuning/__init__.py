# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning data: files, conversations, chat templates, tokens, streams."""
