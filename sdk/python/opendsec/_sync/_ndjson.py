# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_ndjson.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""Answers of many lines (NDJSON), as they come.

Lines ``{}`` are signs of life. The last line is ``{"done": {…}}`` or ``{"failed": {…error}}``; an
answer that ends without one was cut off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx2
import msgspec

from opendsec import _answers, _limits, _network
from opendsec._errors import BadResponse, ConnectionFailed
from opendsec._retry import Repeat

from ._transport import Transport, origin

T = TypeVar("T")


class _Last(msgspec.Struct):
    """What tells a last line from the others."""

    done: dict[str, Any] | None = None
    failed: dict[str, Any] | None = None


_last = msgspec.json.Decoder(_Last)
_BEGINNINGS = (b'{"done":', b'{"failed":')


class Lines(Generic[T]):
    """The lines of one answer. Iterate, and close it (``with``) when you stop early.

    Attributes:
        done: The counts of the last line, once it has come.
    """

    def __init__(self, response: httpx2.Response, kind: type[T]) -> None:
        self._response = response
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        self._chunks = response.iter_bytes()
        self.done: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The work that the lines tell of goes on."""
        self._response.close()

    def __iter__(self) -> Iterator[T]:
        """Each line up to the last.

        Raises:
            ConnectionFailed: the answer was cut off.
            BadResponse: a line cannot be read.
            OpendsecError: the server could not go on.
        """
        try:
            for line in self._lines():
                if line.startswith(_BEGINNINGS):
                    self._end(line)
                    return
                yield self._decode(line)
        finally:
            self.close()
        raise ConnectionFailed(
            f"The answer of {origin(self._response.request)} ended before its last line."
        )

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        try:
            for chunk in self._chunks:
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    if line not in (b"", b"{}"):
                        yield line
                if len(rest) > _limits.FRAME_BYTES_MAX:
                    raise BadResponse("A line of the answer is absurdly long.")
        except httpx2.HTTPError as exc:
            raise _network.connection_failed(exc, origin(self._response.request)) from exc

    def _end(self, line: bytes) -> None:
        try:
            last = _last.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadResponse(f"The last line of the answer cannot be read: {exc}") from exc
        if last.failed is not None:
            raise _answers.from_native(last.failed)
        self.done = last.done or {}
        # The end of the HTTP body too: only then can the connection be used again. If it does not
        # come: the last line has said all there is to say.
        with contextlib.suppress(httpx2.HTTPError):
            next(self._chunks, None)

    def _decode(self, line: bytes) -> T:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadResponse(f"A line of the answer cannot be read: {exc}") from exc


def open_lines(
    transport: Transport,
    method: str,
    path: str,
    kind: type[T],
    *,
    params: Mapping[str, str | int | list[str]] | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    repeat: Repeat = Repeat.IDEMPOTENT,
) -> Lines[T]:
    """Call the native API; returns when the head of the answer is there.

    Args:
        transport: The connections.
        method: Of HTTP.
        path: Of the API.
        kind: Of each line but the last.
        params: Of the query.
        body: What JSON can hold.
        headers: Beside the usual ones.
        repeat: Whether the request may be sent again when its head did not come.

    Raises:
        Unauthenticated: no key is configured, or the server does not know it.
        OpendsecError: as the server says; ConnectionFailed without an answer.
    """
    all_headers = {**transport.settings.key_headers(), **(headers or {})}
    content = None
    if body is not None:
        content = msgspec.json.encode(body)
        all_headers["Content-Type"] = "application/json"

    def make() -> httpx2.Request:
        return transport.http.build_request(
            method,
            transport.settings.base_url + path,
            params=params,
            content=content,
            headers=all_headers,
            timeout=_network.timeout(_limits.STREAM_SILENCE_MAX_S),
        )

    return Lines(transport.open(make, repeat=repeat), kind)
