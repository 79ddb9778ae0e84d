# SPDX-License-Identifier: AGPL-3.0-only
"""Between HTTP and typed values: bodies, queries, path segments, answers."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from litestar import Request as LitestarRequest
from litestar import Response

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.control.iam import Caller
from opendsec_server.control.services import Services

T = TypeVar("T")
Request = LitestarRequest[Any, Any, Any]
CALLER_KEY = "opendsec.caller"
GUARDED_KEY = "opendsec.guarded"
"""Set in the scope of a request to a path that needs a key."""
REFUSED_KEY = "opendsec.refused"
"""Set in the scope of a request whose key is good, but not for what it asks: the error."""
ERROR_CODE_KEY = "opendsec.error_code"
AUDIT_OBJECT_KEY = "opendsec.audit_object"
AUDIT_TEXT_CHARS_MAX = 300
AUDIT_NAMES_MAX = 100
"""So many of the objects of one call stand in its entry."""
AUDIT_NAME_CHARS_MAX = 80
SHOWN_CHARS_MAX = 64
CURSOR_CHARS_MAX = 200

_encode = msgspec.json.Encoder().encode
_UNKNOWN_FIELD_RE = re.compile(r"Object contains unknown field `(?P<name>.*)`")


def services_of(request: Request) -> Services:
    """The services that this application was built on."""
    services: Services = request.app.state.services
    return services


def caller_of(request: Request) -> Caller:
    """Who makes this request; set by the guard."""
    caller: Caller = request.scope[CALLER_KEY]  # type: ignore[literal-required]
    return caller


def about(request: Request, *names: str) -> None:
    """What a call was about, for the audit log: what it made, where its path does not say."""
    text = " ".join(names)[:AUDIT_TEXT_CHARS_MAX]
    request.scope[AUDIT_OBJECT_KEY] = text  # type: ignore[literal-required]


def about_many(request: Request, what: str, names: Sequence[str], *first: str) -> None:
    """As ``about``, of many: how many, the first of them, and a digest of all, so that a list that
    is shown later can be checked. The digest is SHA-256 of the names, each with a newline."""
    digest = hashlib.sha256("".join(f"{name}\n" for name in names).encode()).hexdigest()
    shown = [name[:AUDIT_NAME_CHARS_MAX] for name in names[:AUDIT_NAMES_MAX]]
    text = " ".join([*first, f"{len(names)} {what} sha256:{digest}", *shown])
    request.scope[AUDIT_OBJECT_KEY] = text  # type: ignore[literal-required]


def answer(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response[bytes]:
    """A JSON answer."""
    return Response(
        _encode(value), status_code=status, headers=headers, media_type="application/json"
    )


def no_content() -> Response[None]:
    """An empty 204."""
    return Response(None, status_code=204)


async def read_json(
    request: Request, decoder: msgspec.json.Decoder[T], *, empty: bytes | None = None
) -> T:
    """Read and check a JSON body.

    Args:
        request: The body's size was limited while it came in.
        decoder: Of the expected type.
        empty: What an empty body stands for; None: it is not allowed.

    Raises:
        InvalidRequest: not JSON, or not of the expected type. The message names the field.
        PayloadTooLarge: raised by the framework, above ``API_BODY_BYTES_MAX``.
    """
    body = await request.body()
    if not body:
        if empty is None:
            raise InvalidRequest("a JSON body is required")
        body = empty
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(explain(str(exc), decoder.type)) from None
    except RecursionError:
        raise InvalidRequest("the JSON body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from None


def explain(text: str, kind: Any) -> str:
    """msgspec's message in our words: ``metadata.a: expected str, got int``."""
    text, _, place = text.partition(" - at ")
    place = place.strip("`").removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN_FIELD_RE.fullmatch(text)
    if unknown is not None:
        name = unknown["name"]
        text = f"there is no field `{name[:SHOWN_CHARS_MAX]}`"
        if not place:
            known = [field.encode_name for field in msgspec.structs.fields(kind)]
            close = difflib.get_close_matches(name, known, n=1)
            text += f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"
    return f"{place}: {text}" if place else text


def segment(value: str) -> str:
    """A path parameter as the caller meant it: routing is done on the encoded path."""
    return unquote(value, errors="replace")


class Query:
    """Query parameters, decoded once."""

    def __init__(self, request: Request) -> None:
        text = request.scope["query_string"].decode("latin-1")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, errors="replace", max_num_fields=1_000)
        except ValueError:
            raise InvalidRequest("too many query parameters") from None
        self._pairs = pairs

    def text(self, name: str) -> str | None:
        """The last value of a parameter; None if absent or empty."""
        return next((value for key, value in reversed(self._pairs) if key == name and value), None)

    def texts(self, name: str) -> list[str]:
        """Every value of a repeated parameter."""
        return [value for key, value in self._pairs if key == name and value]

    def csv(self, name: str) -> list[str]:
        """Comma-separated values, over all occurrences."""
        return [part for value in self.texts(name) for part in value.split(",") if part]

    def integer(
        self, name: str, default: int, *, at_least: int | None = None, at_most: int | None = None
    ) -> int:
        """A whole number within bounds.

        Raises:
            InvalidRequest: not one.
        """
        text = self.text(name)
        if text is None:
            return default
        if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
            raise InvalidRequest(f"{name}: `{text[:SHOWN_CHARS_MAX]}` is not a whole number")
        value = int(text)
        if at_least is not None and value < at_least:
            raise InvalidRequest(f"{name}: must be at least {at_least}")
        if at_most is not None and value > at_most:
            raise InvalidRequest(f"{name}: must be at most {at_most}")
        return value

    def seconds(self, name: str) -> float | None:
        """A time in Unix seconds.

        Raises:
            InvalidRequest: not a finite, non-negative number.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1e15:
            raise InvalidRequest(f"{name}: `{text[:SHOWN_CHARS_MAX]}` is not a time in seconds")
        return value

    def rfc3339(self, name: str) -> float | None:
        """A date and time, as Unix seconds.

        Raises:
            InvalidRequest: not one.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            # A `+` that was not encoded arrives as a space.
            moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise InvalidRequest(
                f"{name}: `{text[:SHOWN_CHARS_MAX]}` is not a date and time (RFC 3339)"
            ) from None


def rfc3339(at: float) -> str:
    """Unix seconds as RFC 3339 in UTC with microseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def make_cursor(created_at: float, sandbox_id: str, *, ascending: bool) -> str:
    """Where the next page of a list starts. Opaque to callers."""
    text = f"{created_at!r}_{sandbox_id}_{'asc' if ascending else 'desc'}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(text: str, *, ascending: bool) -> tuple[float, str]:
    """``created_at`` and id that a cursor stands for.

    Raises:
        InvalidRequest: not a cursor of ours, or of a list in the other order.
    """
    try:
        if len(text) > CURSOR_CHARS_MAX:
            raise ValueError
        padded = text + "=" * (-len(text) % 4)
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
        created_at, sandbox_id, order = decoded.split("_")
        value = float(created_at)
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, binascii.Error):
        raise InvalidRequest("the page token is not valid") from None
    if (order == "asc") != ascending:
        raise InvalidRequest("the page token belongs to a list in the other order")
    return value, sandbox_id
