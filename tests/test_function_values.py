# SPDX-License-Identifier: AGPL-3.0-only
"""Values of function calls: what the SDK writes the worker reads, and the other way round; and
what a worker may send that is none."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendsec import _fn_values as sdk
from opendsec._errors import FunctionResultInvalid, InvalidRequest
from opendsec_server.control.functions.guest import zygote

_hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
_values = st.recursive(
    _hashable | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_hashable, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.sets(_hashable, max_size=3)
    ),
    max_leaves=10,
)


def through_the_server(value: Any) -> Any:
    """As JSON of Python's kind, read and written by the server."""
    text = json.dumps(value).encode()
    return json.loads(msgspec.json.encode(msgspec.json.decode(text)))


@settings(max_examples=150, deadline=None)
@given(_values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert sdk.decode(through_the_server(zygote.encode(value))) == value
    assert zygote.decode(through_the_server(sdk.encode(value))) == value


def test_kinds_are_kept() -> None:
    value = [True, 1, 1.0, 1 << 70, (1,), {1}, frozenset(), bytearray(b"a"), "\ud800", {"~": 1}]
    for found in (
        sdk.decode(through_the_server(zygote.encode(value))),
        zygote.decode(through_the_server(sdk.encode(value))),
    ):
        assert found == value
        assert [type(item) for item in found] == [type(item) for item in value]
    assert math.isnan(sdk.decode(zygote.encode(math.nan)))


class Odd(int):
    """Looks like a number and is none of ours."""


def test_what_is_no_plain_data_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (object(), Odd(1), print, circle, {"a": [1, {2: object()}]}):
        with pytest.raises(InvalidRequest):
            sdk.encode(value)
        with pytest.raises((zygote.Unencodable, RecursionError)):
            zygote.encode(value)


@pytest.mark.parametrize(
    "value",
    [
        {"~": "no such kind", "v": 1},
        {"~": "int"},
        {"~": "int", "v": "zz"},
        {"~": "dict", "v": [[[], 1]]},
        {"~": "bytes", "v": 5},
        {"~": "set", "v": [[1]]},
        {"~": {}, "v": 1},
        {"~": "pickle", "v": "gASVAAAAAAAAAAAu"},
    ],
)
def test_what_a_worker_made_up_is_an_error(value: Any) -> None:
    with pytest.raises(FunctionResultInvalid):
        sdk.decode(value)


def test_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(FunctionResultInvalid):
        sdk.decode(value)
