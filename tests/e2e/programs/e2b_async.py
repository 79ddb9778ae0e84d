# SPDX-License-Identifier: Apache-2.0
"""What a user's asynchronous E2B program does. Prints one JSON line of results."""

import asyncio
import json
import sys
import time
import traceback
import uuid

import e2b
from e2b import AsyncSandbox, CommandExitException, SandboxQuery, TimeoutException

results = {"client": f"e2b {getattr(e2b, '__version__', '?')} async", "passed": [], "failed": {}}
TAG = uuid.uuid4().hex[:8]
STEPS = []


def step(function):
    """Note a step, to be run in order."""
    STEPS.append(function)
    return function


@step
async def run_and_stream(sandbox):
    seen = []
    out = await sandbox.commands.run("echo a; sleep 0.2; echo b >&2; exit 0", on_stdout=seen.append)
    assert out.stdout == "a\n" and out.stderr == "b\n"
    assert "".join(seen) == "a\n"


@step
async def exit_code(sandbox):
    try:
        await sandbox.commands.run("exit 3")
    except CommandExitException as exc:
        assert exc.exit_code == 3
        return
    raise AssertionError("no CommandExitException")


@step
async def fifty_commands_at_once(sandbox):
    outs = await asyncio.gather(*(sandbox.commands.run(f"echo {i}") for i in range(50)))
    assert [out.stdout for out in outs] == [f"{i}\n" for i in range(50)]


@step
async def background_stdin(sandbox):
    command = await sandbox.commands.run("cat", background=True, stdin=True)
    await sandbox.commands.send_stdin(command.pid, "x\n")
    await sandbox.commands.close_stdin(command.pid)
    assert (await command.wait()).stdout == "x\n"


@step
async def timeout(sandbox):
    try:
        await sandbox.commands.run("sleep 30", timeout=1)
    except TimeoutException:
        return
    raise AssertionError("no TimeoutException")


@step
async def pty(sandbox):
    seen = bytearray()
    terminal = await sandbox.pty.create(
        size=e2b.PtySize(rows=30, cols=100), on_data=seen.extend, timeout=30
    )
    await sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=31, cols=101))
    await sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await terminal.wait()
    assert b"31 101" in seen, bytes(seen)


@step
async def files(sandbox):
    await sandbox.files.write("dir/x.txt", "hello")
    assert await sandbox.files.read("dir/x.txt") == "hello"
    assert [entry.name for entry in await sandbox.files.list("dir")] == ["x.txt"]
    stream = await sandbox.files.read("dir/x.txt", format="stream")
    assert b"".join([bytes(chunk) async for chunk in stream]) == b"hello"
    await sandbox.files.remove("dir")
    assert not await sandbox.files.exists("dir")


@step
async def watch(sandbox):
    await sandbox.files.make_dir("seen")
    events = []
    handle = await sandbox.files.watch_dir("seen", on_event=events.append, recursive=True)
    await sandbox.files.write("seen/f.txt", "1")
    await sandbox.files.make_dir("seen/deep")
    await sandbox.files.write("seen/deep/g.txt", "2")
    until = time.monotonic() + 10
    while time.monotonic() < until and not any(e.name == "deep/g.txt" for e in events):
        await asyncio.sleep(0.05)
    await handle.stop()
    assert any(event.name == "deep/g.txt" for event in events), events


@step
async def listed(sandbox):
    found = await AsyncSandbox.list(query=SandboxQuery(metadata={"tag": TAG})).next_items()
    assert [entry.sandbox_id for entry in found] == [sandbox.sandbox_id]


@step
async def connected(sandbox):
    other = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert (await other.commands.run("echo same")).stdout == "same\n"


@step
async def killed_while_streaming(sandbox):
    command = await sandbox.commands.run("sleep 60", background=True)
    await sandbox.kill()
    try:
        await asyncio.wait_for(command.wait(), 20)
    except TimeoutError:
        raise AssertionError("the stream hung after kill") from None
    except Exception:
        pass
    else:
        raise AssertionError("a killed sandbox's command ended with success")
    assert await sandbox.is_running() is False


async def main():
    """Run the steps on one sandbox."""
    sandbox = await AsyncSandbox.create(timeout=120, metadata={"tag": TAG})
    for function in STEPS:
        try:
            await function(sandbox)
            results["passed"].append(function.__name__)
        except Exception:
            results["failed"][function.__name__] = traceback.format_exc()
    several = await asyncio.gather(*(AsyncSandbox.create(timeout=60) for _ in range(8)))
    if len({one.sandbox_id for one in several}) == 8:
        results["passed"].append("eight_creates_at_once")
    await asyncio.gather(*(one.kill() for one in several))
    print(json.dumps(results))
    sys.exit(bool(results["failed"]))


asyncio.run(main())
