# SPDX-License-Identifier: Apache-2.0
"""What only a browser can show of the documentation: ``make site-check`` builds it and opens every page in Chromium."""
