# SPDX-License-Identifier: AGPL-3.0-only
"""Between rows and structs.

Maps and lists of strings are kept as text that can be searched with plain SQL anywhere.

``{"a": "b", "c": "d"}`` becomes ``,"a":"b","c":"d",``. An entry is contained exactly if
``,"a":"b",`` is a substring: inside a JSON string a quote is always written ``\\"``, so
the sequence comma + quote can only stand between entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

T = TypeVar("T")

_encode = msgspec.json.encode
_decode_map = msgspec.json.Decoder(dict[str, str]).decode
_decode_list = msgspec.json.Decoder(list[str]).decode


def pack_map(values: Mapping[str, str]) -> str:
    """``values`` as searchable text."""
    return f",{_encode(dict(values)).decode()[1:-1]}," if values else ","


def unpack_map(text: str) -> dict[str, str]:
    """The map that ``pack_map`` made this text of."""
    return _decode_map("{" + text[1:-1] + "}")


def pack_list(values: Sequence[str]) -> str:
    """``values`` as searchable text."""
    return f",{_encode(list(values)).decode()[1:-1]}," if values else ","


def unpack_list(text: str) -> list[str]:
    """The list that ``pack_list`` made this text of."""
    return _decode_list("[" + text[1:-1] + "]")


def map_entry(key: str, value: str) -> str:
    """What a packed map with this entry contains."""
    return f",{_encode(key).decode()}:{_encode(value).decode()},"


def list_entry(value: str) -> str:
    """What a packed list with this entry contains."""
    return f",{_encode(value).decode()},"


def plain(row: sa.RowMapping) -> dict[str, Any]:
    """A row by column name. SQLAlchemy's names are a subclass of ``str`` that msgspec refuses."""
    return {str(name): value for name, value in row.items()}


def struct_of(row: sa.RowMapping, kind: type[T]) -> T:
    """A row as a struct with the same names."""
    return msgspec.convert(plain(row), kind)
