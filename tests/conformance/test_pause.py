# SPDX-License-Identifier: AGPL-3.0-only
"""Pause and resume."""

from __future__ import annotations

import pytest

from opendsec import (
    AlreadyPaused,
    ConnectionFailed,
    InvalidRequest,
    OpendsecError,
    ProcessNotFound,
    SandboxPaused,
    StateConflict,
)

from . import outside as far
from .kit import TICKER, Bench, Maker, at_once, ticks, until
from .outside import TALKER, Outside

PAUSE_LOOPS = 20


def test_a_full_pause_keeps_processes_and_files(make: Maker) -> None:
    one = make()
    process = one.spawn(TICKER, tag="ticker")
    process.disconnect()
    until(lambda: one.files.exists("/tmp/ticks"), "no tick")
    one.files.write("kept.txt", "kept")
    before = ticks(one)
    report = one.pause("full")
    assert report.sandbox.state == "paused" and one.info().end_at is None
    one.resume()
    assert one.files.read_text("kept.txt") == "kept"
    assert [info.pid for info in one.processes()] == [process.pid]
    until(lambda: ticks(one) > before, "the process stands still")
    again = one.attach("ticker")
    again.kill()
    assert again.wait().exit_code == 137


def test_a_full_pause_keeps_what_is_in_memory_only(make: Maker) -> None:
    one = make()
    one.exec("echo in memory > /dev/shm/kept; mkdir -p /run/x && echo y > /run/x/y", user="root")
    one.pause("full")
    one.resume()
    kept = one.exec("cat /dev/shm/kept /run/x/y", user="root")
    assert kept.stdout == "in memory\ny\n", kept


def test_a_full_pause_keeps_open_terminals(make: Maker) -> None:
    one = make()
    terminal = one.pty(cols=90, rows=30)
    terminal.write("WORD=remembered; echo re''ady\n")
    for event in terminal:
        if b"ready" in event.data:
            break
    terminal.disconnect()
    one.pause("full")
    one.resume()
    again = one.attach(terminal.pid)
    again.write("echo $WORD; stty size; exit 3\n")
    result = again.wait()
    assert "remembered" in result.stdout and "30 90" in result.stdout
    assert result.exit_code == 3


def test_a_filesystem_pause_keeps_files_only(make: Maker) -> None:
    one = make()
    process = one.spawn("sleep 600")
    process.disconnect()
    one.files.write("kept.txt", "kept")
    one.files.write("/etc/kept.conf", "root's", user="root")
    one.exec("echo x > /dev/shm/gone")
    one.pause("filesystem")
    one.resume()
    assert one.files.read_text("kept.txt") == "kept"
    assert one.files.read_text("/etc/kept.conf") == "root's"
    assert not one.files.exists("/dev/shm/gone")
    assert one.processes() == []
    with pytest.raises(ProcessNotFound):
        one.attach(process.pid)


def test_a_reboot_forgets_the_kept_memory(make: Maker) -> None:
    one = make()
    one.spawn("sleep 600").disconnect()
    one.files.write("kept.txt", "kept")
    one.exec("sync", check=True)  # as after a power cut, only this makes sure of it
    one.pause("full")
    one.resume(reboot=True)
    assert one.processes() == []
    assert one.files.read_text("kept.txt") == "kept"


def test_twenty_pauses_lose_nothing(make: Maker) -> None:
    one = make()
    process = one.spawn(TICKER)
    process.disconnect()
    until(lambda: one.files.exists("/tmp/ticks"), "no tick")
    last = ticks(one)
    for number in range(PAUSE_LOOPS):
        one.exec(f"echo {number} >> log.txt", check=True)
        one.pause("full")
        one.resume()
        now = ticks(one)
        assert now >= last, "the process went back in time"
        last = now
    assert one.files.read_text("log.txt").split() == [str(n) for n in range(PAUSE_LOOPS)]
    assert [info.pid for info in one.processes()] == [process.pid]
    until(lambda: ticks(one) > last, "the process stands still")


def test_files_survive_alternating_pauses(make: Maker) -> None:
    one = make()
    for number, mode in enumerate(["filesystem", "full", "full", "filesystem"]):
        one.files.write(f"of-{number}.txt", str(number))
        one.pause(mode)  # type: ignore[arg-type]
        one.resume()
        for older in range(number + 1):
            assert one.files.read_text(f"of-{older}.txt") == str(older)


def test_a_pause_frees_memory_and_says_how_much(make: Maker) -> None:
    one = make()
    one.exec("head -c 60000000 /dev/urandom > big; sync; cat big > /dev/null", check=True)
    report = one.pause("full")
    assert report.memory_before_bytes >= 60_000_000
    assert report.memory_freed_bytes >= 40_000_000, report
    assert report.took_s > 0
    one.resume()
    assert one.files.stat("big").size_bytes == 60_000_000


