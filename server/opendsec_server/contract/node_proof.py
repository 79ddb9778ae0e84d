# SPDX-License-Identifier: AGPL-3.0-only
"""How gateway and node prove to each other what they say, by a secret that both hold.

A request proves, in one header: its method, path and arguments, the digest of its body, the node
that it is for, its time, and a nonce. The node hears it if the time is near its own, and each nonce
once. A body whose digest is not known when the head is sent is proven by its last bytes.

Each line of an answer proves its own text, the request's nonce, and its place: it cannot be
changed, moved, or be an answer to something else. That an answer is whole is seen from what it
says: streams have a last line.

The secret itself is never sent. A clock that is set back lets what was said in the time that comes
again be repeated.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, NamedTuple

NONCE_CHARS = 32
STREAMED = "-"
"""In place of a digest: the body ends with its proof."""
TRAILER_BYTES = 32
LINE_PROOF_CHARS = 32
"""128 bits: it is worth something for this one line only."""

_BLOCK_BYTES = 64
"""Of SHA-256."""
_DIGEST_CHARS = 64
_NODE_ID_CHARS_MAX = 16
_TIME_CHARS_MAX = 20
_HELD_BYTES = 2_047
"""Up to here hashing does not let go of the interpreter's lock. To get it back takes longer than
to hash a few of these."""
_HELD_BYTES_MAX = 64 * 1_024


class Claims(NamedTuple):
    """What a request has proven beside its method, path and arguments."""

    nonce: str
    made_at_us: int
    node_id: str
    """Empty: it is for any node."""
    digest: str
    """SHA-256 of its body, or ``STREAMED``."""


def digest_of(body: bytes) -> str:
    """The digest of a body that is known as a whole."""
    found = hashlib.sha256()
    _feed(found, body)
    return found.hexdigest()


def _feed(hasher: Any, data: bytes) -> None:
    if _HELD_BYTES < len(data) <= _HELD_BYTES_MAX:
        view = memoryview(data)
        for start in range(0, len(data), _HELD_BYTES):
            hasher.update(view[start : start + _HELD_BYTES])
    else:
        hasher.update(data)


class Prover:
    """Makes and checks proofs.

    Args:
        secret: What both sides hold.
    """

    def __init__(self, secret: bytes) -> None:
        # HMAC-SHA256 from its two halves: to copy them costs half of what ``hmac`` takes.
        key = hashlib.sha256(secret).digest() if len(secret) > _BLOCK_BYTES else secret
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key))

    def _of(self, text: bytes) -> hashlib._Hash:
        inner = self._inner.copy()
        _feed(inner, text)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer

    # --- requests -----------------------------------------------------------

    def request(
        self,
        nonce: str,
        made_at_us: int,
        node_id: str,
        method: str,
        target: str,
        digest: str,
        arguments: str,
    ) -> str:
        """The header of a request.

        Args:
            nonce: Used for nothing else.
            made_at_us: The sender's time, in microseconds since the epoch.
            node_id: See ``Claims``.
            method: Of HTTP.
            target: Path, and query if there is one.
            digest: See ``Claims``.
            arguments: Those that are in a header.
        """
        claims = f"{nonce}.{made_at_us}.{node_id}.{digest}"
        text = f"to-node\n{claims}\n{method}\n{target}\n{arguments}"
        return f"{claims}.{self._of(text.encode()).hexdigest()}"

    def claims(self, header: str, method: str, target: str, arguments: str) -> Claims | None:
        """What a request's header says. None: its sender does not hold the secret, or it is
        another request's."""
        parts = header.split(".")
        if len(parts) != 5 or not header.isascii():
            return None
        nonce, made_at, node_id, digest, _ = parts
        if (
            len(nonce) != NONCE_CHARS
            or len(made_at) > _TIME_CHARS_MAX
            or not made_at.isdigit()
            or len(node_id) > _NODE_ID_CHARS_MAX
            or (digest != STREAMED and len(digest) != _DIGEST_CHARS)
        ):
            return None
        claims = Claims(nonce, int(made_at), node_id, digest)
        try:
            wanted = self.request(*claims[:3], method, target, digest, arguments).encode()
        except UnicodeEncodeError:
            return None
        return claims if hmac.compare_digest(wanted, header.encode()) else None

    def trailer(self, nonce: str, digest: str) -> bytes:
        """The last bytes of a body that was not known before.

        Args:
            nonce: Of the request.
            digest: SHA-256 of what comes before.
        """
        return self._of(f"body-to-node\n{nonce}\n{digest}".encode()).digest()

    def is_trailer(self, found: bytes, nonce: str, digest: str) -> bool:
        """Whether a body ended with its proof."""
        return hmac.compare_digest(found, self.trailer(nonce, digest))

    # --- answers ------------------------------------------------------------

    def answer(self, nonce: str) -> str:
        """The header of the answer to a request: who answers holds the secret."""
        return self._of(f"from-node\n{nonce}".encode()).hexdigest()

    def line(self, nonce: str, number: int, text: bytes) -> bytes:
        """What stands before a line of the answer.

        Args:
            nonce: Of the request.
            number: Of the line, from 0.
            text: The line.
        """
        whole = b"line-from-node\n%s\n%d\n%s" % (nonce.encode(), number, text)
        return self._of(whole).hexdigest()[:LINE_PROOF_CHARS].encode()
