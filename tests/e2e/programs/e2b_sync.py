# SPDX-License-Identifier: Apache-2.0
"""What a user's synchronous E2B program does, step by step. Prints one JSON line of results.

Knows nothing of our code: only the published ``e2b`` package and the E2B_* variables.
"""

import contextlib
import json
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
import uuid

import e2b
from e2b import (
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

results = {"client": f"e2b {getattr(e2b, '__version__', '?')}", "passed": [], "failed": {}}
TAG = uuid.uuid4().hex[:8]


def step(function):
    """Run one step; note whether it passed."""
    try:
        function()
        results["passed"].append(function.__name__)
    except Exception:
        results["failed"][function.__name__] = traceback.format_exc()
    return function


sandbox = Sandbox.create(timeout=120, metadata={"tag": TAG, "a b": "c&d"}, envs={"GREETING": "hi"})


@step
def run_a_command():
    out = sandbox.commands.run("echo hello; echo oops >&2")
    assert (out.stdout, out.stderr, out.exit_code) == ("hello\n", "oops\n", 0)


@step
def exit_code_of_a_failing_command():
    try:
        sandbox.commands.run("exit 7")
    except CommandExitException as exc:
        assert exc.exit_code == 7
    else:
        raise AssertionError("no CommandExitException")


@step
def streams_output_while_running():
    seen = []
    sandbox.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.1; done",
        on_stdout=lambda data: seen.append((time.monotonic(), data)),
    )
    assert "".join(data for _, data in seen).split() == ["1", "2", "3"]
    assert seen[-1][0] > seen[0][0]


@step
def environment_and_working_directory():
    out = sandbox.commands.run(
        "echo $GREETING $OWN $E2B_SANDBOX; pwd", envs={"OWN": "x"}, cwd="/tmp"
    )
    assert out.stdout == "hi x true\n/tmp\n"


@step
def users():
    assert sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert sandbox.commands.run("sudo -n id -u").stdout == "0\n"


@step
def runs_real_programs():
    out = sandbox.commands.run("python3 -c 'import json,ssl,sqlite3; print(json.dumps([1,2]))'")
    assert out.stdout == "[1, 2]\n"
    assert sandbox.commands.run("git --version").exit_code == 0
    assert sandbox.commands.run("curl --version").exit_code == 0


@step
def stdin():
    command = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(command.pid, "typed\n")
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout == "typed\n"


@step
def background_command_and_kill():
    command = sandbox.commands.run("sleep 300", background=True)
    assert command.pid in [process.pid for process in sandbox.commands.list()]
    assert command.kill() is True
    with contextlib.suppress(CommandExitException):
        command.wait()
    assert sandbox.commands.kill(command.pid) is False


@step
def connect_to_a_running_command():
    command = sandbox.commands.run("sleep 0.5; echo late", background=True)
    command.disconnect()
    again = sandbox.commands.connect(command.pid)
    assert again.wait().stdout == "late\n"


@step
def a_child_that_keeps_the_pipe_open_does_not_hang():
    started = time.monotonic()
    out = sandbox.commands.run("sleep 60 & echo done", timeout=30)
    assert out.stdout == "done\n"
    assert time.monotonic() - started < 20


@step
def timeout_kills_the_command():
    try:
        sandbox.commands.run("sleep 55.5", timeout=1)
    except TimeoutException:
        pass
    else:
        raise AssertionError("no TimeoutException")
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if sandbox.commands.run("pgrep -f 'sleep 55.5' | grep -v $$ || true").stdout == "":
            return
        time.sleep(0.2)
    raise AssertionError("the process still runs")


@step
def pty():
    screen = []
    terminal = sandbox.pty.create(size=e2b.PtySize(rows=24, cols=80), timeout=30)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo mark$((40+2)); exit\n")
    for _, _, data in terminal:
        if data:
            screen.append(data)
    text = b"".join(screen)
    assert b"24 80" in text and b"mark42" in text, text


