# SPDX-License-Identifier: AGPL-3.0-only
"""Settings of several nodes, and the secret that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec_server.config import Config, ConfigError, NodeAddress, load_config
from opendsec_server.daemon.cluster import node_secret, other_nodes


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
