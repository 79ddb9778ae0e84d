# SPDX-License-Identifier: AGPL-3.0-only
"""Outcomes on their way: held back by who does not read, given up when nobody can."""

from __future__ import annotations

from opendsec_server.control.functions.model import UNREAD_BYTES_MAX, Outcome
from opendsec_server.control.functions.outcomes import Outcomes


def _outcomes(count: int, seen: list[str]) -> Outcomes:
    return Outcomes(
        count,
        hold=lambda: seen.append("hold"),
        let_go=lambda: seen.append("let go"),
        give_up=lambda: seen.append("give up"),
    )


async def test_who_does_not_read_is_held_back() -> None:
    seen: list[str] = []
    outcomes = _outcomes(3, seen)
    put = outcomes.putter()
    large = Outcome(stdout="x" * (UNREAD_BYTES_MAX // 2 + 1))
    put(1, large)
    assert seen == []
    put(0, large)
    assert seen == ["hold"]
    assert (await anext(outcomes))[0] == 1
    assert seen == ["hold", "let go"]
    put(2, Outcome(stdout="y"))
    assert [index async for index, _ in outcomes] == [0, 2]


async def test_what_nobody_reads_is_given_up_once() -> None:
    seen: list[str] = []
    outcomes = _outcomes(2, seen)
    put = outcomes.putter()
    put(0, Outcome())
    await outcomes.aclose()
    await outcomes.aclose()
    assert seen == ["give up"]
    assert [one async for one in outcomes] == []
    del outcomes
    assert seen == ["give up"]
    dropped = _outcomes(2, seen)
    put = dropped.putter()
    del dropped
    assert seen == ["give up"] * 2
    put(0, Outcome())
