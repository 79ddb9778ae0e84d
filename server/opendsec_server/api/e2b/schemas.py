# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of E2B's API, as far as they touch sandboxes. Fields that are not known are ignored,
as E2B does: newer clients send newer fields."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

_ACRONYMS = {"id": "ID", "mb": "MB"}
_AS_IT_IS = frozenset({"allow_internet_access"})
"""E2B's one field in snake case."""


def e2b_name(name: str) -> str:
    """E2B's spelling of a field: ``template_id`` is ``templateID``."""
    if name in _AS_IT_IS:
        return name
    first, *rest = name.removesuffix("_shown").split("_")
    return first + "".join(_ACRONYMS.get(part, part.capitalize()) for part in rest)


class AutoResume(Struct, kw_only=True, frozen=True, rename=e2b_name):
    enabled: bool = False


class EgressProxy(Struct, kw_only=True, frozen=True, rename=e2b_name):
    address: str


class NetworkUpdate(Struct, kw_only=True, frozen=True, rename=e2b_name):
    """Egress of a sandbox."""

    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: EgressProxy | None = None
    rules: dict[str, Any] | None = None


class PutNetwork(NetworkUpdate, kw_only=True, frozen=True, rename=e2b_name):
    """Replaces the egress of a running sandbox; what is left out is cleared."""

    allow_internet_access: bool | None = None


class Network(NetworkUpdate, kw_only=True, frozen=True, rename=e2b_name):
    """Egress and ingress of a new sandbox."""

    allow_public_traffic: bool | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None


class VolumeMount(Struct, kw_only=True, frozen=True, rename=e2b_name):
    name: str
    path: str


class Iam(Struct, kw_only=True, frozen=True, rename=e2b_name):
    tokens: dict[str, Any] | None = None


class NewSandbox(Struct, kw_only=True, frozen=True, rename=e2b_name):
    """A create, v1 and v2. They differ in defaults only."""

    template_id: str
    timeout: int | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    mcp: dict[str, Any] | None = None
    iam: Iam | None = None
    volume_mounts: list[VolumeMount] | None = None


class Connect(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timeout: int | None = None
    memory: bool | None = None


class ConnectV1(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timeout: int
    memory: bool | None = None


class Resume(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timeout: int | None = None
    memory: bool | None = None


class Pause(Struct, kw_only=True, frozen=True, rename=e2b_name):
    memory: bool | None = None


class Fork(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timeout: int | None = None
    count: int | None = None


class NewSnapshot(Struct, kw_only=True, frozen=True, rename=e2b_name):
    name: str | None = None
    memory: bool | None = None


class SetTimeout(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timeout: int


class Refresh(Struct, kw_only=True, frozen=True, rename=e2b_name):
    duration: int | None = None


class Sandbox(Struct, kw_only=True, frozen=True, rename=e2b_name):
    """Answer of create and connect."""

    template_id: str
    sandbox_id: str
    alias: str
    client_id: str
    envd_version: str
    envd_access_token: str
    traffic_access_token: str
    domain: str


class Error(Struct, kw_only=True, frozen=True):
    code: int
    message: str
    error_code: str


class ForkResult(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Either of both."""

    sandbox: Sandbox | None = None
    error: Error | None = None


class SnapshotInfo(Struct, kw_only=True, frozen=True, rename=e2b_name):
    snapshot_id: str
    names: list[str]


class ListedSandbox(Struct, kw_only=True, frozen=True, rename=e2b_name):
    template_id: str
    alias: str
    sandbox_id: str
    client_id: str
    started_at: str
    end_at: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    metadata: dict[str, str]
    state: Literal["running", "paused"]
    envd_version: str
    volume_mounts: list[VolumeMount] = []


class NetworkShown(Struct, kw_only=True, frozen=True, rename=e2b_name, omit_defaults=True):
    allow_public_traffic: bool | UnsetType = UNSET
    allow_out: list[str] | UnsetType = UNSET
    deny_out: list[str] | UnsetType = UNSET
    mask_request_host: str | UnsetType = UNSET
    https_ports: list[int] | UnsetType = UNSET


class Lifecycle(Struct, kw_only=True, frozen=True, rename=e2b_name):
    auto_resume: bool
    on_timeout: Literal["kill", "pause"]


class SandboxDetail(ListedSandbox, kw_only=True, frozen=True, rename=e2b_name):
    envd_access_token: str | UnsetType
    allow_internet_access_shown: bool | None
    domain: str
    network: NetworkShown
    lifecycle: Lifecycle
    pause_mode: Literal["filesystem", "full"] | UnsetType = UNSET


class Metric(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timestamp: str
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class SandboxesWithMetrics(Struct, kw_only=True, frozen=True, rename=e2b_name):
    sandboxes: dict[str, Metric]


class Log(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timestamp: str
    line: str


class LogEntry(Struct, kw_only=True, frozen=True, rename=e2b_name):
    timestamp: str
    level: Literal["debug", "info", "warn", "error"]
    message: str
    fields: dict[str, str]


class Logs(Struct, kw_only=True, frozen=True, rename=e2b_name):
    logs: list[Log]
    log_entries: list[LogEntry]


class LogsV2(Struct, kw_only=True, frozen=True, rename=e2b_name):
    logs: list[LogEntry]
