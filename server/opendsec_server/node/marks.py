# SPDX-License-Identifier: AGPL-3.0-only
"""What operators say of a node: its labels, and whether it takes new sandboxes.

Kept by the node, so that every gateway sees the same, and none needs to remember it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import structlog

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest

log = structlog.get_logger(__name__)


class Marks(msgspec.Struct, kw_only=True, frozen=True):
    """What operators say of a node."""

    labels: dict[str, str] = {}
    draining: bool = False


_decoder = msgspec.json.Decoder(Marks)


class KeptMarks:
    """The marks in a file.

    Args:
        path: The file. Missing: nothing was said yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.now = self._load()

    def _load(self) -> Marks:
        try:
            return _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            return Marks()
        except (OSError, msgspec.DecodeError) as exc:
            # Sandboxes matter more: a node that cannot read this takes them as one without marks.
            log.error("the node's marks cannot be read", path=str(self._path), why=str(exc))
            return Marks()

    def set(self, *, labels: dict[str, str] | None, draining: bool | None) -> Marks:
        """Replace what is given, on the disk first.

        Raises:
            InvalidRequest: too many labels, or one is empty or too long.
            OSError: it cannot be written; nothing has changed.
        """
        if labels is not None:
            _check(labels)
        marks = Marks(
            labels=self.now.labels if labels is None else dict(labels),
            draining=self.now.draining if draining is None else draining,
        )
        temporary = self._path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(marks))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        self.now = marks
        return marks


def _check(labels: dict[str, str]) -> None:
    chars_max = limits.NODE_LABEL_CHARS_MAX
    if len(labels) > limits.NODE_LABELS_MAX:
        raise InvalidRequest(f"labels: at most {limits.NODE_LABELS_MAX}")
    for name, value in labels.items():
        if not 1 <= len(name) <= chars_max or len(value) > chars_max:
            raise InvalidRequest(
                f"labels: a name has 1 to {chars_max} characters, a value at most as many"
            )
