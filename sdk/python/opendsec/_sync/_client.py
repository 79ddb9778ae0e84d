# SPDX-License-Identifier: Apache-2.0
# Generated from _async/_client.py by scripts/generate_sync.py. Do not edit.
# ruff: noqa: RUF100, SIM117, UP028
"""The server: create, find and end sandboxes."""

from __future__ import annotations

import builtins
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import msgspec

from opendsec import _limits, _settings
from opendsec._answers import from_native
from opendsec._errors import InvalidRequest, OpendsecError, SandboxNotFound
from opendsec._models import (
    ImageInfo,
    MetricSample,
    NetworkPolicy,
    OnTimeout,
    PauseReport,
    Project,
    ReadyCheck,
    SandboxInfo,
    ServerInfo,
    Snapshot,
    StateMode,
    Transition,
    VmOptions,
)
from opendsec._retry import RetryPolicy

from ._account import ApiKeys
from ._batches import Batches
from ._connect import gone
from ._functions import Functions
from ._groups import Groups
from ._iam import Audit, Principals, Projects, Tokens
from ._images import Images
from ._nodes import Nodes
from ._sandbox import Sandbox
from ._snapshots import Snapshots
from ._tasks import Tasks
from ._templates import Templates
from ._trajectories import Trajectories
from ._transport import Transport


class _SandboxPage(msgspec.Struct):
    sandboxes: list[SandboxInfo] = []
    next_cursor: str | None = None


class _PauseFigures(msgspec.Struct):
    took_s: float = 0.0
    memory_before_bytes: int = 0
    memory_freed_bytes: int = 0
    stored_bytes: int = 0


class _Paused(SandboxInfo, kw_only=True, frozen=True):
    pause: _PauseFigures = msgspec.field(default_factory=_PauseFigures)


_RECORD_FIELDS = SandboxInfo.__struct_fields__


class _ForkItem(msgspec.Struct):
    sandbox: SandboxInfo | None = None
    error: dict[str, Any] | None = None


class _Forked(msgspec.Struct):
    items: list[_ForkItem] = []


class _Samples(msgspec.Struct):
    samples: list[MetricSample] = []


class _Transitions(msgspec.Struct):
    transitions: list[Transition] = []


