# SPDX-License-Identifier: Apache-2.0
"""What a run would be, computed from its settings alone: ``lightning-mcore plan``."""
