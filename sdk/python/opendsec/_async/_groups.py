# SPDX-License-Identifier: Apache-2.0
"""Groups: several sandboxes on one private network, started and ended as one."""

from __future__ import annotations

import builtins
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from opendsec import _limits
from opendsec._answers import from_native
from opendsec._errors import GroupStateConflict, InvalidRequest, OpendsecError
from opendsec._group_models import GroupInfo, GroupState, GroupWait, ServiceInfo, ServiceLogs
from opendsec._retry import Patience

from ._concurrency import Listener, sleep, tell
from ._ndjson import open_lines
from ._sandbox import AsyncSandbox

if TYPE_CHECKING:
    from ._client import AsyncClient

WAIT_S = 7 * 24 * 3_600


class _Page(msgspec.Struct):
    groups: list[GroupInfo] = []
    next_cursor: str | None = None


class _Line(msgspec.Struct):
    group: GroupInfo | None = None


class AsyncGroup:
    """Several sandboxes on one private network.

    Attributes:
        info: The group as last seen.
        sandboxes: Its sandboxes, by the name of their service; those that live.
        warnings: What of a compose file has no effect here.
    """

    def __init__(self, client: AsyncClient, info: GroupInfo) -> None:
        self._client = client
        self._transport = client._transport
        self.info = info
        self.sandboxes: dict[str, AsyncSandbox] = {}
        self.warnings: Sequence[str] = ()

    @property
    def group_id(self) -> str:
        """Its id."""
        return self.info.group_id

    async def refresh(self) -> GroupInfo:
        """Look at it again."""
        await self._seen(await self._transport.api("GET", _path(self.group_id), GroupInfo))
        return self.info

    async def wait_healthy(
        self, *, timeout_s: float | None = None, on_change: Listener[GroupInfo] | None = None
    ) -> None:
        """Wait until all its services are up.

        Args:
            timeout_s: How long. None: as long as the server lets it start.
            on_change: Called with the group each time it changes.

        Raises:
            GroupUnhealthy: a service did not become healthy; the whole group has ended.
            GroupServiceFailed: a program or sandbox ended meanwhile; the whole group has ended.
            NodeFull, QuotaExceeded, ImageNotFound, …: a sandbox could not be made; the same.
            GroupStateConflict: it was ended meanwhile, or is not up after ``timeout_s``.
            ConnectionFailed: the server stayed away.
        """
        reached = await self._wait("running", timeout_s, on_change)
        if self.info.error is not None and self.info.ended_at is not None:
            raise from_native(self.info.error)
        if self.info.ready_at is None or self.info.ended_at is not None:
            said = "has ended" if reached else f"is not up after {timeout_s:g} s"
            raise GroupStateConflict(f"The group {self.info.name} {said}.")
        await self._seen(self.info)

    async def wait_ended(
        self, *, timeout_s: float | None = None, on_change: Listener[GroupInfo] | None = None
    ) -> bool:
        """Wait until nothing of it is left. False: the time was over before."""
        return await self._wait("ended", timeout_s, on_change)

    async def kill(self) -> GroupInfo:
        """End all its sandboxes; returns when nothing of it is left. Idempotent."""
        self.info = await self._transport.api("POST", f"{_path(self.group_id)}/kill", GroupInfo)
        await self.wait_ended()
        self.sandboxes = {}
        return self.info

    async def pause(self) -> GroupInfo:
        """Pause all its sandboxes, or none of them.

        Raises:
            GroupStateConflict: it is being started or ended, or has ended.
            NotSupported, SnapshotFailed: a sandbox cannot be paused; none is.
        """
        return await self._change("pause")

    async def resume(self) -> GroupInfo:
        """Let all its sandboxes run on, with the group's whole time before them.

        Raises:
            GroupStateConflict: it is being started or ended, or has ended.
            QuotaExceeded, NodeFull, ResumeFailed: a sandbox stays paused; call again.
        """
        return await self._change("resume")

    async def logs(self, service: str) -> ServiceLogs:
        """What the program of a service has written so far.

        Raises:
            GroupServiceNotFound: it has no such service.
            SandboxNotFound: its sandbox has ended, or is not there yet.
        """
        path = f"{_path(self.group_id)}/services/{quote(service, safe='')}/logs"
        return await self._transport.api("GET", path, ServiceLogs)

    def service(self, name: str) -> ServiceInfo:
        """One service, as last seen.

        Raises:
            InvalidRequest: it has no such service.
        """
        for one in self.info.services:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.info.services)
        raise InvalidRequest(f"The group has no service `{name}`; it has {names}.")

    async def _change(self, verb: str) -> GroupInfo:
        self.info = await self._transport.api(
            "POST",
            f"{_path(self.group_id)}/{verb}",
            GroupInfo,
            timeout_s=_limits.STATE_TIMEOUT_S,
        )
        return self.info

    async def _wait(
        self,
        until: GroupWait,
        timeout_s: float | None,
        on_change: Listener[GroupInfo] | None,
    ) -> bool:
        over_at = time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
        patience = Patience(self._transport.retry)
        while True:
            patience.asking()
            left_s = min(max(0, math.ceil(over_at - time.monotonic())), WAIT_S)
            try:
                lines = await open_lines(
                    self._transport,
                    "GET",
                    f"{_path(self.group_id)}/wait",
                    _Line,
                    params={"until": until, "timeout_s": left_s},
                )
                async with lines:
                    async for line in lines:
                        patience.heard()
                        if line.group is not None:
                            self.info = line.group
                            if on_change is not None:
                                await tell(on_change, line.group)
                return bool((lines.done or {}).get("reached"))
            except OpendsecError as error:
                if patience.spent(error):
                    raise
            await sleep(_limits.RECONNECT_PAUSE_S)

    async def _seen(self, info: GroupInfo) -> None:
        self.info = info
        living = {
            one.name: one.sandbox_id
            for one in info.services
            if one.sandbox_id is not None and one.sandbox_state not in ("ended", "failed", None)
        }
        known = self.sandboxes
        self.sandboxes = {}
        for name, sandbox_id in living.items():
            sandbox = known.get(name)
            if sandbox is None or sandbox.sandbox_id != sandbox_id:
                record = await self._client.info(sandbox_id)
                sandbox = AsyncSandbox(self._client, record, owns_client=False)
            self.sandboxes[name] = sandbox


