# SPDX-License-Identifier: AGPL-3.0-only
"""What projects use and may use: counted by the database, decided up the chain."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendsec_server.config import Config
from opendsec_server.contract.errors import Conflict, NotFound, QuotaExceeded
from opendsec_server.contract.states import TRANSITIONS, State
from opendsec_server.store import accounts, migrate, projects, sandboxes, templates
from opendsec_server.store.changes import apply_changes
from opendsec_server.store.creates import begin_create
from opendsec_server.store.places import end_places, give_back_places, hold_places
from opendsec_server.store.quotas import NO_LIMIT, Admitted, Wanted, admit, note_egress
from opendsec_server.store.records import Project, StateChange, Template, TemplateBuild
from opendsec_server.store.store import Store
from opendsec_server.store.tables import PROJECT_LINES, PROJECT_USE, PROJECTS, SANDBOXES

from .test_queries import DATABASES, PROJECT, empty, key_of, record_of, store

__all__ = ["DATABASES", "empty", "store"]

ONE = Wanted(cpu=0.1, memory_mb=64, disk_mb=100)


async def child(store: Store, name: str, parent: str = "p", **limits: Any) -> Project:
    made = Project(
        project_id=name,
        name=name,
        sandboxes_max=limits.pop("sandboxes_max", NO_LIMIT),
        created_at=1.0,
        parent_id=parent,
        **limits,
    )
    return await projects.insert_child(store, made)


async def ask(store: Store, project_id: str, count: int, now: float = 1e9, **one: Any) -> Admitted:
    wanted = [Wanted(**{"cpu": 0.1, "memory_mb": 64, "disk_mb": 100, **one})] * count
    return await store.write(lambda c: admit(c, project_id, wanted, now=now))


async def set_limits(store: Store, **values: Any) -> None:
    await store.write(
        lambda c: c.execute(
            sa.update(PROJECTS).where(PROJECTS.c.project_id == "p").values(**values)
        )
    )


async def test_a_batch_fits_as_far_as_it_fits(store: Store) -> None:
    await child(store, "a", sandboxes_max=5)
    await child(store, "b", "a", memory_mb_max=200)
    assert await ask(store, "b", 3) == Admitted(count=3, refusal=None)
    admitted = await ask(store, "b", 10)
    assert admitted.count == 3
    assert admitted.refusal is not None
    assert admitted.refusal.details == {
        "dimension": "memory_mb",
        "limit": 200,
        "use": 192,
        "wanted": 64,
        "project_id": "b",
        "project": "b",
        "fits_never": False,
    }
    admitted = await ask(store, "b", 10, memory_mb=0)
    assert admitted.count == 5
    assert admitted.refusal is not None
    assert admitted.refusal.details["project"] == "a"
    assert (await ask(store, "p", 500)).refusal is None
    never = await ask(store, "b", 1, memory_mb=201)
    assert never.count == 0
    assert never.refusal is not None
    assert never.refusal.details["fits_never"]


@pytest.mark.parametrize(
    ("limit", "one", "name"),
    [
        ({"cpu_max": 0.3}, {"cpu": 0.1}, "cpu"),
        ({"memory_mb_max": 192}, {}, "memory_mb"),
        ({"disk_mb_max": 300}, {}, "disk_mb"),
        ({"gpu_max": 3}, {"gpu": 1}, "gpu"),
        ({"sandboxes_max": 3}, {}, "sandboxes"),
        ({"creates_per_s_max": 3.0}, {}, "creates_per_s"),
    ],
)
async def test_each_dimension(
    store: Store, limit: dict[str, Any], one: dict[str, Any], name: str
) -> None:
    await set_limits(store, **limit)
    admitted = await ask(store, "p", 4, **one)
    assert admitted.count == 3
    assert admitted.refusal is not None
    assert admitted.refusal.details["dimension"] == name
    assert "project `p` (p)" in admitted.refusal.message


async def test_creates_come_evenly_and_clocks_may_step(store: Store) -> None:
    await set_limits(store, creates_per_s_max=10.0)
    assert (await ask(store, "p", 10, now=100.0)).count == 10
    held = await ask(store, "p", 10, now=100.2)
    assert held.count == 2
    assert held.refusal is not None and held.refusal.retry_after_s == 1
    assert (await ask(store, "p", 10, now=101.2)).count == 10
    # The clock is set back by a day, and forward by one: nobody waits for it.
    assert (await ask(store, "p", 10, now=101.2 - 86_400)).count == 10
    assert (await ask(store, "p", 10, now=101.2 + 86_400)).count == 10


async def test_what_was_sent_today_counts_up_the_chain(store: Store) -> None:
    await child(store, "a")
    await set_limits(store, egress_mb_max=10)
    now = 1e9
    await store.write(lambda c: note_egress(c, "a", 9 * 1_048_576, now=now))
    assert (await ask(store, "a", 1, now=now)).count == 1
    await store.write(lambda c: note_egress(c, "a", 2 * 1_048_576, now=now))
    refused = await ask(store, "a", 1, now=now)
    assert refused.count == 0
    assert refused.refusal is not None
    assert refused.refusal.details["dimension"] == "egress_mb"
    assert refused.refusal.details["use"] == 11
    assert (await ask(store, "a", 1, now=now + 86_400)).count == 1


async def test_creates_at_once_never_pass_a_limit_above(store: Store) -> None:
    await set_limits(store, sandboxes_max=7)
    for name in ("a", "b", "c"):
        await child(store, name)
    numbers = itertools.count(1)

    async def create(project_id: str) -> bool:
        try:
            await begin_create(store, record_of(next(numbers), project_id=project_id), None)
        except QuotaExceeded:
            return False
        return True

    made = await asyncio.gather(*(create(name) for name in ("a", "b", "c") * 6))
    assert sum(made) == 7
    assert (await use(store, "p"))["sandboxes"] == 7


async def test_resumes_and_creates_at_once_never_pass_a_limit(store: Store, tmp_path: Path) -> None:
    """As two gateways: each with a connection of its own."""
    await set_limits(store, sandboxes_max=4)
    await child(store, "a")
    for number in range(1, 9):
        await begin_create(store, record_of(number, project_id="pa"[number % 2]), None)
        await apply_changes(store, [moved(number, State.PAUSED)])
    url = os.environ["OPENDSEC_TEST_POSTGRES_URL"] if not store.is_sqlite else None
    other = await Store.open(Config(state_dir=str(tmp_path), database_url=url))
    try:

        async def create(number: int) -> bool:
            try:
                record = record_of(number, project_id="pa"[number % 2])
                await begin_create(store if number % 3 else other, record, None)
            except QuotaExceeded:
                return False
            return True

        async def resume(number: int) -> bool:
            name = record_of(number).sandbox_id
            refused = await hold_places(other if number % 3 else store, [name], now=1.0)
            return not refused

        got = await asyncio.gather(
            *(one for n in range(1, 9) for one in (create(n + 20), resume(n)))
        )
        assert sum(got) == 4
        assert (await use(store, "p"))["sandboxes"] == 4
    finally:
        await other.close()


async def building(store: Store, number: int, project_id: str, **sizes: Any) -> str:
    name = f"b{number}"
    build = TemplateBuild(
        build_id=name,
        template_id="",
        project_id=project_id,
        state="waiting",
        tags=[],
        cpu=2.0,
        memory_mb=512,
        disk_mb=1024,
        envd_version="1",
        created_at=0.0,
    )
    template = Template(
        template_id=f"t{number}",
        project_id=project_id,
        name=f"n{number}",
        image="",
        public=False,
        cpu=2.0,
        memory_mb=512,
        disk_mb=1024,
        default_user="u",
        default_workdir=None,
        created_at=0.0,
        updated_at=0.0,
    )
    await templates.begin_build(store, template, msgspec.structs.replace(build, **sizes))
    return name


async def test_builds_and_creates_at_once_never_pass_a_limit(store: Store) -> None:
    await set_limits(store, sandboxes_max=3)
    await child(store, "a")
    builds = [await building(store, number, "pa"[number % 2]) for number in range(4)]

    async def build(name: str) -> bool:
        try:
            return await templates.note_building(store, name, 1.0)
        except QuotaExceeded as exc:
            assert exc.details["project"] == "p"
            return False

    async def create(number: int) -> bool:
        try:
            await begin_create(store, record_of(number, project_id="pa"[number % 2]), None)
        except QuotaExceeded:
            return False
        return True

    got = await asyncio.gather(
        *(one for n in range(4) for one in (build(builds[n]), create(n + 1)))
    )
    assert sum(got) == 3
    assert (await use(store, "p"))["sandboxes"] == 3
    for name in builds:
        await templates.fail_build(store, name, code="c", message="m", step=None, now=1.0)
        assert not await templates.note_building(store, name, 1.0), "it has ended"
    left = await counted(store, "p")
    assert await use(store, "p") == left


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ({"cpu_max": 1.0}, "cpu"),
        ({"memory_mb_max": 500}, "memory_mb"),
        ({"disk_mb_max": 1000}, "disk_mb"),
        ({"sandboxes_max": 0}, "sandboxes"),
    ],
)
async def test_each_dimension_of_a_build(store: Store, limit: dict[str, Any], name: str) -> None:
    build = await building(store, 1, "p")
    await set_limits(store, **limit)
    with pytest.raises(QuotaExceeded) as refused:
        await templates.note_building(store, build, 1.0)
    assert refused.value.details["dimension"] == name and refused.value.details["fits_never"]
    await set_limits(store, egress_mb_max=0, sandboxes_max=9)
    await store.write(lambda c: note_egress(c, "p", 1, now=1.0))
    with pytest.raises(QuotaExceeded):
        await templates.note_building(store, build, 1.0)


async def test_a_builds_place_goes_with_its_template(store: Store) -> None:
    build = await building(store, 1, "p")
    assert await templates.note_building(store, build, 1.0)
    assert await use(store, "p") == {
        "sandboxes": 1, "cpu_milli": 2000, "memory_mb": 512, "disk_mb": 1024
    }  # fmt: skip
    await templates.delete_template(store, "t1")
    assert set((await use(store, "p")).values()) == {0}


async def test_places_and_changes_at_once_do_not_wait_for_each_other(store: Store) -> None:
    for number in range(1, 9):
        await begin_create(store, record_of(number), None)
        await apply_changes(store, [moved(number, State.PAUSED)])
    names = [record_of(number).sandbox_id for number in range(1, 9)]
    for _ in range(5):
        await asyncio.gather(
            hold_places(store, names[::-1], now=1.0),
            apply_changes(store, [moved(number, State.RUNNING) for number in range(1, 9)]),
            end_places(store, now=1e9),
            give_back_places(store, names),
        )
        await apply_changes(store, [moved(number, State.PAUSED) for number in range(1, 9)])
    await give_back_places(store, names)
    assert (await use(store, "p"))["sandboxes"] == 0


def moved(number: int, state: State) -> StateChange:
    return StateChange(sandbox_id=record_of(number).sandbox_id, state=state, at=5.0, cause="node")


async def test_what_is_handed_on_never_sums_to_more(store: Store) -> None:
    await set_limits(store, cpu_max=10.0)
    await child(store, "a", cpu_max=6.0)
    await child(store, "b")
    with pytest.raises(Conflict) as refused:
        await child(store, "c", "b", cpu_max=5.0)
    assert refused.value.details["limit"] == 10.0
    assert refused.value.details["handed_on"] == 11
    await child(store, "c", "b", cpu_max=4.0)
    with pytest.raises(Conflict):
        await projects.change_project(store, "a", name=None, limits={"cpu": 6.5})
    with pytest.raises(Conflict):
        await projects.change_project(store, "p", name=None, limits={"cpu": 9})
    with pytest.raises(Conflict):
        await projects.change_project(store, "b", name=None, limits={"cpu": 3})
    await projects.change_project(store, "b", name=None, limits={"cpu": 4})
    await projects.close_project(store, "c")
    await projects.change_project(store, "b", name=None, limits={"cpu": 1})
    await projects.change_project(store, "a", name="z", limits={"cpu": 9, "sandboxes": None})
    with pytest.raises(Conflict):
        await child(store, "z")
    with pytest.raises(NotFound):
        await child(store, "d", "c")
    closed = await ask(store, "c", 1)
    assert closed.count == 0
    assert closed.refusal is not None and closed.refusal.details["fits_never"]


async def use(store: Store, project_id: str) -> dict[str, int]:
    def work(connection: sa.Connection) -> dict[str, int]:
        query = sa.select(PROJECT_USE).where(PROJECT_USE.c.project_id == project_id)
        row = connection.execute(query).mappings().one()
        return {name: row[name] for name in ("sandboxes", "cpu_milli", "memory_mb", "disk_mb")}

    return await store.read(work)


async def counted(store: Store, project_id: str) -> dict[str, int]:
    """The same, the slow way."""

    def work(connection: sa.Connection) -> dict[str, int]:
        below = sa.select(PROJECT_LINES.c.project_id).where(
            PROJECT_LINES.c.ancestor_id == project_id
        )
        rows = connection.execute(
            sa.select(SANDBOXES).where(
                SANDBOXES.c.project_id.in_(below), SANDBOXES.c.ended_at.is_(None)
            )
        ).all()
        runs = [row for row in rows if row.state != State.PAUSED or row.place_until is not None]
        return {
            "sandboxes": len(runs),
            "cpu_milli": sum(round(row.cpu * 1_000) for row in runs),
            "memory_mb": sum(row.memory_mb for row in runs),
            "disk_mb": sum(row.disk_mb for row in rows),
        }

    return await store.read(work)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "move", "move", "prune", "hold", "give back", "end"]),
        st.integers(0, 5),
        st.sampled_from(sorted(TRANSITIONS)),
    ),
    max_size=25,
)


def test_what_is_counted_is_what_is_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever happens to sandboxes, by whichever way their rows are written."""
    root = tmp_path_factory.mktemp("use")
    numbers = itertools.count(1)
    asyncio.run(_first(root / "seed"))

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS)
    def check(steps: list[tuple[str, int, State]]) -> None:
        path = root / str(next(numbers))
        shutil.copytree(root / "seed", path)
        asyncio.run(_walk(path, steps))

    check()


