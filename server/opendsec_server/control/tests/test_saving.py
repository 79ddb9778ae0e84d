# SPDX-License-Identifier: AGPL-3.0-only
"""Snapshots and forks: what they keep, their names, exactly once, nothing left behind."""

from __future__ import annotations

import asyncio
import time

import pytest
import pytest_asyncio

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    Conflict,
    IdempotencyMismatch,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    QuotaExceeded,
    SandboxNotFound,
    SandboxStartFailed,
    SnapshotFailed,
    SnapshotNotFound,
    StateConflict,
    StoreUnavailable,
    TemplateNotFound,
)
from opendsec_server.contract.ids import is_snapshot_id
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.saving import ForkParams, Saved, SnapshotParams
from opendsec_server.control.services import Services
from opendsec_server.store import snapshots as rows
from opendsec_server.store.records import Snapshot
from opendsec_server.store.snapshots import SnapshotFilter

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store
from .test_lifecycle import make, other_caller, reached
from .test_pauses import limit

DISK = SnapshotParams(mode="filesystem")
FORK = ForkParams(mode="filesystem", count=3)


@pytest.fixture
def node() -> FakeNode:
    return FakeNode(microvm="tcg")


@pytest_asyncio.fixture
async def name(services: Services, node: FakeNode, caller: Caller) -> str:
    """A container with something on its disk and in its memory."""
    made = await make(services, caller, env={"E": "1"}, metadata={"m": "1"}, labels=["l"])
    node.contents[made].disk["file"] = node.contents[made].memory["process"] = "x"
    return made


@pytest_asyncio.fixture
async def vm(services: Services, node: FakeNode, caller: Caller) -> str:
    """The same as a microVM."""
    made = await make(services, caller, backend="microvm", metadata={"m": "1"}, cpu=1.0)
    node.contents[made].disk["file"] = node.contents[made].memory["process"] = "x"
    return made


async def listed(services: Services, caller: Caller, **wanted: object) -> list[Snapshot]:
    page = await services.snapshots.page(
        SnapshotFilter(project_id=caller.project_id, limit=100, **wanted)  # type: ignore[arg-type]
    )
    return page.snapshots


async def nothing_left(services: Services, node: FakeNode) -> None:
    """No row and no file of what is not finished or belongs to a fork."""
    unfinished = await rows.unfinished_snapshots(services.store, "n0de")
    # What was given up is remembered for a while, should the node come to hold it after all.
    assert [row for row in unfinished if row.state != "deleting"] == []
    assert not node.ephemeral
    assert set(node.saved) == await rows.ids_of_ready(services.store, "n0de")


# --- snapshots ------------------------------------------------------------------


