# SPDX-License-Identifier: AGPL-3.0-only
"""Bring the schema up to date at start. The scripts are packaged beside this module."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from .errors import StoreSchemaNewer

SCHEMA_REVISION = "0012"
"""The newest script. A database that is there already needs no Alembic in memory."""

MIGRATIONS = Path(__file__).parent / "migrations"


def migrate(connection: sa.Connection) -> None:
    """Run the scripts that the database has not seen, in the caller's transaction.

    Raises:
        StoreSchemaNewer: the database is of a newer release. It is not touched.
    """
    if _current(connection) != SCHEMA_REVISION:
        _upgrade(connection)


def _current(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: sa.Connection) -> None:
    # Alembic costs memory and start-up time, and is needed once per schema change.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    current = _current(connection)
    if current is not None and current not in known:
        raise StoreSchemaNewer(
            f"the database has schema {current}, and this release knows schemas up to "
            f"{SCHEMA_REVISION}. Install the newer release again, or use a backup taken before it."
        )
    command.upgrade(config, "head")
