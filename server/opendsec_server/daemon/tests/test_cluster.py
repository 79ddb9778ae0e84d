# SPDX-License-Identifier: AGPL-3.0-only
"""Settings of several nodes, and the secret that they share."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from opendsec_server.config import Config, ConfigError, NodeAddress, load_config
from opendsec_server.contract.errors import NodeUnavailable
from opendsec_server.control.nodes.http_client import HttpNode
from opendsec_server.control.tests.fake_node import FakeNode
from opendsec_server.daemon.cluster import node_secret, other_nodes
from opendsec_server.daemon.listening import bind_unix, listening
from opendsec_server.node.serving import NodeApp


def test_a_node_makes_the_secret_once_and_only_root_can_read_it(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read"):
        node_secret(config, make=False)
    secret = node_secret(config, make=True)
    assert len(secret) == 64
    assert node_secret(config, make=True) == node_secret(config, make=False) == secret
    assert config.node_secret_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "mode", "match"),
    [("short", 0o600, "less than"), ("x" * 40, 0o644, "others may read"), ("", 0o600, "less")],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, match: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    config = Config(state_dir=str(tmp_path), node_secret_file=str(path))
    with pytest.raises(ConfigError, match=match):
        node_secret(config, make=True)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "url", ["", "10.0.0.1:7301", "http://", "http://host", "ftp://host:1", "http://host:port"]
)
def test_addresses_that_are_none_are_named(tmp_path: Path, url: str) -> None:
    config = Config(state_dir=str(tmp_path), nodes=(NodeAddress(url=url),))
    node_secret(config, make=True)
    with pytest.raises(ConfigError, match="nodes: "):
        other_nodes(config)


@pytest.mark.parametrize(
    ("url", "in_clear"),
    [
        ("http://10.0.0.1:7301", True),
        ("http://node:7301", True),
        ("http://localhost.example:7301", True),
        ("http://[2001:db8::1]:7301", True),
        ("http://0.0.0.0:7301", True),
        ("http://127.0.0.1:7301", False),
        ("http://127.8.0.1:7301", False),
        ("http://localhost:7301", False),
        ("http://[::1]:7301", False),
        ("https://10.0.0.1:7301", False),
        ("unix:/run/node.sock", False),
    ],
)
def test_a_node_is_reached_in_clear_text_over_a_network_only_with_leave(
    tmp_path: Path, url: str, in_clear: bool
) -> None:
    config = Config(state_dir=str(tmp_path), nodes=(NodeAddress(url=url),))
    node_secret(config, make=True)
    if in_clear:
        with pytest.raises(ConfigError, match="node_http_allowed"):
            other_nodes(config)
    else:
        other_nodes(config)
    allowed = Config(state_dir=str(tmp_path), nodes=(NodeAddress(url=url),), node_http_allowed=True)
    assert [node.name for node in other_nodes(allowed)] == [url]


async def test_each_node_may_have_a_secret_of_its_own(tmp_path: Path) -> None:
    common, own = b"c" * 40, b"o" * 40
    for name, text in (("common", common), ("own", own)):
        path = tmp_path / name
        path.write_bytes(text + b"\n")
        path.chmod(0o600)
    urls = {}
    async with contextlib.AsyncExitStack() as doors:
        for node_id, secret in (("saaa", common), ("saab", own)):
            node = FakeNode(node_id=node_id)
            app = NodeApp(node, node_id, secret, tmp_path)
            door = bind_unix(tmp_path / f"{node_id}.sock")
            await doors.enter_async_context(listening(app, door))
            urls[node_id] = f"unix:{tmp_path}/{node_id}.sock"
        config = Config(
            state_dir=str(tmp_path),
            node_secret_file=str(tmp_path / "common"),
            nodes=(
                NodeAddress(url=urls["saaa"]),
                NodeAddress(url=urls["saab"], secret_file=str(tmp_path / "own")),
                NodeAddress(url=urls["saab"], name="wrong"),
            ),
        )
        one, other, wrong = (source.client for source in other_nodes(config))
        assert (await one.info()).node_id == "saaa"
        assert (await other.info()).node_id == "saab"
        with pytest.raises(NodeUnavailable, match="secret"):
            await wrong.info()
        for client in (one, other, wrong):
            assert isinstance(client, HttpNode)
            await client.close()


@pytest.mark.parametrize(
    ("text", "mode", "match"),
    [("short", 0o600, "less than"), ("x" * 40, 0o640, "others may read"), (None, 0, "cannot read")],
)
def test_a_nodes_own_secret_that_is_none_is_refused(
    tmp_path: Path, text: str | None, mode: int, match: str
) -> None:
    path = tmp_path / "own"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    node = NodeAddress(url="unix:/run/node.sock", secret_file=str(path))
    # There is no common one, and none is needed.
    with pytest.raises(ConfigError, match=f"node.sock: secret_file: .*{match}"):
        other_nodes(Config(state_dir=str(tmp_path), nodes=(node,)))


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ('role = "node"', "needs node_listen"),
        ('role = "gateway"', "at least one"),
        ('role = "node"\nnode_listen = "unix:/x"\n[[nodes]]\nurl = "unix:/y"', "only a gateway"),
        ('role = "queen"', "role"),
        ('node_tls_cert = "/x"', "set together"),
        ("[[nodes]]\nurl = 5\nmore = 1", "nodes"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tmp_path: Path, lines: str, match: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=match):
        load_config(path, environ={})


def test_nodes_are_named_in_the_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('role = "gateway"\n[[nodes]]\nurl = "http://[::1]:7301"\nname = "six"\n')
    config = load_config(path, environ={})
    assert config.nodes == (NodeAddress(url="http://[::1]:7301", name="six"),)
    config = load_config(path, environ={"OPENDSEC_NODES": '[{"url": "unix:/run/n.sock"}]'})
    assert config.nodes == (NodeAddress(url="unix:/run/n.sock"),)