async def _walk(path: Path, steps: list[tuple[str, int, State]]) -> None:
    store = await Store.open(Config(state_dir=str(path)))
    try:
        await child(store, "a")
        await child(store, "b", "a")
        for number, (what, which, state) in enumerate(steps):
            name = record_of(which).sandbox_id
            if what == "create":
                record = record_of(
                    which, project_id="pab"[which % 3], cpu=0.1 * which, memory_mb=64 + which
                )
                await sandboxes.insert_adopted(store, record)
            elif what == "move":
                change = StateChange(
                    sandbox_id=name, state=state, at=float(number), cause="node", seq=number + 1
                )
                await apply_changes(store, [change])
            elif what == "hold":
                await hold_places(store, [name], now=float(number))
            elif what == "give back":
                await give_back_places(store, [name])
            elif what == "end":
                await end_places(store, now=float(number))
            else:
                await sandboxes.prune(store, ended_before=float(number), now=float(number))
        for project_id in ("p", "a", "b"):
            assert await use(store, project_id) == await counted(store, project_id)
    finally:
        await store.close()


async def _first(path: Path) -> None:
    """Migrations cost more than a walk: the others begin with a copy."""
    opened = await Store.open(Config(state_dir=str(path)))
    await accounts.insert_project(opened, PROJECT, key_of("k1"))
    await opened.close()


