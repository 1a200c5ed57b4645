# SPDX-License-Identifier: Apache-2.0
"""A run as plain data: sizes, layout, settings, and the rules between them. No torch."""