@step
def files_write_read_list_remove():
    sandbox.files.write("notes/a.txt", "text")
    sandbox.files.write("notes/b.bin", b"\x00\xff")
    assert sandbox.files.read("notes/a.txt") == "text"
    assert bytes(sandbox.files.read("notes/b.bin", format="bytes")) == b"\x00\xff"
    assert [entry.name for entry in sandbox.files.list("notes")] == ["a.txt", "b.bin"]
    info = sandbox.files.get_info("notes/a.txt")
    assert (info.size, info.owner, info.permissions) == (4, "user", "-rw-r--r--")
    sandbox.files.rename("notes/a.txt", "notes/c.txt")
    assert sandbox.files.exists("notes/c.txt") and not sandbox.files.exists("notes/a.txt")
    assert sandbox.files.make_dir("notes/sub") is True
    assert sandbox.files.make_dir("notes/sub") is False
    sandbox.files.remove("notes")
    assert not sandbox.files.exists("notes")


@step
def many_files_and_odd_names():
    names = ["ünï.txt", "with space.txt", "a+b&c=d.txt", "x/y/z.txt"]
    sandbox.files.write_files([{"path": f"odd/{name}", "data": name} for name in names])
    for name in names:
        assert sandbox.files.read(f"odd/{name}") == name


@step
def a_large_file():
    blob = bytes(range(256)) * 4096 * 8
    sandbox.files.write("large.bin", blob)
    assert bytes(sandbox.files.read("large.bin", format="bytes")) == blob
    total = sum(len(chunk) for chunk in sandbox.files.read("large.bin", format="stream"))
    assert total == len(blob)


@step
def missing_file():
    try:
        sandbox.files.read("/nope")
    except NotFoundException:
        return
    raise AssertionError("no NotFoundException")


@step
def watch_a_directory():
    sandbox.files.make_dir("watched")
    watcher = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/new.txt", "x")
    events = []
    until = time.monotonic() + 10
    while time.monotonic() < until and len(events) < 3:
        events += watcher.get_new_events()
        time.sleep(0.05)
    watcher.stop()
    assert [event.name for event in events[:3]] == ["new.txt"] * 3, events
    assert [event.type.value for event in events[:3]] == ["create", "chmod", "write"], events


@step
def signed_urls():
    upload = sandbox.upload_url("signed.txt", use_signature_expiration=60)
    boundary = "frontier"
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n'
        f"Content-Type: text/plain\r\n\r\nby url\r\n--{boundary}--\r\n"
    ).encode()
    request = urllib.request.Request(
        upload,
        data=body,
        headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(sandbox.download_url("signed.txt"), timeout=20) as answer:
        assert answer.read() == b"by url"
    try:
        urllib.request.urlopen(sandbox.download_url("signed.txt") + "x", timeout=20)
    except urllib.error.HTTPError as exc:
        assert exc.code in (401, 502), exc.code
    else:
        raise AssertionError("a wrong signature was accepted")


@step
def info_and_list():
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"tag": TAG, "a b": "c&d"}
    assert info.state == SandboxState.RUNNING
    paginator = Sandbox.list(query=SandboxQuery(metadata={"tag": TAG, "a b": "c&d"}))
    assert [found.sandbox_id for found in paginator.next_items()] == [sandbox.sandbox_id]
    assert Sandbox.list(query=SandboxQuery(metadata={"tag": "other"})).next_items() == []


@step
def timeouts():
    before = sandbox.get_info().end_at
    sandbox.set_timeout(600)
    assert (sandbox.get_info().end_at - before).total_seconds() > 300
    sandbox.set_timeout(120)


@step
def connect_from_elsewhere():
    other = Sandbox.connect(sandbox.sandbox_id)
    sandbox.files.write("shared.txt", "seen")
    assert other.files.read("shared.txt") == "seen"
    assert other.is_running()


@step
def metrics():
    until = time.monotonic() + 20
    while time.monotonic() < until:
        samples = sandbox.get_metrics()
        if samples:
            assert samples[0].mem_total > 0 and samples[0].cpu_count >= 1
            return
        time.sleep(0.5)
    raise AssertionError("no metrics within 20 s")


@step
def many_commands_at_once():
    answers = {}

    def one(number):
        answers[number] = sandbox.commands.run(f"echo {number}").stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: f"{number}\n" for number in range(20)}


@step
def kill():
    assert sandbox.kill() is True
    assert sandbox.is_running() is False
    assert Sandbox.kill(sandbox.sandbox_id) is False
    try:
        sandbox.commands.run("true")
    except (TimeoutException, e2b.SandboxException):
        return
    raise AssertionError("a command ran in a killed sandbox")


print(json.dumps(results))
sys.exit(bool(results["failed"]))
