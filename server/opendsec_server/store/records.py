# SPDX-License-Identifier: AGPL-3.0-only
"""What the store keeps, as typed structs. All times are Unix seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from opendsec_server.contract.errors import Fault
from opendsec_server.contract.images import ReadyCheck, StartCommand
from opendsec_server.contract.node import (
    Accelerator,
    Backend,
    GroupMembership,
    NetworkPolicy,
    OnTimeout,
    SandboxUsage,
    StateMode,
    VmOptions,
)
from opendsec_server.contract.states import TERMINAL, EndReason, State

KeyOutcome = Literal["pending", "done", "failed"]
SnapshotState = Literal["making", "ready", "deleting"]
BuildState = Literal["waiting", "building", "ready", "error"]


class Project(msgspec.Struct, kw_only=True, frozen=True):
    """Scope of access and quota. A limit of None: none of its own; what is above it decides."""

    project_id: str
    name: str
    sandboxes_max: int
    """``quotas.NO_LIMIT``: none of its own."""
    created_at: float
    parent_id: str | None = None
    """None: at the top."""
    depth: int = 0
    cpu_max: float | None = None
    memory_mb_max: int | None = None
    disk_mb_max: int | None = None
    gpu_max: int | None = None
    egress_mb_max: int | None = None
    """MiB sent in a day (UTC)."""
    creates_per_s_max: float | None = None
    closed_at: float | None = None


class ApiKey(msgspec.Struct, kw_only=True, frozen=True):
    """A key of a project. Only its SHA-256 is kept."""

    key_id: str
    project_id: str
    name: str
    sha256: str
    hint: str
    """First and last characters, for people to tell keys apart."""
    created_at: float
    principal_id: str | None = None
    """Whose it is. None: the project's own."""
    rights: str | None = None
    """Packed list. None: all in the project, or what the principal may."""


class Template(msgspec.Struct, kw_only=True, frozen=True):
    """A named image with defaults; of a project's own, the builds have them."""

    template_id: str
    project_id: str | None
    """None: it belongs to the installation."""
    name: str
    image: str
    """What the node's image store resolves."""
    public: bool
    cpu: float
    memory_mb: int
    disk_mb: int
    default_user: str
    default_workdir: str | None
    created_at: float
    updated_at: float
    backend: Backend | None = None
    """The only backend that can start it. None: any that starts layers."""


class TemplateBuild(msgspec.Struct, kw_only=True, frozen=True):
    """One build of a project's template."""

    build_id: str
    """A UUID."""
    template_id: str
    project_id: str
    state: BuildState
    tags: list[str]
    """Where it goes when it is ready."""
    cpu: float
    memory_mb: int
    disk_mb: int
    image: str | None = None
    """Digest. None: not ready."""
    default_user: str | None = None
    default_workdir: str | None = None
    env: dict[str, str] = {}
    start: StartCommand | None = None
    envd_version: str
    error_code: str | None = None
    error: str | None = None
    error_step: str | None = None
    """``base``, ``finalize``, or the number of the step, from 1 on."""
    created_at: float
    started_at: float | None = None
    """None: its files are still being sent."""
    finished_at: float | None = None


class TemplateTag(msgspec.Struct, kw_only=True, frozen=True):
    """The build that ``name:tag`` means."""

    template_id: str
    tag: str
    build_id: str
    created_at: float


