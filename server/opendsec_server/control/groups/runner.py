# SPDX-License-Identifier: AGPL-3.0-only
"""Brings one group up, or takes it down, from its rows: also one that another process began.

Every step can be done again: sandboxes are made under idempotency keys, programs are started under
tags, and what is left of a group is found by both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from opendsec_server.contract.errors import (
    GroupUnhealthy,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    Internal,
    NodeFull,
    NodeUnavailable,
    OpendsecError,
    SandboxNotFound,
    StartTimeout,
    StateConflict,
    StoreUnavailable,
)
from opendsec_server.contract.states import EndReason
from opendsec_server.control.creates import Created, Creates
from opendsec_server.control.iam import Caller
from opendsec_server.control.ledger import Ledger
from opendsec_server.control.lifecycle import Lifecycle
from opendsec_server.control.nodes import Fleet
from opendsec_server.control.origins import Origins
from opendsec_server.control.placement import Need
from opendsec_server.store import groups as rows
from opendsec_server.store.accounts import get_project
from opendsec_server.store.groups import Group, GroupEnd
from opendsec_server.store.records import SandboxRecord
from opendsec_server.store.sandboxes import get_sandbox, get_sandboxes
from opendsec_server.store.store import Store

from . import program
from .model import GroupSpec, ServiceSpec, params_of

log = structlog.get_logger(__name__)

GROUP_KEEPER = "groups"
"""In place of a key's id: the server itself makes a member."""
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0
_spec = msgspec.json.Decoder(GroupSpec)
_ENDS: dict[GroupEnd, EndReason] = {"timeout": EndReason.TIMEOUT}
"""Why its sandboxes end, if not because they are killed."""


class Tools(msgspec.Struct, kw_only=True, frozen=True):
    """What bringing up and taking down need."""

    store: Store
    fleet: Fleet
    creates: Creates
    origins: Origins
    lifecycle: Lifecycle
    ledger: Ledger


class _Progress:
    """What others wait for."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.healthy = asyncio.Event()
        self.completed = asyncio.Event()


class _Watches:
    """Looks after programs, while the group is being started."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the first error."""
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, watch: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(watch, name="group-watch")
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        exc = task.exception()
        if exc is not None and not self.failed.done():
            self.failed.set_exception(exc)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done():
            # Taken here, or asyncio complains when something else failed first.
            self.failed.exception()
        else:
            self.failed.cancel()


