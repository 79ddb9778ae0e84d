# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of the native API on templates and their builds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from opendsec_server.contract import limits

from .schemas import Cpu, DiskMb, MemoryMb, Name, Time

BuildState = Literal["waiting", "building", "ready", "error"]
Reference = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.NAME_CHARS_MAX,
        description="`name`, `name:tag`, an id, or `project/name:tag`.",
        examples=["mine:v1"],
    ),
]
Tags = Annotated[
    list[str],
    Meta(
        max_length=limits.TEMPLATE_TAGS_MAX,
        description="Names of builds: lower-case letters, digits, `.`, `-`, `_`.",
        examples=[["v1", "stable"]],
    ),
]


class BuildError(Struct, kw_only=True, frozen=True):
    """Why a build failed."""

    code: Annotated[str, Meta(description="As the codes of errors.", examples=["build_failed"])]
    message: Annotated[
        str, Meta(description="With the command, its exit code and its last output.")
    ]
    step: Annotated[str | None, Meta(description="`base`, the number of the step, or `finalize`.")]


class Build(Struct, kw_only=True, frozen=True):
    """One build of a template."""

    build_id: str
    template_id: str
    state: BuildState
    tags: Annotated[list[str], Meta(description="Which it gets when it is ready.")]
    cpu: float
    memory_mb: int
    disk_mb: int
    image: Annotated[str | None, Meta(description="Digest. Null: it is not ready.")]
    default_user: str | None
    default_workdir: str | None
    env: dict[str, str]
    start_command: Annotated[
        list[str] | None, Meta(description="Runs in every sandbox of the template.")
    ]
    error: BuildError | None
    created_at: Time
    started_at: Time | None
    finished_at: Time | None


class Tag(Struct, kw_only=True, frozen=True):
    """The build that `name:tag` means."""

    tag: str
    build_id: str
    created_at: Time


class Template(Struct, kw_only=True, frozen=True):
    """A named image with defaults."""

    template_id: str
    name: str
    own: Annotated[bool, Meta(description="Of the caller's project, which may change it.")]
    cpu: float
    memory_mb: int
    disk_mb: int
    created_at: Time
    updated_at: Time
    public: Annotated[bool, Meta(description="Every project may use it.")]
    state: Annotated[
        BuildState, Meta(description="Of the build with the tag `default`, else of the newest.")
    ]
    builds: int
    spawned: Annotated[int, Meta(description="Sandboxes made of it, as far as records go back.")]
    last_spawned_at: Time | None


class TemplateList(Struct, kw_only=True, frozen=True):
    """The project's templates and those of the installation."""

    templates: list[Template]


class TemplateDetail(Template, kw_only=True, frozen=True):
    """A template with its tags and newest builds."""

    tags: list[Tag]
    newest_builds: list[Build]


class UpdateTemplate(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    public: bool


class AssignTags(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    tags: Tags


class RegistryLogin(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How to log in to a registry. Not kept."""

    username: str
    password: str

    def __repr__(self) -> str:
        return "RegistryLogin(…)"


class PushTemplate(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    reference: Annotated[
        Name, Meta(description="Where to: a registry's reference.", examples=["host:5000/mine:1"])
    ]
    registry_auth: RegistryLogin | None = None


class Pushed(Struct, kw_only=True, frozen=True):
    """An image that is in a registry now."""

    digest: Annotated[str, Meta(description="Of its manifest there.")]


class NewBuild(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Asks for a build; the template is made if the project has none of that name."""

    name: Reference
    tags: Tags = []
    cpu: Cpu | None = None
    memory_mb: MemoryMb | None = None
    disk_mb: DiskMb | None = None


class FileUpload(Struct, kw_only=True, frozen=True):
    """Where to send an archive."""

    present: Annotated[bool, Meta(description="It was sent before.")]
    url: Annotated[str, Meta(description="Takes a tar by PUT, without a key, for an hour.")]


class BuildStep(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One step."""

    type: Annotated[str, Meta(description="COPY, RUN, ENV, WORKDIR, USER or ARG.")]
    args: Annotated[
        list[str],
        Meta(
            description="COPY: source, target, owner, octal mode. RUN: command, user. ENV, ARG: "
            "name and value, over and over. WORKDIR: path. USER: name."
        ),
    ] = []
    files: Annotated[str | None, Meta(description="COPY: the archive's hash.")] = None
    force: bool = False


class StartBuild(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a build does: a Dockerfile, or a base and steps."""

    dockerfile: Annotated[str | None, Meta(description="Its text.")] = None
    context: Annotated[
        str | None, Meta(description="Hash of the archive that its COPY lines copy from.")
    ] = None
    build_args: dict[str, str] = {}
    target: Annotated[str | None, Meta(description="The last stage to build.")] = None
    from_image: str | None = None
    from_template: str | None = None
    steps: list[BuildStep] = []
    start_command: Annotated[
        str | None, Meta(description="Runs in every sandbox of the template.")
    ] = None
    start_image: Annotated[bool, Meta(description="ENTRYPOINT and CMD are the start command.")] = (
        False
    )
    ready_command: Annotated[
        str | None, Meta(description="Exits with 0 when the start command is up.")
    ] = None
    force: Annotated[bool, Meta(description="Use no results of earlier builds.")] = False
    registry_auth: RegistryLogin | None = None


class LogEntry(Struct, kw_only=True, frozen=True):
    """A line of a build's log."""

    at: Time
    level: Literal["debug", "info", "warn", "error"]
    message: str
    step: str | None


class BuildEnd(Struct, kw_only=True, frozen=True):
    """The last line of a log that is followed."""

    build: Build
