# SPDX-License-Identifier: AGPL-3.0-only
"""Groups as their callers see them, and which process works on which.

A group that is being started or ended belongs to one process at a time, by a lease in the store.
When that process dies, its successor, or another one, goes on: a start is finished, an end too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal

import msgspec
import structlog

from opendsec_server.contract.actions import KeptProgram
from opendsec_server.contract.errors import (
    AlreadyPaused,
    GroupNotFound,
    GroupServiceNotFound,
    GroupStateConflict,
    OpendsecError,
    SandboxNotFound,
    StoreUnavailable,
)
from opendsec_server.contract.ids import GROUP_ID_RE, new_group_id, random_chars
from opendsec_server.contract.limits import ENDED_RECORDS_KEPT_S
from opendsec_server.contract.states import State
from opendsec_server.control.iam import Caller
from opendsec_server.store import groups as rows
from opendsec_server.store.groups import Group, GroupEnd, GroupState, Member
from opendsec_server.store.records import IdempotencyClaim, SandboxRecord
from opendsec_server.store.sandboxes import get_sandboxes
from opendsec_server.store.store import Store

from . import program
from .model import GroupSpec, ServiceSpec, check_group
from .runner import Runner, Tools, end_of_error, outcome_of

log = structlog.get_logger(__name__)

LEASE_S = 15.0
RENEW_S = 2.0
LOOK_S = 1.0
"""How often groups are looked for that nobody works on, or whose time is over."""
LOOK_AT_MEMBERS_S = 3.0
PRUNE_S = 3_600.0
WAIT_LOOK_S = 0.5
PROGRAM_WAIT_S = 3.0
"""How long a guest agent may take to say how a service's program is."""

WaitFor = Literal["running", "ended"]
Shown = Literal["starting", "running", "degraded", "paused", "ending", "ended"]
_spec = msgspec.json.Decoder(GroupSpec)
_STARTING: tuple[GroupState, ...] = ("starting",)
_RUNNING: tuple[GroupState, ...] = ("running",)
_PAUSED: tuple[GroupState, ...] = ("paused",)
_ENDING: tuple[GroupState, ...] = ("ending",)


class MemberView(msgspec.Struct, kw_only=True, frozen=True):
    """One service of a group, with its sandbox."""

    member: Member
    service: ServiceSpec
    record: SandboxRecord | None = None
    """None: there is none yet, or its record is gone."""
    program: KeptProgram | None = None
    """How its program is now. None: it has none, or nobody says."""


class GroupView(msgspec.Struct, kw_only=True, frozen=True):
    """A group as it is now."""

    group: Group
    spec: GroupSpec
    state: Shown
    members: list[MemberView]


class Logs(msgspec.Struct, kw_only=True, frozen=True):
    """What a service's program has written so far."""

    program: KeptProgram | None
    """None: the service has no program of its own."""


