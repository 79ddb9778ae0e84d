# SPDX-License-Identifier: AGPL-3.0-only
"""What ties nodes and gateways together: the node's door, the gateway's list of nodes, and the
secret that both hold."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from opendsec_server.config import Config, ConfigError, NodeAddress
from opendsec_server.contract.errors import OpendsecError
from opendsec_server.contract.node_wire import SECRET_CHARS_MIN
from opendsec_server.control.nodes import NodeSource
from opendsec_server.control.nodes.connection import Address
from opendsec_server.control.nodes.http_client import HttpNode
from opendsec_server.control.services import ReadyCheck
from opendsec_server.node.node import Node
from opendsec_server.node.serving import NodeApp

from .listening import Tls, bind_tcp, bind_unix, listening

_SECRET_BYTES = 32
_OTHERS_MAY = 0o077


def node_secret(config: Config, *, make: bool) -> bytes:
    """What gateways and nodes share.

    Args:
        config: Names the file.
        make: Make one if there is none: a node's first start.

    Raises:
        ConfigError: there is none, it is too short, or others may read it.
    """
    path = config.node_secret_path
    if make and config.node_secret_file is None and not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
    return _secret_in(
        path, "node_secret_file", "Copy the file `node-secret` of a node's state directory here."
    )


def _secret_in(path: Path, setting: str, remediation: str) -> bytes:
    try:
        text = path.read_text().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise ConfigError(f"{setting}: cannot read {path}: {why}. {remediation}") from exc
    if len(text) < SECRET_CHARS_MIN:
        raise ConfigError(f"{setting}: {path} has less than {SECRET_CHARS_MIN} characters")
    if mode & _OTHERS_MAY:
        raise ConfigError(f"{setting}: others may read {path}; `chmod 600` it")
    return text.encode()


def other_nodes(config: Config) -> list[NodeSource]:
    """The nodes that a gateway reaches over HTTP.

    Raises:
        ConfigError: an address, a secret or the list of trusted certificates is wrong, or a node
            is to be reached over a network in clear text without leave.
    """
    tls = None
    if config.nodes and config.node_tls_ca is not None:
        try:
            tls = ssl.create_default_context(cafile=config.node_tls_ca)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"node_tls_ca: {config.node_tls_ca}: {exc}") from exc
    return [_other_node(config, node, tls) for node in config.nodes]


def _other_node(config: Config, node: NodeAddress, tls: ssl.SSLContext | None) -> NodeSource:
    try:
        address = Address(node.url, tls)
    except ValueError as exc:
        raise ConfigError(f"nodes: {exc}") from exc
    if address.in_clear and not config.node_http_allowed:
        raise ConfigError(
            f"nodes: {node.url} is reached in clear text: whoever can read the network sees the "
            "tokens of sandboxes. Use https: (node_tls_cert and node_tls_key on the node, "
            "node_tls_ca here), or set node_http_allowed = true on a network of its own."
        )
    if node.secret_file is None:
        secret = node_secret(config, make=False)
    else:
        secret = _secret_in(
            Path(node.secret_file),
            f"nodes: {node.url}: secret_file",
            "Copy the file `node-secret` of that node's state directory here.",
        )
    return NodeSource(name=node.name or node.url, client=HttpNode(node.url, secret, tls))


@contextlib.asynccontextmanager
async def node_door(config: Config, node: Node) -> AsyncIterator[None]:
    """Serve a node to gateways.

    Raises:
        ConfigError: it cannot listen there, or the secret cannot be used.
    """
    assert config.node_listen is not None
    secret = node_secret(config, make=True)
    tls = None
    if config.node_tls_cert is not None and config.node_tls_key is not None:
        tls = Tls(config.node_tls_cert, config.node_tls_key)
    incoming = config.state_path / "incoming"
    # What a node that was killed had not finished.
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(mode=0o700)
    app = NodeApp(node, node.node_id, secret, incoming)
    async with listening(app, _bound(config.node_listen), tls):
        try:
            yield
        finally:
            # Else endless streams would hold the door open for the whole grace period.
            app.close()


def _bound(place: str) -> socket.socket:
    try:
        if place.startswith("unix:"):
            return bind_unix(Path(place.removeprefix("unix:")))
        host, _, port = place.rpartition(":")
        return bind_tcp(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as exc:
        raise ConfigError(f"node_listen: cannot serve at {place}: {exc}") from exc


Ask = Callable[[], Awaitable[dict[str, Any]]]


def ready_app(checks: Mapping[str, ReadyCheck]) -> object:
    """Answers ``/readyz`` of a server that is only a node."""

    async def app(
        scope: dict[str, Any], _receive: Ask, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        reasons = []
        for name, check in checks.items():
            try:
                await check()
            except OpendsecError as exc:
                reasons.append(f"{name}: {exc.message}")
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons})
        status = 503 if reasons else 200
        if scope["path"] != "/readyz":
            status, body = 404, b"{}"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
