# SPDX-License-Identifier: Apache-2.0
"""HTTP with typed errors and bounded retries."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2
import msgspec

from opendsec import _answers, _limits, _network
from opendsec._errors import BadResponse, OpendsecError
from opendsec._retry import Repeat, RetryPolicy
from opendsec._settings import Settings, is_loopback

from . import _concurrency

T = TypeVar("T")
R = TypeVar("R")

RequestMaker = Callable[[], httpx2.Request]
"""Makes a fresh request for each try, since a sent body cannot be sent again."""


class AsyncTransport:
    """One connection pool for the API and for sandbox traffic."""

    def __init__(self, settings: Settings, retry: RetryPolicy) -> None:
        self.settings = settings
        self.retry = retry
        needs_tls = "https" in (settings.base_url[:5], settings.sandbox_url[:5])
        self.http = self.new_http_client(
            settings.base_url,
            {},
            _network.ssl_context() if needs_tls else _network.plaintext_context(),
        )

    def new_http_client(
        self, base_url: str, headers: Mapping[str, str], context: ssl.SSLContext
    ) -> httpx2.AsyncClient:
        """A client with our limits. Proxies of the environment are not used for loopback."""
        return httpx2.AsyncClient(
            base_url=base_url,
            headers={"User-Agent": _network.USER_AGENT, **headers},
            verify=context,
            limits=_network.LIMITS,
            timeout=_network.timeout(_limits.REQUEST_TIMEOUT_S),
            trust_env=not is_loopback(base_url),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self.http.aclose()

    async def api(
        self,
        method: str,
        path: str,
        reply: type[T],
        *,
        params: Mapping[str, str | int | list[str]] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _limits.REQUEST_TIMEOUT_S,
        repeat: Repeat = Repeat.IDEMPOTENT,
        retries: bool = True,
    ) -> T:
        """Call the native API and decode its answer.

        Raises:
            Unauthenticated: no key is configured, or the server does not know it.
            OpendsecError: as the server says; ConnectionFailed without an answer.
        """
        all_headers = {**self.settings.key_headers(), **(headers or {})}
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            all_headers["Content-Type"] = "application/json"

        def make() -> httpx2.Request:
            return self.http.build_request(
                method,
                self.settings.base_url + path,
                params=params,
                content=content,
                headers=all_headers,
                timeout=_network.timeout(timeout_s),
            )

        response = await self.exchange(make, repeat=repeat, retries=retries)
        return decode(response, reply)

    async def exchange(
        self, make: RequestMaker, *, repeat: Repeat, retries: bool = True
    ) -> httpx2.Response:
        """Send and read the whole answer; a success by contract.

        Raises:
            OpendsecError: any failure, typed.
        """

        async def once() -> httpx2.Response:
            response = await self._send(make())
            try:
                await self._read(response)
            finally:
                await response.aclose()
            return response

        return await self._tried(once, repeat, retries)

    async def open(self, make: RequestMaker, *, repeat: Repeat) -> httpx2.Response:
        """Send and return once the head of a successful answer is there. The caller closes it.

        Raises:
            OpendsecError: any failure, typed.
        """

        async def once() -> httpx2.Response:
            return await self._send(make())

        return await self._tried(once, repeat, retries=True)

    async def _tried(self, once: Callable[[], Awaitable[R]], repeat: Repeat, retries: bool) -> R:
        tries = 0
        while True:
            tries += 1
            try:
                return await once()
            except OpendsecError as error:
                pause_s = self.retry.pause_s(error, tries, repeat) if retries else None
                if pause_s is None:
                    raise
            await _concurrency.sleep(pause_s)

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self.http.send(request, stream=True)
        except httpx2.HTTPError as exc:
            raise _network.connection_failed(exc, origin(request)) from exc
        if response.is_success:
            return response
        try:
            body = await self._error_body(response)
        finally:
            await response.aclose()
        raise _answers.from_http(response.status_code, response.headers, body)

    async def _read(self, response: httpx2.Response) -> None:
        try:
            await response.aread()
        except httpx2.HTTPError as exc:
            raise _network.connection_failed(exc, origin(response.request)) from exc

    async def _error_body(self, response: httpx2.Response) -> bytes:
        body = b""
        try:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _limits.ERROR_BODY_BYTES_MAX:
                    break
        except httpx2.HTTPError:
            pass  # The status alone still names the failure.
        return body[: _limits.ERROR_BODY_BYTES_MAX]


def origin(request: httpx2.Request) -> str:
    """Scheme, host and port: enough to find the fault, and free of secrets in queries."""
    url = request.url
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"


def decode(response: httpx2.Response, reply: type[T]) -> T:
    """The body as ``reply``.

    Raises:
        BadResponse: it is something else.
    """
    try:
        return msgspec.json.decode(response.content or b"{}", type=reply, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadResponse(
            f"The answer of {origin(response.request)} cannot be read: {exc}",
            http_status=response.status_code,
            request_id=response.headers.get("x-request-id"),
        ) from exc
