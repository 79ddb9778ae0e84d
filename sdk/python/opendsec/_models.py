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


class SandboxInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A sandbox as the server describes it.

    Attributes:
        state: pending, starting, running, pausing, paused, resuming, stopping, ended or failed.
        end_at: When its time runs out.
        end_reason: Why it ended (killed, timeout, idle, exited, oom, start_failed, lost).
        fault: Whose fault an unasked end was: user, platform or capacity.
        env: None in lists.
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


class TemplateInfo(msgspec.Struct, kw_only=True, frozen=True):
    """A template that sandboxes can be made from, with its defaults."""

    template_id: str
    name: str = ""
    cpu: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    created_at: datetime | None = None
    public: bool = False


class ServerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The server: version, domain, its node, and what it can do."""

    version: str
    domain: str = ""
    envd_version: str = ""
    node: dict[str, Any] = {}
    features: dict[str, Any] = {}


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
