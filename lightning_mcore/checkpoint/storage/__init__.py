# SPDX-License-Identifier: Apache-2.0
"""Files on a disk: folders that appear only when they are whole, direct writes, torch archives."""
