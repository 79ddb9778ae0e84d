# SPDX-License-Identifier: AGPL-3.0-only
"""Between E2B's shapes of templates and ours."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from opendsec_server.api.http import rfc3339
from opendsec_server.api.protocol import ENVD_VERSION
from opendsec_server.contract import limits
from opendsec_server.contract.errors import InvalidRequest, NotSupported
from opendsec_server.contract.images import RegistryAuth
from opendsec_server.control.builds.logs import LogEntry
from opendsec_server.control.builds.plan import BuildPlan, BuildStep, Stage
from opendsec_server.control.builds.service import BuildRequest, Shown
from opendsec_server.store import records

from . import template_schemas as schemas
from .convert import cpu_count

_BUILD_NAMESPACE = uuid.UUID("8c6cf1a4-6f0e-4a52-9f6d-4a2c19f3d1b7")
REASON_ENTRIES_MAX = 20
DEFAULT_READY_CMD = "sleep 20"
"""What E2B waits for after a start command that comes without a ready command."""
_GCP_USER = "_json_key"
"""Google's registries take a service account's key as the password of this user."""


def request_of(body: schemas.NewBuild) -> BuildRequest:
    """What a request for a build asks for.

    Raises:
        InvalidRequest: it names no template, or sizes that E2B does not have.
    """
    name = body.name or body.alias
    if not name:
        raise InvalidRequest("name: is required")
    cpu, memory_mb = body.cpu_count, body.memory_mb
    if cpu is not None and not (
        cpu == 1 or (cpu % 2 == 0 and 2 <= cpu <= limits.E2B_BUILD_CPU_MAX)
    ):
        raise InvalidRequest(f"cpuCount: 1, or an even number up to {limits.E2B_BUILD_CPU_MAX}")
    if memory_mb is not None and (memory_mb % 2 or memory_mb < limits.E2B_BUILD_MEMORY_MB_MIN):
        raise InvalidRequest(f"memoryMB: an even number from {limits.E2B_BUILD_MEMORY_MB_MIN} on")
    if body.min_free_disk_mb is not None and body.min_free_disk_mb < 0:
        raise InvalidRequest("minFreeDiskMb: must not be negative")
    return BuildRequest(
        name=name,
        tags=tuple(body.tags or ()),
        cpu=cpu,
        memory_mb=memory_mb,
        disk_mb=body.min_free_disk_mb,
        envd_version=ENVD_VERSION,
    )


def plan_of(body: schemas.StartBuild) -> BuildPlan:
    """What a start of a build tells it to do.

    Raises:
        InvalidRequest: not exactly one base.
        NotSupported: credentials of a registry that need more than a log-in.
    """
    if bool(body.from_image) == bool(body.from_template):
        raise InvalidRequest("give either fromImage or fromTemplate")
    steps = tuple(
        BuildStep(
            type=step.type,
            args=tuple(step.args or ()),
            files_hash=step.files_hash,
            force=bool(step.force),
        )
        for step in body.steps or ()
    )
    stage = Stage(
        name="builder",
        from_image=body.from_image or None,
        from_template=body.from_template or None,
        steps=steps,
    )
    return BuildPlan(
        stages=(stage,),
        auth=_auth_of(body.from_image_registry),
        force=bool(body.force),
        start_cmd=body.start_cmd or None,
        ready_cmd=body.ready_cmd or (DEFAULT_READY_CMD if body.start_cmd else None),
    )


def _auth_of(
    registry: schemas.GeneralRegistry | schemas.GcpRegistry | schemas.AwsRegistry | None,
) -> RegistryAuth | None:
    if registry is None:
        return None
    if isinstance(registry, schemas.GeneralRegistry):
        return RegistryAuth(username=registry.username, password=registry.password)
    if isinstance(registry, schemas.GcpRegistry):
        return RegistryAuth(username=_GCP_USER, password=registry.service_account_json)
    raise NotSupported(
        "fromImageRegistry: AWS access keys cannot log in to a registry by themselves",
        remediation="Get a password (`aws ecr get-login-password`), and give it as a general "
        "registry with the user name `AWS`.",
    )


def names_of(template: records.Template) -> list[str]:
    """The names that a template can be called by, as E2B shows them."""
    if template.project_id is None:
        return [template.name]
    return [f"{template.project_id}/{template.name}"]


def requested_of(
    template: records.Template, build: records.TemplateBuild
) -> schemas.BuildRequested:
    """Answer to a request for a build."""
    return schemas.BuildRequested(
        template_id=template.template_id,
        build_id=build.build_id,
        public=template.public,
        names=names_of(template),
        tags=build.tags,
        aliases=[template.name],
    )


def template_of(shown: Shown, use: tuple[int, float] | None) -> schemas.Template:
    """A template as it is shown. What the installation brings counts as built once."""
    template, build = shown.template, shown.build
    spawned, last = use or (0, None)
    own_id = str(uuid.uuid5(_BUILD_NAMESPACE, template.template_id))
    return schemas.Template(
        template_id=template.template_id,
        build_id=build.build_id if build else own_id,
        cpu_count=cpu_count(build.cpu if build else template.cpu),
        memory_mb=build.memory_mb if build else template.memory_mb,
        disk_size_mb=build.disk_mb if build else template.disk_mb,
        public=template.public,
        aliases=[template.name],
        names=names_of(template),
        created_at=rfc3339(template.created_at),
        updated_at=rfc3339(template.updated_at),
        created_by=None,
        last_spawned_at=None if last is None else rfc3339(last),
        spawn_count=spawned,
        build_count=shown.builds if template.project_id else 1,
        envd_version=build.envd_version if build else ENVD_VERSION,
        build_status=build.state if build else "ready",
    )


def build_of(build: records.TemplateBuild) -> schemas.Build:
    """A build in a list."""
    updated_at = build.finished_at or build.started_at or build.created_at
    return schemas.Build(
        build_id=build.build_id,
        status=build.state,
        created_at=rfc3339(build.created_at),
        updated_at=rfc3339(updated_at),
        cpu_count=cpu_count(build.cpu),
        memory_mb=build.memory_mb,
        disk_size_mb=build.disk_mb,
        envd_version=build.envd_version,
        finished_at=UNSET if build.finished_at is None else rfc3339(build.finished_at),
    )


def entry_of(entry: LogEntry) -> schemas.BuildLogEntry:
    """A line of a build's log."""
    return schemas.BuildLogEntry(
        timestamp=rfc3339(entry.at),
        level=entry.level,
        message=entry.message,
        step=UNSET if entry.step is None else entry.step,
    )


def info_of(
    build: records.TemplateBuild, page: Sequence[LogEntry], every: Sequence[LogEntry]
) -> schemas.BuildInfo:
    """How a build stands.

    Args:
        build: Which.
        page: The log entries to answer.
        every: All of them: the reason of a failure shows the failed step's last ones.
    """
    reason: schemas.BuildReason | UnsetType = UNSET
    if build.state == "error":
        of_step = [entry for entry in every if entry.step == build.error_step]
        reason = schemas.BuildReason(
            message=build.error or "the build failed",
            step=UNSET if build.error_step is None else build.error_step,
            log_entries=[entry_of(entry) for entry in of_step[-REASON_ENTRIES_MAX:]],
        )
    return schemas.BuildInfo(
        logs=[entry.message for entry in page],
        log_entries=[entry_of(entry) for entry in page],
        template_id=build.template_id,
        build_id=build.build_id,
        status=build.state,
        reason=reason,
    )
