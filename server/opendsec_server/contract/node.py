# SPDX-License-Identifier: AGPL-3.0-only
"""What the control plane asks of a node: structs and the ``NodeClient`` interface.

All times are Unix seconds (float, UTC). All sizes name their unit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from .actions import KeptProgram, ProgramOrder
from .images import (
    ExecEvent,
    ImageInfo,
    NodeImages,
    PackOptions,
    StartCommand,
)
from .states import EndReason, State

Backend = Literal["container", "microvm", "vm", "fncall"]
Accelerator = Literal["none", "kvm", "tcg"]
OnTimeout = Literal["kill", "pause"]
StateMode = Literal["full", "filesystem"]
"""What a pause or snapshot keeps: ``full`` disk and memory, ``filesystem`` the disk only."""


class Capabilities(msgspec.Struct, kw_only=True, frozen=True):
    """What a backend can do, as data. API, CLI and docs look here and never at names."""

    own_kernel: bool
    """Sandboxes do not share the host's kernel."""
    memory_snapshot: bool
    """Snapshots and forks can hold memory: ``full`` is possible, not only ``filesystem``."""
    pause_survives_reboot: bool
    """A full pause is kept on disk; otherwise it holds (swappable) memory of the running host."""
    fork: bool
    """Sandboxes can be forked at all (at least their disk)."""
    disk_images: bool
    """Boots a disk image with its own kernel and init, instead of layers."""
    console: bool
    """Has a serial console and a screen to look at."""
    passthrough: bool
    """Devices of the host can be given to a sandbox (VFIO)."""


class BackendInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One backend that a node offers."""

    name: Backend
    capabilities: Capabilities
    accelerator: Accelerator = "none"
    """How guest instructions run: ``kvm`` on the processor, ``tcg`` emulated and slow."""
    vmm: str | None = None
    """The program behind a virtual machine (``firecracker``, ``qemu``) with its version."""


class NetworkPolicy(msgspec.Struct, kw_only=True, frozen=True):
    """Egress of one sandbox.

    ``allow`` beats ``deny``. Entries are IPv4 addresses or CIDRs. Private, CGNAT, loopback and
    link-local ranges are closed unless listed in ``allow`` (link-local metadata, other sandboxes
    and the node itself stay closed in any case). ``internet=False`` closes everything that
    ``allow`` does not open, DNS too.
    """

    internet: bool = True
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


Firmware = Literal["bios", "uefi", "direct"]
"""How a disk image starts: by a boot sector, by an EFI program, or by a kernel kept beside it."""

ConsoleKind = Literal["console", "vnc"]
"""Where a caller looks: the serial console (raw bytes) or the screen (RFB, as VNC speaks it)."""


class VmDisk(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One more disk of a full virtual machine. The guest finds it by its serial ``data<n>``,
    counted from 1."""

    size_mb: int = 0
    """Size in MiB; of an image, at least that of the image. 0: the image's."""
    image: str | None = None
    """Name of an imported disk image to begin with. None: empty, unformatted."""


class VmOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What only full virtual machines have."""

    firmware: Firmware | None = None
    """None: as the image was imported."""
    disks: tuple[VmDisk, ...] = ()
    """Beside the first one, which begins as the image."""
    user_data: str | None = None
    """For the guest's cloud-init: any format that it takes. Joined with ours."""
    devices: tuple[str, ...] = ()
    """PCI addresses (``0000:65:00.0``) of host devices to pass through. Each must be allowed by
    the node's ``passthrough_devices``. Such a machine's memory cannot be saved."""


class GroupMembership(msgspec.Struct, kw_only=True, frozen=True):
    """That a sandbox is one of several on a private network of their own.

    All members of a group are on one node. They reach each other, by name and by address, on every
    port; nobody else reaches them. A fork or a sandbox from a snapshot of a member is in no group.

    Attributes:
        group_id: Of ``contract.ids.new_group_id``. Belongs to the sandbox's project.
        name: A DNS label, unique in the group.
        aliases: Further DNS names; several members may share one.
    """

    group_id: str
    name: str
    aliases: tuple[str, ...] = ()


