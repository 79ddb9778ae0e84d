# SPDX-License-Identifier: AGPL-3.0-only
"""Identifiers.

A sandbox id is ``i`` + 19 characters of ``[a-z0-9]``: DNS-safe, 4 of them the owning node's
short id, so that any gateway routes without a look-up.
"""

from __future__ import annotations

import os
import re
import threading

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
NODE_ID_CHARS = 4
SANDBOX_ID_RE = re.compile(r"^i[a-z0-9]{19}$")
NODE_ID_RE = re.compile(r"[a-z0-9]{4}")


_CHARS = bytes(ord(ALPHABET[byte % len(ALPHABET)]) for byte in range(256))
_UNEVEN = bytes(range(256 - 256 % len(ALPHABET), 256))
"""Left out: they would make the first characters more frequent."""


_RANDOM_BYTES = 4_096
"""Drawn at one time: ids are made by the thousand, and a call to the kernel is dear."""
_ready = bytearray()
_taking = threading.Lock()
os.register_at_fork(after_in_child=_ready.clear)


def random_chars(count: int) -> str:
    """``count`` characters of the id alphabet from the system's CSPRNG."""
    with _taking:
        while len(_ready) < count:
            _ready.extend(os.urandom(_RANDOM_BYTES).translate(_CHARS, _UNEVEN))
        chars = _ready[-count:].decode()
        del _ready[-count:]
    return chars


def new_node_id() -> str:
    """A short node id, made once at a node's first start."""
    return random_chars(NODE_ID_CHARS)


def is_node_id(text: str) -> bool:
    """Whether ``text`` has the shape of a node id."""
    return NODE_ID_RE.fullmatch(text) is not None


def new_sandbox_id(node_id: str) -> str:
    """A fresh sandbox id that names its owning node."""
    return f"i{node_id}{random_chars(19 - NODE_ID_CHARS)}"


SNAPSHOT_ID_CHARS = 20
SNAPSHOT_ID_RE = re.compile(r"^s[a-z0-9]{19}$")


def new_snapshot_id() -> str:
    """A fresh snapshot id: as long as a template's, and never a sandbox's."""
    return f"s{random_chars(SNAPSHOT_ID_CHARS - 1)}"


BATCH_ID_RE = re.compile(r"^b[a-z0-9]{19}$")


def new_batch_id() -> str:
    """A fresh id of a batch of creates."""
    return f"b{random_chars(19)}"


GROUP_ID_RE = re.compile(r"^g[a-z0-9]{19}$")


def new_group_id() -> str:
    """A fresh id of a group of sandboxes."""
    return f"g{random_chars(19)}"


def is_snapshot_id(text: str) -> bool:
    """Whether ``text`` has the shape of a snapshot id."""
    return SNAPSHOT_ID_RE.fullmatch(text) is not None


def is_sandbox_id(text: str) -> bool:
    """Whether ``text`` has the shape of a sandbox id."""
    return SANDBOX_ID_RE.fullmatch(text) is not None


def node_id_of(sandbox_id: str) -> str:
    """The short id of the node that a sandbox id names."""
    return sandbox_id[1 : 1 + NODE_ID_CHARS]
