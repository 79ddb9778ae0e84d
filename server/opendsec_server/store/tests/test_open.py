# SPDX-License-Identifier: AGPL-3.0-only
"""Opening the store: made privately, migrated, and never damaged by a failed start."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from opendsec_server.config import Config, ConfigError
from opendsec_server.contract.errors import StoreUnavailable
from opendsec_server.store import migrate
from opendsec_server.store.accounts import all_templates
from opendsec_server.store.errors import (
    StoreCorrupt,
    StoreLocked,
    StoreSchemaNewer,
    StoreUnreachable,
)
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store
from opendsec_server.store.tables import METADATA

pytestmark = pytest.mark.asyncio


def config_at(path: Path) -> Config:
    return Config(state_dir=str(path))


async def make(path: Path) -> Path:
    await (await Store.open(config_at(path))).close()
    return path / "store.db"


async def test_file_is_private_and_reopens(tmp_path: Path) -> None:
    database = await make(tmp_path)
    assert database.stat().st_mode & 0o777 == 0o600
    database.chmod(0o644)
    assert (await make(tmp_path)).stat().st_mode & 0o777 == 0o600


async def test_migrations_make_the_tables_of_the_code(tmp_path: Path) -> None:
    database = await make(tmp_path)
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


async def test_records_of_the_release_before_are_kept(tmp_path: Path) -> None:
    """A database of schema 0001 with a sandbox in it."""
    database = await make(tmp_path)
    database.unlink()
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        config = AlembicConfig()
        config.set_main_option("script_location", str(migrate.MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql("INSERT INTO projects VALUES ('p', 'p', 10, 0)")
        connection.exec_driver_sql(
            "INSERT INTO templates VALUES ('t', NULL, 'base', 'base', 1, 2, 1024, 1024, 'user', "
            "NULL, 0, 0)"
        )
        values = {
            **{"sandbox_id": "i1", "project_id": "p", "node_id": "n", "template_id": "t"},
            **{"template": "base", "backend": "container", "state": "running", "cpu": 2},
            **{"memory_mb": 1024, "disk_mb": 1024, "env": "{}", "metadata": ",", "labels": ","},
            **{"created_at": 1, "end_at": 2, "on_timeout": "kill", "network": "{}"},
            **{"extra": "{}", "transitions": 2},
        }
        names = ", ".join(values)
        connection.execute(
            sa.text(f"INSERT INTO sandboxes ({names}) VALUES (:{', :'.join(values)})"), values
        )
    engine.dispose()
    store = await Store.open(config_at(tmp_path))
    record = await get_sandbox(store, "i1")
    assert record is not None
    assert (record.pause_mode, record.auto_resume, record.timeout_s) == ("full", False, 300.0)
    assert (record.node_seq, record.image, record.snapshot_id) == (0, None, None)
    (template,) = await all_templates(store)
    assert template.backend is None
    await store.close()


async def test_revision_constant_is_the_newest_script() -> None:
    config = AlembicConfig()
    config.set_main_option("script_location", str(migrate.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_current_head() == migrate.SCHEMA_REVISION


async def test_newer_schema_is_refused_and_kept(tmp_path: Path) -> None:
    database = await make(tmp_path)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreSchemaNewer, match="9999"):
        await Store.open(config_at(tmp_path))
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)


async def test_not_a_database_is_refused_and_kept(tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    database.write_bytes(b"precious notes" * 1_000)
    with pytest.raises(StoreCorrupt, match="not an SQLite database"):
        await Store.open(config_at(tmp_path))
    assert database.read_bytes() == b"precious notes" * 1_000


async def test_damaged_pages_are_refused_and_kept(tmp_path: Path) -> None:
    database = await make(tmp_path)
    content = bytearray(database.read_bytes())
    content[4_096 : 4_096 * 6] = os.urandom(4_096 * 5)
    database.write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged"):
        await Store.open(config_at(tmp_path))
    assert database.read_bytes() == bytes(content)


async def test_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = await make(tmp_path)
    monkeypatch.setattr("opendsec_server.store.sqlite.START_BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr("opendsec_server.store.sqlite.BUSY_TIMEOUT_MS", 50)
    with closing(sqlite3.connect(database, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreLocked, match="another process"):
            await Store.open(config_at(tmp_path))
        holder.execute("ROLLBACK")


_OPEN = """
import asyncio, os, sys
from opendsec_server.config import Config
from opendsec_server.store.errors import StoreReadOnly
from opendsec_server.store.sandboxes import get_sandbox
from opendsec_server.store.store import Store
os.setgid(65534); os.setuid(65534)
try:
    asyncio.run(Store.open(Config(state_dir=sys.argv[1])))
except StoreReadOnly as exc:
    print("refused:", exc)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up its rights")
async def test_read_only_is_refused(tmp_path: Path) -> None:
    database = await make(tmp_path)
    before = database.read_bytes()
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    database.chmod(0o444)
    ran = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "refused: cannot open the database" in ran.stdout, ran.stderr
    assert database.read_bytes() == before


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nonsense", ConfigError),
        ("mysql://x/y", ConfigError),
        ("sqlite://", ConfigError),
        ("postgresql://nobody@127.0.0.1:1/none", StoreUnreachable),
    ],
)
async def test_bad_urls(tmp_path: Path, url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await Store.open(Config(state_dir=str(tmp_path), database_url=url))


async def test_run_time_failure_is_retryable_and_passes(tmp_path: Path) -> None:
    await make(tmp_path)
    store = await Store.open(config_at(tmp_path))

    def break_it(connection: sa.Connection) -> None:
        raise sa.exc.OperationalError("x", None, Exception("disk I/O error"))

    with pytest.raises(StoreUnavailable, match="disk I/O error") as caught:
        await store.write(break_it)
    assert caught.value.retryable
    await store.ping()
    await store.close()