class SandboxSpec(msgspec.Struct, kw_only=True, frozen=True):
    """Everything a node needs to make one sandbox. Journalled before anything is made."""

    sandbox_id: str
    project_id: str
    backend: Backend = "container"
    template_id: str
    image: str
    """Digest (``sha256:…``) of an image on the node, or a name that its store knows (``base``)."""
    start: StartCommand | None = None
    """Started with it and awaited. None: nothing but the guest agent runs."""
    cpu: float
    memory_mb: int
    disk_mb: int
    env: dict[str, str] = {}
    created_at: float
    end_at: float
    timeout_s: float = 300.0
    """What was asked for; an automatic resume starts it anew (at least 300 s)."""
    idle_timeout_s: int | None = None
    on_timeout: OnTimeout = "kill"
    pause_mode: StateMode = "full"
    """What a pause by time-out keeps."""
    auto_resume: bool = False
    """Any request to the paused sandbox resumes it first."""
    snapshot_id: str | None = None
    """Start from this snapshot on the node instead of from ``image`` alone."""
    network: NetworkPolicy = NetworkPolicy()
    group: GroupMembership | None = None
    vm: VmOptions | None = None
    """Backends with ``disk_images`` only. None: as the snapshot's source, else the defaults."""
    default_user: str = "user"
    default_workdir: str | None = None
    access_token: str
    """The data plane's token (E2B: ``envdAccessToken``)."""
    traffic_token: str
    """Opens user ports when ``allow_public_traffic`` is false."""
    control_token: str
    """Only node and edge hold it: opens the guest agent's internal routes."""


class SandboxUsage(msgspec.Struct, kw_only=True, frozen=True):
    """What one sandbox has used since it was created, counted on its node from outside.

    Kept over pauses, resumes, and restarts of the node's agent.
    """

    cpu_seconds: float = 0.0
    """Processor time of everything that ran for it, the VMM of a virtual machine included."""
    memory_mb_seconds: float = 0.0
    """MiB held, without file cache, times seconds: the integral over its life."""
    disk_bytes: int = 0
    """What its own disk held at the last reading."""
    egress_bytes: int = 0
    """Bytes that left it on its network link, answers to the API among them."""
    ingress_bytes: int = 0
    """Bytes that came to it on its network link."""
    at: float = 0.0
    """When it was read. 0: never yet."""


class SandboxStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What the node says of one of its sandboxes."""

    sandbox_id: str
    project_id: str
    template_id: str
    backend: Backend
    state: State
    created_at: float
    started_at: float | None = None
    end_at: float
    ended_at: float | None = None
    reason: EndReason | None = None
    message: str | None = None
    """One sentence of evidence for ``reason`` (exit status, which limit)."""
    pause_mode: StateMode | None = None
    """While paused: what was kept."""
    accelerator: Accelerator = "none"
    vmm: str | None = None
    seq: int = 0
    """How many changes of state it has made, counted on the node and kept with its record. Orders
    reports that come by different ways, since states recur. 0: not told."""
    usage: SandboxUsage | None = None
    """Of an ended one: all that it used. None: it has not ended, or was never counted."""


class Snapshot(msgspec.Struct, kw_only=True, frozen=True):
    """A saved disk, or disk and memory, that sandboxes can start from."""

    snapshot_id: str
    source_id: str
    """The sandbox it was taken of; it need not exist any more."""
    backend: Backend
    mode: StateMode
    image: str
    cpu: float
    memory_mb: int
    disk_mb: int
    created_at: float
    disk_bytes: int
    """Bytes its disk holds; most are shared with the sandbox it was taken of."""
    memory_bytes: int
    """Bytes on disk of its memory; zero pages and pages shared with an older one not counted."""
    vm: VmOptions | None = None
    """Of a full virtual machine: how its source was made."""
    start: StartCommand | None = None
    """Its source's. It runs in the saved memory; from the disk alone it is started again."""
    versions: dict[str, str] = {}
    """What it needs to be restored: VMM, CPU model, kernel, agent. Empty without memory."""


