# SPDX-License-Identifier: Apache-2.0
"""What the sync and the async transport share about HTTP: settings and error mapping."""

from __future__ import annotations

import functools
import ssl

import httpx2

from . import _limits
from ._errors import ConnectionFailed
from ._retry import Unsent
from ._version import __version__

USER_AGENT = f"opendsec-python/{__version__}"

LIMITS = httpx2.Limits(
    # Every running command holds a connection, so a cap here would make commands wait for others.
    max_connections=None,
    max_keepalive_connections=_limits.KEEPALIVE_CONNECTIONS_MAX,
    keepalive_expiry=_limits.KEEPALIVE_EXPIRY_S,
)

_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """One verified context for all clients: loading the trust store takes some 50 ms."""
    return httpx2.create_ssl_context()


@functools.cache
def plaintext_context() -> ssl.SSLContext:
    """For clients that only speak http://. It trusts nobody, so a stray https:// fails closed."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def timeout(silence_max_s: float | None) -> httpx2.Timeout:
    """Time-outs of one request; ``silence_max_s`` is how long the server may send nothing."""
    return httpx2.Timeout(
        connect=_limits.CONNECT_TIMEOUT_S, read=silence_max_s, write=silence_max_s, pool=None
    )


def connection_failed(exc: httpx2.HTTPError, url: str) -> ConnectionFailed:
    """The typed error for a failure below HTTP."""
    reason = (str(exc) or type(exc).__name__).rstrip(".") + "."
    if isinstance(exc, _UNSENT):
        return Unsent(f"Cannot connect to {url}: {reason}")
    if isinstance(exc, httpx2.TimeoutException):
        return ConnectionFailed(f"{url} did not answer in time ({type(exc).__name__}).")
    return ConnectionFailed(f"The connection to {url} broke: {reason}")
