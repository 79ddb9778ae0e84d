# SPDX-License-Identifier: AGPL-3.0-only
"""Where our programs are looked for, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec_server.binaries import find_binary
from opendsec_server.config import ConfigError


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_setting_beats_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = program(tmp_path, "one"), program(tmp_path, "two")
    monkeypatch.setenv("OPENDSEC_X", str(two))
    assert find_binary("x", str(one), "OPENDSEC_X") == one
    assert find_binary("x", None, "OPENDSEC_X") == two


def test_found_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = program(tmp_path, "opendsec-nowhere-else")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary("opendsec-nowhere-else", None, "OPENDSEC_X") == found


def test_a_named_file_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(ConfigError, match="not executable"):
        find_binary("x", str(plain), "OPENDSEC_X")


def test_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="pip install opendsec-nothing"):
        find_binary("opendsec-nothing", None, "OPENDSEC_X")
