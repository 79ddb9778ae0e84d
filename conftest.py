# SPDX-License-Identifier: AGPL-3.0-only
"""For all tests of this repository."""

pytest_plugins = ["tests.shares"]
