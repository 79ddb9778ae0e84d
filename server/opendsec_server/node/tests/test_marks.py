# SPDX-License-Identifier: AGPL-3.0-only
"""What operators say of a node is kept; what its machine says is read right."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec_server.contract.errors import InvalidRequest
from opendsec_server.node.load import MachineLoad
from opendsec_server.node.marks import KeptMarks, Marks


def test_marks_are_kept_and_changed_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "marks.json"
    kept = KeptMarks(path)
    assert kept.now == Marks()
    kept.set(labels={"zone": "a"}, draining=None)
    kept.set(labels=None, draining=True)
    assert KeptMarks(path).now == Marks(labels={"zone": "a"}, draining=True)
    assert path.stat().st_mode & 0o777 == 0o600
    for labels in ({"": "x"}, {"x" * 200: "y"}, {"x": "y" * 200}):
        with pytest.raises(InvalidRequest):
            kept.set(labels=labels, draining=False)
    with pytest.raises(InvalidRequest):
        kept.set(labels={str(n): "" for n in range(65)}, draining=False)
    assert KeptMarks(path).now == Marks(labels={"zone": "a"}, draining=True)


@pytest.mark.parametrize("content", [b"", b"junk", b'{"labels": 5}', b'{"draining": "no"}'])
def test_marks_that_cannot_be_read_are_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "marks.json"
    path.write_bytes(content)
    assert KeptMarks(path).now == Marks()


def test_the_load_is_what_was_busy_between_two_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    clock = [0.0]
    monkeypatch.setattr("opendsec_server.node.load.time.monotonic", lambda: clock[0])
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    load = MachineLoad(stat)
    assert load.now().cpu_used == 0.0
    stat.write_text("cpu  150 0 125 1025 0 0 0 0 0 0\n")
    clock[0] = 0.5
    assert load.now().cpu_used == 0.0  # too soon
    clock[0] = 2.0
    assert load.now().cpu_used == pytest.approx(0.25)
    # Counters that went back (a container's view) say nothing.
    stat.write_text("cpu  1 0 1 1 0 0 0 0 0 0\n")
    clock[0] = 4.0
    assert load.now().cpu_used == pytest.approx(0.25)
    assert (load.now().memory_available_bytes or 0) > 0
