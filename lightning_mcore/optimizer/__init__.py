# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizers behind torch's interface: rules, loss scale, Muon, schedulers."""
