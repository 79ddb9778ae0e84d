# SPDX-License-Identifier: AGPL-3.0-only
"""Creating exactly once, whatever happens in between."""

from __future__ import annotations

import asyncio

import pytest

from opendsec_server.config import Config
from opendsec_server.contract.errors import (
    IdempotencyInProgress,
    IdempotencyMismatch,
    IdempotencyOutcomeUnknown,
    ImageNotFound,
    Internal,
    InvalidRequest,
    NodeFull,
    NodeUnavailable,
    NotSupported,
    OpendsecError,
    QuotaExceeded,
    RegistryLimited,
    RegistryUnavailable,
    SandboxStartFailed,
    StartTimeout,
    StateConflict,
    StoreUnavailable,
    TemplateNotFound,
)
from opendsec_server.contract.node import NetworkPolicy
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.iam import Caller
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
from opendsec_server.store.sandboxes import SandboxFilter

from .conftest import first_caller
from .fake_node import FakeNode
from .store_faults import broken_store

PARAMS = CreateParams(metadata={"run": "1"})


async def test_create_records_and_passes_everything_on(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    params = CreateParams(
        cpu=1.5,
        memory_mb=256,
        env={"A": "b"},
        timeout_s=60,
        idle_timeout_s=5,
        network=NetworkPolicy(internet=False, allow=("203.0.113.1",)),
    )
    record = (await services.creates.create(caller, params)).record
    spec = node.specs[record.sandbox_id]
    assert record.state is State.RUNNING
    assert record.started_at is not None
    assert (spec.cpu, spec.memory_mb, spec.disk_mb) == (1.5, 256, 10_240)
    assert (spec.env, spec.idle_timeout_s, spec.network) == ({"A": "b"}, 5, params.network)
    assert spec.end_at == pytest.approx(spec.created_at + 60)
    assert spec.image == "base"
    assert spec.access_token == services.mint.access(record.sandbox_id)
    assert len({spec.access_token, spec.traffic_token, spec.control_token}) == 3
    assert await services.lifecycle.get(caller, record.sandbox_id) == record
    _, kept = await services.lifecycle.transitions(caller, record.sandbox_id)
    assert [(t.from_state, t.to_state) for t in kept] == [
        (State.PENDING, State.STARTING),
        (State.STARTING, State.RUNNING),
    ]


async def test_same_key_same_sandbox(services: Services, node: FakeNode, caller: Caller) -> None:
    first = await services.creates.create(caller, PARAMS, key="k")
    again = await services.creates.create(caller, PARAMS, key="k")
    assert (first.replayed, again.replayed) == (False, True)
    assert again.record == first.record
    with pytest.raises(IdempotencyMismatch):
        await services.creates.create(caller, CreateParams(cpu=1.0), key="k")
    await services.lifecycle.kill(caller, first.record.sandbox_id)
    ended = await services.creates.create(caller, PARAMS, key="k")
    assert ended.record.end_reason is EndReason.KILLED
    assert node.created == 1


async def test_concurrent_calls_join_or_are_told(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    calls = [
        asyncio.create_task(services.creates.create(caller, PARAMS, key="k")) for _ in range(5)
    ]
    await node.admitted.wait()
    with pytest.raises(IdempotencyInProgress):
        await services.creates.create(caller, PARAMS, key="k", join=False)
    with pytest.raises(IdempotencyMismatch):
        await services.creates.create(caller, CreateParams(cpu=1.0), key="k")
    node.gate.set()
    made = await asyncio.gather(*calls)
    assert len({created.record.sandbox_id for created in made}) == 1
    assert sorted(created.replayed for created in made) == [False, True, True, True, True]
    assert node.created == 1


async def test_create_goes_on_when_the_caller_goes_away(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    call = asyncio.create_task(services.creates.create(caller, PARAMS, key="k"))
    await node.admitted.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    node.gate.set()
    again = await services.creates.create(caller, PARAMS, key="k")
    assert again.replayed
    assert node.created == 1


@pytest.mark.parametrize(
    "failure", [NodeFull("full"), SandboxStartFailed("no"), TemplateNotFound("gone")]
)
async def test_failure_is_recorded_and_frees_the_key(
    services: Services, node: FakeNode, caller: Caller, failure: Exception
) -> None:
    node.fail_with = failure
    with pytest.raises(type(failure)):
        await services.creates.create(caller, PARAMS, key="k")
    node.fail_with = None
    created = await services.creates.create(caller, PARAMS, key="k")
    assert not created.replayed
    assert created.record.state is State.RUNNING


async def test_failed_record_says_why(services: Services, node: FakeNode, caller: Caller) -> None:
    node.fail_with = SandboxStartFailed("crun: exit status 1")
    with pytest.raises(SandboxStartFailed) as caught:
        await services.creates.create(caller, PARAMS)
    assert caught.value.fault == "platform"
    (record,) = (await services.lifecycle.page(everything(caller))).records
    assert (record.state, record.end_reason) == (State.FAILED, EndReason.START_FAILED)
    assert (record.message, record.fault) == ("crun: exit status 1", "platform")


async def test_kill_while_starting(services: Services, node: FakeNode, caller: Caller) -> None:
    node.gate = asyncio.Event()
    call = asyncio.create_task(services.creates.create(caller, PARAMS))
    await node.admitted.wait()
    (sandbox_id,) = node.specs
    record, was_alive = await services.lifecycle.kill(caller, sandbox_id)
    node.gate.set()
    with pytest.raises(StateConflict):
        await call
    assert was_alive
    assert (record.state, record.end_reason) == (State.ENDED, EndReason.KILLED)


async def test_quota(services: Services, caller: Caller) -> None:
    def limit(connection: object) -> None:
        connection.exec_driver_sql("UPDATE projects SET sandboxes_max = 2")  # type: ignore[attr-defined]

    await services.store.write(limit)
    results = await asyncio.gather(
        *(services.creates.create(caller, PARAMS) for _ in range(6)), return_exceptions=True
    )
    assert sum(isinstance(result, QuotaExceeded) for result in results) == 4


async def test_store_down_before_the_node_is_called(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    await services.creates.create(caller, PARAMS)
    with broken_store(services), pytest.raises(StoreUnavailable) as caught:
        await services.creates.create(caller, PARAMS, key="k")
    assert caught.value.retryable
    assert node.created == 1
    await services.creates.create(caller, PARAMS, key="k")


async def test_store_down_after_the_node_was_called(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.gate = asyncio.Event()
    call = asyncio.create_task(services.creates.create(caller, PARAMS, key="k"))
    await node.admitted.wait()
    with broken_store(services):
        node.gate.set()
        created = await call
    assert created.record.state is State.RUNNING
    again = await services.creates.create(caller, PARAMS, key="k")
    assert again.record.sandbox_id == created.record.sandbox_id
    assert again.record.state is State.RUNNING
    assert node.created == 1


async def test_answer_lost_on_the_way(services: Services, node: FakeNode, caller: Caller) -> None:
    node.fail_after = NodeUnavailable("the connection broke")
    with pytest.raises(NodeUnavailable):
        await services.creates.create(caller, PARAMS, key="k")
    node.fail_after = None
    created = await services.creates.create(caller, PARAMS, key="k")
    assert created.replayed
    assert created.record.state is State.RUNNING
    assert node.created == 1


async def test_unknown_outcome_is_settled_later(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.unreachable = NodeUnavailable("away")
    with pytest.raises(NodeUnavailable):
        await services.creates.create(caller, PARAMS, key="k")
    with pytest.raises(IdempotencyOutcomeUnknown):
        await services.creates.create(caller, PARAMS, key="k")
    node.unreachable = None
    created = await services.creates.create(caller, PARAMS, key="k")
    assert not created.replayed
    assert created.record.state is State.RUNNING
    assert node.created == 1


async def test_defect_of_the_node_is_typed(
    services: Services, node: FakeNode, caller: Caller
) -> None:
    node.fail_with = RuntimeError("bug")
    with pytest.raises(Internal):
        await services.creates.create(caller, PARAMS, key="k")
    node.fail_with = None
    created = await services.creates.create(caller, PARAMS, key="k")
    assert created.record.state is State.RUNNING


@pytest.mark.parametrize("reached_node", [False, True])
async def test_restart_in_the_middle(config: Config, node: FakeNode, reached_node: bool) -> None:
    services = await Services.start(config, node)
    caller = await first_caller(services)
    node.gate = asyncio.Event()
    call = asyncio.create_task(services.creates.create(caller, PARAMS, key="k"))
    await node.admitted.wait()
    # The daemon dies without a word: nothing is finished, nothing is undone.
    for task in list(services.creates.attempts.tasks):
        task.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await services.watcher.stop()
    await services.store.close()
    node.gate = None
    (sandbox_id,) = node.specs
    if not reached_node:
        node.forget(sandbox_id)
    services = await Services.start(config, node)
    caller = await first_caller(services)
    record = await services.lifecycle.get(caller, sandbox_id)
    created = await services.creates.create(caller, PARAMS, key="k")
    if reached_node:
        assert record.state is State.RUNNING
        assert created.replayed
        assert created.record.sandbox_id == sandbox_id
    else:
        assert (record.state, record.fault) == (State.FAILED, "platform")
        assert not created.replayed
        assert created.record.sandbox_id != sandbox_id
    assert node.created == 1
    await services.stop()


REFUSED: list[tuple[CreateParams, type[Exception]]] = [
    (CreateParams(template="no-such"), TemplateNotFound),
    (CreateParams(template="base:v2"), TemplateNotFound),
    (CreateParams(template="Bad Name!"), InvalidRequest),
    (CreateParams(template=""), InvalidRequest),
    (CreateParams(template="x" * 10_000), InvalidRequest),
    (CreateParams(backend="microvm"), NotSupported),
    (CreateParams(pause_mode="filesystem", auto_resume=True), InvalidRequest),
    (CreateParams(timeout_s=10**9), InvalidRequest),
    (CreateParams(env={"": "x"}), InvalidRequest),
    (CreateParams(env={"A=B": "x"}), InvalidRequest),
    (CreateParams(env={"A": "x\0"}), InvalidRequest),
    (CreateParams(env={"A": "x" * 200_000}), InvalidRequest),
    (CreateParams(metadata={"k": "\0"}), InvalidRequest),
    (CreateParams(metadata={str(i): "" for i in range(65)}), InvalidRequest),
    (CreateParams(labels=["x"] * 65), InvalidRequest),
    (CreateParams(task_id=""), InvalidRequest),
    (CreateParams(network=NetworkPolicy(allow=("example.com",))), NotSupported),
    (CreateParams(network=NetworkPolicy(allow=("*.example.com",))), NotSupported),
    (CreateParams(network=NetworkPolicy(deny=("fe80::/10",))), NotSupported),
    (CreateParams(network=NetworkPolicy(deny=("300.1.1.1",))), InvalidRequest),
    (CreateParams(network=NetworkPolicy(deny=("10.0.0.0/40",))), InvalidRequest),
    (CreateParams(network=NetworkPolicy(allow=("1.1.1.1",) * 300)), InvalidRequest),
    (CreateParams(network=NetworkPolicy(https_ports=(49983,))), InvalidRequest),
    (CreateParams(network=NetworkPolicy(https_ports=(0,))), InvalidRequest),
    (CreateParams(network=NetworkPolicy(mask_request_host="a b\r\n")), InvalidRequest),
]


async def test_bad_parameters(
    services: Services, node: FakeNode, caller: Caller, subtests: pytest.Subtests
) -> None:
    for params, error in REFUSED:
        with subtests.test(params=str(params)[:80]), pytest.raises(error):
            await services.creates.create(caller, params)
    assert not node.specs


def everything(caller: Caller) -> SandboxFilter:
    return SandboxFilter(project_id=caller.project_id, limit=100)


class _StartCommandFailed(SandboxStartFailed):
    """As a node refines it."""

    fault = "user"
    retryable = False


@pytest.mark.parametrize(
    ("error", "reason", "fault"),
    [
        (SandboxStartFailed("no"), "start_failed", "platform"),
        (_StartCommandFailed("exit 7"), "start_failed", "user"),
        (StartTimeout("slow"), "start_timeout", "platform"),
        (NodeFull("full"), "no_room", "capacity"),
        (ImageNotFound("gone"), "image_pull", "user"),
        (RegistryLimited("slow down"), "image_pull", "capacity"),
        (RegistryUnavailable("away"), "image_pull", "platform"),
        (_StartCommandFailed("status 137", details={"oom_kills": 1}), "oom", "user"),
        (StateConflict("killed"), "killed", None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_a_record_says_why_it_did_not_start(
    services: Services,
    caller: Caller,
    node: FakeNode,
    error: OpendsecError,
    reason: str,
    fault: str | None,
) -> None:
    node.fail_with = error
    with pytest.raises(type(error)):
        await services.creates.create(caller, CreateParams(task_id="why"))
    view = await services.tasks.get(caller, "why")
    assert [(c.reason, c.fault, c.count) for c in view.counts] == [(reason, fault, 1)]
    wanted = SandboxFilter(project_id=caller.project_id, limit=9)
    [record] = (await services.lifecycle.page(wanted)).records
    assert error.message in (record.message or "")
