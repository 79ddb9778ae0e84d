# SPDX-License-Identifier: AGPL-3.0-only
"""Where the next page of a list starts whose ids may be any text. Opaque to callers."""

from __future__ import annotations

import base64

import msgspec

from opendsec_server.contract.errors import InvalidRequest

_decoder = msgspec.json.Decoder(tuple[float, str])


def make_cursor(created_at: float, name: str) -> str:
    """The cursor after one object."""
    text = msgspec.json.encode((created_at, name))
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read_cursor(text: str) -> tuple[float, str]:
    """``created_at`` and id that a cursor stands for.

    Raises:
        InvalidRequest: not a cursor of ours.
    """
    try:
        padded = text + "=" * (-len(text) % 4)
        return _decoder.decode(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, UnicodeDecodeError, msgspec.DecodeError):
        raise InvalidRequest("the page token is not valid") from None
