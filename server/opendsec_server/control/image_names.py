# SPDX-License-Identifier: AGPL-3.0-only
"""Names that projects give to images.

A node has one table of names for all projects; what a project names is kept there under its own
prefix, which no reference can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.ids import random_chars

_PREFIX = "packed:"
_NAME_RE = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")
_TAG_DEFAULT = "latest"
_NAMELESS = "."
"""Begins what no caller can call an image; it only says whose it is."""


def own_name(project_id: str, name: str) -> str:
    """What a node calls the image that a project calls ``name`` or ``name:tag``.

    Raises:
        InvalidRequest: not a name.
    """
    if len(name) > limits.NAME_CHARS_MAX or _NAME_RE.fullmatch(name) is None:
        raise InvalidRequest(
            f"name: `{name[:64]}` is not a name for an image",
            remediation="Use lower-case letters and digits with `.`, `-`, `_` between them, and "
            "`:tag` after it if you like.",
        )
    whole = name if ":" in name else f"{name}:{_TAG_DEFAULT}"
    return f"{_PREFIX}{project_id}/{whole}"


def nameless(project_id: str) -> str:
    """What a node calls an image that a project gave no name, so that it is known whose it is."""
    return f"{_PREFIX}{project_id}/{_NAMELESS}{random_chars(20)}"


def is_own_name(text: str) -> bool:
    """Whether a reference looks like a name of a project on the node."""
    return text.startswith(_PREFIX)


def shown_names(project_id: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names as a project's callers know them; those of other projects are left out."""
    own = f"{_PREFIX}{project_id}/"
    shown = (
        name.removeprefix(own) for name in names if name.startswith(own) or not is_own_name(name)
    )
    return tuple(name for name in shown if not name.startswith(_NAMELESS))


def may_use(project_id: str, names: Iterable[str], *, closed: bool = False) -> bool:
    """Whether an image of these names is everybody's, or among others the project's.

    Args:
        project_id: Whose names count.
        names: All that mean it.
        closed: What came from a registry came with another project's password.
    """
    own = f"{_PREFIX}{project_id}/"
    return any(name.startswith(own) or not (closed or is_own_name(name)) for name in names)


def is_owner(project_id: str, names: Sequence[str]) -> bool:
    """Whether an image of these names is the project's alone."""
    own = f"{_PREFIX}{project_id}/"
    return bool(names) and all(name.startswith(own) for name in names)
