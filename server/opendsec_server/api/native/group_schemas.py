# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of ``/v1/groups``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from opendsec_server.contract import limits
from opendsec_server.contract.actions import KeptState
from opendsec_server.contract.node import Backend
from opendsec_server.contract.states import EndReason, State
from opendsec_server.control.groups.model import Condition
from opendsec_server.control.groups.service import Shown
from opendsec_server.store.groups import GroupEnd, MemberState

from . import schemas
from .schemas import Cpu, DiskMb, ImageReference, Labels, MemoryMb, Metadata, Name, StringMap, Time

ServiceName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=63,
        pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="A DNS label: the name under which the others reach it.",
        examples=["db"],
    ),
]
Command = Annotated[
    str | list[str],
    Meta(description="Program and arguments; a string is run by `/bin/sh -c`."),
]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class HealthCheck(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A command that exits with 0 when the service is well."""

    test: Command
    interval_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 5.0
    timeout_s: _Seconds = 10.0
    retries: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000,
            description="So many failures in a row end the whole group. Those before `interval_s` "
            "and `start_period_s` are over do not count; until then it is run every second.",
        ),
    ] = 5
    start_period_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class Service(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One sandbox of a group, and the program that runs in it."""

    template: Name = "base"
    image: Annotated[
        ImageReference | None, Meta(description="Instead of a template, as of a sandbox.")
    ] = None
    backend: Backend | None = None
    entrypoint: Annotated[
        Command | None, Meta(description="In place of the image's; its CMD then counts no more.")
    ] = None
    command: Annotated[
        Command | None,
        Meta(
            description="What runs. Of an image: the arguments of its ENTRYPOINT, in place of its "
            "CMD; without it the image's own program runs. Of a template: nothing, without it."
        ),
    ] = None
    env: Annotated[StringMap, Meta(max_length=limits.ENV_KEYS_MAX)] = {}
    cpu: Cpu | None = None
    memory_mb: MemoryMb | None = None
    disk_mb: DiskMb | None = None
    user: str | None = None
    workdir: str | None = None
    depends_on: Annotated[
        dict[ServiceName, Condition],
        Meta(
            description="Services that come first, and how far they must be: `started`; `healthy`, "
            "by their health check; `completed`, their program ended with 0.",
            examples=[{"db": "healthy"}],
        ),
    ] = {}
    healthcheck: HealthCheck | None = None
    aliases: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=253)]],
        Meta(max_length=limits.GROUP_ALIASES_MAX, description="Further names in the group."),
    ] = []
    network: Annotated[
        schemas.Network,
        Meta(description="Towards everything else. The group's own network is always open."),
    ] = schemas.Network()
    metadata: Metadata = {}
    labels: Labels = []


class CreateGroup(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Sandboxes that reach each other by name, started and ended as one."""

    name: Annotated[
        ServiceName | None,
        Meta(description="Unique among the project's groups that have not ended. Default: its id."),
    ] = None
    services: Annotated[
        dict[ServiceName, Service],
        Meta(min_length=1, max_length=limits.GROUP_SERVICES_MAX),
    ]
    timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.TIMEOUT_S_MAX,
            description="Seconds from now after which all of it ends.",
        ),
    ] = limits.GROUP_TIMEOUT_S_DEFAULT
    start_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            le=limits.GROUP_START_TIMEOUT_S_MAX,
            description="How long it may take until all services are up.",
        ),
    ] = limits.GROUP_START_TIMEOUT_S_DEFAULT
    task_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=limits.TASK_ID_CHARS_MAX)] | None,
        Meta(description="The job of all its sandboxes."),
    ] = None
    labels: Labels = []


class ServiceProgram(Struct, kw_only=True, frozen=True):
    """How the program of a service is."""

    state: KeptState
    exit_code: int | None
    signal: int | None


class ServiceState(Struct, kw_only=True, frozen=True):
    """One service of a group, as it is."""

    name: str
    state: Annotated[
        MemberState,
        Meta(description="How far it came when the group was started."),
    ]
    message: Annotated[
        str | None, Meta(description="Why it failed, or what its health check said last.")
    ]
    sandbox_id: str | None
    sandbox_state: State | None
    end_reason: EndReason | None
    program: Annotated[
        ServiceProgram | None,
        Meta(description="Null: it has none, its sandbox does not run, or the group was listed."),
    ]
    depends_on: dict[str, Condition]


class Group(Struct, kw_only=True, frozen=True):
    """One group."""

    group_id: str
    name: str
    state: Annotated[
        Shown,
        Meta(
            description="`degraded`: it runs, but the sandbox of a service has ended, or its "
            "program has failed."
        ),
    ]
    created_at: Time
    ready_at: Annotated[str | None, Meta(description="When all services were up. RFC 3339.")]
    end_at: Annotated[str | None, Meta(description="When it ends by itself. RFC 3339.")]
    ended_at: Time | None
    end_reason: GroupEnd | None
    error: Annotated[
        dict[str, Any] | None,
        Meta(
            description="What ended it: `code`, `message`, `fault`, and the service in `details`."
        ),
    ]
    task_id: str | None
    labels: list[str]
    services: list[ServiceState]


class GroupList(Struct, kw_only=True, frozen=True):
    """One page of groups."""

    groups: list[Group]
    next_cursor: str | None


class GroupLogs(Struct, kw_only=True, frozen=True):
    """What the program of a service has written: the beginning and the end of it, if it is much."""

    program: ServiceProgram | None
    stdout: str
    stderr: str
    stdout_bytes: Annotated[int, Meta(description="Written in all.")]
    stderr_bytes: int


class GroupLine(Struct, kw_only=True, frozen=True):
    """A line of a wait."""

    group: Group
