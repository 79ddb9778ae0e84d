# SPDX-License-Identifier: Apache-2.0
"""Pause, connect, fork and snapshot, as a user's synchronous E2B program does them.

Prints one JSON line of results. Knows nothing of our code: only the published ``e2b`` package and
the E2B_* variables. An argument ``full`` says that forks and snapshots hold memory.
"""

import inspect
import json
import sys
import time
import traceback
import uuid

import e2b
from e2b import NotFoundException, Sandbox, SandboxQuery, SandboxState

FULL = "full" in sys.argv[1:]
TAG = uuid.uuid4().hex[:8]
results = {"client": f"e2b {getattr(e2b, '__version__', '?')}", "passed": [], "failed": {}}
# Both spellings exist in the newest release; the older one has only keep_memory.
DISK_ONLY = (
    {"mode": "filesystem"}
    if "mode" in inspect.signature(Sandbox.pause).parameters
    else {"keep_memory": False}
)
DISK_ONLY_ACTION = {"action": "pause", **DISK_ONLY}


def step(function):
    """Run one step; note whether it passed."""
    try:
        function()
        results["passed"].append(function.__name__)
    except Exception:
        results["failed"][function.__name__] = traceback.format_exc()
    return function


def until(condition, what):
    """Wait, bounded."""
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


sandbox = Sandbox.create(timeout=600, metadata={"tag": TAG}, envs={"GREETING": "hi"})


@step
def pause_and_connect_keep_processes_and_files():
    command = sandbox.commands.run("sleep 500", background=True)
    sandbox.files.write("kept.txt", "kept")
    assert sandbox.pause() is True
    assert sandbox.get_info().state == SandboxState.PAUSED
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.get_info().state == SandboxState.RUNNING
    assert again.files.read("kept.txt") == "kept"
    assert command.pid in [process.pid for process in again.commands.list()]
    assert again.commands.run("echo $GREETING").stdout == "hi\n"


@step
def the_old_object_works_after_a_resume():
    sandbox.pause()
    sandbox.connect()
    assert sandbox.commands.run("cat kept.txt").stdout == "kept"
    assert sandbox.is_running()


@step
def a_second_pause_says_false():
    assert sandbox.pause() is True
    assert sandbox.pause() is False
    assert Sandbox.pause(sandbox.sandbox_id) is False
    assert sandbox.is_running() is False
    sandbox.connect()


@step
def pause_of_a_missing_sandbox():
    try:
        Sandbox.pause("i0000000000000000000")
    except NotFoundException:
        return
    raise AssertionError("no NotFoundException")


@step
def paused_ones_are_listed():
    sandbox.pause()
    query = {"metadata": {"tag": TAG}}
    paused = Sandbox.list(query=SandboxQuery(**query, state=[SandboxState.PAUSED])).next_items()
    assert [found.sandbox_id for found in paused] == [sandbox.sandbox_id]
    assert paused[0].state == SandboxState.PAUSED
    running = Sandbox.list(query=SandboxQuery(**query, state=[SandboxState.RUNNING])).next_items()
    assert running == []
    assert len(Sandbox.list(query=SandboxQuery(**query)).next_items()) == 1
    sandbox.connect()


@step
def a_filesystem_pause_keeps_files_only():
    command = sandbox.commands.run("sleep 501", background=True)
    assert sandbox.pause(**DISK_ONLY) is True
    sandbox.connect()
    assert sandbox.files.read("kept.txt") == "kept"
    assert command.pid not in [process.pid for process in sandbox.commands.list()]


@step
def connect_sets_a_longer_timeout_only():
    sandbox.connect(timeout=1200)
    before = sandbox.get_info().end_at
    sandbox.connect(timeout=30)
    assert sandbox.get_info().end_at == before


@step
def a_reboot_on_resume():
    if "on_resume" not in inspect.signature(Sandbox.connect).parameters:
        return
    command = sandbox.commands.run("sleep 502", background=True)
    sandbox.pause()
    sandbox.connect(on_resume="reboot")
    assert command.pid not in [process.pid for process in sandbox.commands.list()]
    assert sandbox.files.read("kept.txt") == "kept"


