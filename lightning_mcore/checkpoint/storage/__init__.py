# SPDX-License-Identifier: Apache-2.0
"""Files that are there only when they are whole: atomic folders, direct writes, torch archives."""