def test_a_pause_stores_only_what_is_not_zero(bench: Bench, make: Maker) -> None:
    one = make()
    first = one.pause("full")
    if not bench.can.pause_survives_reboot:
        assert first.stored_bytes == 0, "kept in place"
        return
    assert 0 < first.stored_bytes < one.record.memory_mb * 1024 * 1024
    one.resume()
    assert one.pause("filesystem").stored_bytes == 0


def test_a_paused_sandbox_answers_with_a_typed_error(make: Maker) -> None:
    one = make()
    one.pause("full")
    with pytest.raises(SandboxPaused) as caught:
        one.exec("true")
    assert caught.value.fault == "user" and caught.value.remediation
    assert one.is_running() is False
    with pytest.raises(StateConflict):
        one.set_timeout(100)
    assert one.info().state == "paused"


def test_a_stream_under_a_pause_waits_or_ends_with_a_typed_error(make: Maker) -> None:
    one = make()
    process = one.spawn("for i in $(seq 20); do echo $i; sleep 0.2; done")
    for event in process:
        if event.data:
            break
    one.pause("full")
    one.resume()
    try:
        result = process.wait()
    except (SandboxPaused, ConnectionFailed) as exc:  # which depends on when it was read
        assert exc.pid == process.pid
        result = one.attach(process.pid).wait()
        assert result.exit_code == 0
    else:
        assert result.stdout.split() == [str(i) for i in range(1, 21)]


def test_a_second_pause_is_typed(make: Maker) -> None:
    one = make()
    one.pause("filesystem")
    for mode in ("full", "filesystem"):
        with pytest.raises(AlreadyPaused) as caught:
            one.pause(mode)
        assert caught.value.fault == "user" and not caught.value.retryable


def test_pauses_at_once_share_one(make: Maker) -> None:
    one = make()
    answers = at_once([one.pause for _ in range(4)])
    for answer in answers:
        assert not isinstance(answer, OpendsecError) or isinstance(answer, AlreadyPaused), answers
    assert sum(not isinstance(answer, OpendsecError) for answer in answers) >= 1
    states = [transition.to for transition in one.transitions()]
    assert states.count("paused") == 1


def test_resumes_at_once_share_one(make: Maker) -> None:
    one = make()
    one.pause("full")
    answers = at_once([one.resume for _ in range(4)])
    assert [getattr(answer, "state", answer) for answer in answers] == ["running"] * 4
    states = [transition.to for transition in one.transitions()]
    assert states.count("resuming") == 1
    assert one.exec("echo up").stdout == "up\n"


def test_connecting_resumes(bench: Bench, make: Maker) -> None:
    one = make()
    one.pause("full")
    again = bench.client.connect(one.sandbox_id, timeout_s=700)
    assert again.record.state == "running"
    assert again.exec("echo up").stdout == "up\n"


def test_resuming_sets_a_new_end(make: Maker) -> None:
    one = make()
    one.pause("full")
    assert one.info().end_at is None
    first = one.resume(timeout_s=900)
    assert first.end_at is not None
    one.pause("full")
    second = one.resume(timeout_s=100)
    assert second.end_at is not None and second.end_at < first.end_at


def test_an_unknown_pause_mode_is_typed(bench: Bench, make: Maker) -> None:
    one = make()
    with pytest.raises(InvalidRequest):
        one.pause("memory")  # type: ignore[arg-type]
    assert one.info().state == "running"


def test_no_connection_hangs_after_a_resume(
    bench: Bench, make: Maker, outside: Outside | None
) -> None:
    bench.own_machine()
    one = make()
    process = one.spawn(["python3", "-ISc", TALKER, one.sandbox_id], stdin=True)
    for event in process:
        if b"echo first" in event.data:
            break
    process.disconnect()
    one.pause("full")
    one.resume()
    again = one.attach(process.pid)
    again.write_stdin("go on\n")
    result = again.wait()
    assert result.exit_code == 0, "it hung, or failed otherwise"
    assert result.stdout.split()[-1] in ("answered", "reset", "closed"), result.stdout
    if not bench.can.pause_survives_reboot:
        assert result.stdout.split()[-1] == "answered", "kept in place, so it lives"


def test_a_new_connection_works_after_a_resume(
    bench: Bench, make: Maker, outside: Outside | None
) -> None:
    bench.own_machine()
    one = make()
    for mode in ("full", "filesystem"):
        one.pause(mode)
        one.resume()
        talk = f"exec 3<>/dev/tcp/{far.PUBLIC}/{far.PORT}; echo {mode} >&3; head -1 <&3"
        assert one.exec(["timeout", "30", "bash", "-c", talk]).stdout == f"echo {mode}\n"