class Runner:
    """One group, while this process works on it."""

    def __init__(self, tools: Tools, group: Group) -> None:
        self._tools = tools
        self._store = tools.store
        self._group = group
        self._spec = _spec.decode(group.spec)
        self._progress = {name: _Progress() for name in self._spec.services}
        self._making: dict[str, asyncio.Task[Created]] = {}
        self._waits_for: dict[str, str] = {}

    # --- up -----------------------------------------------------------------

    async def bring_up(self) -> None:
        """Start every service in its turn. Returns when all of them are up.

        Raises:
            OpendsecError: one is not. What was made is still there.
        """
        left_s = self._group.created_at + self._spec.start_timeout_s - time.time()
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                await self._bring_up()
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> OpendsecError:
        waits = dict(sorted(self._waits_for.items()))
        said = f"the group was not up within {self._spec.start_timeout_s} s"
        if not waits:
            return StartTimeout(said)
        named = "; ".join(f"`{name}` {what}" for name, what in waits.items())
        return GroupUnhealthy(f"{said}: {named}", details={"services": waits})

    async def _bring_up(self) -> None:
        project = await get_project(self._store, self._group.project_id)
        if project is None or project.closed_at is not None:
            raise StateConflict("the project of the group was closed")
        caller = Caller(project=project, key_id=GROUP_KEEPER)
        node_id = self._group.node_id
        if node_id is None:
            node_id = await self._choose(caller)
            await rows.set_node(self._store, self._group.group_id, node_id)
        watches = _Watches()
        services = {
            asyncio.create_task(self._service(caller, name, node_id, watches), name=f"group-{name}")
            for name in self._spec.services
        }
        try:
            todo = set(services)
            while todo:
                done, _ = await asyncio.wait(
                    {*todo, watches.failed}, return_when=asyncio.FIRST_COMPLETED
                )
                for one in done:
                    one.result()
                todo -= done
            await self._check_living()
        finally:
            for task in services:
                task.cancel()
            await asyncio.gather(*services, return_exceptions=True)
            await watches.stop()

    async def _choose(self, caller: Caller) -> str:
        """The node for all of them together."""
        cpu, memory_mb, disk_mb = 0.0, 0, 0
        only: frozenset[str] | None = None
        backends = []
        image: str | None = None
        for name in self._spec.services:
            params = params_of(self._spec, self._group.group_id, name)
            try:
                async with self._tools.origins.using(caller, params) as origin:
                    record = self._tools.creates.record_for(caller, params, origin)
                    can = self._tools.fleet.images.only_on(record.image or "")
                    if origin.node_id is not None:
                        can = frozenset((origin.node_id,))
            except OpendsecError as exc:
                raise _of_service(exc, name) from exc
            cpu += record.cpu
            memory_mb += record.memory_mb
            disk_mb += record.disk_mb
            backends.append(record.backend)
            image = image or record.image
            if can is not None:
                only = can if only is None else only & can
        if only is not None and not only:
            raise NodeFull(
                "no node has the snapshots and images of all services of the group",
                remediation="Use templates or images that one node can have together.",
            )
        return self._tools.fleet.choose(
            Need(
                backend=backends[0],
                cpu=cpu,
                memory_mb=memory_mb,
                disk_mb=disk_mb,
                image=image,
                only=only,
                task_id=self._spec.task_id,
            )
        ).node_id

    async def _service(self, caller: Caller, name: str, node_id: str, watches: _Watches) -> None:
        service = self._spec.services[name]
        for other, condition in service.depends_on.items():
            self._waits_for[name] = f"waits until `{other}` is {condition}"
            await getattr(self._progress[other], condition).wait()
        self._waits_for[name] = "is being started"
        try:
            record = await self._make(caller, name, node_id)
            await self._run(name, service, record, watches)
        except OpendsecError as exc:
            raise await self._failed(name, exc) from exc
        self._waits_for.pop(name, None)

    async def _make(self, caller: Caller, name: str, node_id: str) -> SandboxRecord:
        await self._note(name, state="starting")
        params = params_of(self._spec, self._group.group_id, name, node_id)
        key = rows.member_key(self._group.group_id, name)
        over_at = time.monotonic() + program.PATIENCE_S
        while True:
            # It goes on when this process gives the group up, and is waited for then.
            task = asyncio.create_task(self._tools.creates.create(caller, params, key=key))
            self._making[name] = task
            try:
                record = (await asyncio.shield(task)).record
                break
            except (IdempotencyInProgress, IdempotencyOutcomeUnknown, StoreUnavailable) as exc:
                # Of a process before this one, or not known at the moment. The key finds it again.
                log.info("member not made yet", service=name, why=exc.message)
            except NodeUnavailable:
                if time.monotonic() >= over_at:
                    raise
            await asyncio.sleep(program.RETRY_S)
        await self._note(name, sandbox_id=record.sandbox_id)
        return record

    async def _run(
        self,
        name: str,
        service: ServiceSpec,
        record: SandboxRecord,
        watches: _Watches,
    ) -> None:
        progress, sandbox_id = self._progress[name], record.sandbox_id
        argv = await program.argv_of(self._tools.fleet, service, record)
        if argv:
            await program.start(self._tools.fleet, sandbox_id, self._group.group_id, argv, service)
        await self._note(name, state="started")
        progress.started.set()
        if argv:
            watches.add(self._watch(name, sandbox_id))
        if service.healthcheck is not None:
            self._waits_for[name] = "is not healthy yet"
            await self._until_healthy(name, service, record)
            return
        if any(other.depends_on.get(name) == "completed" for other in self._spec.services.values()):
            self._waits_for[name] = "has not completed yet"
            await progress.completed.wait()

    async def _until_healthy(self, name: str, service: ServiceSpec, record: SandboxRecord) -> None:
        assert service.healthcheck is not None

        async def note(text: str) -> None:
            await self._note(name, message=text)

        await program.until_healthy(
            self._tools.fleet,
            record.sandbox_id,
            service,
            service.healthcheck,
            record.started_at or record.created_at,
            note,
        )
        await self._note(name, state="healthy", message=None)
        self._progress[name].healthy.set()

    async def _watch(self, name: str, sandbox_id: str) -> None:
        """Its program, until it ends or the group is up."""
        try:
            ended = await program.end_of(self._tools.fleet, sandbox_id, self._group.group_id)
            healthy = self._progress[name].healthy.is_set()
            awaited = self._spec.services[name].healthcheck is not None and not healthy
            if ended.exit_code != 0 or awaited:
                raise program.failure_of(ended)
            if not healthy:
                await self._note(name, state="completed")
            self._progress[name].completed.set()
        except OpendsecError as exc:
            raise await self._failed(name, exc, sandbox_id) from exc

    async def _check_living(self) -> None:
        members = await rows.members_of(self._store, self._group.group_id)
        records = await get_sandboxes(self._store, [m.sandbox_id for m in members if m.sandbox_id])
        for member in members:
            record = records.get(member.sandbox_id or "")
            if record is None or record.terminal:
                gone = SandboxNotFound("its sandbox has ended")
                raise await self._failed(member.name, gone, member.sandbox_id)

    async def _failed(
        self, name: str, exc: OpendsecError, sandbox_id: str | None = None
    ) -> OpendsecError:
        """The error, told of the service."""
        if sandbox_id is None:
            task = self._making.get(name)
            if task is not None and task.done() and not task.cancelled() and not task.exception():
                sandbox_id = task.result().record.sandbox_id
        if sandbox_id is not None and isinstance(exc, SandboxNotFound | StateConflict):
            exc = await program.why_gone(self._store, sandbox_id)
        error = _of_service(exc, name, sandbox_id)
        await self._note(name, state="failed", message=error.message)
        return error

    async def _note(self, name: str, **values: Any) -> None:
        while True:
            try:
                await rows.set_member(self._store, self._group.group_id, name, **values)
                return
            except StoreUnavailable as exc:
                # Until the group's time to start is over.
                log.warning("group waits for the store", why=exc.message)
                await asyncio.sleep(program.RETRY_S)

    # --- down ---------------------------------------------------------------

    async def take_down(self, reason: GroupEnd | None) -> None:
        """End every sandbox of it. Returns when none is left, however long its node is away."""
        pause_s = RETRY_FIRST_S
        while True:
            # What is not made yet cannot be ended yet: it is, as soon as it is there.
            making = [task for task in self._making.values() if not task.done()]
            left = await self._end_what_is_there(_ENDS.get(reason or "killed", EndReason.KILLED))
            if making:
                await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                continue
            if not left:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _end_what_is_there(self, reason: EndReason) -> int:
        """Returns how many may be left."""
        try:
            members = await rows.members_of(self._store, self._group.group_id)
            names = [member.sandbox_id for member in members if member.sandbox_id is not None]
            records = await get_sandboxes(self._store, names)
            living = [record for record in records.values() if not record.terminal]
            ends = await asyncio.gather(*(self._end_one(record, reason) for record in living))
        except StoreUnavailable as exc:
            log.warning("group not ended yet", group_id=self._group.group_id, why=exc.message)
            return 1
        return ends.count(False)

    async def _end_one(self, record: SandboxRecord, reason: EndReason) -> bool:
        try:
            change = await self._tools.lifecycle.end_on_node(record, reason)
            await self._tools.ledger.apply([change])
        except OpendsecError as exc:
            log.warning("member not ended yet", sandbox_id=record.sandbox_id, why=exc.message)
            return False
        known = await get_sandbox(self._store, record.sandbox_id)
        return known is None or known.terminal

    def let_go(self) -> None:
        """Of creates under way; the next process finds them by their keys."""
        for task in self._making.values():
            task.cancel()


def _of_service(exc: OpendsecError, name: str, sandbox_id: str | None = None) -> OpendsecError:
    """The same error, told of a service."""
    exc.message = f"service `{name}`: {exc.message}"
    exc.details = {**exc.details, "service": name}
    if sandbox_id is not None:
        exc.details["sandbox_id"] = sandbox_id
    return exc


def end_of_error(exc: OpendsecError) -> GroupEnd:
    """Why a group ended whose start failed so."""
    return "unhealthy" if isinstance(exc, GroupUnhealthy) else "start_failed"


async def outcome_of(work: Coroutine[Any, Any, None], what: str) -> OpendsecError | None:
    """How a piece of work went. A defect is an error like others."""
    try:
        await work
    except OpendsecError as exc:
        return exc
    except Exception:
        log.exception("group", what=what)
        return Internal(f"the group could not be {what} because of a defect")
    return None
