# SPDX-License-Identifier: AGPL-3.0-only
"""Alembic's entry: run on the connection, and in the transaction, that the server opened."""

from __future__ import annotations

from alembic import context

from opendsec_server.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
)
context.run_migrations()