LIMIT = st.one_of(st.none(), st.integers(0, 12))
TREE = st.tuples(
    *(
        st.fixed_dictionaries({"sandboxes_max": LIMIT, "memory_mb_max": LIMIT, "gpu_max": LIMIT})
        for _ in "pab"
    )
)
BATCHES = st.lists(
    st.tuples(
        st.sampled_from("pab"),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
    ),
    max_size=6,
)


def test_what_is_admitted_is_the_longest_beginning_that_fits(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Against a count of our own, over a chain of three projects with limits of any kind."""
    root = tmp_path_factory.mktemp("admit")
    numbers = itertools.count(1)
    asyncio.run(_first(root / "seed"))

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TREE, BATCHES)
    def check(tree: tuple[dict[str, int | None], ...], batches: list[Any]) -> None:
        path = root / str(next(numbers))
        shutil.copytree(root / "seed", path)
        asyncio.run(_admit_all(path, tree, batches))

    check()


def _run(statement: sa.Update, connection: sa.Connection) -> None:
    connection.execute(statement)


def _admit_and_insert(
    asked: list[tuple[str, int, int]], numbers: Iterator[int], connection: sa.Connection
) -> Admitted:
    wanted = [Wanted(cpu=0, memory_mb=m, disk_mb=0, gpu=g) for _, m, g in asked]
    admitted = admit(connection, asked[0][0], wanted, now=1.0)
    for project_id, memory_mb, gpu in asked[: admitted.count]:
        record = record_of(next(numbers), project_id=project_id, memory_mb=memory_mb, gpu=gpu)
        connection.execute(sa.insert(SANDBOXES), sandboxes.row_of(record))
    return admitted


async def _admit_all(path: Path, tree: Any, batches: list[Any]) -> None:
    store = await Store.open(Config(state_dir=str(path)))
    line = {"p": "p", "a": "pa", "b": "pab"}
    limits = dict(zip("pab", tree, strict=True))
    running: list[tuple[str, int, int]] = []
    sandbox = itertools.count(1)

    def fits(more: list[tuple[str, int, int]]) -> bool:
        for name, own in limits.items():
            inside = [one for one in running + more if name in line[one[0]]]
            use = {
                "sandboxes_max": len(inside),
                "memory_mb_max": sum(one[1] for one in inside),
                "gpu_max": sum(one[2] for one in inside),
            }
            if any(limit is not None and use[key] > limit for key, limit in own.items()):
                return False
        return True

    try:
        await child(store, "a")
        await child(store, "b", "a")
        for name, own in limits.items():
            values = {**own, "sandboxes_max": own["sandboxes_max"]}
            if values["sandboxes_max"] is None:
                values["sandboxes_max"] = NO_LIMIT
            update = sa.update(PROJECTS).where(PROJECTS.c.project_id == name).values(**values)
            await store.write(partial(_run, update))
        for project_id, sizes in batches:
            asked = [(project_id, memory_mb, gpu) for memory_mb, gpu in sizes]
            expected = max(count for count in range(len(asked) + 1) if fits(asked[:count]))
            admitted = await store.write(partial(_admit_and_insert, asked, sandbox))
            assert admitted.count == expected
            assert (admitted.refusal is None) == (expected == len(asked))
            running += asked[:expected]
    finally:
        await store.close()


def at_revision(path: Path, revision: str, work: Callable[[sa.Connection], None]) -> None:
    engine = sa.create_engine(f"sqlite:///{path / 'store.db'}")
    with engine.begin() as connection:
        config = AlembicConfig()
        config.set_main_option("script_location", str(migrate.MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        work(connection)
    engine.dispose()


async def test_a_database_of_the_release_before_is_counted(tmp_path: Path) -> None:
    tmp_path.joinpath("store.db").touch(0o600)

    def work(connection: sa.Connection) -> None:
        connection.exec_driver_sql("INSERT INTO projects VALUES ('p', 'p', 10, 0)")
        for number, (state, ended) in enumerate(
            [("running", None), ("paused", None), ("ended", 5.0), ("pausing", None)]
        ):
            values = {
                **{"sandbox_id": f"i{number}", "project_id": "p", "node_id": "n"},
                **{"template_id": "t", "template": "base", "backend": "container"},
                **{"state": state, "cpu": 0.3, "memory_mb": 100, "disk_mb": 1_000, "env": "{}"},
                **{"metadata": ",", "labels": ",", "created_at": 1, "end_at": 2},
                **{"on_timeout": "kill", "network": "{}", "extra": "{}", "transitions": 2},
                "ended_at": ended,
            }
            connection.execute(
                sa.text(
                    f"INSERT INTO sandboxes ({', '.join(values)}) VALUES (:{', :'.join(values)})"
                ),
                values,
            )

    at_revision(tmp_path, "0003", work)
    store = await Store.open(Config(state_dir=str(tmp_path)))
    try:
        assert await use(store, "p") == {
            "sandboxes": 2,
            "cpu_milli": 600,
            "memory_mb": 200,
            "disk_mb": 3_000,
        }
        project = await accounts.get_project(store, "p")
        assert project is not None and (project.parent_id, project.depth) == (None, 0)
        await child(store, "a", sandboxes_max=3)
        assert (await ask(store, "a", 5)).count == 3
        end = StateChange(sandbox_id="i0", state=State.ENDED, at=9.0, cause="node")
        await apply_changes(store, [end])
        assert (await use(store, "p"))["sandboxes"] == 1
    finally:
        await store.close()
