# SPDX-License-Identifier: AGPL-3.0-only
"""What the server tells clients about the data plane."""

from __future__ import annotations

import re

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.limits import IDEMPOTENCY_KEY_CHARS_MAX

ENVD_VERSION = "0.9.1"
"""Version of E2B's in-sandbox protocol that the guest agent implements."""

NATIVE_KEY_RE = re.compile(rf"[A-Za-z0-9._:-]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")
E2B_KEY_RE = re.compile(rf"[a-z0-9-]{{1,{IDEMPOTENCY_KEY_CHARS_MAX}}}")


def idempotency_key(text: str | None, allowed: re.Pattern[str]) -> str | None:
    """Check an ``Idempotency-Key`` header.

    Raises:
        InvalidRequest: not of the allowed characters, empty, or too long.
    """
    if text is not None and allowed.fullmatch(text) is None:
        raise InvalidRequest(f"Idempotency-Key: must match {allowed.pattern}")
    return text
