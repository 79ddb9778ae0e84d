# SPDX-License-Identifier: AGPL-3.0-only
"""Brings the ends that nodes keep of a task's sandboxes in line with the task's deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from opendsec_server.contract.errors import (
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    StoreUnavailable,
)
from opendsec_server.contract.node import NodeClient
from opendsec_server.control.task_deadlines import SLACK_S, TaskDeadlines
from opendsec_server.store import tasks as rows
from opendsec_server.store.sandboxes import set_ends
from opendsec_server.store.store import Store
from opendsec_server.store.tasks import MemberEnd

log = structlog.get_logger(__name__)

TOLERANCE_S = 0.01
AT_ONCE = 32
TOGETHER_MAX = 500
"""Ends that are noted in one transaction."""


class Ends:
    """Tells nodes other ends.

    Args:
        store: Where records are.
        node: Keeps the ends.
        deadlines: Which ends may be told.
    """

    def __init__(self, store: Store, node: NodeClient, deadlines: TaskDeadlines) -> None:
        self._store = store
        self._node = node
        self._deadlines = deadlines

    async def shorten(self, project_id: str, task_id: str, deadline_at: float | None) -> None:
        """See to it that no sandbox of a task runs on for long after its deadline, whoever is there
        then. Nodes that cannot be asked now are asked the next time.

        Args:
            project_id: Whose task it is.
            task_id: Which.
            deadline_at: As its record says. This process may know another: a later one counts, so
                that what is not up to date never undoes a longer time.

        Raises:
            StoreUnavailable: not now.
        """
        known = self._deadlines.last_end(project_id, task_id)
        if known is None or deadline_at is None:
            return
        last = max(known, deadline_at + SLACK_S)
        late = await rows.ends_within(
            self._store, project_id, task_id, after=last + TOLERANCE_S, before=None
        )
        await self._tell([(member, last) for member in late], shorten=True)

    async def lengthen(self, project_id: str, task_id: str, before: float) -> None:
        """Give sandboxes back the life that a deadline cut which is no more: their whole
        ``timeout_s``, from now.

        Args:
            project_id: Whose task it is.
            task_id: Which.
            before: The end that they were told because of that deadline.

        Raises:
            StoreUnavailable: not now.
        """
        cut = await rows.ends_within(
            self._store,
            project_id,
            task_id,
            after=before - TOLERANCE_S,
            before=before + TOLERANCE_S,
        )
        now = time.time()
        longer = [
            (member, self._deadlines.cap(project_id, task_id, now + member.timeout_s))
            for member in cut
        ]
        await self._tell([one for one in longer if one[1] > before], shorten=False)

    async def _tell(self, wanted: Sequence[tuple[MemberEnd, float]], *, shorten: bool) -> None:
        away: set[str] = set()
        room = asyncio.Semaphore(AT_ONCE)

        async def one(member: MemberEnd, end_at: float) -> tuple[str, float] | None:
            async with room:
                # One that is away is not waited for again and again: it has thousands.
                if member.node_id in away:
                    return None
                try:
                    return member.sandbox_id, await self._set(member.sandbox_id, end_at, shorten)
                except SandboxNotFound:
                    return None
                except NodeUnavailable:
                    away.add(member.node_id)
                except StoreUnavailable:
                    raise
                except OpendsecError as exc:
                    log.warning("end not set", sandbox_id=member.sandbox_id, why=exc.message)
                return None

        for start in range(0, len(wanted), TOGETHER_MAX):
            told = await asyncio.gather(
                *(one(member, end_at) for member, end_at in wanted[start : start + TOGETHER_MAX])
            )
            await set_ends(self._store, [ended for ended in told if ended is not None])
        if away:
            log.warning("nodes were not told other ends", node_ids=sorted(away))

    async def _set(self, sandbox_id: str, end_at: float, shorten: bool) -> float:
        """Returns the end that the node keeps from now on."""
        if shorten:
            # The record may be behind: its caller may have set an earlier one meanwhile.
            status = await self._node.get(sandbox_id)
            if status.end_at <= end_at:
                return status.end_at
        status = await self._node.set_end_at(sandbox_id, end_at, only_extend=not shorten)
        return status.end_at
