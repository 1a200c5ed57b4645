# SPDX-License-Identifier: Apache-2.0
"""Describe a run from its settings alone: ``lightning-mcore plan``."""
