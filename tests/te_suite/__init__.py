# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's own PyTorch tests, as they are, on the kernels of ``te_cpu``: ``make test-te-suite``."""
