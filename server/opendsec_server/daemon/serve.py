# SPDX-License-Identifier: AGPL-3.0-only
"""Composition root: node, control, API and edge in one process, or a part of them (``role``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import structlog
import uvloop

from opendsec_server.api.app import build_api_app
from opendsec_server.api.control_app import build_control_app
from opendsec_server.config import Config, ConfigError
from opendsec_server.control.nodes import Fleet, NodeSource
from opendsec_server.control.services import ReadyCheck, Services
from opendsec_server.node.mountns import enter_private_mount_namespace
from opendsec_server.node.node import Node

from .base_template import BaseTemplate
from .cluster import node_door, other_nodes, ready_app
from .disk_templates import DiskTemplates
from .edge_supervisor import EdgeSupervisor
from .listening import bind_unix, listening
from .process import identity_of, write_identity

log = structlog.get_logger(__name__)


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
    if config.role != "gateway":
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
        node: Node | None = None
        base = BaseTemplate(config)
        ready_checks: dict[str, ReadyCheck] = {}
        if config.role != "gateway":
            node = await Node.start(config)
            stack.push_async_callback(node.stop)
            ready_checks["template base"] = base.check
        if node is not None and config.node_listen is not None:
            await stack.enter_async_context(node_door(config, node))
        if config.role == "node":
            await stack.enter_async_context(
                listening(ready_app(ready_checks), bind_unix(config.api_socket))
            )
        else:
            here = [] if node is None else [NodeSource(name="local", client=node)]
            fleet = Fleet([*here, *other_nodes(config)])
            await _serve_gateway(stack, config, fleet, ready_checks)
        if node is not None:
            base.start()
        write_identity(config.run_path / "opendsecd.pid", me)
        stack.callback((config.run_path / "opendsecd.pid").unlink, missing_ok=True)
        _notify_service_manager("READY=1")
        log.info("started", role=config.role, listen=config.listen, state_dir=config.state_dir)
        await stop.wait()
        log.info("stopping")
        _notify_service_manager("STOPPING=1")


async def _serve_gateway(
    stack: contextlib.AsyncExitStack,
    config: Config,
    fleet: Fleet,
    ready_checks: dict[str, ReadyCheck],
) -> None:
    """Control plane, API and edge."""
    services = await Services.start(config, fleet, ready_checks=ready_checks)
    stack.push_async_callback(services.stop)
    if config.role != "gateway":
        disk_templates = DiskTemplates(config, services.templates)
        disk_templates.start()
        stack.push_async_callback(disk_templates.stop)
    await stack.enter_async_context(
        listening(build_control_app(services), bind_unix(config.control_socket))
    )
    # Else the edge's endless stream would hold the control socket for the whole grace period.
    stack.callback(services.invalidations.close)
    await stack.enter_async_context(
        listening(build_api_app(services), bind_unix(config.api_socket))
    )
    # Nor may answers of many lines.
    stack.callback(services.closing.set)
    edge = EdgeSupervisor(config)
    await edge.start()
    stack.push_async_callback(edge.stop)


def _notify_service_manager(message: str) -> None:
    """sd_notify(3), for units of Type=notify."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(message.encode(), address)
