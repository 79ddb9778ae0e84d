# SPDX-License-Identifier: AGPL-3.0-only
"""Groups over a fake node: order, health, whole or nothing, and a server that dies half-way."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    GroupExists,
    GroupNotFound,
    GroupServiceNotFound,
    GroupStateConflict,
    IdempotencyMismatch,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    SnapshotFailed,
)
from opendsec_server.contract.states import TERMINAL, EndReason, State
from opendsec_server.control import creates
from opendsec_server.control.groups import (
    GroupSpec,
    GroupView,
    HealthCheck,
    ServiceSpec,
    program,
    service,
)
from opendsec_server.control.groups.model import check_group, order_of
from opendsec_server.control.iam import Caller
from opendsec_server.control.saving import ForkParams
from opendsec_server.control.services import Services

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store
from .test_batches import limit


def well(test: str = "need /ready", retries: int = 2, **more: Any) -> HealthCheck:
    return HealthCheck(
        test=("sh", "-c", test), interval_s=0.02, timeout_s=1, retries=retries, **more
    )


def run(command: str = "block", **more: Any) -> ServiceSpec:
    return ServiceSpec(command=("sh", "-c", command), **more)


def web_and_db(**more: Any) -> GroupSpec:
    return GroupSpec(
        services={
            "web": run(depends_on={"db": "healthy"}, aliases=("www",)),
            "db": run("write /ready yes\nblock", healthcheck=well()),
        },
        **more,
    )


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)


async def waited(
    services: Services, caller: Caller, view: GroupView, wanted: Any = "running"
) -> GroupView:
    async with asyncio.timeout(15):
        async for now, _reached in services.groups.wait(caller, view.group.group_id, wanted, 15):
            view = now
    return view


def living(node: FakeNode) -> list[str]:
    return [name for name, status in node.statuses.items() if status.state not in TERMINAL]


def error_of(view: GroupView) -> dict[str, Any]:
    assert view.group.error is not None
    found: dict[str, Any] = msgspec.json.decode(view.group.error)
    return found


async def test_services_come_up_in_order_on_one_network(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    view = await services.groups.create(caller, web_and_db(name="shop", labels=("l",)))
    assert view.state == "starting"
    view = await waited(services, caller, view)
    assert view.state == "running"
    assert [one.member.state for one in view.members] == ["started", "healthy"]
    specs = {spec.group.name: spec for spec in node.specs.values() if spec.group is not None}
    assert {spec.group.group_id for spec in specs.values() if spec.group} == {view.group.group_id}
    assert specs["web"].group is not None and specs["web"].group.aliases == ("www",)
    # The database was healthy before the other was made.
    assert list(node.specs) == [specs["db"].sandbox_id, specs["web"].sandbox_id]
    assert all(one.record is not None and one.record.labels == ["l"] for one in view.members)
    assert (await services.groups.inspect(caller, "shop")).state == "running"
    ended = await services.groups.kill(caller, "shop")
    ended = await waited(services, caller, ended, "ended")
    assert (ended.state, ended.group.end_reason, ended.group.error) == ("ended", "killed", None)
    assert living(node) == []
    again = await services.groups.kill(caller, view.group.group_id)
    assert again.group.end_reason == "killed"


async def test_a_service_that_stays_ill_ends_all(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    spec = GroupSpec(
        services={
            "db": run(healthcheck=well("echo no luck\nexit 3", retries=3)),
            "side": run(),
            "web": run(depends_on={"db": "healthy"}),
        }
    )
    view = await waited(services, caller, await services.groups.create(caller, spec))
    assert (view.state, view.group.end_reason) == ("ended", "unhealthy")
    error = error_of(view)
    assert (error["code"], error["fault"]) == ("group_unhealthy", "user")
    assert error["details"]["service"] == "db"
    assert error["details"]["output"] == "no luck"
    assert error["details"]["failures"] == 3
    assert "exited with 3" in error["message"]
    states = {one.member.name: one.member.state for one in view.members}
    assert states == {"db": "failed", "side": "started", "web": "waiting"}
    assert len(node.specs) == 2 and living(node) == []


async def test_failures_before_the_start_period_is_over_do_not_count(
    services: Services, caller: Caller
) -> None:
    check = well("need /ready", retries=1, start_period_s=30.0)
    spec = GroupSpec(services={"db": run("block", healthcheck=check)})
    view = await services.groups.create(caller, spec)

    async def failed_once() -> bool:
        now = await services.groups.get(caller, view.group.group_id)
        return now.members[0].member.message is not None

    await until(failed_once)
    now = await services.groups.get(caller, view.group.group_id)
    record = now.members[0].record
    assert record is not None and "missing" in str(now.members[0].member.message)
    await services.fleet.exec(record.sandbox_id, ("write /ready yes",), timeout_s=1).__anext__()
    assert (await waited(services, caller, view)).state == "running"


@pytest.mark.parametrize(("code", "ends"), [(0, "running"), (4, "ended")])
async def test_completed_means_that_it_ended_well(
    services: Services, caller: Caller, node: FakeNode, code: int, ends: str
) -> None:
    spec = GroupSpec(
        services={
            "migrate": run(f"echo done\nwarn bad\nexit {code}"),
            "web": run(depends_on={"migrate": "completed"}),
        }
    )
    view = await waited(services, caller, await services.groups.create(caller, spec))
    assert view.state == ends
    if code == 0:
        assert view.members[0].member.state == "completed"
        found = await services.groups.logs(caller, view.group.group_id, "migrate")
        assert found.program is not None and found.program.stdout.head == b"done\n"
        # It ended well: nothing is wrong with the group.
        assert (await services.groups.inspect(caller, view.group.group_id)).state == "running"
        return
    error = error_of(view)
    assert (error["code"], view.group.end_reason) == ("group_service_failed", "start_failed")
    assert error["details"]["exit_code"] == 4 and error["details"]["stderr"] == "bad\n"
    assert living(node) == []


async def test_a_program_that_cannot_be_started(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    spec = GroupSpec(services={"db": ServiceSpec(command=("/missing",)), "web": run()})
    view = await waited(services, caller, await services.groups.create(caller, spec))
    error = error_of(view)
    assert (view.state, error["code"], error["fault"]) == ("ended", "group_service_failed", "user")
    assert living(node) == []


async def test_a_sandbox_that_dies_while_others_start(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    spec = GroupSpec(
        services={
            "db": run("block"),
            "web": run(healthcheck=well("exit 1", retries=1, start_period_s=60.0)),
        }
    )
    view = await services.groups.create(caller, spec)

    async def both() -> bool:
        now = await services.groups.get(caller, view.group.group_id)
        return now.members[0].member.state == "started" and now.members[0].record is not None

    await until(both)
    now = await services.groups.get(caller, view.group.group_id)
    assert now.members[0].record is not None
    node.end(now.members[0].record.sandbox_id, EndReason.LOST, "the host went away")
    view = await waited(services, caller, view)
    error = error_of(view)
    assert (view.state, error["code"], error["fault"]) == (
        "ended", "group_service_failed", "platform",
    )  # fmt: skip
    assert error["details"]["service"] == "db" and living(node) == []


async def test_a_node_without_room_undoes_all(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    check = well(start_period_s=60.0)
    spec = GroupSpec(services={"a": run(healthcheck=check), "b": run(depends_on={"a": "healthy"})})
    view = await services.groups.create(caller, spec)

    async def first_is_there() -> bool:
        now = await services.groups.get(caller, view.group.group_id)
        return now.members[0].member.state == "started"

    await until(first_is_there)
    node.fail_with = NodeFull("no room")
    (name,) = node.specs
    node.contents[name].disk["/ready"] = "yes"
    view = await waited(services, caller, view)
    error = error_of(view)
    assert (view.state, error["code"], error["fault"], error["details"]["service"]) == (
        "ended", "node_full", "capacity", "b",
    )  # fmt: skip
    assert living(node) == []


async def test_a_quota_that_is_reached_in_the_middle(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    await limit(services, "sandboxes_max", 1)
    spec = GroupSpec(services={"a": run(), "b": run(depends_on={"a": "started"})})
    view = await waited(services, caller, await services.groups.create(caller, spec))
    error = error_of(view)
    assert (view.state, error["code"], error["fault"]) == ("ended", "quota_exceeded", "capacity")
    assert len(node.specs) == 1 and living(node) == []


async def test_what_can_never_be_is_refused_before_anything_is_made(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    circle = {name: run(depends_on={other: "started"}) for name, other in ("ab", "bc", "ca")}
    with pytest.raises(InvalidRequest, match=r"in a circle: . → . → . → ") as caught:
        await services.groups.create(caller, GroupSpec(services=circle))
    assert set(caught.value.details["cycle"]) == {"a", "b", "c"}
    for bad, text in [
        ({}, "1 to 64"),
        ({"Not a label": run()}, "no name of a service"),
        ({"localhost": run()}, "no name of a service"),
        ({"a": run(depends_on={"b": "started"})}, "there is no service `b`"),
        ({"a": run(depends_on={"b": "healthy"}), "b": run()}, "no healthcheck"),
        ({"a": run(depends_on={"b": "completed"}), "b": ServiceSpec()}, "has no command"),
        ({"a": run(depends_on={"a": "started"})}, "in a circle"),
        ({"a": run(aliases=("b",)), "b": run()}, "name of another service"),
        ({"a": run(aliases=("-x",))}, "no DNS name"),
        ({"a": run(env={"A=B": "c"})}, "services.a.env"),
        ({"a": ServiceSpec(image="x", template="other")}, "not both"),
        ({"a": run("a\0b")}, "NUL"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            await services.groups.create(caller, GroupSpec(services=bad))
    assert node.specs == {}
    assert (await services.groups.page(caller, limit=10))[0] == []
    assert order_of(web_and_db().services) == ["db", "web"]
    check_group(web_and_db())


async def test_one_key_one_group_and_one_name_one_living_group(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    views = await asyncio.gather(
        *(services.groups.create(caller, web_and_db(name="shop"), key="k") for _ in range(5))
    )
    assert len({view.group.group_id for view in views}) == 1
    with pytest.raises(IdempotencyMismatch):
        await services.groups.create(caller, web_and_db(name="other"), key="k")
    with pytest.raises(GroupExists) as caught:
        await services.groups.create(caller, web_and_db(name="shop"))
    assert caught.value.details["group_id"] == views[0].group.group_id
    view = await waited(services, caller, views[0])
    assert len(node.specs) == 2
    await services.groups.kill(caller, "shop")
    await waited(services, caller, view, "ended")
    # The name is free again; the key stands for what it made.
    second = await services.groups.create(caller, web_and_db(name="shop"))
    same = await services.groups.create(caller, web_and_db(name="shop"), key="k")
    assert same.group.group_id == view.group.group_id != second.group.group_id
    assert (await services.groups.get(caller, "shop")).group.group_id == second.group.group_id
    await waited(services, caller, second)


async def test_a_member_that_ended_alone_and_then_all(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    view = await waited(services, caller, await services.groups.create(caller, web_and_db()))
    group_id = view.group.group_id
    names = [one.record.sandbox_id for one in view.members if one.record is not None]
    await services.lifecycle.kill(caller, names[0])
    assert (await services.groups.get(caller, group_id)).state == "degraded"
    await services.lifecycle.kill(caller, names[1])
    view = await waited(services, caller, view, "ended")
    assert (view.state, view.group.end_reason) == ("ended", "members_ended")


async def test_a_program_that_fails_later_degrades(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.kept_gate = asyncio.Event()
    spec = GroupSpec(services={"web": run("exit 9"), "db": run()})
    view = await waited(services, caller, await services.groups.create(caller, spec))
    assert view.state == "running"
    node.kept_gate.set()

    async def degraded() -> bool:
        return (await services.groups.inspect(caller, view.group.group_id)).state == "degraded"

    await until(degraded)


async def test_its_time_is_over(services: Services, caller: Caller, node: FakeNode) -> None:
    view = await services.groups.create(caller, web_and_db(timeout_s=1))
    view = await waited(services, caller, view, "ended")
    assert (view.state, view.group.end_reason) == ("ended", "timeout")
    assert living(node) == []
    assert {one.record.end_reason for one in view.members if one.record} == {EndReason.TIMEOUT}


async def test_it_is_not_up_in_time(services: Services, caller: Caller, node: FakeNode) -> None:
    check = well("exit 1", start_period_s=60.0)
    spec = GroupSpec(services={"db": run(healthcheck=check)}, start_timeout_s=4)
    view = await waited(services, caller, await services.groups.create(caller, spec))
    error = error_of(view)
    assert (view.state, error["code"]) == ("ended", "group_unhealthy")
    assert error["details"]["services"] == {"db": "is not healthy yet"}
    assert living(node) == []


async def test_pause_and_resume_as_one(config: Config) -> None:
    node = FakeNode(microvm="tcg")
    services = await Services.start(config, node)
    caller = await first_caller(services)
    try:
        members = {name: run(backend="microvm") for name in ("a", "b")}
        view = await services.groups.create(caller, GroupSpec(services=members))
        with pytest.raises(GroupStateConflict):
            await services.groups.pause(caller, view.group.group_id)
        view = await waited(services, caller, view)
        name = view.group.group_id
        node.fail["pause"] = SnapshotFailed("no room")
        with pytest.raises(SnapshotFailed) as caught:
            await services.groups.pause(caller, name)
        assert caught.value.details["service"] in ("a", "b")
        assert (await services.groups.get(caller, name)).state == "running"
        node.fail.clear()
        for _ in range(2):
            view = await services.groups.pause(caller, name)
            assert view.state == "paused"
        assert {status.state for status in node.statuses.values()} == {State.PAUSED}
        for _ in range(2):
            view = await services.groups.resume(caller, name)
            assert view.state == "running" and view.group.end_at > time.time() + 3_000
        await services.groups.pause(caller, name)
        await services.groups.kill(caller, name)
        await waited(services, caller, view, "ended")
        assert living(node) == []
        with pytest.raises(GroupStateConflict):
            await services.groups.resume(caller, name)
    finally:
        await services.stop()


async def test_a_copy_of_a_member_is_in_no_group(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    view = await waited(services, caller, await services.groups.create(caller, web_and_db()))
    record = view.members[0].record
    assert record is not None
    forked = await services.saving.fork(
        caller, record.sandbox_id, ForkParams(count=1, mode="filesystem")
    )
    (child,) = forked.children
    assert child.record is not None
    assert node.specs[child.record.sandbox_id].group is None


async def test_other_projects_see_nothing(services: Services, caller: Caller) -> None:
    view = await waited(services, caller, await services.groups.create(caller, web_and_db()))
    other = msgspec.structs.replace(
        caller, project=msgspec.structs.replace(caller.project, project_id="p-other")
    )
    groups = services.groups
    for name in (view.group.group_id, view.group.name, "nothing", "a\0b"):
        for call in (groups.get, groups.inspect, groups.kill, groups.pause, groups.resume):
            with pytest.raises(GroupNotFound):
                await call(other, name)
        with pytest.raises(GroupNotFound):
            await groups.logs(other, name, "db")
    with pytest.raises(GroupServiceNotFound):
        await groups.logs(caller, view.group.group_id, "nothing")
    assert (await groups.page(other, limit=5)) == ([], False)
    assert len((await groups.page(caller, limit=5, states=["running"]))[0]) == 1


# --- a process that dies ------------------------------------------------------


async def crash(services: Services) -> None:
    """The process is gone: nothing is finished, nothing is undone."""
    groups = services.groups
    groups._stopped = True
    tasks = [*groups._running.values(), *services.creates.attempts.tasks]
    if groups._keeping is not None:
        tasks.append(groups._keeping)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await services.stop()


async def test_a_start_is_finished_by_the_next_process(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    # The first create is under way when the process dies.
    node.gate = asyncio.Event()
    view = await services.groups.create(caller, web_and_db())
    async with asyncio.timeout(5):
        await node.admitted.wait()
    await crash(services)
    node.gate.set()
    node.gate = None
    services = await Services.start(config, node)
    try:
        view = await waited(services, caller, view)
        assert view.state == "running"
        assert len(node.specs) == 2 and len(living(node)) == 2
        # Each program began once, whichever process asked for it.
        assert len(node.begun) == 2
    finally:
        await services.stop()


@pytest.mark.parametrize("made", [False, True])
async def test_an_end_is_finished_by_the_next_process(
    config: Config, node: FakeNode, made: bool
) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    if not made:
        node.gate = asyncio.Event()
    view = await services.groups.create(caller, web_and_db())
    if made:
        view = await waited(services, caller, view)
        node.unreachable = NodeUnavailable("away")
    else:
        async with asyncio.timeout(5):
            await node.admitted.wait()
    view = await services.groups.kill(caller, view.group.group_id)
    assert view.state == "ending"
    await crash(services)
    node.unreachable = None
    if node.gate is not None:
        node.gate.set()
        node.gate = None
    services = await Services.start(config, node)
    try:
        view = await waited(services, caller, view, "ended")
        assert (view.state, view.group.end_reason) == ("ended", "killed")
        assert living(node) == []
    finally:
        await services.stop()


async def test_killed_while_its_first_sandbox_is_being_made(
    services: Services, caller: Caller, node: FakeNode
) -> None:
    node.gate = asyncio.Event()
    view = await services.groups.create(caller, web_and_db())
    async with asyncio.timeout(5):
        await node.admitted.wait()
    await services.groups.kill(caller, view.group.group_id)
    node.gate.set()
    view = await waited(services, caller, view, "ended")
    assert view.state == "ended" and len(node.specs) == 1 and living(node) == []


# --- two gateways on one database ---------------------------------------------


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEASE_S", 2.5)
    monkeypatch.setattr(service, "RENEW_S", 0.1)
    monkeypatch.setattr(service, "LOOK_S", 0.1)


async def two_gateways(directory: Path, node: FakeNode) -> list[Services]:
    servers: list[Services] = []
    for name in ("one", "two"):
        own = directory / name
        own.mkdir()
        for first in servers[:1]:
            # They know the same tokens and keys.
            for file in ("secret", "api-key"):
                shutil.copy(first.config.state_path / file, own / file)
        url = f"sqlite:///{directory}/shared.db"
        servers.append(await Services.start(Config(state_dir=str(own), database_url=url), node))
    return servers


@pytest.mark.usefixtures("short_leases")
async def test_another_gateway_ends_what_is_being_started(tmp_path: Path, node: FakeNode) -> None:
    one, two = await two_gateways(tmp_path, node)
    try:
        node.gate = asyncio.Event()
        view = await one.groups.create(await first_caller(one), web_and_db())
        async with asyncio.timeout(5):
            await node.admitted.wait()
        other = await first_caller(two)
        assert (await two.groups.kill(other, view.group.group_id)).state == "ending"
        node.gate.set()
        view = await waited(two, other, view, "ended")
        assert view.state == "ended" and living(node) == []
        # One that runs belongs to nobody.
        node.gate = None
        view = await waited(
            one, await first_caller(one), await one.groups.create(other, web_and_db())
        )
        await two.groups.kill(other, view.group.group_id)
        assert (await waited(two, other, view, "ended")).state == "ended"
        assert living(node) == []
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.usefixtures("short_leases")
async def test_another_gateway_finishes_the_start(tmp_path: Path, node: FakeNode) -> None:
    one, two = await two_gateways(tmp_path, node)
    try:
        spec = GroupSpec(services={"db": run(healthcheck=well(start_period_s=60.0))})
        view = await one.groups.create(await first_caller(one), spec)
        other = await first_caller(two)

        async def there() -> bool:
            now = await two.groups.get(other, view.group.group_id)
            return now.members[0].member.state == "started"

        await until(there)
        await crash(one)
        node.contents[next(iter(node.specs))].disk["/ready"] = "yes"
        view = await waited(two, other, view)
        assert view.state == "running" and len(node.specs) == 1 and len(node.begun) == 1
    finally:
        await two.stop()


@pytest.mark.usefixtures("short_leases")
async def test_another_gateway_waits_for_a_create_that_it_did_not_begin(
    tmp_path: Path, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creates, "FOREIGN_ATTEMPT_S", 1.0)
    monkeypatch.setattr(program, "RETRY_S", 0.1)
    one, two = await two_gateways(tmp_path, node)
    try:
        node.gate = asyncio.Event()
        view = await one.groups.create(await first_caller(one), web_and_db())
        async with asyncio.timeout(5):
            await node.admitted.wait()
        await crash(one)
        node.gate.set()
        view = await waited(two, await first_caller(two), view)
        assert view.state == "running"
        assert len(node.specs) == len(living(node)) == 2
    finally:
        await two.stop()


async def test_a_store_that_is_away_for_a_while(services: Services, caller: Caller) -> None:
    check = well(start_period_s=60.0)
    spec = GroupSpec(services={"db": run(healthcheck=check)})
    view = await services.groups.create(caller, spec)

    async def failed_once() -> bool:
        now = await services.groups.get(caller, view.group.group_id)
        return now.members[0].member.message is not None

    await until(failed_once)
    record = (await services.groups.get(caller, view.group.group_id)).members[0].record
    assert record is not None
    with broken_store(services):
        node = services.fleet
        await node.exec(record.sandbox_id, ("write /ready yes",), timeout_s=1).__anext__()
        await asyncio.sleep(0.3)
    assert (await waited(services, caller, view)).state == "running"
