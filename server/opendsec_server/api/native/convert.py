# SPDX-License-Identifier: AGPL-3.0-only
"""Records as answers, and request bodies as parameters."""

from __future__ import annotations

from opendsec_server.api.http import rfc3339
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.contract.node import MetricSample, NetworkPolicy
from opendsec_server.control.params import CreateParams
from opendsec_server.control.services import Services
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
        network=policy_of(body.network),
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
        end_at=rfc3339(record.end_at),
        ended_at=None if record.ended_at is None else rfc3339(record.ended_at),
        end_reason=record.end_reason,
        message=record.message,
        fault=record.fault,
        idle_timeout_s=record.idle_timeout_s,
        on_timeout=record.on_timeout,
        network=_network_of(record.network),
        domain=services.config.domain,
        envd_version=ENVD_VERSION,
        node_id=record.node_id,
        env=record.env if env else None,
        access_token=services.mint.access(record.sandbox_id) if tokens else None,
        traffic_token=services.mint.traffic(record.sandbox_id) if tokens else None,
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


def template_of(template: records.Template) -> schemas.Template:
    """A template as it is shown."""
    return schemas.Template(
        template_id=template.template_id,
        name=template.name,
        cpu=template.cpu,
        memory_mb=template.memory_mb,
        disk_mb=template.disk_mb,
        created_at=rfc3339(template.created_at),
        public=template.public,
    )


def key_of(key: records.ApiKey) -> schemas.ApiKey:
    """A key as it is shown."""
    return schemas.ApiKey(
        key_id=key.key_id, name=key.name, hint=key.hint, created_at=rfc3339(key.created_at)
    )