async def test_snapshot_of_a_disk(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    assert is_snapshot_id(saved.snapshot_id)
    assert (saved.state, saved.backend, saved.mode) == ("ready", "container", "filesystem")
    assert (saved.source_id, saved.name, saved.disk_bytes) == (name, None, 4_096)
    assert node.statuses[name].state is State.RUNNING
    assert (await services.lifecycle.get(caller, name)).state is State.RUNNING
    assert await listed(services, caller) == [saved]
    node.contents[name].disk["file"] = "later"
    child = await make(services, caller, template=saved.snapshot_id)
    assert (node.contents[child].disk, node.contents[child].memory) == ({"file": "x"}, {})
    spec = node.specs[child]
    assert (spec.snapshot_id, spec.image, spec.env) == (saved.snapshot_id, "base", {})
    record = await services.lifecycle.get(caller, child)
    assert (record.template_id, record.snapshot_id) == (saved.snapshot_id,) * 2
    await nothing_left(services, node)


async def test_snapshot_with_memory(
    services: Services, node: FakeNode, caller: Caller, vm: str
) -> None:
    saved = (await services.saving.snapshot(caller, vm, SnapshotParams(name="warm"))).snapshot
    assert (saved.mode, saved.backend, saved.versions) == ("full", "microvm", {"vmm": "qemu 7.2"})
    child = await make(services, caller, template="warm")
    assert node.contents[child].memory == {"process": "x"}
    record = await services.lifecycle.get(caller, child)
    assert (record.backend, record.accelerator, record.vmm) == ("microvm", "tcg", "qemu 7.2")
    assert (record.cpu, record.template) == (1.0, "warm:default")
    for fields in ({"cpu": 4.0}, {"memory_mb": 64}, {"disk_mb": 99}, {"backend": "container"}):
        with pytest.raises(InvalidRequest):
            await make(services, caller, template="warm", **fields)
    assert await make(services, caller, template="warm", cpu=1.0, backend="microvm")
    # A chain: a snapshot of what was started from a snapshot, whose parent goes.
    deeper = (await services.saving.snapshot(caller, child, SnapshotParams())).snapshot
    await services.snapshots.delete(caller, "warm")
    grandchild = await make(services, caller, template=deeper.snapshot_id)
    assert node.contents[grandchild].memory == {"process": "x"}
    await nothing_left(services, node)


async def test_snapshot_of_a_paused_one(
    services: Services, node: FakeNode, caller: Caller, vm: str
) -> None:
    await services.lifecycle.pause(caller, vm, "full")
    assert (await services.saving.snapshot(caller, vm, SnapshotParams())).snapshot.mode == "full"
    assert node.statuses[vm].state is State.PAUSED
    await services.lifecycle.connect(caller, vm, 60)
    await services.lifecycle.pause(caller, vm, "filesystem")
    with pytest.raises(NotSupported):
        await services.saving.snapshot(caller, vm, SnapshotParams())
    await services.saving.snapshot(caller, vm, DISK)
    await nothing_left(services, node)


async def test_memory_of_containers_is_refused(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    for work in (
        services.saving.snapshot(caller, name, SnapshotParams()),
        services.saving.fork(caller, name, ForkParams()),
    ):
        with pytest.raises(NotSupported) as caught:
            await work
        assert "filesystem" in caught.value.remediation
    assert node.calls == []


async def test_names(services: Services, node: FakeNode, caller: Caller, name: str) -> None:
    async def take(text: str) -> Snapshot:
        params = SnapshotParams(mode="filesystem", name=text)
        return (await services.saving.snapshot(caller, name, params)).snapshot

    first, tagged = await take("model"), await take(f"{caller.project_id}/model:v2")
    get = services.snapshots.get
    for reference in ("model", "model:default", f"{caller.project_id}/model", first.snapshot_id):
        assert (await get(caller, reference)).snapshot_id == first.snapshot_id
    assert (await get(caller, f"{first.snapshot_id}:default")).snapshot_id == first.snapshot_id
    assert (await get(caller, "model:v2")).snapshot_id == tagged.snapshot_id
    second = await take("model")
    assert (await get(caller, "model")).snapshot_id == second.snapshot_id
    assert (await get(caller, first.snapshot_id)).name is None, "it lost its name, and is there"
    assert {s.snapshot_id for s in await listed(services, caller, name="model")} == {
        second.snapshot_id,
        tagged.snapshot_id,
    }
    assert len(await listed(services, caller, name="model", tag="v2")) == 1
    assert len(await listed(services, caller, source_id=name)) == 3
    assert await listed(services, caller, source_id="other") == []
    for bad in ("Model", "a b", "", "a:b:c", "x" * 200, "other/model", "a/b/c"):
        with pytest.raises(InvalidRequest):
            await take(bad)
    with pytest.raises(Conflict):
        await take("base")
    for missing in ("nope", "model:nope", "other/model", "s" + "0" * 19, "A B", "", "x" * 999):
        with pytest.raises(SnapshotNotFound):
            await get(caller, missing)


async def test_a_failed_snapshot_takes_no_name(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    params = SnapshotParams(mode="filesystem", name="model")
    first = (await services.saving.snapshot(caller, name, params)).snapshot
    for failure in (SnapshotFailed("disk full"), NodeFull("disk full"), StateConflict("ending")):
        node.fail["snapshot"] = failure
        with pytest.raises(type(failure)):
            await services.saving.snapshot(caller, name, params, key="k")
    del node.fail["snapshot"]
    assert (await services.snapshots.get(caller, "model")).snapshot_id == first.snapshot_id
    assert (await services.lifecycle.get(caller, name)).state is State.RUNNING
    await nothing_left(services, node)
    again = await services.saving.snapshot(caller, name, params, key="k")
    assert not again.replayed, "a failure frees the key"


async def test_foreign(services: Services, node: FakeNode, caller: Caller, name: str) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    foreign = await other_caller(services)
    with pytest.raises(SandboxNotFound):
        await services.saving.snapshot(foreign, name, DISK)
    with pytest.raises(SandboxNotFound):
        await services.saving.fork(foreign, name, FORK)
    for reference in (saved.snapshot_id, f"{caller.project_id}/{saved.snapshot_id}"):
        with pytest.raises(SnapshotNotFound):
            await services.snapshots.get(foreign, reference)
        with pytest.raises(SnapshotNotFound):
            await services.snapshots.delete(foreign, reference)
        with pytest.raises(TemplateNotFound):
            await services.creates.create(foreign, CreateParams(template=reference))
    assert await listed(services, foreign) == []
    assert await listed(services, caller) == [saved]


async def test_same_key_same_snapshot(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    calls = [services.saving.snapshot(caller, name, DISK, key="k") for _ in range(3)]
    answers = await asyncio.gather(*calls)
    assert len({answer.snapshot.snapshot_id for answer in answers}) == 1
    assert sorted(answer.replayed for answer in answers) == [False, True, True]
    later = await services.saving.snapshot(caller, name, DISK, key="k")
    assert later.snapshot == answers[0].snapshot
    other = await make(services, caller)
    for work in (
        services.saving.snapshot(caller, other, DISK, key="k"),
        services.saving.snapshot(
            caller, name, SnapshotParams(mode="filesystem", name="n"), key="k"
        ),
        services.saving.fork(caller, name, FORK, key="k"),
        services.creates.create(caller, CreateParams(), key="k"),
    ):
        with pytest.raises(IdempotencyMismatch):
            await work
    await services.snapshots.delete(caller, later.snapshot.snapshot_id)
    with pytest.raises(SnapshotNotFound):
        await services.saving.snapshot(caller, name, DISK, key="k")
    assert node.calls.count("snapshot") == 1


@pytest.mark.parametrize("key", ["k", None])
async def test_lost_answer_of_a_snapshot(
    services: Services, node: FakeNode, caller: Caller, name: str, key: str | None
) -> None:
    node.lose_answer["snapshot"] = NodeUnavailable("gone")
    with pytest.raises(NodeUnavailable):
        await services.saving.snapshot(caller, name, DISK, key=key)
    node.lose_answer = {}
    await services.watcher.reconcile()
    await nothing_left(services, node)
    assert len(node.saved) == (1 if key else 0), "kept only for a caller who can ask again"
    again = await services.saving.snapshot(caller, name, DISK, key=key)
    assert again.replayed == (key is not None)
    assert len(node.saved) == 1


async def test_repeating_before_it_was_settled(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    node.lose_answer["snapshot"] = NodeUnavailable("gone")
    with pytest.raises(NodeUnavailable):
        await services.saving.snapshot(caller, name, DISK, key="k")
    node.lose_answer = {}
    again = await services.saving.snapshot(caller, name, DISK, key="k")
    assert again.snapshot.state == "ready"
    assert list(node.saved) == [again.snapshot.snapshot_id]
    await nothing_left(services, node)


@pytest.mark.parametrize("settled_first", [True, False])
async def test_repeating_when_the_source_is_gone(
    services: Services, node: FakeNode, caller: Caller, name: str, settled_first: bool
) -> None:
    node.lose_answer["snapshot"] = NodeUnavailable("gone")
    with pytest.raises(NodeUnavailable):
        await services.saving.snapshot(caller, name, DISK, key="s")
    with pytest.raises(NodeUnavailable):
        await services.saving.fork(caller, name, FORK, key="f")
    node.lose_answer = {}
    before = await services.saving.fork(caller, name, FORK, key="f2")
    node.end(name, EndReason.OOM)
    await reached(services, caller, name, State.ENDED)
    if settled_first:
        await services.watcher.reconcile()
    with pytest.raises(SandboxNotFound):
        await services.saving.fork(caller, name, FORK, key="f")
    for key in (None, "other"):
        with pytest.raises(SandboxNotFound):
            await services.saving.snapshot(caller, name, DISK, key=key)
    saved = await services.saving.snapshot(caller, name, DISK, key="s")
    assert saved.replayed
    again = await services.saving.fork(caller, name, FORK, key="f2")
    assert [c.record and c.record.sandbox_id for c in again.children] == [
        c.record and c.record.sandbox_id for c in before.children
    ]
    await services.watcher.reconcile()
    await nothing_left(services, node)
    assert list(node.saved) == [saved.snapshot.snapshot_id]


async def test_defect_of_the_node(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    node.fail["snapshot"] = RuntimeError("bug")
    with pytest.raises(Exception, match="defect"):
        await services.saving.snapshot(caller, name, DISK)
    del node.fail["snapshot"]
    await services.watcher.reconcile()
    await nothing_left(services, node)


# --- deleting -------------------------------------------------------------------


async def test_delete_does_not_break_what_was_started_from_it(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    child = await make(services, caller, template=saved.snapshot_id)
    await services.snapshots.delete(caller, saved.snapshot_id)
    assert node.saved == {}
    assert (await services.lifecycle.get(caller, child)).state is State.RUNNING
    await services.lifecycle.pause(caller, child, "full")
    assert (await services.lifecycle.connect(caller, child, 60)).resumed
    with pytest.raises(TemplateNotFound):
        await make(services, caller, template=saved.snapshot_id)
    with pytest.raises(SnapshotNotFound):
        await services.snapshots.delete(caller, saved.snapshot_id)


async def test_delete_while_a_create_from_it_is_under_way(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    node.gate = asyncio.Event()
    node.admitted.clear()
    params = CreateParams(template=saved.snapshot_id)
    call = asyncio.create_task(services.creates.create(caller, params))
    await node.admitted.wait()
    await services.snapshots.delete(caller, saved.snapshot_id)
    with pytest.raises(TemplateNotFound):
        await services.creates.create(caller, params)
    await services.watcher.reconcile()
    assert saved.snapshot_id in node.saved, "it is still needed"
    node.gate.set()
    assert (await call).record.state is State.RUNNING
    for _ in range(200):
        await asyncio.sleep(0.005)
        if not node.saved:
            break
    await nothing_left(services, node)
    assert node.saved == {}


async def test_delete_that_the_node_does_not_hear(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    node.fail["delete_snapshot"] = NodeUnavailable("away")
    await services.snapshots.delete(caller, saved.snapshot_id)
    assert await listed(services, caller) == []
    node.fail = {}
    await services.watcher.reconcile()
    assert node.saved == {}
    await nothing_left(services, node)


async def test_snapshot_that_the_node_lost(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    saved = (await services.saving.snapshot(caller, name, DISK)).snapshot
    node.saved.clear()
    await services.watcher.reconcile()
    with pytest.raises(SnapshotNotFound):
        await make(services, caller, template=saved.snapshot_id)
    await services.snapshots.delete(caller, saved.snapshot_id)
    await nothing_left(services, node)


# --- forks ----------------------------------------------------------------------


async def test_fork(services: Services, node: FakeNode, caller: Caller, vm: str) -> None:
    forked = await services.saving.fork(caller, vm, ForkParams(count=3, timeout_s=77))
    assert node.statuses[vm].state is State.RUNNING
    assert len(forked.children) == 3
    for child in forked.children:
        record = child.record
        assert record is not None
        assert node.contents[record.sandbox_id].memory == {"process": "x"}
        assert (record.state, record.backend, record.metadata) == (
            State.RUNNING,
            "microvm",
            {"m": "1"},
        )
        assert record.end_at == pytest.approx(time.time() + 77, abs=5)
        assert (record.cpu, record.template) == (1.0, "base")
        spec = node.specs[record.sandbox_id]
        assert spec.access_token == services.mint.access(record.sandbox_id)
        assert (await services.lifecycle.get(caller, record.sandbox_id)) == record
    tokens = {node.specs[name].access_token for name in node.specs}
    assert len(tokens) == 4
    await nothing_left(services, node)
    assert await listed(services, caller) == []


async def test_fork_inherits_and_overrides(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    source = await make(
        services,
        caller,
        env={"E": "1"},
        labels=["l"],
        task_id="t",
        timeout_s=50,
        on_timeout="pause",
        auto_resume=True,
        idle_timeout_s=9,
    )
    params = ForkParams(mode="filesystem", metadata={"child": "1"}, labels=[])
    (child,) = (await services.saving.fork(caller, source, params)).children
    assert child.record is not None
    record = child.record
    assert (record.env, record.labels, record.metadata) == ({"E": "1"}, [], {"child": "1"})
    assert (record.task_id, record.on_timeout, record.auto_resume) == ("t", "pause", True)
    assert (record.timeout_s, record.idle_timeout_s) == (50, 9)
    # Fork of a fork, whose parent goes.
    name = record.sandbox_id
    node.contents[name].disk["depth"] = "1"
    for depth in range(2, 7):
        (deeper,) = (await services.saving.fork(caller, name, params)).children
        await services.lifecycle.kill(caller, name)
        assert deeper.record is not None
        name = deeper.record.sandbox_id
        assert node.contents[name].disk["depth"] == str(depth - 1)
        node.contents[name].disk["depth"] = str(depth)
    await nothing_left(services, node)


async def test_children_fail_by_themselves(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    node.fail_children = {1: SandboxStartFailed("no")}
    forked = await services.saving.fork(caller, name, FORK, key="k")
    assert [child.error is None for child in forked.children] == [True, False, True]
    again = await services.saving.fork(caller, name, FORK, key="k")
    assert again.replayed
    assert [c.record and c.record.sandbox_id for c in again.children] == [
        c.record and c.record.sandbox_id for c in forked.children
    ]
    error = again.children[1].error
    assert isinstance(error, SandboxStartFailed)
    assert error.message == "no"
    await nothing_left(services, node)
    await limit(services, 4)
    partial = await services.saving.fork(caller, name, FORK)
    assert sum(isinstance(child.error, QuotaExceeded) for child in partial.children) == 2
    await nothing_left(services, node)


async def test_a_fork_that_made_nothing_frees_its_key(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    node.fail_children = dict.fromkeys(range(3), NodeFull("full"))
    forked = await services.saving.fork(caller, name, FORK, key="k")
    assert all(isinstance(child.error, NodeFull) for child in forked.children)
    again = await services.saving.fork(caller, name, FORK, key="k")
    assert not again.replayed
    assert all(child.record for child in again.children)


async def test_problems_of_the_source_fail_the_whole_fork(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    before = len(node.specs)
    for failure in (SnapshotFailed("disk full"), NodeFull("full"), StateConflict("resuming")):
        node.fail["snapshot"] = failure
        with pytest.raises(type(failure)):
            await services.saving.fork(caller, name, FORK, key="k")
    del node.fail["snapshot"]
    assert len(node.specs) == before
    await nothing_left(services, node)
    for bad in (
        ForkParams(count=0),
        ForkParams(count=101),
        ForkParams(timeout_s=1e9),
        ForkParams(metadata={"a": "\0"}),
        ForkParams(labels=[""]),
    ):
        with pytest.raises(InvalidRequest):
            await services.saving.fork(caller, name, bad)


async def test_same_key_same_children(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    calls = [services.saving.fork(caller, name, FORK, key="k") for _ in range(3)]
    answers = await asyncio.gather(*calls)
    ids = {
        tuple(child.record.sandbox_id for child in answer.children if child.record)
        for answer in answers
    }
    assert len(ids) == 1
    assert node.created == 1 + 3
    with pytest.raises(IdempotencyMismatch):
        await services.saving.fork(caller, name, ForkParams(mode="filesystem"), key="k")
    await services.lifecycle.kill(caller, name)
    with pytest.raises(SandboxNotFound):
        await services.saving.fork(caller, name, FORK, key="k2")


async def test_fork_of_a_paused_one(
    services: Services, node: FakeNode, caller: Caller, vm: str
) -> None:
    await services.lifecycle.pause(caller, vm, "full")
    (child,) = (await services.saving.fork(caller, vm, ForkParams())).children
    assert child.record is not None
    assert node.contents[child.record.sandbox_id].memory == {"process": "x"}
    assert node.statuses[vm].state is State.PAUSED


async def test_store_breaks_in_the_middle(
    services: Services, node: FakeNode, caller: Caller, name: str
) -> None:
    """The node has saved the source; nothing of it can be recorded."""
    opened, there = asyncio.Event(), asyncio.Event()

    async def wait(_: str) -> None:
        there.set()
        await opened.wait()

    for work in (
        services.saving.fork(caller, name, FORK, key="f"),
        services.saving.snapshot(caller, name, DISK, key="s"),
    ):
        node.between = wait
        opened.clear()
        there.clear()
        call = asyncio.create_task(work)
        await there.wait()
        with broken_store(services):
            opened.set()
            with pytest.raises(StoreUnavailable):
                await call
        node.between = None
    await services.watcher.reconcile()
    await nothing_left(services, node)
    forked = await services.saving.fork(caller, name, FORK, key="f")
    assert all(child.record for child in forked.children)
    assert node.created == 1 + 3
    saved = await services.saving.snapshot(caller, name, DISK, key="s")
    assert list(node.saved) == [saved.snapshot.snapshot_id]


@pytest.mark.parametrize("moment", ["snapshot", "children"])
@pytest.mark.parametrize("replayed_first", [True, False])
async def test_crash_in_the_middle_of_a_fork(
    config: Config, node: FakeNode, moment: str, replayed_first: bool
) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    source = await make(services, caller)
    there, never = asyncio.Event(), asyncio.Event()

    async def stuck(_: str) -> None:
        there.set()
        await never.wait()

    if moment == "snapshot":
        node.between = stuck
    else:
        node.gate = asyncio.Event()
        node.admitted.clear()
    call = asyncio.create_task(services.saving.fork(caller, source, FORK, key="k"))
    await (there if moment == "snapshot" else node.admitted).wait()
    await asyncio.sleep(0.05)
    tasks = [*services.saving._forks.tasks, call]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await services.watcher.stop()
    await services.store.close()
    # The node lives on, and finishes what it had begun.
    never.set()
    node.between = node.gate = None
    await node.settled()
    if replayed_first:
        node.unreachable = NodeUnavailable("starting")
        node.info, info = _info_of(node), node.info  # type: ignore[method-assign]
    services = await Services.start(config, node)
    if replayed_first:
        node.unreachable, node.info = None, info  # type: ignore[method-assign]
    caller = await first_caller(services)
    forked = await services.saving.fork(caller, source, FORK, key="k")
    await services.watcher.reconcile()
    again = await services.saving.fork(caller, source, FORK, key="k")
    ids = [child.record.sandbox_id for child in forked.children if child.record]
    assert [child.record.sandbox_id for child in again.children if child.record] == ids
    live = {s.sandbox_id for s in node.statuses.values() if s.state is State.RUNNING}
    assert live == {source, *ids}, "an orphan runs, or a child is missing"
    assert forked.replayed == (moment == "children")
    await nothing_left(services, node)
    await services.stop()


def _info_of(node: FakeNode):  # type: ignore[no-untyped-def]
    healthy = type(node).info

    async def info():  # type: ignore[no-untyped-def]
        unreachable, node.unreachable = node.unreachable, None
        try:
            return await healthy(node)
        finally:
            node.unreachable = unreachable

    return info


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("operation", ["snapshot", "fork"])
async def test_node_goes_on_after_a_crash(
    config: Config,
    node: FakeNode,
    key: str | None,
    operation: str,
) -> None:
    """The control plane is back before the node has finished what nobody waits for any more."""
    services = await Services.start(config, node)
    caller = await first_caller(services)
    source = await make(services, caller)
    there, done = asyncio.Event(), asyncio.Event()

    async def stuck(_: str) -> None:
        there.set()
        await done.wait()

    node.between = stuck
    work = (
        services.saving.fork(caller, source, FORK, key=key)
        if operation == "fork"
        else services.saving.snapshot(caller, source, DISK, key=key)
    )
    call = asyncio.create_task(work)
    await there.wait()
    tasks = [*services.saving._saves.tasks, *services.saving._forks.tasks, call]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await services.watcher.stop()
    await services.store.close()
    node.between = None
    services = await Services.start(config, node)
    caller = await first_caller(services)
    await services.watcher.reconcile()
    done.set()
    await node.settled()
    assert node.saved
    await services.watcher.reconcile()
    assert node.saved == {}
    assert await rows.unfinished_snapshots(services.store, "n0de") == []
    if operation == "snapshot":
        saved = await services.saving.snapshot(caller, source, DISK, key=key)
        assert not saved.replayed
    await services.stop()


async def test_what_never_came_is_forgotten(
    services: Services,
    node: FakeNode,
    caller: Caller,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node.fail["snapshot"] = RuntimeError("bug")
    with pytest.raises(Exception, match="defect"):
        await services.saving.snapshot(caller, name, DISK)
    await services.watcher.reconcile()
    assert len(await rows.unfinished_snapshots(services.store, "n0de")) == 1
    monkeypatch.setattr("opendsec_server.control.snapshots.HALF_MADE_KEPT_S", -1.0)
    await services.watcher.reconcile()
    assert await rows.unfinished_snapshots(services.store, "n0de") == []


async def test_crash_in_the_middle_of_a_snapshot(config: Config, node: FakeNode) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    source = await make(services, caller)
    there, never = asyncio.Event(), asyncio.Event()

    async def stuck(_: str) -> None:
        there.set()
        await never.wait()

    node.between = stuck
    call = asyncio.create_task(services.saving.snapshot(caller, source, DISK, key="k"))
    await there.wait()
    tasks: list[asyncio.Task[Saved]] = [*services.saving._saves.tasks, call]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await services.watcher.stop()
    await services.store.close()
    node.between = None
    never.set()
    await node.settled()
    services = await Services.start(config, node)
    caller = await first_caller(services)
    await nothing_left(services, node)
    saved = await services.saving.snapshot(caller, source, DISK, key="k")
    assert saved.replayed
    assert list(node.saved) == [saved.snapshot.snapshot_id]
    await services.stop()


# --- backends -------------------------------------------------------------------


async def test_default_backend(config: Config, node: FakeNode) -> None:
    import msgspec

    for microvm, wish, wanted in (
        ("kvm", "auto", "microvm"),
        ("tcg", "auto", "container"),
        (None, "auto", "container"),
        ("tcg", "microvm", "microvm"),
        ("kvm", "container", "container"),
    ):
        fake = FakeNode(microvm=microvm)  # type: ignore[arg-type]
        changed = msgspec.structs.replace(config, default_backend=wish)
        services = await Services.start(changed, fake)
        caller = await first_caller(services)
        name = await make(services, caller)
        assert (await services.lifecycle.get(caller, name)).backend == wanted
        assert fake.specs[name].backend == wanted
        await services.lifecycle.kill(caller, name)
        await services.stop()
    lacking = msgspec.structs.replace(config, default_backend="vm")
    services = await Services.start(lacking, FakeNode())
    caller = await first_caller(services)
    with pytest.raises(NotSupported):
        await make(services, caller)
    assert await make(services, caller, backend="container")
    await services.stop()
