# SPDX-License-Identifier: Apache-2.0
"""What calls about groups take and return."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

GroupWait = Literal["running", "ended"]
GroupState = Literal["starting", "running", "paused", "ending", "ended"]


class ServiceProgram(msgspec.Struct, kw_only=True, frozen=True):
    """How the program of a service is.

    Attributes:
        state: ``starting``, ``running`` or ``ended``.
    """

    state: str
    exit_code: int | None = None
    signal: int | None = None


class ServiceInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One service of a group.

    Attributes:
        state: How far it came when the group was started: ``waiting``, ``starting``, ``started``,
            ``healthy``, ``completed`` or ``failed``.
        message: Why it failed, or what its health check said last.
        sandbox_state: As of ``SandboxInfo.state``; None: it has no sandbox yet.
        program: None: it has none, its sandbox does not run, or the group was listed.
        depends_on: Services that came first, and how far they had to be.
    """

    name: str
    state: str = "waiting"
    message: str | None = None
    sandbox_id: str | None = None
    sandbox_state: str | None = None
    end_reason: str | None = None
    program: ServiceProgram | None = None
    depends_on: dict[str, str] = {}


class GroupInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A group as the server describes it.

    Attributes:
        state: ``starting``; ``running``; ``degraded``: it runs, but a sandbox of it has ended or
            the program of a service has failed; ``paused``; ``ending``; ``ended``.
        ready_at: When all services were up.
        end_at: When it ends by itself; None: it is paused.
        end_reason: ``killed``, ``timeout``, ``start_failed``, ``unhealthy`` or ``members_ended``.
        error: What ended it, as the server says: ``code``, ``message``, ``fault``, and the service
            in ``details``.
    """

    group_id: str
    name: str
    state: str = "starting"
    created_at: datetime | None = None
    ready_at: datetime | None = None
    end_at: datetime | None = None
    ended_at: datetime | None = None
    end_reason: str | None = None
    error: dict[str, Any] | None = None
    task_id: str | None = None
    labels: tuple[str, ...] = ()
    services: tuple[ServiceInfo, ...] = ()


class ServiceLogs(msgspec.Struct, kw_only=True, frozen=True):
    """What the program of a service has written: beginning and end, if it is much.

    Attributes:
        program: None: the service has no program of its own.
        stdout_bytes: Written in all.
        stderr_bytes: Written in all.
    """

    program: ServiceProgram | None = None
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
