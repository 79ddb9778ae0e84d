# SPDX-License-Identifier: Apache-2.0
"""The client, written once, in async. ``scripts/generate_sync.py`` derives ``_sync`` from it."""
