# SPDX-License-Identifier: AGPL-3.0-only
"""Bodies of the native API's projects, principals, tokens and audit log. Their descriptions are
also its documentation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from .schemas import Name, Time

RightName = Annotated[
    str,
    Meta(
        max_length=80,
        description="`area:act`; `*` stands for any of either, and alone for everything.",
        examples=["sandboxes:read"],
    ),
]
Id = Annotated[str, Meta(max_length=80)]
Kind = Annotated[Literal["person", "service", "agent"], Meta(examples=["agent"])]


class Quota(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Limits of a project with all below it. `null`: none of its own; those above it hold."""

    sandboxes: Annotated[
        int | None, Meta(description="That are not paused, at one time.", examples=[100])
    ] = None
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: Annotated[int | None, Meta(description="Of paused sandboxes too.")] = None
    gpu: int | None = None
    egress_mb: Annotated[int | None, Meta(description="Sent in a day (UTC).")] = None
    creates_per_s: float | None = None


class QuotaChange(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Limits to change. What is left out stays; `null` takes a limit away."""

    sandboxes: int | UnsetType | None = UNSET
    cpu: float | UnsetType | None = UNSET
    memory_mb: int | UnsetType | None = UNSET
    disk_mb: int | UnsetType | None = UNSET
    gpu: int | UnsetType | None = UNSET
    egress_mb: int | UnsetType | None = UNSET
    creates_per_s: float | UnsetType | None = UNSET


class CreateProject(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A project to make."""

    name: Annotated[Name, Meta(description="Unique under its parent.", examples=["training"])]
    parent_id: Annotated[Id | None, Meta(description="Default: the caller's project.")] = None
    quota: Quota = Quota()


class ChangeProject(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What to change of a project."""

    name: Name | None = None
    quota: QuotaChange = QuotaChange()


class Use(Struct, kw_only=True, frozen=True):
    """What a project and all below it use now."""

    sandboxes: int
    cpu: float
    memory_mb: int
    disk_mb: int
    gpu: int
    egress_mb: Annotated[int, Meta(description="Sent today (UTC).")]


class HandedOn(Struct, kw_only=True, frozen=True):
    """The sum of the limits of those below a project. Never above its own."""

    sandboxes: float
    cpu: float
    memory_mb: float
    disk_mb: float
    gpu: float
    egress_mb: float
    creates_per_s: float


class ProjectState(Struct, kw_only=True, frozen=True):
    """A project with its limits, its use and what it has handed on."""

    project_id: str
    name: str
    parent_id: str | None
    depth: int
    created_at: Time
    closed_at: Time | None
    quota: Quota
    use: Use
    handed_on: HandedOn


class ProjectList(Struct, kw_only=True, frozen=True):
    """The caller's project and all below it, parents first."""

    projects: list[ProjectState]


class CallerState(Struct, kw_only=True, frozen=True):
    """Whom the key or token of this request stands for."""

    project_id: str
    project: str
    key_id: str
    principal_id: str | None
    token_id: str | None
    rights: list[RightName]
    sandbox_id: Annotated[str | None, Meta(description="The only sandbox that it reaches.")]
    expires_at: Time | None
    operator: Annotated[bool, Meta(description="Its project is the installation's first one.")]


class CreatePrincipal(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A principal to make."""

    kind: Kind
    name: Annotated[Name, Meta(description="Unique in its project.", examples=["ada"])]


class ChangePrincipal(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What to change of a principal."""

    disabled: Annotated[bool, Meta(description="Its keys and tokens are refused meanwhile.")]


class Principal(Struct, kw_only=True, frozen=True):
    """A person, service or agent."""

    principal_id: str
    project_id: Annotated[str, Meta(description="Where it was made.")]
    kind: Kind
    name: str
    created_at: Time
    disabled: bool


class PrincipalList(Struct, kw_only=True, frozen=True):
    """Those of the caller's project and of all below it, oldest first."""

    principals: list[Principal]


class PutGrant(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a principal may do in a project and those below it."""

    role: Annotated[
        Id | None,
        Meta(
            description="`owner`, `admin`, `developer`, `viewer` or `agent`.",
            examples=["developer"],
        ),
    ] = None
    rights: Annotated[
        list[RightName], Meta(description="Beside those of the role.", max_length=64)
    ] = []


class Grant(Struct, kw_only=True, frozen=True):
    """What a principal may do in a project and those below it."""

    principal_id: str
    project_id: str
    role: str | None
    rights: list[RightName]
    granted_by: Annotated[str, Meta(description="Principal, or key of a project.")]
    created_at: Time


class PrincipalState(Principal, kw_only=True, frozen=True):
    """A principal and what it is granted."""

    grants: list[Grant]


class CreatePrincipalKey(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A key of a principal to make."""

    name: Name
    project_id: Annotated[
        Id | None,
        Meta(
            description="Where it acts unless a request names another. Default: where the "
            "principal was first granted something.",
        ),
    ] = None


class RoleList(Struct, kw_only=True, frozen=True):
    """The rights of each role."""

    roles: dict[str, list[RightName]]


class CreateToken(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A token to make."""

    name: Annotated[Name, Meta(examples=["rollout-17"])] = "token"
    ttl_s: Annotated[
        int | None,
        Meta(description="Seconds until it ends, at most a week. Default: an hour."),
    ] = None
    rights: Annotated[
        list[RightName] | None,
        Meta(
            description="Default: all of the caller's; of a token for one sandbox, "
            "`sandboxes:read` and `sandboxes:connect`."
        ),
    ] = None
    projects: Annotated[
        list[str] | None,
        Meta(description="Where it is good, and below. Default: the caller's project."),
    ] = None
    sandbox_id: Annotated[Id | None, Meta(description="The only sandbox that it reaches.")] = None


class Token(Struct, kw_only=True, frozen=True):
    """A token, without its secret."""

    token_id: str
    name: str
    project_id: str
    projects: list[str]
    rights: list[RightName]
    sandbox_id: str | None
    principal_id: str | None
    key_id: str
    parent_id: Annotated[str | None, Meta(description="The token that made it.")]
    created_at: Time
    expires_at: Time


class NewToken(Token, kw_only=True, frozen=True):
    """A token just made. The secret is shown only here."""

    token: Annotated[str, Meta(description="Send it as a key is sent.")]


class TokenList(Struct, kw_only=True, frozen=True):
    """The project's tokens that are good now, newest first."""

    tokens: list[Token]


class AuditEntry(Struct, kw_only=True, frozen=True):
    """One call."""

    seq: int
    at: Annotated[float, Meta(description="Unix seconds: what the hash is of.")]
    request_id: str
    actor_kind: Literal["key", "principal", "token", "none"]
    actor_id: Annotated[str | None, Meta(description="Principal, or key of a project.")]
    credential_id: Annotated[str | None, Meta(description="The key or token that was shown.")]
    project_id: str | None
    action: Annotated[str, Meta(examples=["POST /v1/sandboxes"])]
    object: str | None
    outcome: Annotated[str, Meta(description="`ok`, or the error's code.")]
    status: int
    address: str | None
    hash: Annotated[str, Meta(description="SHA-256 of the hash before and of this entry.")]
    mac: Annotated[str, Meta(description="HMAC of the hash with the installation's secret.")]


class AuditPage(Struct, kw_only=True, frozen=True):
    """Entries in order."""

    entries: list[AuditEntry]
    next_after: Annotated[int | None, Meta(description="`after` of the next page.")]


class AuditVerdict(Struct, kw_only=True, frozen=True):
    """What a check of the whole log found."""

    ok: bool
    entries: int
    head_seq: int
    head_hash: Annotated[str, Meta(description="Keep it elsewhere, to compare with later.")]
    fault: str | None
