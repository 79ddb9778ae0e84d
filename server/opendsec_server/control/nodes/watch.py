# SPDX-License-Identifier: AGPL-3.0-only
"""Polls every node for its health, its load and the images that it holds."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import structlog

from opendsec_server.contract.errors import OpendsecError

from .member import Member

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 2.0
POLL_ALONE_S = 5.0
"""Of a single node: there is nothing to choose."""
IMAGES_INTERVAL_S = 15.0


class HealthWatch:
    """One task for each node: one that hangs does not hold up the others.

    Args:
        members: The nodes.
        changed: Called when a node's health has changed.
        look_at_images: Whether to ask what images nodes hold: of no use to a single one.
        interval_s: Between polls of one node.
    """

    def __init__(
        self,
        members: list[Member],
        changed: Callable[[Member], None],
        *,
        look_at_images: bool,
        interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._members = members
        self._changed = changed
        self._look_at_images = look_at_images
        self._interval_s = interval_s
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Poll every node once, then go on in the background. A node that does not answer is no
        failure: the others serve."""
        await asyncio.gather(*(self._poll(member) for member in self._members))
        self._tasks = [
            asyncio.create_task(self._keep(member), name=f"poll-{member.name}")
            for member in self._members
        ]

    async def stop(self) -> None:
        """Poll no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _keep(self, member: Member) -> None:
        loop = asyncio.get_running_loop()
        images_at = float("-inf")
        while True:
            if self._look_at_images and member.up and loop.time() - images_at > IMAGES_INTERVAL_S:
                await self._images(member)
                images_at = loop.time()
            # Not all at the same instant.
            pause_s = self._interval_s * random.uniform(0.8, 1.2)  # noqa: S311
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await member.wake.wait()
            member.wake.clear()
            await self._poll(member)

    async def _poll(self, member: Member) -> None:
        if await member.poll():
            health = member.standing.health
            tell = log.info if member.up else log.warning
            tell(
                "node's health",
                node=member.name,
                node_id=member.node_id,
                health=health,
                why=member.trouble,
            )
            self._changed(member)

    async def _images(self, member: Member) -> None:
        try:
            images = await member.client.images.all()
        except OpendsecError as exc:
            log.warning("a node's images are not known", node=member.name, why=exc.message)
        except Exception:
            # It must not end the polling.
            log.exception("a node's images are not known", node=member.name)
        else:
            member.standing.images = frozenset(image.digest for image in images)
