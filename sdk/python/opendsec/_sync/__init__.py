# SPDX-License-Identifier: Apache-2.0
"""The sync client, derived from ``_async`` by ``scripts/generate_sync.py``."""
