# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray: a cluster on this machine, workers that die, machines that come and go (``make test-ray``)."""
