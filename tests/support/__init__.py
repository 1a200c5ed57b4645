# SPDX-License-Identifier: Apache-2.0
"""What tests share: launching ranks, tiny models and data, layouts, and what is measured of a run."""
