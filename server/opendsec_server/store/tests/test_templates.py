# SPDX-License-Identifier: AGPL-3.0-only
"""Templates, builds, tags and cached steps; names that are unique where they must be."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig

from opendsec_server.config import Config
from opendsec_server.contract.errors import BuildNotFound, Conflict, QuotaExceeded
from opendsec_server.contract.images import ReadyCheck, StartCommand
from opendsec_server.store import accounts, migrate, templates
from opendsec_server.store.records import Project, Template, TemplateBuild
from opendsec_server.store.store import Store
from opendsec_server.store.templates import BuildFilter

from .test_queries import key_of, store

__all__ = ["store"]


def template(name: str = "mine", project: str | None = "p", number: int = 1) -> Template:
    return Template(
        template_id=f"t-{project}-{name}-{number}", project_id=project, name=name, image="",
        public=False, cpu=2, memory_mb=1024, disk_mb=1024, default_user="user",
        default_workdir=None, created_at=float(number), updated_at=float(number),
    )  # fmt: skip


def build(number: int = 1, **changes: object) -> TemplateBuild:
    made = TemplateBuild(
        build_id=f"b{number}", template_id="", project_id="p", state="waiting", tags=["default"],
        cpu=2, memory_mb=1024, disk_mb=1024, envd_version="1", created_at=float(number),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


async def begun(store: Store, number: int = 1, **changes: object) -> TemplateBuild:
    return await templates.begin_build(store, template(number=number), build(number, **changes))


def ready(made: TemplateBuild, at: float) -> TemplateBuild:
    start = StartCommand(argv=("serve",), ready=ReadyCheck(port=1))
    return msgspec.structs.replace(
        made, state="ready", image=f"sha256:{made.build_id}", env={"A": "1"}, start=start,
        default_user="user", started_at=at, finished_at=at,
    )  # fmt: skip


async def test_one_template_per_name_and_project(store: Store) -> None:
    one, two = await begun(store, 1), await begun(store, 2)
    assert one.template_id == two.template_id
    other = Project(project_id="q", name="q", sandboxes_max=1, created_at=0.0)
    await accounts.insert_project(
        store, other, msgspec.structs.replace(key_of("kq"), project_id="q")
    )
    elsewhere = await templates.begin_build(store, template(project="q"), build(3, project_id="q"))
    assert elsewhere.template_id != one.template_id
    await accounts.put_template(store, template(project=None))
    await accounts.put_template(store, template(project=None, number=2))
    names = [(t.project_id, t.name) for t in await accounts.all_templates(store)]
    assert sorted(names, key=str) == [("p", "mine"), ("q", "mine"), (None, "mine")]


async def test_builds_of_one_new_name_at_once(store: Store) -> None:
    made = await asyncio.gather(*(begun(store, number) for number in range(1, 9)))
    assert len({one.template_id for one in made}) == 1
    assert len(await accounts.all_templates(store)) == 1


async def test_a_ready_build_is_read_as_it_was_written(store: Store) -> None:
    made = ready(await begun(store), 5.0)
    assert await templates.note_building(store, "b1", 1.0)
    assert not await templates.note_building(store, "b1", 1.0)
    assert await templates.finish_build(store, made)
    assert await templates.get_build(store, "b1") == made
    assert await templates.build_of_tag(store, made.template_id, "default") == made
    assert await templates.images_of_builds(store) == {"sha256:b1"}
    # It has ended: nothing ends it again.
    assert not await templates.fail_build(store, "b1", code="x", message="x", step=None, now=6.0)
    assert not await templates.finish_build(store, made)


async def test_tags_go_to_the_last_that_is_ready(store: Store) -> None:
    one, two = await begun(store, 1, tags=["default", "a"]), await begun(store, 2)
    await templates.finish_build(store, ready(two, 5.0))
    await templates.finish_build(store, ready(one, 6.0))
    tags = await templates.tags_of(store, one.template_id)
    assert {t.tag: t.build_id for t in tags} == {"default": "b1", "a": "b1"}
    await templates.assign_tags(store, ready(two, 5.0), ["a", "b"], 7.0)
    tags = await templates.tags_of(store, one.template_id)
    assert [(t.tag, t.build_id) for t in tags] == [("a", "b2"), ("b", "b2"), ("default", "b1")]
    assert await templates.remove_tags(store, one.template_id, ["a", "none"]) == 1
    shown = await templates.builds_shown(store, [one.template_id, "none"], "default")
    assert {k: (b.build_id, n) for k, (b, n) in shown.items()} == {one.template_id: ("b1", 2)}
    with pytest.raises(BuildNotFound):
        gone = msgspec.structs.replace(one, build_id="gone")
        await templates.assign_tags(store, gone, ["z"], 8.0)


async def test_starts_are_counted_per_project(store: Store) -> None:
    for number in (1, 2, 3):
        await begun(store, number)
    await templates.start_build(store, "p", "b1", 5.0, 2)
    with pytest.raises(Conflict, match="started before"):
        await templates.start_build(store, "p", "b1", 5.0, 2)
    await templates.start_build(store, "p", "b2", 5.0, 2)
    with pytest.raises(QuotaExceeded):
        await templates.start_build(store, "p", "b3", 5.0, 2)
    await templates.fail_build(store, "b1", code="x", message="x", step="1", now=6.0)
    await templates.start_build(store, "p", "b3", 5.0, 2)
    with pytest.raises(BuildNotFound):
        await templates.start_build(store, "p", "none", 5.0, 9)


async def test_what_a_killed_server_left(store: Store) -> None:
    for number in (1, 2, 3):
        await begun(store, number)
    await templates.start_build(store, "p", "b2", 5.0, 9)
    count = await templates.fail_interrupted(
        store, code="c", message="m", now=9.0, waiting_since=1.5
    )
    assert count == 2
    states = {n: (await templates.get_build(store, f"b{n}")).state for n in (1, 2, 3)}  # type: ignore[union-attr]
    assert states == {1: "error", 2: "error", 3: "waiting"}


async def test_pages_and_deletion(store: Store) -> None:
    made = [await begun(store, number) for number in range(1, 6)]
    await templates.finish_build(store, ready(made[0], 5.0))
    seen: list[str] = []
    after = None
    while True:
        page = await templates.list_builds(
            store, BuildFilter(template_id=made[0].template_id, after=after, limit=2)
        )
        if not page:
            break
        seen += [one.build_id for one in page]
        after = (page[-1].created_at, page[-1].build_id)
    assert seen == ["b5", "b4", "b3", "b2", "b1"]
    assert await templates.set_public(store, made[0].template_id, True, 9.0)
    removed = await templates.delete_template(store, made[0].template_id)
    assert sorted(removed or []) == ["b1", "b2", "b3", "b4", "b5"]
    assert await templates.delete_template(store, made[0].template_id) is None
    assert not await templates.set_public(store, made[0].template_id, True, 9.0)
    assert await templates.build_of_tag(store, made[0].template_id, "default") is None
    assert not await templates.finish_build(store, ready(made[1], 6.0))


async def test_cached_steps(store: Store) -> None:
    assert await templates.cached_step(store, "p", "k", 1.0) is None
    await templates.put_step(store, "p", "k", "one", 1.0)
    await templates.put_step(store, "p", "k", "two", 2.0)
    await templates.put_step(store, "p", "old", "x", 1.0)
    assert await templates.cached_step(store, "p", "k", 5.0) == "two"
    assert await templates.forget_steps(store, 4.0) == 1
    assert await templates.cached_step(store, "p", "old", 5.0) is None
    assert await templates.cached_step(store, "p", "k", 5.0) == "two"


async def test_templates_of_the_release_before_are_kept(tmp_path: Path) -> None:
    """A database of schema 0002, whose names were unique for all."""
    await (await Store.open(Config(state_dir=str(tmp_path)))).close()
    database = tmp_path / "store.db"
    database.unlink()
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        config = AlembicConfig()
        config.set_main_option("script_location", str(migrate.MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        connection.exec_driver_sql(
            "INSERT INTO templates VALUES ('t', NULL, 'base', 'base', 1, 2, 1024, 1024, 'user', "
            "NULL, 0, 0, 'vm')"
        )
    engine.dispose()
    opened = await Store.open(Config(state_dir=str(tmp_path)))
    (kept,) = await accounts.all_templates(opened)
    assert (kept.template_id, kept.name, kept.backend) == ("t", "base", "vm")
    await opened.close()
    with closing(sqlite3.connect(database)) as connection:
        indexes = {row[1] for row in connection.execute("PRAGMA index_list(templates)")}
    assert {"uq_templates_own_name", "uq_templates_installation_name"} <= indexes


async def test_builds_that_are_never_started_come_to_an_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "ASKED_MAX", 2)
    await begun(store, 1)
    await begun(store, 2)
    with pytest.raises(QuotaExceeded):
        await begun(store, 3)
    other = Project(project_id="q", name="q", sandboxes_max=1, created_at=0.0)
    await accounts.insert_project(
        store, other, msgspec.structs.replace(key_of("kq"), project_id="q")
    )
    await templates.begin_build(store, template(project="q"), build(3, project_id="q"))
    await templates.start_build(store, "p", "b1", 4.0, 10)
    await begun(store, 5)
    late = 10 + templates.ASKED_COUNTED_S
    await begun(store, 6, created_at=late)
