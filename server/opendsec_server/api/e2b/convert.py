# SPDX-License-Identifier: AGPL-3.0-only
"""Between E2B's shapes and ours."""

from __future__ import annotations

import math
from typing import NoReturn

import msgspec
from msgspec import UNSET

from opendsec_server.api.errors import error_body
from opendsec_server.api.http import rfc3339
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.contract.errors import InvalidRequest, NotSupported
from opendsec_server.contract.node import MetricSample, NetworkPolicy
from opendsec_server.contract.states import State
from opendsec_server.control.params import CreateParams
from opendsec_server.control.saving import Child
from opendsec_server.control.services import Services
from opendsec_server.control.templates import DEFAULT_TAG
from opendsec_server.store import records

from . import schemas

RUNNING = (State.RUNNING,)
PAUSED = (State.PAUSING, State.PAUSED, State.RESUMING)
VISIBLE = RUNNING + PAUSED
"""E2B has two states; a sandbox in any other of ours is not there for its clients."""

CLIENT_ID = "opendsec"
"""A field of E2B's past that clients still require."""
EVERYWHERE = "0.0.0.0/0"


def params_of(body: schemas.NewSandbox, *, timeout_s_default: int) -> CreateParams:
    """What a create body asks for.

    Raises:
        InvalidRequest: it contradicts itself.
        NotSupported: it asks for something that comes later.
    """
    timeout_s = timeout_s_default if body.timeout is None else body.timeout
    if timeout_s < 0:
        raise InvalidRequest("timeout: must not be negative")
    auto_resume = body.auto_resume is not None and body.auto_resume.enabled
    if body.auto_pause_memory is False and not body.auto_pause:
        raise InvalidRequest("autoPauseMemory: false needs autoPause")
    if body.auto_pause_memory is False and auto_resume:
        raise InvalidRequest("autoPauseMemory: false cannot be combined with autoResume")
    if body.volume_mounts:
        _later("volumeMounts")
    if body.iam is not None and body.iam.tokens:
        _later("iam.tokens")
    return CreateParams(
        template=body.template_id,
        env=body.env_vars or {},
        metadata=body.metadata or {},
        timeout_s=timeout_s,
        on_timeout="pause" if body.auto_pause else "kill",
        pause_mode="filesystem" if body.auto_pause_memory is False else "full",
        auto_resume=auto_resume,
        network=policy_of(body.network or schemas.Network(), body.allow_internet_access),
        extra=records.SandboxExtra(allow_internet_access=body.allow_internet_access, mcp=body.mcp),
    )


def _later(field: str) -> NoReturn:
    raise NotSupported(
        f"{field} is not supported yet", remediation=f"Leave {field} out.", details={"field": field}
    )


def policy_of(
    network: schemas.Network | schemas.NetworkUpdate,
    internet: bool | None,
    *,
    before: NetworkPolicy | None = None,
) -> NetworkPolicy:
    """The policy that a network body describes.

    Args:
        network: Of a create, or an update of egress only.
        internet: ``allow_internet_access``; None is yes.
        before: The policy that an update leaves in force for ingress.

    Raises:
        InvalidRequest: a deny rule is a domain.
        NotSupported: it asks for something that comes later.
    """
    for field, value in (
        ("network.egressProxy", network.egress_proxy),
        ("network.rules", network.rules),
        ("network.dnsServers", network.dns_servers),
    ):
        if value:
            _later(field)
    ingress = before or NetworkPolicy()
    if isinstance(network, schemas.Network):
        ingress = NetworkPolicy(
            allow_public_traffic=network.allow_public_traffic is not False,
            mask_request_host=network.mask_request_host,
            https_ports=tuple(network.https_ports or ()),
        )
    deny = network.deny_out or ()
    for entry in deny:
        if entry.rstrip(".")[-1:].isalpha() and ":" not in entry:
            raise InvalidRequest(
                f"network.denyOut: `{entry[:64]}` is a domain; "
                "only addresses and CIDRs can be denied"
            )
    return NetworkPolicy(
        internet=internet is not False,
        allow=tuple(network.allow_out or ()),
        deny=tuple(deny),
        allow_public_traffic=ingress.allow_public_traffic,
        mask_request_host=ingress.mask_request_host,
        https_ports=ingress.https_ports,
    )