Snapshots = list[Snapshot]


class PauseReport(msgspec.Struct, kw_only=True, frozen=True):
    """What a pause did."""

    status: SandboxStatus
    took_s: float
    memory_before_bytes: int
    memory_freed_bytes: int
    stored_bytes: int
    """Bytes written to disk for it."""


class Route(msgspec.Struct, kw_only=True, frozen=True):
    """How the edge reaches a running sandbox."""

    sandbox_id: str
    state: State
    address: str
    agent_port: int
    control_token: str
    traffic_token: str
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


class MetricSample(msgspec.Struct, kw_only=True, frozen=True):
    """One reading, taken on the node from outside the sandbox."""

    at: float
    cpu_count: float
    cpu_used_pct: float
    memory_used_bytes: int
    memory_total_bytes: int
    memory_cache_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int


MetricSamples = list[MetricSample]


class NodeLoad(msgspec.Struct, kw_only=True, frozen=True):
    """How busy the machine is."""

    cpu_used: float = 0.0
    """Share of its processors that was busy lately, 0 to 1."""
    memory_available_bytes: int | None = None
    """What can be had without swapping. None: not told."""


class NodeInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The node's identity, abilities and load."""

    node_id: str
    hostname: str
    version: str
    backends: tuple[BackendInfo, ...]
    cpu_count: int
    memory_total_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int
    sandboxes: int
    sandboxes_max: int
    features: dict[str, Any] = {}
    """For people and doctor: cgroup version, oci runtime, user namespaces, quota kind."""
    load: NodeLoad = NodeLoad()
    labels: dict[str, str] = {}
    """What operators say of it. Kept by the node."""
    draining: bool = False
    """It takes no new sandboxes; those that it has go on. Kept by the node."""


class NodeEvent(msgspec.Struct, kw_only=True, frozen=True):
    """A change of a sandbox's state, in the order it happened on the node."""

    sandbox_id: str
    state: State
    at: float
    reason: EndReason | None = None
    message: str | None = None
    seq: int = 0
    """``SandboxStatus.seq`` after this change."""
    usage: SandboxUsage | None = None
    """With the end: all that it used."""


