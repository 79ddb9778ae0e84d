# SPDX-License-Identifier: AGPL-3.0-only
"""Names that projects give to images.

A node has one table of names for all projects; what a project names is kept there under its own
prefix, which no reference can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest

_PREFIX = "packed:"
_NAME_RE = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?")
_TAG_DEFAULT = "latest"


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


def is_own_name(text: str) -> bool:
    """Whether a reference looks like a name of a project on the node."""
    return text.startswith(_PREFIX)


def shown_names(project_id: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names as a project's callers know them; those of other projects are left out."""
    own = f"{_PREFIX}{project_id}/"
    return tuple(
        name.removeprefix(own) for name in names if name.startswith(own) or not is_own_name(name)
    )
