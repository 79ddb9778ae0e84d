# SPDX-License-Identifier: AGPL-3.0-only
"""The sandboxes that build steps run in. They have no record: nobody reaches them through the API,
and one that no build of this process owns is removed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import structlog

from opendsec_server.config import Config
from opendsec_server.contract.errors import BuildFailed, OpendsecError, SandboxNotFound
from opendsec_server.contract.ids import new_sandbox_id
from opendsec_server.contract.images import ExecEvent, StartCommand
from opendsec_server.contract.node import (
    Backend,
    NetworkPolicy,
    SandboxSpec,
    SandboxStatus,
)
from opendsec_server.control.nodes import Fleet
from opendsec_server.control.placement import Need
from opendsec_server.control.tokens import TokenMint

from .logs import BuildLog
from .shape import Shape

log = structlog.get_logger(__name__)

BUILDER_TEMPLATE_ID = "builder"
"""What such a sandbox has in place of a template's id: shorter than any, so never one."""
END_SLACK_S = 600.0
"""The node ends a builder sandbox this long after the build's own time is up."""
TAIL_LINES = 20
TAIL_CHARS = 4_000


class Sizes(msgspec.Struct, kw_only=True, frozen=True):
    """What each sandbox of a build gets."""

    project_id: str
    cpu: float
    memory_mb: int
    end_at: float


class Builders:
    """Makes and removes builder sandboxes."""

    def __init__(self, *, config: Config, fleet: Fleet, mint: TokenMint) -> None:
        self._config = config
        self._node = fleet
        self._mint = mint
        self._owned: set[str] = set()

    @property
    def backend(self) -> Backend:
        """What steps run in."""
        return self._config.build_backend

    @property
    def step_bytes_max(self) -> int:
        """What a step may write."""
        return self._config.build_disk_mb * 1024 * 1024

    def owned(self, sandbox_id: str) -> bool:
        """Whether a build of this process uses it."""
        return sandbox_id in self._owned

    @staticmethod
    def is_builder(status: SandboxStatus) -> bool:
        """Whether a sandbox on the node was made for a build."""
        return status.template_id == BUILDER_TEMPLATE_ID

    @contextlib.asynccontextmanager
    async def sandbox(
        self,
        sizes: Sizes,
        shape: Shape,
        start: StartCommand | None = None,
        *,
        disk_mb: int | None = None,
    ) -> AsyncIterator[str]:
        """A running sandbox of a shape's image; gone afterwards, whatever happens.

        Args:
            sizes: What it gets.
            shape: What it is made of.
            start: Started in it, and awaited.
            disk_mb: None: what a step may write.

        Raises:
            OpendsecError: as the node's create.
        """
        disk_mb = self._config.build_disk_mb if disk_mb is None else disk_mb
        chosen = self._node.choose(
            Need(
                backend=self.backend,
                cpu=sizes.cpu,
                memory_mb=sizes.memory_mb,
                disk_mb=disk_mb,
                image=shape.image,
                only=self._node.images.only_on(shape.image),
            )
        )
        sandbox_id = new_sandbox_id(chosen.node_id)
        now = time.time()
        spec = SandboxSpec(
            sandbox_id=sandbox_id,
            project_id=sizes.project_id,
            backend=self.backend,
            template_id=BUILDER_TEMPLATE_ID,
            image=shape.image,
            start=start,
            cpu=sizes.cpu,
            memory_mb=sizes.memory_mb,
            disk_mb=disk_mb,
            env=shape.env,
            created_at=now,
            end_at=sizes.end_at + END_SLACK_S,
            timeout_s=max(1.0, sizes.end_at + END_SLACK_S - now),
            network=NetworkPolicy(internet=self._config.build_internet),
            default_user=shape.user,
            default_workdir=shape.workdir,
            access_token=self._mint.access(sandbox_id),
            traffic_token=self._mint.traffic(sandbox_id),
            control_token=self._mint.control(sandbox_id),
        )
        self._owned.add(sandbox_id)
        try:
            await self._node.create(spec)
            yield sandbox_id
        finally:
            # Also when the build is cut off: the sandbox goes first.
            await asyncio.shield(asyncio.ensure_future(self._remove(sandbox_id)))

    async def _remove(self, sandbox_id: str) -> None:
        try:
            await self._node.kill(sandbox_id)
        except SandboxNotFound:
            pass
        except OpendsecError as exc:
            # Left to the next comparison with the node.
            log.warning("builder sandbox not removed", sandbox_id=sandbox_id, why=exc.message)
        finally:
            self._owned.discard(sandbox_id)

    async def run(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        shown: str,
        user: str,
        workdir: str | None,
        env: dict[str, str] | None,
        timeout_s: float,
        build_log: BuildLog,
        step: str,
    ) -> None:
        """Run a program of a step, its output into the log.

        Args:
            shown: The command as the caller wrote it.

        Raises:
            BuildFailed: it did not exit with 0. ``details`` has command, exit code and the last
                output.
            OpendsecError: as the node's ``exec``.
        """
        output = _Output(build_log, step)
        end: ExecEvent | None = None
        async for event in self._node.exec(
            sandbox_id, argv, user=user, workdir=workdir, env=env, timeout_s=timeout_s
        ):
            if event.kind == "end":
                end = event
            else:
                output.take(event)
        output.flush()
        if end is not None and end.exit_code == 0:
            return
        how = _how_it_ended(end)
        tail = output.tail
        shown = build_log.clean(shown)
        told = f"command `{_short(shown)}` {how}" + (f"; its last output:\n{tail}" if tail else "")
        raise BuildFailed(
            told,
            details={
                "step": step,
                "command": shown[:TAIL_CHARS],
                "exit_code": None if end is None else end.exit_code,
                "signal": None if end is None else end.signal,
                "timed_out": end is not None and end.timed_out,
                "output": tail,
            },
        )


def _how_it_ended(end: ExecEvent | None) -> str:
    if end is None:
        return "ended without a word"
    if end.timed_out:
        return "ran out of the build's time"
    if end.exit_code is not None:
        return f"exited with code {end.exit_code}"
    return f"was ended by signal {end.signal}"


def _short(command: str) -> str:
    first = command.strip().splitlines()[0] if command.strip() else ""
    return first if len(first) <= 200 and first == command.strip() else f"{first[:200]} …"


class _Output:
    """Splits output into log lines, and keeps the last ones."""

    def __init__(self, build_log: BuildLog, step: str) -> None:
        self._log = build_log
        self._step = step
        self._rest = {"stdout": b"", "stderr": b""}
        self._lines: list[str] = []

    @property
    def tail(self) -> str:
        return "\n".join(self._lines)[-TAIL_CHARS:]

    def take(self, event: ExecEvent) -> None:
        *lines, rest = (self._rest[event.kind] + event.data).split(b"\n")
        for line in lines:
            self._line(event.kind, line)
        if len(rest) > 8_192:
            self._line(event.kind, rest)
            rest = b""
        self._rest[event.kind] = rest

    def flush(self) -> None:
        for kind, rest in self._rest.items():
            if rest:
                self._line(kind, rest)
        self._rest = {"stdout": b"", "stderr": b""}

    def _line(self, kind: str, line: bytes) -> None:
        # Of a progress bar, what stood there last.
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self._log.write(text, level="warn" if kind == "stderr" else "info", step=self._step)
        self._lines.append(self._log.clean(text))
        del self._lines[:-TAIL_LINES]
