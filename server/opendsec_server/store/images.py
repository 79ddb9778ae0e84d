# SPDX-License-Identifier: AGPL-3.0-only
"""Queries on images that came with a project's password, and who else may have them."""

from __future__ import annotations

import time

import sqlalchemy as sa

from .store import Store
from .tables import IMAGE_ACCESS

EVERYONE = "*"


async def projects_with(store: Store, digest: str) -> frozenset[str]:
    """Who has shown that it may have an image. Empty: it is everybody's from the beginning."""

    def work(connection: sa.Connection) -> frozenset[str]:
        query = sa.select(IMAGE_ACCESS.c.project_id).where(IMAGE_ACCESS.c.digest == digest)
        return frozenset(connection.execute(query).scalars())

    return await store.read(work)


async def closed_to(store: Store, project_id: str) -> frozenset[str]:
    """The images that a project has not shown that it may have."""

    def work(connection: sa.Connection) -> frozenset[str]:
        opened = sa.select(IMAGE_ACCESS.c.digest).where(
            IMAGE_ACCESS.c.project_id.in_((project_id, EVERYONE))
        )
        query = sa.select(IMAGE_ACCESS.c.digest).where(IMAGE_ACCESS.c.digest.not_in(opened))
        return frozenset(connection.execute(query).scalars())

    return await store.read(work)


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
