# SPDX-License-Identifier: AGPL-3.0-only
"""Why a registry did not give what skopeo asked it for.

Skopeo tells failures by text alone. Where that is not enough, the registry is asked once for the
manifest: its status is the evidence (OCI distribution-spec 1.1).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from urllib.parse import urlsplit

import httpx2
import msgspec

from opendsec_server.contract.errors import (
    ImageDamaged,
    ImageNotFound,
    OpendsecError,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
)
from opendsec_server.contract.images import RegistryAuth

from . import limits
from .references import DOCKER_HUB, Reference

_HUB_API = "registry-1.docker.io"
_RETRY_AFTER_DEFAULT_S = 60
_RETRY_AFTER_MAX_S = 24 * 3_600
_CHALLENGE_CHARS_MAX = 4_096
_TOKEN_BYTES_MAX = 1024 * 1024
_MANIFEST_TYPES = ", ".join((
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
))  # fmt: skip

_NOT_FOUND = re.compile(
    r"manifest unknown|name unknown|repository name not known|no image found in (?:manifest list|"
    r"image index) for|no such file or directory|no descriptor found|tag .* not found", re.I,
)  # fmt: skip
_DENIED = re.compile(
    r"unauthorized|authentication required|access to the resource is denied|\bdenied\b|"
    r"invalid username/password|unable to retrieve auth token|forbidden", re.I,
)  # fmt: skip
_BODY_RE = re.compile(r"(StatusCode: [0-9]{3}),.*", re.S)
"""What skopeo quotes of an answer that is no registry's. Callers choose whom the node asks: they
are not to read what others, on its own networks, say to it."""
_LIMITED = re.compile(r"toomanyrequests|too many requests", re.I)
_DAMAGED = re.compile(
    r"does not match digest|manifest digest|corrupt|digest verification|invalid manifest|"
    r"unsupported (?:schema|manifest)|unimplemented manifest|cannot unmarshal|invalid character|"
    r"Error parsing manifest|invalid tar|unexpected tar manifest", re.I,
)  # fmt: skip


class _Token(msgspec.Struct):
    """What a token server answers (distribution's token specification)."""

    token: str | None = None
    access_token: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place that has an image: its registry, or a mirror of it.

    Attributes:
        host: ``docker.io``, ``mirror:5000``.
        insecure: Plain HTTP, or TLS that nobody vouches for, is good enough.
    """

    host: str
    insecure: bool


def from_text(text: str, what: str) -> OpendsecError | None:
    """The error that skopeo's words mean; None: they leave it open."""
    said = text.strip()[-500:]
    if _LIMITED.search(text) or _DENIED.search(text):
        # Only a question of ours shows how long to wait; and registries say "denied" of images
        # that do not exist.
        return None
    if _NOT_FOUND.search(text):
        return ImageNotFound(f"{what} was not found: {said}")
    if _DAMAGED.search(text):
        return ImageDamaged(f"{what}: the registry sent what is not what it says: {said}")
    return None


async def explain(
    endpoint: Endpoint,
    reference: Reference,
    auth: RegistryAuth | None,
    text: str,
    *,
    push: bool = False,
) -> OpendsecError:
    """The error that a failed run of skopeo amounts to.

    Args:
        endpoint: Where it was.
        reference: What was asked for.
        auth: The credentials that it had.
        text: What skopeo said.
        push: It was to send, so that the manifest need not exist.
    """
    what = f"{reference} at {endpoint.host}"
    text = _BODY_RE.sub(r"\1", text)
    error = None if push else from_text(text, what)
    if error is None:
        error = await probe(endpoint, reference, auth, push=push)
    if error is None or isinstance(error, RegistryUnavailable):
        # Skopeo may have got further than we do: it has certificates of its own.
        if _LIMITED.search(text):
            return RegistryLimited(
                f"{what}: too many requests", retry_after_s=_RETRY_AFTER_DEFAULT_S
            )
        if _DENIED.search(text):
            return RegistryDenied(f"{what}: {text.strip()[-300:]}")
    return error or RegistryUnavailable(f"{what}: {text.strip()[-500:]}")


async def probe(
    endpoint: Endpoint, reference: Reference, auth: RegistryAuth | None, *, push: bool = False
) -> OpendsecError | None:
    """Ask for the manifest (before a push: whether we may come in); None: the answer is good."""
    what = f"{reference} at {endpoint.host}"
    host = _HUB_API if endpoint.host == DOCKER_HUB else endpoint.host
    schemes = ("https", "http") if endpoint.insecure else ("https",)
    error: OpendsecError | None = None
    async with httpx2.AsyncClient(
        verify=False if endpoint.insecure else ssl.create_default_context(),
        timeout=limits.PROBE_TIMEOUT_S,
        follow_redirects=False,
        trust_env=not is_loopback(host),
    ) as client:
        for scheme in schemes:
            wanted = "" if push else f"{reference.path}/manifests/{reference.selector}"
            scope = f"repository:{reference.path}:{'pull,push' if push else 'pull'}"
            try:
                async with asyncio.timeout(limits.PROBE_TOTAL_S):
                    answer = await _ask(client, f"{scheme}://{host}/v2/{wanted}", scope, auth)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, TimeoutError) as exc:
                error = RegistryUnavailable(
                    f"{what} cannot be reached: {exc or type(exc).__name__}"
                )
                continue
            return _from_status(answer, what, auth)
    return error


