# SPDX-License-Identifier: AGPL-3.0-only
"""What a group is asked to be, and whether that can be. Nothing here has effects."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.contract.node import Backend, GroupMembership, NetworkPolicy
from opendsec_server.control.params import CreateParams, check_params, check_text, digest
from opendsec_server.store.records import SandboxExtra

Condition = Literal["started", "healthy", "completed"]
"""When a service may start that depends on another: when that one's program has been started, is
healthy, or has ended with 0."""
_NAME_RE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ALIAS_RE = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
ARGUMENTS_MAX = 1_024
_RESERVED = frozenset({"localhost"})
SHELL = "/bin/sh"


class HealthCheck(msgspec.Struct, kw_only=True, frozen=True):
    """A command in the service's sandbox that exits with 0 when it is well.

    Until ``interval_s`` and ``start_period_s`` are over it is run every second at least, and
    failures do not count. Then ``retries`` failures in a row are too many.
    """

    test: tuple[str, ...]
    interval_s: float = 5.0
    timeout_s: float = 10.0
    retries: int = 5
    start_period_s: float = 0.0


class ServiceSpec(msgspec.Struct, kw_only=True, frozen=True):
    """One sandbox of a group, and the program that runs in it."""

    template: str = "base"
    image: str | None = None
    backend: Backend | None = None
    entrypoint: tuple[str, ...] | None = None
    """In place of the image's; then the image's CMD does not count either."""
    command: tuple[str, ...] | None = None
    """Of an image: the arguments of its ENTRYPOINT, in place of its CMD. None: the image's own
    program; of a template nothing but what it starts itself."""
    env: dict[str, str] = {}
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    user: str | None = None
    workdir: str | None = None
    depends_on: dict[str, Condition] = {}
    healthcheck: HealthCheck | None = None
    aliases: tuple[str, ...] = ()
    network: NetworkPolicy = NetworkPolicy()
    metadata: dict[str, str] = {}
    labels: tuple[str, ...] = ()


class GroupSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A group to be made."""

    name: str | None = None
    services: dict[str, ServiceSpec]
    timeout_s: int = limits.GROUP_TIMEOUT_S_DEFAULT
    start_timeout_s: int = limits.GROUP_START_TIMEOUT_S_DEFAULT
    task_id: str | None = None
    labels: tuple[str, ...] = ()

    def sha256(self) -> str:
        """Digest of the canonical form: equal for requests that mean the same."""
        return digest(self, "group")


def check_group(spec: GroupSpec) -> None:
    """Check what can be known before anything is made.

    Raises:
        InvalidRequest: the message names the service and the field.
    """
    if spec.name is not None and _NAME_RE.fullmatch(spec.name) is None:
        raise InvalidRequest(f"name: `{spec.name[:80]}` is no DNS label (`a-z`, `0-9`, `-`)")
    if not 1 <= len(spec.services) <= limits.GROUP_SERVICES_MAX:
        raise InvalidRequest(
            f"services: {len(spec.services)}; a group has 1 to {limits.GROUP_SERVICES_MAX}",
            details={"max": limits.GROUP_SERVICES_MAX},
        )
    for name in spec.services:
        _check_name("services", name)
    for name, service in spec.services.items():
        _check_service(spec, name, service)
    order_of(spec.services)


def order_of(services: Mapping[str, ServiceSpec]) -> list[str]:
    """Names of services, those that others depend on first.

    Raises:
        InvalidRequest: they depend on each other in a circle. The details have it.
    """
    try:
        return list(
            graphlib.TopologicalSorter(
                {name: list(service.depends_on) for name, service in services.items()}
            ).static_order()
        )
    except graphlib.CycleError as exc:
        # Each of the list depends on the one before it.
        circle = list(reversed(exc.args[1]))
        raise InvalidRequest(
            f"services: they wait for each other in a circle: {' → '.join(circle)}",
            remediation="Remove one of these from depends_on.",
            details={"cycle": circle},
        ) from None


def params_of(
    spec: GroupSpec, group_id: str, name: str, node_id: str | None = None
) -> CreateParams:
    """What the sandbox of a service is to be."""
    service = spec.services[name]
    return CreateParams(
        template=service.template,
        backend=service.backend,
        cpu=service.cpu,
        memory_mb=service.memory_mb,
        disk_mb=service.disk_mb,
        env=service.env,
        metadata=service.metadata,
        labels=[*dict.fromkeys((*spec.labels, *service.labels))],
        task_id=spec.task_id,
        # From its own start on, so that the group's time, which began before, ends all at once.
        timeout_s=spec.timeout_s,
        network=service.network,
        extra=SandboxExtra(
            image=service.image,
            group=GroupMembership(group_id=group_id, name=name, aliases=service.aliases),
            node_id=node_id,
        ),
    )


def _check_name(field: str, name: str) -> None:
    if _NAME_RE.fullmatch(name) is None or name in _RESERVED:
        raise InvalidRequest(
            f"{field}: `{name[:80]}` is no name of a service: a DNS label (`a-z`, `0-9`, `-`; at "
            "most 63), not `localhost`"
        )


def _check_service(spec: GroupSpec, name: str, service: ServiceSpec) -> None:
    at = f"services.{name}"
    try:
        check_params(params_of(spec, "g", name))
    except InvalidRequest as exc:
        raise InvalidRequest(f"{at}.{exc.message}", remediation=exc.remediation) from None
    if service.image is not None and service.template != "base":
        raise InvalidRequest(f"{at}: give a template or an image, not both")
    for field, argv in (("command", service.command), ("entrypoint", service.entrypoint)):
        _check_argv(f"{at}.{field}", argv)
    for field, text in (("user", service.user), ("workdir", service.workdir)):
        if text is not None:
            check_text(f"{at}.{field}", text, limits.NAME_CHARS_MAX * 16)
    if len(service.aliases) > limits.GROUP_ALIASES_MAX:
        raise InvalidRequest(f"{at}.aliases: at most {limits.GROUP_ALIASES_MAX}")
    for alias in service.aliases:
        if _ALIAS_RE.fullmatch(alias) is None or alias in _RESERVED:
            raise InvalidRequest(f"{at}.aliases: `{alias[:80]}` is no DNS name")
        if alias in spec.services and alias != name:
            raise InvalidRequest(f"{at}.aliases: `{alias}` is the name of another service")
    check = service.healthcheck
    if check is not None:
        if not check.test:
            raise InvalidRequest(f"{at}.healthcheck.test: must not be empty")
        _check_argv(f"{at}.healthcheck.test", check.test)
    for other, condition in service.depends_on.items():
        _check_dependency(spec, f"{at}.depends_on", other, condition)


def _check_argv(field: str, argv: tuple[str, ...] | None) -> None:
    if argv is None:
        return
    if len(argv) > ARGUMENTS_MAX or sum(map(len, argv)) > limits.BULK_COMMAND_CHARS_MAX:
        raise InvalidRequest(f"{field}: too long")
    if any("\0" in text for text in argv):
        raise InvalidRequest(f"{field}: must not contain NUL")


def _check_dependency(spec: GroupSpec, field: str, other: str, condition: Condition) -> None:
    found = spec.services.get(other)
    if found is None:
        raise InvalidRequest(f"{field}: there is no service `{other[:80]}`")
    if condition == "healthy" and found.healthcheck is None:
        raise InvalidRequest(f"{field}: `{other}` has no healthcheck, and is never healthy")
    runs = found.image is not None or found.command or found.entrypoint
    if condition == "completed" and not runs:
        raise InvalidRequest(f"{field}: `{other}` has no command, and never completes")