class Client:
    """A connection to an OpenDsec server, shared by all its sandboxes. Close it after use.

    Args:
        base_url: Address of the server. None: ``OPENDSEC_API_URL``, ``E2B_API_URL``, else
            ``http://127.0.0.1:7300``.
        api_key: None: ``OPENDSEC_API_KEY``, ``E2B_API_KEY``, else the key file of a server on
            this machine, if it may be read.
        sandbox_url: Where sandbox traffic goes, if not to ``base_url``.
        project_id: The project to act in, if not the key's own: one that the key has rights in.
            None: ``OPENDSEC_PROJECT_ID``, or ``E2B_TEAM_ID`` beside ``E2B_API_URL``.
        retries_max: How often a failed call that may be repeated is repeated, with growing
            pauses. 0: never.

    Attributes:
        groups: Several sandboxes on one private network, started and ended as one.
        images: Container images that sandboxes can be created from.
        nodes: The machines that run sandboxes, for operators.
        snapshots: Saved states that sandboxes can be created from.
        tasks: All sandboxes of one job, as one.
        templates: What sandboxes are created from, and their builds.
        trajectories: What was done in sandboxes, in order, and whose fault it was.
        api_keys: The keys of the project.
        projects: The project in use and those below it.
        principals: People, services and agents, and what they may do where.
        tokens: Short-lived parts of what the caller may do.
        audit: Who did what, and how it went.
        batches: Many sandboxes in one call, and one thing done to many.
        fn: Function calls on workers that are there already.

    Every method can raise:

    * ``Unauthenticated``, ``Forbidden``: the key is missing, unknown, or not enough.
    * ``ConnectionFailed``: the server cannot be reached.
    * any other ``OpendsecError`` the server answers with.

    Raises:
        NotConfigured: the address makes no sense.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        sandbox_url: str | None = None,
        project_id: str | None = None,
        retries_max: int = _limits.RETRIES_MAX_DEFAULT,
    ) -> None:
        self.settings = _settings.resolve(base_url, api_key, sandbox_url, project_id=project_id)
        self._transport = Transport(self.settings, RetryPolicy(retries_max))
        self.images = Images(self._transport)
        self.nodes = Nodes(self._transport)
        self.snapshots = Snapshots(self._transport)
        self.tasks = Tasks(self._transport)
        self.templates = Templates(self._transport)
        self.trajectories = Trajectories(self, self._transport)
        self.api_keys = ApiKeys(self._transport)
        self.projects = Projects(self._transport)
        self.principals = Principals(self._transport)
        self.tokens = Tokens(self._transport)
        self.audit = Audit(self._transport)
        self.batches = Batches(self)
        self.groups = Groups(self)
        self.fn = Functions(self._transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Sandboxes live on."""
        self._transport.close()

    def create(
        self,
        template: str = "base",
        *,
        cpu: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        task_id: str | None = None,
        timeout_s: float = 300,
        idle_timeout_s: float | None = None,
        on_timeout: OnTimeout = "kill",
        pause_mode: StateMode | None = None,
        auto_resume: bool = False,
        network: NetworkPolicy | None = None,
        backend: str | None = None,
        vm: VmOptions | None = None,
        image: str | None = None,
        layers: Sequence[str] = (),
        start_image: bool = False,
        ready: ReadyCheck | None = None,
        node_labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a sandbox and return when it can run commands.

        The call carries an idempotency key, so a repetition after a lost answer finds the sandbox
        of the first try and never makes a second one.

        Args:
            template: Name or id of a template, or of a snapshot.
            cpu: Cores; fractions are allowed. None: the template's default.
            memory_mb: Memory in MiB. None: the template's default.
            disk_mb: Writable disk in MiB. None: the template's default.
            env: Environment of every command.
            metadata: Your own facts, to filter lists by.
            labels: Your own words, to filter lists by.
            task_id: The job it belongs to.
            timeout_s: Its time runs out after so many seconds (fractions are rounded up).
            idle_timeout_s: The same after so many seconds without a request. None: never.
            on_timeout: What happens then: ``kill`` or ``pause``.
            pause_mode: What such a pause keeps. None: the server's default, ``full``.
            auto_resume: A request to the paused sandbox (a command, a file, a port) resumes it
                first. Not after a pause that kept the disk alone.
            network: None: open internet, closed private networks.
            backend: ``container`` or another the server offers. None: the server's default.
            vm: More of a full virtual machine; only with a disk image as the template.
            image: Instead of a template: reference of an image (``python:3.12-slim``), digest of
                one that the server has, or name of a packed one. It is pulled unless the server
                has it. Its ENV (below ``env``), WORKDIR and USER apply.
            layers: Images or templates put on top, in this order: where files meet, the last wins.
            start_image: Start the image's own program (ENTRYPOINT and CMD) as well.
            ready: With ``start_image``: when that program counts as up. None: as soon as it runs.
            node_labels: Labels that its node must have.
            idempotency_key: 1 to 255 of ``[A-Za-z0-9._:-]``. None: a new one per call. Give your
                own to have retries across restarts of your program find the same sandbox.

        Raises:
            InvalidRequest: a value is malformed or out of range.
            TemplateNotFound, SnapshotNotFound: there is no such template or snapshot.
            ImageNotFound, RegistryDenied, RegistryLimited, RegistryUnavailable, ImageDamaged: the
                image cannot be had.
            NotSupported: the server has no such backend, or it cannot do what was asked.
            SnapshotDamaged, SnapshotIncompatible: the snapshot cannot be used.
            IdempotencyMismatch: the key was used before with other arguments.
            QuotaExceeded, NodeFull: there is no room now, also after the retries.
            SandboxStartFailed, StartTimeout: it did not start; nothing of it is left.
        """
        body: dict[str, Any] = {
            "template": template,
            "cpu": cpu,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "env": dict(env) if env else None,
            "metadata": dict(metadata) if metadata else None,
            "labels": list(labels) or None,
            "task_id": task_id,
            "timeout_s": math.ceil(timeout_s),
            "idle_timeout_s": None if idle_timeout_s is None else math.ceil(idle_timeout_s),
            "on_timeout": on_timeout,
            "pause_mode": pause_mode,
            "auto_resume": auto_resume or None,
            "network": network,
            "backend": backend,
            "vm": vm,
            "image": image,
            "layers": list(layers) or None,
            "start_image": start_image or None,
            "ready": ready,
            "node_labels": dict(node_labels) if node_labels else None,
        }
        record = self._transport.api(
            "POST",
            "/v1/sandboxes",
            SandboxInfo,
            body={name: value for name, value in body.items() if value is not None},
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
            timeout_s=_limits.CREATE_TIMEOUT_S,
        )
        return Sandbox(self, record, owns_client=False)

    def connect(self, sandbox_id: str, *, timeout_s: float | None = None) -> Sandbox:
        """Connect to a running sandbox, or resume a paused one.

        Args:
            timeout_s: Let it live at least so long from now; never shortens its life. None: leave
                its end as it is; one that was paused gets the server's default.

        Raises:
            SandboxNotFound: unknown, or ended.
            NodeFull, ResumeFailed, SnapshotDamaged, SnapshotIncompatible: it could not be resumed
                and stays paused.
        """
        if timeout_s is None:
            record = self.info(sandbox_id)
            if record.ended:
                raise gone(record)
            if record.state in ("starting", "running"):
                return Sandbox(self, record, owns_client=False)
        record = self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/connect",
            SandboxInfo,
            body={} if timeout_s is None else {"timeout_s": math.ceil(timeout_s)},
            timeout_s=_limits.STATE_TIMEOUT_S,
        )
        return Sandbox(self, record, owns_client=False)

    def list(
        self,
        *,
        states: Sequence[str] | None = None,
        task_id: str | None = None,
        labels: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        limit: int | None = None,
    ) -> Iterator[SandboxInfo]:
        """Sandboxes of the key's project that fit every given filter, page by page.

        Args:
            states: See ``SandboxInfo.state``. None: all but ended ones.
            labels: It must have all of them.
            metadata: It must have all of these pairs.
            limit: End after so many. None: all.
        """
        params: dict[str, str | int | list[str]] = {}
        if states is not None:
            params["state"] = ",".join(states)
        if task_id is not None:
            params["task_id"] = task_id
        if template is not None:
            params["template"] = template
        if labels:
            params["label"] = [*labels]
        if metadata:
            params["metadata"] = [f"{key}:{value}" for key, value in metadata.items()]
        left = limit
        while left is None or left > 0:
            params["limit"] = (
                _limits.LIST_PAGE_MAX if left is None else min(left, _limits.LIST_PAGE_MAX)
            )
            page = self._transport.api("GET", "/v1/sandboxes", _SandboxPage, params=params)
            for record in page.sandboxes:
                yield record
            if page.next_cursor is None:
                return
            params["cursor"] = page.next_cursor
            if left is not None:
                left -= len(page.sandboxes)

    def info(self, sandbox_id: str) -> SandboxInfo:
        """The record of a sandbox, also of an ended one.

        Raises:
            SandboxNotFound: the server does not know it.
        """
        return self._transport.api("GET", _path(sandbox_id), SandboxInfo)

    def kill(self, sandbox_id: str) -> bool:
        """End a sandbox in any state. False if the server does not know it (any more)."""
        try:
            self._transport.api("DELETE", _path(sandbox_id), SandboxInfo)
        except SandboxNotFound:
            return False
        return True

    def pause(self, sandbox_id: str, *, mode: StateMode = "full") -> PauseReport:
        """Free a sandbox's memory and keep the rest; see ``Sandbox.pause``."""
        paused = self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/pause",
            _Paused,
            body={"mode": mode},
            timeout_s=_limits.STATE_TIMEOUT_S,
        )
        figures = paused.pause
        record = SandboxInfo(**{name: getattr(paused, name) for name in _RECORD_FIELDS})
        return PauseReport(
            sandbox=record,
            took_s=figures.took_s,
            memory_before_bytes=figures.memory_before_bytes,
            memory_freed_bytes=figures.memory_freed_bytes,
            stored_bytes=figures.stored_bytes,
        )

    def resume(
        self, sandbox_id: str, *, timeout_s: float | None = None, reboot: bool = False
    ) -> SandboxInfo:
        """Let a paused sandbox run on; see ``Sandbox.resume``."""
        body: dict[str, Any] = {"reboot": reboot}
        if timeout_s is not None:
            body["timeout_s"] = math.ceil(timeout_s)
        return self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/resume",
            SandboxInfo,
            body=body,
            timeout_s=_limits.STATE_TIMEOUT_S,
        )

    def fork(
        self,
        sandbox_id: str,
        count: int = 1,
        *,
        mode: StateMode = "full",
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Sequence[str] | None = None,
        idempotency_key: str | None = None,
    ) -> builtins.list[Sandbox | OpendsecError]:
        """Make copies of a sandbox; see ``Sandbox.fork``."""
        if not 1 <= count <= _limits.FORKS_MAX:
            raise InvalidRequest(f"count must be 1 to {_limits.FORKS_MAX}, not {count}.")
        body: dict[str, Any] = {
            "count": count,
            "mode": mode,
            "timeout_s": None if timeout_s is None else math.ceil(timeout_s),
            "metadata": None if metadata is None else dict(metadata),
            "labels": None if labels is None else list(labels),
        }
        forked = self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/fork",
            _Forked,
            body={name: value for name, value in body.items() if value is not None},
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
            timeout_s=_limits.STATE_TIMEOUT_S,
        )
        return [
            from_native(item.error or {})
            if item.sandbox is None
            else Sandbox(self, item.sandbox, owns_client=False)
            for item in forked.items
        ]

    def snapshot(
        self,
        sandbox_id: str,
        *,
        name: str | None = None,
        mode: StateMode = "full",
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """Save a sandbox's state of this instant; see ``Sandbox.snapshot``."""
        body: dict[str, Any] = {"mode": mode}
        if name is not None:
            body["name"] = name
        return self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/snapshots",
            Snapshot,
            body=body,
            headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex},
            timeout_s=_limits.STATE_TIMEOUT_S,
        )

    def pack(
        self,
        sandbox_id: str,
        *,
        name: str | None = None,
        squash: bool = False,
        scrub: bool = True,
    ) -> ImageInfo:
        """Make an image of a sandbox's changes; see ``Sandbox.pack``."""
        body: dict[str, Any] = {"squash": squash, "scrub": scrub}
        if name is not None:
            body["name"] = name
        return self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/pack",
            ImageInfo,
            body=body,
            timeout_s=_limits.PACK_TIMEOUT_S,
        )

    def set_timeout(self, sandbox_id: str, timeout_s: float) -> SandboxInfo:
        """Let a sandbox end ``timeout_s`` from now; see ``Sandbox.set_timeout``."""
        return self._transport.api(
            "POST",
            f"{_path(sandbox_id)}/timeout",
            SandboxInfo,
            body={"timeout_s": math.ceil(timeout_s)},
        )

    def console(self, sandbox_id: str) -> str:
        """The end of what a machine printed on its serial console, at most 64 KiB.

        Raises:
            SandboxNotFound: there is none, or it has ended.
            NotSupported: its backend has no console.
        """
        answer = self._transport.api("GET", _path(sandbox_id) + "/console", dict[str, str])
        return answer["text"]

    def set_network(self, sandbox_id: str, network: NetworkPolicy) -> SandboxInfo:
        """Replace a sandbox's network policy; see ``Sandbox.set_network``."""
        return self._transport.api("PUT", f"{_path(sandbox_id)}/network", SandboxInfo, body=network)

    def metrics(
        self, sandbox_id: str, *, start: float | None = None, end: float | None = None
    ) -> builtins.list[MetricSample]:
        """Readings of a sandbox; see ``Sandbox.metrics``."""
        params = {
            name: str(value)
            for name, value in (("start", start), ("end", end))
            if value is not None
        }
        reply = self._transport.api("GET", f"{_path(sandbox_id)}/metrics", _Samples, params=params)
        return reply.samples

    def transitions(self, sandbox_id: str) -> builtins.list[Transition]:
        """The changes of a sandbox's state, oldest first, with reasons."""
        reply = self._transport.api("GET", f"{_path(sandbox_id)}/transitions", _Transitions)
        return reply.transitions

    def project(self) -> Project:
        """The project that the API key belongs to."""
        return self._transport.api("GET", "/v1/project", Project)

    def server_info(self) -> ServerInfo:
        """What the server is, and which backends with which capabilities it offers."""
        return self._transport.api("GET", "/v1/info", ServerInfo)


def _path(sandbox_id: str) -> str:
    """The sandbox's path; the id is quoted, so that a bad one cannot name another path."""
    if not sandbox_id:
        raise InvalidRequest("The sandbox id is empty.")
    return f"/v1/sandboxes/{quote(sandbox_id, safe='')}"
