# SPDX-License-Identifier: AGPL-3.0-only
"""Records as answers, and request bodies as parameters."""

from __future__ import annotations

import msgspec

from opendsec_server.api.http import rfc3339
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.images import ImageInfo, ReadyCheck
from opendsec_server.contract.node import (
    MetricSample,
    NetworkPolicy,
    PauseReport,
    SandboxUsage,
    VmDisk,
    VmOptions,
)
from opendsec_server.contract.states import State
from opendsec_server.control.params import CreateParams
from opendsec_server.control.saving import Child
from opendsec_server.control.services import Services
from opendsec_server.control.snapshots import full_name
from opendsec_server.store import records

from . import schemas


def params_of(body: schemas.CreateSandbox) -> CreateParams:
    """What a create body asks for."""
    return CreateParams(
        template=body.template,
        backend=body.backend,
        cpu=body.cpu,
        memory_mb=body.memory_mb,
        disk_mb=body.disk_mb,
        env=body.env,
        metadata=body.metadata,
        labels=body.labels,
        task_id=body.task_id,
        timeout_s=body.timeout_s,
        idle_timeout_s=body.idle_timeout_s,
        on_timeout=body.on_timeout,
        pause_mode=body.pause_mode,
        auto_resume=body.auto_resume,
        network=policy_of(body.network),
        extra=records.SandboxExtra(
            vm=None if body.vm is None else vm_of(body.vm),
            image=body.image,
            layers=tuple(body.layers),
            start_image=body.start_image,
            ready=None if body.ready is None else ready_of(body.ready),
            node_labels=body.node_labels,
        ),
    )


def ready_of(ready: schemas.Ready) -> ReadyCheck:
    """The readiness check that a body describes."""
    return ReadyCheck(
        command=ready.command, port=ready.port, url=ready.url, timeout_s=ready.timeout_s
    )


def image_of(image: ImageInfo) -> schemas.Image:
    """An image as it is shown."""
    config = image.config
    return schemas.Image(
        digest=image.digest,
        names=list(image.names),
        layers=list(image.layers),
        size_bytes=image.size_bytes,
        config=schemas.ImageConfig(
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
            env=config.env,
            workdir=config.workdir,
            user=config.user,
            exposed_ports=list(config.exposed_ports),
            stop_signal=config.stop_signal,
            labels=config.labels,
        ),
        source=image.source,
        created_at=rfc3339(image.created_at),
        last_used_at=rfc3339(image.last_used_at),
        on_demand_bytes=image.on_demand_bytes,
        fetched_bytes=image.fetched_bytes,
    )


def vm_of(vm: schemas.Vm) -> VmOptions:
    """The machine that a body describes."""
    return VmOptions(
        firmware=vm.firmware,
        disks=tuple(VmDisk(size_mb=disk.size_mb or 0, image=disk.image) for disk in vm.disks),
        user_data=vm.user_data,
        devices=tuple(vm.devices),
    )


def policy_of(network: schemas.Network) -> NetworkPolicy:
    """The policy that a body describes."""
    return NetworkPolicy(
        internet=network.internet,
        allow=tuple(network.allow),
        deny=tuple(network.deny),
        allow_public_traffic=network.allow_public_traffic,
        mask_request_host=network.mask_request_host,
        https_ports=tuple(network.https_ports),
    )


def sandbox_of(
    services: Services,
    record: records.SandboxRecord,
    *,
    env: bool = True,
    tokens: bool = False,
    usage: SandboxUsage | None = None,
) -> schemas.Sandbox:
    """A sandbox as it is shown. One that is over has no tokens."""
    tokens = tokens and not record.terminal
    return schemas.Sandbox(
        sandbox_id=record.sandbox_id,
        project_id=record.project_id,
        template_id=record.template_id,
        template=record.template,
        backend=record.backend,
        state=record.state,
        cpu=record.cpu,
        memory_mb=record.memory_mb,
        disk_mb=record.disk_mb,
        metadata=record.metadata,
        labels=record.labels,
        task_id=record.task_id,
        created_at=rfc3339(record.created_at),
        started_at=None if record.started_at is None else rfc3339(record.started_at),
        end_at=None if record.state is State.PAUSED else rfc3339(record.end_at),
        ended_at=None if record.ended_at is None else rfc3339(record.ended_at),
        end_reason=record.end_reason,
        message=record.message,
        fault=record.fault,
        timeout_s=record.timeout_s,
        idle_timeout_s=record.idle_timeout_s,
        on_timeout=record.on_timeout,
        pause_mode=record.pause_mode,
        auto_resume=record.auto_resume,
        paused_mode=record.paused_mode,
        accelerator=record.accelerator,
        vmm=record.vmm,
        snapshot_id=record.snapshot_id,
        network=_network_of(record.network),
        domain=services.config.domain,
        envd_version=ENVD_VERSION,
        node_id=record.node_id,
        image=record.image,
        env=record.env if env else None,
        access_token=services.mint.access(record.sandbox_id) if tokens else None,
        traffic_token=services.mint.traffic(record.sandbox_id) if tokens else None,
        usage=None if usage is None else usage_of(usage),
    )


