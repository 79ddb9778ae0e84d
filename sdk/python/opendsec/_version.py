# SPDX-License-Identifier: Apache-2.0
"""The one place of the version."""

__version__ = "0.1.0"
