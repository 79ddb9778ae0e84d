# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of E2B's calls on templates, their builds and tags. Unknown fields are ignored."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .schemas import e2b_name

BuildStatus = Literal["waiting", "building", "ready", "error"]


class NewBuild(Struct, kw_only=True, frozen=True, rename=e2b_name):
    """``TemplateBuildRequestV3``; of version 2 too, which has fewer fields."""

    name: str | None = None
    alias: str | None = None
    tags: list[str] | None = None
    cpu_count: int | None = None
    memory_mb: int | None = None
    min_free_disk_mb: int | None = msgspec.field(name="minFreeDiskMb", default=None)


class GeneralRegistry(Struct, kw_only=True, frozen=True, tag="registry", tag_field="type"):
    username: str
    password: str


class GcpRegistry(Struct, kw_only=True, frozen=True, tag="gcp", tag_field="type", rename=e2b_name):
    service_account_json: str


class AwsRegistry(Struct, kw_only=True, frozen=True, tag="aws", tag_field="type"):
    pass


class Step(Struct, kw_only=True, frozen=True, rename=e2b_name):
    type: str
    args: list[str] | None = None
    files_hash: str | None = None
    force: bool | None = None


class StartBuild(Struct, kw_only=True, frozen=True, rename=e2b_name):
    """``TemplateBuildStartV2``."""

    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: GeneralRegistry | GcpRegistry | AwsRegistry | None = None
    force: bool | None = None
    steps: list[Step] | None = None
    start_cmd: str | None = None
    ready_cmd: str | None = None


class BuildRequested(Struct, kw_only=True, frozen=True, rename=e2b_name):
    template_id: str
    build_id: str
    public: bool
    names: list[str]
    tags: list[str]
    aliases: list[str]


class FileUpload(Struct, kw_only=True, frozen=True):
    present: bool
    url: str


class BuildLogEntry(Struct, kw_only=True, frozen=True, omit_defaults=True):
    timestamp: str
    level: Literal["debug", "info", "warn", "error"]
    message: str
    step: str | UnsetType = UNSET


class BuildReason(Struct, kw_only=True, frozen=True, rename=e2b_name):
    message: str
    step: str | UnsetType = UNSET
    log_entries: list[BuildLogEntry] = []


class BuildInfo(Struct, kw_only=True, frozen=True, rename=e2b_name):
    logs: list[str]
    log_entries: list[BuildLogEntry]
    template_id: str
    build_id: str
    status: BuildStatus
    reason: BuildReason | UnsetType = UNSET


class BuildLogs(Struct, kw_only=True, frozen=True):
    logs: list[BuildLogEntry]


class Template(Struct, kw_only=True, frozen=True, rename=e2b_name):
    template_id: str
    build_id: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    public: bool
    aliases: list[str]
    names: list[str]
    created_at: str
    updated_at: str
    created_by: None
    last_spawned_at: str | None
    spawn_count: int
    build_count: int
    envd_version: str
    build_status: BuildStatus


class Build(Struct, kw_only=True, frozen=True, rename=e2b_name):
    build_id: str
    status: BuildStatus
    created_at: str
    updated_at: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    envd_version: str
    finished_at: str | UnsetType = UNSET


class TemplateWithBuilds(Template, kw_only=True, frozen=True, rename=e2b_name):
    builds: list[Build]


class TemplateAlias(Struct, kw_only=True, frozen=True, rename=e2b_name):
    template_id: str
    public: bool


class Update(Struct, kw_only=True, frozen=True):
    public: bool | None = None


class Updated(Struct, kw_only=True, frozen=True):
    names: list[str]


class AssignTags(Struct, kw_only=True, frozen=True):
    target: str
    tags: list[str]


class AssignedTags(Struct, kw_only=True, frozen=True, rename=e2b_name):
    tags: list[str]
    build_id: str


class DeleteTags(Struct, kw_only=True, frozen=True):
    name: str
    tags: list[str]


class Tag(Struct, kw_only=True, frozen=True, rename=e2b_name):
    tag: str
    build_id: str
    created_at: str
