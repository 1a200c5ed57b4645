# SPDX-License-Identifier: Apache-2.0
"""Model families, each a table in its own file; ``hf/family.py`` explains the entries."""
