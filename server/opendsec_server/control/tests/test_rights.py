# SPDX-License-Identifier: AGPL-3.0-only
"""Rights as sets: what two have in common is what both cover, and no role exceeds the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.control.iam.rights import (
    ROLES,
    SANDBOX_RIGHTS,
    both,
    check_rights,
    covers,
    missing,
)

AREAS, ACTS = ("sandboxes", "tasks", "images"), ("read", "write", "connect")
HELD = st.one_of(
    st.just("*"),
    st.builds("{}:{}".format, st.sampled_from((*AREAS, "*")), st.sampled_from((*ACTS, "*"))),
)
PLAIN = [f"{area}:{act}" for area in AREAS for act in ACTS]


@given(st.frozensets(HELD, max_size=4), st.frozensets(HELD, max_size=4))
def test_in_common_is_what_both_cover(first: frozenset[str], second: frozenset[str]) -> None:
    common = both(first, second)
    for right in PLAIN:
        assert covers(common, right) == (covers(first, right) and covers(second, right))
    assert missing(first, common) == []
    assert missing(second, common) == []


@given(st.frozensets(HELD, max_size=4), HELD)
def test_a_pattern_is_covered_only_with_all_that_it_means(
    held: frozenset[str], wanted: str
) -> None:
    if covers(held, wanted):
        assert all(covers(held, right) for right in PLAIN if covers([wanted], right))


def test_roles_are_ordered() -> None:
    for less, more in (
        ("viewer", "developer"),
        ("agent", "developer"),
        ("developer", "admin"),
        ("admin", "owner"),
    ):
        assert missing(ROLES[more], ROLES[less]) == []
        assert missing(ROLES[less], ROLES[more]) != []
    assert not covers(ROLES["viewer"], "sandboxes:connect")
    assert not covers(ROLES["viewer"], "audit:read")
    for right in ("projects:admin", "keys:write", "principals:write", "audit:read", "nodes:write"):
        assert not covers(ROLES["developer"], right)
    assert not covers(ROLES["admin"], "nodes:write")
    assert missing(ROLES["agent"], SANDBOX_RIGHTS) == []


@pytest.mark.parametrize(
    "bad",
    ["", "x", ":", "a:", ":b", "A:b", "a:b:c", "a b:c", "**", "*:**", "a:" + "b" * 99, "a:b\n"],
)
def test_what_is_no_right(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        check_rights("rights", [bad])
