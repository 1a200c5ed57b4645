# SPDX-License-Identifier: Apache-2.0
"""Tests of the examples: the data they train on, their YAML files, and the scripts themselves."""
