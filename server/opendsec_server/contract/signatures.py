# SPDX-License-Identifier: AGPL-3.0-only
"""Signatures of file URLs (E2B, version 1): proof that their maker held the access token."""

from __future__ import annotations

import base64
import hashlib


def file_signature(
    path: str, operation: str, username: str, token: str, expiration: str | None
) -> str:
    """E2B's signature v1 of a file URL.

    Args:
        path: As in the URL.
        operation: ``read`` or ``write``.
        username: Empty for none; that is not the same as the default user's name.
        token: The sandbox's access token.
        expiration: Unix seconds as in the URL. None: it has none.
    """
    text = f"{path}:{operation}:{username}:{token}"
    if expiration is not None:
        text += f":{expiration}"
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    return f"v1_{digest}"
