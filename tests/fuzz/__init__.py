# SPDX-License-Identifier: Apache-2.0
"""Random settings: what validation accepts trains and resumes; what Megatron would reject is refused by us first."""
