# SPDX-License-Identifier: AGPL-3.0-only
"""What the OpenAPI document says of an operation, kept beside its handler."""

from __future__ import annotations

from typing import Any

import msgspec

from opendsec_server.contract.errors import (
    Internal,
    InvalidRequest,
    OpendsecError,
    PayloadTooLarge,
    RegistryDenied,
    RegistryLimited,
    RegistryUnavailable,
    StoreUnavailable,
    Unauthenticated,
)
from opendsec_server.contract.limits import LIST_LIMIT_MAX

OPERATION_KEY = "operation"
ANY_RIGHT = ""
"""Of an operation that every key and token may ask."""
EVERYWHERE: tuple[type[OpendsecError], ...] = (Unauthenticated, StoreUnavailable, Internal)
BODY: tuple[type[OpendsecError], ...] = (InvalidRequest, PayloadTooLarge)
"""Of every operation that takes a body."""
REGISTRY: tuple[type[OpendsecError], ...] = (RegistryDenied, RegistryLimited, RegistryUnavailable)
"""What registries answer."""


class Parameter(msgspec.Struct, kw_only=True, frozen=True):
    """A query parameter or request header."""

    name: str
    description: str
    schema: dict[str, Any]
    place: str = "query"
    example: Any = None


def paged(things: str) -> tuple[Parameter, ...]:
    """The parameters of a list that comes in pages."""
    limit = {
        "type": "integer",
        "minimum": 1,
        "maximum": LIST_LIMIT_MAX,
        "default": LIST_LIMIT_MAX,
    }
    return (
        Parameter(name="limit", description=f"{things} per page.", schema=limit),
        Parameter(
            name="cursor",
            description="`next_cursor` of the page before.",
            schema={"type": "string"},
        ),
    )


class Operation(msgspec.Struct, kw_only=True, frozen=True):
    """One operation of the native API."""

    summary: str
    description: str = ""
    tag: str
    right: str | None = None
    """What a caller needs. None: ``<tag>:read`` for GET, else ``<tag>:write``."""
    also: str | None = None
    """A second right that a caller needs. None: what ``api.rights`` adds to the first."""
    request: type[msgspec.Struct] | None = None
    request_required: bool = True
    response: type[msgspec.Struct] | None = None
    response_description: str = "Done."
    response_headers: dict[str, str] = {}
    status: int | None = 200
    """Of success. None: it does not succeed yet."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[type[OpendsecError], ...] = ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Operation:
        """Itself: the framework copies every handler, and this never changes."""
        return self


def documented(operation: Operation) -> dict[str, Any]:
    """The handler's ``opt`` that carries its documentation."""
    return {OPERATION_KEY: operation}
