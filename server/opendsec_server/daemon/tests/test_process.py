# SPDX-License-Identifier: AGPL-3.0-only
"""Pid files name one process, not whatever has its number now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from opendsec_server.daemon.process import (
    ProcessIdentity,
    identity_of,
    is_alive,
    read_identity,
    stop_process,
    write_identity,
)

STUBBORN = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


def test_round_trip(tmp_path: Path) -> None:
    me = identity_of(os.getpid())
    assert me is not None
    write_identity(tmp_path / "pid", me)
    assert read_identity(tmp_path / "pid") == me
    assert (tmp_path / "pid").stat().st_mode & 0o777 == 0o600


def test_a_recycled_pid_is_not_the_same_process(tmp_path: Path) -> None:
    me = identity_of(os.getpid())
    assert me is not None
    other = ProcessIdentity(me.pid, me.start_ticks + 1)
    assert not is_alive(other)
    write_identity(tmp_path / "pid", other)
    assert read_identity(tmp_path / "pid") is None


def test_malformed_or_missing_file(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("garbage")
    assert read_identity(tmp_path / "pid") is None
    assert read_identity(tmp_path / "none") is None


def test_stop_ends_a_process_that_listens() -> None:
    child = subprocess.Popen(["sleep", "60"])
    identity = identity_of(child.pid)
    assert identity is not None
    assert stop_process(identity, grace_s=10) is True
    assert child.wait() == -15


def test_stop_kills_a_process_that_does_not_listen() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        identity = identity_of(child.pid)
        assert identity is not None
        assert stop_process(identity, grace_s=0.2) is False
        assert child.wait() == -9


def test_stop_of_a_foreign_process_with_the_same_pid_does_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identity_of(child.pid)
        assert identity is not None
        assert stop_process(ProcessIdentity(child.pid, identity.start_ticks + 1), grace_s=1)
        assert child.poll() is None
        child.kill()
