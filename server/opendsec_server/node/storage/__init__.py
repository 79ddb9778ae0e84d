# SPDX-License-Identifier: AGPL-3.0-only
"""The disk pool, sandboxes' writable layers with a limit each, and their root file systems."""
