# SPDX-License-Identifier: AGPL-3.0-only
"""Tokens of a sandbox, derived from one secret of the server, so that none is stored."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from opendsec_server.config import ConfigError

SECRET_BYTES = 32


class TokenMint:
    """Derives tokens: HMAC-SHA256 of purpose and sandbox id, in hex."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def access(self, sandbox_id: str) -> str:
        """Opens the data plane (E2B: ``envdAccessToken``)."""
        return self._derive("access", sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """Opens user ports that are not public."""
        return self._derive("traffic", sandbox_id)

    def control(self, sandbox_id: str) -> str:
        """Opens the guest agent's internal routes. Never leaves the machine."""
        return self._derive("control", sandbox_id)

    def upload(self, project_id: str, files_hash: str, expires: str) -> str:
        """Lets one archive be sent to a project, until ``expires`` (Unix seconds)."""
        return self._derive("upload", f"{project_id}:{files_hash}:{expires}")

    def audit_secret(self) -> bytes:
        """What entries of the audit log are signed with."""
        return self._derive("audit", "log").encode()

    def _derive(self, purpose: str, name: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{name}".encode(), hashlib.sha256).hexdigest()


def load_secret(path: Path) -> bytes:
    """Read the server's secret, or make it at the first start (mode 0600).

    Raises:
        ConfigError: it cannot be read or written, or is damaged. A new one would cut off every
            running sandbox, so that a damaged one is never replaced.
    """
    try:
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = secrets.token_bytes(SECRET_BYTES)
            write_private(path, secret)
    except OSError as exc:
        raise ConfigError(f"cannot use the server's secret {path}: {exc.strerror}") from exc
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"the server's secret {path} is damaged: {len(secret)} bytes instead of "
            f"{SECRET_BYTES}. Restore it, or remove it to make a new one: running sandboxes are "
            "then no longer reachable."
        )
    return secret


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
