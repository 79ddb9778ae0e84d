# SPDX-License-Identifier: Apache-2.0
"""What calls about projects, principals, tokens and the audit log return."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Final, Literal

import msgspec

PrincipalKind = Literal["person", "service", "agent"]
Role = Literal["owner", "admin", "developer", "viewer", "agent"]
FIRST_AUDIT_HASH: Final = "0" * 64
"""What the first entry of an audit log is tied to."""


class Quota(msgspec.Struct, kw_only=True, frozen=True):
    """Limits of a project with all below it. None: none of its own; those above it hold.

    Attributes:
        sandboxes: That are not paused, at one time.
        disk_mb: Of paused sandboxes too.
        egress_mb: Sent in a day (UTC).
    """

    sandboxes: int | None = None
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    gpu: int | None = None
    egress_mb: int | None = None
    creates_per_s: float | None = None


class ProjectUse(msgspec.Struct, kw_only=True, frozen=True):
    """What a project and all below it use now, or what it has handed on to those below it."""

    sandboxes: float = 0
    cpu: float = 0
    memory_mb: float = 0
    disk_mb: float = 0
    gpu: float = 0
    egress_mb: float = 0
    creates_per_s: float = 0


class ProjectInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A project with its limits, its use and what it has handed on.

    Attributes:
        parent_id: None: it is at the top.
        handed_on: The sum of the limits of those below it; never above its own.
    """

    project_id: str
    name: str = ""
    parent_id: str | None = None
    depth: int = 0
    created_at: datetime | None = None
    closed_at: datetime | None = None
    quota: Quota = Quota()
    use: ProjectUse = ProjectUse()
    handed_on: ProjectUse = ProjectUse()


class CallerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Whom the key or token in use stands for.

    Attributes:
        principal_id: None: the project itself.
        rights: In the project that it acts in.
        sandbox_id: The only sandbox that it reaches.
        operator: Its project is the installation's first one.
    """

    project_id: str
    project: str = ""
    key_id: str = ""
    principal_id: str | None = None
    token_id: str | None = None
    rights: tuple[str, ...] = ()
    sandbox_id: str | None = None
    expires_at: datetime | None = None
    operator: bool = False


class GrantInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What a principal may do in a project and those below it.

    Attributes:
        rights: Beside those of the role.
    """

    principal_id: str
    project_id: str
    role: str | None = None
    rights: tuple[str, ...] = ()
    granted_by: str = ""
    created_at: datetime | None = None


class PrincipalInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A person, service or agent.

    Attributes:
        project_id: Where it was made.
        grants: What it may do; only from ``get``.
    """

    principal_id: str
    project_id: str = ""
    kind: str = ""
    name: str = ""
    created_at: datetime | None = None
    disabled: bool = False
    grants: tuple[GrantInfo, ...] = ()


class TokenInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A short-lived part of what its maker may do.

    Attributes:
        projects: Where it is good, and below.
        sandbox_id: The only sandbox that it reaches.
        token: The token itself; only from the call that made it, else None.
    """

    token_id: str
    name: str = ""
    project_id: str = ""
    projects: tuple[str, ...] = ()
    rights: tuple[str, ...] = ()
    sandbox_id: str | None = None
    principal_id: str | None = None
    key_id: str = ""
    parent_id: str | None = None
    created_at: datetime | None = None
    expires_at: datetime | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return f"TokenInfo(token_id={self.token_id!r}, expires_at={self.expires_at!r})"


class AuditEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One call of the management API.

    Attributes:
        at: Unix seconds.
        actor_id: Principal, or key of a project.
        credential_id: The key or token that was shown.
        outcome: ``ok``, or the error's code.
        hash: SHA-256 of the hash before and of this entry.
        mac: HMAC of the hash with the installation's secret.
    """

    seq: int
    at: float
    request_id: str
    actor_kind: str
    actor_id: str | None
    credential_id: str | None
    project_id: str | None
    action: str
    object: str | None
    outcome: str
    status: int
    address: str | None
    hash: str
    mac: str


class AuditVerdict(msgspec.Struct, kw_only=True, frozen=True):
    """What a check of an audit log found.

    Attributes:
        entries: That were looked at.
        head_hash: Of the last one. Keep it elsewhere, to compare with later.
        fault: What is wrong first. None: nothing.
    """

    ok: bool
    entries: int = 0
    head_seq: int = 0
    head_hash: str = FIRST_AUDIT_HASH
    fault: str | None = None


_SAID = (
    "seq", "at", "request_id", "actor_kind", "actor_id", "credential_id", "project_id", "action",
    "object", "outcome", "status", "address",
)  # fmt: skip


def verify_audit(entries: Iterable[AuditEntry]) -> AuditVerdict:
    """Follow the hashes of a whole export, without the server.

    It shows that no entry between the first and the last was changed, removed or added since the
    hash of the last was noted elsewhere. Who wrote them is shown by their MACs, which only the
    server can check.

    Args:
        entries: From the first entry of the log on.
    """
    seq, digest = 0, FIRST_AUDIT_HASH
    for entry in entries:
        said = msgspec.json.encode([getattr(entry, name) for name in _SAID])
        fault = None
        if entry.seq != seq + 1:
            fault = f"entry {seq + 1} is missing"
        elif hashlib.sha256(digest.encode() + b"\n" + said).hexdigest() != entry.hash:
            fault = f"entry {entry.seq} was changed, or one before it"
        if fault is not None:
            return AuditVerdict(ok=False, entries=seq, head_seq=seq, head_hash=digest, fault=fault)
        seq, digest = entry.seq, entry.hash
    return AuditVerdict(ok=True, entries=seq, head_seq=seq, head_hash=digest)