class NodeClient(Protocol):
    """The node as the control plane sees it: in-process or over HTTP."""

    @property
    def images(self) -> NodeImages:
        """Its image store."""

    async def info(self) -> NodeInfo:
        """Identity, abilities, load."""

    async def set_marks(
        self, *, labels: dict[str, str] | None = None, draining: bool | None = None
    ) -> NodeInfo:
        """Replace what operators say of the node. It is kept over restarts.

        Args:
            labels: All its labels. None: as they are.
            draining: Whether it refuses new sandboxes. None: as it is.
        """

    async def create(self, spec: SandboxSpec) -> SandboxStatus:
        """Make and start a sandbox; return when its guest agent answers.

        Idempotent by ``spec.sandbox_id``: a second call joins or returns the first.

        Raises:
            NodeFull: no slot, memory or disk.
            TemplateNotFound: ``spec.image`` is not on the node.
            StartTimeout, SandboxStartFailed: it did not come up; all of it was removed.
            StateConflict: it was killed while starting.
        """

    async def get(self, sandbox_id: str) -> SandboxStatus:
        """Status of one sandbox, ended ones included while the journal keeps them.

        Raises:
            SandboxNotFound: the journal does not know it.
        """

    async def list(self) -> list[SandboxStatus]:
        """Every sandbox that has not ended."""

    async def kill(self, sandbox_id: str, reason: EndReason = EndReason.KILLED) -> SandboxStatus:
        """End a sandbox in any state. Idempotent. Returns when nothing of it runs.

        Raises:
            SandboxNotFound: the journal does not know it.
        """

    async def pause(self, sandbox_id: str, mode: StateMode = "full") -> PauseReport:
        """Free a running sandbox's memory and keep the rest. A call during a pause joins it.

        Its end time is forgotten; ``resume`` sets a new one. Connections to it end with
        ``unavailable``. Returns when it is paused.

        Raises:
            SandboxNotFound: unknown or ended.
            AlreadyPaused: it is.
            StateConflict: it is starting, resuming or ending.
            NotSupported: the backend cannot keep memory; ask for ``filesystem``.
            SnapshotFailed: it could not be saved; it goes on running.
        """

    async def resume(
        self, sandbox_id: str, *, end_at: float, reboot: bool = False
    ) -> SandboxStatus:
        """Let a paused sandbox run on. Waits while it is pausing; a call during a resume joins it.

        Args:
            sandbox_id: Which.
            end_at: Its new end time. Never shortens that of one which already runs.
            reboot: Forget the kept memory and start from the disk.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it is starting or ending.
            NodeFull: no room to run it now; it stays paused.
            SnapshotIncompatible: the kept memory does not fit this machine any more.
            SnapshotDamaged: what was kept is damaged; it stays paused.
            ResumeFailed: it did not come up; it stays paused.
        """

    async def snapshot(
        self,
        sandbox_id: str,
        snapshot_id: str,
        *,
        mode: StateMode = "full",
        ephemeral: bool = False,
    ) -> Snapshot:
        """Save a running or paused sandbox's state of this instant; it goes on afterwards.

        Idempotent by ``snapshot_id``.

        Args:
            sandbox_id: Which.
            snapshot_id: Chosen by the caller.
            mode: Of a sandbox paused without memory only ``filesystem`` is possible.
            ephemeral: For a fork: gone when the node restarts, at the latest.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: the backend cannot keep memory; ask for ``filesystem``.
            SnapshotFailed: it could not be saved; the sandbox goes on, nothing is left.
            NodeFull: no room on the disk.
        """

    def exec(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        user: str | None = None,
        workdir: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[ExecEvent]:
        """Run a program in a running sandbox by its guest agent; ends with exactly one ``end``.

        Args:
            sandbox_id: Which.
            argv: Program and arguments; no shell is added.
            user: None: the sandbox's default user.
            workdir: None: the user's home.
            env: Added to the sandbox's.
            timeout_s: After it the whole process tree is killed, and ``end`` says so.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it does not run now.
            InvalidRequest: no such user, directory or program.
            AgentUnresponsive: the agent went away; what became of the program is not known.
        """

    async def start_kept(self, sandbox_id: str, tag: str, order: ProgramOrder) -> None:
        """Start a program in a running sandbox; it runs on whatever becomes of the caller.

        Its outcome is kept by the guest agent until it is forgotten. A tag starts one program.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``; or another guest agent was meant. It did
                not run.
            InvalidRequest: no such user, directory or program. It did not run.
            Conflict: the tag was used or ruled out before. Nothing was started by this call.
            NodeFull: too many programs, or too much kept output. It did not run.
            AgentUnresponsive, NodeUnavailable: whether it runs is not known; ask for the tag.
        """

    async def kept(
        self, sandbox_id: str, tag: str, *, wait_s: float = 0.0, void: bool = False
    ) -> KeptProgram:
        """What became of a tag.

        Args:
            sandbox_id: Which.
            tag: Of a ``start_kept``.
            wait_s: Wait so long for the program's end, 60 s at most.
            void: If the tag is not known, it starts nothing any more: a start that is still on
                its way will be refused.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``.
            AgentUnresponsive, NodeUnavailable: not known now.
        """

    async def forget_kept(self, sandbox_id: str, tag: str) -> None:
        """Drop the outcome of a program that has ended. Idempotent.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``.
            AgentUnresponsive, NodeUnavailable: it is kept on.
        """

    async def write_file(
        self, sandbox_id: str, path: str, data: bytes, *, user: str | None = None
    ) -> None:
        """Write a small file in a running sandbox; directories above it are made.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``.
            InvalidRequest: the path cannot be written, or no such user.
            NodeFull: no room on the sandbox's disk.
            AgentUnresponsive, NodeUnavailable: whether it was written is not known.
        """

    async def read_file(
        self, sandbox_id: str, path: str, *, user: str | None = None, bytes_max: int
    ) -> bytes:
        """The content of a small file of a running sandbox.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``.
            FileNotFound: there is none.
            InvalidRequest: no file, or no such user.
            PayloadTooLarge: it has more than ``bytes_max``.
            AgentUnresponsive, NodeUnavailable: not read.
        """

    async def unpack(
        self,
        sandbox_id: str,
        archive: str,
        *,
        sources: Sequence[str],
        target: str,
        user: str,
        mode: int | None,
    ) -> None:
        """Copy files of a tar archive into a running sandbox, as a Dockerfile's COPY does.

        Args:
            sandbox_id: Which.
            archive: Path of a tar file (plain, gzip or zstd) on the node.
            sources: Paths in the archive to copy, or patterns as of ``fnmatch``, of which ``*``
                stops at ``/``. The archive is read once, however much matches. Together at most
                ``UNPACK_SOURCES_CHARS_MAX``.
            target: Absolute path. With a trailing ``/``, if it is a directory, or for more than
                one match: into it.
            user: Owner of what is copied, ``name`` or ``name:group``.
            mode: Permission bits for what is copied. None: as packed.

        Raises:
            SandboxNotFound, StateConflict: as ``exec``.
            InvalidRequest: a damaged archive, a source that nothing in it matches, no such user.
            NodeFull: no room on the sandbox's disk.
        """

    async def pack(self, sandbox_id: str, options: PackOptions) -> ImageInfo:
        """Make an image of a running or paused sandbox's changes and what it stands on.

        The sandbox stands still for the copy only. Nothing half-made is ever visible.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it is starting, resuming or ending.
            NotSupported: its backend has no layers.
            SnapshotFailed: it could not be saved; the sandbox goes on, nothing is left.
            NodeFull: no room on the disk.
        """

    async def snapshots(self) -> Snapshots:
        """Every complete snapshot of the node, ephemeral ones not."""

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        """Remove a snapshot; False when there is none. Sandboxes started from it go on."""

    async def set_end_at(
        self, sandbox_id: str, end_at: float, *, only_extend: bool = False
    ) -> SandboxStatus:
        """Replace the absolute end time. A time in the past triggers the time-out action at once.

        Raises:
            SandboxNotFound: unknown or ended.
        """

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Replace the egress policy of a running sandbox, atomically.

        Raises:
            SandboxNotFound: unknown or ended.
        """

    async def route(self, sandbox_id: str) -> Route:
        """How to reach a running sandbox. Waits while it is starting, pausing or resuming.

        Never resumes a paused one: who may do that is the control plane's business.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: known, but not running (``details["state"]``).
        """

    async def console(self, sandbox_id: str, kind: ConsoleKind) -> str:
        """Path of the Unix socket where a running sandbox's console or screen is served.

        Raises:
            SandboxNotFound: unknown or ended.
            StateConflict: it does not run now.
            NotSupported: its backend has none.
        """

    async def console_tail(self, sandbox_id: str) -> str:
        """The end of what its serial console printed since it last started; 64 KiB at most.

        Raises:
            SandboxNotFound: unknown or ended.
            NotSupported: its backend has none.
        """

    async def route_by_signature(
        self, *, path: str, operation: str, username: str, signature: str, expiration: str | None
    ) -> Route:
        """The running sandbox whose access token made this signed file URL (E2B, signature v1).

        Raises:
            SandboxNotFound: no running sandbox's token fits.
        """

    async def metrics(self, sandbox_id: str, start: float, end: float) -> MetricSamples:
        """Kept samples with ``start <= at <= end``, oldest first.

        Raises:
            SandboxNotFound: unknown.
        """

    async def usage(self, sandbox_ids: Sequence[str]) -> dict[str, SandboxUsage]:
        """What each of these has used, a few seconds old at most; ended ones as at their end.

        Those that the journal does not know are left out.
        """

    def events(self) -> AsyncIterator[NodeEvent]:
        """State changes from now on, in order. Ends only with the node."""
