# SPDX-License-Identifier: Apache-2.0
"""What calls return. Frozen; fields unknown to this version are ignored.

Times are aware ``datetime`` in UTC. Sizes and durations name their unit.
"""

from __future__ import annotations

import signal as _signal
from datetime import datetime
from typing import Any, Literal

import msgspec

OnTimeout = Literal["kill", "pause"]
StateMode = Literal["full", "filesystem"]
"""What a pause, fork or snapshot keeps: ``full`` memory and disk, ``filesystem`` the disk alone."""


class NetworkPolicy(msgspec.Struct, kw_only=True, frozen=True):
    """Traffic of one sandbox.

    Attributes:
        internet: Open internet. False closes everything ``allow`` does not open, DNS too.
        allow: IPv4 addresses or CIDRs that are open in any case; beats ``deny``.
        deny: IPv4 addresses or CIDRs that are closed.
        allow_public_traffic: Whether the sandbox's ports are open without the traffic token.
        mask_request_host: ``Host`` header the sandbox's ports see; may hold ``${PORT}``.
        https_ports: Ports in the sandbox that speak TLS themselves.
    """

    internet: bool = True
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


class VmDisk(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One more disk of a full virtual machine: ``/dev/disk/by-id/virtio-data1`` and so on.

    Attributes:
        size_mb: Size in MiB. None: the image's.
        image: Disk image to begin with. None: empty, unformatted.
    """

    size_mb: int | None = None
    image: str | None = None


class VmOptions(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What only full virtual machines have (templates that are disk images).

    Attributes:
        firmware: None: as the image was imported.
        disks: Beside the first one.
        user_data: For the guest's cloud-init, in any format it takes.
        devices: PCI addresses of the node's devices to pass through.
    """

    firmware: Literal["bios", "uefi", "direct"] | None = None
    disks: tuple[VmDisk, ...] = ()
    user_data: str | None = None
    devices: tuple[str, ...] = ()


class ReadyCheck(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """When an image's program counts as up: one of the first three, or none.

    Attributes:
        command: Repeated by a shell of the image until it exits with 0.
        port: Something listens there.
        url: Answers with a status below 400, such as ``http://localhost:8000/health``.
        timeout_s: How long that may take.
    """

    command: str | None = None
    port: int | None = None
    url: str | None = None
    timeout_s: float = 300.0


class ImageConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What an image says of how to run it."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    exposed_ports: tuple[str, ...] = ()
    stop_signal: str | None = None
    labels: dict[str, str] = {}


class ImageInfo(msgspec.Struct, kw_only=True, frozen=True):
    """An image that the server has.

    Attributes:
        digest: ``sha256:...`` of its layers and configuration.
        names: What means it now.
        layers: Digests (hex) of its layers, the lowest first.
        size_bytes: Of its layers on disk; other images may share them.
        source: Digest of the OCI manifest that it was pulled as; None: made on the server.
        on_demand_bytes: Length of those of its layers whose data is fetched as it is read.
        fetched_bytes: What of them is on the server.
    """

    digest: str
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    size_bytes: int = 0
    config: ImageConfig = ImageConfig()
    source: str | None = None
    created_at: datetime | None = None
    last_used_at: datetime | None = None
    on_demand_bytes: int = 0
    fetched_bytes: int = 0


class ImagePull(msgspec.Struct, kw_only=True, frozen=True):
    """How far a pull is; the bytes are those that the registry sends."""

    reference: str
    layers: int = 0
    layers_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0


class RegistryAuth(msgspec.Struct, kw_only=True, frozen=True):
    """How to log in to a registry of images."""

    username: str
    password: str

    def __repr__(self) -> str:
        return "RegistryAuth(...)"


class PruneReport(msgspec.Struct, kw_only=True, frozen=True):
    """What a prune of images removed."""

    images: tuple[str, ...] = ()
    layers: int = 0
    freed_bytes: int = 0


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """What a sandbox has used since it was created, over pauses and restarts.

    Attributes:
        cpu_seconds: Processor time; of a virtual machine, its VMM's.
        memory_mb_seconds: MiB held, without file cache, times seconds.
        disk_bytes: On its disk, as the file system last accounted it.
        egress_bytes: Sent on its network link; answers to the API are among them.
        ingress_bytes: Received on its network link.
        at: When it was read.
    """

    cpu_seconds: float = 0.0
    memory_mb_seconds: float = 0.0
    disk_bytes: int = 0
    egress_bytes: int = 0
    ingress_bytes: int = 0
    at: datetime | None = None


class SandboxInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A sandbox as the server describes it.

    Attributes:
        state: pending, starting, running, pausing, paused, resuming, stopping, ended or failed.
        backend: How it is isolated, such as ``container``, ``microvm`` or ``vm``.
        accelerator: How a virtual machine's instructions run: ``kvm`` on the processor, ``tcg``
            emulated and slow; ``none`` for backends without one.
        vmm: The program behind a virtual machine, with its version; None for others.
        end_at: When its time runs out; None while it is paused.
        end_reason: Why it ended (killed, timeout, idle, exited, oom, kernel_panic, vmm_failed,
            lost, task_deadline, task_budget; start_failed, start_timeout, image_pull, no_room or
            node_unavailable if it did not start).
        on_timeout: What happens then: ``kill`` or ``pause``.
        timeout_s: What it was created with.
        pause_mode: What a pause by time-out keeps: ``full`` or ``filesystem``.
        paused_mode: While it is paused: what was kept.
        snapshot_id: The snapshot it was created from, if any.
        image: Digest or name of the image that it stands on.
        auto_resume: Whether a request to it resumes it while it is paused.
        fault: Whose fault an unasked end was: user, platform or capacity.
        env: None in lists.
        usage: What it has used. None in lists.
        access_token: Opens files and processes. Only from create, connect and info.
        traffic_token: Opens ports when public traffic is off. Only from create, connect and info.
        domain: Ports are served at ``<port>-<sandbox_id>.<domain>``.
    """

    sandbox_id: str
    state: str
    template_id: str = ""
    template: str = ""
    backend: str = "container"
    project_id: str = ""
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    env: dict[str, str] | None = None
    usage: Usage | None = None
    metadata: dict[str, str] = {}
    labels: tuple[str, ...] = ()
    task_id: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    end_at: datetime | None = None
    ended_at: datetime | None = None
    end_reason: str | None = None
    message: str | None = None
    fault: str | None = None
    idle_timeout_s: float | None = None
    on_timeout: str = "kill"
    timeout_s: float | None = None
    pause_mode: str | None = None
    paused_mode: str | None = None
    auto_resume: bool = False
    snapshot_id: str | None = None
    image: str | None = None
    accelerator: str = "none"
    vmm: str | None = None
    network: NetworkPolicy | None = None
    access_token: str | None = None
    traffic_token: str | None = None
    domain: str = ""
    envd_version: str = ""
    node_id: str = ""

    @property
    def ended(self) -> bool:
        """Whether its life is over, well or not."""
        return self.state in ("ended", "failed")

    @property
    def asleep(self) -> bool:
        """Whether it is paused, or on its way to it."""
        return self.state in ("pausing", "paused")


class PauseReport(msgspec.Struct, kw_only=True, frozen=True):
    """What a pause did.

    Attributes:
        sandbox: The sandbox afterwards.
        took_s: How long it took, in seconds.
        memory_before_bytes: What the sandbox held of the host's memory.
        memory_freed_bytes: What the host got back of it.
        stored_bytes: What was written to disk for it.
    """

    sandbox: SandboxInfo
    took_s: float = 0.0
    memory_before_bytes: int = 0
    memory_freed_bytes: int = 0
    stored_bytes: int = 0


class Snapshot(msgspec.Struct, kw_only=True, frozen=True, rename={"snapshot_id": "id"}):
    """A saved disk, or disk and memory, that sandboxes can be created from.

    Attributes:
        snapshot_id: Give it as ``template=`` to create a sandbox from it.
        name: Its name, if it has one; serves as the id does.
        names: All its names.
        source_id: The sandbox it was taken of; it need not exist any more.
        backend: Of its source; sandboxes from it have the same.
        mode: ``full``: memory too, so its processes go on; ``filesystem``: the disk alone.
        template: What its source was made from.
        disk_bytes: What only this snapshot's disk holds.
        memory_bytes: What its memory takes on disk.
        versions: What its memory needs to be restored: VMM, CPU model, kernel, agent.
    """

    snapshot_id: str
    name: str | None = None
    names: tuple[str, ...] = ()
    source_id: str = ""
    backend: str = ""
    mode: str = ""
    template_id: str = ""
    template: str = ""
    cpu: float = 0.0
    memory_mb: int = 0
    disk_mb: int = 0
    created_at: datetime | None = None
    disk_bytes: int = 0
    memory_bytes: int = 0
    versions: dict[str, str] = {}
    project_id: str = ""


class Transition(msgspec.Struct, kw_only=True, frozen=True, rename={"from_state": "from"}):
    """One change of a sandbox's state.

    Attributes:
        from_state: None for the first.
        cause: Which request or event led to it.
    """

    to: str
    at: datetime
    from_state: str | None = None
    reason: str | None = None
    message: str | None = None
    cause: str | None = None


class MetricSample(msgspec.Struct, kw_only=True, frozen=True):
    """One reading of a sandbox's use of its machine, taken from outside of it."""

    at: datetime
    cpu_count: float = 0.0
    cpu_used_pct: float = 0.0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    memory_cache_bytes: int = 0
    disk_used_bytes: int = 0
    disk_total_bytes: int = 0


BuildState = Literal["waiting", "building", "ready", "error"]


class TemplateInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A template that sandboxes can be made from, with its defaults.

    Attributes:
        own: It belongs to the project of the key in use, which may change it.
        public: Every project may use it.
        state: Of the build with the tag ``default``, else of the newest.
        builds: How many builds it has.
        spawned: How many sandboxes were made of it, as far as the server's records go back.
    """

    template_id: str
    name: str = ""
    own: bool = False
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    public: bool = False
    state: BuildState = "ready"
    builds: int = 0
    spawned: int = 0
    last_spawned_at: datetime | None = None


class BuildError(msgspec.Struct, kw_only=True, frozen=True):
    """Why a build failed.

    Attributes:
        code: As the codes of errors, such as ``build_failed``.
        message: With the command, its exit code and its last output.
        step: ``base``, the number of the step, or ``finalize``.
    """

    code: str = ""
    message: str = ""
    step: str | None = None


class Build(msgspec.Struct, kw_only=True, frozen=True):
    """One build of a template.

    Attributes:
        tags: Which it gets when it is ready.
        image: Digest of its image. None: it is not ready.
        start_command: Runs in every sandbox of the template.
    """

    build_id: str
    template_id: str = ""
    state: BuildState = "waiting"
    tags: tuple[str, ...] = ()
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    image: str | None = None
    default_user: str | None = None
    default_workdir: str | None = None
    env: dict[str, str] = {}
    start_command: tuple[str, ...] | None = None
    error: BuildError | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def ended(self) -> bool:
        """Whether it is ready or has failed."""
        return self.state in ("ready", "error")


class BuildStep(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One step of a build without a Dockerfile.

    Attributes:
        type: ``RUN`` (command, user), ``ENV`` and ``ARG`` (name and value, over and over),
            ``WORKDIR`` (path), ``USER`` (name), ``COPY`` (source, target, owner, octal mode).
        args: By type.
        force: Run it and all that follows, even if its result is known.
    """

    type: str
    args: tuple[str, ...] = ()
    force: bool = False


class BuildLogEntry(msgspec.Struct, kw_only=True, frozen=True):
    """A line of a build's log.

    Attributes:
        level: ``debug``, ``info``, ``warn`` (what a command writes to stderr) or ``error``.
        step: ``base``, the number of the step, or ``finalize``.
    """

    at: datetime
    level: str = "info"
    message: str = ""
    step: str | None = None


class TemplateTag(msgspec.Struct, kw_only=True, frozen=True):
    """The build that ``name:tag`` means."""

    tag: str
    build_id: str = ""
    created_at: datetime | None = None


class TemplateDetail(TemplateInfo, kw_only=True, frozen=True):
    """A template with its tags and newest builds. Of others' templates there are none."""

    tags: tuple[TemplateTag, ...] = ()
    newest_builds: tuple[Build, ...] = ()


class Capabilities(msgspec.Struct, kw_only=True, frozen=True):
    """What a backend can do.

    Attributes:
        own_kernel: Its sandboxes do not share the host's kernel.
        memory_snapshot: Snapshots and forks can hold memory (mode ``full``).
        pause_survives_reboot: A full pause is kept on disk, not in memory of the host.
        fork: Sandboxes can be forked, at least their disk.
        disk_images: It boots disk images with a kernel and init of their own.
        console: Sandboxes have a serial console and a screen to look at.
        passthrough: Devices of the host can be given to a sandbox.
    """

    own_kernel: bool = False
    memory_snapshot: bool = False
    pause_survives_reboot: bool = False
    fork: bool = False
    disk_images: bool = False
    console: bool = False
    passthrough: bool = False


class BackendInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A way of isolation that the server offers; ``name`` is what ``create(backend=)`` takes.

    Attributes:
        accelerator: ``kvm``, ``tcg`` (emulated and slow) or ``none``.
        vmm: The program behind virtual machines, with its version; None without one.
    """

    name: str
    accelerator: str = "none"
    vmm: str | None = None
    capabilities: Capabilities = Capabilities()


class ServerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The server: version, domain, its node, and what it can do.

    Attributes:
        backends: The ways of isolation it offers.
        default_backend: What ``create`` takes if none is named.
    """

    version: str
    domain: str = ""
    envd_version: str = ""
    backends: tuple[BackendInfo, ...] = ()
    default_backend: str = ""
    node: dict[str, Any] = {}
    features: dict[str, Any] = {}


class Project(msgspec.Struct, kw_only=True, frozen=True):
    """The project that the API key belongs to.

    Attributes:
        sandboxes_max: How many of its sandboxes may be alive at once.
    """

    project_id: str
    name: str = ""
    sandboxes_max: int = 0
    created_at: datetime | None = None


class ApiKey(msgspec.Struct, kw_only=True, frozen=True):
    """An API key of the project.

    Attributes:
        hint: Its first and last characters.
        principal_id: Whose it is. None: the project's own.
        key: The key itself; only from the call that made it, else None.
    """

    key_id: str
    name: str = ""
    hint: str = ""
    created_at: datetime | None = None
    principal_id: str | None = None
    key: str | None = None


class FileInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A file, directory or symbolic link in a sandbox.

    Attributes:
        type: ``file``, ``directory``, ``symlink`` (dangling) or ``other``. Follows links.
        path: Absolute path in the sandbox.
        mode: Permission bits.
        permissions: The same as text, such as ``-rw-r--r--``.
        symlink_target: Where it points, if it is a link.
        metadata: User-defined, set when the file was written.
    """

    name: str
    type: str
    path: str
    size_bytes: int = 0
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_at: datetime | None = None
    symlink_target: str | None = None
    metadata: dict[str, str] = {}

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory, or a link to one."""
        return self.type == "directory"


class WatchEvent(msgspec.Struct, kw_only=True, frozen=True):
    """A change below a watched directory.

    Attributes:
        type: ``create``, ``write``, ``remove``, ``rename`` or ``chmod``.
        name: Path relative to the watched directory.
        entry: The file after the change; only if asked for and still there.
    """

    type: str
    name: str
    entry: FileInfo | None = None


class ProcessInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A process that was started through the API and still runs."""

    pid: int
    cmd: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    tag: str | None = None


class OutputEvent(msgspec.Struct, frozen=True):
    """A piece of a process's output.

    Attributes:
        stream: ``stdout``, ``stderr`` or ``pty``.
        data: Bytes as the process wrote them; a character may be split between two events.
    """

    stream: Literal["stdout", "stderr", "pty"]
    data: bytes


class CommandResult(msgspec.Struct, kw_only=True, frozen=True):
    """How a command ended, and what it wrote.

    Attributes:
        exit_code: Its exit code; 128 + n if signal n ended it, as shells count.
        signal: The signal that ended it, or None.
        stdout_bytes: Its output, up to the output limit.
        stderr_bytes: Its error output, up to the output limit.
        stdout_truncated: Whether it wrote more than was kept.
        stderr_truncated: The same for its error output.
        error: The sandbox's own words about an end without exit code, if any.
    """

    exit_code: int
    signal: int | None = None
    stdout_bytes: bytes = b""
    stderr_bytes: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    error: str | None = None

    @property
    def stdout(self) -> str:
        """The output as text; what is not UTF-8 becomes U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The error output as text; what is not UTF-8 becomes U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def truncated(self) -> bool:
        """Whether any output is missing from the result."""
        return self.stdout_truncated or self.stderr_truncated

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, such as ``SIGKILL``."""
        if self.signal is None:
            return None
        try:
            return _signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"