def usage_of(usage: SandboxUsage) -> schemas.Usage:
    """What a sandbox has used, as it is shown."""
    return schemas.Usage(**{**msgspec.structs.asdict(usage), "at": rfc3339(usage.at)})


def paused_of(
    services: Services, record: records.SandboxRecord, report: PauseReport
) -> schemas.PausedSandbox:
    """A sandbox that was just paused, as it is shown."""
    shown = sandbox_of(services, record, tokens=True)
    return schemas.PausedSandbox(
        **{name: getattr(shown, name) for name in shown.__struct_fields__},
        pause=schemas.PauseReport(
            took_s=report.took_s,
            memory_before_bytes=report.memory_before_bytes,
            memory_freed_bytes=report.memory_freed_bytes,
            stored_bytes=report.stored_bytes,
        ),
    )


def fork_item_of(services: Services, child: Child, request_id: str | None) -> schemas.ForkItem:
    """One child of a fork as it is shown."""
    if child.record is not None:
        return schemas.ForkItem(sandbox=sandbox_of(services, child.record, tokens=True))
    assert child.error is not None
    return schemas.ForkItem(error=_error_of(child.error, request_id))


def _error_of(error: OpendsecError, request_id: str | None) -> schemas.Error:
    return schemas.Error(**error.to_dict(), request_id=request_id)


def snapshot_of(snapshot: records.Snapshot) -> schemas.Snapshot:
    """A snapshot as it is shown."""
    name = full_name(snapshot)
    return schemas.Snapshot(
        id=snapshot.snapshot_id,
        project_id=snapshot.project_id,
        name=name,
        names=[] if name is None else [name],
        source_id=snapshot.source_id,
        backend=snapshot.backend,
        mode=snapshot.mode,
        template_id=snapshot.template_id,
        template=snapshot.template,
        cpu=snapshot.cpu,
        memory_mb=snapshot.memory_mb,
        disk_mb=snapshot.disk_mb,
        created_at=rfc3339(snapshot.created_at),
        disk_bytes=snapshot.disk_bytes,
        memory_bytes=snapshot.memory_bytes,
        versions=snapshot.versions,
    )


def _network_of(policy: NetworkPolicy) -> schemas.Network:
    return schemas.Network(
        internet=policy.internet,
        allow=list(policy.allow),
        deny=list(policy.deny),
        allow_public_traffic=policy.allow_public_traffic,
        mask_request_host=policy.mask_request_host,
        https_ports=list(policy.https_ports),
    )


def sample_of(sample: MetricSample) -> schemas.MetricSample:
    """A reading as it is shown."""
    return schemas.MetricSample(
        at=rfc3339(sample.at),
        cpu_count=sample.cpu_count,
        cpu_used_pct=sample.cpu_used_pct,
        memory_used_bytes=sample.memory_used_bytes,
        memory_total_bytes=sample.memory_total_bytes,
        memory_cache_bytes=sample.memory_cache_bytes,
        disk_used_bytes=sample.disk_used_bytes,
        disk_total_bytes=sample.disk_total_bytes,
    )


def transition_of(transition: records.Transition) -> schemas.Transition:
    """A change of state as it is shown."""
    return schemas.Transition(
        source=transition.from_state,
        target=transition.to_state,
        at=rfc3339(transition.at),
        reason=transition.reason,
        message=transition.message,
        cause=transition.cause,
    )


def key_of(key: records.ApiKey) -> schemas.ApiKey:
    """A key as it is shown."""
    return schemas.ApiKey(
        key_id=key.key_id,
        name=key.name,
        hint=key.hint,
        created_at=rfc3339(key.created_at),
        principal_id=key.principal_id,
    )