async def _ask(
    client: httpx2.AsyncClient, url: str, scope: str, auth: RegistryAuth | None
) -> httpx2.Response:
    headers = {"Accept": _MANIFEST_TYPES}
    # Distribution's own registry has no HEAD of /v2/.
    method = "GET" if url.endswith("/v2/") else "HEAD"
    basic = None if auth is None else httpx2.BasicAuth(auth.username, auth.password)
    answer = await _head(client, method, url, headers)
    if answer.status_code != 401:
        return answer
    challenge = answer.headers.get("WWW-Authenticate", "")[:_CHALLENGE_CHARS_MAX]
    if not challenge.lower().startswith("bearer "):
        return answer if basic is None else await _head(client, method, url, headers, basic)
    fields = dict(re.findall(r'\b(\w+)="([^"]*)"', challenge))
    params = {"service": fields.get("service", ""), "scope": scope}
    async with client.stream("GET", fields.get("realm", ""), params=params, auth=basic) as token:
        if token.status_code != 200:
            return token
        bearer = await _token_in(token)
    return await _head(client, method, url, {**headers, "Authorization": f"Bearer {bearer}"})


async def _head(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    headers: dict[str, str],
    auth: httpx2.BasicAuth | None = None,
) -> httpx2.Response:
    """Status and headers. The body, which may be without end, is not read."""
    async with client.stream(method, url, headers=headers, auth=auth) as answer:
        return answer


async def _token_in(answer: httpx2.Response) -> str:
    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > _TOKEN_BYTES_MAX:
            raise ValueError("the token server sends too much")
    try:
        found = msgspec.json.decode(body, type=_Token)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError("the token server's answer cannot be read") from exc
    return found.token or found.access_token or ""


def _from_status(
    answer: httpx2.Response, what: str, auth: RegistryAuth | None
) -> OpendsecError | None:
    status = answer.status_code
    if status in (401, 403):
        given = "without credentials" if auth is None else "with the credentials it was given"
        return RegistryDenied(f"{what}: the registry answered {status} {given}")
    if status == 404:
        return ImageNotFound(f"{what} was not found")
    if status == 429:
        return RegistryLimited(
            f"{what}: the registry answered 429, too many requests",
            retry_after_s=retry_after_s(answer.headers.get("Retry-After")),
        )
    if status >= 500:
        return RegistryUnavailable(
            f"{what}: the registry answered {status}",
            retry_after_s=retry_after_s(answer.headers.get("Retry-After"), 1),
        )
    return None


def retry_after_s(value: str | None, default_s: int = _RETRY_AFTER_DEFAULT_S) -> int:
    """``Retry-After`` in seconds: a number or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return default_s
    try:
        wanted = int(value)
    except ValueError:
        try:
            wanted = round(parsedate_to_datetime(value).timestamp() - time())
        except (ValueError, OverflowError):
            return default_s
    return min(max(wanted, 1), _RETRY_AFTER_MAX_S)


def is_loopback(host: str) -> bool:
    """Whether a registry's ``host:port`` is on this machine itself: like docker, no TLS needed."""
    name = urlsplit(f"//{host}").hostname or ""
    return name == "localhost" or name == "::1" or name.startswith("127.")
