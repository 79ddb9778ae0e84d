# SPDX-License-Identifier: AGPL-3.0-only
"""The doctor names what is missing, and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opendsec_server.config import Config
from opendsec_server.ops import checks, doctor
from opendsec_server.ops.kvm_probe import probe_kvm


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path), run_dir=str(tmp_path))


def test_every_check_answers(config: Config) -> None:
    found = doctor.run_checks(config, probe_kvm=False)
    assert len(found) == len(checks.ALL_CHECKS) + 1
    for check in found:
        assert check.detail, check
        assert check.status in ("ok", "skip") or check.remedy, check


def test_a_missing_runtime_is_named_with_its_package(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    check = checks.check_oci_runtime(config)
    assert check.status == "fail"
    assert "apt-get install crun" in check.remedy


def test_missing_image_tools_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    check = checks.check_image_tools()
    assert check.status == "fail"
    assert "mmdebstrap" in check.remedy and "btrfs-progs" in check.remedy


def test_a_network_in_use_is_reported(tmp_path: Path) -> None:
    check = checks.check_network_overlap(Config(network_cidr="127.0.0.0/16"))
    assert check.status == "fail"
    assert "network_cidr" in check.remedy


def test_a_check_that_breaks_is_a_failure(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken(config: Config) -> checks.Check:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "ALL_CHECKS", (check_broken,))
    found = doctor.run_checks(config, probe_kvm=False)[0]
    assert (found.name, found.status) == ("broken", "fail")
    assert "boom" in found.detail


def test_json_report(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_report([checks.Check("x", "fail", "seen", "mend")], as_json=True)
    assert json.loads(capsys.readouterr().out)["checks"][0]["remedy"] == "mend"


def test_kvm_answer_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kvm-probe.json"
    first = probe_kvm(tmp_path, kernel=Path("/nonexistent"), answer_file=kept)
    if not kept.exists():
        pytest.skip(f"nothing was booted here: {first.detail}")
    assert probe_kvm(tmp_path, answer_file=kept) == first
