# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine on the CPU; these tests run where its Python package is on the path (``make test-te``)."""
