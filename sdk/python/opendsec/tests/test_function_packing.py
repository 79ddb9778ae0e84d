# SPDX-License-Identifier: Apache-2.0
"""Functions as source: what is sent runs elsewhere as it does here."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import math as maths
from collections.abc import Callable
from json import dumps
from typing import Any

import pytest

from opendsec import Client, InvalidRequest
from opendsec._fn_pack import pack_arguments, pack_function
from opendsec._fn_values import decode

LIMIT = 3
TABLE = {"a": (1, 2), 5: {6}}
LOCK = object()


@dataclasses.dataclass
class Point:
    x: int
    y: int = LIMIT

    def total(self) -> int:
        return self.x + self.y


class Point3(Point):
    z: int = 1

    def total(self) -> int:
        return super().total() + self.z


def outer(value: int) -> int:
    return inner(value) + 1


def inner(value: int) -> int:
    return value * LIMIT


def recursive(value: int) -> int:
    return 1 if value < 2 else value * recursive(value - 1)


def defaults(value: int, table: dict[Any, Any] = TABLE, *, more: int = LIMIT) -> Any:
    return table["a"], value, more


def modules(value: float) -> Any:
    def nested() -> float:
        return maths.sqrt(value)

    return dumps([nested(), math.floor(value), *(json.loads("[1]") for _ in range(1))])


def classes(value: int) -> int:
    return Point3(value).total() + Point(value).total()


def annotated(value: NotThere) -> NotThere:  # type: ignore[name-defined]  # noqa: F821
    return value


def elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a worker makes it."""
    code = pack_function(function, "source")
    scope: dict[str, Any] = {"__name__": "__main__", **decode(code.get("values"))}
    exec(compile(code["source"], "<call>", "exec"), scope)
    made: Callable[..., Any] = scope[code["entry"]]
    return made


@pytest.mark.parametrize(
    "function", [outer, recursive, defaults, modules, classes, annotated, lambda x: [x, LIMIT]]
)
def test_what_a_function_uses_goes_with_it(function: Callable[..., Any]) -> None:
    assert elsewhere(function)(5) == function(5)


def test_closures_go_as_values() -> None:
    factor = 7

    def add(value: int) -> int:
        return value + 1

    def inside(value: int) -> int:
        return add(value) * factor

    assert elsewhere(inside)(2) == 21


def test_lambdas_are_told_from_each_other() -> None:
    double, triple = (lambda x: x * 2), (lambda x: x * 3)
    assert (elsewhere(double)(5), elsewhere(triple)(5)) == (10, 15)
    many = [
        lambda x: (
            x + 1  # with a comment
        )
    ]
    assert elsewhere(many[0])(1) == 2


def test_decorators_stay_here() -> None:
    client = Client(base_url="http://127.0.0.1:1", api_key="e2b_" + "0" * 40)

    @client.fn(timeout_s=5)
    def first(value: int) -> int:
        return value + 1

    @client.fn
    def second(value: int) -> int:
        return first.local(value) if False else value

    assert elsewhere(first.local)(1) == 2
    assert first.options.timeout_s == 5 and second.options.timeout_s == 60
    with pytest.raises(InvalidRequest, match="no_such_option"):
        client.fn(no_such_option=1)
    client.close()


def uses_lock() -> object:
    return LOCK


def uses_nothing_known() -> object:
    return not_defined_anywhere  # type: ignore[name-defined]  # noqa: F821


async def waits() -> None:
    return None


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (uses_lock, "LOCK"),
        (uses_nothing_known, "not_defined_anywhere"),
        (waits, "plain"),
        (functools.partial(outer, 1), "def"),
        ([].append, "def"),
        (len, "def"),
    ],
)
def test_what_cannot_be_sent_is_named(function: Callable[..., Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?i){named}"):
        pack_function(function, "source")


def test_arguments_are_plain_data() -> None:
    code = pack_function(outer, "source")
    item = pack_arguments(code, [1, b"x"], {"a": (1,)})
    assert decode(item["args"]) == [1, b"x"] and decode(item["kwargs"]) == {"a": (1,)}
    with pytest.raises(InvalidRequest):
        pack_arguments(code, [LOCK], {})
