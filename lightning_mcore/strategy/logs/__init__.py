# SPDX-License-Identifier: Apache-2.0
"""What a run logs, on every rank: steps, auxiliary losses, evaluation."""
