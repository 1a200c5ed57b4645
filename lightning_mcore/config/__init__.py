# SPDX-License-Identifier: Apache-2.0
"""What a run is, as plain data: sizes, layout, settings, and the rules between them. No torch."""