def sandbox_of(services: Services, record: records.SandboxRecord) -> schemas.Sandbox:
    """Answer of create and connect."""
    return schemas.Sandbox(
        template_id=record.template_id,
        sandbox_id=record.sandbox_id,
        alias=record.template,
        client_id=CLIENT_ID,
        envd_version=ENVD_VERSION,
        envd_access_token=services.mint.access(record.sandbox_id),
        traffic_access_token=services.mint.traffic(record.sandbox_id),
        domain=services.config.domain,
    )


def listed_of(record: records.SandboxRecord) -> schemas.ListedSandbox:
    """A sandbox in a list."""
    return schemas.ListedSandbox(
        template_id=record.template_id,
        alias=record.template,
        sandbox_id=record.sandbox_id,
        client_id=CLIENT_ID,
        started_at=rfc3339(record.started_at or record.created_at),
        end_at=rfc3339(record.end_at),
        cpu_count=cpu_count(record.cpu),
        memory_mb=record.memory_mb,
        disk_size_mb=record.disk_mb,
        metadata=record.metadata,
        state="paused" if record.state in PAUSED else "running",
        envd_version=ENVD_VERSION,
    )


def detail_of(
    services: Services, record: records.SandboxRecord, *, token: bool
) -> schemas.SandboxDetail:
    """Everything about a sandbox. Its token only for those who may enter it."""
    return schemas.SandboxDetail(
        **msgspec.structs.asdict(listed_of(record)),
        envd_access_token=services.mint.access(record.sandbox_id) if token else UNSET,
        allow_internet_access_shown=record.extra.allow_internet_access,
        domain=services.config.domain,
        network=_network_of(record.network),
        lifecycle=schemas.Lifecycle(auto_resume=record.auto_resume, on_timeout=record.on_timeout),
        pause_mode=record.paused_mode or UNSET,
    )


def fork_result_of(services: Services, child: Child) -> schemas.ForkResult:
    """One child of a fork."""
    if child.record is not None:
        return schemas.ForkResult(sandbox=sandbox_of(services, child.record))
    assert child.error is not None
    return schemas.ForkResult(error=schemas.Error(**error_body(child.error)))


def snapshot_info_of(snapshot: records.Snapshot) -> schemas.SnapshotInfo:
    """A snapshot. Its id is what a create takes as template, and a delete as template's id."""
    if snapshot.name is None:
        return schemas.SnapshotInfo(snapshot_id=f"{snapshot.snapshot_id}:{DEFAULT_TAG}", names=[])
    name = f"{snapshot.project_id}/{snapshot.name}"
    return schemas.SnapshotInfo(snapshot_id=f"{name}:{snapshot.tag}", names=[name])


def _network_of(policy: NetworkPolicy) -> schemas.NetworkShown:
    return schemas.NetworkShown(
        allow_public_traffic=policy.allow_public_traffic,
        allow_out=list(policy.allow) or UNSET,
        deny_out=list(policy.deny) or UNSET,
        mask_request_host=policy.mask_request_host or UNSET,
        https_ports=list(policy.https_ports) or UNSET,
    )


def cpu_count(cpu: float) -> int:
    """E2B counts whole CPUs."""
    return max(1, math.ceil(cpu))


def metric_of(sample: MetricSample) -> schemas.Metric:
    """A reading as it is shown."""
    return schemas.Metric(
        timestamp=rfc3339(sample.at),
        timestamp_unix=int(sample.at),
        cpu_count=cpu_count(sample.cpu_count),
        cpu_used_pct=sample.cpu_used_pct,
        mem_used=sample.memory_used_bytes,
        mem_total=sample.memory_total_bytes,
        mem_cache=sample.memory_cache_bytes,
        disk_used=sample.disk_used_bytes,
        disk_total=sample.disk_total_bytes,
    )
