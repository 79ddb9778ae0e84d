# SPDX-License-Identifier: Apache-2.0
"""Values of function calls as JSON, and back. Pure.

What JSON lacks is an object with the key ``~``: bytes, tuples, sets, large integers, floats that
are no numbers, and dicts whose keys are not plain text.
"""

from __future__ import annotations

import base64
import math
import pickle
from typing import Any

from ._errors import FunctionResultInvalid, InvalidRequest

EXACT_MAX = 1 << 53
"""Integers up to here are exact in every JSON reader."""
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """A value as plain JSON types.

    Raises:
        InvalidRequest: it is no plain data.
    """
    try:
        return _encode(value)
    except RecursionError:
        raise InvalidRequest("The value is nested too deeply, or holds itself.") from None


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -EXACT_MAX <= value <= EXACT_MAX else {"~": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"~": "float", "v": repr(value)}
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"~": "str", "v": _b64(value.encode("utf-8", "surrogatepass"))}
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict:
        if all(type(key) is str and key != "~" and key.isprintable() for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"~": "dict", "v": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {"~": kind.__name__, "v": [_encode(item) for item in value]}
    if kind in (bytes, bytearray):
        return {"~": kind.__name__, "v": _b64(bytes(value))}
    if kind is complex:
        return {"~": "complex", "v": [repr(value.real), repr(value.imag)]}
    raise InvalidRequest(
        f"A {kind.__module__}.{kind.__qualname__} is no plain data.",
        remediation="Send plain data (numbers, text, bytes, lists, dicts), or pack='pickle'.",
    )


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(value: Any, *, unpickle: bool = False) -> Any:
    """The value that a worker has encoded.

    Args:
        value: As JSON. A worker's own code may have sent anything.
        unpickle: Whether pickles are opened: that runs what the worker has put in.

    Raises:
        FunctionResultInvalid: it is none.
    """
    try:
        return _decode(value, unpickle)
    except FunctionResultInvalid:
        raise
    except Exception as exc:
        raise FunctionResultInvalid(f"The call's value cannot be read: {exc!r:.300}") from exc


def _decode(value: Any, unpickle: bool) -> Any:
    if isinstance(value, list):
        return [_decode(item, unpickle) for item in value]
    if not isinstance(value, dict):
        return value
    if "~" not in value:
        return {key: _decode(item, unpickle) for key, item in value.items()}
    kind, inner = value["~"], value["v"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, unpickle) for item in inner)
    match kind:
        case "int":
            return int(inner, 16)
        case "float":
            return float(inner)
        case "str":
            return base64.b64decode(inner).decode("utf-8", "surrogatepass")
        case "dict":
            return {_decode(key, unpickle): _decode(item, unpickle) for key, item in inner}
        case "bytes":
            return base64.b64decode(inner)
        case "bytearray":
            return bytearray(base64.b64decode(inner))
        case "complex":
            return complex(float(inner[0]), float(inner[1]))
        case "pickle" if unpickle:
            return pickle.loads(base64.b64decode(inner))  # noqa: S301 - asked for
        case "pickle":
            raise FunctionResultInvalid("The call's value is a pickle, which was not asked for.")
    raise FunctionResultInvalid(f"The call's value has an unknown mark {str(kind)[:40]!r}.")