class Groups:
    """Makes, finds, pauses, resumes and ends groups.

    Args:
        tools: What the work is done with.
        seat: Name of this process's place; its successor has the same.
    """

    def __init__(self, tools: Tools, seat: str) -> None:
        self._tools = tools
        self._store: Store = tools.store
        self._seat = f"{seat}:"
        self._owner = f"{seat}:{random_chars(12)}"
        self._running: dict[str, asyncio.Task[None]] = {}
        self._inner: dict[str, asyncio.Task[None]] = {}
        """Of those that are being started: what a kill cuts off."""
        self._keeping: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Go on with what was left half-way, and look after groups from now on."""
        with contextlib.suppress(StoreUnavailable):
            await self._claim(self._seat)
        self._keeping = asyncio.create_task(self._keep(), name="groups-keep")

    async def stop(self) -> None:
        """Let go. What is half-way goes on after the next start, or in another process."""
        self._stopped = True
        tasks = [*self._running.values()]
        if self._keeping is not None:
            tasks.append(self._keeping)
        for task in tasks:
            task.cancel()
        held = list(self._running)
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable):
            # Others need not wait for the end of the lease.
            for name in held:
                await rows.renew_group(self._store, name, self._owner, 0.0)

    # --- callers ------------------------------------------------------------

    async def create(self, caller: Caller, spec: GroupSpec, *, key: str | None = None) -> GroupView:
        """Ask for a group; returns when that is recorded. It is started by itself.

        Raises:
            InvalidRequest: it cannot be so. The message names the service.
            GroupExists: one of this name lives.
            IdempotencyMismatch: the key was used with other parameters.
            StoreUnavailable: nothing was asked for, or it is not known.
        """
        check_group(spec)
        now = time.time()
        group_id = new_group_id()
        group = Group(
            group_id=group_id,
            project_id=caller.project_id,
            name=spec.name or group_id,
            spec=msgspec.json.encode(spec).decode(),
            state="starting",
            created_at=now,
            end_at=now + spec.timeout_s,
            owner=self._owner,
            lease_until=now + LEASE_S,
        )
        members = [
            Member(group_id=group_id, name=name, position=position, state="waiting")
            for position, name in enumerate(spec.services)
        ]
        claim = None
        if key is not None:
            claim = IdempotencyClaim(key=key, params_sha256=spec.sha256())
        known_id = await rows.insert_group(self._store, group, members, claim)
        if known_id == group_id:
            log.info("group asked for", group_id=group_id, services=len(members))
            self._spawn(group)
        return await self.get(caller, known_id)

    async def get(self, caller: Caller, name: str) -> GroupView:
        """A group by id or name, with its sandboxes.

        Raises:
            GroupNotFound: not one of the caller's.
        """
        return await self._view(await self._find(caller, name))

    async def inspect(self, caller: Caller, name: str) -> GroupView:
        """The same, with how the services' programs are at this moment."""
        view = await self.get(caller, name)
        members = await asyncio.gather(*(self._with_program(one) for one in view.members))
        state = view.state
        if state == "running" and any(_is_broken(one) for one in members):
            state = "degraded"
        return msgspec.structs.replace(view, members=list(members), state=state)

    async def page(
        self,
        caller: Caller,
        *,
        states: Sequence[GroupState] = (),
        after: tuple[float, str] | None = None,
        limit: int,
    ) -> tuple[list[GroupView], bool]:
        """One page of the project's groups, newest first, and whether there is another."""
        found = await rows.list_groups(
            self._store, caller.project_id, states=states, after=after, limit=limit + 1
        )
        views = [await self._view(group) for group in found[:limit]]
        return views, len(found) > limit

    async def wait(
        self, caller: Caller, name: str, until: WaitFor, timeout_s: float
    ) -> AsyncIterator[tuple[GroupView, bool]]:
        """The group each time it changes, and whether it is as wished. The last one is so, or the
        time is over, or it has ended and never will be.

        Raises:
            GroupNotFound: not one of the caller's.
        """
        over_at = time.monotonic() + timeout_s
        group_id = (await self._find(caller, name)).group_id
        last = None
        while True:
            view = await self.get(caller, group_id)
            reached = view.state == "ended" or (
                until == "running" and view.group.ready_at is not None
            )
            over = reached or time.monotonic() >= over_at
            if over or view != last:
                yield view, reached
                last = view
            if over:
                return
            await asyncio.sleep(min(WAIT_LOOK_S, max(over_at - time.monotonic(), 0.01)))

    async def kill(self, caller: Caller, name: str) -> GroupView:
        """Begin to end a group, in whatever state. Idempotent.

        Raises:
            GroupNotFound: not one of the caller's.
        """
        group = await self._find(caller, name)
        await self._begin_end(group.group_id, "killed", None)
        return await self.get(caller, group.group_id)

    async def pause(self, caller: Caller, name: str) -> GroupView:
        """Pause every sandbox of a group, or none: what was paused is resumed if one cannot be.

        Raises:
            GroupNotFound: not one of the caller's.
            GroupStateConflict: it is being started or ended, or has ended.
            NotSupported, SnapshotFailed, …: of a sandbox that cannot be paused.
        """
        group = await self._in_state(caller, name, ("running", "paused"), "paused")
        records = await self._living(group)

        async def one(record: SandboxRecord) -> None:
            with contextlib.suppress(AlreadyPaused, SandboxNotFound):
                await self._tools.lifecycle.pause(caller, record.sandbox_id, "full")

        try:
            await _each(records, one)
        except OpendsecError:
            with contextlib.suppress(OpendsecError):
                await self._resume_all(group)
            raise
        moved = await rows.move_group(
            self._store, group.group_id, while_in=_RUNNING, state="paused"
        )
        return await self._view(moved or group)

    async def resume(self, caller: Caller, name: str) -> GroupView:
        """Let every sandbox of a group run on, with the group's whole time before it.

        Raises:
            GroupNotFound: not one of the caller's.
            GroupStateConflict: it is being started or ended, or has ended.
            QuotaExceeded, NodeFull, ResumeFailed, …: of a sandbox that stays paused; call again.
        """
        group = await self._in_state(caller, name, ("running", "paused"), "resumed")
        # Before its members', so that the group ends first and says why.
        end_at = time.time() + _spec.decode(group.spec).timeout_s
        await self._resume_all(group)
        moved = await rows.move_group(
            self._store, group.group_id, while_in=_PAUSED, state="running", end_at=end_at
        )
        return await self._view(moved or group)

    async def _resume_all(self, group: Group) -> None:
        timeout_s = float(_spec.decode(group.spec).timeout_s)

        async def one(record: SandboxRecord) -> None:
            with contextlib.suppress(SandboxNotFound):
                if record.state is not State.RUNNING:
                    await self._tools.lifecycle.resume(record, timeout_s)

        await _each(await self._living(group), one)

    async def logs(self, caller: Caller, name: str, service: str) -> Logs:
        """What a service's program has written, and how it is.

        Raises:
            GroupNotFound: not one of the caller's.
            GroupServiceNotFound: it has no such service.
            SandboxNotFound, StateConflict: its sandbox does not run now.
        """
        view = await self.get(caller, name)
        for one in view.members:
            if one.member.name == service:
                break
        else:
            raise GroupServiceNotFound(
                f"the group has no service `{service[:80]}`",
                details={"services": list(view.spec.services)},
            )
        if one.record is None:
            raise SandboxNotFound(f"service `{service}` has no sandbox yet")
        found = await self._tools.fleet.kept(
            one.record.sandbox_id, program.tag_of(view.group.group_id)
        )
        return Logs(program=None if found.state in ("missing", "void") else found)

    async def _find(self, caller: Caller, name: str) -> Group:
        group = None
        if GROUP_ID_RE.fullmatch(name):
            group = await rows.get_group(self._store, name)
        if group is None and "\0" not in name:
            group = await rows.find_group(self._store, caller.project_id, name)
        if group is None or group.project_id != caller.project_id:
            raise GroupNotFound(f"there is no group `{name[:80]}`")
        return group

    async def _in_state(
        self, caller: Caller, name: str, states: Sequence[GroupState], verb: str
    ) -> Group:
        group = await self._find(caller, name)
        if group.state not in states:
            raise GroupStateConflict(
                f"the group `{group.name}` is {group.state}, and cannot be {verb}",
                details={"state": group.state},
            )
        return group

    async def _living(self, group: Group) -> list[SandboxRecord]:
        view = await self._view(group)
        return [
            one.record for one in view.members if one.record is not None and not one.record.terminal
        ]

    async def _view(self, group: Group) -> GroupView:
        spec = _spec.decode(group.spec)
        members = await rows.members_of(self._store, group.group_id)
        names = [member.sandbox_id for member in members if member.sandbox_id is not None]
        records = await get_sandboxes(self._store, names)
        views = [
            MemberView(
                member=member,
                service=spec.services[member.name],
                record=records.get(member.sandbox_id or ""),
            )
            for member in members
        ]
        state: Shown = group.state
        if state == "running" and any(one.record is None or one.record.terminal for one in views):
            state = "degraded"
        # Who works on it is nobody's business, and no news.
        shown = msgspec.structs.replace(group, owner=None, lease_until=0.0)
        return GroupView(group=shown, spec=spec, state=state, members=views)

    async def _with_program(self, view: MemberView) -> MemberView:
        record = view.record
        if record is None or record.state is not State.RUNNING:
            return view
        try:
            async with asyncio.timeout(PROGRAM_WAIT_S):
                found = await self._tools.fleet.kept(
                    record.sandbox_id, program.tag_of(view.member.group_id)
                )
        except (OpendsecError, TimeoutError):
            return view
        if found.state in ("missing", "void"):
            return view
        return msgspec.structs.replace(view, program=found)

    # --- working ------------------------------------------------------------

    async def _begin_end(
        self, group_id: str, reason: GroupEnd, error: OpendsecError | None
    ) -> None:
        """Record that a group is to end, and why. What was said first stays."""
        text = None if error is None else msgspec.json.encode(error.to_dict()).decode()
        group = await rows.move_group(
            self._store,
            group_id,
            while_in=("starting", "running", "paused"),
            state="ending",
            end_reason=reason,
            error=text,
        )
        if group is None or group.state != "ending":
            return
        inner = self._inner.get(group_id)
        if inner is not None:
            inner.cancel()
        elif group_id not in self._running and (
            group.owner in (None, self._owner) or group.lease_until <= time.time()
        ):
            await self._claim()

    def _spawn(self, group: Group) -> None:
        name = group.group_id
        if name in self._running or self._stopped:
            return
        task = asyncio.create_task(self._run(group), name=f"group-{name}")
        self._running[name] = task
        task.add_done_callback(lambda _: self._running.pop(name, None))

    async def _run(self, group: Group) -> None:
        """Work on a group until it runs, or has ended, or is another process's."""
        runner = Runner(self._tools, group)
        name = group.group_id
        renewing = asyncio.create_task(self._renew(name), name="group-renew")
        try:
            if group.state == "starting":
                inner = asyncio.create_task(self._bring_up(runner, group), name="group-bring-up")
                self._inner[name] = inner
                try:
                    await asyncio.wait({inner, renewing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._inner.pop(name, None)
                    inner.cancel()
                    await asyncio.gather(inner, return_exceptions=True)
            await self._to_the_end(runner, name, renewing)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            runner.let_go()

    async def _bring_up(self, runner: Runner, group: Group) -> None:
        error = await outcome_of(runner.bring_up(), "started")
        while True:
            try:
                if error is None:
                    moved = await rows.move_group(
                        self._store,
                        group.group_id,
                        while_in=_STARTING,
                        state="running",
                        ready_at=time.time(),
                        lease_until=0.0,
                    )
                    if moved is not None and moved.state == "running":
                        log.info("group is up", group_id=group.group_id)
                    return
                log.warning("group failed", group_id=group.group_id, why=error.message)
                text = msgspec.json.encode(error.to_dict()).decode()
                await rows.move_group(
                    self._store,
                    group.group_id,
                    while_in=_STARTING,
                    state="ending",
                    end_reason=end_of_error(error),
                    error=text,
                )
                return
            except StoreUnavailable as exc:
                log.warning("group waits for the store", why=exc.message)
                await asyncio.sleep(LOOK_S)

    async def _to_the_end(
        self, runner: Runner, group_id: str, renewing: asyncio.Task[Group | None]
    ) -> None:
        """End a group that is to end. Of one that another process has taken nothing is ended."""
        while True:
            try:
                group = await rows.get_group(self._store, group_id)
                if group is None or group.state != "ending" or group.owner != self._owner:
                    return
                await runner.take_down(group.end_reason)
                await rows.move_group(
                    self._store,
                    group_id,
                    while_in=_ENDING,
                    state="ended",
                    ended_at=time.time(),
                    lease_until=0.0,
                )
                log.info("group ended", group_id=group_id, reason=group.end_reason)
                return
            except StoreUnavailable as exc:
                log.warning("group waits for the store", why=exc.message)
                await asyncio.sleep(LOOK_S)

    async def _renew(self, group_id: str) -> Group | None:
        """Keeps the lease; ends when the group is to end, or is not ours any more."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(StoreUnavailable):
                group = await rows.renew_group(
                    self._store, group_id, self._owner, time.time() + LEASE_S
                )
                inner = self._inner.get(group_id)
                if inner is not None and (group is None or group.state != "starting"):
                    inner.cancel()

    # --- keeping ------------------------------------------------------------

    async def _keep(self) -> None:
        looked_at_members = pruned = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._claim()
                for group in await rows.groups_over(self._store, time.time()):
                    await self._begin_end(group.group_id, "timeout", None)
                now = time.monotonic()
                if now - looked_at_members >= LOOK_AT_MEMBERS_S:
                    looked_at_members = now
                    for group_id in await rows.groups_without_living(self._store):
                        await self._begin_end(group_id, "members_ended", None)
                if now - pruned >= PRUNE_S:
                    pruned = now
                    while await rows.prune_groups(self._store, time.time() - ENDED_RECORDS_KEPT_S):
                        pass
            except OpendsecError as exc:
                log.warning("groups not looked after", why=exc.message)
            except Exception:
                log.exception("groups not looked after")

    async def _claim(self, seat: str | None = None) -> None:
        now = time.time()
        for group in await rows.claim_groups(
            self._store,
            self._owner,
            held=tuple(self._running),
            now=now,
            lease_until=now + LEASE_S,
            seat=seat,
        ):
            log.info("group goes on", group_id=group.group_id, state=group.state)
            self._spawn(group)


def _is_broken(view: MemberView) -> bool:
    """Whether its program ended, and not well."""
    return (
        view.program is not None and view.program.state == "ended" and view.program.exit_code != 0
    )


async def _each(
    records: Sequence[SandboxRecord], one: Callable[[SandboxRecord], Awaitable[None]]
) -> None:
    """Do it to all of them side by side; the first failure is raised when all are done."""
    outcomes = await asyncio.gather(*(one(record) for record in records), return_exceptions=True)
    for record, outcome in zip(records, outcomes, strict=True):
        if isinstance(outcome, OpendsecError):
            group = record.extra.group
            outcome.details = {
                **outcome.details,
                "sandbox_id": record.sandbox_id,
                "service": None if group is None else group.name,
            }
            raise outcome
        if isinstance(outcome, BaseException):
            raise outcome