class SandboxExtra(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a caller said that no decision needs, kept to be answered again."""

    allow_internet_access: bool | None = None
    """E2B: None means that the caller did not say."""
    mcp: dict[str, Any] | None = None
    """E2B: configuration of an MCP gateway, which the SDK itself starts."""
    vm: VmOptions | None = None
    """Of a full virtual machine: for the node to decide."""
    start: StartCommand | None = None
    """Started with it and awaited: the template's, or the image's own."""
    image: str | None = None
    """Reference of the image that was asked for instead of a template."""
    layers: tuple[str, ...] = ()
    """What was asked to be put on top of it, in order."""
    start_image: bool = False
    """The image's own program was asked to be started."""
    ready: ReadyCheck | None = None
    """And awaited so."""
    node_labels: dict[str, str] = {}
    """Labels that its node must have."""
    group: GroupMembership | None = None
    """The group that it is a member of."""
    node_id: str | None = None
    """The only node that may make it: the other members of its group are there."""


class SandboxRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One sandbox, from its create call until long after its end."""

    sandbox_id: str
    project_id: str
    node_id: str
    template_id: str
    template: str
    """The template's name."""
    backend: Backend
    state: State
    cpu: float
    memory_mb: int
    disk_mb: int
    env: dict[str, str]
    metadata: dict[str, str]
    labels: list[str]
    task_id: str | None
    created_at: float
    started_at: float | None = None
    end_at: float
    ended_at: float | None = None
    end_reason: EndReason | None = None
    message: str | None = None
    fault: Fault | None = None
    idle_timeout_s: int | None = None
    on_timeout: OnTimeout = "kill"
    network: NetworkPolicy = NetworkPolicy()
    extra: SandboxExtra = SandboxExtra()
    transitions: int = 0
    """How many transitions it has made, also those no longer kept."""
    timeout_s: float = 300.0
    """What was asked for last; an automatic resume starts it anew."""
    pause_mode: StateMode = "full"
    """What a pause by time-out keeps."""
    auto_resume: bool = False
    accelerator: Accelerator = "none"
    vmm: str | None = None
    paused_mode: StateMode | None = None
    """What the present pause kept. None while it is not paused, or not known."""
    node_seq: int = 0
    """The node's count of changes of state at its last report that was recorded."""
    snapshot_id: str | None = None
    """Started from this snapshot, which may be gone by now."""
    image: str | None = None
    """As the template or snapshot said at the create. None: made by an older release."""
    default_user: str | None = None
    default_workdir: str | None = None
    gpu: int = 0
    """Devices of the host that it has."""

    @property
    def terminal(self) -> bool:
        """Whether it is over for good."""
        return self.state in TERMINAL


class Transition(msgspec.Struct, kw_only=True, frozen=True):
    """One change of state."""

    from_state: State
    to_state: State
    at: float
    reason: EndReason | None
    message: str | None
    cause: str
    """Who saw or asked for it: ``create``, ``node`` or ``reconcile``."""


class StateChange(msgspec.Struct, kw_only=True, frozen=True):
    """A state that a sandbox is known to have reached."""

    sandbox_id: str
    state: State
    at: float
    cause: str
    reason: EndReason | None = None
    message: str | None = None
    fault: Fault | None = None
    started_at: float | None = None
    """Kept only by the change that starts the sandbox."""
    end_at: float | None = None
    paused_mode: StateMode | None = None
    accelerator: Accelerator | None = None
    vmm: str | None = None
    seq: int = 0
    """The node's count with this report; older ones than recorded are left out. 0: not told."""
    usage: SandboxUsage | None = None
    """With the end: all that it used."""
    while_in: tuple[State, ...] = ()
    """Applies only to a record in one of these states. Empty: in any."""


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
    """A saved disk, or disk and memory, of a project."""

    snapshot_id: str
    project_id: str
    node_id: str
    source_id: str
    name: str | None
    tag: str
    state: SnapshotState
    ephemeral: bool
    keyed: bool
    backend: Backend
    mode: StateMode
    template_id: str
    """Of the source."""
    template: str
    image: str
    cpu: float
    memory_mb: int
    disk_mb: int
    default_user: str
    default_workdir: str | None
    created_at: float
    disk_bytes: int = 0
    memory_bytes: int = 0
    versions: dict[str, str] = {}


class IdempotencyClaim(msgspec.Struct, kw_only=True, frozen=True):
    """A caller's key, and the digest of what was asked with it."""

    key: str
    params_sha256: str


class IdempotencyRow(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of an earlier request with a key."""

    project_id: str
    key: str
    params_sha256: str
    sandbox_id: str
    """What the key stands for: a sandbox, or the snapshot of a snapshot or fork request."""
    outcome: KeyOutcome
    expires_at: float
    result: str | None = None
