# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on images that came with a project's password, and who else may have them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from opendsec_server.contract.ids import random_chars
from opendsec_server.contract.images import ImageInfo

from .store import Store
from .tables import IMAGE_ACCESS

EVERYONE = "*"


PULLING_KEPT_S = 3_600.0
"""What a pull that was not seen to its end has left is removed when its project pulls again after
this time."""
_PULLING = "pull:"


class Access(msgspec.Struct, frozen=True):
    """Who may have images, at one instant."""

    projects: Mapping[str, frozenset[str]]
    """By digest: who has shown that it may have the image."""
    pulling: frozenset[str]
    """Full names of images that are being pulled with a password: whose they will be is not
    known yet."""

    def known(self, digest: str) -> frozenset[str]:
        """Who has shown that it may have an image. Empty: nobody had to, so far."""
        return self.projects.get(digest, frozenset())

    def settled(self, image: ImageInfo) -> bool:
        """Whether it is known whose an image is."""
        return image.digest in self.projects or self.pulling.isdisjoint(image.names)

    def open_to(self, project_id: str, image: ImageInfo) -> bool:
        """Whether a project may have an image."""
        known = self.known(image.digest)
        if known:
            return project_id in known or EVERYONE in known
        return self.settled(image)


async def access(store: Store, image: ImageInfo | None = None) -> Access:
    """Who may have images that came with passwords. All others are everybody's.

    Args:
        store: Where.
        image: Only as far as this one is concerned. None: all.

    To be read after what the nodes have is: what comes to one with a password is noted here first.
    """
    # In one statement: what a pull leaves and what it takes away are seen together.
    query = sa.select(IMAGE_ACCESS.c.digest, IMAGE_ACCESS.c.project_id)
    if image is not None:
        keys = [image.digest, *(_PULLING + name for name in image.names)]
        query = query.where(IMAGE_ACCESS.c.digest.in_(keys))

    def work(connection: sa.Connection) -> Access:
        projects: dict[str, set[str]] = defaultdict(set)
        pulling = set()
        for digest, project_id in connection.execute(query):
            if digest.startswith(_PULLING):
                pulling.add(digest.removeprefix(_PULLING))
            else:
                projects[digest].add(project_id)
        return Access({key: frozenset(ids) for key, ids in projects.items()}, frozenset(pulling))

    return await store.read(work)


async def begin_pull(store: Store, name: str, project_id: str) -> str:
    """Note that a project pulls an image with a password, before it does.

    Args:
        store: Where.
        name: In full, as nodes name it.
        project_id: Whose password it is.

    Returns:
        What ``end_pull`` is called with.
    """
    attempt = f"{project_id}/{random_chars(12)}"

    def work(connection: sa.Connection) -> None:
        connection.execute(
            sa.insert(IMAGE_ACCESS),
            {"digest": _PULLING + name, "project_id": attempt, "created_at": time.time()},
        )

    await store.write(work)
    return attempt


async def end_pull(store: Store, name: str, attempt: str) -> None:
    """Note that a pull is over, after what it has brought was noted; also older pulls of the
    project that nobody has seen to their end."""
    mine = IMAGE_ACCESS.c.project_id.startswith(attempt.rpartition("/")[0] + "/", autoescape=True)
    old = IMAGE_ACCESS.c.created_at < time.time() - PULLING_KEPT_S
    ended = sa.delete(IMAGE_ACCESS).where(
        IMAGE_ACCESS.c.digest == _PULLING + name,
        (IMAGE_ACCESS.c.project_id == attempt) | (mine & old),
    )
    await store.write(lambda connection: connection.execute(ended) and None)


async def let_have(store: Store, digest: str, project_id: str) -> None:
    """Note that a project (or ``EVERYONE``) may have an image."""

    def work(connection: sa.Connection) -> None:
        there = sa.select(IMAGE_ACCESS.c.digest).where(
            IMAGE_ACCESS.c.digest == digest, IMAGE_ACCESS.c.project_id == project_id
        )
        if connection.execute(there).first() is None:
            connection.execute(
                sa.insert(IMAGE_ACCESS),
                {"digest": digest, "project_id": project_id, "created_at": time.time()},
            )

    try:
        await store.write(work)
    except sa.exc.IntegrityError:
        return  # Another process has just noted it.
