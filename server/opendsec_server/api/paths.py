# SPDX-License-Identifier: AGPL-3.0-only
"""Which API a path belongs to: both share one port."""

from __future__ import annotations

_OPERATIONS = frozenset({"/healthz", "/readyz", "/metrics"})
_CONTROL = ("/routes", "/consoles", "/invalidations")


def is_native(path: str) -> bool:
    """Whether errors on this path have the native shape; else E2B's."""
    return path == "/v1" or path.startswith(("/v1/", *_CONTROL)) or path in _OPERATIONS
