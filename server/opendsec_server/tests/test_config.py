# SPDX-License-Identifier: AGPL-3.0-only
"""Settings: what is read, what overrides what, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec_server.config import ConfigError, load_config


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, 'listen = "127.0.0.1:1"\nslots_ready = 3\n')
    config = load_config(path, environ={"OPENDSEC_LISTEN": "127.0.0.1:2"})
    assert (config.listen, config.slots_ready, config.instance) == ("127.0.0.1:2", 3, "od")


def test_lists_come_from_the_environment_comma_separated(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""), environ={"OPENDSEC_DNS_SERVERS": "1.1.1.1,9.9.9.9"})
    assert config.dns_servers == ("1.1.1.1", "9.9.9.9")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("listne = 'x'\n", "listne"),
        ("slots_ready = 'many'\n", "slots_ready"),
        ("instance = 'much-too-long'\n", "instance"),
        ("tls_cert = '/a'\n", "tls_key"),
        ("this is not toml", "TOML"),
        ('pause_swap = "file"\n', "pause_swap_mb"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(write(tmp_path, text), environ={})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "nope.toml", environ={})