class AsyncGroups:
    """The groups of the key's project."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._transport = client._transport

    async def create(
        self,
        services: Mapping[str, Mapping[str, Any]],
        *,
        name: str | None = None,
        timeout_s: float = 3_600,
        start_timeout_s: float = 600,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> AsyncGroup:
        """Make a group and return when all its services are up.

        It comes up whole, or nothing of it is left.

        Args:
            services: For each its sandbox and program: ``image`` or ``template``, ``command`` and
                ``entrypoint`` (a string is run by a shell), ``env``, ``cpu``, ``memory_mb``,
                ``disk_mb``, ``user``, ``workdir``, ``depends_on`` (``{"db": "healthy"}``),
                ``healthcheck`` (``test``, ``interval_s``, ``timeout_s``, ``retries``,
                ``start_period_s``), ``aliases``, ``network``, ``backend``, ``metadata``,
                ``labels``.
            name: Unique among the project's living groups. None: its id.
            timeout_s: All of it ends after so many seconds.
            start_timeout_s: How long it may take until all services are up.
            task_id: The job of all its sandboxes.
            labels: Of all its sandboxes.
            wait: False: return at once; see ``AsyncGroup.wait_healthy``.
            idempotency_key: As of ``create``.

        Raises:
            InvalidRequest: it cannot be so; nothing was made.
            GroupExists: one of this name lives.
            As ``AsyncGroup.wait_healthy``.
        """
        body: dict[str, Any] = {
            "services": {key: dict(value) for key, value in services.items()},
            "name": name,
            "timeout_s": math.ceil(timeout_s),
            "start_timeout_s": math.ceil(start_timeout_s),
            "task_id": task_id,
            "labels": list(labels),
        }
        info = await self._transport.api(
            "POST",
            "/v1/groups",
            GroupInfo,
            body={key: value for key, value in body.items() if value is not None},
            headers={"Idempotency-Key": idempotency_key or f"sdk-{uuid.uuid4()}"},
        )
        group = AsyncGroup(self._client, info)
        if wait:
            await group.wait_healthy()
        return group

    async def from_compose(
        self,
        file: str | Path,
        *,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        profiles: Sequence[str] = (),
        timeout_s: float = 3_600,
        start_timeout_s: float = 600,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> AsyncGroup:
        """Make a group of a docker-compose file. What it asks for and cannot have is refused.

        Args:
            file: Its path.
            name: None: the file's ``name``, else the group's id.
            environment: For ``${…}`` in it. None: this program's. A ``.env`` beside it counts
                below that.
            profiles: Services of these profiles too.
            timeout_s: As of ``create``, like all that follow.

        Raises:
            InvalidRequest: it is no compose file; the message names the line.
            NotSupported: it asks for what there is not here; the message names key and line.
            As ``create``.
        """
        from opendsec._compose import read_compose

        found = read_compose(Path(file), environment=environment, profiles=profiles)
        group = await self.create(
            found.services,
            name=name or found.name,
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            task_id=task_id,
            labels=labels,
            wait=False,
            idempotency_key=idempotency_key,
        )
        group.warnings = found.warnings
        if wait:
            await group.wait_healthy()
        return group

    async def get(self, group: str) -> AsyncGroup:
        """A group by id or name.

        Raises:
            GroupNotFound: there is none.
        """
        info = await self._transport.api("GET", _path(group), GroupInfo)
        found = AsyncGroup(self._client, info)
        await found._seen(info)
        return found

    async def list(
        self, *, states: Sequence[GroupState] = (), limit: int | None = None
    ) -> AsyncIterator[GroupInfo]:
        """Groups, newest first, page by page.

        Args:
            states: In one of these. Empty: all.
            limit: End after so many. None: all.
        """
        params: dict[str, str | int | builtins.list[str]] = {}
        if states:
            params["state"] = ",".join(states)
        left = limit
        while left is None or left > 0:
            params["limit"] = (
                _limits.LIST_PAGE_MAX if left is None else min(left, _limits.LIST_PAGE_MAX)
            )
            page = await self._transport.api("GET", "/v1/groups", _Page, params=params)
            for group in page.groups:
                yield group
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor
            if left is not None:
                left -= len(page.groups)


def _path(group: str) -> str:
    """Its path; the name is quoted, so that a bad one cannot name another path."""
    if group in ("", ".", ".."):
        raise InvalidRequest(f"`{group}` is no group that can be asked for.")
    return f"/v1/groups/{quote(group, safe='')}"
