# SPDX-License-Identifier: AGPL-3.0-only
"""Keeps one edge process running beside the daemon.

The edge lives in its own session, so a crash of ``opendsecd`` leaves traffic flowing. A new
``opendsecd`` adopts a running edge that was started with the same binary and arguments, and
replaces any other. A dead edge is started again, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

import structlog

from opendsec_server.binaries import find_edge
from opendsec_server.config import Config

from .process import (
    ProcessIdentity,
    identity_of,
    is_alive,
    read_identity,
    stop_process,
    write_identity,
)

log = structlog.get_logger(__name__)

RESTART_PAUSE_S_MIN = 0.2
RESTART_PAUSE_S_MAX = 10.0
STABLE_AFTER_S = 30.0
STOP_GRACE_S = 10.0


class EdgeSupervisor:
    """Starts, adopts, watches and stops ``opendsec-edge``."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._pid_file = config.run_path / "edge.pid"
        self._identity: ProcessIdentity | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def command(self) -> list[str]:
        """The edge's argument list for these settings."""
        config = self._config
        binary = find_edge(config)
        argv = [
            str(binary),
            "--listen",
            config.listen,
            "--api-socket",
            str(config.api_socket),
            "--control-socket",
            str(config.control_socket),
            "--domain",
            config.domain,
            "--metrics-socket",
            str(config.run_path / "edge-metrics.sock"),
        ]
        if config.tls_cert and config.tls_key:
            argv += ["--tls-cert", config.tls_cert, "--tls-key", config.tls_key]
        return argv

    @property
    def pid(self) -> int | None:
        """Pid of the running edge, if any."""
        return self._identity.pid if self._identity else None

    async def start(self) -> None:
        """Adopt or start the edge, then keep it alive.

        Raises:
            ConfigError: the binary is missing.
        """
        argv = self.command()
        running = read_identity(self._pid_file)
        if running is not None and _runs(running, argv):
            log.info("edge_adopted", pid=running.pid)
            self._identity = running
        else:
            if running is not None:
                log.info("edge_replaced", pid=running.pid)
                await asyncio.to_thread(stop_process, running, grace_s=STOP_GRACE_S)
            try:
                self._spawn(argv)
            except BaseException:
                # It may run, and its pid be written nowhere.
                await self.stop()
                raise
        self._task = asyncio.create_task(self._watch(argv), name="edge-supervisor")

    async def stop(self) -> None:
        """End the edge and stop watching it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._identity is not None:
            await asyncio.to_thread(stop_process, self._identity, grace_s=STOP_GRACE_S)
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)
        self._pid_file.unlink(missing_ok=True)

    def _spawn(self, argv: list[str]) -> None:
        log_path = self._config.run_path / "edge.log"
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                close_fds=True,
            )
        finally:
            os.close(descriptor)
        self._identity = identity_of(self._child.pid)
        if self._identity is not None:
            write_identity(self._pid_file, self._identity)
        log.info("edge_started", pid=self._child.pid, listen=self._config.listen)

    async def _watch(self, argv: list[str]) -> None:
        pause_s = RESTART_PAUSE_S_MIN
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            if self._identity is not None:
                await _wait_for_exit(self._identity)
            status = self._child.poll() if self._child is not None else None
            log.error("edge_died", exit_status=status, log=str(self._config.run_path / "edge.log"))
            if loop.time() - started > STABLE_AFTER_S:
                pause_s = RESTART_PAUSE_S_MIN
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RESTART_PAUSE_S_MAX)
            try:
                self._spawn(argv)
            except OSError as exc:
                self._identity = None
                log.error("edge_start_failed", error=str(exc))


def _runs(identity: ProcessIdentity, argv: list[str]) -> bool:
    """Whether the process has this command line and still the file that lies there now."""
    proc = Path(f"/proc/{identity.pid}")
    try:
        cmdline = (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        same_file = (proc / "exe").samefile(argv[0])
    except OSError:
        return False
    return same_file and cmdline == [os.fsencode(part) for part in argv]


async def _wait_for_exit(identity: ProcessIdentity) -> None:
    """Return when the process is gone. Works for children and adopted processes alike."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        if is_alive(identity):
            await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
