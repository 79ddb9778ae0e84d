# SPDX-License-Identifier: AGPL-3.0-only
"""What a gateway knows of one node."""

from __future__ import annotations

import asyncio

import pytest

from opendsec_server.contract.node import NodeInfo
from opendsec_server.control.nodes import Fleet, NodeSource

from .fake_node import FakeNode


async def test_a_report_from_before_does_not_undo_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    fleet = Fleet([NodeSource(name="one", client=node)])
    (member,) = fleet.members
    await member.poll()
    await fleet.mark(member, labels={"zone": "a"}, draining=True)
    asked, answer = asyncio.Event(), asyncio.Event()
    true = node.info

    async def info() -> NodeInfo:
        found = await true()
        if not asked.is_set():
            asked.set()
            await answer.wait()
        return found

    monkeypatch.setattr(node, "info", info)
    polling = asyncio.create_task(member.poll())
    await asked.wait()
    await fleet.mark(member, labels={"zone": "b"}, draining=False)
    answer.set()
    await polling
    assert (member.standing.draining, member.standing.labels) == (False, {"zone": "b"})
    assert member.info is not None
    assert (member.info.draining, member.info.labels) == (False, {"zone": "b"})
    # What another gateway marks is seen by the next report.
    await node.set_marks(draining=True)
    await member.poll()
    assert member.standing.draining
