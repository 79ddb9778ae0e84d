# SPDX-License-Identifier: AGPL-3.0-only
"""The nodes as operators see them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from opendsec_server.contract.errors import Conflict, Forbidden, NotFound
from opendsec_server.contract.ids import is_node_id
from opendsec_server.control.iam import Caller, Iam

from .fleet import Fleet
from .member import Member

log = structlog.get_logger(__name__)

GiveUp = Callable[[str], Awaitable[int]]
"""Notes that all of a node's sandboxes are lost; how many they were."""


class Nodes:
    """Lists and marks nodes, for the installation's own project."""

    def __init__(self, fleet: Fleet, iam: Iam, give_up: GiveUp) -> None:
        self._fleet = fleet
        self._iam = iam
        self._give_up = give_up

    async def list(self, caller: Caller) -> list[Member]:
        """All nodes, those that cannot be reached too.

        Raises:
            Forbidden: the caller does not act for the installation.
        """
        await self._check(caller)
        return sorted(self._fleet.members, key=lambda member: member.node_id or f"~{member.name}")

    async def get(self, caller: Caller, node: str) -> Member:
        """One node, by id or name.

        Raises:
            Forbidden: the caller does not act for the installation.
            NotFound: there is none.
        """
        await self._check(caller)
        found = self._fleet.find(node)
        if found is not None:
            return found
        for member in self._fleet.members:
            if node in (member.node_id, member.name):
                return member
        raise NotFound(
            f"there is no node `{node[:64]}`", remediation="List nodes (`opendsec node ls`)."
        )

    async def mark(
        self, caller: Caller, node: str, *, labels: dict[str, str] | None, draining: bool | None
    ) -> Member:
        """Replace what is given. The node keeps it, so that every gateway sees the same.

        Raises:
            Forbidden, NotFound: as ``get``.
            InvalidRequest: too many labels, or one is too long.
            NodeUnavailable: the node was not told.
        """
        member = await self.get(caller, node)
        await self._fleet.mark(member, labels=labels, draining=draining)
        log.info("node marked", node_id=member.node_id, labels=labels, draining=draining)
        return member

    async def forget(self, caller: Caller, node: str) -> int:
        """Note that all of a node's sandboxes are lost, paused ones too: the machine does not come
        back. If it does, it ends them. A node that was not reached since the start, or is listed no
        more, is named by its id.

        Returns:
            How many they were.

        Raises:
            Forbidden, NotFound: as ``get``.
            Conflict: the node is there, or what is named is its second entry.
        """
        try:
            member = await self.get(caller, node)
        except NotFound:
            lost = await self._give_up(node) if is_node_id(node) else 0
            if not lost:
                raise
            return lost
        if member.node_id is not None and self._fleet.find(member.node_id) is not member:
            raise Conflict(
                f"node `{node[:64]}` is listed twice",
                remediation="Name it by its id, or remove one of the entries.",
                details={"node_id": member.node_id},
            )
        if not member.down:
            raise Conflict(
                f"node `{node[:64]}` is not gone",
                remediation="Drain it, and end its sandboxes.",
                details={"health": member.standing.health},
            )
        if member.node_id is None:
            return 0
        return await self._give_up(member.node_id)

    async def _check(self, caller: Caller) -> None:
        if not await self._iam.operates(caller):
            raise Forbidden(
                "nodes belong to the installation",
                remediation="Use a key of the installation's first project.",
            )