@step
def pause_at_the_end_of_its_time():
    one = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause"})
    lifecycle = one.get_info().lifecycle
    assert lifecycle["on_timeout"] == "pause" and lifecycle["auto_resume"] is False, lifecycle
    one.files.write("kept.txt", "kept")
    one.set_timeout(0)
    until(lambda: one.get_info().state == SandboxState.PAUSED, "not paused")
    one.connect()
    assert one.files.read("kept.txt") == "kept"
    one.kill()


@step
def pause_at_the_end_of_its_time_without_memory():
    one = Sandbox.create(timeout=600, lifecycle={"on_timeout": DISK_ONLY_ACTION})
    one.commands.run("sleep 503", background=True)
    one.set_timeout(0)
    until(lambda: one.get_info().state == SandboxState.PAUSED, "not paused")
    one.connect()
    assert one.commands.list() == []
    one.kill()


@step
def automatic_resume_by_a_command():
    one = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    assert one.get_info().lifecycle["auto_resume"] is True
    one.pause()
    assert one.commands.run("echo woken").stdout == "woken\n"
    assert one.get_info().state == SandboxState.RUNNING
    one.pause()
    assert one.files.exists("nothing.txt") is False
    one.kill()


@step
def a_paused_sandbox_is_not_running():
    one = Sandbox.create(timeout=600)
    one.pause()
    try:
        one.commands.run("true")
    except (e2b.TimeoutException, e2b.SandboxException):
        pass
    else:
        raise AssertionError("a command ran in a paused sandbox")
    assert one.kill() is True
    assert Sandbox.kill(one.sandbox_id) is False


@step
def fork_gives_children_with_own_lives():
    sandbox.files.write("then.txt", "then")
    ticker = sandbox.commands.run("sleep 504", background=True)
    children = sandbox.fork(count=2, timeout=300)
    assert len(children) == 2
    for child in children:
        assert isinstance(child, Sandbox), child
        assert child.sandbox_id != sandbox.sandbox_id
        assert child.files.read("then.txt") == "then"
        pids = [process.pid for process in child.commands.list()]
        assert (ticker.pid in pids) == FULL, pids
        child.files.write("own.txt", child.sandbox_id)
    assert not sandbox.files.exists("own.txt")
    assert ticker.pid in [process.pid for process in sandbox.commands.list()]
    assert len({child.commands.run("hostname").stdout for child in children}) == 2
    for child in children:
        assert child.kill() is True


@step
def fork_by_id():
    (child,) = Sandbox.fork(sandbox.sandbox_id)
    assert isinstance(child, Sandbox), child
    assert child.commands.run("echo child").stdout == "child\n"
    child.kill()


@step
def fork_of_a_missing_sandbox():
    try:
        Sandbox.fork("i0000000000000000000")
    except NotFoundException:
        return
    raise AssertionError("no NotFoundException")


@step
def a_snapshot_is_a_template():
    sandbox.files.write("then.txt", "then")
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("then.txt", "changed")
    child = Sandbox.create(snapshot.snapshot_id, timeout=300)
    assert child.files.read("then.txt") == "then"
    assert sandbox.is_running()
    listed = Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id).next_items()
    assert snapshot.snapshot_id in [found.snapshot_id for found in listed]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is False
    assert child.files.read("then.txt") == "then"
    child.kill()
    try:
        Sandbox.create(snapshot.snapshot_id)
    except e2b.SandboxException:
        return
    raise AssertionError("a deleted snapshot made a sandbox")


@step
def a_named_snapshot():
    snapshot = sandbox.create_snapshot(name=f"n-{TAG}")
    assert any(f"n-{TAG}" in name for name in snapshot.names), snapshot
    assert f"n-{TAG}" in snapshot.snapshot_id
    listed = Sandbox.list_snapshots(name=f"n-{TAG}").next_items()
    assert [found.snapshot_id for found in listed] == [snapshot.snapshot_id]
    for name in (snapshot.snapshot_id, f"n-{TAG}"):
        child = Sandbox.create(name, timeout=300)
        assert child.files.exists("then.txt")
        child.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True


@step
def kill_of_a_paused_sandbox():
    sandbox.pause()
    assert sandbox.kill() is True
    assert Sandbox.kill(sandbox.sandbox_id) is False
    try:
        Sandbox.connect(sandbox.sandbox_id)
    except e2b.SandboxException:
        return
    raise AssertionError("connected to a killed sandbox")


print(json.dumps(results))
sys.exit(bool(results["failed"]))
