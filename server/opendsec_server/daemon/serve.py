# SPDX-License-Identifier: AGPL-3.0-only
"""Composition root: node, control, API and edge in one process (role ``all-in-one``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
import uvicorn
import uvloop

from opendsec_server.api.app import build_api_app
from opendsec_server.api.control_app import build_control_app
from opendsec_server.config import Config, ConfigError
from opendsec_server.control.services import Services
from opendsec_server.node.mountns import enter_private_mount_namespace
from opendsec_server.node.node import Node

from .base_template import BaseTemplate
from .disk_templates import DiskTemplates
from .edge_supervisor import EdgeSupervisor
from .process import identity_of, write_identity

log = structlog.get_logger(__name__)

STOP_GRACE_S = 10
LISTEN_BACKLOG = 2_048


def prepare_directories(config: Config) -> None:
    """Make the state directory (root only) and the run directory.

    Others may pass through the run directory, not list it: sandboxes start as ids of their own
    and must reach the guest agent's binary there. The sockets in it are root's.

    Raises:
        ConfigError: not root, or a directory cannot be made.
    """
    if os.geteuid() != 0:
        raise ConfigError("opendsecd must run as root: it makes namespaces, mounts and cgroups")
    for path, mode in ((config.state_path, 0o700), (config.run_path, 0o711)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
        except OSError as exc:
            raise ConfigError(f"cannot use {path}: {exc.strerror}") from exc


def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT. Sandboxes go on running afterwards.

    Raises:
        ConfigError: a setting or the machine does not allow it. The message says what to do.
    """
    prepare_directories(config)
    # Threads would keep the old namespace, so this comes before the event loop.
    enter_private_mount_namespace()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    me = identity_of(os.getpid())
    assert me is not None
    async with contextlib.AsyncExitStack() as stack:
        node = await Node.start(config)
        stack.push_async_callback(node.stop)
        base = BaseTemplate(config)
        services = await Services.start(config, node, ready_checks={"template base": base.check})
        stack.push_async_callback(services.stop)
        disk_templates = DiskTemplates(config, services.templates)
        disk_templates.start()
        stack.push_async_callback(disk_templates.stop)
        await stack.enter_async_context(
            _listening(build_control_app(services), config.control_socket)
        )
        # Else the edge's endless stream would hold the control socket for the whole grace period.
        stack.callback(services.invalidations.close)
        await stack.enter_async_context(_listening(build_api_app(services), config.api_socket))
        # Nor may answers of many lines.
        stack.callback(services.closing.set)
        edge = EdgeSupervisor(config)
        await edge.start()
        stack.push_async_callback(edge.stop)
        base.start()
        write_identity(config.run_path / "opendsecd.pid", me)
        stack.callback((config.run_path / "opendsecd.pid").unlink, missing_ok=True)
        _notify_service_manager("READY=1")
        log.info("started", listen=config.listen, state_dir=config.state_dir)
        await stop.wait()
        log.info("stopping")
        _notify_service_manager("STOPPING=1")


def _bind_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(previous)
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def _listening(app: object, path: Path) -> AsyncIterator[None]:
    """Serve an ASGI app on a Unix socket that only root can open."""
    listener = _bind_unix(path)
    server = uvicorn.Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            loop="none",
            http="httptools",
            ws="none",
            timeout_graceful_shutdown=STOP_GRACE_S,
            timeout_keep_alive=75,
            backlog=LISTEN_BACKLOG,
        )
    )
    # Signals are ours: uvicorn must not replace the handlers.
    task = asyncio.create_task(server._serve(sockets=[listener]), name=f"uvicorn-{path.name}")
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn offers no event
            await asyncio.sleep(0.01)
        if task.done():
            await task
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _notify_service_manager(message: str) -> None:
    """sd_notify(3), for units of Type=notify."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(message.encode(), address)
