# SPDX-License-Identifier: Apache-2.0
"""Signed file URLs (E2B's signature, version 1)."""

from __future__ import annotations

import base64
import hashlib
from typing import Literal

Operation = Literal["read", "write"]


def file_signature(
    path: str, operation: Operation, user: str | None, token: str, expires_at: int | None
) -> str:
    """The signature that lets anyone who holds it read or write one path.

    Args:
        path: Path as it will stand in the URL.
        user: None and the default user's name make different signatures.
        token: The sandbox's access token.
        expires_at: Unix seconds; None: as long as the sandbox lives.
    """
    parts = [path, operation, user or "", token]
    if expires_at is not None:
        parts.append(str(expires_at))
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    return "v1_" + base64.b64encode(digest).decode("ascii").rstrip("=")
