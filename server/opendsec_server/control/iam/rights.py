# SPDX-License-Identifier: AGPL-3.0-only
"""Rights and roles, as data.

A right is ``area:act``, such as ``sandboxes:read``. What is granted may hold ``*`` for either part;
``*`` alone is everything. Acts are ``read`` and ``write``, and a few that stand for themselves:

``sandboxes:connect``
    Be given the tokens with which commands are run and files read and written.
``projects:admin``
    Make, change and close projects below, and their quotas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opendsec_server.contract.errors import InvalidRequest

Right = str

EVERYTHING: frozenset[Right] = frozenset({"*"})
RIGHTS_MAX = 64
_RIGHT_RE = re.compile(r"\*|(?:\*|[a-z][a-z0-9-]{0,31}):(?:\*|[a-z][a-z0-9-]{0,31})")

_WORK = (
    "batches",
    "functions",
    "groups",
    "images",
    "sandboxes",
    "snapshots",
    "tasks",
    "templates",
    "trajectories",
    "volumes",
)
_SEEN = ("nodes:read", "principals:read", "projects:read", "server:read", "tokens:read")

ROLES: dict[str, frozenset[Right]] = {
    "owner": EVERYTHING,
    "admin": frozenset(
        {
            *(f"{area}:*" for area in _WORK),
            *_SEEN,
            "audit:read",
            "keys:*",
            "principals:*",
            "projects:admin",
            "tokens:*",
        }
    ),
    "developer": frozenset({*(f"{area}:*" for area in _WORK), *_SEEN, "tokens:*"}),
    "viewer": frozenset({*(f"{area}:read" for area in _WORK), *_SEEN}),
    "agent": frozenset(
        {
            *(f"{area}:*" for area in ("functions", "groups", "sandboxes", "snapshots")),
            *(f"{area}:*" for area in ("batches", "tasks", "trajectories")),
            "images:read",
            "projects:read",
            "server:read",
            "templates:read",
            "tokens:write",
        }
    ),
}
"""What each role may do. A role of a project holds in every project below it too."""

SANDBOX_RIGHTS: frozenset[Right] = frozenset(
    {"sandboxes:read", "sandboxes:write", "sandboxes:connect", "trajectories:*"}
)
"""All that a token for one sandbox can hold: nothing that makes another."""


def check_rights(field: str, rights: Iterable[str]) -> frozenset[Right]:
    """Rights as they came from a caller.

    Raises:
        InvalidRequest: one is not spelled like a right, there are none, or too many.
    """
    found = frozenset(rights)
    if not found or len(found) > RIGHTS_MAX:
        raise InvalidRequest(f"{field}: between 1 and {RIGHTS_MAX} rights are needed")
    for right in sorted(found):
        if _RIGHT_RE.fullmatch(right) is None:
            raise InvalidRequest(
                f"{field}: `{right[:80]}` is not a right; one looks like `sandboxes:read`"
            )
    return found


def covers(held: Iterable[Right], wanted: Right) -> bool:
    """Whether what is held includes a right, which may itself have ``*``."""
    area, act = _parts(wanted)
    return any(
        held_area in ("*", area) and held_act in ("*", act)
        for held_area, held_act in map(_parts, held)
    )


def missing(held: Iterable[Right], wanted: Iterable[Right]) -> list[Right]:
    """Those of the wanted rights that are not held, in order."""
    have = tuple(held)
    return sorted(right for right in wanted if not covers(have, right))


def both(first: Iterable[Right], second: Iterable[Right]) -> frozenset[Right]:
    """What two sets of rights have in common."""
    others = [_parts(right) for right in second]
    found: set[Right] = set()
    for area, act in map(_parts, first):
        for other_area, other_act in others:
            common = _meet(area, other_area), _meet(act, other_act)
            if None not in common:
                found.add("*" if common == ("*", "*") else f"{common[0]}:{common[1]}")
    return frozenset(found)


def _parts(right: Right) -> tuple[str, str]:
    if right == "*":
        return "*", "*"
    area, _, act = right.partition(":")
    return area, act


def _meet(first: str, second: str) -> str | None:
    if first == "*":
        return second
    return first if second in ("*", first) else None
